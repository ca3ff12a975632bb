use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use statecopy_descriptors::{Connection, SealedMemory, pidfd_open};
use statecopy_proto::descriptor_socket::DaemonRecord;
use statecopy_proto::{
    BindingId, DataType, Direction, Incarnation, Lane, RegionId, SessionId, SignatureHash,
};
use statecopy_session::{Answer, Executor, Fault, Parameters, Subject, Taken, Waker};
use tokio::runtime::Runtime;

use super::*;
use crate::memory::Memory;
use crate::region::{RegionKey, RegionRecord, Source};
use crate::transport::{ResolvedFlags, ResolvedIndices, ResolvedSlice};

/// How long a test waits for what must come.
const PATIENCE: Duration = Duration::from_secs(60);

fn identity() -> Identity {
    Identity { incarnation: Incarnation::new([7; 16]), session: SessionId(3) }
}

/// A process that stands for the device process.
struct Process(Child);

impl Process {
    fn start() -> Self {
        let cat = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        Self(cat.unwrap())
    }

    fn pidfd(&self) -> OwnedFd {
        pidfd_open(self.0.id()).unwrap()
    }

    fn die(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.die();
    }
}

/// A ring of two slots, the daemon's ends of everything, and a runtime.
struct Rig {
    copies: Arc<RingCopies>,
    memory: SessionMemory,
    sealed: SealedMemory,
    daemon: Option<Connection>,
    device_process: Process,
    packed: Arc<RegionRecord>,
    runtime: Runtime,
}

fn rig(spin: Duration) -> Rig {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _inside = runtime.enter();
    let parameters = Parameters::new(2, 4096).unwrap();
    let (sealed, memory) = SessionMemory::create(parameters, identity()).unwrap();
    let (daemon, worker) = Connection::pair().unwrap();
    let device_process = Process::start();
    let socket = Arc::new(DescriptorSocket::attached(worker, device_process.pidfd()));
    let descriptors = RingDescriptors {
        memory: sealed.try_clone_fd().unwrap(),
        executor_bell: Doorbell::create().unwrap().try_clone_fd().unwrap(),
        asked_at: MonotonicNs(0),
    };
    let copies = RingCopies::open(descriptors, identity(), spin, socket).unwrap();
    let packed = Memory::allocate("packed", 4096).unwrap();
    let source = Source::Memory(packed);
    let packed = Arc::new(RegionRecord { key: RegionKey(1), bytes: 4096, source });
    drop(_inside);
    Rig {
        copies: Arc::new(copies),
        memory,
        sealed,
        daemon: Some(daemon),
        device_process,
        packed,
        runtime,
    }
}

impl Rig {
    fn copy<'a>(&self, indices: &'a [i32]) -> ResolvedCopy<'a> {
        ResolvedCopy {
            direction: Direction::Gather,
            binding: BindingId(5),
            signature: SignatureHash(0xfeed),
            selected: indices.len() as u64,
            indices: ResolvedIndices::Int32(indices),
            flags: ResolvedFlags::None,
            packed: ResolvedSlice { region: RegionId(1), offset: 64 },
            packed_dtype: DataType::Float32,
            packed_bytes: 16 * indices.len() as u64,
            deadline: Duration::from_secs(3),
            lane: Lane(4),
            max_selected: 8,
            held: [Some(Arc::clone(&self.packed)), None, None],
        }
    }

    fn submit(&self, indices: &[i32]) -> Flight {
        self.copies.submit(self.copy(indices), &patient()).unwrap()
    }

    fn executor(&self) -> Executor {
        self.memory.resume_executor(Waker::Futex)
    }

    /// An executor on a thread of its own, until so many were answered: with as many rows as were selected.
    fn serve(&self, requests: usize) -> JoinHandle<()> {
        let mut executor = self.executor();
        thread::spawn(move || {
            for _ in 0..requests {
                let taken = take(&mut executor);
                answer(&mut executor, &taken);
            }
        })
    }
}

fn take(executor: &mut Executor) -> Taken {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(taken) = executor.take().unwrap() {
            return taken;
        }
        assert!(Instant::now() < until, "nothing was submitted");
        thread::yield_now();
    }
}

fn answer(executor: &mut Executor, taken: &Taken) {
    let moved = statecopy_session::Moved {
        rows_copied: taken.descriptor.selected,
        rows_masked: taken.sequence.get(),
    };
    executor.answer(taken.sequence, &Answer { result: Ok(moved), executor_ns: 1 });
}

fn patient() -> Call {
    Call::new("gather", PATIENCE)
}

fn hasty() -> Call {
    Call::new("gather", Duration::from_millis(30))
}

fn code(outcome: Result<impl Sized, Failure>) -> RefusalCode {
    match outcome.map(|_| "an answer") {
        Err(Failure::Refused(refusal)) => refusal.code(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_copy_arrives_as_it_was_asked_for_and_its_answer_comes_back() {
    for spin in [Duration::ZERO, Duration::from_secs(1)] {
        let rig = rig(spin);
        let flight = rig.submit(&[3, -1, 5]);
        let mut executor = rig.executor();
        let taken = take(&mut executor);
        let request = taken.descriptor.parse().unwrap();
        assert_eq!(request.binding, BindingId(5));
        assert_eq!((request.selected, request.lane), (3, Lane(4)));
        assert_eq!(request.packed.bytes, 48);
        let wait = request.deadline.since(request.submitted_at);
        assert!(wait >= Duration::from_secs(3) && wait < Duration::from_secs(4), "{wait:?}");
        let age = MonotonicNs::now().since(request.submitted_at);
        assert!(age < PATIENCE, "the daemon's clock is this one: {age:?}");
        let mut indices = [0; 12];
        executor.copy_inline(taken.sequence, 0, &mut indices);
        assert_eq!(indices[4..8], (-1_i32).to_ne_bytes());
        let waiter = thread::spawn(move || flight.wait(&patient()));
        answer(&mut executor, &taken);
        assert_eq!(waiter.join().unwrap().unwrap(), Moved { copied: 3, masked: 1 });

        let flight = rig.submit(&[1]);
        let sequence = take(&mut executor).sequence;
        let fault = Err(Subject::Selected.fault(9, 8));
        executor.answer(sequence, &Answer { result: fault, executor_ns: 1 });
        assert_eq!(code(flight.wait(&patient())), RefusalCode::SelectedTooLarge);
    }
}

#[test]
fn many_threads_share_one_ring_and_each_gets_its_own_answer() {
    const THREADS: usize = 6;
    const EACH: usize = 500;
    let rig = rig(Duration::ZERO);
    let executor = rig.serve(THREADS * EACH);
    thread::scope(|scope| {
        for rows in 1..=THREADS {
            let rig = &rig;
            scope.spawn(move || {
                let indices = vec![7; rows];
                for _ in 0..EACH {
                    let moved = rig.submit(&indices).wait(&patient()).unwrap();
                    assert_eq!(moved.copied, rows as u64);
                }
            });
        }
    });
    executor.join().unwrap();
}

#[test]
fn many_tasks_share_one_ring_and_each_gets_its_own_answer() {
    let rig = rig(Duration::ZERO);
    let executor = rig.serve(600);
    let copies = &rig.copies;
    rig.runtime.block_on(async {
        let tasks = (1..=6_usize).map(|rows| {
            let (copies, indices) = (Arc::clone(copies), vec![7; rows]);
            let rig = &rig;
            async move {
                for _ in 0..100 {
                    let submitted = copies.submit_task(rig.copy(&indices), &patient()).await;
                    let moved = submitted.unwrap().wait(&patient()).await.unwrap();
                    assert_eq!(moved.copied, rows as u64);
                }
            }
        });
        let mut tasks: Vec<_> = tasks.map(Box::pin).collect();
        let all = std::future::poll_fn(|context| {
            tasks.retain_mut(|task| task.as_mut().poll(context).is_pending());
            if tasks.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        });
        timeout(PATIENCE, all).await.unwrap();
    });
    executor.join().unwrap();
}

#[test]
fn a_copy_that_is_given_up_keeps_its_slot_and_memory_until_its_answer() {
    let rig = rig(Duration::ZERO);
    let mut executor = rig.executor();
    drop(rig.submit(&[1]));
    let late = rig.submit(&[1, 2]).wait(&hasty());
    assert!(matches!(late, Err(Failure::Unanswered)), "{late:?}");
    assert_eq!(Arc::strong_count(&rig.packed), 3, "two copies may run yet");
    let full = rig.copies.submit(rig.copy(&[1]), &hasty());
    assert_eq!(code(full), RefusalCode::Overloaded);

    let taken = take(&mut executor);
    answer(&mut executor, &taken);
    let third = rig.submit(&[1, 2, 3]);
    assert_eq!(Arc::strong_count(&rig.packed), 3, "one answered, one submitted");
    for _ in 0..2 {
        let taken = take(&mut executor);
        answer(&mut executor, &taken);
    }
    assert_eq!(third.wait(&patient()).unwrap().copied, 3);
    drop(rig.submit(&[]));
    assert_eq!(Arc::strong_count(&rig.packed), 2);
}

#[test]
fn a_task_that_goes_away_leaves_its_slot_to_the_answer() {
    let rig = rig(Duration::ZERO);
    let mut executor = rig.executor();
    let submit = || rig.runtime.block_on(rig.copies.submit_task(rig.copy(&[1]), &patient()));
    drop(submit().unwrap());
    let late = rig.runtime.block_on(submit().unwrap().wait(&hasty()));
    assert!(matches!(late, Err(Failure::Unanswered)), "{late:?}");
    let full = rig.runtime.block_on(rig.copies.submit_task(rig.copy(&[1]), &hasty()));
    assert_eq!(code(full), RefusalCode::Overloaded);
    assert_eq!(Arc::strong_count(&rig.packed), 3);
    for _ in 0..2 {
        let taken = take(&mut executor);
        answer(&mut executor, &taken);
    }
    assert!(submit().is_ok());
}

#[test]
fn a_full_ring_is_waited_for_until_a_place_becomes_free() {
    let rig = rig(Duration::ZERO);
    let flights = [rig.submit(&[1]), rig.submit(&[1, 2])];
    let (began, begins) = mpsc::channel();
    thread::scope(|scope| {
        let third = scope.spawn(|| {
            began.send(()).unwrap();
            rig.submit(&[1, 2, 3]).wait(&patient())
        });
        begins.recv().unwrap();
        let executor = rig.serve(3);
        for (rows, flight) in (1..).zip(flights) {
            assert_eq!(flight.wait(&patient()).unwrap().copied, rows);
        }
        assert_eq!(third.join().unwrap().unwrap().copied, 3);
        executor.join().unwrap();
    });
}

#[test]
fn what_the_ring_cannot_carry_is_refused_with_the_daemons_codes() {
    let rig = rig(Duration::ZERO);
    let submit = |copy| rig.copies.submit(copy, &patient());
    let many = vec![1; 2000];
    assert_eq!(code(submit(rig.copy(&many))), RefusalCode::SelectedTooLarge);
    let large = ResolvedCopy { max_selected: 5000, ..rig.copy(&many) };
    let Err(Failure::Refused(refusal)) = submit(large) else { panic!("it does not fit") };
    assert_eq!(refusal.code(), RefusalCode::OutOfRegion);
    assert!(refusal.sentence().contains("4096"), "{refusal}");
    let flags = ResolvedFlags::Inline(&[1, 1, 1]);
    let unequal = ResolvedCopy { flags, ..rig.copy(&[1, 2]) };
    assert_eq!(code(submit(unequal)), RefusalCode::FlagsMismatch);
}

#[test]
fn a_restarted_device_process_answers_what_the_dead_one_left() {
    let mut rig = rig(Duration::ZERO);
    let flight = rig.submit(&[1, 2]);
    let task = rig.runtime.block_on(rig.copies.submit_task(rig.copy(&[1]), &patient())).unwrap();
    let mut dead = rig.executor();
    let taken = take(&mut dead);
    dead.accept(taken.sequence);
    rig.device_process.die();
    let waiter = thread::spawn(move || flight.wait(&patient()));
    // The supervisor lives: whoever waits waits for the next device process.
    rig.device_process = Process::start();
    let pidfd = rig.device_process.pidfd();
    let daemon = rig.daemon.take().unwrap();
    daemon
        .send(&DaemonRecord::DeviceProcess.encode(), &[std::os::fd::AsFd::as_fd(&pidfd)])
        .unwrap();
    // Then the supervisor dies, and the device process finishes before it goes too.
    drop(daemon);
    let executor = rig.serve(2);
    assert_eq!(waiter.join().unwrap().unwrap().copied, 2);
    assert_eq!(rig.runtime.block_on(task.wait(&patient())).unwrap().copied, 1);
    executor.join().unwrap();
}

#[test]
fn when_nobody_is_left_to_answer_a_copy_that_was_begun_is_lost_and_another_moved_nothing() {
    let mut rig = rig(Duration::ZERO);
    let begun = rig.submit(&[1]);
    let task = rig.runtime.block_on(rig.copies.submit_task(rig.copy(&[1]), &patient())).unwrap();
    let mut executor = rig.executor();
    let taken = take(&mut executor);
    executor.accept(taken.sequence);
    let began = Instant::now();
    let waiter = thread::spawn(move || begun.wait(&patient()));
    rig.device_process.die();
    rig.daemon = None;
    let begun = waiter.join().unwrap();
    assert!(matches!(begun, Err(Failure::Lost(_))), "{begun:?}");
    let never = rig.runtime.block_on(task.wait(&patient()));
    assert!(matches!(never, Err(Failure::NotSent(_))), "{never:?}");
    let full = rig.copies.submit(rig.copy(&[1]), &patient());
    assert!(matches!(full, Err(Failure::NotSent(_))), "no place will become free: {full:?}");
    assert!(began.elapsed() < PATIENCE, "they waited for the deadline");
}

#[test]
fn a_copy_counts_as_unanswered_until_its_answer_whoever_waits_for_it() {
    let rig = rig(Duration::ZERO);
    let standing = |unanswered, given_up| {
        assert_eq!(rig.copies.has_unanswered(), unanswered);
        assert_eq!(rig.copies.has_given_up(), given_up);
    };
    standing(false, false);
    let flight = rig.submit(&[1]);
    standing(true, false);
    assert!(matches!(flight.wait(&hasty()), Err(Failure::Unanswered)));
    standing(true, true);
    let mut executor = rig.executor();
    let taken = take(&mut executor);
    answer(&mut executor, &taken);
    standing(false, false);
}

#[test]
fn a_copy_that_was_begun_when_its_session_ended_counts_as_unanswered() {
    let mut rig = rig(Duration::ZERO);
    let task = rig.runtime.block_on(rig.copies.submit_task(rig.copy(&[1]), &patient())).unwrap();
    let mut executor = rig.executor();
    let taken = take(&mut executor);
    executor.accept(taken.sequence);
    let daemon = rig.daemon.take().unwrap();
    let sentence = "Its ring jumped".to_owned();
    daemon.send(&DaemonRecord::SessionEnded { sentence }.encode(), &[]).unwrap();
    let lost = rig.runtime.block_on(task.wait(&patient()));
    assert!(matches!(lost, Err(Failure::Lost(_))), "{lost:?}");
    assert!(rig.copies.has_given_up(), "the device process lives, and may copy yet");
}

#[test]
fn an_executor_is_known_dead_once_its_process_is() {
    let mut rig = rig(Duration::ZERO);
    let (_daemon, worker) = Connection::pair().unwrap();
    let socket = {
        let _inside = rig.runtime.enter();
        DescriptorSocket::attached(worker, rig.device_process.pidfd())
    };
    let executor = socket.executor();
    assert!(!executor.is_known_dead());
    rig.device_process.die();
    assert!(executor.is_known_dead());
}

#[test]
fn when_a_living_daemon_ends_the_session_whoever_waits_learns_why_and_what_is_left_behind() {
    for spin in [Duration::ZERO, PATIENCE] {
        let mut rig = rig(spin);
        let begun = rig.submit(&[1]);
        let task = rig.runtime.block_on(rig.copies.submit_task(rig.copy(&[1]), &patient()));
        let mut executor = rig.executor();
        let taken = take(&mut executor);
        executor.accept(taken.sequence);
        let began = Instant::now();
        let waiter = thread::spawn(move || begun.wait(&patient()));
        let (copies, packed) = (Arc::clone(&rig.copies), rig.copy(&[1]));
        let full = thread::scope(|scope| {
            let full = scope.spawn(|| copies.submit(packed, &patient()).map(drop));
            // The device process lives and serves other sessions.
            let daemon = rig.daemon.take().unwrap();
            let sentence = "Its ring jumped".to_owned();
            daemon.send(&DaemonRecord::SessionEnded { sentence }.encode(), &[]).unwrap();
            drop(daemon);
            full.join().unwrap()
        });
        let never = rig.runtime.block_on(task.unwrap().wait(&patient()));
        for nothing_moved in [full, never.map(drop)] {
            let Err(Failure::Refused(refusal)) = nothing_moved else { panic!("{nothing_moved:?}") };
            assert_eq!(refusal.code(), RefusalCode::SessionUnknown);
            assert!(refusal.sentence().contains("Its ring jumped"), "{refusal}");
        }
        let begun = waiter.join().unwrap();
        let Err(Failure::Lost(source)) = &begun else { panic!("{begun:?}") };
        assert!(source.to_string().contains("Its ring jumped"), "{source}");
        assert!(began.elapsed() < PATIENCE / 2, "they waited for the deadline");
    }
}

#[test]
fn an_answer_that_the_dead_left_behind_counts() {
    let mut rig = rig(Duration::ZERO);
    let flight = rig.submit(&[1, 2]);
    let mut executor = rig.executor();
    let taken = take(&mut executor);
    let fault = Err(Fault::of(RefusalCode::DeviceLost));
    executor.answer(taken.sequence, &Answer { result: fault, executor_ns: 1 });
    rig.device_process.die();
    rig.daemon = None;
    assert_eq!(code(flight.wait(&patient())), RefusalCode::DeviceLost);
}

#[test]
fn a_ring_of_another_session_is_not_used() {
    let rig = rig(Duration::ZERO);
    let _inside = rig.runtime.enter();
    let descriptors = RingDescriptors {
        memory: rig.sealed.try_clone_fd().unwrap(),
        executor_bell: Doorbell::create().unwrap().try_clone_fd().unwrap(),
        asked_at: MonotonicNs(0),
    };
    let (_daemon, worker) = Connection::pair().unwrap();
    let socket = Arc::new(DescriptorSocket::attached(worker, rig.device_process.pidfd()));
    let other = Identity { session: SessionId(4), ..identity() };
    let opened = RingCopies::open(descriptors, other, Duration::ZERO, socket);
    assert!(matches!(opened, Err(ProtocolError::Ring { .. })), "{opened:?}");
}
