//! What a client and all of its plans share.

#![expect(unsafe_code, reason = "a stream is known by its raw handle")]

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use statecopy_client::blocking::Client;
use statecopy_client::sharing::{Buffer, Pool};
use statecopy_client::{DataType, Error, Region, Slice};
use statecopy_kernels::cuda::{CudaGuest, StreamLook};

use crate::bytes;
use crate::counters::Counters;
use crate::errors;
use crate::export::{self, Owner};
use crate::fork::Birth;
use crate::hooks::Hooks;
use crate::lock::lock;
use crate::memory::{Device, Place, Tensor, dense_strides};
use crate::order::Order;
use crate::regions::Regions;
use crate::streams::Streams;
use crate::sync::{AtomicBool, AtomicU32, Ordering};
use crate::turn::Turns;
use crate::view::{View, Whose};

/// The lane of a thread that names none.
static LANES: AtomicU32 = AtomicU32::new(1);

thread_local! {
    static LANE: u32 = LANES.fetch_add(1, Ordering::Relaxed);
}

/// A lane of the calling thread's own (contract: Both).
pub(crate) fn lane_of_this_thread() -> u32 {
    LANE.with(|lane| *lane)
}

/// When a copy's call returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completion {
    /// When the bytes are there.
    Host,
    /// When the copy is on the caller's stream: what follows there finds the bytes.
    Stream,
}

/// One client's session with the daemon, and what it shares with it.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) pool: Pool,
    pub(crate) regions: Regions,
    pub(crate) hooks: Hooks,
    pub(crate) counters: Counters,
    /// The session's CUDA device, as this process uses it; none on the host.
    guest: Option<CudaGuest>,
    /// The lanes of its streams, where copies are in their order.
    streams: Option<Arc<Streams>>,
    /// For how long copies that were put on streams are waited for, where that has to be.
    timeout: Duration,
    /// The tensor library's own memory cannot be shared: results lie in the pool.
    makes_none: AtomicBool,
    /// Whoever changes what is registered has one.
    pub(crate) turns: Turns,
    /// The registered tensors: a plan is not to outlive its cache.
    registered: Mutex<BTreeMap<String, Registered>>,
    birth: Birth,
    closed: AtomicBool,
}

/// A registered layer's cache.
#[derive(Debug)]
pub(crate) struct Registered {
    /// What keeps the memory.
    pub(crate) _tensor: Py<PyAny>,
    /// What it lies in.
    pub(crate) region: Region,
}

impl Session {
    pub(crate) fn new(
        client: Client,
        guest: Option<CudaGuest>,
        hooks: Hooks,
        pool_bytes_max: Option<u64>,
        (completion, timeout): (Completion, Duration),
    ) -> Self {
        let streams = match (&guest, completion) {
            (Some(guest), Completion::Stream) => Some(Arc::new(Streams::new(&client, guest))),
            _ => None,
        };
        Self {
            streams,
            timeout,
            makes_none: AtomicBool::new(false),
            pool: Pool::new(&client, pool_bytes_max, guest.as_ref().map(Order::of)),
            regions: Regions::new(&client),
            client,
            guest,
            hooks,
            counters: Counters::default(),
            turns: Turns::default(),
            registered: Mutex::default(),
            birth: Birth::here(),
            closed: AtomicBool::new(false),
        }
    }

    /// # Errors
    /// ForkedError in a child, ClosedError after [`Session::close`].
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.birth.check(py)?;
        if self.closed.load(Ordering::Relaxed) { Err(errors::closed(py)) } else { Ok(()) }
    }

    pub(crate) fn is_foreign(&self) -> bool {
        self.birth.is_foreign()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_foreign() || self.closed.load(Ordering::Relaxed)
    }

    /// Whether its device is the host.
    pub(crate) fn is_host(&self) -> bool {
        self.guest.is_none()
    }

    /// What its copies are, but for those that are submitted.
    pub(crate) fn completion(&self) -> Completion {
        if self.streams.is_some() { Completion::Stream } else { Completion::Host }
    }

    /// The lanes of its streams.
    pub(crate) fn streams(&self) -> Option<&Streams> {
        self.streams.as_deref()
    }

    /// Whether results are not to be made by the tensor library.
    pub(crate) fn makes_none(&self) -> bool {
        self.makes_none.load(Ordering::Relaxed)
    }

    /// What the tensor library makes cannot be shared. After a freeze it may be that this one was new.
    pub(crate) fn make_no_more(&self) {
        if !self.regions.is_frozen() {
            self.makes_none.store(true, Ordering::Relaxed);
        }
    }

    /// The device that operands must lie on.
    pub(crate) fn device(&self) -> Device {
        self.guest.as_ref().map_or(Device::Host, |guest| Device::Cuda(guest.ordinal()))
    }

    /// Whether a tensor lies on it.
    pub(crate) fn owns(&self, view: &View) -> bool {
        view.whose == Whose::Of(self.device())
    }

    /// Where memory of the session's device lies in a region; `None` where it has to be copied to be seen by the daemon.
    /// `beside` is another operand of the same request, whose memory was just found to be what was registered.
    ///
    /// # Errors
    /// What registering it says.
    pub(crate) fn place(
        &self,
        py: Python<'_>,
        (address, bytes): (u64, u64),
        beside: Option<&Slice>,
    ) -> PyResult<Option<Slice>> {
        // Operands of one call lie close to each other more often than not, and the driver need not be asked twice.
        if let Some(slice) = beside.and_then(|slice| Regions::known_beside(address, bytes, slice)) {
            return Ok(Some(slice));
        }
        if let Some(slice) = self.pool.find(address, bytes) {
            return Ok(Some(slice));
        }
        let place = Place { device: self.device(), address };
        if self.regions.is_ordinary(place, bytes) {
            return Ok(None);
        }
        // In steady state nobody is waited for, and the interpreter's lock is kept: giving it up may cost a thread its turn.
        if let Some(slice) = self.regions.known(place, bytes) {
            return Ok(Some(slice));
        }
        let placed = py.detach(|| self.regions.slice(place, bytes));
        placed.map_err(|error| errors::raise(py, &error))
    }

    /// The same for a layer's cache, which stays registered; `None` for ordinary memory.
    ///
    /// # Errors
    /// What registering it says.
    pub(crate) fn place_cache(
        &self,
        py: Python<'_>,
        address: u64,
        bytes: u64,
    ) -> PyResult<Option<Slice>> {
        let place = Place { device: self.device(), address };
        let placed = py.detach(|| self.regions.pin(place, bytes));
        placed.map_err(|error| errors::raise(py, &error))
    }

    /// A pooled buffer.
    ///
    /// # Errors
    /// CapacityError when the pool is full; what registering it says.
    pub(crate) fn take(&self, py: Python<'_>, bytes: u64, stream: u64) -> PyResult<Arc<Buffer>> {
        let bytes = bytes.max(1);
        if let Some(buffer) = self.pool.take_free(bytes, stream) {
            return Ok(Arc::new(buffer));
        }
        let taken = py.detach(|| self.pool.take(bytes, stream));
        taken.map(Arc::new).map_err(|error| errors::raise(py, &error))
    }

    /// A pooled buffer that nothing reaches, which belongs to the graph that the stream is captured into from now on.
    ///
    /// # Errors
    /// As [`Session::take`]; what opening the graph's lane says.
    pub(crate) fn take_for_graph(
        &self,
        py: Python<'_>,
        bytes: u64,
        look: StreamLook,
    ) -> PyResult<Arc<Buffer>> {
        let taken = py.detach(|| self.pool.take_for_graph(bytes.max(1)));
        let buffer = Arc::new(taken.map_err(|error| errors::raise(py, &error))?);
        if let (Some(streams), Some(capture)) = (self.streams(), &look.capture) {
            let given = streams.give(py, (capture, look.id), &buffer);
            given.map_err(|failed| failed.raise(py))?;
        }
        Ok(buffer)
    }

    /// Keeps the tensors of a new registration, and lets go of those of the one before.
    pub(crate) fn keep(&self, py: Python<'_>, caches: BTreeMap<String, Registered>) {
        let before = mem::replace(&mut *lock(&self.registered), caches);
        py.detach(|| self.settle_pins());
        // A tensor's end may run any code.
        drop(before);
    }

    /// Keeps what was registered before, after an attempt that changed nothing.
    pub(crate) fn keep_as_before(&self, py: Python<'_>) {
        py.detach(|| self.settle_pins());
    }

    /// Whether the tensors of a registration are kept.
    pub(crate) fn has_layers(&self) -> bool {
        !lock(&self.registered).is_empty()
    }

    /// The same for the layers that moved.
    pub(crate) fn keep_moved(&self, py: Python<'_>, moved: BTreeMap<String, Registered>) {
        let mut before = Vec::new();
        {
            let mut registered = lock(&self.registered);
            for (name, cache) in moved {
                before.extend(registered.insert(name, cache));
            }
        }
        py.detach(|| self.settle_pins());
        drop(before);
    }

    /// Pins what is registered, and nothing else; gives the rest up.
    fn settle_pins(&self) {
        let regions: Vec<Region> =
            lock(&self.registered).values().map(|cache| cache.region.clone()).collect();
        self.regions.pin_only(&regions);
    }

    /// A tensor over a pooled buffer: of the tensor library, or our own.
    pub(crate) fn tensor_over<'py>(
        &self,
        py: Python<'py>,
        buffer: Arc<Buffer>,
        dtype: DataType,
        shape: &[u64],
    ) -> PyResult<Bound<'py, PyAny>> {
        let place = Place { device: self.device(), address: buffer.address() };
        let owner = Owner::Pooled(buffer);
        if self.hooks.is_plain() {
            return Ok(Bound::new(py, Tensor::dense(owner, place, dtype, shape))?.into_any());
        }
        let strides = dense_strides(shape).unwrap_or_default();
        // Tensor libraries take no float8 by DLPack yet.
        let carried = match dtype {
            DataType::Float8E4M3 | DataType::Float8E5M2 => DataType::UInt8,
            other => other,
        };
        let capsule = export::capsule(py, owner, place, carried, shape, &strides, false)?;
        let tensor = self.hooks.wrap(py, capsule)?;
        if carried == dtype { Ok(tensor) } else { self.hooks.view(&tensor, dtype.label()) }
    }

    /// Whether the caller's current stream is being captured: waiting for it would end the capture.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn is_capturing(&self, py: Python<'_>, stream: u64) -> PyResult<bool> {
        let Some(guest) = &self.guest else { return Ok(false) };
        // SAFETY: as in `synchronise`.
        let answer = unsafe { guest.is_capturing(stream) };
        answer.map_err(|error| errors::driver(py, &error))
    }

    /// What of the caller's current stream a copy in its order depends on.
    ///
    /// # Errors
    /// What the driver says, also that the stream's capture has failed.
    pub(crate) fn look(&self, py: Python<'_>, stream: u64) -> PyResult<StreamLook> {
        let Some(guest) = &self.guest else { return Err(errors::closed(py)) };
        // SAFETY: as in `synchronise`.
        let look = unsafe { guest.look(stream) };
        look.map_err(|error| errors::driver(py, &error))
    }

    /// What is raised instead of that: an earlier copy of the stream was lost, and nothing on it goes on before its user has heard so.
    pub(crate) fn explain(&self, py: Python<'_>, order: Option<StreamLook>, error: PyErr) -> PyErr {
        let (Some(streams), Some(look)) = (self.streams(), order) else { return error };
        streams.check_stream(look.id).map_or_else(|failed| failed.raise(py), |()| error)
    }

    /// Waits until the copies are over that were put on streams: what they name is about to change.
    ///
    /// # Errors
    /// DEADLINE_EXCEEDED.
    pub(crate) fn settle(&self, py: Python<'_>) -> PyResult<()> {
        let Some(streams) = &self.streams else { return Ok(()) };
        py.detach(|| streams.settle(self.timeout)).map_err(|error| errors::raise(py, &error))
    }

    /// Waits for what the caller queued on its current stream, which may write what a copy reads. Nothing on the host.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn synchronise(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let Some(guest) = &self.guest else { return Ok(()) };
        let waited = py.detach(|| {
            // SAFETY: the tensor library's own current stream, which it keeps for as long as it is current on this thread, or
            // the legacy default stream.
            unsafe { guest.synchronize(stream) }
        });
        waited.map_err(|error| errors::driver(py, &error))
    }

    /// Copies a gathered buffer to the tensor that the caller wants it in.
    ///
    /// # Errors
    /// What the tensor library raises.
    pub(crate) fn copy_back(
        &self,
        py: Python<'_>,
        buffer: Arc<Buffer>,
        (dtype, shape): (DataType, &[u64]),
        (view, out): (&View, &Py<PyAny>),
        bytes: u64,
    ) -> PyResult<()> {
        if self.is_host() {
            let (from, to) = (buffer.address(), view.address);
            py.detach(|| bytes::copy(from, to, bytes));
        } else {
            let from = self.tensor_over(py, buffer, dtype, shape)?;
            self.hooks.stage(out.bind(py), &from)?;
        }
        self.counters.operands_copied.add(1);
        self.counters.bytes_copied_to_share.add(bytes);
        Ok(())
    }

    /// The caller's current stream; 0 on the host.
    pub(crate) fn stream(&self, py: Python<'_>) -> PyResult<u64> {
        if self.is_host() { Ok(0) } else { self.hooks.stream(py) }
    }

    /// Ends the session.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.closed.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let before = mem::take(&mut *lock(&self.registered));
        // It is closed all the same.
        let settled = self.settle(py);
        let closed = py.detach(|| {
            let closed = self.client.clone().close();
            if let Some(streams) = &self.streams {
                streams.close();
            }
            self.pool.close();
            self.regions.close();
            closed
        });
        drop(before);
        match closed {
            // A session does not outlive its daemon.
            Ok(()) | Err(Error::Unavailable { .. }) => settled,
            Err(error) => Err(errors::raise(py, &error)),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.is_foreign() {
            // A child that let go of the client would end the parent's connections, which the two share.
            let streams = self.streams.clone();
            mem::forget((self.client.clone(), self.pool.clone(), self.guest.clone(), streams));
        }
    }
}
