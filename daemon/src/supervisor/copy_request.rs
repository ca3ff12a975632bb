//! From the wire to a [`Copy`]: what can be read of a request without its sealed plan.
//!
//! Binding, signature, counts against `max_selected`, ranges and overlap are the executor's to check.

use std::time::Instant;

use statecopy_proto::{
    BindingId, DataType, Direction, IndexWidth, Lane, Refusal, RefusalCode, RegionId, SessionId,
    SignatureHash, v1,
};
use statecopy_session::layout::{LANES, PAIRS};
use statecopy_session::{CopyDescriptor, MonotonicNs, PairNumber, SlotNumber};

use super::device::{Copy, CopyFlags, CopyIndices};
use crate::record::SlotRecord;

/// Reads a copy request.
///
/// # Errors
/// INDEX_TYPE, FLAGS_MISMATCH or PACKED_MISMATCH.
pub(crate) fn parse_copy(
    session: SessionId,
    direction: Direction,
    request: v1::CopyRequest,
    deadline: Instant,
) -> Result<Copy, Refusal> {
    let packed = request.packed.ok_or_else(|| {
        Refusal::new(RefusalCode::PackedMismatch, "The request names no packed buffer")
            .about("packed")
    })?;
    let number = u32::try_from(request.packed_dtype).unwrap_or(u32::MAX);
    let packed_dtype = DataType::try_from(number).map_err(|unknown| {
        let sentence = format!("The packed buffer has data type {unknown}");
        Refusal::new(RefusalCode::PackedMismatch, sentence).about("packed_dtype")
    })?;
    Ok(Copy {
        session,
        binding: BindingId(request.binding_id),
        signature: SignatureHash(request.signature),
        direction,
        selected: request.selected,
        indices: parse_indices(request.indices, request.selected)?,
        flags: parse_flags(request.flags, request.selected)?,
        packed: (RegionId(packed.region_id), packed.offset_bytes, request.packed_bytes),
        packed_dtype,
        lane: Lane(request.lane),
        deadline,
    })
}

/// Reads a slot of a captured graph, of a copy that may wait `default_ms` for its start after each bell unless it says otherwise.
///
/// # Errors
/// QUOTA_EXCEEDED for a pair or a slot that there is not; as of a copy; INDEX_TYPE where indices or flags are inline.
pub(crate) fn parse_slot(
    session: SessionId,
    request: v1::ArmGraphRequest,
    default_ms: u32,
) -> Result<SlotRecord, Refusal> {
    let pair = parse_pair(request.pair)?;
    let slot = SlotNumber::new(request.slot.into()).ok_or_else(|| {
        let (given, most) = (request.slot, SlotNumber::MAX.get());
        let sentence = format!("A graph has the slots 1 to {most}, and no slot {given}");
        Refusal::new(RefusalCode::QuotaExceeded, sentence).about("slot")
    })?;
    let (direction, copy) = parse_direction(request.copy.unwrap_or_default())?;
    let ms = if copy.deadline_ms == 0 { default_ms } else { copy.deadline_ms };
    let copy = parse_copy(session, direction, copy, Instant::now())?;
    let patience_ns = u64::from(ms) * 1_000_000;
    let request = copy.request(MonotonicNs::NEVER, MonotonicNs(0));
    let descriptor = CopyDescriptor::encode_ordered(slot.sequence(), &request, patience_ns);
    let request = descriptor.parse_ordered().map_err(|fault| fault.to_refusal())?;
    Ok(SlotRecord { pair, slot, request, patience_ns })
}

/// Reads the number of a graph's pair.
///
/// # Errors
/// QUOTA_EXCEEDED where graphs have no such pair.
pub(crate) fn parse_pair(pair: u32) -> Result<PairNumber, Refusal> {
    PairNumber::of_graph(pair).ok_or_else(|| {
        let last = PAIRS - 1;
        let sentence = format!("Graphs have the pairs {LANES} to {last}, and no pair {pair}");
        Refusal::new(RefusalCode::QuotaExceeded, sentence).about("pair")
    })
}

/// Reads which way a copy goes.
///
/// # Errors
/// PACKED_MISMATCH when it does not say so, or there is no copy.
pub(crate) fn parse_direction(
    directed: v1::DirectedCopy,
) -> Result<(Direction, v1::CopyRequest), Refusal> {
    let direction = match v1::Direction::try_from(directed.direction) {
        Ok(v1::Direction::Gather) => Some(Direction::Gather),
        Ok(v1::Direction::Scatter) => Some(Direction::Scatter),
        Ok(v1::Direction::Unspecified) | Err(_) => None,
    };
    match (direction, directed.copy) {
        (Some(direction), Some(copy)) => Ok((direction, copy)),
        (None, _) => Err(Refusal::new(
            RefusalCode::PackedMismatch,
            "The copy does not say whether the packed buffer is gathered into or scattered from",
        )
        .about("direction")),
        (_, None) => Err(Refusal::new(
            RefusalCode::PackedMismatch,
            "The directed copy holds no copy request",
        )
        .about("copy")),
    }
}

fn parse_indices(
    indices: Option<v1::copy_request::Indices>,
    selected: u64,
) -> Result<CopyIndices, Refusal> {
    let refuse = |sentence: String| Refusal::new(RefusalCode::IndexType, sentence).about("indices");
    let counted = |count: usize| {
        if count as u64 == selected {
            return Ok(());
        }
        Err(refuse(format!("The request selects {selected} rows and carries {count} indices")))
    };
    match indices {
        None => Err(refuse("The request carries no indices".to_owned())),
        Some(v1::copy_request::Indices::Int32(indices)) => {
            counted(indices.values.len())?;
            let bytes = indices.values.iter().flat_map(|index| index.to_le_bytes()).collect();
            Ok(CopyIndices::Inline(IndexWidth::Int32, bytes))
        }
        Some(v1::copy_request::Indices::Int64(indices)) => {
            counted(indices.values.len())?;
            let bytes = indices.values.iter().flat_map(|index| index.to_le_bytes()).collect();
            Ok(CopyIndices::Inline(IndexWidth::Int64, bytes))
        }
        Some(v1::copy_request::Indices::Shared(shared)) => {
            let width = match v1::IndexType::try_from(shared.r#type) {
                Ok(v1::IndexType::IndexInt32) => IndexWidth::Int32,
                Ok(v1::IndexType::IndexInt64) => IndexWidth::Int64,
                Ok(v1::IndexType::Unspecified) | Err(_) => {
                    let given = shared.r#type;
                    return Err(refuse(format!(
                        "Shared indices have type {given}, which is neither INT32 nor INT64"
                    )));
                }
            };
            let at = shared.at.ok_or_else(|| refuse("Shared indices name no region".to_owned()))?;
            Ok(CopyIndices::Shared(width, RegionId(at.region_id), at.offset_bytes))
        }
    }
}

fn parse_flags(
    flags: Option<v1::copy_request::Flags>,
    selected: u64,
) -> Result<CopyFlags, Refusal> {
    match flags {
        None => Ok(CopyFlags::None),
        Some(v1::copy_request::Flags::InlineFlags(bytes)) => {
            let count = bytes.len();
            if count as u64 != selected {
                let sentence =
                    format!("The request selects {selected} rows and carries {count} flags");
                return Err(Refusal::new(RefusalCode::FlagsMismatch, sentence).about("flags"));
            }
            Ok(CopyFlags::Inline(bytes))
        }
        Some(v1::copy_request::Flags::SharedFlags(at)) => {
            Ok(CopyFlags::Shared(RegionId(at.region_id), at.offset_bytes))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> v1::CopyRequest {
        v1::CopyRequest {
            binding_id: 3,
            signature: 4,
            selected: 2,
            indices: Some(int32(vec![-1, 7])),
            packed: Some(v1::RegionSlice { region_id: 5, offset_bytes: 64 }),
            packed_dtype: v1::DataType::Float32 as i32,
            packed_bytes: 128,
            lane: 9,
            ..v1::CopyRequest::default()
        }
    }

    fn int32(values: Vec<i32>) -> v1::copy_request::Indices {
        v1::copy_request::Indices::Int32(v1::Int32Indices { values })
    }

    fn parse(request: v1::CopyRequest) -> Result<Copy, Refusal> {
        parse_copy(SessionId(1), Direction::Gather, request, Instant::now())
    }

    fn refused(change: impl FnOnce(&mut v1::CopyRequest)) -> RefusalCode {
        let mut request = request();
        change(&mut request);
        parse(request).unwrap_err().code()
    }

    #[test]
    fn indices_keep_their_width() {
        let copy = parse(request()).unwrap();
        let CopyIndices::Inline(IndexWidth::Int32, bytes) = copy.indices else {
            panic!("another kind of indices");
        };
        assert_eq!(bytes, [0xff, 0xff, 0xff, 0xff, 7, 0, 0, 0]);
        let values = vec![i64::MIN, 1 << 40];
        let indices = v1::copy_request::Indices::Int64(v1::Int64Indices { values: values.clone() });
        let copy = parse(v1::CopyRequest { indices: Some(indices), ..request() }).unwrap();
        let CopyIndices::Inline(IndexWidth::Int64, bytes) = copy.indices else {
            panic!("another kind of indices");
        };
        assert_eq!(bytes, values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>());
    }

    #[test]
    fn a_count_that_differs_from_selected_is_refused() {
        assert_eq!(refused(|request| request.selected = 1), RefusalCode::IndexType);
        assert_eq!(refused(|request| request.indices = None), RefusalCode::IndexType);
        let flags = |count| Some(v1::copy_request::Flags::InlineFlags(vec![1; count]));
        assert_eq!(refused(|request| request.flags = flags(0)), RefusalCode::FlagsMismatch);
        assert_eq!(refused(|request| request.flags = flags(3)), RefusalCode::FlagsMismatch);
        assert!(parse(v1::CopyRequest { flags: flags(2), ..request() }).is_ok());
    }

    #[test]
    fn selecting_nothing_is_a_request_like_any_other() {
        let nothing = v1::CopyRequest { selected: 0, indices: Some(int32(vec![])), ..request() };
        assert_eq!(parse(nothing).unwrap().selected, 0);
    }

    #[test]
    fn shared_indices_name_their_type_and_region() {
        let shared = |kind: i32, at| {
            Some(v1::copy_request::Indices::Shared(v1::SharedIndices { r#type: kind, at }))
        };
        let at = Some(v1::RegionSlice { region_id: 8, offset_bytes: 16 });
        let copy = parse(v1::CopyRequest {
            indices: shared(v1::IndexType::IndexInt64 as i32, at),
            ..request()
        });
        let CopyIndices::Shared(width, region, offset) = copy.unwrap().indices else {
            panic!("another kind of indices");
        };
        assert_eq!((width, region, offset), (IndexWidth::Int64, RegionId(8), 16));
        for kind in [0, 3, -1] {
            assert_eq!(
                refused(|request| request.indices = shared(kind, at)),
                RefusalCode::IndexType
            );
        }
        assert_eq!(refused(|request| request.indices = shared(1, None)), RefusalCode::IndexType);
    }

    #[test]
    fn a_packed_buffer_is_named_with_a_known_type() {
        assert_eq!(refused(|request| request.packed = None), RefusalCode::PackedMismatch);
        for dtype in [0, 17, -1] {
            let code = refused(|request| request.packed_dtype = dtype);
            assert_eq!(code, RefusalCode::PackedMismatch);
        }
    }
}
