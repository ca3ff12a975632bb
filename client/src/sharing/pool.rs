//! Buffers of shared memory that are registered once and used again and again.

use std::fs;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use statecopy_kernels::cuda::{CudaGuest, GuestMemory};
use statecopy_proto::{Refusal, RefusalCode};

use super::leaving::{Leaving, StreamOrder};
use super::ranges::Ranges;
use super::shelf::{Full, Room, Shelf, Taken};
use crate::blocking::Client;
use crate::error::Error;
use crate::lock::lock;
use crate::memory::Memory;
use crate::region::{Region, Slice, Use};
use crate::sync::{AtomicBool, Ordering};

/// The smallest buffer of host memory: a page of the largest machines.
const HOST_UNIT_BYTES: u64 = 64 << 10;
/// The smallest buffer of device memory: the driver maps no less.
const CUDA_UNIT_BYTES: u64 = 2 << 20;
/// Of the memory that is available at first, a pool takes at most one part in so many.
const SHARE: u64 = 4;
/// What a pool takes at most, unless it is told.
const BYTES_MAX: u64 = 16 << 30;

/// The pool of one client: memory files on the host device, device memory on a CUDA device.
///
/// A buffer has at most twice as many bytes as were asked for, or 64 KiB on the host and 2 MiB on a CUDA device. Free ones are
/// given up, those that were given back longest ago first, when room is wanted; what a stream may still reach is freed once it is
/// past it. Clones are the same pool.
#[derive(Debug, Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

/// What a pool holds and did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Bytes of all buffers.
    pub bytes: u64,
    /// Bytes of those that are lent.
    pub bytes_in_use: u64,
    /// How many buffers there are.
    pub buffers: u64,
    /// How often a free one fitted.
    pub hits: u64,
    /// How often a new one was made.
    pub misses: u64,
}

#[derive(Debug)]
struct Inner {
    client: Client,
    bytes_max: Option<u64>,
    order: Option<Arc<dyn StreamOrder>>,
    /// There from the first buffer on: the driver is opened no earlier.
    opened: OnceLock<Opened>,
}

#[derive(Debug)]
struct Opened {
    source: Source,
    books: Mutex<Books>,
}

/// Where new memory comes from.
#[derive(Debug)]
enum Source {
    Host,
    Cuda(CudaGuest),
}

#[derive(Debug)]
struct Books {
    shelf: Shelf<Block>,
    /// Those that are lent, by their addresses.
    lent: Ranges<Slice>,
    leaving: Leaving<Block>,
    closed: bool,
    hits: u64,
    misses: u64,
}

/// One registered allocation.
#[derive(Debug)]
struct Block {
    address: u64,
    bytes: u64,
    slice: Slice,
    backing: Backing,
}

#[derive(Debug)]
enum Backing {
    Host(Memory),
    Device(GuestMemory),
}

/// A buffer of a pool. It goes back when it is dropped, on whatever thread and without asking anybody; where the pool is gone,
/// it is freed.
#[derive(Debug)]
pub struct Buffer {
    block: Option<Block>,
    slice: Slice,
    address: u64,
    bytes: u64,
    stream: Option<u64>,
    discarded: AtomicBool,
    pool: Weak<Inner>,
}

impl Pool {
    /// A pool that holds at most so many bytes, free and lent together; without a number, a quarter of the memory that is
    /// available when the first buffer is taken, and at most 16 GiB. Without an order of streams a buffer of a CUDA device stays
    /// with the stream that it was first taken for.
    #[must_use]
    pub fn new(
        client: &Client,
        bytes_max: Option<u64>,
        order: Option<Arc<dyn StreamOrder>>,
    ) -> Self {
        let (client, opened) = (client.clone(), OnceLock::new());
        Self { inner: Arc::new(Inner { client, bytes_max, order, opened }) }
    }

    /// A buffer of at least so many bytes, with whatever was in it before. On a CUDA device, work of `stream` (a raw handle)
    /// may follow on what earlier users asked for there. Where there is no room for another one, the stream is given one that
    /// another stream may still use, and comes after what that one was asked until now. The host waits for nothing, and no capture
    /// ends. A stream outlives the buffers that were taken for it. On the host the stream means nothing.
    ///
    /// # Errors
    /// QUOTA_EXCEEDED when too many bytes are lent, or the daemon takes no more regions; what
    /// [`register_region`](Client::register_region) says; DEVICE_NOT_VISIBLE or PREPARE_FAILED from the driver.
    pub fn take(&self, bytes: u64, stream: u64) -> Result<Buffer, Error> {
        let opened = self.inner.open()?;
        let stream = opened.stream(stream);
        let taken = {
            let mut books = lock(&opened.books);
            let shelf = &mut books.shelf;
            let settled = shelf.take_settled(bytes, stream);
            match settled.map(|value| Taken { value, busy_on: None }) {
                None if !shelf.class_bytes(bytes).is_some_and(|class| shelf.has_room(class)) => {
                    shelf.take(bytes, stream)
                }
                settled => settled,
            }
        };
        let block = match taken.and_then(|taken| self.inner.ordered(opened, taken, stream)) {
            Some(block) => block,
            None => self.inner.make(opened, bytes)?,
        };
        Ok(self.lend(&mut lock(&opened.books), block, stream))
    }

    /// The same, where a buffer is free and nothing has to be waited for: no daemon and no driver is asked.
    #[must_use]
    pub fn take_free(&self, bytes: u64, stream: u64) -> Option<Buffer> {
        let opened = self.inner.opened.get()?;
        let stream = opened.stream(stream);
        let mut books = lock(&opened.books);
        let block = books.shelf.take_settled(bytes, stream)?;
        books.hits += 1;
        Some(self.lend(&mut books, block, stream))
    }

    /// A buffer of at least so many bytes that no work of any stream reaches: for a graph that is captured. Streams are not asked
    /// about, so that no capture ends.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub fn take_for_graph(&self, bytes: u64) -> Result<Buffer, Error> {
        let opened = self.inner.open()?;
        let taken = {
            let mut books = lock(&opened.books);
            let taken = books.shelf.take_settled(bytes, None);
            if taken.is_some() {
                books.hits += 1;
            }
            taken
        };
        let block = taken.map_or_else(|| self.inner.make(opened, bytes), Ok)?;
        Ok(self.lend(&mut lock(&opened.books), block, None))
    }

    fn lend(&self, books: &mut Books, block: Block, stream: Option<u64>) -> Buffer {
        let (address, bytes, slice) = (block.address, block.bytes, block.slice.clone());
        books.lent.insert(address, bytes, slice.clone());
        let (pool, discarded) = (Arc::downgrade(&self.inner), AtomicBool::new(false));
        Buffer { block: Some(block), slice, address, bytes, stream, discarded, pool }
    }

    /// Where in a registered region these bytes lie, when they are of a buffer that is lent.
    #[must_use]
    pub fn find(&self, address: u64, bytes: u64) -> Option<Slice> {
        let opened = self.inner.opened.get()?;
        let mut books = lock(&opened.books);
        let (place, offset) = books.lent.find(address, bytes)?;
        let start = books.lent.at(place);
        Some(Slice { region: start.region.clone(), offset: start.offset + offset })
    }

    /// Gives up every free buffer. The answer is how many bytes that were.
    pub fn trim(&self) -> u64 {
        let Some(opened) = self.inner.opened.get() else { return 0 };
        let free = {
            let mut books = lock(&opened.books);
            let Books { shelf, leaving, .. } = &mut *books;
            let mut free = leaving.add(shelf.clear(), self.inner.order.as_deref());
            free.append(&mut opened.reached(leaving));
            free
        };
        let bytes = self.inner.give_back(free);
        let waited_for = lock(&opened.books).leaving.take();
        if let Source::Cuda(guest) = &opened.source
            && !waited_for.is_empty()
            && guest.settle().is_err()
        {
            // Copies of streams may name them yet: neither region nor memory goes.
            let mut books = lock(&opened.books);
            waited_for.into_iter().for_each(|block| books.leaving.condemn(block));
            return bytes;
        }
        bytes + self.inner.give_back(waited_for)
    }

    /// For a client that is closed: gives up every free buffer, and each other one when it comes back.
    pub fn close(&self) {
        if let Some(opened) = self.inner.opened.get() {
            lock(&opened.books).closed = true;
            self.trim();
        }
    }

    /// What it holds and did.
    #[must_use]
    pub fn counters(&self) -> PoolCounters {
        let Some(opened) = self.inner.opened.get() else { return PoolCounters::default() };
        let books = lock(&opened.books);
        PoolCounters {
            bytes: books.shelf.bytes(),
            bytes_in_use: books.shelf.lent_bytes(),
            buffers: books.shelf.buffers(),
            hits: books.hits,
            misses: books.misses,
        }
    }
}

impl Inner {
    fn open(&self) -> Result<&Opened, Error> {
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        let (source, unit_bytes, available) = match self.client.cuda_guest()? {
            None => (Source::Host, HOST_UNIT_BYTES, host_bytes_available()),
            Some(guest) => {
                let left = guest.memory_left().map_err(|error| lacking(&error.to_string()))?;
                (Source::Cuda(guest), CUDA_UNIT_BYTES, left.free)
            }
        };
        let bytes_max = self.bytes_max.unwrap_or((available / SHARE).min(BYTES_MAX));
        let shelf = Shelf::new(Room { bytes_max, unit_bytes });
        let books = Mutex::new(Books {
            shelf,
            lent: Ranges::default(),
            leaving: Leaving::default(),
            closed: false,
            hits: 0,
            misses: 0,
        });
        Ok(self.opened.get_or_init(|| Opened { source, books }))
    }

    /// A new buffer, lent.
    fn make(&self, opened: &Opened, bytes: u64) -> Result<Block, Error> {
        let (given_up, class) = {
            let mut books = lock(&opened.books);
            let class = books.shelf.class_bytes(bytes).unwrap_or(u64::MAX);
            let room = books.shelf.room();
            let given_up = books.shelf.reserve(class).map_err(|full| quota(bytes, room, full))?;
            books.misses += 1;
            let mut idle = books.leaving.add(given_up, self.order.as_deref());
            idle.append(&mut opened.reached(&mut books.leaving));
            (idle, class)
        };
        self.give_back(given_up);
        let made = self.allocate(&opened.source, class).or_else(|error| {
            let idle = {
                let mut books = lock(&opened.books);
                let Books { shelf, leaving, .. } = &mut *books;
                leaving.add(shelf.clear(), self.order.as_deref())
            };
            if idle.is_empty() {
                return Err(error);
            }
            // What lies free here may be what is lacking there.
            self.give_back(idle);
            self.allocate(&opened.source, class)
        });
        if made.is_err() {
            lock(&opened.books).shelf.strike(class);
        }
        made
    }

    fn allocate(&self, source: &Source, bytes: u64) -> Result<Block, Error> {
        match source {
            Source::Host => {
                let memory = Memory::allocate("statecopy.pool", bytes)?;
                let slice = self.client.register_region(&memory, Use::Packed)?.at(0);
                let address = memory.address();
                Ok(Block { address, bytes, slice, backing: Backing::Host(memory) })
            }
            Source::Cuda(guest) => {
                let memory = guest.allocate(bytes).map_err(Refusal::from)?;
                let address = memory.address();
                let slice = self.client.register_device_memory(address, bytes)?;
                Ok(Block { address, bytes, slice, backing: Backing::Device(memory) })
            }
        }
    }

    /// A free buffer that the stream may use, behind those who may still; `None` where it cannot be put behind them, and stays free.
    fn ordered(
        &self,
        opened: &Opened,
        Taken { value: block, busy_on }: Taken<Block>,
        stream: Option<u64>,
    ) -> Option<Block> {
        let comes_after = match (busy_on, stream, &self.order) {
            (None, ..) => true,
            (Some(other), Some(stream), Some(order)) => {
                order.mark(other).is_some_and(|mark| order.order_after(stream, &mark))
            }
            (Some(_), ..) => false,
        };
        let mut books = lock(&opened.books);
        if comes_after {
            books.hits += 1;
            return Some(block);
        }
        let bytes = block.bytes;
        books.shelf.give_back(block, bytes, busy_on);
        None
    }

    /// Gives up buffers that nothing reaches. The answer is how many bytes that were.
    fn give_back(&self, idle: Vec<Block>) -> u64 {
        self.release(&idle);
        let bytes = idle.iter().map(|block| block.bytes).sum();
        for block in idle {
            match (block.backing, &self.order) {
                (Backing::Device(memory), Some(order)) => order.give_back(memory),
                (backing, _) => drop(backing),
            }
        }
        bytes
    }

    /// Gives the regions of free buffers back, before their memory goes.
    fn release(&self, blocks: &[Block]) {
        let regions = blocks.iter().map(|block| block.slice.region.clone());
        release_regions(&self.client, regions.collect());
    }
}

impl Opened {
    /// The stream of a request; the host has none.
    fn stream(&self, stream: u64) -> Option<u64> {
        match self.source {
            Source::Host => None,
            Source::Cuda(_) => Some(stream),
        }
    }

    /// Those that were given up and that nothing reaches by now.
    fn reached(&self, leaving: &mut Leaving<Block>) -> Vec<Block> {
        match &self.source {
            // The daemon is done with what it released, and nobody else reaches it.
            Source::Host => leaving.take(),
            Source::Cuda(guest) => leaving.reached(guest),
        }
    }
}

impl Buffer {
    /// Where it begins: an address of this process on the host, of the device on a CUDA device.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes it has, at least as many as were asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// It is not used again: a copy that nobody knows the end of may write it yet. Once it was dropped the next [`Pool::trim`] frees it;
    /// on the host also the next buffer that is made.
    pub fn discard(&self) {
        self.discarded.store(true, Ordering::Relaxed);
    }

    /// The memory that it is, on the host device.
    #[must_use]
    pub fn memory(&self) -> Option<&Memory> {
        match &self.block.as_ref()?.backing {
            Backing::Host(memory) => Some(memory),
            Backing::Device(_) => None,
        }
    }

    /// Its place in its region.
    #[must_use]
    pub fn slice(&self) -> &Slice {
        &self.slice
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let (Some(block), Some(pool)) = (self.block.take(), self.pool.upgrade()) else { return };
        let Some(opened) = pool.opened.get() else { return };
        let mut books = lock(&opened.books);
        if let Some((place, _)) = books.lent.find(self.address, self.bytes) {
            books.lent.remove(place);
        }
        if books.closed {
            books.shelf.strike(self.bytes);
            // Its region went with the session.
            drop(books);
            drop(block);
        } else if self.discarded.load(Ordering::Relaxed) {
            books.shelf.strike(self.bytes);
            books.leaving.condemn(block);
        } else {
            books.shelf.give_back(block, self.bytes, self.stream);
        }
    }
}

/// Gives regions back. Where nobody answers they are forgotten, as the next session has none that is not on record.
pub(super) fn release_regions(client: &Client, regions: Vec<Region>) {
    let mut answers = true;
    for region in regions {
        if answers {
            let released = client.release_region(region);
            answers = !matches!(
                released,
                Err(Error::Unavailable { .. } | Error::DeadlineExceeded { .. })
            );
        } else {
            client.as_async().shared.forget(&region);
        }
    }
}

fn quota(asked: u64, room: Room, full: Full) -> Error {
    let sentence = format!(
        "A buffer of {asked} bytes was asked for; the pool holds at most {} bytes, of which {} are in use",
        room.bytes_max, full.lent_bytes
    );
    Refusal::new(RefusalCode::QuotaExceeded, sentence)
        .remedied_by(
            "Let go of results that are no longer needed, or raise the pool's limit (pool_bytes_max).",
        )
        .into()
}

fn lacking(said: &str) -> Error {
    let sentence = format!("The driver gives no buffer: {said}");
    Refusal::new(RefusalCode::PrepareFailed, sentence).into()
}

/// What the kernel would give without swapping; nothing where it does not tell.
fn host_bytes_available() -> u64 {
    let told = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = told.lines().find_map(|line| {
        let amount = line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?;
        amount.trim().parse::<u64>().ok()
    });
    kib.unwrap_or_default().saturating_mul(1024)
}
