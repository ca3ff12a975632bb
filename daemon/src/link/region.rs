//! Regions on the link: what was announced, and the pieces, a bounded number a message.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use statecopy_kernels::device::{Announced, Piece, PieceHandle};
use statecopy_proto::HandleKind;

use super::LinkError;
use crate::record::{HandleRecord, PieceRecord, RegionRecord};

/// Pieces of one message. A device process holds so many descriptors of regions at most, whatever a region is made of.
pub const PIECES_A_PART: usize = 64;

/// A [`HandleKind`] on the link.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(remote = "HandleKind")]
enum HandleKindMessage {
    Memfd,
    CudaIpc,
    CudaVmm,
    CudaFabric,
}

/// An [`Announced`] on the link.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct AnnouncedMessage {
    #[serde(with = "HandleKindMessage")]
    kind: HandleKind,
    bytes: u64,
    pieces: usize,
}

impl From<&RegionRecord> for AnnouncedMessage {
    fn from(region: &RegionRecord) -> Self {
        Self { kind: region.kind, bytes: region.bytes, pieces: region.pieces.len() }
    }
}

impl From<AnnouncedMessage> for Announced {
    fn from(announced: AnnouncedMessage) -> Self {
        let AnnouncedMessage { kind, bytes, pieces } = announced;
        Self { kind, bytes, pieces }
    }
}

/// A [`PieceRecord`] on the link. Without a value, its descriptor goes along.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PieceMessage {
    bytes: u64,
    buffer: u64,
    value: Option<Box<[u8]>>,
}

impl From<&PieceRecord> for PieceMessage {
    fn from(piece: &PieceRecord) -> Self {
        let value = match &piece.handle {
            HandleRecord::Descriptor(_) => None,
            HandleRecord::Value(value) => Some(value.clone()),
        };
        Self { bytes: piece.bytes, buffer: piece.buffer, value }
    }
}

/// Joins pieces with the descriptors that came along, in order.
///
/// # Errors
/// When there are more or fewer than the pieces need.
pub fn join(pieces: Vec<PieceMessage>, descriptors: Vec<OwnedFd>) -> Result<Vec<Piece>, LinkError> {
    let wrong = || LinkError::OutOfTurn("pieces without their descriptors");
    let mut descriptors = descriptors.into_iter();
    let mut join = |piece: PieceMessage| {
        let PieceMessage { bytes, buffer, value } = piece;
        let handle = match value {
            Some(value) => PieceHandle::Value(value),
            None => PieceHandle::Descriptor(descriptors.next().ok_or_else(wrong)?),
        };
        Ok(Piece { bytes, buffer, handle })
    };
    let joined = pieces.into_iter().map(&mut join).collect::<Result<_, LinkError>>()?;
    if descriptors.next().is_some() { Err(wrong()) } else { Ok(joined) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn descriptor() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn pieces_are_joined_with_exactly_the_descriptors_that_they_need() {
        let record = |bytes, handle| PieceRecord { bytes, buffer: 9, handle };
        let value = record(1, HandleRecord::Value(Box::new([5; 64])));
        let by_descriptor = record(2, HandleRecord::Descriptor(Arc::new(descriptor())));
        let pieces: Vec<PieceMessage> =
            [&by_descriptor, &value, &by_descriptor].map(PieceMessage::from).into();
        let joined = join(pieces.clone(), vec![descriptor(), descriptor()]).unwrap();
        let bytes: Vec<u64> = joined.iter().map(|piece| piece.bytes).collect();
        assert_eq!(bytes, [2, 1, 2]);
        assert!(matches!(&joined[1].handle, PieceHandle::Value(value) if **value == [5; 64]));
        for count in [0, 1, 3] {
            let descriptors = (0..count).map(|_| descriptor()).collect();
            let error = join(pieces.clone(), descriptors).unwrap_err();
            assert!(matches!(error, LinkError::OutOfTurn(_)), "{count}: {error}");
        }
    }

    #[test]
    fn a_full_part_of_the_largest_pieces_fits_one_message() {
        let piece = PieceMessage {
            bytes: u64::MAX,
            buffer: u64::MAX,
            value: Some(vec![u8::MAX; statecopy_proto::HANDLE_BYTES].into()),
        };
        let part = vec![piece; PIECES_A_PART];
        let bytes = serde_json::to_vec(&part).unwrap().len();
        assert!(bytes + 1024 <= statecopy_descriptors::MESSAGE_BYTES_MAX, "{bytes}");
    }
}
