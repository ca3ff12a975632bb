//! A continuous-batching scheduler with chunked prefill and a prefix cache of states, in virtual time.
//!
//! It decides what a server would copy and nothing else: no bytes, no clock, no randomness. A request waits until it is
//! admitted (in order of arrival, while fewer than `max_num_seqs` run), is prefilled chunk by chunk, decodes one token a
//! step, and gives its row back.
//!
//! ```text
//! waiting --admitted--> prefilling --last chunk--> decoding --last token--> finished
//!                        |      ^
//!                        +chunk-+
//! ```
//!
//! A chunk gathers an initial state (zero for a new sequence, else a row) and scatters the final state into a row. Where a
//! chunk ends at the end of a prefix block, its row is given to the prefix cache under the block's key, and the sequence
//! goes on from there into a new row: nothing is copied to store a state. A request whose prefix is stored begins from
//! the stored row. Chunks are cut so that states at forks (where a prompt leaves a prefix that was seen before) are
//! stored. Decoding changes its row in place and copies nothing.
//!
//! Invariants, which the tests check from outside: a row has at most one owner; a step's chunks hold no more tokens
//! than the budget; no chunk reads a state that is not its own prefix; every request finishes.

mod rows;

use std::collections::{HashSet, VecDeque};

use self::rows::RowPool;
use super::trace::{BLOCK_TOKENS, ChainKey, TraceRequest};

/// A chunk that does not end a prompt ends on a multiple of this.
pub(crate) const CHUNK_ALIGNMENT: u64 = 64;

/// The virtual clock: how long a step takes, and each token of its chunks. They decide how requests overlap, and nothing
/// else: 2,048 tokens take 39 ms.
const STEP_US: u64 = 8_000;
const TOKEN_US: u64 = 15;

/// Keys of prefixes that were seen, to find forks. When there are more, all are forgotten.
const SEEN_MAX: usize = 1 << 20;

/// A row of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Row(pub(crate) u32);

/// A request's place in the trace, by arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RequestId(pub(crate) usize);

/// What a server may use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Sequences that run at once.
    pub(crate) max_num_seqs: u32,
    /// Tokens of all chunks of one step.
    pub(crate) chunk_tokens: u64,
    /// Rows of the cache.
    pub(crate) rows: u32,
}

/// Limits under which requests could wait for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LimitsError {
    #[error("max-num-seqs is 0; at least one sequence must run")]
    NoSequences,
    #[error("chunk-tokens is {0}; a chunk has at least {CHUNK_ALIGNMENT} tokens")]
    ChunkTooSmall(u64),
    #[error(
        "rows is {rows}; {max_num_seqs} sequences need at least {needed}: each may read one row while it writes another"
    )]
    TooFewRows { rows: u32, max_num_seqs: u32, needed: u64 },
}

impl LimitsError {
    /// What to do about it.
    pub(crate) fn remedy(&self) -> String {
        match self {
            Self::NoSequences => "Let one sequence or more run: --max-num-seqs 1.".to_owned(),
            Self::ChunkTooSmall(_) => {
                format!("Give a step more tokens: --chunk-tokens {CHUNK_ALIGNMENT} or more.")
            }
            Self::TooFewRows { needed, .. } => {
                format!("Give --rows {needed} or more, or a smaller --max-num-seqs.")
            }
        }
    }
}

/// Where a chunk's initial state comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Initial {
    /// A new sequence: zero, whatever its row holds.
    Zero,
    /// A row: the sequence's own or a stored one.
    Row(Row),
}

/// A part of one prompt, computed in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Whose prompt.
    pub(crate) request: RequestId,
    /// Its first token.
    pub(crate) start: u64,
    /// One past its last token.
    pub(crate) end: u64,
    /// The state before `start`.
    pub(crate) initial: Initial,
    /// Where the state after `end` goes.
    pub(crate) destination: Row,
}

/// What one step does, in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// Rows that finished sequences give back.
    pub(crate) freed: Vec<Row>,
    /// Prompts' chunks: all initial states are gathered before any final state is scattered.
    pub(crate) chunks: Vec<Chunk>,
    /// Rows whose sequences decode from the next step on.
    pub(crate) decoding: Vec<Row>,
}

#[derive(Debug)]
struct Sequence {
    request: RequestId,
    trace: TraceRequest,
    phase: Phase,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Prefilling { position: u64, source: Source, fork: Option<u64> },
    Decoding { row: Row, left: u64 },
}

/// Where a prefilling sequence's state is.
#[derive(Debug, Clone, Copy)]
enum Source {
    None,
    Own(Row),
    Stored(ChainKey, Row),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    waiting: VecDeque<(RequestId, TraceRequest)>,
    running: Vec<Sequence>,
    rows: RowPool,
    seen: HashSet<ChainKey>,
    clock_us: u64,
    steps: u64,
    prefix_hits: u64,
}

impl Scheduler {
    /// Schedules requests of a trace, in any order.
    ///
    /// # Errors
    /// Limits under which requests could wait for ever.
    pub(crate) fn new(
        limits: Limits,
        mut requests: Vec<TraceRequest>,
    ) -> Result<Self, LimitsError> {
        if limits.max_num_seqs == 0 {
            return Err(LimitsError::NoSequences);
        }
        if limits.chunk_tokens < CHUNK_ALIGNMENT {
            return Err(LimitsError::ChunkTooSmall(limits.chunk_tokens));
        }
        let needed = 2 * u64::from(limits.max_num_seqs);
        if u64::from(limits.rows) < needed {
            let Limits { rows, max_num_seqs, .. } = limits;
            return Err(LimitsError::TooFewRows { rows, max_num_seqs, needed });
        }
        requests.sort_by_key(|request| request.arrival_ms);
        Ok(Self {
            limits,
            waiting: requests.into_iter().enumerate().map(|(at, it)| (RequestId(at), it)).collect(),
            running: Vec::new(),
            rows: RowPool::new(limits.rows),
            seen: HashSet::new(),
            clock_us: 0,
            steps: 0,
            prefix_hits: 0,
        })
    }

    /// Steps so far.
    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    /// Requests that began from a stored row so far.
    pub(crate) fn prefix_hits(&self) -> u64 {
        self.prefix_hits
    }

    /// Requests that wait or run.
    pub(crate) fn unfinished(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// The next step, or `None` when every request has finished.
    pub(crate) fn next_step(&mut self) -> Option<Step> {
        if self.unfinished() == 0 {
            return None;
        }
        self.steps += 1;
        let mut step = Step { freed: self.decode(), ..Step::default() };
        if let (true, Some((_, next))) = (self.running.is_empty(), self.waiting.front()) {
            self.clock_us = self.clock_us.max(next.arrival_ms.saturating_mul(1_000));
        }
        let mut budget = self.limits.chunk_tokens;
        for at in 0..self.running.len() {
            self.prefill(at, &mut budget, &mut step);
        }
        while self.admit(budget) {
            let before = budget;
            self.prefill(self.running.len() - 1, &mut budget, &mut step);
            assert!(budget < before, "an admitted request has its first chunk at once");
        }
        self.rows.end_step();
        self.clock_us += STEP_US + (self.limits.chunk_tokens - budget) * TOKEN_US;
        Some(step)
    }

    /// Every decoding sequence makes one token; the finished ones go.
    fn decode(&mut self) -> Vec<Row> {
        let mut freed = Vec::new();
        self.running.retain_mut(|sequence| match &mut sequence.phase {
            Phase::Decoding { row, left: 0 } => {
                freed.push(*row);
                false
            }
            Phase::Decoding { left, .. } => {
                *left -= 1;
                true
            }
            Phase::Prefilling { .. } => true,
        });
        for row in &freed {
            self.rows.release(*row);
        }
        freed
    }

    /// Lets the next request in, if it has arrived, there is room, and its first chunk fits what is left of the budget.
    fn admit(&mut self, budget: u64) -> bool {
        let room = self.running.len() < self.limits.max_num_seqs as usize;
        let Some((_, next)) = self.waiting.front().filter(|_| room) else { return false };
        if budget == 0 || next.arrival_ms.saturating_mul(1_000) > self.clock_us {
            return false;
        }
        let (position, source) = self.stored_prefix(next);
        let fork = self.fork(next, position);
        if chunk_end(position, next.input_tokens, budget, fork).is_none() {
            return false;
        }
        let Some((request, trace)) = self.waiting.pop_front() else { return false };
        if let Source::Stored(key, _) = source {
            self.rows.pin(key);
            self.prefix_hits += 1;
        }
        if self.seen.len() + trace.chain.len() > SEEN_MAX {
            self.seen.clear();
        }
        self.seen.extend(&trace.chain);
        let phase = Phase::Prefilling { position, source, fork };
        self.running.push(Sequence { request, trace, phase });
        true
    }

    /// The longest stored prefix that leaves at least one token to compute.
    fn stored_prefix(&self, request: &TraceRequest) -> (u64, Source) {
        let blocks = (1_u64..).zip(&request.chain);
        let usable = blocks.take_while(|(count, _)| count * BLOCK_TOKENS < request.input_tokens);
        let stored = usable.filter_map(|(count, key)| Some((count, *key, self.rows.find(*key)?)));
        stored.last().map_or((0, Source::None), |(count, key, row)| {
            (count * BLOCK_TOKENS, Source::Stored(key, row))
        })
    }

    /// Where a prompt leaves the prefixes seen before, if that lies ahead of `position`: a state worth storing.
    fn fork(&self, request: &TraceRequest, position: u64) -> Option<u64> {
        let shared = request.chain.iter().take_while(|key| self.seen.contains(key)).count() as u64;
        let fork = shared * BLOCK_TOKENS;
        (fork > position && fork < request.input_tokens).then_some(fork)
    }

    /// Gives a prefilling sequence its chunk of this step, if the budget has one.
    fn prefill(&mut self, at: usize, budget: &mut u64, step: &mut Step) {
        let sequence = &mut self.running[at];
        let Phase::Prefilling { position, source, fork } = sequence.phase else { return };
        let input = sequence.trace.input_tokens;
        let Some(end) = chunk_end(position, input, *budget, fork) else { return };
        *budget -= end - position;
        let destination = match source {
            Source::Own(row) => row,
            Source::None | Source::Stored(..) => self.rows.allocate(),
        };
        let initial = match source {
            Source::None => Initial::Zero,
            Source::Own(row) => Initial::Row(row),
            Source::Stored(key, row) => {
                self.rows.unpin_after_step(key);
                Initial::Row(row)
            }
        };
        let request = sequence.request;
        step.chunks.push(Chunk { request, start: position, end, initial, destination });
        if end == input {
            // The last chunk makes the first token.
            let left = sequence.trace.output_tokens.saturating_sub(1);
            sequence.phase = Phase::Decoding { row: destination, left };
            step.decoding.push(destination);
            return;
        }
        let source = match block_key(&sequence.trace, end) {
            Some(key) if self.rows.store(key, destination) => Source::Stored(key, destination),
            _ => Source::Own(destination),
        };
        sequence.phase = Phase::Prefilling { position: end, source, fork };
    }
}

/// The key of the prefix of `tokens` tokens, where a block ends there.
fn block_key(request: &TraceRequest, tokens: u64) -> Option<ChainKey> {
    let blocks = tokens.is_multiple_of(BLOCK_TOKENS).then_some(tokens / BLOCK_TOKENS)?;
    let last = usize::try_from(blocks).ok()?.checked_sub(1)?;
    request.chain.get(last).copied()
}

/// Where the chunk that begins at `position` ends: at the fork or the prompt's end when the budget reaches it; otherwise
/// at the last end of a block that it reaches, or at least on a multiple of [`CHUNK_ALIGNMENT`]. `None` when it does not
/// reach even that.
fn chunk_end(position: u64, input: u64, budget: u64, fork: Option<u64>) -> Option<u64> {
    let target = fork.filter(|fork| position < *fork).unwrap_or(input);
    let reached = position.saturating_add(budget);
    if reached >= target {
        return Some(target);
    }
    let block = reached / BLOCK_TOKENS * BLOCK_TOKENS;
    let fine = reached / CHUNK_ALIGNMENT * CHUNK_ALIGNMENT;
    [block, fine].into_iter().find(|end| *end > position)
}

#[cfg(test)]
mod tests;
