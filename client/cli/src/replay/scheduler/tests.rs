//! The scheduler, watched from outside: what its steps do to rows must make sense without looking into it.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// What a row holds: the state after so many tokens of a request, or of every request with that prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Prefix(ChainKey),
    Private(RequestId, u64),
}

fn content(id: RequestId, request: &TraceRequest, tokens: u64) -> Content {
    block_key(request, tokens).map_or(Content::Private(id, tokens), Content::Prefix)
}

/// Follows the steps and knows, for each row, what it holds and which sequence it decodes for.
#[derive(Default)]
struct Watcher {
    holds: HashMap<Row, Content>,
    decoding: HashMap<Row, RequestId>,
    progress: HashMap<RequestId, u64>,
    finished: usize,
    rows_written: usize,
    hits: u64,
}

impl Watcher {
    fn watch(&mut self, limits: Limits, requests: &[TraceRequest], step: &Step) {
        for row in &step.freed {
            assert!(self.decoding.remove(row).is_some(), "{row:?} is freed, but nobody's");
            self.finished += 1;
        }
        let tokens: u64 = step.chunks.iter().map(|chunk| chunk.end - chunk.start).sum();
        assert!(tokens <= limits.chunk_tokens);
        for chunk in &step.chunks {
            self.read(requests, chunk);
        }
        let mut written = Vec::new();
        for chunk in &step.chunks {
            let request = &requests[chunk.request.0];
            assert!(!written.contains(&chunk.destination), "two chunks write one row");
            assert!(!self.decoding.contains_key(&chunk.destination), "a decoding row is written");
            written.push(chunk.destination);
            let after = content(chunk.request, request, chunk.end);
            self.holds.insert(chunk.destination, after);
            self.rows_written += 1;
            self.progress.insert(chunk.request, chunk.end);
            if chunk.end == request.input_tokens {
                self.decoding.insert(chunk.destination, chunk.request);
                self.holds.remove(&chunk.destination);
            } else {
                assert!(chunk.end.is_multiple_of(CHUNK_ALIGNMENT));
            }
        }
        let ended = |chunk: &&Chunk| chunk.end == requests[chunk.request.0].input_tokens;
        let last: Vec<Row> =
            step.chunks.iter().filter(ended).map(|chunk| chunk.destination).collect();
        assert_eq!(last, step.decoding);
        assert!(self.decoding.len() <= limits.max_num_seqs as usize);
    }

    fn read(&mut self, requests: &[TraceRequest], chunk: &Chunk) {
        let request = &requests[chunk.request.0];
        assert!(chunk.start < chunk.end && chunk.end <= request.input_tokens);
        assert!(chunk.destination.0 < u32::MAX);
        match self.progress.get(&chunk.request) {
            Some(before) => assert_eq!(*before, chunk.start),
            None => self.hits += u64::from(chunk.start > 0),
        }
        match chunk.initial {
            Initial::Zero => assert_eq!(chunk.start, 0),
            Initial::Row(row) => {
                assert!(!self.decoding.contains_key(&row), "a decoding row is no stored state");
                let wanted = content(chunk.request, request, chunk.start);
                assert_eq!(self.holds.get(&row), Some(&wanted), "{chunk:?}");
            }
        }
    }
}

fn run(limits: Limits, requests: &[TraceRequest]) -> (Watcher, Vec<Step>, Scheduler) {
    let mut scheduler = Scheduler::new(limits, requests.to_vec()).unwrap();
    let mut sorted = requests.to_vec();
    sorted.sort_by_key(|request| request.arrival_ms);
    let mut watcher = Watcher::default();
    let mut steps = Vec::new();
    while let Some(step) = scheduler.next_step() {
        watcher.watch(limits, &sorted, &step);
        steps.push(step);
        assert!(steps.len() < 1_000_000, "it goes on for ever");
    }
    assert_eq!(scheduler.unfinished(), 0);
    (watcher, steps, scheduler)
}

fn request(arrival_ms: u64, input_tokens: u64, output_tokens: u64, ids: &[u64]) -> TraceRequest {
    let line = format!(
        r#"{{"timestamp": {arrival_ms}, "input_length": {input_tokens}, "output_length": {output_tokens},
            "hash_ids": {ids:?}}}"#
    );
    TraceRequest::parse(line.as_bytes()).unwrap()
}

const SMALL: Limits = Limits { max_num_seqs: 4, chunk_tokens: 2_048, rows: 16 };

#[test]
fn a_lone_prompt_is_cut_at_blocks_and_goes_on_from_stored_rows() {
    let (_, steps, _) = run(SMALL, &[request(5, 5_000, 3, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])]);
    let chunks: Vec<Chunk> = steps.iter().flat_map(|step| step.chunks.clone()).collect();
    let cuts: Vec<(u64, u64)> = chunks.iter().map(|chunk| (chunk.start, chunk.end)).collect();
    assert_eq!(cuts, [(0, 2_048), (2_048, 4_096), (4_096, 5_000)]);
    assert_eq!(chunks[0].initial, Initial::Zero);
    assert_eq!(chunks[1].initial, Initial::Row(chunks[0].destination));
    assert_ne!(chunks[1].destination, chunks[0].destination, "a stored row is not written");
    // One step a chunk, two more tokens, and the step that gives the row back.
    assert_eq!(steps.len(), 6);
    assert_eq!(steps[5].freed, [chunks[2].destination]);
}

#[test]
fn a_stored_prefix_saves_its_tokens_and_is_read_from_its_row() {
    let ids: Vec<u64> = (1..=10).collect();
    let first = request(0, 5_000, 1, &ids);
    let second = request(60_000, 5_120, 1, &ids);
    let (watcher, steps, scheduler) = run(SMALL, &[first, second]);
    assert_eq!((watcher.hits, scheduler.prefix_hits()), (1, 1));
    let of_second: Vec<&Chunk> = steps
        .iter()
        .flat_map(|step| &step.chunks)
        .filter(|chunk| chunk.request == RequestId(1))
        .collect();
    // 4,096 tokens are stored; 4,608 were seen, so the state there is stored too.
    assert_eq!(of_second[0].start, 4_096);
    assert_eq!(of_second[0].end, 4_608);
    assert!(matches!(of_second[0].initial, Initial::Row(row) if row != of_second[0].destination));
}

#[test]
fn the_state_at_a_fork_is_stored_for_the_third_request() {
    let with_tail = |arrival, tail| request(arrival, 1_400, 1, &[7, tail, tail + 1]);
    let requests = [with_tail(0, 100), with_tail(60_000, 200), with_tail(120_000, 300)];
    let (_, _, scheduler) = run(SMALL, &requests);
    // The second one stores the state behind the common block; the third begins from there.
    assert_eq!(scheduler.prefix_hits(), 1);
}

#[test]
fn a_whole_prompt_that_is_stored_still_computes_its_last_block() {
    let ids = [1, 2, 3, 4];
    let requests =
        [request(0, 4_096, 1, &[1, 2, 3, 4, 5, 6, 7, 8]), request(60_000, 2_048, 1, &ids)];
    let (watcher, _, _) = run(SMALL, &requests);
    assert_eq!(watcher.finished, 2);
}

#[test]
fn requests_of_one_step_do_not_read_what_the_step_stores() {
    let ids: Vec<u64> = (1..=12).collect();
    let limits = Limits { chunk_tokens: 4_000, ..SMALL };
    let twins = [request(0, 6_000, 1, &ids), request(0, 6_000, 1, &ids)];
    let (watcher, steps, _) = run(limits, &twins);
    assert_eq!(watcher.hits, 0);
    // The first twin's chunk ends with a block, and the second twin gets the rest of the budget.
    let ends: Vec<u64> = steps[0].chunks.iter().map(|chunk| chunk.end).collect();
    assert_eq!(ends, [3_584, 384]);
}

#[test]
fn freed_rows_are_used_again() {
    let requests: Vec<TraceRequest> =
        (0..40).map(|at| request(at * 10, 700, 20, &[at * 2, at * 2 + 1])).collect();
    let (watcher, steps, _) = run(Limits { rows: 8, ..SMALL }, &requests);
    assert_eq!(watcher.finished, 40);
    assert!(watcher.rows_written >= 40);
    assert!(steps.iter().flat_map(|step| &step.chunks).all(|chunk| chunk.destination.0 < 8));
}

#[test]
fn limits_under_which_requests_could_wait_for_ever_are_refused() {
    let error = |limits| Scheduler::new(limits, Vec::new()).unwrap_err();
    assert_eq!(error(Limits { max_num_seqs: 0, ..SMALL }), LimitsError::NoSequences);
    assert_eq!(error(Limits { chunk_tokens: 63, ..SMALL }), LimitsError::ChunkTooSmall(63));
    let few = LimitsError::TooFewRows { rows: 7, max_num_seqs: 4, needed: 8 };
    assert_eq!(error(Limits { rows: 7, ..SMALL }), few);
}

/// Traces in which prefixes of a few families are shared, cut and extended.
fn traces() -> impl Strategy<Value = Vec<TraceRequest>> {
    let one = (0_u64..3_000, 1_u64..6_000, 0_u64..60, 0_u64..3, 0_u64..12);
    prop::collection::vec(one, 0..40).prop_map(|requests| {
        let build = |(at, (arrival, input, output, family, shared)): (u64, _)| {
            let input: u64 = input;
            let id =
                |block| if block < shared { family * 1_000 + block } else { at * 100_000 + block };
            let ids: Vec<u64> = (0..input.div_ceil(BLOCK_TOKENS)).map(id).collect();
            request(arrival, input, output, &ids)
        };
        (10_u64..).zip(requests).map(build).collect()
    })
}

fn limits() -> impl Strategy<Value = Limits> {
    (1_u32..9, 64_u64..4_096, 0_u32..20).prop_map(|(max_num_seqs, chunk_tokens, more)| Limits {
        max_num_seqs,
        chunk_tokens,
        rows: 2 * max_num_seqs + more,
    })
}

proptest! {
    #[test]
    fn every_request_finishes_and_reads_only_its_own_prefix(limits in limits(), requests in traces()) {
        let (watcher, _, scheduler) = run(limits, &requests);
        prop_assert_eq!(watcher.finished, requests.len());
        prop_assert_eq!(watcher.hits, scheduler.prefix_hits());
        prop_assert!(watcher.decoding.is_empty());
    }

    #[test]
    fn rows_stay_inside_the_cache_and_the_same_trace_gives_the_same_steps(
        limits in limits(), requests in traces()
    ) {
        let (_, steps, _) = run(limits, &requests);
        for chunk in steps.iter().flat_map(|step| &step.chunks) {
            prop_assert!(chunk.destination.0 < limits.rows);
        }
        let (_, again, _) = run(limits, &requests);
        prop_assert_eq!(steps, again);
    }

    #[test]
    fn a_chunk_never_passes_its_budget_fork_or_prompt(
        blocks in 0_u64..8, fine in 0_u64..8, more in 1_u64..6_000, budget in 0_u64..5_000, fork in 0_u64..12
    ) {
        let position = blocks * BLOCK_TOKENS + fine * CHUNK_ALIGNMENT;
        let input = position + more;
        let fork = Some(fork * BLOCK_TOKENS).filter(|fork| *fork < input);
        match chunk_end(position, input, budget, fork) {
            None => prop_assert!(budget < CHUNK_ALIGNMENT),
            Some(end) => {
                prop_assert!(position < end && end <= input && end - position <= budget);
                prop_assert!(fork.is_none_or(|fork| fork <= position || end <= fork));
            }
        }
    }
}
