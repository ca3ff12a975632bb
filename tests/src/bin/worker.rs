//! A worker process that takes orders, one a line, and answers each with one line.
//!
//! | order | what it does |
//! | --- | --- |
//! | `open` | opens a session and attaches; answers its id |
//! | `send` | sends a descriptor of 1 MiB, and registers nothing |
//! | `register` | opens a session of its own with one published layer |
//! | `random SEED COUNT` | that many random copies, each compared with the reference |
//! | `device` | shares memory of the first CUDA device: 4 MiB of the default allocator, 4 MiB in pieces |
//! | `graph RINGS` | registers a layer, captures a graph of one scatter, replays it so often, and rings once more if that is odd |
//! | `fork` | leaves a child that holds the descriptor socket open; answers its process id |
//!
//! It ends at the end of its input.

use std::io::{self, BufRead, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use rustix::io::{FdFlags, fcntl_setfd};
use statecopy_client::blocking::Client;
use statecopy_client::{
    self as client, Address, ConnectOptions, GraphLane, IndexWidth, Layer, Registration, Request,
    Step, Strides, Use,
};
use statecopy_kernels::cuda::{Allocator, CudaExporter, CudaMemory, CudaSelector, DRIVER_LIBRARY};
use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::{DataType, Direction};
use statecopy_tests::{Indices, PATIENCE, PIECES, Random, Rig, Session, Shared, Wire};

fn main() -> anyhow::Result<()> {
    let socket = std::env::args_os().nth(1).context("usage: statecopy-test-worker SOCKET")?;
    let socket = PathBuf::from(socket);
    let wire = Wire::connect(&socket)?;
    let mut worker = Worker { socket, wire, session: None, rig: None, device: None, graph: None };
    let mut answers = io::stdout().lock();
    for order in io::stdin().lock().lines() {
        let answer = worker.obey(&order?)?;
        writeln!(answers, "{answer}")?;
        answers.flush()?;
    }
    Ok(())
}

struct Worker {
    wire: Wire,
    session: Option<Session>,
    rig: Option<Rig>,
    device: Option<(Client, CudaExporter, [CudaMemory; 2])>,
    graph: Option<GraphLane>,
    socket: PathBuf,
}

impl Worker {
    fn obey(&mut self, order: &str) -> anyhow::Result<String> {
        let words: Vec<&str> = order.split(' ').collect();
        match *words.as_slice() {
            ["open"] => {
                let session = self.session.insert(Session::open(&self.wire));
                Ok(session.id().to_string())
            }
            ["send"] => {
                let memory = Shared::new(vec![0; 1 << 20]);
                let session = self.session.as_mut().context("no session")?;
                session.send(&[memory.descriptor()]);
                Ok("sent".to_owned())
            }
            ["register"] => {
                let layout =
                    CacheLayout::with_page_stride(DataType::Float32, [8, 2, 4, 16], 3 * 128 + 32)?;
                let rig = self.rig.insert(Rig::new(&self.wire, &[(layout, 64)], 16));
                Ok(rig.session.id().to_string())
            }
            ["random", seed, count] => {
                let rig = self.rig.as_mut().context("nothing registered")?;
                random_copies(rig, seed.parse()?, count.parse()?)?;
                Ok("right".to_owned())
            }
            ["device"] => {
                self.device = share_device_memory(&self.socket)?;
                Ok("shared".to_owned())
            }
            ["graph", rings] => {
                self.graph = Some(replay_graph(&self.socket, rings.parse()?)?);
                Ok("rung".to_owned())
            }
            ["fork"] => {
                let session = self.session.as_ref().context("no session")?;
                leave_child(session).map(|pid| pid.to_string())
            }
            _ => bail!("{order} is no order"),
        }
    }
}

/// A graph of one scatter, replayed so often; where that is odd, its bell rings once more and nobody waits.
fn replay_graph(socket: &Path, rings: u64) -> anyhow::Result<GraphLane> {
    let folder = socket.parent().context("a socket lies in a folder")?;
    let client = Client::connect(Address::in_directory(folder)?, ConnectOptions::default())?;
    let memory = [("cache", Use::Cache), ("packed", Use::Packed)];
    let [cache, packed] = memory.map(|(name, purpose)| {
        let memory = client.allocate(name, 1 << 16)?;
        client.register_region(&memory, purpose)
    });
    let (region, packed) = (cache?, packed?);
    let layer = Layer {
        name: "layers.0".to_owned(),
        dtype: DataType::Float32,
        shape: [8, 2, 4, 16],
        strides: Strides::PageStride(128),
        region,
        offset_bytes: 0,
        max_selected: 4,
        check_unique: false,
    };
    let bindings = client.register(&Registration::new().layer(layer), |_| {})?;
    let indices =
        client::Indices::Shared { width: IndexWidth::Int32, at: packed.at(1 << 15), selected: 1 };
    let mut lane = client.open_graph_lane()?;
    let request = Request::new(indices, packed.at(0));
    let armed = lane.arm(bindings.layer("layers.0")?, Direction::Scatter, &request)?;
    for _ in 0..rings {
        armed.replay(&lane, PATIENCE)?;
    }
    if let (1, Step::Write(bell)) = (rings % 2, armed.steps()[1]) {
        lane.memory().0.write_words(bell.offset, &[bell.value])?;
    }
    Ok(lane)
}

/// Memory of the default allocator, and virtual memory in pieces.
fn share_device_memory(
    socket: &Path,
) -> anyhow::Result<Option<(Client, CudaExporter, [CudaMemory; 2])>> {
    let folder = socket.parent().context("a socket lies in a folder")?;
    let client = Client::connect(Address::in_directory(folder)?, ConnectOptions::default())?;
    let exporter = CudaExporter::open(Path::new(DRIVER_LIBRARY))?;
    let allocate = |allocator| exporter.allocate(CudaSelector::Ordinal(0), 4 << 20, allocator);
    let memory = [allocate(Allocator::Default)?, allocate(PIECES)?];
    for memory in &memory {
        client.register_device_memory(memory.address(), memory.bytes())?;
    }
    Ok(Some((client, exporter, memory)))
}

/// Random copies of one layer, in both directions and both widths, with invalid and repeated rows.
fn random_copies(rig: &mut Rig, seed: u64, count: u64) -> anyhow::Result<()> {
    let mut random = Random::new(seed);
    for _ in 0..count {
        let rows = rig.layers[0].placement.layout().rows();
        let selected = random.below(17);
        let mut rows_left: Vec<i64> = (-4..rows.cast_signed() + 4).collect();
        let mut draw = |random: &mut Random, repeat: bool| {
            let at = usize::try_from(random.below(rows_left.len() as u64)).unwrap_or(0);
            if repeat { rows_left[at] } else { rows_left.swap_remove(at) }
        };
        let direction = Direction::ALL[usize::from(random.word() & 1 == 0)];
        // Valid destinations of a scatter are unique.
        let repeat = direction == Direction::Gather;
        let values: Vec<i64> = (0..selected.min(16)).map(|_| draw(&mut random, repeat)).collect();
        let indices = if random.below(2) == 0 {
            Indices::Int64(values)
        } else {
            Indices::Int32(
                values.into_iter().map(|value| i32::try_from(value).unwrap_or(-1)).collect(),
            )
        };
        let flags: Vec<u8> =
            (0..indices.selected()).map(|_| random.word().to_le_bytes()[0] & 3).collect();
        rig.compute(random.word());
        rig.copy(direction, 0, &indices, (random.below(3) > 0).then_some(flags.as_slice()))?;
    }
    Ok(())
}

/// A child that inherits the session's socket and sleeps; whoever asked for it kills it.
fn leave_child(session: &Session) -> anyhow::Result<u32> {
    fcntl_setfd(session.connection().as_fd(), FdFlags::empty())?;
    let child =
        Command::new("sleep").arg("600").stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    Ok(child.id())
}
