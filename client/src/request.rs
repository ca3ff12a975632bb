//! What one copy is asked to do.

use std::time::Duration;

use statecopy_proto::{Direction, IndexWidth, Lane};

use crate::plan::Plan;
use crate::region::Slice;

/// The rows that a copy selects, and how many. INT32 stays INT32 (contract: Both).
#[derive(Debug, Clone)]
pub enum Indices<'a> {
    /// Sent with the request.
    Int32(&'a [i32]),
    /// Sent with the request.
    Int64(&'a [i64]),
    /// In shared memory: contiguous, 16-byte aligned.
    Shared {
        /// How wide they are.
        width: IndexWidth,
        /// Where the first one is.
        at: Slice,
        /// How many there are.
        selected: u64,
    },
}

impl Indices<'_> {
    /// How many rows are selected.
    #[must_use]
    pub fn selected(&self) -> u64 {
        match self {
            Self::Int32(values) => values.len() as u64,
            Self::Int64(values) => values.len() as u64,
            Self::Shared { selected, .. } => *selected,
        }
    }
}

/// Initial-state flags: a gathered row whose flag is false is cleared. A scatter ignores them.
#[derive(Debug, Clone)]
pub enum Flags<'a> {
    /// One byte a selected row, sent with the request. Zero is false, every other value true.
    Bytes(&'a [u8]),
    /// One truth value a selected row, sent with the request.
    Bools(&'a [bool]),
    /// In shared memory: one byte a selected row, contiguous, 16-byte aligned.
    Shared(Slice),
}

/// One gather or scatter.
///
/// ```no_run
/// # use std::time::Duration;
/// # use statecopy_client::{Error, Flags, Indices, Plan, Region, Request};
/// # async fn step(plan: &Plan, packed: &Region) -> Result<(), Error> {
/// let request = Request::new(Indices::Int32(&[4, 7, -1]), packed.at(0))
///     .flags(Flags::Bools(&[true, false, true]))
///     .deadline(Duration::from_millis(200))
///     .lane(3);
/// plan.gather(request).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Request<'a> {
    pub(crate) indices: Indices<'a>,
    pub(crate) flags: Option<Flags<'a>>,
    pub(crate) packed: Slice,
    pub(crate) deadline: Option<Duration>,
    pub(crate) lane: Lane,
    pub(crate) repeat_unknown: bool,
}

impl<'a> Request<'a> {
    /// A copy of the rows that `indices` select, to or from the packed buffer that begins at `packed`:
    /// `[selected, H, V, K]` for a layer, `[L, selected, H, V, K]` for a binding set.
    #[must_use]
    pub fn new(indices: Indices<'a>, packed: Slice) -> Self {
        Self { indices, flags: None, packed, deadline: None, lane: Lane(0), repeat_unknown: false }
    }

    /// Initial-state flags; without them every valid row is copied.
    #[must_use]
    pub fn flags(mut self, flags: Flags<'a>) -> Self {
        self.flags = Some(flags);
        self
    }

    /// How long the copy may wait for its start, counted from this call, wherever it waits (by a clock that may let
    /// it start some milliseconds late); without it
    /// [`ConnectOptions::call_timeout`](crate::ConnectOptions::call_timeout). One that is taken later is DEADLINE_EXCEEDED: nothing
    /// moved. A copy of no rows may be answered however late, and so may one that a device process had begun and died.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// The lane: requests of one lane run in the order submitted. Lane 0 without it.
    #[must_use]
    pub fn lane(mut self, lane: u32) -> Self {
        self.lane = Lane(lane);
        self
    }

    /// Repeats the copy when the daemon went away with an unknown outcome. Right only while nobody else writes the
    /// rows and the packed buffer in between: the first attempt may have been whole, half or nothing.
    #[must_use]
    pub fn repeat_unknown(mut self) -> Self {
        self.repeat_unknown = true;
        self
    }
}

/// One copy of many.
#[derive(Debug, Clone)]
pub struct PlannedCopy<'a> {
    /// Which layer or binding set.
    pub plan: &'a Plan,
    /// Which way.
    pub direction: Direction,
    /// What.
    pub request: Request<'a>,
}
