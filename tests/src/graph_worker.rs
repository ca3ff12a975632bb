//! A worker with captured graphs. Its graph is a list of steps, and a thread of the test replays it.

use statecopy_client::blocking::{Client, Plan};
use statecopy_client::{
    Address, Armed, ConnectOptions, DataType, Direction, Flags, GraphLane, IndexWidth, Indices,
    Layer, Memory, Rebind, Region, Registration, Request, Slice, Step, Strides, Use,
};

use crate::daemon::Daemon;
use crate::poll::{PATIENCE, until};

/// Rows of the cache.
const ROWS: u64 = 6;
/// Bytes of a payload.
const PAYLOAD: u64 = 512;
/// Bytes from one page to the next: both layers lie in each.
const PAGE: u64 = 2 * PAYLOAD;
/// Rows that a copy selects.
const SELECTED: u64 = 4;
/// Room for the packed buffer of a set, of both layers.
const PACKED: u64 = 2 * SELECTED * PAYLOAD;
const PLACES: u64 = 64;
const INDICES_AT: u64 = PLACES * PACKED;
const FLAGS_AT: u64 = INDICES_AT + PLACES * 32;

/// A client with two layers in every page of its cache and a set of both, and 64 places, each of a packed buffer, four indices and
/// four flags.
#[derive(Debug)]
pub struct GraphWorker {
    /// Its client.
    pub client: Client,
    /// Its cache.
    pub cache: Memory,
    /// The region of the cache.
    pub cache_region: Region,
    /// Packed buffers, indices, flags.
    pub packed: Memory,
    /// Their region.
    pub packed_region: Region,
    /// What it has published.
    pub plans: GraphPlans,
}

/// The plans of a [`GraphWorker`].
#[derive(Debug)]
pub struct GraphPlans {
    /// The first layer.
    pub a: Plan,
    /// The second layer.
    pub b: Plan,
    /// Both.
    pub both: Plan,
}

impl GraphWorker {
    /// Rows of the cache.
    pub const ROWS: u64 = ROWS;
    /// Rows that a copy selects.
    pub const SELECTED: u64 = SELECTED;

    /// Connects, shares its memory, registers its layers, and fills its cache.
    ///
    /// # Panics
    /// When any of that fails.
    #[must_use]
    pub fn new(daemon: &Daemon) -> Self {
        let options = ConnectOptions { wait_for: PATIENCE, ..ConnectOptions::default() };
        Self::connect(daemon, options)
    }

    /// The same by options of its own.
    ///
    /// # Panics
    /// When any of that fails.
    #[must_use]
    pub fn connect(daemon: &Daemon, options: ConnectOptions) -> Self {
        let address = Address::in_directory(daemon.runtime()).expect("a step that works");
        let client = Client::connect(address, options).expect("a step that works");
        let cache = client.allocate("cache", ROWS * PAGE).expect("a step that works");
        let packed = client.allocate("packed", FLAGS_AT + PLACES * 16).expect("a step that works");
        let cache_region = client.register_region(&cache, Use::Cache).expect("a step that works");
        let packed_region =
            client.register_region(&packed, Use::Packed).expect("a step that works");
        let plans = register(&client, &cache_region);
        let worker = Self { client, cache, cache_region, packed, packed_region, plans };
        worker.fill(0);
        for place in 0..PLACES {
            worker.select(place, IndexWidth::Int32, [2; 4]);
        }
        worker
    }

    /// Gives every row of the cache the byte that [`GraphWorker::byte_of`] tells.
    ///
    /// # Panics
    /// When any of that fails.
    pub fn fill(&self, more: u8) {
        for row in 0..ROWS {
            for layer in 0..2 {
                let at = row * PAGE + layer * PAYLOAD;
                self.cache
                    .fill(at, PAYLOAD, Self::byte_of(layer, row, more))
                    .expect("a step that works");
            }
        }
    }

    /// What every byte of a row of a layer is.
    ///
    /// # Panics
    /// When any of that fails.
    #[must_use]
    pub fn byte_of(layer: u64, row: u64, more: u8) -> u8 {
        u8::try_from(10 + 100 * layer + row).expect("few rows").wrapping_add(more)
    }

    /// Registers both layers in its cache, in place of what it has published.
    ///
    /// # Panics
    /// When any of that fails.
    pub fn register(&mut self) {
        self.plans = register(&self.client, &self.cache_region);
    }

    /// Has a place select these rows from now on.
    ///
    /// # Panics
    /// When any of that fails.
    pub fn select(&self, place: u64, width: IndexWidth, rows: [i64; 4]) {
        let bytes: Vec<u8> = match width {
            IndexWidth::Int32 => rows
                .iter()
                .flat_map(|row| i32::try_from(*row).expect("a step that works").to_ne_bytes())
                .collect(),
            IndexWidth::Int64 => rows.iter().flat_map(|row| row.to_ne_bytes()).collect(),
        };
        self.packed.write(INDICES_AT + place * 32, &bytes).expect("a step that works");
    }

    /// Where the indices of a place are.
    #[must_use]
    pub fn indices_at(&self, place: u64) -> Slice {
        self.packed_region.at(INDICES_AT + place * 32)
    }

    /// A copy of what a place selects, to or from its packed buffer.
    #[must_use]
    pub fn request(&self, place: u64, width: IndexWidth) -> Request<'static> {
        let indices = Indices::Shared { width, at: self.indices_at(place), selected: SELECTED };
        Request::new(indices, self.packed_region.at(place * PACKED))
    }

    /// Gives a place these flags.
    ///
    /// # Panics
    /// When any of that fails.
    pub fn flag(&self, place: u64, flags: [u8; 4]) {
        self.packed.write(FLAGS_AT + place * 16, &flags).expect("a step that works");
    }

    /// The same with the place's flags.
    #[must_use]
    pub fn flagged(&self, place: u64, width: IndexWidth) -> Request<'static> {
        self.request(place, width)
            .flags(Flags::Shared(self.packed_region.at(FLAGS_AT + place * 16)))
    }

    /// A graph of one gather of the first layer, into place 0.
    ///
    /// # Panics
    /// When any of that fails.
    pub fn graph(&self) -> (GraphLane, Armed) {
        let mut lane = self.client.open_graph_lane().expect("a step that works");
        let request = self.request(0, IndexWidth::Int32);
        let armed =
            lane.arm(&self.plans.a, Direction::Gather, &request).expect("a step that works");
        (lane, armed)
    }

    /// The byte that a row of a packed buffer holds; none where its bytes differ.
    ///
    /// # Panics
    /// When any of that fails.
    #[must_use]
    pub fn packed_row(&self, place: u64, row: u64) -> Option<u8> {
        let bytes =
            self.packed.read_vec(place * PACKED + row * PAYLOAD, 512).expect("a step that works");
        bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
    }

    /// Gives every byte of a row of a packed buffer a value.
    ///
    /// # Panics
    /// When any of that fails.
    pub fn fill_packed_row(&self, place: u64, row: u64, byte: u8) {
        let at = place * PACKED + row * PAYLOAD;
        self.packed.fill(at, PAYLOAD, byte).expect("a step that works");
    }

    /// The byte that a row of the cache holds; none where its bytes differ.
    ///
    /// # Panics
    /// When any of that fails.
    #[must_use]
    pub fn cache_row(&self, layer: u64, row: u64) -> Option<u8> {
        let bytes =
            self.cache.read_vec(row * PAGE + layer * PAYLOAD, 512).expect("a step that works");
        bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
    }

    /// Whether place 0 holds what [`GraphWorker::graph`] gathers.
    #[must_use]
    pub fn has_gathered(&self) -> bool {
        (0..SELECTED).all(|row| self.packed_row(0, row) == Some(Self::byte_of(0, 2, 0)))
    }

    /// Fills a packed buffer with 0xee.
    ///
    /// # Panics
    /// When any of that fails.
    pub fn spoil(&self, place: u64) {
        self.packed.fill(place * PACKED, PACKED, 0xee).expect("a step that works");
    }

    /// Binds both layers to the memory that the worker has now.
    ///
    /// # Panics
    /// When any of that fails.
    pub fn wake(&self) {
        let to = |(layer, offset_bytes): (&str, u64)| Rebind {
            layer: layer.to_owned(),
            region: self.cache_region.clone(),
            offset_bytes,
        };
        self.client.rebind(&[("a", 0), ("b", PAYLOAD)].map(to)).expect("a step that works");
    }
}

fn layer(name: &str, region: &Region, offset_bytes: u64) -> Layer {
    Layer {
        name: name.to_owned(),
        dtype: DataType::Float32,
        shape: [ROWS, 2, 4, 16],
        strides: Strides::PageStride(PAGE / 4),
        region: region.clone(),
        offset_bytes,
        max_selected: SELECTED,
        check_unique: false,
    }
}

fn register(client: &Client, region: &Region) -> GraphPlans {
    let registration = Registration::new()
        .layer(layer("a", region, 0))
        .layer(layer("b", region, PAYLOAD))
        .set("both", ["a", "b"]);
    let bindings = client.register(&registration, |_| {}).expect("a step that works");
    let named = |name| bindings.layer(name).expect("a step that works").clone();
    let both = bindings.set("both").expect("a step that works").clone();
    GraphPlans { a: named("a"), b: named("b"), both }
}

/// What a stream does: one step of a graph.
///
/// # Panics
/// When a wait does not end.
pub fn replay_step(lane: &GraphLane, step: Step) {
    let memory = lane.memory().0;
    let word = |at| {
        let mut words = [0];
        memory.read_words(at, &mut words).expect("a word of the lane");
        words[0]
    };
    match step {
        Step::Write(to) => {
            memory.write_words(to.offset, &[to.value]).expect("a word of the lane");
        }
        Step::WaitAny(of) => until("the graph goes on", || word(of.offset) & of.value != 0),
    }
}
