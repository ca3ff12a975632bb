//! A worker's session memory, the station that serves it, and a model of all that the executor may write there.
//!
//! The model is told of every byte that the worker writes. From that it says what the next turn must find: nothing, a broken
//! ring, or a request; and which words the executor then writes. Every other byte must stay as the worker left it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use statecopy_kernels::host::{HostDevice, HostLauncher};
use statecopy_proto::{Incarnation, RefusalCode};
use statecopy_session::layout::{
    ANSWER_WORDS, COMPLETION_ANSWER, COMPLETION_BYTES, COMPLETION_STATE, COMPLETIONS,
    DESCRIPTOR_BYTES, DESCRIPTOR_WORDS, EXECUTOR_SLEEPING, SUBMITTED, SUBMITTER_SLEEPING, WAKE,
};
use statecopy_session::{
    Answer, CopyDescriptor, Executor as Ring, Identity, Moved, Parameters, SessionMemory, Waker,
};

use super::tenant::{Job, SELECTED_MAX, Tenant, compare, index};
use crate::counters::{Counter, Counters};
use crate::device_process::copying::Inline;
use crate::device_process::sessions::Sessions;
use crate::device_process::station::{Scope, Station, Turn};

/// Slots of every ring: few, so that it goes round often.
pub(super) const SLOTS: u64 = RING.len() as u64;
const RING: [Before; 4] = [Before::Died(0); 4];
const INLINE_BYTES: u32 = 4096;
/// What a `state` word holds below the sequence.
const ACCEPTED: u64 = 1;
const ANSWERED: u64 = 2;
const ACCEPTED_AGAIN: u64 = 3;

/// What the executor shares between its stations.
pub(super) struct Shared {
    pub(super) launcher: HostLauncher,
    pub(super) sessions: Sessions<HostDevice>,
    pub(super) counters: Counters,
}

/// What one turn came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Idle,
    Broken,
    /// A part of a copy is done.
    Moving,
    Copied,
    Refused,
}

/// What an inherited request came to under earlier executors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    Answered,
    Died(u8),
}

/// Whether new requests are served. As in the station, but counted by this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Closing {
    Open,
    Emptying(u64),
    Closed,
}

/// What the next take must find.
enum Find {
    Nothing,
    Broken,
    Request(CopyDescriptor),
}

/// A worker and its station.
pub(super) struct Worker {
    pub(super) tenant: Tenant,
    memory: SessionMemory,
    /// The same memory, as its worker has it.
    file: File,
    station: Station<HostDevice>,
    /// What every byte of the session memory should be.
    model: Vec<u8>,
    taken: u64,
    inherited: u64,
    before: [Before; RING.len()],
    job: Option<Job>,
    broken: bool,
    /// The next turn tells that the ring is broken, whatever the words say by then.
    doomed: bool,
    closing: Closing,
}

impl Worker {
    pub(super) fn new(tenant: Tenant) -> Self {
        let (memory, file, model) = fresh_memory(&tenant);
        let station = station(&tenant, memory.executor(Waker::Futex));
        Self {
            tenant,
            memory,
            file,
            station,
            model,
            taken: 0,
            inherited: 0,
            before: RING,
            job: None,
            broken: false,
            doomed: false,
            closing: Closing::Open,
        }
    }

    /// The session opens again, with a fresh ring.
    pub(super) fn reopen(&mut self) {
        (self.memory, self.file, self.model) = fresh_memory(&self.tenant);
        self.station = station(&self.tenant, self.memory.executor(Waker::Futex));
        (self.taken, self.inherited) = (0, 0);
        (self.job, self.closing) = (None, Closing::Open);
        (self.broken, self.doomed) = (false, false);
    }

    /// The device process dies, whatever runs, and the next one goes on with what it finds.
    pub(super) fn restart(&mut self) {
        let executor = self.memory.resume_executor(Waker::Futex);
        self.station = station(&self.tenant, executor);
        (self.job, self.closing) = (None, Closing::Open);
        let submitted = self.word(SUBMITTED);
        self.doomed = submitted > u64::MAX >> 2;
        if self.doomed {
            return;
        }
        (self.taken, self.inherited) = (submitted.saturating_sub(SLOTS), submitted);
        for sequence in self.taken + 1..=submitted {
            let state = self.word(completion_at(sequence) + COMPLETION_STATE);
            self.before[slot_of(sequence)] = match state ^ sequence << 2 {
                ANSWERED => Before::Answered,
                ACCEPTED => Before::Died(1),
                ACCEPTED_AGAIN => Before::Died(2),
                _ => Before::Died(0),
            };
        }
    }

    /// Bytes of the session memory.
    pub(super) fn bytes(&self) -> u64 {
        self.model.len() as u64
    }

    /// The count of submitted requests, as the worker left it.
    pub(super) fn submitted(&self) -> u64 {
        self.word(SUBMITTED)
    }

    /// How many requests were taken.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// The worker writes into its session memory, wherever it likes.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, offset).expect("inside the session memory");
        let at = index(offset);
        self.model[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Writes descriptor and inline space of the next request, and counts it: as a worker should, but past a full ring too.
    pub(super) fn publish(&mut self, words: [u64; DESCRIPTOR_WORDS], inline: &[u8]) {
        let sequence = self.submitted().wrapping_add(1);
        self.write(self.inline_at(sequence), inline);
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        self.write(self.descriptor_at(sequence), &bytes);
        self.write(SUBMITTED, &sequence.to_ne_bytes());
    }

    /// Where the inline space of a request begins.
    pub(super) fn inline_at(&self, sequence: u64) -> u64 {
        self.memory.parameters().inline() + slot_of(sequence) as u64 * u64::from(INLINE_BYTES)
    }

    /// Where the descriptor of a request begins.
    pub(super) fn descriptor_at(&self, sequence: u64) -> u64 {
        let at = slot_of(sequence) as u64 * u64::from(DESCRIPTOR_BYTES);
        self.memory.parameters().descriptors() + at
    }

    /// One turn of the station, held against the model.
    ///
    /// # Panics
    /// When the executor does anything else than it must.
    pub(super) fn turn(&mut self, shared: &mut Shared) -> Outcome {
        let job = self.job.take();
        let found = if job.is_some() { Find::Nothing } else { self.find() };
        let Shared { launcher, sessions, counters } = shared;
        let copies = copies(counters);
        let turned = self.station.turn(launcher, sessions, counters, false);
        if turned.is_err() {
            self.station.note_told();
        }
        let outcome = match (job, found) {
            (Some(job), _) => self.advance(job),
            (None, Find::Nothing) => Outcome::Idle,
            (None, Find::Broken) => {
                self.broken = true;
                Outcome::Broken
            }
            (None, Find::Request(descriptor)) => self.begin(&descriptor),
        };
        match outcome {
            Outcome::Idle => assert_eq!(turned, Ok(Turn::Idle)),
            Outcome::Broken => assert!(turned.is_err(), "a broken ring was served: {turned:?}"),
            Outcome::Moving | Outcome::Copied | Outcome::Refused => {
                assert_eq!(turned, Ok(Turn::Progressed));
                self.tenant.check();
            }
        }
        let done = u64::from(outcome == Outcome::Copied);
        assert_eq!(self::copies(counters), copies + done, "every copy is counted once");
        outcome
    }

    /// What the ring holds, by the rules of the session memory.
    fn find(&mut self) -> Find {
        if self.broken {
            return Find::Nothing;
        }
        if self.doomed {
            return Find::Broken;
        }
        let submitted = self.submitted();
        let jumped = submitted.checked_sub(self.taken).is_none_or(|ahead| ahead > SLOTS);
        if jumped || submitted > u64::MAX >> 2 {
            return Find::Broken;
        }
        while self.taken < submitted {
            let sequence = self.taken + 1;
            if sequence <= self.inherited && self.before[slot_of(sequence)] == Before::Answered {
                self.taken = sequence;
                continue;
            }
            let at = self.descriptor_at(sequence);
            let words = std::array::from_fn(|word| self.word(at + word as u64 * 8));
            let descriptor = CopyDescriptor::from_words(words);
            if descriptor.sequence != sequence {
                return Find::Broken;
            }
            self.taken = sequence;
            return Find::Request(descriptor);
        }
        if self.closing != Closing::Open {
            self.closing = Closing::Closed;
        }
        Find::Nothing
    }

    fn deaths(&self, sequence: u64) -> u8 {
        match self.before[slot_of(sequence)] {
            Before::Died(deaths) if sequence <= self.inherited => deaths,
            Before::Died(_) | Before::Answered => 0,
        }
    }

    fn begin(&mut self, descriptor: &CopyDescriptor) -> Outcome {
        let sequence = descriptor.sequence;
        let deaths = self.deaths(sequence);
        let refused = match self.closing {
            _ if deaths >= 2 => Some(RefusalCode::DeviceLost),
            Closing::Open => None,
            Closing::Closed | Closing::Emptying(0) => {
                self.closing = Closing::Closed;
                Some(RefusalCode::Draining)
            }
            Closing::Emptying(left) => {
                self.closing = Closing::Emptying(left - 1);
                None
            }
        };
        if let Some(code) = refused {
            return self.refused(sequence, Some(code));
        }
        let at = index(self.inline_at(sequence));
        let inline = &self.model[at..at + index(INLINE_BYTES.into())];
        let Some(job) = self.tenant.judge(descriptor, inline, deaths > 0) else {
            return self.refused(sequence, None);
        };
        if job.request.selected > 0 {
            let phase = if deaths == 0 { ACCEPTED } else { ACCEPTED_AGAIN };
            self.expect_word(completion_at(sequence) + COMPLETION_STATE, sequence << 2 | phase);
        }
        self.advance(job)
    }

    fn advance(&mut self, mut job: Job) -> Outcome {
        if !self.tenant.advance(&mut job) {
            self.job = Some(job);
            return Outcome::Moving;
        }
        let moved = Moved { rows_copied: job.moved.copied, rows_masked: job.moved.masked };
        let answer = self.answer(job.sequence);
        assert_eq!(answer.result, Ok(moved), "{:?}", job.request);
        Outcome::Copied
    }

    fn refused(&mut self, sequence: u64, code: Option<RefusalCode>) -> Outcome {
        let fault = self.answer(sequence).result.expect_err("it breaks a rule");
        assert!(code.is_none_or(|code| code == fault.code), "{fault:?}, not {code:?}");
        Outcome::Refused
    }

    /// Reads the answer of a request, which must be there now, and notes what else an answer writes.
    fn answer(&mut self, sequence: u64) -> Answer {
        let at = completion_at(sequence);
        self.expect_word(at + COMPLETION_STATE, sequence << 2 | ANSWERED);
        let mut words = [0; ANSWER_WORDS];
        self.memory.mapping().read_words(at + COMPLETION_ANSWER, &mut words).expect("a slot");
        for (word, value) in (0..).zip(words) {
            self.expect_word(at + COMPLETION_ANSWER + word * 8, value);
        }
        if self.half(SUBMITTER_SLEEPING) != 0 {
            let raised = self.half(WAKE).wrapping_add(1);
            self.expect_half(WAKE, raised);
        }
        Answer::from_words(words).expect("an answer")
    }

    /// The executor sleeps and wakes.
    ///
    /// # Panics
    /// When it would sleep on a request.
    pub(super) fn sleep(&mut self) {
        let slept = self.station.prepare_sleep();
        let empty = self.broken || self.doomed || self.submitted() == self.taken;
        assert_eq!(slept, self.job.is_none() && empty, "sleeping on a request, or awake without");
        self.station.cancel_sleep();
        self.expect_half(EXECUTOR_SLEEPING, 0);
    }

    /// The daemon drains.
    pub(super) fn close(&mut self) {
        let closed = self.station.close();
        if self.closing == Closing::Open && !self.broken {
            self.closing = Closing::Emptying(SLOTS);
        }
        let nothing_left = self.closing == Closing::Closed && self.job.is_none();
        assert_eq!(closed, self.broken || nothing_left);
    }

    /// Compares all memory with the models.
    ///
    /// # Panics
    /// At the first byte that differs.
    pub(super) fn check(&self) {
        compare("the session memory", &self.file, &self.model);
        self.tenant.check();
    }

    fn word(&self, at: u64) -> u64 {
        let at = index(at);
        u64::from_ne_bytes(self.model[at..at + 8].try_into().expect("eight bytes"))
    }

    fn half(&self, at: u64) -> u32 {
        let at = index(at);
        u32::from_ne_bytes(self.model[at..at + 4].try_into().expect("four bytes"))
    }

    fn expect_word(&mut self, at: u64, value: u64) {
        let at = index(at);
        self.model[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }

    fn expect_half(&mut self, at: u64, value: u32) {
        let at = index(at);
        self.model[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }
}

fn fresh_memory(tenant: &Tenant) -> (SessionMemory, File, Vec<u8>) {
    let identity = Identity { incarnation: Incarnation::new([7; 16]), session: tenant.session };
    let slots = u32::try_from(SLOTS).expect("few");
    let parameters = Parameters::new(slots, INLINE_BYTES).expect("the sizes of a ring");
    let (sealed, memory) = SessionMemory::create(parameters, identity).expect("a session memory");
    let file = File::from(sealed.try_clone_fd().expect("a descriptor"));
    let mut model = vec![0; memory.mapping().len()];
    file.read_exact_at(&mut model, 0).expect("it is as long");
    (memory, file, model)
}

fn station(tenant: &Tenant, executor: Ring) -> Station<HostDevice> {
    let inline = Inline::new(index(SELECTED_MAX));
    Station::new(Scope::Session(tenant.session), executor, inline, Arc::default())
}

fn copies(counters: &Counters) -> u64 {
    let by_direction = statecopy_proto::Direction::ALL.map(Counter::Copies);
    by_direction.into_iter().map(|counter| counters.get(counter)).sum()
}

fn slot_of(sequence: u64) -> usize {
    index((sequence.wrapping_sub(1)) % SLOTS)
}

fn completion_at(sequence: u64) -> u64 {
    COMPLETIONS + slot_of(sequence) as u64 * u64::from(COMPLETION_BYTES)
}
