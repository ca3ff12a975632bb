//! The end of the ring that takes requests and answers them.

use statecopy_descriptors::Doorbell;

use crate::answer::Answer;
use crate::descriptor::CopyDescriptor;
use crate::layout::{DESCRIPTOR_WORDS, Parameters};
use crate::memory::MappedWords;
use crate::ring::{RingBroken, Sequence, TakerRing, Words};

/// How a submitter that sleeps is woken.
#[derive(Debug)]
pub enum Waker {
    /// By a doorbell. Only for a submitter that is trusted: whoever holds a doorbell can fill it and make it block, and then
    /// it would hold the executor.
    Doorbell(Doorbell),
    /// By the futex in the session memory. Nothing that the submitter does to it makes the executor wait.
    Futex,
}

/// A request that was taken: a private copy, which nobody else can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// Which one. It is owed one answer.
    pub sequence: Sequence,
    /// What it asks for, unparsed.
    pub descriptor: CopyDescriptor,
}

/// The executor of one session memory. None of its calls waits, allocates or fails for what the submitter wrote, except
/// [`Executor::take`], which then fails for good.
#[derive(Debug)]
pub struct Executor {
    ring: TakerRing<MappedWords>,
    waker: Waker,
}

impl Executor {
    pub(crate) fn new(ring: TakerRing<MappedWords>, waker: Waker) -> Self {
        Self { ring, waker }
    }

    /// The sizes of the memory.
    #[must_use]
    pub fn parameters(&self) -> Parameters {
        self.ring.words().parameters()
    }

    /// Takes the next request, if there is one.
    ///
    /// # Errors
    /// [`RingBroken`], and the same one at every later call: the session is dead. Requests taken before can be answered.
    pub fn take(&mut self) -> Result<Option<Taken>, RingBroken> {
        let mut words = [0; DESCRIPTOR_WORDS];
        let sequence = self.ring.take(&mut words)?;
        Ok(sequence
            .map(|sequence| Taken { sequence, descriptor: CopyDescriptor::from_words(words) }))
    }

    /// Copies bytes of a request's inline space to private memory, each once. Take the offset and the size from
    /// [`crate::CopyRequest::inline_ranges`].
    ///
    /// # Panics
    /// When the request is not taken or was answered, or the range leaves its inline space.
    pub fn copy_inline(&self, sequence: Sequence, offset: u64, into: &mut [u8]) {
        let slot = self.ring.slot_of(sequence);
        self.ring.words().read_inline(slot, offset, into);
    }

    /// Under how many executors that had accepted it, and then died, this request was: 0, 1, or 2 for more. A request that
    /// was not accepted killed nobody.
    ///
    /// # Panics
    /// When the request is not taken or was answered.
    #[must_use]
    pub fn deaths(&self, sequence: Sequence) -> u8 {
        self.ring.deaths(sequence)
    }

    /// Tells the submitter that the request was checked and will be answered, and the next executor, if this one dies, that
    /// it was begun. Wakes nobody. A request of which nothing is run may be answered without it.
    ///
    /// # Panics
    /// When the request is not taken or was answered.
    pub fn accept(&mut self, sequence: Sequence) {
        self.ring.accept(sequence);
    }

    /// Gives the request its one answer, and wakes the submitter if it sleeps. Its inline space is the submitter's again.
    ///
    /// # Panics
    /// When the request is not taken or was answered.
    pub fn answer(&mut self, sequence: Sequence, answer: &Answer) {
        if self.ring.answer(sequence, &answer.to_words()) {
            self.wake();
        }
    }

    fn wake(&self) {
        match &self.waker {
            Waker::Doorbell(bell) => bell.ring(),
            Waker::Futex => {
                self.ring.raise_wake();
                // More threads than requests have no reason to sleep, and would only keep the executor busy.
                let words = self.ring.words();
                words.wake().futex_wake(words.parameters().slots());
            }
        }
    }

    /// How many requests are taken and not answered.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.ring.outstanding()
    }

    /// Says that the executor is about to sleep on its doorbell; false when there is something to take first. After true,
    /// a request that is submitted rings. Call [`Executor::cancel_sleep`] when awake.
    #[must_use]
    pub fn prepare_sleep(&mut self) -> bool {
        self.ring.prepare_sleep()
    }

    /// Says that the executor is awake: no more rings are wanted. One that is under way may still come.
    pub fn cancel_sleep(&mut self) {
        self.ring.cancel_sleep();
    }
}
