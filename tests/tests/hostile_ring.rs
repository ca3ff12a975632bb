//! Workers that misuse the ring of their session: they end or stop themselves, and nobody else.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::sync::atomic::Ordering;

use rustix::process::Signal;
use statecopy_descriptors::Doorbell;
use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::descriptor_socket::DaemonRecord;
use statecopy_proto::v1::EventsRequest;
use statecopy_proto::v1::event::Event;
use statecopy_proto::{
    BindingId, DataType, Direction, IndexWidth, Lane, RegionId, SessionId, SignatureHash,
};
use statecopy_session::layout::{SUBMITTED, SUBMITTER_SLEEPING};
use statecopy_session::{
    CopyRequest, FlagSource, IndexSource, Indices as RingIndices, MonotonicNs, Packed, PollError,
    Progress, RingFull, SessionMemory, SubmitError, Submitter,
};
use statecopy_tests::{Daemon, DaemonOptions, Indices, Rig, eventually, send_signal, until};

/// A worker with two layers of six rows.
fn rig(daemon: &Daemon) -> Rig {
    let layout = CacheLayout::with_page_stride(DataType::Float32, [6, 2, 4, 16], 200).unwrap();
    Rig::new(&daemon.connect(), &[(layout.clone(), 0), (layout, 1 << 16)], 4)
}

/// Both directions, and every byte is compared.
fn serves(rig: &mut Rig) {
    for direction in Direction::ALL {
        rig.compute(4);
        rig.copy(direction, 1, &Indices::Int64(vec![5, 0, -1]), None).unwrap();
    }
}

/// The ring of a worker, spoken by hand.
struct RawRing {
    memory: SessionMemory,
    bell: Doorbell,
    submitter: Submitter,
}

impl RawRing {
    fn of(rig: &Rig) -> Self {
        let [memory, bell, _process] = rig.session.ring() else { panic!("no ring came") };
        let memory = SessionMemory::open(memory.try_clone().unwrap()).unwrap();
        let bell = Doorbell::from_fd(bell.try_clone().unwrap()).unwrap();
        let submitter = memory.submitter(bell.try_clone().unwrap());
        Self { memory, bell, submitter }
    }

    /// Submits a gather of row 3 of the first layer, without waiting.
    fn submit(&mut self, rig: &Rig) -> Result<statecopy_session::Sequence, SubmitError> {
        let published = &rig.layers[0].published;
        let layout = rig.layers[0].placement.layout();
        let request = CopyRequest {
            session: SessionId(0),
            binding: BindingId(published.binding_id),
            signature: SignatureHash(published.signature),
            direction: Direction::Gather,
            selected: 1,
            packed: Packed {
                region: RegionId(rig.packed_region),
                offset: Rig::PACKED_OFFSET,
                bytes: layout.payload_bytes(),
                dtype: layout.dtype().number(),
            },
            indices: RingIndices { width: IndexWidth::Int32, source: IndexSource::Inline },
            flags: FlagSource::None,
            lane: Lane(0),
            deadline: MonotonicNs::NEVER,
            submitted_at: MonotonicNs(0),
        };
        self.submitter.try_submit(&request, &3_i32.to_ne_bytes(), &[])
    }

    /// Submits, and waits until the copy is done.
    fn gather(&mut self, rig: &Rig) {
        let sequence = self.submit(rig).unwrap();
        let answer = eventually("the answer", || match self.submitter.poll(sequence).unwrap() {
            Progress::Answered(answer) => Some(answer),
            Progress::Pending | Progress::Accepted => None,
        });
        assert_eq!(answer.result.unwrap().rows_copied, 1);
    }

    /// Writes over the count of submitted requests, and wakes the executor.
    fn set_submitted(&self, submitted: u64) {
        let word = self.memory.mapping().atomic_u64(SUBMITTED).unwrap();
        word.store(submitted, Ordering::Release);
        self.bell.ring();
    }
}

#[test]
fn a_ring_whose_count_moves_as_no_count_does_ends_its_session_and_no_other() {
    let daemon = Daemon::start();
    let mut other = rig(&daemon);
    // Submitted is 2 then: it jumps past the slots, goes back, or counts a request that was never written.
    let cases = [
        (u64::MAX, "jumped from 2"),
        (1 << 20, "jumped from 2"),
        (0, "went back"),
        (3, "request 3 says"),
    ];
    for (round, (submitted, reason)) in (1..).zip(cases) {
        let hostile = rig(&daemon);
        let mut ring = RawRing::of(&hostile);
        let wire = hostile.session.wire();
        let session = hostile.session.reference();
        let mut events = wire.ask(wire.sessions().events(EventsRequest { session })).unwrap();
        ring.gather(&hostile);
        ring.gather(&hostile);
        ring.set_submitted(submitted);
        until("the session ends", || {
            serves(&mut other);
            daemon.inspect().sessions.len() == 1
        });
        let event = hostile.session.next(&mut events).unwrap().unwrap();
        let Some(Event::SessionEnded(ended)) = event.event else { panic!("{event:?}") };
        assert!(ended.reason.contains(reason), "{ended:?}");
        let last = hostile.session.hear();
        assert_eq!(last, Some(DaemonRecord::SessionEnded { sentence: ended.reason }));
        assert_eq!(hostile.session.hear(), None, "the connection is closed");
        let metrics = daemon.get("/metrics").body;
        let ended = format!("statecopy_sessions_ended_total{{reason=\"ring_broken\"}} {round}");
        assert!(metrics.contains(&ended), "{metrics}");
        let mut broken =
            metrics.lines().filter(|line| line.starts_with("statecopy_rings_broken_total{"));
        assert!(broken.any(|line| line.ends_with(&format!(" {round}"))), "{metrics}");
        until("the log says why", || daemon.log().contains(reason));
        // The memory is nobody's now: whatever is written there, nobody looks.
        ring.set_submitted(submitted / 2);
        serves(&mut other);
    }
    assert_eq!(daemon.inspect().devices[0].restarts, 0);
}

#[test]
fn a_ring_that_broke_while_no_device_process_looked_does_not_stop_the_next_one() {
    let daemon = Daemon::start();
    let (mut other, hostile) = (rig(&daemon), rig(&daemon));
    let ring = RawRing::of(&hostile);
    let device = daemon.device_process();
    send_signal(device, Signal::STOP).unwrap();
    ring.set_submitted(u64::MAX);
    send_signal(device, Signal::KILL).unwrap();
    until("the session ends", || daemon.inspect().sessions.len() == 1);
    serves(&mut other);
    assert_eq!(daemon.inspect().devices[0].restarts, 1);
}

#[test]
fn a_worker_that_never_reads_its_answers_stops_only_itself() {
    let daemon = DaemonOptions::default().setting("session_slots", "8").start();
    let (mut other, hostile) = (rig(&daemon), rig(&daemon));
    let mut ring = RawRing::of(&hostile);
    // It claims to sleep, all the time.
    let sleeping = ring.memory.mapping().atomic_u32(SUBMITTER_SLEEPING).unwrap();
    sleeping.store(u32::MAX, Ordering::Release);
    let submitted: Vec<_> = (0..8).map(|_| ring.submit(&hostile).unwrap()).collect();
    assert_eq!(ring.submit(&hostile), Err(SubmitError::Full(RingFull { slots: 8 })));
    let watch = ring.submitter.watch();
    until("all are answered", || {
        serves(&mut other);
        submitted.iter().all(|sequence| watch.is_answered(*sequence))
    });
    assert_eq!(ring.submit(&hostile), Err(SubmitError::Full(RingFull { slots: 8 })));
    for _ in 0..20 {
        serves(&mut other);
    }
    // The answers wait for it, and then it goes on.
    for sequence in submitted {
        let answer = eventually("the answer", || match ring.submitter.poll(sequence) {
            Ok(Progress::Answered(answer)) => Some(answer),
            Ok(Progress::Pending | Progress::Accepted) => None,
            Err(error) => panic!("{error}"),
        });
        assert_eq!(answer.result.unwrap().rows_copied, 1);
        let again = ring.submitter.poll(sequence);
        assert_eq!(again, Err(PollError::NotOutstanding(sequence.get())));
    }
    ring.gather(&hostile);
    assert_eq!(daemon.inspect().sessions.len(), 2);
}
