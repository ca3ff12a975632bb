//! The device process without its process: a preparing thread, an executor and a ring, over the host device.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use statecopy_descriptors::{Connection, Doorbell, Mapping, SealedMemory};
use statecopy_kernels::device::{Announced, Piece, PieceHandle};
use statecopy_kernels::guard::{Door, ServingGuard};
use statecopy_kernels::host::{HostDevice, HostOptions};
use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::{
    BindingId, DataType, Direction, HandleKind, Incarnation, IndexWidth, Lane, PlanKind, Refusal,
    RefusalCode, RegionId, SessionId, SignatureHash,
};
use statecopy_session::{
    CopyRequest, FlagSource, Identity, IndexSource, Indices, MonotonicNs, Moved, Packed,
    Parameters, Progress, SessionMemory, Spin, Submitter, Waker, layout,
};

use crate::config::{DeviceName, DeviceSettings, Settings};
use crate::counters::{Counter, Counters};
use crate::link::Reply;
use crate::record::{
    LayerRecord, PublishedBinding, RebindRecord, RegistrationRecord, RingInspection, SetRecord,
};

use super::executor::{self, Setup};
use super::preparer::Preparer;

mod graphs;
mod lanes;
mod storm;

const WORKER: SessionId = SessionId(1);
const CACHE: RegionId = RegionId(1);
const PACKED: RegionId = RegionId(2);
const REGION_BYTES: u64 = 1 << 20;
const ROWS: u64 = 5;
/// Elements of one payload: [2, 3, 4].
const PAYLOAD: u64 = 24;

struct Rig {
    preparer: Preparer<HostDevice>,
    ring: Submitter,
    supervisor: Connection,
    link: Arc<Connection>,
    guard: Arc<ServingGuard>,
    counters: Counters,
    cache: Mapping,
    packed: Mapping,
    published: Vec<PublishedBinding>,
}

fn settings() -> DeviceSettings {
    DeviceSettings {
        abort_after_seal: true,
        slots: 8,
        launch_bytes_max: 256,
        selected_max: 64,
        ..Settings::default().device(DeviceName::Host)
    }
}

fn memory() -> (OwnedFd, Mapping) {
    let memory = SealedMemory::create("statecopy-test", REGION_BYTES).unwrap();
    (memory.try_clone_fd().unwrap(), memory.map().unwrap())
}

fn import(
    preparer: &mut Preparer<HostDevice>,
    session: SessionId,
    region: RegionId,
    descriptor: OwnedFd,
) {
    let announced = Announced { kind: HandleKind::Memfd, bytes: REGION_BYTES, pieces: 1 };
    let handle = PieceHandle::Descriptor(descriptor);
    let pieces = vec![Piece { bytes: REGION_BYTES, buffer: 0, handle }];
    preparer.import_part((session, region), announced, pieces, true).unwrap();
}

impl Rig {
    fn new() -> Self {
        let (session, ring, executor_bell) = session_ring(SessionId(0));
        let answers = Doorbell::create().unwrap();
        let (sealed, counters) = Counters::create().unwrap();
        let guard = Arc::new(ServingGuard::new(true));
        let device = Arc::new(HostDevice::open(HostOptions::new(Arc::clone(&guard))).unwrap());
        let (link, supervisor) = Connection::pair().unwrap();
        let link = Arc::new(link);
        let setup = Setup {
            ring: session.executor(Waker::Doorbell(answers)),
            bell: executor_bell,
            counters: Counters::open(&sealed).unwrap(),
            guard: Arc::clone(&guard),
            link: Arc::clone(&link),
            settings: settings(),
        };
        let launch_bytes_max = setup.settings.launch_bytes_max;
        let executor = executor::start(&*device, setup).unwrap();
        let mut preparer = Preparer::new(device, Arc::clone(&guard), executor, launch_bytes_max);
        let ((cache_fd, cache), (packed_fd, packed)) = (memory(), memory());
        import(&mut preparer, WORKER, CACHE, cache_fd);
        import(&mut preparer, WORKER, PACKED, packed_fd);
        let published = Vec::new();
        Self { preparer, ring, supervisor, link, guard, counters, cache, packed, published }
    }

    /// Two FP32 layers side by side in every page, and a set of both.
    fn registered() -> Self {
        let mut rig = Self::new();
        rig.published = rig.register(registration()).unwrap();
        rig
    }

    fn register(&mut self, what: RegistrationRecord) -> Result<Vec<PublishedBinding>, Refusal> {
        self.preparer.register(WORKER, what, &mut |_| {})
    }

    fn gather(&self, binding: u64, indices: &[i32]) -> CopyRequest {
        let published = self.published.iter().find(|it| it.binding.0 == binding);
        let layers = if binding == 3 { 2 } else { 1 };
        CopyRequest {
            session: WORKER,
            binding: BindingId(binding),
            signature: published.map_or(SignatureHash(0), |it| it.signature),
            direction: Direction::Gather,
            selected: indices.len() as u64,
            packed: Packed {
                region: PACKED,
                offset: 0,
                bytes: layers * indices.len() as u64 * PAYLOAD * 4,
                dtype: DataType::Float32.number(),
            },
            indices: Indices { width: IndexWidth::Int32, source: IndexSource::Inline },
            flags: FlagSource::None,
            lane: Lane(0),
            deadline: MonotonicNs::NEVER,
            submitted_at: MonotonicNs::now(),
        }
    }

    fn run(&mut self, request: &CopyRequest, indices: &[i32]) -> Result<Moved, RefusalCode> {
        let bytes: Vec<u8> = indices.iter().flat_map(|index| index.to_ne_bytes()).collect();
        let inline = match request.indices.source {
            IndexSource::Inline => bytes.as_slice(),
            IndexSource::Shared { .. } => &[],
        };
        let sequence = self.ring.try_submit(request, inline, &[]).unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            match self.ring.poll(sequence).unwrap() {
                Progress::Answered(answer) => return answer.result.map_err(|fault| fault.code),
                _ => assert!(Instant::now() < until, "the executor did not answer"),
            }
        }
    }

    fn word(&self, memory: &Mapping, at: u64) -> u32 {
        let mut bytes = [0; 4];
        memory.read(at * 4, &mut bytes).unwrap();
        u32::from_ne_bytes(bytes)
    }

    fn fill_cache(&self) {
        for at in 0..REGION_BYTES / 4 {
            let word = u32::try_from(at).unwrap() ^ 0x5a5a_0000;
            self.cache.write(at * 4, &word.to_ne_bytes()).unwrap();
        }
    }
}

fn layer(binding: u64, name: &str, offset: u64, dtype: DataType) -> LayerRecord {
    let layout = CacheLayout::with_page_stride(dtype, [ROWS, 2, 3, 4], 3 * PAYLOAD).unwrap();
    LayerRecord {
        name: name.to_owned(),
        binding: BindingId(binding),
        region: CACHE,
        placement: layout.place(offset, REGION_BYTES).unwrap(),
        max_selected: 16,
        check_unique: true,
    }
}

fn registration() -> RegistrationRecord {
    RegistrationRecord {
        layers: vec![
            layer(1, "a", 0, DataType::Float32),
            layer(2, "b", PAYLOAD * 4, DataType::Float32),
        ],
        sets: vec![SetRecord {
            name: "both".to_owned(),
            binding: BindingId(3),
            layers: vec![BindingId(1), BindingId(2)],
        }],
    }
}

#[test]
fn a_gather_moves_the_rows_of_its_layer() {
    let mut rig = Rig::registered();
    rig.fill_cache();
    let indices = [4, -1, 0, 4, 5];
    let moved = rig.run(&rig.gather(2, &indices), &indices).unwrap();
    assert_eq!(moved, Moved { rows_copied: 3, rows_masked: 2 });
    for (slot, index) in indices.into_iter().enumerate() {
        for at in 0..PAYLOAD {
            let got = rig.word(&rig.packed, slot as u64 * PAYLOAD + at);
            let expected = match u64::try_from(index) {
                Ok(row) if row < ROWS => rig.word(&rig.cache, row * 3 * PAYLOAD + PAYLOAD + at),
                _ => 0,
            };
            assert_eq!(got, expected, "slot {slot}, element {at}");
        }
    }
}

#[test]
fn a_set_moves_all_its_layers_in_bounded_launches() {
    let mut rig = Rig::registered();
    rig.fill_cache();
    let indices = [1, 2, 3];
    let moved = rig.run(&rig.gather(3, &indices), &indices).unwrap();
    assert_eq!(moved.rows_copied, 6);
    let second_layer = rig.word(&rig.packed, 3 * PAYLOAD);
    assert_eq!(second_layer, rig.word(&rig.cache, 3 * PAYLOAD + PAYLOAD));
    let variant = statecopy_kernels::plan::Variant::Fused(Direction::Gather, IndexWidth::Int32);
    // 96 bytes a row and 256 a launch: two rows a launch.
    assert_eq!(rig.counters.get(Counter::Launches(variant)), 3);
}

#[test]
fn a_registration_shares_one_table_between_equal_layers_and_reuses_it_later() {
    let mut rig = Rig::new();
    let mut equal = registration();
    // Alignment classes differ between the two layers unless the distance is a multiple of 16.
    assert!((PAYLOAD * 4).is_multiple_of(16));
    rig.register(equal.clone()).unwrap();
    let compiled = rig.guard.entries(Door::Compiler);
    assert_eq!(compiled, 1, "two layers of one signature");
    equal.layers.push(layer(4, "c", 2 * PAYLOAD * 4, DataType::Float16));
    let published = rig.register(equal).unwrap();
    assert_eq!(rig.guard.entries(Door::Compiler), compiled + 1, "only the new one");
    let kinds: Vec<PlanKind> = published.iter().map(|it| it.plan).collect();
    assert_eq!(kinds, [PlanKind::Fused, PlanKind::Fused, PlanKind::Fused, PlanKind::ByteCopy]);
    let plans = rig.preparer.inspect().plans;
    let mut shown: Vec<_> =
        plans.iter().map(|it| (it.plan, it.bindings, it.variants.len())).collect();
    shown.sort_unstable();
    assert_eq!(shown, [(PlanKind::Fused, 2, 4), (PlanKind::ByteCopy, 1, 1)]);
}

#[test]
fn every_check_of_a_request_has_its_code() {
    let mut rig = Rig::registered();
    let ok = rig.gather(1, &[0, 1]);
    let shared = |region, offset| IndexSource::Shared { region: RegionId(region), offset };
    let table: Vec<(RefusalCode, CopyRequest)> = vec![
        (RefusalCode::SessionUnknown, CopyRequest { session: SessionId(9), ..ok }),
        (RefusalCode::StalePlan, CopyRequest { binding: BindingId(9), ..ok }),
        (RefusalCode::SignatureMismatch, CopyRequest { signature: SignatureHash(1), ..ok }),
        (RefusalCode::SelectedTooLarge, CopyRequest { selected: 17, ..ok }),
        (RefusalCode::PackedMismatch, with_packed(ok, |it| it.bytes -= PAYLOAD * 4)),
        (RefusalCode::PackedMismatch, with_packed(ok, |it| it.dtype = 3)),
        (RefusalCode::PackedMismatch, with_packed(ok, |it| it.offset = 8)),
        (RefusalCode::RegionUnknown, with_packed(ok, |it| it.region = RegionId(9))),
        (RefusalCode::OutOfRegion, with_packed(ok, |it| it.offset = REGION_BYTES)),
        (RefusalCode::OutOfRegion, with_packed(ok, |it| it.offset = u64::MAX - 15)),
        (RefusalCode::Overlap, with_packed(ok, |it| it.region = CACHE)),
        (RefusalCode::IndexType, with_indices(ok, shared(2, 4))),
        (RefusalCode::RegionUnknown, with_indices(ok, shared(9, 0))),
        (RefusalCode::OutOfRegion, with_indices(ok, shared(2, REGION_BYTES))),
        (RefusalCode::Overlap, with_indices(ok, shared(2, 0))),
        (RefusalCode::FlagsMismatch, with_flags(ok, 2, 1)),
        (RefusalCode::RegionUnknown, with_flags(ok, 9, 0)),
        (RefusalCode::OutOfRegion, with_flags(ok, 2, REGION_BYTES)),
        (RefusalCode::Overlap, with_flags(ok, 2, 0)),
        (RefusalCode::DeadlineExceeded, CopyRequest { deadline: MonotonicNs(1), ..ok }),
    ];
    rig.packed.fill(0, REGION_BYTES, 0xee).unwrap();
    for (code, request) in table {
        let indices = vec![0; usize::try_from(request.selected).unwrap()];
        assert_eq!(rig.run(&request, &indices), Err(code), "{request:?}");
    }
    assert_eq!(rig.word(&rig.packed, 0), 0xeeee_eeee, "a refusal moved something");
    assert_eq!(rig.run(&ok, &[0, 1]).unwrap().rows_copied, 2, "the next valid one is served");
}

fn with_packed(request: CopyRequest, change: impl FnOnce(&mut Packed)) -> CopyRequest {
    let mut changed = request;
    change(&mut changed.packed);
    changed
}

fn with_indices(request: CopyRequest, source: IndexSource) -> CopyRequest {
    CopyRequest { indices: Indices { source, ..request.indices }, ..request }
}

fn with_flags(request: CopyRequest, region: u64, offset: u64) -> CopyRequest {
    CopyRequest { flags: FlagSource::Shared { region: RegionId(region), offset }, ..request }
}

#[test]
fn packed_may_lie_in_a_gap_of_the_cache() {
    let mut rig = Rig::registered();
    // The third of the three payloads that a page holds belongs to nobody.
    let gap = with_packed(rig.gather(1, &[0]), |packed| {
        (packed.region, packed.offset) = (CACHE, 2 * PAYLOAD * 4);
    });
    assert!(rig.run(&gap, &[0]).is_ok());
    let next_row = with_packed(gap, |packed| packed.offset += 16);
    assert_eq!(rig.run(&next_row, &[0]), Err(RefusalCode::Overlap));
}

#[test]
fn a_repeated_destination_is_refused_in_debug_mode_only_for_scatters() {
    let mut rig = Rig::registered();
    let gather = rig.gather(1, &[2, 2]);
    assert!(rig.run(&gather, &[2, 2]).is_ok());
    let scatter = CopyRequest { direction: Direction::Scatter, ..gather };
    assert_eq!(rig.run(&scatter, &[2, 2]), Err(RefusalCode::RowInvalid));
    assert!(rig.run(&scatter, &[-1, -1]).is_ok(), "invalid ones may repeat");
}

#[test]
fn nothing_selected_moves_nothing_and_launches_nothing() {
    let mut rig = Rig::registered();
    assert_eq!(rig.run(&rig.gather(1, &[]), &[]), Ok(Moved::default()));
    let launches = statecopy_kernels::plan::Variant::ALL
        .into_iter()
        .map(|variant| rig.counters.get(Counter::Launches(variant)))
        .sum::<u64>();
    assert_eq!(launches, 0);
}

#[test]
fn withdrawn_layers_are_not_sealed_and_a_new_registration_makes_old_ids_stale() {
    let mut rig = Rig::registered();
    let old = rig.gather(1, &[0]);
    rig.preparer.withdraw(WORKER).unwrap();
    assert_eq!(rig.run(&old, &[0]), Err(RefusalCode::NotSealed));
    let again =
        RegistrationRecord { layers: vec![layer(7, "a", 0, DataType::Float32)], sets: vec![] };
    rig.published = rig.register(again).unwrap();
    assert_eq!(rig.run(&old, &[0]), Err(RefusalCode::StalePlan));
    assert!(rig.run(&rig.gather(7, &[0]), &[0]).is_ok());
}

#[test]
fn a_failed_registration_leaves_nothing_published() {
    let mut rig = Rig::registered();
    let mut bad = registration();
    bad.layers[1].region = RegionId(99);
    let refusal = rig.register(bad).unwrap_err();
    assert_eq!((refusal.code(), refusal.subject()), (RefusalCode::RegionUnknown, "b"));
    assert_eq!(rig.run(&rig.gather(1, &[0]), &[0]), Err(RefusalCode::NotSealed));
}

#[test]
fn sleep_and_wake_need_no_new_prepare_and_other_signatures_are_refused() {
    let mut rig = Rig::registered();
    let compiled = rig.guard.entries(Door::Compiler);
    rig.preparer.drop_region(WORKER, CACHE).unwrap();
    for binding in [1, 3] {
        let request = rig.gather(binding, &[0]);
        assert_eq!(rig.run(&request, &[0]), Err(RefusalCode::RegionUnknown));
    }
    let (fd, mapping) = memory();
    import(&mut rig.preparer, WORKER, RegionId(5), fd);
    let to = |it: &LayerRecord| RebindRecord {
        binding: it.binding,
        region: RegionId(5),
        placement: it.placement.clone(),
    };
    let moves: Vec<_> = registration().layers.iter().map(to).collect();
    let mut other = moves.clone();
    other[0].placement = layer(1, "a", 4, DataType::Float32).placement;
    let refusal = rig.preparer.rebind(WORKER, &other).unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::SignatureMismatch);
    rig.preparer.rebind(WORKER, &moves[..1]).unwrap();
    assert!(rig.run(&rig.gather(1, &[0]), &[0]).is_ok(), "one layer is awake");
    assert_eq!(rig.run(&rig.gather(3, &[0]), &[0]), Err(RefusalCode::RegionUnknown));
    rig.preparer.rebind(WORKER, &moves).unwrap();
    mapping.fill(0, REGION_BYTES, 0x77).unwrap();
    assert!(rig.run(&rig.gather(3, &[1]), &[1]).is_ok());
    assert_eq!(rig.word(&rig.packed, 0), 0x7777_7777, "it reads the new memory");
    assert_eq!(rig.guard.entries(Door::Compiler), compiled, "nothing was prepared again");
}

/// The memory of a ring that nobody serves yet, its worker's end, and the bell that this end rings.
fn session_ring(session: SessionId) -> (SessionMemory, Submitter, Doorbell) {
    let identity = Identity { incarnation: Incarnation::new([7; 16]), session };
    let parameters = Parameters::for_rows(8, 64).unwrap().with_lanes(8).unwrap();
    let (_sealed, memory) = SessionMemory::create(parameters, identity).unwrap();
    let bell = Doorbell::create().unwrap();
    let submitter = memory.submitter(bell.try_clone().unwrap());
    (memory, submitter, bell)
}

/// A second worker with a ring of its own.
fn open_ring(rig: &mut Rig, session: SessionId) -> (SessionMemory, Submitter) {
    let (memory, submitter, bell) = session_ring(session);
    rig.preparer.open_session(session, &memory, bell, false).unwrap();
    (memory, submitter)
}

#[test]
fn a_workers_ring_speaks_for_its_own_session_only() {
    let mut rig = Rig::registered();
    let (_memory, ring) = open_ring(&mut rig, SessionId(2));
    let mut request = rig.gather(1, &[0]);
    request.deadline = MonotonicNs::now().after(Duration::from_secs(60));
    let supervisors = std::mem::replace(&mut rig.ring, ring);
    assert_eq!(rig.run(&request, &[0]), Err(RefusalCode::SessionUnknown), "session 1 is another's");
    rig.ring = supervisors;
    let (_memory, ring) = open_ring(&mut rig, WORKER);
    rig.preparer.register(WORKER, registration(), &mut |_| {}).unwrap();
    rig.ring = ring;
    assert_eq!(
        rig.run(&CopyRequest { session: SessionId(9), ..request }, &[0]).unwrap().rows_copied,
        1
    );
}

#[test]
fn a_broken_ring_is_told_once_and_the_others_are_served() {
    let mut rig = Rig::registered();
    let (memory, mut ring) = open_ring(&mut rig, SessionId(2));
    let submitted = memory.mapping().atomic_u64(layout::SUBMITTED).unwrap();
    submitted.store(1_000, crate::sync::Ordering::Release);
    // Whatever wakes the executor: it looks at every ring.
    let request = rig.gather(1, &[0]);
    assert!(rig.run(&request, &[0]).is_ok());
    rig.supervisor.set_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut bytes = vec![0; 4096];
    let received = rig.supervisor.receive(&mut bytes, 0).unwrap();
    let news = crate::link::decode::<Reply>(&bytes[..received.bytes]).unwrap();
    assert_eq!(news.id, 0);
    assert!(matches!(news.body, Reply::RingBroken { session: SessionId(2), .. }), "{news:?}");
    // The news may be heard before it is counted, the answer to a later request may not.
    assert!(rig.run(&request, &[0]).is_ok());
    assert_eq!(rig.counters.get(Counter::RingsBroken), 1, "told once");
    assert!(ring.try_submit(&request, &0_i32.to_ne_bytes(), &[]).is_ok());
    rig.preparer.close_session(SessionId(2)).unwrap();
}

#[test]
fn a_supervisor_that_does_not_read_stops_no_copy_and_loses_no_news_of_broken_rings() {
    const BROKEN: u64 = 100;
    let mut rig = Rig::registered();
    // The link is full.
    rig.link.set_timeout(Some(Duration::from_millis(1))).unwrap();
    while rig.link.send(&[0; 4096], &[]).is_ok() {}
    rig.link.set_timeout(None).unwrap();
    let rings: Vec<_> = (2..2 + BROKEN).map(|id| open_ring(&mut rig, SessionId(id))).collect();
    for (memory, _) in &rings {
        let submitted = memory.mapping().atomic_u64(layout::SUBMITTED).unwrap();
        submitted.store(1_000, crate::sync::Ordering::Release);
    }
    let request = rig.gather(1, &[0]);
    for _ in 0..3 {
        assert!(rig.run(&request, &[0]).is_ok(), "copies go on");
    }
    rig.supervisor.set_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut bytes = vec![0; 4096];
    let mut told = Vec::new();
    while told.len() < rings.len() {
        let received = rig.supervisor.receive(&mut bytes, 0).unwrap();
        if let Ok(news) = crate::link::decode::<Reply>(&bytes[..received.bytes]) {
            let Reply::RingBroken { session, .. } = news.body else { panic!("{news:?}") };
            told.push(session.0);
        }
    }
    told.sort_unstable();
    assert_eq!(told, (2..2 + BROKEN).collect::<Vec<_>>(), "each once");
    assert!(rig.run(&request, &[0]).is_ok());
    assert_eq!(rig.counters.get(Counter::RingsBroken), BROKEN);
}

#[test]
fn what_waited_in_a_workers_ring_past_its_deadline_never_starts_unless_it_may_have_before() {
    for (began, outcome) in [(false, Err(RefusalCode::DeadlineExceeded)), (true, Ok(1))] {
        let mut rig = Rig::registered();
        let (memory, mut ring, bell) = session_ring(WORKER);
        let mut request = rig.gather(1, &[0]);
        // As long as it took until a device process looked.
        request.deadline = MonotonicNs::now();
        let sequence = ring.try_submit(&request, &0_i32.to_ne_bytes(), &[]).unwrap();
        let mut dead = memory.executor(Waker::Futex);
        dead.take().unwrap().unwrap();
        if began {
            dead.accept(sequence);
        }
        rig.preparer.open_session(WORKER, &memory, bell, true).unwrap();
        let answer = ring.wait(sequence, Spin::NONE, Duration::from_secs(10)).unwrap().unwrap();
        let rows = answer.result.map(|moved| moved.rows_copied).map_err(|fault| fault.code);
        assert_eq!(rows, outcome);
    }
}

#[test]
fn a_copy_runs_again_after_one_death_and_is_lost_after_the_second() {
    for (deaths, outcome) in [(1, Ok(1)), (2, Err(RefusalCode::DeviceLost))] {
        let mut rig = Rig::registered();
        let (memory, mut ring, bell) = session_ring(WORKER);
        let mut request = rig.gather(1, &[0]);
        request.deadline = MonotonicNs::now().after(Duration::from_secs(60));
        let sequence = ring.try_submit(&request, &0_i32.to_ne_bytes(), &[]).unwrap();
        for _ in 0..deaths {
            let mut dead = memory.resume_executor(Waker::Futex);
            dead.take().unwrap().unwrap();
            dead.accept(sequence);
        }
        rig.preparer.open_session(WORKER, &memory, bell, true).unwrap();
        let answer = ring.wait(sequence, Spin::NONE, Duration::from_secs(10)).unwrap().unwrap();
        let rows = answer.result.map(|moved| moved.rows_copied).map_err(|fault| fault.code);
        assert_eq!(rows, outcome);
        // What comes after it is served as ever.
        let next = ring.try_submit(&request, &0_i32.to_ne_bytes(), &[]).unwrap();
        let answer = ring.wait(next, Spin::NONE, Duration::from_secs(10)).unwrap().unwrap();
        assert!(answer.result.is_ok(), "{answer:?}");
    }
}

#[test]
fn a_drain_serves_what_was_submitted_and_refuses_what_comes_later() {
    let mut rig = Rig::registered();
    let (_memory, ring) = open_ring(&mut rig, WORKER);
    rig.preparer.register(WORKER, registration(), &mut |_| {}).unwrap();
    let request = rig.gather(1, &[0]);
    let supervisors = std::mem::replace(&mut rig.ring, ring);
    let index = 0_i32.to_ne_bytes();
    let early: Vec<_> =
        (0..8).map(|_| rig.ring.try_submit(&request, &index, &[]).unwrap()).collect();
    rig.preparer.drain().unwrap();
    for sequence in early {
        let Ok(Progress::Answered(answer)) = rig.ring.poll(sequence) else { panic!("unanswered") };
        assert_eq!(answer.result.unwrap().rows_copied, 1);
    }
    assert_eq!(rig.run(&request, &[0]), Err(RefusalCode::Draining));
    let rings = rig.preparer.inspect().rings;
    assert_eq!(rings, [RingInspection { session: WORKER, copies: 8, refusals: 1 }]);
    rig.ring = supervisors;
    assert!(rig.run(&rig.gather(1, &[0]), &[0]).is_ok(), "the supervisor refuses by itself");
}

#[test]
fn layers_that_slept_when_the_device_process_died_sleep_in_the_next_and_can_be_woken() {
    let mut rig = Rig::registered();
    let (request, both) = (rig.gather(2, &[0]), rig.gather(3, &[0]));
    // What the next device process is told: the regions that are left, then the registration.
    rig.preparer.close_session(WORKER).unwrap();
    let (packed_fd, _packed) = memory();
    import(&mut rig.preparer, WORKER, PACKED, packed_fd);
    rig.preparer.restore(WORKER, registration()).unwrap();
    for request in [&request, &both] {
        assert_eq!(rig.run(request, &[0]), Err(RefusalCode::RegionUnknown));
    }
    let (cache_fd, _cache) = memory();
    import(&mut rig.preparer, WORKER, CACHE, cache_fd);
    let wake = |layer: LayerRecord| RebindRecord {
        binding: layer.binding,
        region: CACHE,
        placement: layer.placement,
    };
    let moves: Vec<_> = registration().layers.into_iter().map(wake).collect();
    rig.preparer.rebind(WORKER, &moves).unwrap();
    for request in [&request, &both] {
        assert!(rig.run(request, &[0]).is_ok());
    }
}

#[test]
fn a_closed_session_is_unknown_and_its_memory_unmapped() {
    let mut rig = Rig::registered();
    let request = rig.gather(1, &[0]);
    rig.preparer.close_session(WORKER).unwrap();
    assert_eq!(rig.run(&request, &[0]), Err(RefusalCode::SessionUnknown));
    assert!(rig.preparer.inspect().plans.is_empty(), "the table went with its last user");
}
