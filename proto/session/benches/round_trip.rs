//! An empty request through the ring against a bare ping-pong, in one process, paired: `cargo bench --bench round_trip`.
//!
//! Two threads, each on a CPU of its own. `spin`: a value goes there and back through two cache lines, and a request of
//! nothing goes through the ring and is parsed and answered, both sides looking all the time. `sleep`: the same with two
//! futexes, and with an executor that sleeps on its doorbells and a submitter that sleeps on the session memory. A block is
//! many round trips; blocks of the two alternate, and `ratio` is the median over the pairs of blocks.
#![expect(clippy::print_stdout, reason = "the table is what a bench is for")]

use std::hint::spin_loop;
use std::num::NonZeroUsize;
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use statecopy_descriptors::{Doorbell, DoorbellSet, SealedMemory};
use statecopy_proto::{
    BindingId, Direction, Incarnation, IndexWidth, Lane, RegionId, SessionId, SignatureHash,
};
use statecopy_session::sync::{Word32, Word64};
use statecopy_session::{
    Answer, CopyRequest, Executor, FlagSource, Identity, IndexSource, Indices, MonotonicNs, Moved,
    Packed, Parameters, SessionMemory, Spin, Submitter, Waker,
};

const BLOCKS: usize = 51;
const SPINS: (u64, u64) = (20_000, 16);
const SLEEPS: (u64, u64) = (300, 1);
const PATIENCE: Duration = Duration::from_secs(10);
/// Words of the two sides lie so far apart.
const LINE: u64 = 128;

/// Keeps this thread on one CPU.
fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).expect("a CPU of this process");
}

/// Times round trips of `here`, `batch` by one look at the clock, with `there` answering on another CPU: the median, in
/// nanoseconds each. Whatever else runs on the machine strikes few batches.
fn block(
    [here_on, there_on]: [usize; 2],
    (trips, batch): (u64, u64),
    mut here: impl FnMut(u64),
    mut there: impl FnMut(u64) + Send,
) -> f64 {
    thread::scope(|scope| {
        scope.spawn(move || {
            pin(there_on);
            (1..=trips).for_each(&mut there);
        });
        pin(here_on);
        let warm = trips / 10;
        (1..=warm).for_each(&mut here);
        let starts = (warm + 1..=trips).step_by(usize::try_from(batch).unwrap_or(usize::MAX));
        let times = starts.map(|start| {
            let end = trips.min(start + batch - 1);
            let begun = Instant::now();
            (start..=end).for_each(&mut here);
            begun.elapsed().as_secs_f64() * 1e9 / (end + 1 - start) as f64
        });
        median(times.collect())
    })
}

fn bare_spin(cpus: [usize; 2]) -> f64 {
    let memory = SealedMemory::create("ping-pong", 4096).expect("memory");
    let words = memory.map().expect("a mapping");
    let word = |offset| Word64::new(words.atomic_u64(offset).expect("a word"));
    let (ping, pong) = (word(0), word(LINE));
    let here = |trip| {
        ping.store_release(trip);
        while pong.load_acquire() != trip {
            spin_loop();
        }
    };
    let there = |trip| {
        while ping.load_acquire() != trip {
            spin_loop();
        }
        pong.store_release(trip);
    };
    block(cpus, SPINS, here, there)
}

fn bare_sleep(cpus: [usize; 2]) -> f64 {
    let memory = SealedMemory::create("ping-pong", 4096).expect("memory");
    let words = memory.map().expect("a mapping");
    let word = |offset| Word32::new(words.atomic_u32(offset).expect("a word"));
    let (ping, pong) = (word(0), word(LINE));
    let number = |trip: u64| u32::try_from(trip).expect("few trips");
    let say = |word: Word32<'_>, trip| {
        word.store_release(number(trip));
        word.futex_wake(1);
    };
    let hear = |word: Word32<'_>, trip| {
        while word.load_acquire() != number(trip) {
            word.futex_wait(number(trip) - 1, PATIENCE).expect("a futex");
        }
    };
    let here = |trip| {
        say(ping, trip);
        hear(pong, trip);
    };
    let there = |trip| {
        hear(ping, trip);
        say(pong, trip);
    };
    block(cpus, SLEEPS, here, there)
}

fn ring() -> (Submitter, Executor, Doorbell) {
    let identity = Identity { incarnation: Incarnation::new([1; 16]), session: SessionId(1) };
    let parameters = Parameters::for_rows(64, 4096).expect("parameters");
    let (sealed, daemons) = SessionMemory::create(parameters, identity).expect("memory");
    let fd = sealed.try_clone_fd().expect("a descriptor");
    let workers = SessionMemory::open(fd).expect("the memory");
    let bell = Doorbell::create().expect("a doorbell");
    let submitter = workers.submitter(bell.try_clone().expect("a doorbell"));
    (submitter, daemons.executor(Waker::Futex), bell)
}

fn nothing() -> CopyRequest {
    CopyRequest {
        session: SessionId(1),
        binding: BindingId(1),
        signature: SignatureHash(1),
        direction: Direction::Gather,
        selected: 0,
        packed: Packed { region: RegionId(1), offset: 0, bytes: 0, dtype: 1 },
        indices: Indices { width: IndexWidth::Int32, source: IndexSource::Inline },
        flags: FlagSource::None,
        lane: Lane(0),
        deadline: MonotonicNs::NEVER,
        submitted_at: MonotonicNs(0),
    }
}

/// Answers the next request, if there is one.
fn serve(executor: &mut Executor) -> bool {
    let Some(taken) = executor.take().expect("a sound ring") else { return false };
    let result = taken.descriptor.parse().map(|_| Moved::default());
    executor.answer(taken.sequence, &Answer { result, executor_ns: 1 });
    true
}

fn ask(submitter: &mut Submitter, spin: Spin) {
    let sequence = submitter.try_submit(&nothing(), &[], &[]).expect("a place");
    let answer = submitter.wait(sequence, spin, PATIENCE).expect("a sound ring");
    assert!(answer.expect("an answer").result.is_ok());
}

fn ring_spin(cpus: [usize; 2]) -> f64 {
    let (mut submitter, mut executor, _bell) = ring();
    let spin = Spin::new(PATIENCE, NonZeroUsize::MAX);
    let there = |_| {
        while !serve(&mut executor) {
            spin_loop();
        }
    };
    block(cpus, SPINS, |_| ask(&mut submitter, spin), there)
}

fn ring_sleep(cpus: [usize; 2]) -> f64 {
    let (mut submitter, mut executor, bell) = ring();
    let bells = DoorbellSet::create().expect("a set");
    bells.add(&bell, 1).expect("a doorbell");
    let there = |_| {
        while !serve(&mut executor) {
            if executor.prepare_sleep() {
                bells.wait(Some(PATIENCE), drop).expect("a set");
                executor.cancel_sleep();
                bell.clear().expect("a doorbell");
            }
        }
    };
    block(cpus, SLEEPS, |_| ask(&mut submitter, Spin::NONE), there)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn compare(name: &str, bare: impl Fn() -> f64, ring: impl Fn() -> f64) {
    let pairs: Vec<(f64, f64)> = (0..BLOCKS)
        .map(|at| {
            if at % 2 == 0 {
                let first = bare();
                (first, ring())
            } else {
                let first = ring();
                (bare(), first)
            }
        })
        .collect();
    let bare = median(pairs.iter().map(|(bare, _)| *bare).collect());
    let ring = median(pairs.iter().map(|(_, ring)| *ring).collect());
    let ratio = median(pairs.iter().map(|(bare, ring)| ring / bare).collect());
    println!("{name:>6} {bare:>10.0} {ring:>10.0} {ratio:>7.2}");
}

fn main() {
    let allowed = sched_getaffinity(None).expect("an affinity");
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let (Some(first), Some(second)) = (cpus.next(), cpus.next()) else {
        println!("skipped: two CPUs are needed");
        return;
    };
    println!("{:>6} {:>10} {:>10} {:>7}", "", "bare, ns", "ring, ns", "ratio");
    let cpus = [first, second];
    compare("spin", || bare_spin(cpus), || ring_spin(cpus));
    compare("sleep", || bare_sleep(cpus), || ring_sleep(cpus));
}
