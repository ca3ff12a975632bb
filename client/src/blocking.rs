//! The same client without `async`, for programs that have no runtime.
//!
//! Copies on the ring are waited for on the calling thread. Every other call drives a runtime of the client's own there.
//! Several threads may call at once. Do not call it inside `async` code: tokio panics where one runtime is driven inside
//! another. A call within another one, by its progress, is refused.

mod copies;

use std::cell::Cell;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use statecopy_kernels::cuda::CudaGuest;
use statecopy_kernels::device::Moved;
use statecopy_proto::{Direction, v1};
use tokio::runtime::{Builder, Runtime};

use crate::attempt::{Attempts, Effect};
use crate::call::Call;
use crate::error::{ArgumentError, Error};
use crate::graphs::GraphLane;
use crate::lanes::StreamLane;
use crate::link::Link;
use crate::lock::lock;
use crate::{
    Address, ConnectOptions, Event, Layer, Memory, PlannedCopy, Progress, Rebind, Region,
    Registration, Request, Session, Slice, Use,
};

/// The plans of a registration, by the names that were registered.
pub type Bindings = crate::Bindings<Plan>;

pub use copies::{InFlight, Started};

/// A runtime that is put away without waiting, so that it may be dropped anywhere.
#[derive(Debug)]
struct Background(Option<Runtime>);

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

thread_local! {
    /// Whether this thread drives a call: it cannot drive another one meanwhile, of whichever client.
    static DRIVES: Cell<bool> = const { Cell::new(false) };
}

/// This thread drives a call, until it is dropped.
struct Driving;

impl Driving {
    /// `None` while it drives one already.
    fn begin() -> Option<Self> {
        // Not made where it is not begun: its end would be the other one's.
        (!DRIVES.replace(true)).then(|| Self)
    }
}

impl Drop for Driving {
    fn drop(&mut self) {
        DRIVES.set(false);
    }
}

/// The runtime of one client, until it is closed.
#[derive(Debug)]
struct Driver(Mutex<Option<Arc<Background>>>);

impl Driver {
    fn new() -> Result<Arc<Self>, Error> {
        let runtime = Builder::new_current_thread().enable_all().build().map_err(Error::Runtime)?;
        Ok(Arc::new(Self(Mutex::new(Some(Arc::new(Background(Some(runtime))))))))
    }

    fn drive<T>(&self, call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let Some(_driving) = Driving::begin() else {
            return Err(Error::Argument(ArgumentError::Within));
        };
        let running = lock(&self.0).clone();
        match running.as_deref() {
            Some(Background(Some(runtime))) => runtime.block_on(call),
            Some(Background(None)) | None => Err(Error::Closed),
        }
    }

    /// Ends the runtime, and with it every connection: nobody drives it any more, so none would end by itself.
    fn end(&self) {
        let running = lock(&self.0).take();
        drop(running);
    }
}

/// A worker's client. See [`crate::Client`], whose methods it has.
#[derive(Debug, Clone)]
pub struct Client {
    // Before the runtime: connections are dropped while it is there.
    client: crate::Client,
    driver: Arc<Driver>,
}

impl Client {
    /// Opens a session. See [`crate::Client::connect`].
    ///
    /// # Errors
    /// As there, or when no runtime can be made.
    pub fn connect(address: Address, options: ConnectOptions) -> Result<Self, Error> {
        let driver = Driver::new()?;
        let client = driver.drive(crate::Client::connect(address, options))?;
        Ok(Self { client, driver })
    }

    /// The asynchronous client inside.
    #[must_use]
    pub fn as_async(&self) -> &crate::Client {
        &self.client
    }

    /// What was agreed on when the session was opened; `None` while there is none.
    #[must_use]
    pub fn session(&self) -> Option<Session> {
        self.client.session()
    }

    /// The daemon's address.
    #[must_use]
    pub fn address(&self) -> &Address {
        self.client.address()
    }

    /// The session's CUDA device, as this process uses it. See [`crate::Client::cuda_guest`].
    ///
    /// # Errors
    /// As there.
    pub fn cuda_guest(&self) -> Result<Option<CudaGuest>, Error> {
        self.driver.drive(self.client.cuda_guest())
    }

    /// Allocates memory that can be registered.
    ///
    /// # Errors
    /// When the operating system gives none.
    pub fn allocate(&self, name: impl Into<String>, bytes: u64) -> Result<Memory, Error> {
        self.client.allocate(name, bytes)
    }

    /// Registers memory. See [`crate::Client::register_region`].
    ///
    /// # Errors
    /// As there.
    pub fn register_region(&self, memory: &Memory, purpose: Use) -> Result<Region, Error> {
        self.driver.drive(self.client.register_region(memory, purpose))
    }

    /// Registers memory of the caller's own. See [`crate::Client::register_descriptor`].
    ///
    /// # Errors
    /// As there.
    pub fn register_descriptor(
        &self,
        descriptor: OwnedFd,
        bytes: u64,
        purpose: Use,
    ) -> Result<Region, Error> {
        self.driver.drive(self.client.register_descriptor(descriptor, bytes, purpose))
    }

    /// Registers device memory of this process. See [`crate::Client::register_device_memory`].
    ///
    /// # Errors
    /// As there.
    pub fn register_device_memory(&self, address: u64, bytes: u64) -> Result<Slice, Error> {
        self.driver.drive(self.client.register_device_memory(address, bytes))
    }

    /// Populates a range of a region. See [`crate::Client::populate`].
    ///
    /// # Errors
    /// As there.
    pub fn populate(&self, region: &Region, range: Range<u64>) -> Result<(), Error> {
        self.driver.drive(self.client.populate(region, range))
    }

    /// Prepares, seals and publishes layers, all or none. See [`crate::Client::register`].
    ///
    /// # Errors
    /// As there.
    pub fn register(
        &self,
        registration: &Registration,
        on_progress: impl FnMut(Progress) + Send,
    ) -> Result<Bindings, Error> {
        let bindings = self.driver.drive(self.client.register(registration, on_progress))?;
        Ok(bindings.map(|plan| Plan { plan, driver: Arc::clone(&self.driver) }))
    }

    /// Moves published layers to other memory. See [`crate::Client::rebind`].
    ///
    /// # Errors
    /// As there.
    pub fn rebind(&self, moves: &[Rebind]) -> Result<(), Error> {
        self.driver.drive(self.client.rebind(moves))
    }

    /// A layer as it is registered now. See [`crate::Client::layer`].
    #[must_use]
    pub fn layer(&self, name: &str) -> Option<Layer> {
        self.client.layer(name)
    }

    /// Withdraws every published layer. See [`crate::Client::release_layers`].
    ///
    /// # Errors
    /// As there.
    pub fn release_layers(&self) -> Result<(), Error> {
        self.driver.drive(self.client.release_layers())
    }

    /// Gives a region back. See [`crate::Client::release_region`].
    ///
    /// # Errors
    /// As there.
    pub fn release_region(&self, region: Region) -> Result<(), Error> {
        self.driver.drive(self.client.release_region(region))
    }

    /// Opens a lane: an ordered sequence of copies that the host does not wait for, for one stream of the worker.
    ///
    /// # Errors
    /// QUOTA_EXCEEDED when every lane of the session is open, VERSION_MISMATCH where the session has none; when there is no daemon.
    pub fn open_lane(&self) -> Result<StreamLane, Error> {
        StreamLane::open(self)
    }

    /// Opens a graph lane: copies that a captured graph makes at every replay, on one stream of it.
    ///
    /// # Errors
    /// QUOTA_EXCEEDED when every graph lane of the session is open, VERSION_MISMATCH where the session has none; when there is no daemon.
    pub fn open_graph_lane(&self) -> Result<GraphLane, Error> {
        GraphLane::open(self)
    }

    /// Drives a call of this client on the calling thread.
    pub(crate) fn drive<T>(
        &self,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        self.driver.drive(call)
    }

    /// The link that lives, or a new one.
    pub(crate) fn link(&self, call: Call) -> Result<Arc<Link>, Error> {
        let attempts = Attempts::new(&self.client.shared, call, Effect::Session);
        copies::link(&attempts, &self.driver)
    }

    /// Whether a copy may still run though nobody waits for it. See [`crate::Client::has_stray_copies`].
    #[must_use]
    pub fn has_stray_copies(&self) -> bool {
        self.client.has_stray_copies()
    }

    /// Several copies in order, each answered by itself. See [`crate::Client::copy_many`]; a blocking plan is named by
    /// [`Plan::as_async`].
    ///
    /// # Errors
    /// As there.
    pub fn copy_many(
        &self,
        copies: &[PlannedCopy<'_>],
    ) -> Result<Vec<Result<Moved, Error>>, Error> {
        copies::copy_many(&self.client, &self.driver, copies)
    }

    /// The session's events, from now on. See [`crate::Client::events`].
    ///
    /// # Errors
    /// As there.
    pub fn events(&self) -> Result<Events, Error> {
        let events = self.driver.drive(self.client.events())?;
        Ok(Events { events, driver: Arc::clone(&self.driver) })
    }

    /// Asks whether the supervisor lives.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn ping(&self) -> Result<v1::PingReply, Error> {
        self.driver.drive(self.client.ping())
    }

    /// Everything that `statecopy status` shows.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn inspect(&self) -> Result<v1::InspectReply, Error> {
        self.driver.drive(self.client.inspect())
    }

    /// Asks the daemon to finish what it accepted and to end.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn drain(&self) -> Result<v1::DrainReply, Error> {
        self.driver.drive(self.client.drain())
    }

    /// Ends the session and gives back everything that it owned. See [`crate::Client::close`].
    ///
    /// # Errors
    /// As there.
    pub fn close(self) -> Result<(), Error> {
        let closed = self.driver.drive(self.client.close());
        self.driver.end();
        match closed {
            // By a clone.
            Err(Error::Closed) => Ok(()),
            other => other,
        }
    }
}

/// A published layer or binding set. See [`crate::Plan`].
#[derive(Debug, Clone)]
pub struct Plan {
    plan: crate::Plan,
    driver: Arc<Driver>,
}

impl Plan {
    /// The asynchronous plan inside, which also tells its name, sizes and signature.
    #[must_use]
    pub fn as_async(&self) -> &crate::Plan {
        &self.plan
    }

    /// `packed[s] = cache[index[s]]` where the index is valid and the flag is true, zero bytes otherwise.
    ///
    /// # Errors
    /// As [`crate::Plan::gather`].
    pub fn gather(&self, request: Request<'_>) -> Result<Moved, Error> {
        self.copy(Direction::Gather, request)
    }

    /// `cache[index[s]] = packed[s]` where the index is valid.
    ///
    /// # Errors
    /// As [`crate::Plan::gather`].
    pub fn scatter(&self, request: Request<'_>) -> Result<Moved, Error> {
        self.copy(Direction::Scatter, request)
    }

    /// A gather or a scatter.
    ///
    /// # Errors
    /// As [`crate::Plan::gather`].
    pub fn copy(&self, direction: Direction, request: Request<'_>) -> Result<Moved, Error> {
        self.start(direction, request)?.wait()
    }

    /// Begins a gather or a scatter without waiting for anybody, so that the caller can make use of the time until the answer.
    /// Where no session lives, its ring is full, or copies go over gRPC, [`Started::wait`] does the whole.
    ///
    /// # Errors
    /// When the client is closed.
    pub fn start<'a>(
        &'a self,
        direction: Direction,
        request: Request<'a>,
    ) -> Result<Started<'a>, Error> {
        copies::start(self, direction, request)
    }

    /// Submits a gather, to be waited for later.
    ///
    /// # Errors
    /// As [`crate::Plan::submit_gather`].
    pub fn submit_gather(&self, request: Request<'_>) -> Result<InFlight, Error> {
        self.submit(Direction::Gather, request)
    }

    /// Submits a scatter, to be waited for later.
    ///
    /// # Errors
    /// As [`crate::Plan::submit_gather`].
    pub fn submit_scatter(&self, request: Request<'_>) -> Result<InFlight, Error> {
        self.submit(Direction::Scatter, request)
    }

    /// Submits a gather or a scatter, to be waited for later.
    ///
    /// # Errors
    /// As [`crate::Plan::submit_gather`].
    #[expect(clippy::needless_pass_by_value, reason = "as the asynchronous plan has it")]
    pub fn submit(&self, direction: Direction, request: Request<'_>) -> Result<InFlight, Error> {
        copies::submit(&self.plan, &self.driver, direction, &request)
    }

    /// Bytes of the packed buffer for that many rows.
    #[must_use]
    pub fn packed_bytes(&self, selected: u64) -> u64 {
        self.plan.packed_bytes(selected)
    }
}

/// The events of one session, as an iterator that waits for the next one.
#[derive(Debug)]
pub struct Events {
    events: crate::Events,
    driver: Arc<Driver>,
}

impl Events {
    /// The next event, if one comes in that time; `None` otherwise and at the end.
    ///
    /// # Errors
    /// As [`crate::Events::next`].
    pub fn next_within(&mut self, timeout: Duration) -> Result<Option<Event>, Error> {
        let events = &mut self.events;
        self.driver
            .drive(async { tokio::time::timeout(timeout, events.next()).await.unwrap_or(Ok(None)) })
    }
}

impl Iterator for Events {
    type Item = Result<Event, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let events = &mut self.events;
        self.driver.drive(events.next()).transpose()
    }
}

/// An operator's connection, which opens no session. See [`crate::Admin`].
#[derive(Debug, Clone)]
pub struct Admin {
    admin: crate::Admin,
    driver: Arc<Driver>,
}

impl Admin {
    /// Connects, once. See [`crate::Admin::connect`].
    ///
    /// # Errors
    /// As there, or when no runtime can be made.
    pub fn connect(address: Address, timeout: Duration) -> Result<Self, Error> {
        let driver = Driver::new()?;
        let admin = driver.drive(crate::Admin::connect(address, timeout))?;
        Ok(Self { admin, driver })
    }

    /// Asks whether the supervisor lives.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn ping(&self) -> Result<v1::PingReply, Error> {
        self.driver.drive(self.admin.ping())
    }

    /// Everything that `statecopy status` shows.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn inspect(&self) -> Result<v1::InspectReply, Error> {
        self.driver.drive(self.admin.inspect())
    }

    /// Asks the daemon to finish what it accepted and to end.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn drain(&self) -> Result<v1::DrainReply, Error> {
        self.driver.drive(self.admin.drain())
    }
}
