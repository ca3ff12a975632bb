//! The session memory: one sealed memfd between one submitter and the executor, and the rings in it.
//!
//! **What it is.** The layout of that memory, field by field ([`layout`], and `docs/session-memory.md` for readers in other
//! languages), the record of one copy ([`CopyDescriptor`] in memory, [`CopyRequest`] parsed), the compact refusal
//! ([`Fault`]) and the answer ([`Answer`]), and the two ends of the ring: [`Submitter`] and [`Executor`].
//!
//! **What it is not.** It holds no policy: whether a binding exists, a range lies in its region or a deadline is over is the
//! executor's business. The executor's end does not wait: it says whether one may sleep, and wakes the other side.
//!
//! **Invariant.** The submitter is not trusted. The executor keeps every count and every slot's state privately, loads the
//! shared words that it needs once each, and copies a descriptor out before it looks at it; so nothing that another process
//! writes into the memory at any time makes it wait, panic, answer twice, or read outside the mapping: either a request is
//! taken, or the ring is [`RingBroken`] for good. The submitter in turn parses all that it reads back.
//!
//! The ring code ([`ring`]) is generic over where its words live, so that loom checks the very code that runs:
//! `RUSTFLAGS="--cfg loom" cargo test -p statecopy-session --release --lib loom`.
//!
#![cfg_attr(not(loom), doc = include_str!("example.md"))]
#![forbid(unsafe_code)]

pub mod lane;
pub mod pair;
pub mod ring;
pub mod sync;

#[cfg(not(loom))]
mod answer;
#[cfg(not(loom))]
mod clock;
#[cfg(not(loom))]
mod descriptor;
#[cfg(not(loom))]
mod executor;
#[cfg(not(loom))]
mod fault;
#[cfg(not(loom))]
pub mod layout;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod submitter;
#[cfg(not(loom))]
mod watch;

pub use lane::{FREED, LanePhase, LaneSubmitter, LaneTaker};
pub use pair::{PairTaker, Wanted};
pub use ring::{RingBroken, RingFull, Sequence, StateBroken, WakeCount};

#[cfg(not(loom))]
pub use self::{
    answer::{Answer, AnswerError, Moved},
    clock::{DaemonClock, MonotonicNs},
    descriptor::{
        CopyDescriptor, CopyRequest, FlagSource, IndexSource, Indices, InlineRanges, Packed,
    },
    executor::{Executor, Taken, Waker},
    fault::{Fault, Subject, UnknownSubject},
    layout::{Identity, LaneNumber, LayoutError, PairNumber, Parameters, SlotNumber},
    memory::{MappedLane, MappedPair, SessionMemory, SessionMemoryError},
    submitter::{PollError, Progress, SubmitError, Submitter, WaitError},
    watch::{Looked, Spin, Watch},
};
