//! Daemons and device processes that die while streams wait for them, and words that a worker scribbles over.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use statecopy_client::{Direction, Error, RefusalCode};
use statecopy_kernels::cuda::WordOp;

use crate::daemon::{Daemon, kill};
use crate::graphs::{Captured, Capturing};
use crate::lanes::{Bed, GATES, Gates, Queue, ROWS, Sizes, share_words};
use crate::patience::eventually;
use crate::setup::Setup;

use super::order::word;

const SLOTS: u64 = 64;

fn bed(setup: &Setup, daemon: &Daemon, entries: u64) -> Result<Bed> {
    let client = setup.client_of(daemon.socket())?;
    Bed::new(setup, client, Sizes { payload: 4_096, slots: SLOTS, entries })
}

/// A graph of one gather into the slot.
fn graph(bed: &Bed, slot: u64) -> Result<Captured> {
    let mut capturing = Capturing::begin(&bed.client, &bed.worker, &bed.words)?;
    capturing.copy(&bed.plan, Direction::Gather, &bed.request(slot))?;
    capturing.end()
}

/// Whether a packed slot holds the row that it names.
fn has_row(bed: &Bed, rows: &[Vec<u8>], slot: u64) -> Result<bool> {
    Ok(bed.read_slot(slot)? == rows[usize::try_from(slot % ROWS)?])
}

fn code(outcome: Result<(), Error>) -> Result<RefusalCode> {
    let Err(error) = outcome else { bail!("a copy that nobody made is said to be made") };
    error.code().with_context(|| format!("{error} has a code"))
}

/// The daemon is killed under streams that wait for it: one has rung, one rings only then, one replays a graph.
pub(crate) fn daemon(setup: &Setup) -> Result<String> {
    const NAME: &str = "stream-daemon";
    let mut daemon = setup.own_daemon(NAME)?;
    let bed = bed(setup, &daemon, 0)?;
    let rows = bed.fill_cache(1)?;
    bed.clear_packed()?;
    let mut graph = graph(&bed, 2)?;
    graph.replay()?;
    graph.finish()?;
    let (mut rung, mut unrung, idle) = (bed.queue()?, bed.queue()?, bed.queue()?);
    let of_rung = bed.ask(&mut rung, Direction::Gather, 0)?;
    let of_unrung = bed.ask(&mut unrung, Direction::Gather, 1)?;
    daemon.stop_device_process()?;
    rung.put(&of_rung)?;
    graph.replay()?;
    eventually("the bell has rung", || Ok(rung.has_rung(&of_rung)?.then_some(())))?;
    ensure!(!rung.stream.is_idle()? && !graph.stream.is_idle()?, "the streams wait for nobody");
    let killed = Instant::now();
    daemon.kill()?;
    rung.wait()?;
    graph.wait()?;
    let freed = killed.elapsed();
    drop(daemon);
    unrung.put(&of_unrung)?;
    unrung.wait()?;
    ensure!(!has_row(&bed, &rows, 0)? && !has_row(&bed, &rows, 1)?, "a copy was made");
    let codes = [code(rung.lane.check())?, code(unrung.lane.check())?, code(graph.lane.check())?];
    let unknown = [RefusalCode::Unavailable, RefusalCode::IncarnationMismatch];
    ensure!(codes.iter().all(|code| unknown.contains(code)), "{codes:?}");
    ensure!(idle.lane.check().is_err(), "a lane of the dead daemon is sound");
    let _next = setup.own_daemon(NAME)?;
    let words = share_words(&bed.client, &bed.worker)?;
    let mut next = Queue::open(&bed.client, &bed.worker, &words)?;
    bed.order(&mut next, Direction::Gather, 3)?;
    next.finish()?;
    ensure!(has_row(&bed, &rows, 3)?, "the next daemon serves the worker");
    ensure!(code(rung.lane.check())? == codes[0], "a lane of the dead daemon is sound again");
    Ok(format!("streams went on {:.0} ms after the kill: {codes:?}", freed.as_secs_f64() * 1e3))
}

/// The device process is killed while copies of several lanes and a graph have rung and none has started. A stream that waits may
/// hold up others of its process, bells among them: how many have rung is the driver's business, but for the first.
pub(crate) fn rung_copies(setup: &Setup) -> Result<String> {
    const LANES: u64 = 8;
    const EACH: u64 = 7;
    let daemon = setup.own_daemon("stream-rung")?;
    let bed = bed(setup, &daemon, 0)?;
    let mut graph = graph(&bed, SLOTS - 1)?;
    let mut queues = (0..LANES).map(|_| bed.queue()).collect::<Result<Vec<_>>>()?;
    let (mut times, mut rung) = (Vec::new(), 0);
    for round in 0..3 {
        let rows = bed.fill_cache(round)?;
        bed.clear_packed()?;
        let mut asked = Vec::new();
        for (queue, lane) in queues.iter_mut().zip(0..) {
            for slot in lane * EACH..(lane + 1) * EACH {
                asked.push(bed.ask(queue, Direction::Gather, slot)?);
            }
        }
        let stopped = daemon.stop_device_process()?;
        for (queue, asked) in queues.iter_mut().zip(asked.chunks(usize::try_from(EACH)?)) {
            asked.iter().try_for_each(|asked| queue.put(asked))?;
        }
        graph.replay()?;
        eventually("the first bell has rung", || Ok(queues[0].has_rung(&asked[0])?.then_some(())))?;
        for (queue, asked) in queues.iter().zip(asked.chunks(usize::try_from(EACH)?)) {
            rung += u64::from(queue.has_rung(&asked[0])?);
            ensure!(!queue.stream.is_idle()?, "a copy was made by a process that is stopped");
        }
        let killed = Instant::now();
        kill(stopped)?;
        queues.iter().try_for_each(Queue::finish)?;
        graph.finish()?;
        times.push(format!("{:.2}", killed.elapsed().as_secs_f64()));
        for slot in (0..LANES * EACH).chain([SLOTS - 1]) {
            ensure!(has_row(&bed, &rows, slot)?, "slot {slot} does not hold its row");
        }
        daemon.wait_for_another_than(stopped)?;
    }
    Ok(format!(
        "{} copies and a replay were made after {} s; {rung} of {} lanes had rung",
        LANES * EACH,
        times.join(", "),
        3 * LANES
    ))
}

/// The device process is killed while copies run, one after the other on each of many streams.
pub(crate) fn running_copies(setup: &Setup) -> Result<String> {
    const STREAMS: u64 = 8;
    let (rounds, turns) = (5, setup.size(400, 40));
    let daemon = setup.own_daemon("stream-running")?;
    let bed = bed(setup, &daemon, STREAMS * turns)?;
    let mut queues = (0..STREAMS).map(|_| bed.queue()).collect::<Result<Vec<_>>>()?;
    let mut unfinished = 0;
    for round in 0..rounds {
        let first = round * STREAMS * turns;
        for turn in 0..turns {
            for (queue, slot) in queues.iter_mut().zip(0..) {
                let (row, entry) = (slot * (ROWS / STREAMS) + turn % 8, turn * STREAMS + slot);
                bed.name_row(&mut queue.stream, slot, row.cast_signed(), Duration::ZERO)?;
                bed.fill_row(&mut queue.stream, row, word(first + entry))?;
                bed.order(queue, Direction::Gather, slot)?;
                bed.log_slot(&mut queue.stream, slot, entry)?;
            }
            if turn == turns * (round + 1) / (rounds + 1) {
                // Somewhere among the copies that were rung by then.
                thread::sleep(Duration::from_micros(137 * round));
                for queue in &queues {
                    unfinished += u64::from(!queue.stream.is_idle()?);
                }
                daemon.kill_device_process()?;
            }
        }
        queues.iter().try_for_each(Queue::finish)?;
        let words: Vec<u64> = (0..STREAMS * turns).map(|entry| word(first + entry)).collect();
        bed.check_log(&words)?;
    }
    ensure!(unfinished > 0, "no stream had anything to do when the device process was killed");
    Ok(format!(
        "{} copies on {STREAMS} streams, {unfinished} of which waited when one of {rounds} device processes was killed",
        rounds * STREAMS * turns
    ))
}

/// A graph of one gather into slot 0 with gates, replayed once, and then held at one of them.
fn held_graph(bed: &Bed, gates: &Gates) -> Result<Captured> {
    let mut capturing = Capturing::begin(&bed.client, &bed.worker, &bed.words)?;
    capturing.copy_with_gates(&bed.plan, Direction::Gather, &bed.request(0), gates)?;
    let mut graph = capturing.end()?;
    graph.replay()?;
    graph.finish()?;
    Ok(graph)
}

/// The device process is killed behind each step of a graph's copy.
pub(crate) fn replay_phases(setup: &Setup) -> Result<String> {
    let daemon = setup.own_daemon("stream-phases")?;
    let bed = bed(setup, &daemon, 0)?;
    let rows = bed.fill_cache(1)?;
    let gates = Gates::new(&bed.worker)?;
    let mut graph = held_graph(&bed, &gates)?;
    for gate in 0..GATES {
        bed.clear_packed()?;
        gates.close(gate)?;
        graph.replay()?;
        gates.wait(gate)?;
        daemon.kill_device_process()?;
        gates.open(gate)?;
        graph.finish().with_context(|| format!("killed behind step {gate}"))?;
        ensure!(has_row(&bed, &rows, 0)?, "killed behind step {gate}: the row is not there");
    }
    Ok(format!("{GATES} phases, and every replay was right"))
}

/// The daemon is killed behind each step of a graph's copy.
pub(crate) fn daemon_phases(setup: &Setup) -> Result<String> {
    const NAME: &str = "stream-daemon-phases";
    let mut seen = Vec::new();
    for gate in 0..GATES {
        let mut daemon = setup.own_daemon(NAME)?;
        let bed = bed(setup, &daemon, 0)?;
        let gates = Gates::new(&bed.worker)?;
        let mut graph = held_graph(&bed, &gates)?;
        gates.close(gate)?;
        graph.replay()?;
        gates.wait(gate)?;
        daemon.kill()?;
        gates.open(gate)?;
        graph.wait().with_context(|| format!("killed behind step {gate}"))?;
        eventually("the graph is failed", || Ok(graph.lane.check().is_err().then_some(())))?;
        seen.push(code(graph.lane.check())?);
        // Whoever replays it all the same is let go.
        graph.replay()?;
        graph.wait()?;
    }
    let unknown = [RefusalCode::Unavailable, RefusalCode::IncarnationMismatch];
    ensure!(seen.iter().all(|code| unknown.contains(code)), "{seen:?}");
    Ok(format!("{seen:?}"))
}

/// Words of a lane that hold what its worker never was to write there.
pub(crate) fn scribbled_words(setup: &Setup) -> Result<String> {
    let daemon = setup.own_daemon("stream-scribbled")?;
    let (bed, neighbour) = (bed(setup, &daemon, 0)?, bed(setup, &daemon, 0)?);
    let rows = neighbour.fill_cache(5)?;
    let mut its_queue = neighbour.queue()?;
    let mut its_graph = graph(&neighbour, 1)?;
    let device = daemon.device()?.device_process_pid;
    let values = [0, 1, 3, 1 << 20, 1 << 40, i64::MAX.cast_unsigned(), 1 << 63, u64::MAX];
    let (mut failed, mut kept) = (0, Vec::new());
    for (value, slot) in values.into_iter().zip(8..) {
        for at_done in [false, true] {
            let mut queue = bed.queue()?;
            let mut copies = Vec::new();
            for _ in 0..2 {
                copies.push(bed.ask(&mut queue, Direction::Gather, slot)?);
            }
            let [WordOp::Write { offset: bell, .. }, WordOp::WaitAtLeast { offset: done, .. }] =
                copies[0]
            else {
                bail!("{copies:?}");
            };
            queue.put(&[WordOp::Write { offset: if at_done { done } else { bell }, value }])?;
            // Another copy of the lane, whatever becomes of it.
            queue.put(&copies[0][..1])?;
            queue.wait()?;
            neighbour.clear_packed()?;
            neighbour.order(&mut its_queue, Direction::Gather, 0)?;
            its_queue.finish()?;
            its_graph.replay()?;
            its_graph.finish()?;
            ensure!(
                has_row(&neighbour, &rows, 0)? && has_row(&neighbour, &rows, 1)?,
                "the neighbour's copies are wrong after {value:#x}"
            );
            failed += u64::from(queue.lane.check().is_err());
            kept.push(queue);
        }
    }
    let now = daemon.device()?.device_process_pid;
    ensure!(now == device, "the device process was started again");
    Ok(format!("{failed} of {} lanes were failed, and none of the neighbour's", kept.len()))
}
