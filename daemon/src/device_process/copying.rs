//! One copy, from a checked request to its outcome: launches of bounded size, one after the other, never waiting.

use std::ops::Range;
use std::sync::Arc;

use statecopy_kernels::device::{
    Device, DeviceFault, Flags, Indices, Launch, Launcher, Signal, Slice, Ticket,
};
use statecopy_kernels::plan::Variant;
use statecopy_proto::{Direction, IndexWidth};
use statecopy_session::{
    CopyRequest, Executor as Ring, Fault, FlagSource, InlineRanges, MonotonicNs, Moved, Sequence,
    Subject,
};
use zerocopy::IntoBytes;

use crate::counters::{Counter, Counters};

use super::checks::{Checked, Place, check};
use super::table::{SessionTable, Target};

/// What a copy did.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copied {
    pub(super) moved: Moved,
    /// Rows of a stream-ordered copy, in place of `moved`.
    pub(super) ordered: u64,
    pub(super) bytes: u64,
    pub(super) variant: Variant,
    pub(super) launches: u64,
}

impl Copied {
    /// Counts it.
    pub(super) fn count(&self, direction: Direction, executor_ns: u64, counters: &Counters) {
        counters.add(Counter::Copies(direction), 1);
        counters.add(Counter::RowsCopied(direction), self.moved.rows_copied);
        counters.add(Counter::RowsMasked(direction), self.moved.rows_masked);
        counters.add(Counter::RowsOrdered(direction), self.ordered);
        counters.add(Counter::BytesCopied(direction), self.bytes);
        counters.add(Counter::ExecutorNanoseconds(direction), executor_ns);
        counters.add(Counter::Launches(self.variant), self.launches);
    }
}

/// Private copies of one request's inline indices and flags. As large as any request of its ring may need, from the start.
#[derive(Debug)]
pub(super) struct Inline {
    int32: Vec<i32>,
    int64: Vec<i64>,
    flags: Vec<u8>,
    /// For the debug check of repeated destinations.
    rows: Vec<u64>,
}

/// What a lane's requests have inline.
static NOTHING_INLINE: Inline =
    Inline { int32: Vec::new(), int64: Vec::new(), flags: Vec::new(), rows: Vec::new() };

/// The order that a stream-ordered copy has, and the word that its stream writes when all of it is done.
#[derive(Debug)]
pub(super) struct Order<'a, D: Device> {
    pub(super) stream: u32,
    pub(super) words: &'a D::Words,
    pub(super) done_at: u64,
    pub(super) done: u64,
}

impl Inline {
    /// Of requests that have nothing inline.
    pub(super) fn none() -> &'static Self {
        &NOTHING_INLINE
    }

    /// Room for `selected_max` rows.
    pub(super) fn new(selected_max: usize) -> Self {
        Self {
            int32: vec![0; selected_max],
            int64: vec![0; selected_max],
            flags: vec![0; selected_max],
            rows: Vec::with_capacity(selected_max),
        }
    }

    /// Copies what is inline, each byte once.
    pub(super) fn fill(
        &mut self,
        ring: &Ring,
        sequence: Sequence,
        request: &CopyRequest,
        ranges: &InlineRanges,
    ) {
        let selected = rows_of(request);
        if let Some(range) = &ranges.indices {
            let into = match request.indices.width {
                IndexWidth::Int32 => self.int32[..selected].as_mut_bytes(),
                IndexWidth::Int64 => self.int64[..selected].as_mut_bytes(),
            };
            ring.copy_inline(sequence, range.start, into);
        }
        if let Some(range) = &ranges.flags {
            ring.copy_inline(sequence, range.start, &mut self.flags[..selected]);
        }
    }

    /// The first index whose valid row an earlier one names too: position and row.
    fn repeated(&mut self, width: IndexWidth, selected: usize, rows: u64) -> Option<(u64, u64)> {
        self.rows.clear();
        for at in 0..selected {
            let index = match width {
                IndexWidth::Int32 => i64::from(self.int32[at]),
                IndexWidth::Int64 => self.int64[at],
            };
            let Some(row) = u64::try_from(index).ok().filter(|row| *row < rows) else { continue };
            if self.rows.contains(&row) {
                return Some((at as u64, row));
            }
            self.rows.push(row);
        }
        None
    }
}

/// Launches of one copy that are under way at most, whatever its device would like.
const UNDER_WAY_MAX: usize = 4;

/// The launches of one copy that are under way, the oldest first. They end in that order.
#[derive(Debug, Default)]
struct UnderWay {
    tickets: [Option<Ticket>; UNDER_WAY_MAX],
}

impl UnderWay {
    fn count(&self) -> usize {
        self.tickets.iter().flatten().count()
    }

    fn oldest(&self) -> Option<Ticket> {
        self.tickets[0]
    }

    fn push(&mut self, ticket: Ticket) {
        let at = self.count();
        self.tickets[at] = Some(ticket);
    }

    fn pop(&mut self) {
        self.tickets[0] = None;
        self.tickets.rotate_left(1);
    }
}

/// How far a copy is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Progress {
    /// The device works on a part.
    Waiting,
    /// A part is done, or was started.
    MovedOn,
    /// All of it is done.
    Done(Copied),
}

/// A copy that was accepted. It holds on to all memory that it touches, whatever happens to its session's table.
#[derive(Debug)]
pub(super) struct Running<D: Device> {
    checked: Checked<D>,
    copied: Copied,
    rows: u64,
    rows_per_launch: u64,
    next: u64,
    under_way: UnderWay,
    /// Whether the device was asked for any of it.
    begun: bool,
}

impl<D: Device> Running<D> {
    /// Holds a request against the sealed plan.
    ///
    /// # Errors
    /// The first rule that it breaks; not a byte moved.
    pub(super) fn check(
        session: Option<&Arc<SessionTable<D>>>,
        request: &CopyRequest,
        hook_epoch: u64,
        now: MonotonicNs,
    ) -> Result<Self, Fault> {
        let checked = check(session.map(|session| &**session), request, hook_epoch, now)?;
        let target = &*checked.target;
        let variant = Variant::serving(target.table.kind, request.direction, request.indices.width);
        Ok(Self {
            copied: Copied { moved: Moved::default(), ordered: 0, bytes: 0, variant, launches: 0 },
            rows: target.layers() * request.selected,
            rows_per_launch: target.rows_per_launch,
            next: 0,
            under_way: UnderWay::default(),
            begun: false,
            checked,
        })
    }

    /// Debug: refuses a scatter whose valid destinations repeat. Only what is inline can be looked at.
    ///
    /// # Errors
    /// ROW_INVALID, with position and row.
    pub(super) fn check_unique(
        &self,
        request: &CopyRequest,
        inline: &mut Inline,
        ranges: &InlineRanges,
    ) -> Result<(), Fault> {
        let target = &*self.checked.target;
        let scatter = request.direction == Direction::Scatter;
        if !(target.check_unique && scatter && ranges.indices.is_some()) {
            return Ok(());
        }
        let rows = target.layout().rows();
        match inline.repeated(request.indices.width, rows_of(request), rows) {
            Some((position, row)) => Err(Subject::Row.fault(position, row)),
            None => Ok(()),
        }
    }

    /// Whether the device was asked for any of it: also where the launch failed, which may have come half way.
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }

    /// Moves on by at most one launch and one answer of the device. The next part is launched while one runs, up to the
    /// depth that the device likes: then the device never waits for the executor, and others wait for no more than that.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn step(
        &mut self,
        launcher: &mut D::Launcher,
        inline: &Inline,
        request: &CopyRequest,
        order: Option<&Order<'_, D>>,
    ) -> Result<Progress, DeviceFault> {
        let depth = launcher.depth().clamp(1, UNDER_WAY_MAX);
        let more = self.next < self.rows;
        let mut moved_on = more && self.under_way.count() < depth && launcher.has_room();
        if moved_on {
            let end = self.rows.min(self.next.saturating_add(self.rows_per_launch));
            self.begun = true;
            let launch = self.launch(inline, request, self.next..end);
            let ticket = match order {
                None => launcher.launch(&launch)?,
                Some(Order { stream, words, done_at, done }) => {
                    let signal = Signal { words: *words, offset: *done_at, value: *done };
                    let last = (end == self.rows).then_some(signal);
                    launcher.launch_in_order(&launch, *stream, last)?
                }
            };
            self.under_way.push(ticket);
            self.checked.target.table.count(self.copied.variant);
            self.copied.launches += 1;
            self.next = end;
        }
        if let Some(ticket) = self.under_way.oldest()
            && let Some(moved) = launcher.poll(ticket)?
        {
            self.under_way.pop();
            if order.is_none() {
                self.copied.moved.rows_copied += moved.copied;
                self.copied.moved.rows_masked += moved.masked;
            }
            moved_on = true;
        }
        if self.next < self.rows || self.under_way.oldest().is_some() {
            return Ok(if moved_on { Progress::MovedOn } else { Progress::Waiting });
        }
        self.copied.ordered = if order.is_some() { self.rows } else { 0 };
        let written = match request.direction {
            Direction::Scatter if order.is_none() => self.copied.moved.rows_copied,
            Direction::Gather | Direction::Scatter => self.rows,
        };
        self.copied.bytes = written * self.checked.target.layout().payload_bytes();
        Ok(Progress::Done(self.copied))
    }

    /// Lets the launcher prepare for the first launch of a copy in order, which has nothing inline.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn expect(
        &self,
        launcher: &mut D::Launcher,
        request: &CopyRequest,
    ) -> Result<(), DeviceFault> {
        let first = 0..self.rows.min(self.rows_per_launch);
        launcher.expect(&self.launch(Inline::none(), request, first))
    }

    fn launch<'a>(
        &'a self,
        inline: &'a Inline,
        request: &CopyRequest,
        part: Range<u64>,
    ) -> Launch<'a, D> {
        let selected = rows_of(request);
        let indices = match (&self.checked.indices, request.indices.width) {
            (Some(place), width) => Indices::Shared(width, slice(place)),
            (None, IndexWidth::Int32) => Indices::Int32(&inline.int32[..selected]),
            (None, IndexWidth::Int64) => Indices::Int64(&inline.int64[..selected]),
        };
        let flags = match (&self.checked.flags, request.flags) {
            (Some(place), _) => Flags::Shared(slice(place)),
            (None, FlagSource::Inline) => Flags::Inline(&inline.flags[..selected]),
            (None, FlagSource::None | FlagSource::Shared { .. }) => Flags::None,
        };
        let target: &Target<D> = &self.checked.target;
        Launch {
            kind: target.table.kind,
            variants: &target.table.variants,
            caches: &target.caches,
            direction: request.direction,
            selected: request.selected,
            indices,
            flags,
            packed: slice(&self.checked.packed),
            part,
        }
    }
}

/// Selected rows. They were checked against `max_selected`, which any machine can count to.
fn rows_of(request: &CopyRequest) -> usize {
    usize::try_from(request.selected).unwrap_or(usize::MAX)
}

fn slice<D: Device>(place: &Place<D>) -> Slice<'_, D::Region> {
    match Slice::new(&place.region, place.offset, place.bytes) {
        Some(slice) => slice,
        None => unreachable!("a place was checked against its region"),
    }
}
