//! Device memory of this process, shared with the daemon.
//!
//! The driver is asked each time how an allocation is shared, and gives its handles anew: what is kept is the address, and
//! what the allocation there looked like. Memory that is no longer the same is never registered in its place.

use std::path::Path;
use std::sync::Arc;

use statecopy_kernels::cuda::{Buffer, CudaExporter, CudaGuest, CudaSelector, Export};
use statecopy_kernels::device::{Announced, Piece};
use statecopy_proto::{Refusal, RefusalCode};
use tokio::time::timeout_at;

use crate::call::{Call, Failure};

/// An allocation of this process, as it was when it was first registered.
#[derive(Debug, Clone)]
pub(crate) struct DeviceMemory {
    exporter: Arc<CudaExporter>,
    found: Found,
}

/// What the driver says of an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    /// Where it begins, for the device.
    start: u64,
    /// How it is shared.
    announced: Announced,
    /// What it consists of: a new allocation at the same address has another number.
    buffers: Arc<[Buffer]>,
}

impl Found {
    fn of(export: &Export, start: u64) -> Self {
        Self { start, announced: export.announced(), buffers: export.buffers().into() }
    }
}

/// Opens the driver.
pub(crate) async fn open_exporter(
    library: &Path,
    call: &Call,
) -> Result<Arc<CudaExporter>, Failure> {
    let library = library.to_owned();
    let open = move || CudaExporter::open(&library).map(Arc::new).map_err(Refusal::from);
    blocking(call, open).await
}

/// The device of that UUID, as this process uses it.
pub(crate) async fn open_guest(
    exporter: Arc<CudaExporter>,
    selector: CudaSelector,
    call: &Call,
) -> Result<CudaGuest, Failure> {
    blocking(call, move || exporter.guest(selector).map_err(Refusal::from)).await
}

impl DeviceMemory {
    /// The memory behind an address, as much as has to be shared.
    pub(crate) async fn find(
        exporter: Arc<CudaExporter>,
        address: u64,
        bytes: u64,
        call: &Call,
    ) -> Result<Self, Failure> {
        blocking(call, move || {
            let export = exporter.export(address, bytes)?;
            let found = Found::of(&export, address - export.offset());
            Ok(Self { exporter, found })
        })
        .await
    }

    /// Where it begins, for the device.
    pub(crate) fn start(&self) -> u64 {
        self.found.start
    }

    /// Whether the bytes at an address are those that were registered. Waits for nothing, and allocates nothing.
    pub(crate) fn is_unchanged(&self, address: u64, bytes: u64) -> bool {
        let mut held = self.buffers_of(address, address.saturating_add(bytes));
        held.all(|buffer| self.exporter.buffer_at(buffer.address) == Ok(buffer.number))
    }

    /// Whether two places in it, in bytes from its start, and so many bytes after the second are of one allocation.
    pub(crate) fn is_of_one(&self, place: u64, other: u64, bytes: u64) -> bool {
        let start = self.found.start;
        let (first, last) =
            (place.min(other), place.max(other.saturating_add(bytes.saturating_sub(1))));
        let mut held = self.buffers_of(start + first, start.saturating_add(last).saturating_add(1));
        held.next().is_some() && held.next().is_none()
    }

    /// The allocations that these bytes lie in.
    fn buffers_of(&self, address: u64, end: u64) -> impl Iterator<Item = &Buffer> {
        let buffers = &self.found.buffers;
        let first = buffers.partition_point(|buffer| buffer.address <= address).saturating_sub(1);
        buffers.iter().skip(first).take_while(move |buffer| buffer.address < end)
    }

    /// Where in it the bytes at an address lie; `None` when they do not.
    pub(crate) fn offset_of(&self, address: u64, bytes: u64) -> Option<u64> {
        let offset = address.checked_sub(self.found.start)?;
        (offset.checked_add(bytes)? <= self.bytes()).then_some(offset)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.found.announced.bytes
    }

    pub(crate) fn announced(&self) -> Announced {
        self.found.announced
    }

    /// Shares it once more.
    pub(crate) async fn export(&self, call: &Call) -> Result<Export, Failure> {
        let Self { exporter, found } = self.clone();
        let again = move || {
            let export = exporter.export(found.start, found.announced.bytes)?;
            let now = Found::of(&export, found.start - export.offset());
            if now == found { Ok(export) } else { Err(replaced(&found, &now)) }
        };
        blocking(call, again).await
    }
}

/// The next pieces, and the export for those that follow.
pub(crate) async fn next_pieces(
    mut export: Export,
    pieces_max: usize,
    call: &Call,
) -> Result<(Export, Vec<Piece>), Failure> {
    blocking(call, move || {
        let pieces = export.next_pieces(pieces_max)?;
        Ok((export, pieces))
    })
    .await
}

fn replaced(was: &Found, now: &Found) -> Refusal {
    let number = |found: &Found| found.buffers.first().map_or(0, |buffer| buffer.number);
    let sentence = format!(
        "The memory that was registered (allocation {}, {} bytes) is gone; allocation {} of {} bytes lies there now",
        number(was),
        was.announced.bytes,
        number(now),
        now.announced.bytes
    );
    Refusal::new(RefusalCode::HandleInvalid, sentence).remedied_by(
        "Release the region of the memory that is gone, and register what took its place.",
    )
}

/// Asks the driver, off the async threads. One that does not answer in time keeps a thread, and nobody else.
async fn blocking<T: Send + 'static>(
    call: &Call,
    ask: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Failure> {
    let asked = timeout_at(call.deadline, tokio::task::spawn_blocking(ask)).await;
    let stopped = |stopped: tokio::task::JoinError| {
        Err(Refusal::new(RefusalCode::Unavailable, format!("The driver was not asked: {stopped}")))
    };
    Ok(asked.map_err(|_| Failure::Late)?.unwrap_or_else(stopped)?)
}
