//! Holds a request against the sealed plan, before any byte moves (contract: Both, Refusals).
//!
//! Constant time but for the layers of a set whose memory is also the packed buffer's. The request is a private copy; no
//! value of it is read from shared memory again.

use std::ops::Range;

use statecopy_kernels::device::{AllocationId, Device, Region, Slice};
use statecopy_kernels::layout::{Placement, payloads_touch};
use statecopy_kernels::signature::ALIGNMENT_BYTES;
use statecopy_proto::{IndexWidth, RegionId};
use statecopy_session::{CopyRequest, Fault, FlagSource, IndexSource, MonotonicNs, Subject};

use super::plans::Regions;
use super::table::{Bound, SessionTable, Target};

/// A request that may start: every range in it lies in a live region.
#[derive(Debug)]
pub(super) struct Checked<'a, D: Device> {
    pub(super) target: &'a Target<D>,
    pub(super) packed: Slice<'a, D::Region>,
    /// `None`: inline.
    pub(super) indices: Option<Slice<'a, D::Region>>,
    /// `None`: inline, or none at all.
    pub(super) flags: Option<Slice<'a, D::Region>>,
}

/// Which subjects a misplaced slice is refused with.
struct Place {
    region: Subject,
    alignment: Subject,
    range: Subject,
}

const PACKED: Place = Place {
    region: Subject::PackedRegion,
    alignment: Subject::PackedAlignment,
    range: Subject::PackedRange,
};
const INDICES: Place = Place {
    region: Subject::IndexRegion,
    alignment: Subject::IndexAlignment,
    range: Subject::IndexRange,
};
const FLAGS: Place = Place {
    region: Subject::FlagRegion,
    alignment: Subject::FlagAlignment,
    range: Subject::FlagRange,
};

/// Checks a request of a session.
///
/// # Errors
/// The first rule that it breaks.
pub(super) fn check<'a, D: Device>(
    session: Option<&'a SessionTable<D>>,
    request: &CopyRequest,
    hook_epoch: u64,
    now: MonotonicNs,
) -> Result<Checked<'a, D>, Fault> {
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
    let indices = check_indices::<D>(&session.regions, request, &packed)?;
    let flags = check_flags::<D>(&session.regions, request, &packed)?;
    if request.deadline <= now {
        let waited = now.since(request.submitted_at).as_nanos();
        let allowed = request.deadline.since(request.submitted_at).as_nanos();
        let clamp = |nanoseconds| u64::try_from(nanoseconds).unwrap_or(u64::MAX);
        return Err(Subject::Deadline.fault(clamp(waited), clamp(allowed)));
    }
    Ok(Checked { target, packed, indices, flags })
}

fn find<'a, D: Device>(
    session: &'a SessionTable<D>,
    request: &CopyRequest,
) -> Result<&'a Target<D>, Fault> {
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

fn check_packed<'a, D: Device>(
    regions: &'a Regions<D>,
    target: &Target<D>,
    request: &CopyRequest,
) -> Result<Slice<'a, D::Region>, Fault> {
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
    let slice = place::<D>(regions, &PACKED, packed.region, packed.offset, packed.bytes)?;
    let allocation = slice.region().allocation();
    let range = span(&slice);
    let touches = |(_, cache, placement): &(RegionId, AllocationId, Placement)| {
        *cache == allocation && payloads_touch(placement, range.clone())
    };
    if target.placements.iter().any(touches) {
        return Err(Subject::PackedOverlapsCache.fault(packed.offset, packed.bytes));
    }
    Ok(slice)
}

fn check_indices<'a, D: Device>(
    regions: &'a Regions<D>,
    request: &CopyRequest,
    packed: &Slice<'a, D::Region>,
) -> Result<Option<Slice<'a, D::Region>>, Fault> {
    let IndexSource::Shared { region, offset } = request.indices.source else { return Ok(None) };
    let bytes = index_bytes(request.indices.width, request.selected)?;
    let slice = place::<D>(regions, &INDICES, region, offset, bytes)?;
    if overlap(&slice, packed) {
        let packed = &request.packed;
        return Err(Subject::PackedOverlapsIndices.fault(packed.offset, packed.bytes));
    }
    Ok(Some(slice))
}

fn check_flags<'a, D: Device>(
    regions: &'a Regions<D>,
    request: &CopyRequest,
    packed: &Slice<'a, D::Region>,
) -> Result<Option<Slice<'a, D::Region>>, Fault> {
    let FlagSource::Shared { region, offset } = request.flags else { return Ok(None) };
    let slice = place::<D>(regions, &FLAGS, region, offset, request.selected)?;
    if overlap(&slice, packed) {
        let packed = &request.packed;
        return Err(Subject::PackedOverlapsFlags.fault(packed.offset, packed.bytes));
    }
    Ok(Some(slice))
}

fn index_bytes(width: IndexWidth, selected: u64) -> Result<u64, Fault> {
    selected.checked_mul(width.bytes()).ok_or_else(|| Subject::IndexRange.fault(u64::MAX, 0))
}

fn place<'a, D: Device>(
    regions: &'a Regions<D>,
    place: &Place,
    region: RegionId,
    offset: u64,
    bytes: u64,
) -> Result<Slice<'a, D::Region>, Fault> {
    let found = regions.get(&region).ok_or_else(|| place.region.fault(region.0, 0))?;
    if !offset.is_multiple_of(ALIGNMENT_BYTES) {
        return Err(place.alignment.fault(offset, ALIGNMENT_BYTES));
    }
    Slice::new(found, offset, bytes)
        .ok_or_else(|| place.range.fault(offset.saturating_add(bytes), found.bytes()))
}

/// The range of a slice. [`Slice::new`] checked the sum.
fn span<R: Region>(slice: &Slice<'_, R>) -> Range<u64> {
    slice.offset()..slice.offset() + slice.bytes()
}

fn overlap<R: Region>(one: &Slice<'_, R>, other: &Slice<'_, R>) -> bool {
    let (a, b) = (span(one), span(other));
    one.region().allocation() == other.region().allocation() && a.start < b.end && b.start < a.end
}
