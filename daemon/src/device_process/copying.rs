//! One copy, from a parsed request to its outcome: check, accept, launch in bounded parts, wait for the device.

use std::sync::Arc;

use statecopy_kernels::device::{Device, DeviceFault, Flags, Indices, Launch, Launcher};
use statecopy_kernels::plan::Variant;
use statecopy_proto::{Direction, IndexWidth};
use statecopy_session::{
    CopyRequest, Executor as Ring, Fault, FlagSource, InlineRanges, MonotonicNs, Moved, Sequence,
    Subject,
};
use zerocopy::IntoBytes;

use crate::sync::{AtomicU64, Ordering};

use super::checks::{Checked, check};
use super::table::{SessionTable, Target};

/// What a copy did.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copied {
    pub(super) moved: Moved,
    pub(super) bytes: u64,
    pub(super) variant: Variant,
    pub(super) launches: u64,
}

/// Private copies of a request's inline indices and flags. As large as any request may need, from the start.
#[derive(Debug)]
struct Inline {
    int32: Vec<i32>,
    int64: Vec<i64>,
    flags: Vec<u8>,
    /// For the debug check of repeated destinations.
    rows: Vec<u64>,
}

impl Inline {
    fn new(selected_max: usize) -> Self {
        Self {
            int32: vec![0; selected_max],
            int64: vec![0; selected_max],
            flags: vec![0; selected_max],
            rows: Vec::with_capacity(selected_max),
        }
    }

    /// Copies what is inline, each byte once.
    fn fill(
        &mut self,
        ring: &Ring,
        sequence: Sequence,
        request: &CopyRequest,
        ranges: &InlineRanges,
    ) {
        let selected = usize::try_from(request.selected).unwrap_or(usize::MAX);
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
        let valid = |row: i64| u64::try_from(row).ok().filter(|row| *row < rows);
        self.rows.clear();
        for at in 0..selected {
            let index = match width {
                IndexWidth::Int32 => i64::from(self.int32[at]),
                IndexWidth::Int64 => self.int64[at],
            };
            if let Some(row) = valid(index) {
                if self.rows.contains(&row) {
                    return Some((at as u64, row));
                }
                self.rows.push(row);
            }
        }
        None
    }
}

/// Copies, with buffers that were made at the start.
#[derive(Debug)]
pub(super) struct Copier<D: Device> {
    launcher: D::Launcher,
    inline: Inline,
    hook_epoch: Arc<AtomicU64>,
    launch_bytes_max: u64,
}

impl<D: Device> Copier<D> {
    pub(super) fn new(
        launcher: D::Launcher,
        hook_epoch: Arc<AtomicU64>,
        selected_max: usize,
        launch_bytes_max: u64,
    ) -> Self {
        Self { launcher, inline: Inline::new(selected_max), hook_epoch, launch_bytes_max }
    }

    /// Copies, or says why not a byte moved.
    pub(super) fn copy(
        &mut self,
        ring: &mut Ring,
        sequence: Sequence,
        request: &CopyRequest,
        session: Option<&SessionTable<D>>,
        now: MonotonicNs,
    ) -> Result<Copied, Fault> {
        if self.launcher.hooked() {
            // Every target that was sealed before this sighting refuses from now on.
            self.hook_epoch.fetch_add(1, Ordering::AcqRel);
        }
        let hook_epoch = self.hook_epoch.load(Ordering::Acquire);
        let checked = check(session, request, hook_epoch, now)?;
        let ranges = request.inline_ranges(ring.parameters().inline_bytes())?;
        self.inline.fill(ring, sequence, request, &ranges);
        if checked.target.check_unique && request.direction == Direction::Scatter {
            self.check_unique(request, checked.target, &ranges)?;
        }
        ring.accept(sequence);
        let copied = self.launch_all(request, &checked);
        copied.map_err(|_fault| Subject::Device.fault(0, 0))
    }

    fn check_unique(
        &mut self,
        request: &CopyRequest,
        target: &Target<D>,
        ranges: &InlineRanges,
    ) -> Result<(), Fault> {
        if ranges.indices.is_none() {
            return Ok(());
        }
        let selected = usize::try_from(request.selected).unwrap_or(usize::MAX);
        let rows = target.layout().rows();
        match self.inline.repeated(request.indices.width, selected, rows) {
            Some((position, row)) => Err(Subject::Row.fault(position, row)),
            None => Ok(()),
        }
    }

    /// Launches the request in parts of bounded size, one after the other.
    fn launch_all(
        &mut self,
        request: &CopyRequest,
        checked: &Checked<'_, D>,
    ) -> Result<Copied, DeviceFault> {
        let target = checked.target;
        let payload = target.layout().payload_bytes();
        let rows = target.layers() * request.selected;
        let rows_per_launch = (self.launch_bytes_max / payload).max(1);
        let mut copied = Copied {
            moved: Moved::default(),
            bytes: 0,
            variant: Variant::serving(target.table.kind, request.direction, request.indices.width),
            launches: 0,
        };
        let mut next = 0;
        while next < rows {
            let end = rows.min(next + rows_per_launch);
            let launch = launch(&self.inline, request, checked, next..end);
            let moved = run(&mut self.launcher, &launch)?;
            target.table.count(copied.variant);
            copied.launches += 1;
            copied.moved.rows_copied += moved.copied;
            copied.moved.rows_masked += moved.masked;
            next = end;
        }
        let written = match request.direction {
            Direction::Gather => rows,
            Direction::Scatter => copied.moved.rows_copied,
        };
        copied.bytes = written * payload;
        Ok(copied)
    }
}

fn launch<'a, D: Device>(
    inline: &'a Inline,
    request: &CopyRequest,
    checked: &Checked<'a, D>,
    part: std::ops::Range<u64>,
) -> Launch<'a, D> {
    let selected = usize::try_from(request.selected).unwrap_or(usize::MAX);
    let indices = match (checked.indices, request.indices.width) {
        (Some(slice), width) => Indices::Shared(width, slice),
        (None, IndexWidth::Int32) => Indices::Int32(&inline.int32[..selected]),
        (None, IndexWidth::Int64) => Indices::Int64(&inline.int64[..selected]),
    };
    let flags = match (checked.flags, request.flags) {
        (Some(slice), _) => Flags::Shared(slice),
        (None, FlagSource::Inline) => Flags::Inline(&inline.flags[..selected]),
        (None, FlagSource::None | FlagSource::Shared { .. }) => Flags::None,
    };
    Launch {
        kind: checked.target.table.kind,
        variants: &checked.target.table.variants,
        caches: &checked.target.caches,
        direction: request.direction,
        selected: request.selected,
        indices,
        flags,
        packed: checked.packed,
        part,
    }
}

fn run<D: Device>(
    launcher: &mut D::Launcher,
    launch: &Launch<'_, D>,
) -> Result<statecopy_kernels::device::Moved, DeviceFault> {
    let ticket = launcher.launch(launch)?;
    loop {
        if let Some(moved) = launcher.poll(ticket)? {
            return Ok(moved);
        }
        std::hint::spin_loop();
    }
}
