//! Runs one case: every path's bytes are checked, then the trials.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use statecopy_client::Moved;
use statecopy_client::blocking::InFlight;

use super::machine::Thread;
use super::memory::{BenchMemory, Packed, Pool};
use super::paths::{Call, Daemon, InProcess};
use super::peer::{Game, Peer};
use super::plan::{Case, Measurement, Mode, Operation, Path, Turn, Work};
use super::rival::Rival;
use super::statistics::to_nanoseconds;
use super::target::Target;

/// Trials before those that count.
const WARM_UP_TRIALS: u64 = 3;
/// Turns of a spinning ping-pong before the one that counts.
const WARM_UP_TURNS: u32 = 16;

/// The call that is checked.
const FIRST: Turn = Turn { trial: 0, place: 0, timed: true };

/// Samples in microseconds, one a trial.
pub(super) type Samples = BTreeMap<Measurement, Vec<f64>>;

/// Everything that the cases run on.
pub(super) struct Bench<T: Target> {
    /// Of orders and rows.
    pub(super) seed: u64,
    /// How often every path is measured.
    pub(super) trials: u64,
    /// Caches and packed buffers.
    pub(super) memory: BenchMemory<T>,
    /// The kernel here.
    pub(super) in_process: InProcess<T>,
    /// A session that uses the ring.
    pub(super) ring: Daemon,
    /// A session that uses gRPC.
    pub(super) grpc: Daemon,
    /// The other side of the ping-pong.
    pub(super) peer: Peer,
    /// The daemon's executor.
    pub(super) executor: Thread,
    /// Who copies in another way; there is one where a case asks for it.
    pub(super) rival: Option<Rival>,
}

/// The inputs of one call.
#[derive(Debug)]
struct Inputs {
    cache: usize,
    indices: Vec<i32>,
    flags: Option<Vec<bool>>,
}

impl Inputs {
    fn call(&self, case: Case, packed: &Packed<'_>) -> Call<'_> {
        Call {
            cache: self.cache,
            direction: case.operation().direction(),
            indices: &self.indices,
            flags: self.flags.as_deref(),
            packed: packed.offset(),
            packed_bytes: packed.bytes(),
        }
    }

    /// What every path must answer.
    fn moved(&self, case: Case) -> Moved {
        let rows = self.indices.len() as u64 * case.layers() as u64;
        match case.operation() {
            Operation::Gather | Operation::Scatter => Moved { copied: rows, masked: 0 },
            Operation::Clear => Moved { copied: 0, masked: rows },
        }
    }
}

/// Two private buffers for a memcpy, when a case asks for one.
type Buffers = (Vec<u8>, Vec<u8>);

impl<T: Target> Bench<T> {
    /// Checks, warms up, and measures one case. `each` is told of every trial.
    ///
    /// # Errors
    /// When a path cannot run, answers otherwise than asked, or leaves other bytes than the reference.
    pub(super) fn run(&mut self, case: Case, mut each: impl FnMut()) -> anyhow::Result<Samples> {
        let pool = self.memory.pool(case);
        self.check(case, &pool)?;
        if case.compares_with_rival() {
            let rows = self.inputs(case, FIRST)?.indices;
            let cache_rows = self.memory.cache(case)?.1.layout.rows();
            let prepared = self.rival()?.prepare(case, cache_rows, &rows);
            prepared.with_context(|| case.name())?;
        }
        let mut buffers = buffers(case)?;
        let mut samples = Samples::new();
        for trial in 0..WARM_UP_TRIALS + self.trials {
            for (place, (mode, path)) in (0..).zip(case.order(self.seed, trial)) {
                let turn = |timed| Turn { trial, place, timed };
                let inputs = [self.inputs(case, turn(false))?, self.inputs(case, turn(true))?];
                let took = self
                    .measure(case, (mode, path), &inputs, &pool, &mut buffers)
                    .with_context(|| format!("{}, {}", case.name(), path.label()))?;
                if trial >= WARM_UP_TRIALS {
                    let sample = to_nanoseconds(took.as_secs_f64() * 1e6);
                    samples.entry((mode, path)).or_default().push(sample);
                }
            }
            if trial >= WARM_UP_TRIALS {
                each();
            }
        }
        Ok(samples)
    }

    fn inputs(&self, case: Case, turn: Turn) -> anyhow::Result<Inputs> {
        let (at, cache) = self.memory.cache(case)?;
        let indices = case.indices(self.seed, turn, cache.layout.rows());
        let flags = (case.operation() == Operation::Clear).then(|| vec![false; indices.len()]);
        Ok(Inputs { cache: at, indices, flags })
    }

    /// Every path once, from the same state, against the reference.
    fn check(&mut self, case: Case, pool: &Pool) -> anyhow::Result<()> {
        let inputs = self.inputs(case, FIRST)?;
        let flags = inputs.flags.as_deref();
        let expected = self.memory.expect(case, &inputs.indices, flags)?;
        self.memory.restore(case)?;
        for (mode, path) in case.checked() {
            self.memory.prepare(case, pool, &expected)?;
            let packed = pool.take()?;
            self.in_process.convert_flags(flags);
            let done = self.start(mode, path, &inputs.call(case, &packed));
            let moved = done
                .and_then(|started| self.finish(started))
                .with_context(|| format!("{}, {}", case.name(), path.label()))?;
            self.memory.check(case, &expected, (packed.offset(), moved), path.label())?;
        }
        self.memory.fill_packed(case, pool)
    }

    fn measure(
        &mut self,
        case: Case,
        (mode, path): Measurement,
        [before, timed]: &[Inputs; 2],
        pool: &Pool,
        buffers: &mut Buffers,
    ) -> anyhow::Result<Duration> {
        match path {
            Path::PingpongSpin => self.spin_round(),
            Path::PingpongFutex => self.futex_round(),
            Path::Memcpy => Ok(memcpy(buffers)),
            Path::Triton | Path::TritonPreallocated | Path::TritonJit | Path::TorchIndex => {
                self.rival()?.time(case, path, &before.indices, &timed.indices)
            }
            Path::Inproc
            | Path::InprocPreallocated
            | Path::InprocNocheck
            | Path::Ring
            | Path::Grpc
            | Path::Control => {
                self.make_ready(case, mode, path, before, pool)?;
                self.timed(case, mode, path, timed, pool)
            }
        }
    }

    /// The interval of a production call: packed memory, index and flag handling, the copy. The output is dropped outside.
    fn timed(
        &mut self,
        case: Case,
        mode: Mode,
        path: Path,
        inputs: &Inputs,
        pool: &Pool,
    ) -> anyhow::Result<Duration> {
        let preallocated = path == Path::InprocPreallocated;
        let early = preallocated.then(|| pool.take()).transpose()?;
        let start = Instant::now();
        let packed = match early {
            Some(packed) => packed,
            None => pool.take()?,
        };
        let started = self.start(mode, path, &inputs.call(case, &packed))?;
        let took = start.elapsed();
        let moved = self.finish(started)?;
        drop(packed);
        ensure!(moved == inputs.moved(case), "The answer is {moved:?}");
        Ok(took)
    }

    /// Brings processors and executor into the state in which this path serves one request after the other; or, where the
    /// case says so, lets the executor fall asleep.
    fn make_ready(
        &mut self,
        case: Case,
        mode: Mode,
        path: Path,
        inputs: &Inputs,
        pool: &Pool,
    ) -> anyhow::Result<()> {
        if case.work == Work::EmptyAfterSleep {
            return self.executor.wait_until_asleep();
        }
        if case.is_warmed() {
            let packed = pool.take()?;
            self.in_process.convert_flags(inputs.flags.as_deref());
            let started = self.start(mode, path, &inputs.call(case, &packed))?;
            self.finish(started)?;
        } else if path.is_daemon() {
            // Too large to warm anything; the executor is awake all the same.
            let direction = case.operation().direction();
            let empty = Call::empty(inputs.cache, direction);
            self.start(Mode::Wall, path, &empty)?;
        } else {
            self.in_process.convert_flags(inputs.flags.as_deref());
        }
        Ok(())
    }

    /// Calls a path, and returns when the caller may go on: in `wall` mode when the copy is done.
    fn start(&mut self, mode: Mode, path: Path, call: &Call<'_>) -> anyhow::Result<Started> {
        let moved = match (path, mode) {
            (Path::Inproc | Path::InprocPreallocated, _) => self.in_process.start(call)?,
            (Path::InprocNocheck, _) => self.in_process.start_unchecked(call)?,
            (Path::Ring | Path::Control, Mode::Wall) => self.ring.copy(call)?,
            (Path::Ring | Path::Control, Mode::HostEnqueue) => {
                return Ok(Started::InFlight(self.ring.submit(call)?));
            }
            (Path::Grpc, _) => self.grpc.copy(call)?,
            _ => anyhow::bail!("A reference copies no rows, and a rival by itself"),
        };
        if path.is_daemon() {
            return Ok(Started::Done(moved));
        }
        match mode {
            Mode::HostEnqueue => Ok(Started::Launched(moved)),
            Mode::Wall => {
                self.in_process.wait()?;
                Ok(Started::Done(moved))
            }
        }
    }

    /// Waits until the bytes are there.
    fn finish(&mut self, started: Started) -> anyhow::Result<Moved> {
        match started {
            Started::Done(moved) => Ok(moved),
            Started::Launched(moved) => {
                self.in_process.wait()?;
                Ok(moved)
            }
            Started::InFlight(copy) => Ok(copy.wait()?),
        }
    }

    fn rival(&mut self) -> anyhow::Result<&mut Rival> {
        self.rival.as_mut().context("There is no rival")
    }

    fn spin_round(&mut self) -> anyhow::Result<Duration> {
        // The executor shares its CPU with the other side.
        self.executor.wait_until_asleep()?;
        self.peer.begin(Game::Spin)?;
        for _ in 0..WARM_UP_TURNS {
            self.peer.spin_round()?;
        }
        let took = self.peer.spin_round()?;
        self.peer.end()?;
        Ok(took)
    }

    fn futex_round(&mut self) -> anyhow::Result<Duration> {
        self.executor.wait_until_asleep()?;
        self.peer.begin(Game::Futex)?;
        let took = self.peer.futex_round()?;
        self.peer.end()?;
        Ok(took)
    }
}

/// A copy that was asked for.
#[derive(Debug)]
enum Started {
    /// It is done.
    Done(Moved),
    /// A kernel of this process runs.
    Launched(Moved),
    /// The daemon has it.
    InFlight(InFlight),
}

fn buffers(case: Case) -> anyhow::Result<Buffers> {
    let bytes = if case.work == Work::Memcpy { usize::try_from(case.packed_bytes())? } else { 0 };
    // Other bytes than zeros, so that the operating system gives every page.
    Ok((vec![1; bytes], vec![2; bytes]))
}

fn memcpy((from, to): &mut Buffers) -> Duration {
    let start = Instant::now();
    black_box(&mut *to).copy_from_slice(black_box(from));
    start.elapsed()
}
