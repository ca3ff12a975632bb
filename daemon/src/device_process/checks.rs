//! Holds a request against the sealed plan, before any byte moves (contract: Both, Refusals).
//!
//! Constant time but for the layers of a set whose memory is also the packed buffer's. The request is a private copy; no
//! value of it is read from shared memory again.

use std::ops::Range;
use std::sync::Arc;

use statecopy_kernels::device::{AllocationId, Device, Region};
use statecopy_kernels::layout::{Placement, payloads_touch};
use statecopy_kernels::signature::ALIGNMENT_BYTES;
use statecopy_proto::RegionId;
use statecopy_session::{CopyRequest, Fault, FlagSource, IndexSource, MonotonicNs, Subject};

use super::table::{Bound, Regions, SessionTable, Target};

/// A range that lies in a live region, and keeps it alive.
#[derive(Debug)]
pub(super) struct Place<D: Device> {
    pub(super) region: Arc<D::Region>,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl<D: Device> Place<D> {
    /// First byte and one past the last. The sum was checked when the place was made.
    fn span(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }

    fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.span(), other.span());
        let same_memory = self.region.allocation() == other.region.allocation();
        same_memory && a.start < b.end && b.start < a.end
    }
}

/// A request that may start. It keeps alive all that it names.
#[derive(Debug)]
pub(super) struct Checked<D: Device> {
    pub(super) target: Arc<Target<D>>,
    pub(super) packed: Place<D>,
    /// `None`: inline.
    pub(super) indices: Option<Place<D>>,
    /// `None`: inline, or none at all.
    pub(super) flags: Option<Place<D>>,
}

/// Which subjects a misplaced range is refused with.
struct Subjects {
    region: Subject,
    alignment: Subject,
    range: Subject,
}

const PACKED: Subjects = Subjects {
    region: Subject::PackedRegion,
    alignment: Subject::PackedAlignment,
    range: Subject::PackedRange,
};
const INDICES: Subjects = Subjects {
    region: Subject::IndexRegion,
    alignment: Subject::IndexAlignment,
    range: Subject::IndexRange,
};
const FLAGS: Subjects = Subjects {
    region: Subject::FlagRegion,
    alignment: Subject::FlagAlignment,
    range: Subject::FlagRange,
};

/// Checks a request of a session.
///
/// # Errors
/// The first rule that it breaks.
pub(super) fn check<D: Device>(
    session: Option<&SessionTable<D>>,
    request: &CopyRequest,
    hook_epoch: u64,
    now: MonotonicNs,
) -> Result<Checked<D>, Fault> {
    let session = session.ok_or_else(|| Subject::Session.fault(request.session.0, 0))?;
    let target = find(session, request)?;
    if request.signature != target.table.hash {
        return Err(Subject::Signature.fault(request.signature.0, target.table.hash.0));
    }
    if target.hook_epoch != hook_epoch {
        return Err(Subject::Hook.fault(1, 0));
    }
    if request.selected > target.max_selected {
        return Err(Subject::Selected.fault(request.selected, target.max_selected));
    }
    let packed = check_packed(&session.regions, target, request)?;
    let indices = check_indices(&session.regions, request, &packed)?;
    let flags = check_flags(&session.regions, request, &packed)?;
    if request.deadline <= now {
        let waited = now.since(request.submitted_at).as_nanos();
        let allowed = request.deadline.since(request.submitted_at).as_nanos();
        let clamp = |nanoseconds| u64::try_from(nanoseconds).unwrap_or(u64::MAX);
        return Err(Subject::Deadline.fault(clamp(waited), clamp(allowed)));
    }
    Ok(Checked { target: Arc::clone(target), packed, indices, flags })
}

fn find<'a, D: Device>(
    session: &'a SessionTable<D>,
    request: &CopyRequest,
) -> Result<&'a Arc<Target<D>>, Fault> {
    let targets = session
        .targets
        .as_ref()
        .ok_or_else(|| Subject::Registration.fault(request.binding.0, 0))?;
    match targets.get(&request.binding) {
        Some(Bound::Awake(target)) => Ok(target),
        Some(Bound::Asleep) => Err(Subject::Asleep.fault(request.binding.0, 0)),
        None => Err(Subject::Binding.fault(request.binding.0, 0)),
    }
}

fn check_packed<D: Device>(
    regions: &Regions<D>,
    target: &Target<D>,
    request: &CopyRequest,
) -> Result<Place<D>, Fault> {
    let packed = &request.packed;
    let dtype = target.layout().dtype().number();
    if packed.dtype != dtype {
        return Err(Subject::PackedDtype.fault(packed.dtype.into(), dtype.into()));
    }
    let wanted = target
        .layers()
        .checked_mul(request.selected)
        .and_then(|rows| rows.checked_mul(target.layout().payload_bytes()))
        .ok_or_else(|| Subject::PackedBytes.fault(packed.bytes, u64::MAX))?;
    if packed.bytes != wanted {
        return Err(Subject::PackedBytes.fault(packed.bytes, wanted));
    }
    let place = place::<D>(regions, &PACKED, packed.region, packed.offset, packed.bytes)?;
    let allocation = place.region.allocation();
    let touches = |(_, cache, placement): &(RegionId, AllocationId, Placement)| {
        *cache == allocation && payloads_touch(placement, place.span())
    };
    if target.placements.iter().any(touches) {
        return Err(Subject::PackedOverlapsCache.fault(packed.offset, packed.bytes));
    }
    Ok(place)
}

fn check_indices<D: Device>(
    regions: &Regions<D>,
    request: &CopyRequest,
    packed: &Place<D>,
) -> Result<Option<Place<D>>, Fault> {
    let IndexSource::Shared { region, offset } = request.indices.source else { return Ok(None) };
    let bytes = request
        .selected
        .checked_mul(request.indices.width.bytes())
        .ok_or_else(|| Subject::IndexRange.fault(u64::MAX, 0))?;
    let place = place::<D>(regions, &INDICES, region, offset, bytes)?;
    if place.overlaps(packed) {
        return Err(Subject::PackedOverlapsIndices.fault(packed.offset, packed.bytes));
    }
    Ok(Some(place))
}

fn check_flags<D: Device>(
    regions: &Regions<D>,
    request: &CopyRequest,
    packed: &Place<D>,
) -> Result<Option<Place<D>>, Fault> {
    let FlagSource::Shared { region, offset } = request.flags else { return Ok(None) };
    let place = place::<D>(regions, &FLAGS, region, offset, request.selected)?;
    if place.overlaps(packed) {
        return Err(Subject::PackedOverlapsFlags.fault(packed.offset, packed.bytes));
    }
    Ok(Some(place))
}

fn place<D: Device>(
    regions: &Regions<D>,
    subjects: &Subjects,
    region: RegionId,
    offset: u64,
    bytes: u64,
) -> Result<Place<D>, Fault> {
    let found = regions.get(&region).ok_or_else(|| subjects.region.fault(region.0, 0))?;
    if !offset.is_multiple_of(ALIGNMENT_BYTES) {
        return Err(subjects.alignment.fault(offset, ALIGNMENT_BYTES));
    }
    match offset.checked_add(bytes) {
        Some(end) if end <= found.bytes() => Ok(Place { region: Arc::clone(found), offset, bytes }),
        end => Err(subjects.range.fault(end.unwrap_or(u64::MAX), found.bytes())),
    }
}
