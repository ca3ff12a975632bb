//! Copies that captured graphs make at every replay.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use statecopy_client::{DataType, Direction, PlanKind, RefusalCode};
use statecopy_kernels::cuda::Allocator;
use statecopy_kernels::layout::CacheLayout;
use statecopy_tests::{Indices, Random};

use crate::daemon::Daemon;
use crate::graphs::{Captured, Capturing};
use crate::known::Known;
use crate::lanes::{Bed, ROWS, Sizes, share_words};
use crate::patience::eventually;
use crate::rig::{Inputs, Rig, Spec, Target};
use crate::setup::{Gpu, Setup};

use super::copies::{distinct, narrow};
use super::order::word;

/// How many rows each copy of a [`GraphRig`] selects.
const SELECTED: usize = 10;
/// What its graph does, one after the other, with the same indices, flags and packed rows.
const SLOTS: [(Direction, Target); 3] = [
    (Direction::Gather, Target::Layer(1)),
    (Direction::Scatter, Target::All),
    (Direction::Gather, Target::All),
];

/// A rig whose copies are made by a graph.
struct GraphRig {
    graph: Captured,
    rig: Rig,
    random: Random,
}

/// Indices of either width, as values of it.
fn indices(wide: bool, rows: Vec<i64>) -> Indices {
    if wide { Indices::Int64(rows) } else { Indices::Int32(narrow(&rows)) }
}

impl GraphRig {
    fn new(
        setup: &Setup,
        gpu: &Gpu,
        daemon: Option<&Daemon>,
        dtype: DataType,
        wide: bool,
    ) -> Result<Self> {
        let payload = 3 * 32 * 32;
        let layout = CacheLayout::with_page_stride(dtype, [24, 3, 32, 32], 3 * payload + 64)?;
        let bytes = layout.payload_bytes();
        let layers = (0..3).map(|at| (layout.clone(), at * bytes)).collect();
        let how = Allocator::Virtual { piece_bytes: 2 << 20, shared: true };
        let client = setup.client_of(daemon.map_or(&setup.socket, Daemon::socket))?;
        let rig = Rig::new(client, gpu, &Spec::of_layers(layers, 16).allocated(how))?;
        let worker = gpu.worker(setup)?;
        let words = share_words(&rig.client, &worker)?;
        let mut capturing = Capturing::begin(&rig.client, &worker, &words)?;
        let (any, flags) = (indices(wide, vec![0; SELECTED]), [1; SELECTED]);
        for (direction, target) in SLOTS {
            let request = rig.request(&any, Some(&flags), Inputs::Device);
            capturing.copy(rig.plan(target)?, direction, &request)?;
        }
        Ok(Self { graph: capturing.end()?, rig, random: Random::new(11) })
    }

    /// Other packed rows, indices and flags; and all that the graph is to make of them.
    fn replay(&mut self, wide: bool, seed: u64) -> Result<()> {
        // Each valid row once, among what is none.
        let mut rows = distinct(&mut self.random, 24, SELECTED as u64);
        let extremes =
            [i64::MIN, i64::MAX, -1, 24, i64::from(i32::MIN), i64::from(i32::MAX), 1 << 32];
        for at in 0..3 {
            let extreme = usize::try_from(self.random.below(extremes.len() as u64))?;
            // INT32 has fewer: what is none in both.
            rows[(usize::try_from(seed)? + 3 * at) % SELECTED] =
                if wide { extremes[extreme] } else { extremes[extreme % 6] };
        }
        let flags: Vec<u8> =
            (0..SELECTED).map(|_| self.random.word().to_le_bytes()[0] & 3).collect();
        let indices = indices(wide, rows);
        self.rig.compute(seed)?;
        self.rig.write_inputs(&indices, Some(&flags))?;
        self.graph.replay()?;
        self.graph.finish()?;
        for (direction, target) in SLOTS {
            self.rig.expect(direction, target, &indices, Some(&flags))?;
        }
        self.rig.check(&format!("replay with {indices:?} and {flags:?}"))
    }

    /// Replays what must not be copied: no byte moves, the stream goes on, and the worker is told why.
    fn refuses(&mut self, code: RefusalCode) -> Result<String> {
        self.rig.write_inputs(&Indices::Int64(vec![1; SELECTED]), Some(&[1; SELECTED]))?;
        self.graph.replay()?;
        self.graph.wait()?;
        let Err(error) = self.graph.lane.check() else {
            bail!("the graph is sound, where {code:?} was expected");
        };
        ensure!(error.code() == Some(code), "{error}, where {code:?} was expected");
        // And again, at once.
        self.graph.replay()?;
        self.graph.wait()?;
        self.rig.check("replay that was refused")?;
        Ok(error.to_string())
    }
}

pub(crate) fn fp32(setup: &Setup) -> Result<String> {
    replays(setup, DataType::Float32, PlanKind::Fused)
}

pub(crate) fn bf16(setup: &Setup) -> Result<String> {
    replays(setup, DataType::BFloat16, PlanKind::Fused)
}

pub(crate) fn fp16(setup: &Setup) -> Result<String> {
    replays(setup, DataType::Float16, PlanKind::ByteCopy)
}

fn replays(setup: &Setup, dtype: DataType, kind: PlanKind) -> Result<String> {
    let (gpu, replays) = (setup.gpu()?, setup.size(60, 15));
    for wide in [false, true] {
        let mut graph = GraphRig::new(setup, &gpu, None, dtype, wide)?;
        graph.rig.expect_kind(kind)?;
        for seed in 0..replays {
            graph.replay(wide, seed)?;
        }
        graph.graph.destroy()?;
    }
    Ok(format!(
        "{replays} replays of {} slots and each width, by {} plan",
        SLOTS.len(),
        kind.label()
    ))
}

/// Graphs on several streams, replayed without a wait of the host: what each copies was made by its stream just before.
pub(crate) fn many_replays(setup: &Setup) -> Result<String> {
    const STREAMS: u64 = 4;
    /// Of each graph: gathers, between which its own kernels change what the next one gathers.
    const SLOTS: u64 = 3;
    let replays = if setup.mps { setup.size(2_500, 40) } else { setup.size(600, 40) };
    let sizes =
        Sizes { payload: 1_024, slots: STREAMS * SLOTS, entries: STREAMS * SLOTS * replays };
    let bed = Bed::new(setup, setup.client()?, sizes)?;
    let mut graphs = Vec::new();
    for stream in 0..STREAMS {
        let mut capturing = Capturing::begin(&bed.client, &bed.worker, &bed.words)?;
        for slot in stream * SLOTS..(stream + 1) * SLOTS {
            capturing.copy(&bed.plan, Direction::Gather, &bed.request(slot))?;
        }
        graphs.push(capturing.end()?);
    }
    let begun = Instant::now();
    for replay in 0..replays {
        for (graph, stream) in graphs.iter_mut().zip(0..) {
            for slot in stream * SLOTS..(stream + 1) * SLOTS {
                // Rows of the stream's own, another one each time.
                let row = slot * (ROWS / (STREAMS * SLOTS)) + replay % (ROWS / (STREAMS * SLOTS));
                bed.name_row(&mut graph.stream, slot, row.cast_signed(), Duration::ZERO)?;
                bed.fill_row(&mut graph.stream, row, word(slot * replays + replay))?;
            }
            graph.replay()?;
            for slot in stream * SLOTS..(stream + 1) * SLOTS {
                bed.log_slot(&mut graph.stream, slot, slot * replays + replay)?;
                bed.name_row(&mut graph.stream, slot, -1, Duration::ZERO)?;
            }
        }
    }
    graphs.iter().try_for_each(Captured::finish)?;
    let words: Vec<u64> = (0..STREAMS * SLOTS * replays).map(word).collect();
    bed.check_log(&words)?;
    let seconds = begun.elapsed().as_secs_f64();
    Ok(format!("{replays} replays of {STREAMS} graphs with {SLOTS} copies each in {seconds:.1} s"))
}

/// Work of a graph that is no copy, recorded while another stream's lane copies, and lanes and sessions come and go.
pub(crate) fn undisturbed_capture(setup: &Setup) -> Result<String> {
    const COPIES: u64 = 200;
    /// The row that only the graph writes.
    const OF_THE_GRAPH: u64 = 0;
    let sizes = Sizes { payload: 1_024, slots: 8, entries: COPIES + 1 };
    let bed = Bed::new(setup, setup.client()?, sizes)?;
    let mut queue = bed.queue()?;
    let mut captured = bed.worker.stream()?;
    captured.begin_capture()?;
    for copy in 0..COPIES {
        bed.fill_row(&mut captured, OF_THE_GRAPH, word(copy))?;
        let row = 1 + copy % (ROWS - 1);
        bed.name_row(&mut queue.stream, 3, row.cast_signed(), Duration::ZERO)?;
        bed.fill_row(&mut queue.stream, row, word(copy))?;
        bed.order(&mut queue, Direction::Gather, 3)?;
        bed.log_slot(&mut queue.stream, 3, copy)?;
        if copy % 50 == 0 {
            bed.order(&mut bed.queue()?, Direction::Gather, 4)?;
            setup.client()?.close()?;
        }
        queue.lane.check()?;
    }
    bed.log_row(&mut captured, OF_THE_GRAPH, COPIES)?;
    let graph = Arc::new(captured.end_capture().context("the capture was disturbed")?);
    captured.launch(&graph)?;
    queue.finish()?;
    eventually("the graph is done", || Ok(captured.is_idle()?.then_some(())))?;
    let mut words: Vec<u64> = (0..COPIES).map(word).collect();
    words.push(word(COPIES - 1));
    bed.check_log(&words)?;
    Ok(format!("{COPIES} copies, four lanes and four sessions during one capture"))
}

/// Sleep and wake in other memory, and device processes that die, between replays of one graph.
pub(crate) fn sleep(setup: &Setup) -> Result<String> {
    let gpu = setup.gpu()?;
    let daemon = setup.own_daemon("graph-sleep")?;
    let mut graph = GraphRig::new(setup, &gpu, Some(&daemon), DataType::Float32, true)?;
    let how = Allocator::Virtual { piece_bytes: 2 << 20, shared: true };
    for round in 0..3 {
        graph.replay(true, 2 * round)?;
        let bytes = graph.rig.cache.bytes();
        graph.rig.release_caches()?;
        // A spare byte in the place of the memory, which goes.
        let spare = Known::allocate(&gpu, 1, Allocator::Default, 6)?;
        drop(std::mem::replace(&mut graph.rig.cache, spare));
        let cache = Known::allocate(&gpu, bytes, how, 20 + round)?;
        graph.rig.bind_again(cache)?;
        graph.replay(true, 2 * round + 1)?;
        daemon.kill_device_process()?;
    }
    graph.replay(true, 9)?;
    Ok("one capture, through three sleeps and three device processes".to_owned())
}

/// Graphs of what is not there any more.
pub(crate) fn stale(setup: &Setup) -> Result<String> {
    let gpu = setup.gpu()?;
    let daemon = setup.own_daemon("graph-stale")?;
    let new = || {
        let mut graph = GraphRig::new(setup, &gpu, Some(&daemon), DataType::Float32, true)?;
        graph.replay(true, 1)?;
        anyhow::Ok(graph)
    };
    let mut asleep = new()?;
    asleep.rig.release_caches()?;
    asleep.refuses(RefusalCode::RegionUnknown)?;
    let mut registered_again = new()?;
    registered_again.rig.register_again()?;
    registered_again.refuses(RefusalCode::StalePlan)?;
    let mut withdrawn = new()?;
    withdrawn.rig.client.release_layers()?;
    withdrawn.refuses(RefusalCode::NotSealed)?;
    let mut orphaned = new()?;
    drop(daemon);
    let daemon = setup.own_daemon("graph-stale")?;
    let sentence = orphaned.refuses(RefusalCode::IncarnationMismatch)?;
    // The same worker, with the daemon that is there now.
    orphaned.rig.serves(3)?;
    GraphRig::new(setup, &gpu, Some(&daemon), DataType::Float32, true)?.replay(true, 2)?;
    Ok(format!("asleep, registered again, withdrawn, and after a restart: {sentence}"))
}
