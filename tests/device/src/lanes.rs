//! A worker whose copies take their places in its streams.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use statecopy_client::blocking::{Client, Plan};
use statecopy_client::{
    DataType, Direction, Flags, IndexWidth, Indices, Layer, Ordered, Registration, Request, Slice,
    StreamLane, Strides,
};
use statecopy_descriptors::{Mapping, SealedMemory};
use statecopy_kernels::cuda::{
    Allocator, CudaMemory, CudaWorker, GuestWords, Place, WordOp, WorkerStream,
};

use crate::known::{compare, noise};
use crate::patience::eventually;
use crate::setup::Setup;

/// Rows of the cache.
pub(crate) const ROWS: u64 = 64;
/// Bytes of a row that nothing touches.
const GAP_BYTES: u64 = 64;
/// Bytes from one slot's inputs to the next: an index, then a flag.
const INPUTS_BYTES: u64 = 32;
const FLAG_AT: u64 = 16;
/// How many gates there are: one behind each step of a graph's copy.
pub(crate) const GATES: u64 = 4;
/// A line for each of a gate's two words.
const GATE_BYTES: u64 = 128;
/// A page, also where pages are large.
const GATES_BYTES: u64 = 64 << 10;

/// What a stream does for a copy: it rings, and waits.
pub(crate) fn bell_and_wait(ordered: &Ordered<'_>) -> [WordOp; 2] {
    let (bell, done) = (ordered.bell(), ordered.done());
    [
        WordOp::Write { offset: bell.offset, value: bell.value },
        WordOp::WaitAtLeast { offset: done.offset, value: done.value },
    ]
}

/// A stream, and the lane whose copies take their places in it.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) lane: StreamLane,
    pub(crate) stream: WorkerStream,
    words: Arc<GuestWords>,
}

impl Queue {
    /// Opens a lane of a client, with a stream of the worker's.
    pub(crate) fn open(
        client: &Client,
        worker: &CudaWorker,
        words: &Arc<GuestWords>,
    ) -> Result<Self> {
        let (lane, words) = (client.open_lane()?, Arc::clone(words));
        Ok(Self { lane, stream: worker.stream()?, words })
    }

    /// Asks for a copy, and puts it on the stream.
    pub(crate) fn order(
        &mut self,
        plan: &Plan,
        direction: Direction,
        request: &Request<'_>,
    ) -> Result<()> {
        let operations = self.ask(plan, direction, request)?;
        self.put(&operations)
    }

    /// Asks for a copy, and gives what is to be put on the stream.
    pub(crate) fn ask(
        &mut self,
        plan: &Plan,
        direction: Direction,
        request: &Request<'_>,
    ) -> Result<[WordOp; 2]> {
        Ok(bell_and_wait(&self.lane.order(plan, direction, request)?))
    }

    /// Puts operations with words of the session on the stream.
    pub(crate) fn put(&mut self, operations: &[WordOp]) -> Result<()> {
        Ok(self.stream.enqueue(&self.words, operations)?)
    }

    /// Whether the stream has rung for a copy.
    pub(crate) fn has_rung(&self, asked: &[WordOp; 2]) -> Result<bool> {
        let WordOp::Write { offset, value } = asked[0] else {
            bail!("{asked:?} begins with a bell")
        };
        let mut bell = [0];
        self.lane.memory().0.read_words(offset, &mut bell)?;
        Ok(bell[0] >= value)
    }

    /// Waits until everything on the stream is done, however it came to be.
    pub(crate) fn wait(&self) -> Result<()> {
        eventually("the stream is done", || Ok(self.stream.is_idle()?.then_some(())))
    }

    /// Waits until everything on the stream is done, and looks whether the copies were made.
    pub(crate) fn finish(&self) -> Result<()> {
        self.wait()?;
        Ok(self.lane.check()?)
    }
}

/// Words of a worker's own that hold its streams until the process opens them. All are open at first.
#[derive(Debug)]
pub(crate) struct Gates {
    mapping: Arc<Mapping>,
    words: Arc<GuestWords>,
}

impl Gates {
    pub(crate) fn new(worker: &CudaWorker) -> Result<Self> {
        let mapping = Arc::new(SealedMemory::create("gates", GATES_BYTES)?.map()?);
        let words = Arc::new(worker.guest().share_words(&mapping, 0..GATES_BYTES)?);
        let gates = Self { mapping, words };
        (0..GATES).try_for_each(|gate| gates.open(gate))?;
        Ok(gates)
    }

    /// Has a stream say that it is there, and holds it.
    pub(crate) fn hold(&self, stream: &mut WorkerStream, gate: u64) -> Result<()> {
        let (reached, open) = (2 * GATE_BYTES * gate, 2 * GATE_BYTES * gate + GATE_BYTES);
        let operations = [
            WordOp::Write { offset: reached, value: 1 },
            WordOp::WaitAtLeast { offset: open, value: 1 },
        ];
        Ok(stream.enqueue(&self.words, &operations)?)
    }

    pub(crate) fn open(&self, gate: u64) -> Result<()> {
        Ok(self.mapping.write_words(2 * GATE_BYTES * gate + GATE_BYTES, &[1])?)
    }

    /// Closes it before a stream comes to it.
    pub(crate) fn close(&self, gate: u64) -> Result<()> {
        self.mapping.write_words(2 * GATE_BYTES * gate, &[0])?;
        Ok(self.mapping.write_words(2 * GATE_BYTES * gate + GATE_BYTES, &[0])?)
    }

    /// Waits until a stream is held there.
    pub(crate) fn wait(&self, gate: u64) -> Result<()> {
        eventually("the stream is at the gate", || {
            let mut reached = [0];
            self.mapping.read_words(2 * GATE_BYTES * gate, &mut reached)?;
            Ok((reached[0] != 0).then_some(()))
        })
    }
}

/// Lets streams reach the words of all lanes of a client.
pub(crate) fn share_words(client: &Client, worker: &CudaWorker) -> Result<Arc<GuestWords>> {
    let lane = client.open_lane()?;
    let (mapping, range) = lane.memory();
    Ok(Arc::new(worker.guest().share_words(mapping, range)?))
}

/// How large a [`Bed`] is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Bytes of a row, a multiple of 16.
    pub(crate) payload: u64,
    /// Packed rows, each with an index and a flag.
    pub(crate) slots: u64,
    /// Entries of the log.
    pub(crate) entries: u64,
}

/// Memory for copies of single rows in streams: a cache; slots, each of a packed row, an index and a flag; a log of what a
/// stream saw.
#[derive(Debug)]
pub(crate) struct Bed {
    // The session ends first: that lets whatever waits go on.
    pub(crate) plan: Plan,
    pub(crate) client: Client,
    pub(crate) words: Arc<GuestWords>,
    pub(crate) worker: CudaWorker,
    cache: Arc<CudaMemory>,
    packed: Arc<CudaMemory>,
    inputs: Arc<CudaMemory>,
    log: Arc<CudaMemory>,
    packed_at: Slice,
    inputs_at: Slice,
    sizes: Sizes,
}

impl Bed {
    /// Allocates, registers and publishes. Slot `n` names row `n mod ROWS`, and its flag is set.
    pub(crate) fn new(setup: &Setup, client: Client, sizes: Sizes) -> Result<Self> {
        let Sizes { payload, slots, entries } = sizes;
        let gpu = setup.gpu()?;
        let worker = gpu.worker(setup)?;
        let memory = |bytes| anyhow::Ok(Arc::new(gpu.allocate(bytes, Allocator::Default)?));
        let (cache, packed) = (memory(ROWS * page(payload))?, memory(slots * payload)?);
        let (inputs, log) = (memory(slots * INPUTS_BYTES)?, memory(entries.max(1) * payload)?);
        let at =
            |memory: &CudaMemory| client.register_device_memory(memory.address(), memory.bytes());
        let (cache_at, packed_at, inputs_at) = (at(&cache)?, at(&packed)?, at(&inputs)?);
        let registration = Registration::new().layer(Layer {
            name: "bed".to_owned(),
            dtype: DataType::Float32,
            shape: [ROWS, 1, 1, payload / 4],
            strides: Strides::PageStride(page(payload) / 4),
            region: cache_at.region.clone(),
            offset_bytes: cache_at.offset,
            max_selected: 1,
            check_unique: false,
        });
        let plan = client.register(&registration, |_| {})?.layer("bed")?.clone();
        let words = share_words(&client, &worker)?;
        let named = (0..slots).flat_map(|slot| [slot % ROWS, 0, 1, 0]);
        inputs.write(0, &named.flat_map(u64::to_le_bytes).collect::<Vec<u8>>())?;
        Ok(Self {
            plan,
            client,
            words,
            worker,
            cache,
            packed,
            inputs,
            log,
            packed_at,
            inputs_at,
            sizes,
        })
    }

    /// A lane, with a stream of its own.
    pub(crate) fn queue(&self) -> Result<Queue> {
        Queue::open(&self.client, &self.worker, &self.words)
    }

    /// Where the packed rows begin.
    pub(crate) fn packed_place(&self) -> Slice {
        self.packed_at.region.at(self.packed_at.offset)
    }

    /// A copy of the row that a slot names.
    pub(crate) fn request(&self, slot: u64) -> Request<'static> {
        let at = |of: &Slice, offset: u64| of.region.at(of.offset + offset);
        let indices = Indices::Shared {
            width: IndexWidth::Int64,
            at: at(&self.inputs_at, slot * INPUTS_BYTES),
            selected: 1,
        };
        Request::new(indices, at(&self.packed_at, slot * self.sizes.payload))
            .flags(Flags::Shared(at(&self.inputs_at, slot * INPUTS_BYTES + FLAG_AT)))
    }

    /// Asks for a copy of the row that a slot names, and puts it on the stream.
    pub(crate) fn order(&self, queue: &mut Queue, direction: Direction, slot: u64) -> Result<()> {
        queue.order(&self.plan, direction, &self.request(slot))
    }

    /// Asks for a copy of the row that a slot names, and gives what is to be put on the stream.
    pub(crate) fn ask(
        &self,
        queue: &mut Queue,
        direction: Direction,
        slot: u64,
    ) -> Result<[WordOp; 2]> {
        queue.ask(&self.plan, direction, &self.request(slot))
    }

    /// The word that a stream's kernel fills a row with is in each of its words, from then on.
    pub(crate) fn fill_row(&self, stream: &mut WorkerStream, row: u64, word: u64) -> Result<()> {
        Ok(stream.produce(self.row(row), self.sizes.payload / 8, word, Duration::ZERO)?)
    }

    /// As [`Bed::fill_row`], of a packed row.
    pub(crate) fn fill_slot(&self, stream: &mut WorkerStream, slot: u64, word: u64) -> Result<()> {
        Ok(stream.produce(self.slot(slot), self.sizes.payload / 8, word, Duration::ZERO)?)
    }

    /// Lets a stream's kernel write the index of a slot, once that time is over.
    pub(crate) fn name_row(
        &self,
        stream: &mut WorkerStream,
        slot: u64,
        index: i64,
        takes: Duration,
    ) -> Result<()> {
        let place = Place { memory: &self.inputs, offset: slot * INPUTS_BYTES };
        Ok(stream.produce(place, 1, index.cast_unsigned(), takes)?)
    }

    /// Lets a stream note what a packed row holds.
    pub(crate) fn log_slot(&self, stream: &mut WorkerStream, slot: u64, entry: u64) -> Result<()> {
        Ok(stream.copy(self.slot(slot), self.entry(entry), self.sizes.payload)?)
    }

    /// Lets a stream note what a row of the cache holds.
    pub(crate) fn log_row(&self, stream: &mut WorkerStream, row: u64, entry: u64) -> Result<()> {
        Ok(stream.copy(self.row(row), self.entry(entry), self.sizes.payload)?)
    }

    fn row(&self, row: u64) -> Place<'_> {
        Place { memory: &self.cache, offset: row * page(self.sizes.payload) }
    }

    fn slot(&self, slot: u64) -> Place<'_> {
        Place { memory: &self.packed, offset: slot * self.sizes.payload }
    }

    fn entry(&self, entry: u64) -> Place<'_> {
        Place { memory: &self.log, offset: entry * self.sizes.payload }
    }

    /// Fills the cache with noise, and gives its rows.
    pub(crate) fn fill_cache(&self, seed: u64) -> Result<Vec<Vec<u8>>> {
        let page = page(self.sizes.payload);
        let bytes = noise(seed, ROWS * page)?;
        self.cache.write(0, &bytes)?;
        let payload = usize::try_from(self.sizes.payload)?;
        Ok(bytes.chunks(usize::try_from(page)?).map(|row| row[..payload].to_vec()).collect())
    }

    /// Clears all packed rows.
    pub(crate) fn clear_packed(&self) -> Result<()> {
        Ok(self.packed.clear()?)
    }

    /// What a packed row holds.
    pub(crate) fn read_slot(&self, slot: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.sizes.payload)?];
        self.packed.read(self.slot(slot).offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Compares the log's entries, each of which is one word again and again.
    pub(crate) fn check_log(&self, words: &[u64]) -> Result<()> {
        let payload = usize::try_from(self.sizes.payload)?;
        let mut bytes = vec![0; payload * words.len()];
        self.log.read(0, &mut bytes)?;
        for (entry, (found, word)) in bytes.chunks(payload).zip(words).enumerate() {
            let expected = word.to_le_bytes().repeat(payload / 8);
            compare(found, &expected, &format!("what the stream saw after copy {entry}"))?;
        }
        Ok(())
    }
}

/// Bytes from one row of the cache to the next.
fn page(payload: u64) -> u64 {
    payload + GAP_BYTES
}
