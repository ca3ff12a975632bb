//! The hand-shake of a captured graph, over one pair of words that live anywhere.
//!
//! A replay writes the same values each time, so the words cannot count. They shake hands in four steps instead:
//!
//! ```text
//! the graph                         the executor
//! wait done & IDLE
//! bell = slot                 ->    done = 0, launch; its stream writes done = DONE
//! wait done & DONE
//! bell = 0                    ->    done = IDLE
//! ```
//!
//! Several copies of one graph use one pair, each by a slot number of its own: the graph orders them. A pair serves one graph, and
//! in it one stream: two that shook at once would each take the other's answer. Waits test bits, so [`FREED`]
//! lets all of them go on.
//!
//! Both words together tell an executor that takes over where the dead one stood: `bell = slot` with IDLE was not begun, with
//! DONE is done, with neither was begun once (0) or twice (4).

use crate::lane::FREED;
use crate::sync::Word64;

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;

/// The bit of `done` that says: ring.
pub const IDLE: u64 = 1;
/// The bit of `done` that says: the bytes are there.
pub const DONE: u64 = 2;
/// What `done` holds while a copy runs.
const BEGUN: u64 = 0;
/// The same, when an executor died under the copy before.
const BEGUN_AGAIN: u64 = 4;

/// Where the two words live.
pub trait PairWords {
    /// The slot that the graph wants copied, or 0. Written by the worker's stream.
    fn bell(&self) -> Word64<'_>;
    /// [`IDLE`], [`DONE`], neither, or [`FREED`]. Written by the executor and its stream; by the worker once that is dead.
    fn done(&self) -> Word64<'_>;
}

/// Where the executor stands with a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stand {
    /// It may be rung.
    Idle,
    /// The copy of a slot is under way.
    Running,
    /// The copy is done; the graph has not said that it knows.
    Answered,
    /// Every wait goes on, and nothing is run.
    Failed,
}

/// What there is to do for a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Nothing.
    Nothing,
    /// A copy was rung: that of the slot, or of none that exists. So many executors began it before and died: 0, 1, or 2.
    Copy {
        /// Its slot, as the graph says.
        slot: u64,
        /// Dead executors.
        deaths: u8,
    },
}

/// The executor's end of a pair. It trusts no word that it reads.
#[derive(Debug)]
pub struct PairTaker<W> {
    words: W,
    stand: Stand,
    deaths: u8,
}

impl<W: PairWords> PairTaker<W> {
    /// The executor of a pair whose graph is being captured: from here it may be rung.
    pub fn new(words: W) -> Self {
        // SYNC: the graph's first wait is behind the answer to the call that arms it.
        words.done().store_release(IDLE);
        Self { words, stand: Stand::Idle, deaths: 0 }
    }

    /// The executor that follows a dead one, whose process is known dead.
    pub fn resume(words: W) -> Self {
        // SYNC: acquires what the dead executor's stream wrote before it.
        let done = words.done().load_acquire();
        let rung = words.bell().load_acquire() != 0;
        let (stand, deaths) = match done {
            FREED => (Stand::Failed, 0),
            done if done & DONE != 0 => (Stand::Answered, 0),
            done if done & IDLE != 0 || !rung => (Stand::Idle, 0),
            BEGUN => (Stand::Idle, 1),
            _ => (Stand::Idle, 2),
        };
        if stand == Stand::Idle && deaths == 0 {
            words.done().store_release(IDLE);
        }
        Self { words, stand, deaths }
    }

    /// Where the words live.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// Looks at the bell, and takes the graph's word that it has seen an answer.
    pub fn look(&mut self) -> Wanted {
        if matches!(self.stand, Stand::Running | Stand::Failed) {
            return Wanted::Nothing;
        }
        // SYNC: acquires what the worker's stream did before the bell, as far as the host sees it.
        let bell = self.words.bell().load_acquire();
        match (self.stand, bell) {
            (Stand::Idle, 1..) => Wanted::Copy { slot: bell, deaths: self.deaths },
            (Stand::Answered, 0) => {
                self.stand = Stand::Idle;
                // SYNC: the next replay's wait for it comes after this replay's last write.
                self.words.done().store_release(IDLE);
                Wanted::Nothing
            }
            _ => Wanted::Nothing,
        }
    }

    /// The copy that was wanted begins: before anything is asked of a device.
    pub fn begin(&mut self) {
        assert_eq!(self.stand, Stand::Idle, "one copy of a pair runs at a time");
        self.stand = Stand::Running;
        let begun = if self.deaths == 0 { BEGUN } else { BEGUN_AGAIN };
        self.words.done().store_release(begun);
    }

    /// Lets the graph's wait go on, where no stream was asked for anything. None has a write to `done` under way.
    pub fn settle_by_hand(&self) {
        assert_eq!(self.stand, Stand::Running, "a copy is settled before it is finished");
        // SYNC: as the stream's own write.
        self.words.done().store_release(DONE);
    }

    /// The stream wrote [`DONE`], and then told the executor.
    pub fn finish(&mut self) {
        assert_eq!(self.stand, Stand::Running, "a copy is finished once");
        self.stand = Stand::Answered;
        self.deaths = 0;
    }

    /// Lets every wait go on for good: nothing is run any more. No write of a stream to `done` is under way.
    pub fn fail(&mut self) {
        self.stand = Stand::Failed;
        self.words.done().store_release(FREED);
    }

    /// Whether it was failed.
    pub fn is_failed(&self) -> bool {
        self.stand == Stand::Failed
    }

    /// Whether a copy runs, or would if it were looked for.
    pub fn is_rung(&self) -> bool {
        match self.stand {
            Stand::Running => true,
            Stand::Idle => self.words.bell().load_relaxed() != 0,
            Stand::Answered | Stand::Failed => false,
        }
    }
}
