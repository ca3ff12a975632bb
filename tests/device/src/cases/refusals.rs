//! Handles that are wrong: refused with HANDLE_INVALID, and the daemon lives.

use std::os::fd::AsFd;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use statecopy_client::v1::{DescriptorRef, RegionPiece, RegisterRegionRequest};
use statecopy_client::{Address, ConnectOptions, Refusal, RefusalCode};
use statecopy_kernels::cuda::{Allocator, CudaMemory};
use statecopy_kernels::device::{Announced, Piece, PieceHandle};
use statecopy_proto::HandleKind;
use statecopy_tests::{Session, Wire};

use crate::setup::{Gpu, Setup};

const BYTES: u64 = 4 << 20;
const SHARED: Allocator = Allocator::Virtual { piece_bytes: 0, shared: true };

pub(crate) fn wrong_uuid(setup: &Setup) -> Result<String> {
    let options = ConnectOptions {
        device: Some("GPU-00000000-0000-0000-0000-0000000000aa".to_owned()),
        ..ConnectOptions::default()
    };
    let address = Address::of_socket(&setup.socket)?;
    let Err(error) = statecopy_client::blocking::Client::connect(address, options) else {
        bail!("a session was opened");
    };
    ensure!(error.code() == Some(RefusalCode::DeviceNotVisible), "{error}");
    let device = setup.client()?.session().context("a session")?.device;
    ensure!(error.to_string().contains(&device.uuid), "{} is not listed: {error}", device.uuid);
    Ok(error.to_string())
}

/// A session spoken by hand, and memory whose handles are sent as a case wants them.
struct Stranger {
    session: Session,
    gpu: Gpu,
}

impl Stranger {
    fn open(setup: &Setup) -> Result<Self> {
        let wire = Wire::connect(&setup.socket)?;
        Ok(Self { session: Session::open(&wire), gpu: setup.gpu()? })
    }

    fn memory(&self, how: Allocator) -> Result<(CudaMemory, Announced, Vec<Piece>)> {
        let memory = self.gpu.allocate(BYTES, how)?;
        let mut export = self.gpu.exporter.export(memory.address(), memory.bytes())?;
        let announced = export.announced();
        let pieces = export.next_pieces(announced.pieces)?;
        Ok((memory, announced, pieces))
    }

    /// Registers what is announced, with the handles as they are.
    fn offer(&mut self, announced: Announced, pieces: &[Piece]) -> Result<u64, Refusal> {
        let fds: Vec<_> = pieces
            .iter()
            .filter_map(|piece| match &piece.handle {
                PieceHandle::Descriptor(descriptor) => Some(descriptor.as_fd()),
                PieceHandle::Value(_) => None,
            })
            .collect();
        let count = u32::try_from(fds.len()).unwrap_or_default();
        let tag = if fds.is_empty() { 0 } else { self.session.send(&fds) };
        let pieces = pieces.iter().map(|piece| RegionPiece {
            size_bytes: piece.bytes,
            buffer_id: piece.buffer,
            handle: match &piece.handle {
                PieceHandle::Descriptor(_) => Vec::new(),
                PieceHandle::Value(bytes) => bytes.to_vec(),
            },
        });
        self.session.register_region(RegisterRegionRequest {
            session: self.session.reference(),
            kind: announced.kind.to_message().into(),
            size_bytes: announced.bytes,
            descriptors: (count > 0).then_some(DescriptorRef { tag, count }),
            pieces: pieces.collect(),
        })
    }

    /// Expects HANDLE_INVALID for that, and that proper memory of the same kind is taken afterwards.
    fn refused(&mut self, announced: Announced, pieces: &[Piece]) -> Result<String> {
        let Err(refusal) = self.offer(announced, pieces) else {
            bail!("the region was registered");
        };
        ensure!(refusal.code() == RefusalCode::HandleInvalid, "{refusal}");
        let how = if announced.kind == HandleKind::CudaVmm { SHARED } else { Allocator::Default };
        let (_memory, announced, pieces) = self.memory(how)?;
        let region = self.offer(announced, &pieces).context("proper memory afterwards")?;
        self.session.release_region(region)?;
        Ok(refusal.to_string())
    }
}

fn value(piece: &mut Piece) -> Result<&mut Box<[u8]>> {
    match &mut piece.handle {
        PieceHandle::Value(bytes) => Ok(bytes),
        PieceHandle::Descriptor(_) => bail!("a handle of bytes was expected"),
    }
}

pub(crate) fn truncated_handle(setup: &Setup) -> Result<String> {
    let mut stranger = Stranger::open(setup)?;
    let (_memory, announced, mut pieces) = stranger.memory(Allocator::Default)?;
    let whole = value(&mut pieces[0])?.to_vec();
    *value(&mut pieces[0])? = whole[..63].into();
    let sentence = stranger.refused(announced, &pieces)?;
    // Of the right length, and cut off all the same.
    *value(&mut pieces[0])? = [&whole[..16], &[0; 48]].concat().into();
    stranger.refused(announced, &pieces)?;
    Ok(sentence)
}

pub(crate) fn wrong_size(setup: &Setup) -> Result<String> {
    let mut stranger = Stranger::open(setup)?;
    let (_memory, announced, mut pieces) = stranger.memory(Allocator::Default)?;
    for bytes in [2 * BYTES, BYTES / 2] {
        pieces[0].bytes = bytes;
        stranger.refused(Announced { bytes, ..announced }, &pieces)?;
    }
    pieces[0].bytes = BYTES + 512;
    stranger.refused(Announced { bytes: BYTES + 512, ..announced }, &pieces)
}

pub(crate) fn wrong_buffer(setup: &Setup) -> Result<String> {
    let mut stranger = Stranger::open(setup)?;
    let (_memory, announced, mut pieces) = stranger.memory(Allocator::Default)?;
    stranger.offer(announced, &pieces)?;
    pieces[0].buffer += 1;
    stranger.refused(announced, &pieces)
}

pub(crate) fn freed(setup: &Setup) -> Result<String> {
    let mut stranger = Stranger::open(setup)?;
    let (memory, announced, pieces) = stranger.memory(Allocator::Default)?;
    drop(memory);
    stranger.refused(announced, &pieces)
}

pub(crate) fn returning_handle(setup: &Setup) -> Result<String> {
    let mut stranger = Stranger::open(setup)?;
    let (memory, announced, mut pieces) = stranger.memory(Allocator::Default)?;
    let first = stranger.offer(announced, &pieces)?;
    let handle = value(&mut pieces[0])?.clone();
    drop(memory);
    // While the daemon still has the freed allocation mapped.
    let (_other, announced, mut pieces) = stranger.memory(Allocator::Default)?;
    let returned = *value(&mut pieces[0])? == handle;
    let seen = if returned {
        match stranger.offer(announced, &pieces) {
            Ok(_) => bail!("the freed allocation was taken for the new one"),
            Err(refusal) => refusal.to_string(),
        }
    } else {
        let region =
            stranger.offer(announced, &pieces).context("memory with a handle of its own")?;
        stranger.session.release_region(region)?;
        "the driver gave the new allocation a handle of its own".to_owned()
    };
    stranger.session.release_region(first)?;
    let region = stranger.offer(announced, &pieces).context("after the release")?;
    stranger.session.release_region(region)?;
    Ok(seen)
}

pub(crate) fn wrong_descriptor(setup: &Setup) -> Result<String> {
    let mut stranger = Stranger::open(setup)?;
    let (_memory, announced, mut pieces) = stranger.memory(SHARED)?;
    let last = pieces.len() - 1;
    let more = announced.bytes;
    pieces[last].bytes += more;
    stranger.refused(Announced { bytes: announced.bytes + more, ..announced }, &pieces)
}

pub(crate) fn foreign_descriptor(setup: &Setup) -> Result<String> {
    let mut stranger = Stranger::open(setup)?;
    let (_memory, announced, mut pieces) = stranger.memory(SHARED)?;
    let file = memfd_create("foreign", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, announced.bytes)?;
    pieces[0].handle = PieceHandle::Descriptor(file);
    stranger.refused(announced, &pieces)
}
