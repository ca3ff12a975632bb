//! The memory that a worker offers as a region: every check that needs no device.
//!
//! What a descriptor or a handle really names only the device can tell; a sealed memory file is looked at here too, so that
//! nothing else ever reaches a device process of the host.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use statecopy_descriptors::{MemoryError, SealedMemory};
use statecopy_kernels::device::{AllocationId, DeviceDescription};
use statecopy_proto::{HANDLE_BYTES, HandleKind, Refusal, RefusalCode, v1};

use super::sessions::within;
use crate::config::Limits;
use crate::record::{HandleRecord, PieceRecord};

/// What an offer is held against.
#[derive(Debug)]
pub(crate) struct Terms<'a> {
    /// The device of the session.
    pub(crate) device: &'a DeviceDescription,
    /// The daemon's limits.
    pub(crate) limits: &'a Limits,
    /// Whether the session's version has pieces.
    pub(crate) has_pieces: bool,
}

/// Memory that may become a region.
#[derive(Debug)]
pub(crate) struct Offered {
    /// How it comes.
    pub(crate) kind: HandleKind,
    /// Its size.
    pub(crate) bytes: u64,
    /// What lies side by side in it.
    pub(crate) pieces: Arc<[PieceRecord]>,
    /// The file behind it, where it is one; elsewhere the worker's word is all there is.
    pub(crate) file: Option<AllocationId>,
}

impl Terms<'_> {
    /// Checks an offer. `descriptors` are those that came under the request's tag; a refusal closes them.
    ///
    /// # Errors
    /// HANDLE_UNSUPPORTED for memory of another kind of device, QUOTA_EXCEEDED past a limit, HANDLE_INVALID for whatever
    /// does not fit together.
    pub(crate) fn parse(
        &self,
        request: v1::RegisterRegionRequest,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Offered, Refusal> {
        let kind = HandleKind::from_message(request.kind)
            .ok_or_else(|| invalid("kind", "The handle is of no known kind"))?;
        self.check_device(kind)?;
        let bytes = request.size_bytes;
        let max = self.limits.region_bytes_max;
        within("bytes in one region", "limits.region_bytes_max", bytes, max)?;
        let pieces = if self.has_pieces { request.pieces } else { Vec::new() };
        let pieces = self.pieces(kind, bytes, pieces)?;
        if kind == HandleKind::Memfd {
            return file(bytes, descriptors);
        }
        let pieces = join(kind, pieces, descriptors)?;
        Ok(Offered { kind, bytes, pieces, file: None })
    }

    fn check_device(&self, kind: HandleKind) -> Result<(), Refusal> {
        let of = self.device.kind;
        if kind.device_kind() == of {
            return Ok(());
        }
        let takes = HandleKind::ALL.into_iter().filter(|kind| kind.device_kind() == of);
        let takes: Vec<&str> = takes.map(HandleKind::label).collect();
        let (kind, takes) = (kind.label(), takes.join(" or "));
        let sentence = format!("The {of} device takes memory by {takes}, not by {kind}");
        Err(Refusal::new(RefusalCode::HandleUnsupported, sentence)
            .about("kind")
            .remedied_by("Open the session on the device that the memory belongs to, by its UUID."))
    }

    /// The pieces as announced: as many as may be, each as its kind wants it, together as large as the region.
    fn pieces(
        &self,
        kind: HandleKind,
        bytes: u64,
        mut pieces: Vec<v1::RegionPiece>,
    ) -> Result<Vec<v1::RegionPiece>, Refusal> {
        if pieces.is_empty() && kind == HandleKind::Memfd {
            pieces.push(v1::RegionPiece { size_bytes: bytes, ..v1::RegionPiece::default() });
        }
        let max = u64::from(self.limits.pieces_max);
        within("pieces of one region", "limits.pieces_max", pieces.len() as u64, max)?;
        let (label, count) = (kind.label(), pieces.len());
        let wanted = match kind {
            HandleKind::Memfd | HandleKind::CudaIpc => 1..=1,
            HandleKind::CudaVmm | HandleKind::CudaFabric => 1..=usize::MAX,
        };
        if !wanted.contains(&count) {
            let one = if wanted.end() == wanted.start() { "one piece" } else { "pieces" };
            return Err(invalid("pieces", format!("{label} memory is {one}, not {count}")));
        }
        let mut together = 0_u64;
        for (at, piece) in pieces.iter().enumerate() {
            let handle = piece.handle.len();
            let wanted = if kind.travels_by_descriptor() { 0 } else { HANDLE_BYTES };
            if handle != wanted {
                let sentence =
                    format!("Piece {at} has {handle} bytes of handle; {label} has {wanted}");
                return Err(invalid("pieces", sentence));
            }
            let sum = together.checked_add(piece.size_bytes).filter(|sum| *sum <= bytes);
            together = sum.filter(|_| piece.size_bytes > 0).ok_or_else(|| {
                let size = piece.size_bytes;
                let sentence = format!(
                    "Piece {at} has {size} bytes behind {together} of a region of {bytes} bytes"
                );
                invalid("pieces", sentence)
            })?;
        }
        if together != bytes {
            let sentence =
                format!("The {count} pieces have {together} bytes, the region has {bytes}");
            return Err(invalid("pieces", sentence));
        }
        Ok(pieces)
    }
}

/// Pieces with their handles: one descriptor each, or none at all.
fn join(
    kind: HandleKind,
    pieces: Vec<v1::RegionPiece>,
    descriptors: Vec<OwnedFd>,
) -> Result<Arc<[PieceRecord]>, Refusal> {
    let wanted = if kind.travels_by_descriptor() { pieces.len() } else { 0 };
    let (label, given) = (kind.label(), descriptors.len());
    if given != wanted {
        let sentence = format!(
            "{label} memory of {} pieces has {wanted} descriptors, not {given}",
            pieces.len()
        );
        return Err(invalid("descriptors", sentence));
    }
    let mut descriptors = descriptors.into_iter();
    let record = |piece: v1::RegionPiece| PieceRecord {
        bytes: piece.size_bytes,
        buffer: piece.buffer_id,
        handle: match descriptors.next() {
            Some(descriptor) => HandleRecord::Descriptor(Arc::new(descriptor)),
            None => HandleRecord::Value(piece.handle.into_boxed_slice()),
        },
    };
    Ok(pieces.into_iter().map(record).collect())
}

/// A sealed memory file.
fn file(bytes: u64, descriptors: Vec<OwnedFd>) -> Result<Offered, Refusal> {
    let [descriptor] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|descriptors| {
        let given = descriptors.len();
        invalid("descriptors", format!("A memfd is one descriptor, not {given}"))
    })?;
    let memory = SealedMemory::adopt(descriptor, bytes)
        .map_err(|error: MemoryError| invalid("descriptors", error.to_string()))?;
    let file = memory.allocation();
    let descriptor = memory.try_clone_fd().map_err(|error| no_descriptor(&error))?;
    let handle = HandleRecord::Descriptor(Arc::new(descriptor));
    let piece = PieceRecord { bytes, buffer: 0, handle };
    Ok(Offered {
        kind: HandleKind::Memfd,
        bytes,
        pieces: Arc::new([piece]),
        file: Some(AllocationId(file.dev, file.ino)),
    })
}

fn invalid(subject: &str, sentence: impl Into<String>) -> Refusal {
    Refusal::new(RefusalCode::HandleInvalid, sentence).about(subject)
}

fn no_descriptor(error: &std::io::Error) -> Refusal {
    let sentence = format!("The daemon can hold no more descriptors (RLIMIT_NOFILE): {error}");
    Refusal::new(RefusalCode::QuotaExceeded, sentence)
        .remedied_by("Release regions, or start the daemon with a higher limit of open files.")
}

#[cfg(test)]
mod tests {
    use statecopy_kernels::signature::DeviceUuid;

    use super::*;

    fn device(kind: &'static str) -> DeviceDescription {
        DeviceDescription {
            kind,
            uuid: DeviceUuid([7; 16]),
            name: "a device".to_owned(),
            family: None,
            fused: Vec::new(),
        }
    }

    fn piece(size_bytes: u64, handle: usize) -> v1::RegionPiece {
        v1::RegionPiece { size_bytes, buffer_id: 5, handle: vec![9; handle] }
    }

    fn request(kind: HandleKind, pieces: Vec<v1::RegionPiece>) -> v1::RegisterRegionRequest {
        v1::RegisterRegionRequest {
            kind: kind.to_message().into(),
            size_bytes: 4096,
            pieces,
            ..v1::RegisterRegionRequest::default()
        }
    }

    fn descriptors(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| std::fs::File::open("/dev/null").unwrap().into()).collect()
    }

    fn offer(
        kind: HandleKind,
        pieces: Vec<v1::RegionPiece>,
        count: usize,
    ) -> Result<Offered, RefusalCode> {
        let limits = Limits { pieces_max: 3, ..Limits::default() };
        let terms = Terms { device: &device("cuda"), limits: &limits, has_pieces: true };
        terms.parse(request(kind, pieces), descriptors(count)).map_err(|refusal| refusal.code())
    }

    #[test]
    fn pieces_that_fit_together_are_taken_in_their_order() {
        let offered =
            offer(HandleKind::CudaVmm, vec![piece(1024, 0), piece(2048, 0), piece(1024, 0)], 3);
        let sizes: Vec<u64> = offered.unwrap().pieces.iter().map(|piece| piece.bytes).collect();
        assert_eq!(sizes, [1024, 2048, 1024]);
        let offered = offer(HandleKind::CudaIpc, vec![piece(4096, HANDLE_BYTES)], 0).unwrap();
        let HandleRecord::Value(value) = &offered.pieces[0].handle else { panic!("no value") };
        assert_eq!(**value, [9; HANDLE_BYTES]);
        offer(HandleKind::CudaFabric, vec![piece(2048, 64), piece(2048, 64)], 0).unwrap();
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        use HandleKind::{CudaFabric, CudaIpc, CudaVmm, Memfd};
        use RefusalCode::{HandleInvalid, HandleUnsupported, QuotaExceeded};
        for (kind, pieces, count, code) in [
            (Memfd, Vec::new(), 1, HandleUnsupported),
            (CudaIpc, Vec::new(), 0, HandleInvalid),
            (CudaVmm, Vec::new(), 0, HandleInvalid),
            (CudaIpc, vec![piece(4096, 63)], 0, HandleInvalid),
            (CudaIpc, vec![piece(4096, 0)], 0, HandleInvalid),
            (CudaIpc, vec![piece(4096, 1 << 20)], 0, HandleInvalid),
            (CudaIpc, vec![piece(4096, 64)], 1, HandleInvalid),
            (CudaIpc, vec![piece(2048, 64), piece(2048, 64)], 0, HandleInvalid),
            (CudaVmm, vec![piece(4096, 64)], 1, HandleInvalid),
            (CudaVmm, vec![piece(4096, 0)], 0, HandleInvalid),
            (CudaVmm, vec![piece(4096, 0)], 2, HandleInvalid),
            (CudaVmm, vec![piece(4095, 0)], 1, HandleInvalid),
            (CudaVmm, vec![piece(4096, 0), piece(0, 0)], 2, HandleInvalid),
            (CudaVmm, vec![piece(4096, 0), piece(u64::MAX, 0)], 2, HandleInvalid),
            (CudaFabric, vec![piece(4096, 65)], 0, HandleInvalid),
            (CudaVmm, vec![piece(1024, 0); 4], 4, QuotaExceeded),
        ] {
            let refused = offer(kind, pieces.clone(), count).unwrap_err();
            assert_eq!(refused, code, "{kind:?} {} pieces {count}", pieces.len());
        }
    }

    #[test]
    fn memory_of_another_device_is_unsupported_and_the_remedy_says_where_to_go() {
        let limits = Limits::default();
        for kind in [HandleKind::CudaIpc, HandleKind::CudaVmm, HandleKind::CudaFabric] {
            let terms = Terms { device: &device("host"), limits: &limits, has_pieces: true };
            let refusal = terms.parse(request(kind, Vec::new()), descriptors(1)).unwrap_err();
            assert_eq!(refusal.code(), RefusalCode::HandleUnsupported);
            assert!(refusal.sentence().contains("by memfd, not by cuda_"), "{refusal}");
            assert!(refusal.remedy().contains("UUID"), "{refusal}");
        }
    }

    #[test]
    fn a_session_of_an_earlier_version_has_no_pieces() {
        let limits = Limits::default();
        let terms = Terms { device: &device("cuda"), limits: &limits, has_pieces: false };
        let request = request(HandleKind::CudaIpc, vec![piece(4096, HANDLE_BYTES)]);
        let refusal = terms.parse(request, Vec::new()).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::HandleInvalid);
    }
}
