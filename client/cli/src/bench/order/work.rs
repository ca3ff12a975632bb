//! The worker of the chains: its stream, and both ways to have rows copied on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use statecopy_client::{
    Error, GraphLane, IndexWidth, Indices, LaneWord, Ordered, Request, Slice, Step, StreamLane, Use,
};
use statecopy_kernels::cuda::{
    Allocator, CudaExporter, CudaMemory, CudaWorker, GuestWords, Place, WordOp, WorkerGraph,
    WorkerStream,
};
use statecopy_kernels::device::{Device as _, Region as _};
use statecopy_proto::Direction;
use statecopyd::config::Settings;

use super::super::memory::BenchMemory;
use super::super::paths::{Call, Daemon, InProcess};
use super::super::plan::{Case, Kind, Operation, Work};
use super::super::statistics::to_nanoseconds;
use super::super::target::{Cuda, Shared, Target};
use super::{How, Idle, Who};
use crate::workload::preset::Preset;

/// What indices of one copy begin at a multiple of.
const ALIGNMENT: u64 = 16;
/// Copies that are enqueued one after the other, before any is waited for.
const ENQUEUED: usize = 100;

/// Chains of one size that take turns, at most.
const TURNS_MAX: u64 = 64;

/// One copy of a chain: its rows, their indices in device memory, and where it puts them.
#[derive(Debug)]
struct Turn {
    rows: Vec<i32>,
    indices_at: u64,
    packed_at: u64,
    /// The chain recorded, with the daemon's copy and with this process's.
    graphs: Option<[Arc<WorkerGraph>; 2]>,
}

/// Chains of one size. Each is of other rows than the one before: what lies between two uses of the same is more than the
/// device's cache holds, where there is so much.
#[derive(Debug)]
pub(super) struct Chain {
    case: Case,
    packed_bytes: u64,
    turns: Vec<Turn>,
    /// Dropped after the graphs.
    lane: Option<GraphLane>,
}

/// See the module.
pub(super) struct Worker<'a> {
    memory: &'a BenchMemory<Cuda>,
    served: &'a Daemon,
    own: InProcess<Cuda>,
    // Before the words: its copies end first.
    stream: WorkerStream,
    words: Arc<GuestWords>,
    lane: StreamLane,
    touched: Arc<CudaMemory>,
    indices: Shared<Cuda>,
    indices_at: Slice,
    /// How many chains ran.
    ran: usize,
}

impl<'a> Worker<'a> {
    pub(super) fn new(
        cuda: &Cuda,
        settings: &Settings,
        memory: &'a BenchMemory<Cuda>,
        served: &'a Daemon,
        own: InProcess<Cuda>,
    ) -> anyhow::Result<Self> {
        let driver = settings.cuda.driver_library.as_path();
        let exporter = CudaExporter::open(driver)?;
        let selector = cuda.device().description().uuid.to_string().parse()?;
        let worker: CudaWorker = exporter.worker(selector, driver)?;
        let touched = Arc::new(exporter.allocate(selector, 2 << 20, Allocator::Default)?);
        let lane = served.client().open_lane()?;
        let (mapping, range) = lane.memory();
        let words = Arc::new(worker.guest().share_words(mapping, range)?);
        let rows = memory.caches().next().context("A cache")?.1.layout.rows();
        let indices = cuda.allocate("indices", rows * ALIGNMENT)?;
        let indices_at = Cuda::register(served.client(), &indices, Use::Packed)?;
        let stream = worker.stream()?;
        Ok(Self { memory, served, own, stream, words, lane, touched, indices, indices_at, ran: 0 })
    }

    /// Chains of so many rows.
    pub(super) fn chain(&mut self, how: How, selected: u64) -> anyhow::Result<Chain> {
        let preset = Preset::KimiK3Tp8;
        let work = Work::Copy { preset, selected, operation: Operation::Gather };
        let case = Case { kind: Kind::Cuda, work, rival: false };
        let rows = self.memory.cache(case)?.1.layout.rows();
        ensure!(selected <= rows, "The cache has {rows} rows");
        let packed_bytes = case.packed_bytes();
        let room = self.memory.packed.region.bytes() / packed_bytes;
        let turns = (0..(rows / selected).min(room).min(TURNS_MAX)).map(|turn| {
            let first = turn * selected;
            let rows: Vec<i32> =
                (first..first + selected).map(i32::try_from).collect::<Result<_, _>>()?;
            let indices_at = first * ALIGNMENT;
            let bytes: Vec<u8> = rows.iter().flat_map(|row| row.to_ne_bytes()).collect();
            Cuda::write(&self.indices.region, indices_at, &bytes)?;
            anyhow::Ok(Turn { rows, indices_at, packed_at: turn * packed_bytes, graphs: None })
        });
        let turns = turns.collect::<anyhow::Result<Vec<_>>>()?;
        let mut chain = Chain { case, packed_bytes, turns, lane: None };
        if how == How::Graph {
            self.record(&mut chain)?;
        }
        Ok(chain)
    }

    /// Records the chains, to be replayed.
    fn record(&mut self, chain: &mut Chain) -> anyhow::Result<()> {
        let mut lane = self.served.client().open_graph_lane()?;
        for at in 0..chain.turns.len() {
            let request = self.request(&chain.turns[at]);
            let armed = lane.arm(self.served.plan(0), Direction::Gather, &request)?;
            let steps = armed.steps().map(|step| match step {
                Step::Write(LaneWord { offset, value }) => WordOp::Write { offset, value },
                Step::WaitAny(LaneWord { offset, value }) => {
                    WordOp::WaitAny { offset, bits: value }
                }
            });
            let graph = |worker: &mut Self, steps: Option<&[WordOp]>| {
                worker.stream.begin_capture()?;
                worker.touch()?;
                match steps {
                    Some(steps) => worker.stream.enqueue(&worker.words, steps)?,
                    None => worker.copy_here(chain, &chain.turns[at])?,
                }
                worker.touch()?;
                anyhow::Ok(Arc::new(worker.stream.end_capture()?))
            };
            let graphs = [graph(self, Some(&steps))?, graph(self, None)?];
            chain.turns[at].graphs = Some(graphs);
        }
        chain.lane = Some(lane);
        Ok(())
    }

    /// One chain, from its first kernel to the end of its last.
    pub(super) fn run(&mut self, chain: &Chain, who: Who) -> anyhow::Result<Duration> {
        let turn = &chain.turns[self.ran % chain.turns.len()];
        self.ran += 1;
        let start = Instant::now();
        match (&turn.graphs, who) {
            (Some([graph, _]), Who::Daemon | Who::Control) | (Some([_, graph]), Who::InProcess) => {
                self.stream.launch(graph)?;
            }
            (None, _) => {
                self.touch()?;
                self.copy(chain, turn, who)?;
                self.touch()?;
            }
        }
        self.stream.synchronize()?;
        Ok(start.elapsed())
    }

    fn touch(&mut self) -> anyhow::Result<()> {
        let place = Place { memory: &self.touched, offset: 0 };
        Ok(self.stream.produce(place, 1, 1, Duration::ZERO)?)
    }

    fn copy(&mut self, chain: &Chain, turn: &Turn, who: Who) -> anyhow::Result<()> {
        match who {
            Who::Daemon | Who::Control => self.order(turn),
            Who::InProcess => self.copy_here(chain, turn),
        }
    }

    fn copy_here(&mut self, chain: &Chain, turn: &Turn) -> anyhow::Result<()> {
        let call = Call {
            indices: &turn.rows,
            packed: turn.packed_at,
            packed_bytes: chain.packed_bytes,
            ..Call::empty(0, Direction::Gather)
        };
        self.own.start_on(&mut self.stream, &call).map(drop)
    }

    fn order(&mut self, turn: &Turn) -> anyhow::Result<()> {
        let operations = {
            let ordered = self.accept(turn)?;
            let (bell, done) = (ordered.bell(), ordered.done());
            [
                WordOp::Write { offset: bell.offset, value: bell.value },
                WordOp::WaitAtLeast { offset: done.offset, value: done.value },
            ]
        };
        Ok(self.stream.enqueue(&self.words, &operations)?)
    }

    /// Holds what each way leaves against the reference.
    ///
    /// # Errors
    /// A failure with the exit code of mismatches.
    pub(super) fn check(&mut self, chain: &Chain, who: Who) -> anyhow::Result<()> {
        let turn = &chain.turns[self.ran % chain.turns.len()];
        let pool = self.memory.pool(chain.case);
        let expected = self.memory.expect(chain.case, &turn.rows, None)?;
        self.memory.fill_packed(chain.case, &pool)?;
        self.run(chain, who)?;
        self.lane.check()?;
        chain.lane.as_ref().map_or(Ok(()), GraphLane::check)?;
        let left = (turn.packed_at, expected.moved);
        self.memory.check(chain.case, &expected, left, who.label())
    }

    /// What the host takes to put a copy on the stream, each of some that are waited for together.
    pub(super) fn enqueues(&mut self, selected: u64, trials: u64) -> anyhow::Result<Vec<f64>> {
        let chain = self.chain(How::Stream, selected)?;
        let mut samples = Vec::new();
        for at in 0..usize::try_from(trials)?.max(1) {
            if at % ENQUEUED == 0 {
                self.stream.synchronize()?;
            }
            let turn = &chain.turns[at % chain.turns.len()];
            let start = Instant::now();
            self.order(turn)?;
            samples.push(to_nanoseconds(start.elapsed().as_secs_f64() * 1e6));
        }
        self.stream.synchronize()?;
        Ok(samples)
    }

    /// Brings what is looked at into its state; [`Worker::settle`] ends it.
    pub(super) fn idle(&mut self, idle: Idle) -> anyhow::Result<Option<Chain>> {
        match idle {
            Idle::Open => Ok(None),
            Idle::Armed => self.chain(How::Graph, 1).map(Some),
            Idle::Unrung => {
                let chain = self.chain(How::Stream, 1)?;
                // Its bell rings with the next one's.
                let _unrung = self.accept(&chain.turns[0])?;
                Ok(Some(chain))
            }
        }
    }

    fn accept(&mut self, turn: &Turn) -> Result<Ordered<'_>, Error> {
        let request = self.request(turn);
        self.lane.order(self.served.plan(0), Direction::Gather, &request)
    }

    fn request(&self, turn: &Turn) -> Request<'static> {
        let indices = Indices::Shared {
            width: IndexWidth::Int32,
            at: self.indices_at.region.at(self.indices_at.offset + turn.indices_at),
            selected: turn.rows.len() as u64,
        };
        Request::new(indices, self.served.packed_at(turn.packed_at))
    }

    /// Lets everything end.
    pub(super) fn settle(&mut self) -> anyhow::Result<()> {
        let chain = self.chain(How::Stream, 1)?;
        self.run(&chain, Who::Daemon)?;
        Ok(self.lane.check()?)
    }
}
