//! Copies in the order of a worker's streams.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use statecopy_client::{DataType, Direction, Indices, PlanKind, Request};
use statecopy_kernels::layout::CacheLayout;

use crate::lanes::{Bed, Gates, Queue, ROWS, Sizes, bell_and_wait, share_words};
use crate::patience::PATIENCE;
use crate::rig::{Rig, Spec, Target};
use crate::setup::Setup;
use crate::watch::Watch;

use super::copies::both_widths;
use super::lives::steady;

/// A word that no other copy of a case has.
pub(super) fn word(number: u64) -> u64 {
    (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Streams that fill rows, indices and packed rows by kernels, some of which take long; copies between; and what each stream
/// then saw.
pub(crate) fn producers(setup: &Setup) -> Result<String> {
    const STREAMS: u64 = 8;
    let (turns, slow_turns) = setup.size((1_250, 4), (24, 1));
    let long = setup.size(Duration::from_millis(200), Duration::from_millis(20));
    let sizes = Sizes { payload: 1_024, slots: STREAMS, entries: STREAMS * turns };
    let bed = Bed::new(setup, setup.client()?, sizes)?;
    let mut queues: Vec<Queue> = (0..STREAMS).map(|_| bed.queue()).collect::<Result<_, _>>()?;
    let begun = Instant::now();
    let mut slow = 0;
    for turn in 0..turns {
        for (queue, slot) in queues.iter_mut().zip(0..) {
            let entry = turn * STREAMS + slot;
            // Not all streams at once: short producers meet long ones.
            let is_slow = (turn + 5 * slot) % (turns / slow_turns) == 7;
            let takes = if is_slow { long } else { Duration::ZERO };
            let row = slot * (ROWS / STREAMS) + turn % (ROWS / STREAMS);
            bed.name_row(&mut queue.stream, slot, row.cast_signed(), takes)?;
            if turn % 2 == 0 {
                bed.fill_row(&mut queue.stream, row, word(entry))?;
                bed.order(queue, Direction::Gather, slot)?;
            } else {
                bed.fill_slot(&mut queue.stream, slot, word(entry))?;
                bed.order(queue, Direction::Scatter, slot)?;
            }
            if is_slow {
                slow += 1;
                ensure!(!queue.stream.is_idle()?, "the producer was waited for");
            }
            if turn % 2 == 0 {
                bed.log_slot(&mut queue.stream, slot, entry)?;
            } else {
                bed.log_row(&mut queue.stream, row, entry)?;
            }
            // An index that is read too early, or by the next copy, is that of no row.
            bed.name_row(&mut queue.stream, slot, -1, Duration::ZERO)?;
        }
    }
    queues.iter().try_for_each(Queue::finish)?;
    let words: Vec<u64> = (0..STREAMS * turns).map(word).collect();
    bed.check_log(&words)?;
    Ok(format!(
        "{} copies on {STREAMS} streams, {slow} of them behind a kernel of {long:?}, in {:.1} s",
        words.len(),
        begun.elapsed().as_secs_f64()
    ))
}

/// More rings of one lane than any part of its protocol could count in 20 bits. Where each ring of a stream costs a change of
/// context, the processor rings but for the last.
pub(crate) fn many_rings(setup: &Setup) -> Result<String> {
    const SLOTS: u64 = 900;
    let rings: u64 = setup.size((1 << 20) + 2_000, 2_500);
    let by_stream = if setup.mps { rings } else { setup.size(4_000, 1_000) };
    let bed = Bed::new(setup, setup.client()?, Sizes { payload: 16, slots: SLOTS, entries: 0 })?;
    let mut queue = bed.queue()?;
    let begun = Instant::now();
    let mut done = 0;
    while done < rings {
        let upto = rings.min((done / SLOTS + 64) * SLOTS);
        let rows = bed.fill_cache(done)?;
        bed.clear_packed()?;
        for ring in done..upto {
            let request = bed.request(ring % SLOTS);
            let ordered = queue.lane.order(&bed.plan, Direction::Gather, &request)?;
            if ring + by_stream < rings {
                ordered.ring();
                if ring + 1 == upto {
                    ordered.wait(Duration::from_secs(20))?;
                }
            } else {
                let operations = bell_and_wait(&ordered);
                queue.put(&operations)?;
            }
        }
        queue.finish()?;
        for slot in 0..SLOTS {
            let row = usize::try_from(slot % ROWS)?;
            ensure!(bed.read_slot(slot)? == rows[row], "slot {slot} after ring {upto}");
        }
        done = upto;
    }
    let seconds = begun.elapsed().as_secs_f64();
    Ok(format!("{rings} rings in {seconds:.1} s, {by_stream} of them by the stream"))
}

pub(crate) fn fp32(setup: &Setup) -> Result<String> {
    plan_kind(setup, DataType::Float32, PlanKind::Fused)
}

pub(crate) fn bf16(setup: &Setup) -> Result<String> {
    plan_kind(setup, DataType::BFloat16, PlanKind::Fused)
}

pub(crate) fn fp16(setup: &Setup) -> Result<String> {
    plan_kind(setup, DataType::Float16, PlanKind::ByteCopy)
}

/// Both widths with their extremes, both directions, flags in device memory, one layer and a batch of three.
fn plan_kind(setup: &Setup, dtype: DataType, kind: PlanKind) -> Result<String> {
    let gpu = setup.gpu()?;
    let payload = 3 * 32 * 32;
    let layout = CacheLayout::with_page_stride(dtype, [24, 3, 32, 32], 3 * payload + 64)?;
    let bytes = layout.payload_bytes();
    let layers = (0..3).map(|at| (layout.clone(), at * bytes)).collect();
    let mut rig = Rig::new(setup.client()?, &gpu, &Spec::of_layers(layers, 16))?;
    rig.expect_kind(kind)?;
    let worker = gpu.worker(setup)?;
    let words = share_words(&rig.client, &worker)?;
    let mut queue = Queue::open(&rig.client, &worker, &words)?;
    let flags = [1, 1, 1, 0, 1, 255, 1, 2, 0, 1];
    let mut copies = 0;
    for direction in Direction::ALL {
        for indices in both_widths(direction, 24) {
            for target in [Target::Layer(1), Target::All] {
                for flags in [None, Some(&flags[..])] {
                    copies += 1;
                    rig.compute(copies)?;
                    rig.copy_in_stream(&mut queue, direction, target, &indices, flags)?;
                }
            }
        }
    }
    Ok(format!("{copies} copies by {} plan", kind.label()))
}

/// Copies that were accepted and whose bells do not ring: on 64 lanes of three workers, a thousand of them on one.
pub(crate) fn unrung(setup: &Setup) -> Result<String> {
    const LANES: [u64; 3] = [22, 21, 21];
    const AHEAD: u64 = 1_000;
    let daemon = setup.shown_daemon("unrung")?;
    let watch = Watch::of(&daemon)?;
    let sizes = Sizes { payload: 1_024, slots: AHEAD + 100, entries: 0 };
    let bed = || Bed::new(setup, setup.client_of(daemon.socket())?, sizes);
    let beds = [bed()?, bed()?, bed()?];
    let mut waiting = Vec::new();
    for ((bed, lanes), seed) in beds.iter().zip(LANES).zip(1..) {
        let rows = bed.fill_cache(seed)?;
        bed.clear_packed()?;
        for lane in 0..lanes {
            let mut queue = bed.queue()?;
            // The first lane of all is far ahead.
            let slots =
                if waiting.is_empty() { 0..AHEAD } else { AHEAD + 2 * lane..AHEAD + 2 * lane + 2 };
            let mut asked = None;
            for slot in slots.clone() {
                asked = Some(bed.ask(&mut queue, Direction::Gather, slot)?);
            }
            waiting.push((bed, rows.clone(), queue, slots, asked.context("a copy")?));
        }
    }
    overtaking(&beds[2], &waiting.last().context("a lane")?.1)?;
    let came = Instant::now();
    let other = bed()?;
    let indices = Indices::Int32(&[3]);
    other.plan.gather(Request::new(indices, other.packed_place()))?;
    other.client.clone().close()?;
    let came = came.elapsed();
    let mut slowest = Duration::ZERO;
    // Last come, first rung: the bell of the last copy rings for those before it.
    for (bed, rows, queue, slots, asked) in waiting.iter_mut().rev() {
        let is_there = |slot: u64| {
            let row = usize::try_from(slot % ROWS)?;
            anyhow::Ok(bed.read_slot(slot)? == rows[row])
        };
        ensure!(!is_there(slots.start)?, "slot {} was copied without its bell", slots.start);
        let rung = Instant::now();
        queue.put(&asked[..])?;
        queue.finish()?;
        slowest = slowest.max(rung.elapsed());
        for slot in slots.clone() {
            ensure!(is_there(slot)?, "slot {slot} does not hold its row");
        }
    }
    let answers = watch.end()?;
    Ok(format!(
        "every bell was answered, the slowest after {:.1} ms; another session came, copied and went in {:.0} ms; {answers}",
        slowest.as_secs_f64() * 1e3,
        came.as_secs_f64() * 1e3
    ))
}

/// Lanes that are used for the first time, more than a kernel has graphs and a launcher streams: what serving takes of the device
/// was taken before (contract: Both).
pub(crate) fn first_launches(setup: &Setup) -> Result<String> {
    const LANES: u64 = 40;
    const TURNS: u64 = 10;
    let daemon = setup.own_daemon("first-launches")?;
    let sizes = Sizes { payload: 1_024, slots: LANES, entries: 0 };
    let bed = Bed::new(setup, setup.client_of(daemon.socket())?, sizes)?;
    let gates = Gates::new(&bed.worker)?;
    let mut queues: Vec<Queue> = (0..LANES).map(|_| bed.queue()).collect::<Result<_, _>>()?;
    // What the worker's own driver needs for streams that write and wait.
    for (queue, slot) in queues.iter_mut().zip(0..) {
        bed.name_row(&mut queue.stream, slot, slot.cast_signed(), Duration::ZERO)?;
        gates.hold(&mut queue.stream, 0)?;
        queue.wait()?;
    }
    let gpu = setup.gpu()?;
    let before = steady(&gpu)?;
    for turn in 0..TURNS {
        let direction = if turn % 2 == 0 { Direction::Gather } else { Direction::Scatter };
        for (queue, slot) in queues.iter_mut().zip(0..) {
            bed.order(queue, direction, slot)?;
        }
    }
    queues.iter().try_for_each(Queue::finish)?;
    let taken = before.saturating_sub(gpu.free_bytes()?);
    ensure!(taken == 0, "{taken} bytes of the device were taken by copies");
    Ok(format!("{} copies on {LANES} lanes took no memory of the device", LANES * TURNS))
}

/// Copies one after another, while sessions come whose kernels nobody else has, copy and go.
pub(crate) fn new_classes(setup: &Setup) -> Result<String> {
    let turns = setup.size(20, 2);
    let daemon = setup.own_daemon("new-classes")?;
    let sizes = Sizes { payload: 1_024, slots: ROWS, entries: 0 };
    let bed = Bed::new(setup, setup.client_of(daemon.socket())?, sizes)?;
    let rows = bed.fill_cache(5)?;
    bed.clear_packed()?;
    let mut queue = bed.queue()?;
    let gpu = setup.gpu()?;
    let come_and_go = || {
        for _ in 0..turns {
            for dtype in [DataType::BFloat16, DataType::Float16, DataType::Int8, DataType::Float64]
            {
                let layout = CacheLayout::with_page_stride(dtype, [8, 2, 16, 16], 512)?;
                let client = setup.client_of(daemon.socket())?;
                Rig::new(client, &gpu, &Spec::of(layout, 4))?.serves(1)?;
            }
        }
        anyhow::Ok(())
    };
    let mut took = Vec::new();
    thread::scope(|scope| {
        let others = scope.spawn(come_and_go);
        for slot in (0..ROWS).cycle() {
            let asked = Instant::now();
            bed.order(&mut queue, Direction::Gather, slot)?;
            while !queue.stream.is_idle()? {
                ensure!(asked.elapsed() < PATIENCE, "the copy of slot {slot} is not made");
                thread::yield_now();
            }
            took.push(asked.elapsed());
            queue.lane.check()?;
            if others.is_finished() {
                break;
            }
        }
        others.join().map_err(|_| anyhow!("the others panicked"))?
    })?;
    for (slot, row) in (0..took.len().min(rows.len()) as u64).zip(&rows) {
        ensure!(bed.read_slot(slot)? == *row, "slot {slot} does not hold its row");
    }
    took.sort();
    let at = |part: usize| took[(took.len() - 1) * part / 1_000].as_secs_f64() * 1e6;
    Ok(format!(
        "{} copies while {} sessions came and went: median {:.0} us, 99.9 % within {:.0} us, all within {:.0} us",
        took.len(),
        turns * 4,
        at(500),
        at(999),
        at(1_000)
    ))
}

/// The first of two streams that asks is the last that rings.
fn overtaking(bed: &Bed, rows: &[Vec<u8>]) -> Result<()> {
    let (slot, other_slot) = (90, 91);
    let (mut first, mut second) = (bed.queue()?, bed.queue()?);
    let asked = bed.ask(&mut first, Direction::Gather, slot)?;
    bed.order(&mut second, Direction::Gather, other_slot)?;
    second.finish()?;
    ensure!(bed.read_slot(other_slot)? == rows[usize::try_from(other_slot % ROWS)?], "not copied");
    ensure!(bed.read_slot(slot)?.iter().all(|byte| *byte == 0), "copied without its bell");
    first.put(&asked)?;
    first.finish()?;
    ensure!(bed.read_slot(slot)? == rows[usize::try_from(slot % ROWS)?], "not copied");
    Ok(())
}
