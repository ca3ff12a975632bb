//! The host under the conformance suite, and what only the host can show.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use statecopy_descriptors::SealedMemory;
use statecopy_proto::{Direction, IndexWidth, PlanKind};

use super::*;
use crate::conformance::{self, Bench, Case, DeviceUnderTest};
use crate::device::{Flags, Indices, Launch, Launcher as _, Moved, Region as _, Signal, Slice};
use crate::plan::{self, Variant};
use crate::sync::Ordering;

/// The host, opened in one of its ways.
struct HostUnderTest(HostDevice);

impl HostUnderTest {
    fn open(row_copies: RowCopies, copy_threads: usize) -> Self {
        let mut options = HostOptions::new(Arc::new(ServingGuard::new(true)));
        options.row_copies = row_copies;
        options.copy_threads = NonZeroUsize::new(copy_threads).unwrap();
        Self(HostDevice::open(options).unwrap())
    }
}

impl DeviceUnderTest for HostUnderTest {
    type Device = HostDevice;

    fn device(&self) -> &HostDevice {
        &self.0
    }

    fn allocate(&self, bytes: u64) -> Arc<HostRegion> {
        let memory = SealedMemory::create("test", bytes).unwrap();
        let descriptor = memory.try_clone_fd().unwrap();
        Arc::new(self.0.adopt(descriptor, bytes).unwrap())
    }

    fn write(&self, region: &HostRegion, offset: u64, bytes: &[u8]) {
        region.mapping().write(offset, bytes).unwrap();
    }

    fn read(&self, region: &HostRegion, offset: u64, into: &mut [u8]) {
        region.mapping().read(offset, into).unwrap();
    }
}

mod native {
    crate::conformance_tests! { super::HostUnderTest::open(super::RowCopies::Native, 1) }
}

mod native_two_threads {
    crate::conformance_tests! { super::HostUnderTest::open(super::RowCopies::Native, 2) }
}

mod portable {
    crate::conformance_tests! { super::HostUnderTest::open(super::RowCopies::Portable, 1) }
}

mod portable_two_threads {
    crate::conformance_tests! { super::HostUnderTest::open(super::RowCopies::Portable, 2) }
}

fn host(guard: &Arc<ServingGuard>) -> HostDevice {
    HostDevice::open(HostOptions::new(Arc::clone(guard))).unwrap()
}

fn class(kind: PlanKind, payload_bytes: u64) -> KernelClass {
    KernelClass { kind, dtype: DataType::Float32, payload_bytes, base_mod_16: 0 }
}

#[test]
fn the_host_is_one_device_of_known_family_that_fuses_two_types() {
    let guard = Arc::new(ServingGuard::new(true));
    let (one, two) = (host(&guard), host(&guard));
    assert_eq!(one.description(), two.description());
    assert_eq!(one.description().uuid, host_uuid().unwrap());
    assert_eq!(one.description().kind, "host");
    assert!(one.description().family.is_some());
    for dtype in DataType::ALL {
        let layout = conformance::cache(dtype, 1, 1, 1);
        let expected = match dtype {
            DataType::Float32 | DataType::BFloat16 => PlanKind::Fused,
            _ => PlanKind::ByteCopy,
        };
        assert_eq!(plan::choose(&one.description().fused, &layout), expected, "{dtype}");
    }
}

#[test]
fn a_fused_plan_has_exactly_four_variants_and_a_byte_copy_one() {
    let device = host(&Arc::new(ServingGuard::new(true)));
    for payload_bytes in [4, 1 << 10, 1 << 20] {
        for kind in [PlanKind::Fused, PlanKind::ByteCopy] {
            let variants = device.compile(&class(kind, payload_bytes)).unwrap();
            assert_eq!(variants.compiled(), Variant::of(kind));
            assert_eq!(variants.kind(), kind);
        }
    }
}

#[test]
#[should_panic(expected = "The plan has no variant gather/int32")]
fn a_launch_of_a_variant_that_was_not_prepared_is_a_broken_invariant() {
    let variants = HostVariants::compile(&class(PlanKind::ByteCopy, 4));
    let _none = variants.kernel(Variant::Fused(Direction::Gather, IndexWidth::Int32));
}

#[test]
fn compiler_environment_and_allocator_are_behind_the_guard() {
    let guard = Arc::new(ServingGuard::new(false));
    let device = host(&guard);
    let entries = || Door::ALL.map(|door| guard.entries(door));
    let before = entries();
    device.compile(&class(PlanKind::Fused, 4)).unwrap();
    assert_eq!(entries(), [before[0] + 1, before[1], before[2]]);
    let _configuration = device.configuration();
    device.check_hooks().unwrap();
    assert_eq!(entries(), [before[0] + 1, before[1] + 2, before[2]]);
    device.scratch(64).unwrap();
    assert_eq!(entries(), [before[0] + 1, before[1] + 2, before[2] + 1]);
}

#[test]
fn serving_enters_no_door() {
    let under_test = HostUnderTest::open(RowCopies::Native, 2);
    let case = Case::new(conformance::cache(DataType::Float32, 4, 24, 40), &[3, -1, 0]);
    let bench = Bench::new(&under_test, PlanKind::Fused, &case);
    let guard = &under_test.0.options.guard;
    guard.shut();
    for direction in Direction::ALL {
        assert_eq!(bench.run(direction, &case), Moved { copied: 2, masked: 1 });
    }
    assert_eq!(Door::ALL.map(|door| guard.entries_while_serving(door)), [0; 3]);
    guard.open();
}

#[test]
fn the_configuration_names_versions_source_and_stores() {
    let configuration = |row_copies| HostUnderTest::open(row_copies, 1).0.configuration();
    let native = configuration(RowCopies::Native);
    let value = |name| native.entries.iter().find(|(it, _)| it == name).map(|(_, it)| it.as_str());
    assert_eq!(value("statecopy"), Some(env!("CARGO_PKG_VERSION")));
    assert!(value("rustc").unwrap().starts_with("rustc "));
    assert_eq!(value("source").unwrap().len(), 64);
    assert!(!value("kernel").unwrap().is_empty());
    let portable = configuration(RowCopies::Portable);
    let drift = if stores::streaming().is_some() { vec!["stores"] } else { vec![] };
    assert_eq!(native.drift(&portable), drift);
}

#[test]
fn a_handle_that_is_no_sealed_memory_of_the_announced_size_is_refused() {
    let device = host(&Arc::new(ServingGuard::new(true)));
    let refused = |descriptor: OwnedFd, bytes| {
        let refusal = device.adopt(descriptor, bytes).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::HandleInvalid);
        refusal.sentence().to_owned()
    };
    let memory = SealedMemory::create("test", 4096).unwrap();
    let descriptor = || memory.try_clone_fd().unwrap();
    assert_eq!(
        refused(descriptor(), 8192),
        "The memory file has 4096 bytes, not the announced 8192"
    );
    assert_eq!(refused(descriptor(), 0), "Shared memory of 0 bytes cannot be mapped");
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    refused(file.into(), 4096);
    let unsealed = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, 4096).unwrap();
    assert_eq!(refused(unsealed, 4096), "The memory file lacks F_SEAL_SHRINK and F_SEAL_GROW");
}

#[test]
fn two_imports_of_one_memory_have_one_allocation() {
    let device = host(&Arc::new(ServingGuard::new(true)));
    let memory = SealedMemory::create("test", 4096).unwrap();
    let import = || {
        let descriptor = memory.try_clone_fd().unwrap();
        device.adopt(descriptor, 4096).unwrap()
    };
    let (one, two) = (import(), import());
    assert_eq!(one.allocation(), two.allocation());
    one.mapping().write(100, b"shared").unwrap();
    let mut read = [0; 6];
    two.mapping().read(100, &mut read).unwrap();
    assert_eq!(&read, b"shared");
}

#[test]
fn copies_touch_no_page_but_those_of_payload_and_packed() {
    let under_test = HostUnderTest::open(RowCopies::Native, 2);
    let page = u64::try_from(rustix::param::page_size()).unwrap();
    // A payload of one page and a page stride of four: what lies between stays a hole.
    let layout = conformance::cache(DataType::UInt8, 6, page, 4 * page);
    let bytes = layout.span_bytes();
    let memory = SealedMemory::create("test", bytes).unwrap();
    let region = Arc::new(under_test.0.adopt(memory.try_clone_fd().unwrap(), bytes).unwrap());
    let placement = layout.place(0, bytes).unwrap();
    let caches = under_test.0.bind(&[(region, placement)]).unwrap();
    let variants = under_test.0.compile(&class(PlanKind::ByteCopy, page)).unwrap();
    let packed = under_test.allocate(3 * page);
    let mut launcher = under_test.0.launcher().unwrap();
    for direction in Direction::ALL {
        let ticket = launcher
            .launch(&Launch {
                kind: PlanKind::ByteCopy,
                variants: &variants,
                caches: &caches,
                direction,
                selected: 3,
                indices: Indices::Int32(&[4, -1, 1]),
                flags: Flags::None,
                packed: Slice::new(&packed, 0, 3 * page).unwrap(),
                part: 0..3,
            })
            .unwrap();
        assert_eq!(launcher.poll(ticket).unwrap(), Some(Moved { copied: 2, masked: 1 }));
    }
    let touched = memory.data_ranges().unwrap();
    assert_eq!(touched, [4 * page..5 * page, 16 * page..17 * page]);
}

#[test]
fn as_many_launches_as_there_may_be_await_their_poll() {
    let under_test = HostUnderTest::open(RowCopies::Native, 1);
    let mut case = Case::new(conformance::cache(DataType::UInt8, 4, 8, 8), &vec![1; TICKETS_MAX]);
    case.rows_per_launch = 1;
    conformance::check(&under_test, Direction::Gather, &case);
}

#[test]
fn tickets_are_polled_in_any_order_and_their_places_used_again() {
    let under_test = HostUnderTest::open(RowCopies::Native, 1);
    let case = Case::new(conformance::cache(DataType::UInt8, 4, 8, 8), &[1, -1, 0]);
    let bench = Bench::new(&under_test, PlanKind::ByteCopy, &case);
    let mut launcher = under_test.0.launcher().unwrap();
    for _ in 0..TICKETS_MAX {
        let parts = [0..3, 1..2, 0..1].map(|part| (part.end - part.start, part));
        let mut tickets = parts.map(|(rows, part)| {
            (bench.launch(&mut launcher, Direction::Gather, &case, part), rows)
        });
        tickets.reverse();
        for (ticket, rows) in tickets {
            let moved = launcher.poll(ticket).unwrap().unwrap();
            assert_eq!(moved.copied + moved.masked, rows);
        }
    }
}

#[test]
fn helpers_that_sleep_wake_and_are_called_off_leave_every_byte_right() {
    let under_test = HostUnderTest::open(RowCopies::Native, 1);
    // Many rows, shared by rows; then few and large ones, shared by pieces.
    for (payload, selected) in [(40_001, 40), (1_300_003, 3)] {
        let layout = conformance::cache(DataType::UInt8, 64, payload, payload);
        let mut indices: Vec<i64> = (0..selected).rev().collect();
        indices[1] = -1;
        let case = Case::new(layout, &indices);
        let bench = Bench::new(&under_test, PlanKind::ByteCopy, &case);
        under_test.write(&bench.cache, 0, &conformance::noise(bench.cache.bytes() / 2, 3));
        let _alone = bench.run(Direction::Gather, &case);
        let expected = bench.packed_bytes();
        for spin in [Duration::ZERO, Duration::from_micros(50)] {
            let crew = Crew::start(3, Sharing { spin, bytes_min: 1 << 20 }).unwrap();
            let mut launcher = HostLauncher::new(crew, stores::streaming());
            for _ in 0..25 {
                under_test.write(&bench.packed.region, 100, &[0xEE; 100_000]);
                let rows = selected.cast_unsigned();
                let ticket = bench.launch(&mut launcher, Direction::Gather, &case, 0..rows);
                let moved = launcher.poll(ticket).unwrap();
                assert_eq!(moved, Some(Moved { copied: rows - 1, masked: 1 }));
                let gathered = bench.packed_bytes();
                conformance::assert_bytes(&gathered, &expected, || format!("{payload}, {spin:?}"));
            }
        }
    }
}

#[test]
fn a_launch_in_order_writes_its_signal_and_no_other_word() {
    let under_test = HostUnderTest::open(RowCopies::Native, 1);
    let mapping = Arc::new(SealedMemory::create("test", 4096).unwrap().map().unwrap());
    let shared = under_test.0.share_words(&mapping, 1024..2048).unwrap();
    let word = |at| mapping.atomic_u64(at).unwrap().load(Ordering::Acquire);
    let case = Case::new(conformance::cache(DataType::UInt8, 4, 8, 8), &[1]);
    let bench = Bench::new(&under_test, PlanKind::ByteCopy, &case);
    let mut launcher = under_test.0.launcher().unwrap();
    for (rows, value) in [(1, 7), (0, 8)] {
        let signal = Signal { words: &shared, offset: 1152, value };
        let ticket = bench.launch_by(Direction::Gather, &case, 0..rows, |launch| {
            launcher.launch_in_order(launch, 40, Some(signal))
        });
        assert_eq!((word(1144), word(1152), word(1160)), (0, value, 0));
        let moved = launcher.poll(ticket).unwrap().unwrap();
        assert_eq!(moved.copied + moved.masked, rows);
    }
    for range in [4088..4104, 64..64] {
        let refusal = under_test.0.share_words(&mapping, range).map(drop).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::PrepareFailed);
    }
}

#[test]
#[should_panic(expected = "A ticket that answered is polled no more")]
fn a_ticket_answers_once() {
    let mut launcher = HostUnderTest::open(RowCopies::Native, 1).0.launcher().unwrap();
    let under_test = HostUnderTest::open(RowCopies::Native, 1);
    let case = Case::new(conformance::cache(DataType::UInt8, 4, 8, 8), &[0]);
    let bench = Bench::new(&under_test, PlanKind::ByteCopy, &case);
    let ticket = bench.launch(&mut launcher, Direction::Gather, &case, 0..1);
    assert!(launcher.poll(ticket).unwrap().is_some());
    let _again = launcher.poll(ticket);
}
