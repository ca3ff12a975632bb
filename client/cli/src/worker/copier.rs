//! Who copies: the daemon, or a stand-in for it in tests.

use anyhow::Context;
use statecopy_client::blocking::{Bindings, Client, Plan};
use statecopy_client::{
    DataType, Direction, Flags, IndexWidth, Indices, Layer, Moved, Region, Registration, Request,
    Strides, Use,
};

use super::memory::WorkerMemory;

/// The name of the binding set of all layers.
const ALL_LAYERS: &str = "all";

/// One layer, or the binding set of all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// The layer at that place.
    Layer(usize),
    /// All layers: one request, packed `[L, selected, H, V, K]`.
    All,
}

/// One gather or scatter between a cache and the packed buffer's start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) direction: Direction,
    pub(crate) target: Target,
    /// How wide the indices are sent. Each of them fits.
    pub(crate) width: IndexWidth,
    pub(crate) indices: &'a [i64],
    pub(crate) flags: Option<&'a [u8]>,
}

/// Copies for a worker.
pub(crate) trait Copier {
    /// Copies, and returns when the bytes are there.
    ///
    /// # Errors
    /// When the copy was refused or its outcome is unknown.
    fn copy(&mut self, call: &Call<'_>) -> anyhow::Result<Moved>;
}

/// The daemon, through a client with its layers registered.
#[derive(Debug)]
pub(crate) struct Daemon {
    client: Client,
    packed: Region,
    layers: Vec<Plan>,
    all: Plan,
}

impl Daemon {
    /// Registers every layer of a worker's memory, and the set of all of them.
    ///
    /// # Errors
    /// When the daemon refuses; the refusal names the layer.
    pub(crate) fn register(
        client: Client,
        memory: &WorkerMemory,
        selected_max: u64,
    ) -> anyhow::Result<Self> {
        let mut regions = Vec::new();
        for shared in memory.caches() {
            regions.push(client.register_region(shared, Use::Cache)?);
        }
        let packed = client.register_region(memory.packed(), Use::Packed)?;
        let layout = &memory.arrangement().layout;
        let mut registration = Registration::new();
        for (at, (region, offset_bytes)) in memory.arrangement().layers().enumerate() {
            registration = registration.layer(Layer {
                name: layer_name(at),
                dtype: DataType::Float32,
                shape: *layout.shape(),
                strides: Strides::Elements(*layout.strides()),
                region: regions[region].clone(),
                offset_bytes,
                max_selected: selected_max,
                check_unique: false,
            });
        }
        let count = memory.arrangement().layers().count();
        let registration = registration.set(ALL_LAYERS, (0..count).map(layer_name));
        let bindings: Bindings = client
            .register(&registration, |_| {})
            .with_context(|| format!("Registering {count} layers"))?;
        let layers = (0..count).map(|at| bindings.layer(&layer_name(at)).cloned());
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let all = bindings.set(ALL_LAYERS)?.clone();
        Ok(Self { client, packed, layers, all })
    }

    /// Gives everything back. Returns how many requests of this session the daemon refused.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub(crate) fn close(self) -> anyhow::Result<u64> {
        let id = self.client.session().context("The session has ended")?.id.0;
        let sessions = self.client.inspect()?.sessions;
        let own = sessions.iter().find(|session| session.session_id == id);
        let refusals = own.context("The daemon does not show this session")?.refusals;
        self.client.close()?;
        Ok(refusals)
    }
}

impl Copier for Daemon {
    fn copy(&mut self, call: &Call<'_>) -> anyhow::Result<Moved> {
        let plan = match call.target {
            Target::Layer(at) => &self.layers[at],
            Target::All => &self.all,
        };
        let narrow: Vec<i32>;
        let indices = match call.width {
            IndexWidth::Int64 => Indices::Int64(call.indices),
            IndexWidth::Int32 => {
                let fitting = call.indices.iter().map(|index| i32::try_from(*index));
                narrow = fitting.collect::<Result<_, _>>().context("An index is no INT32")?;
                Indices::Int32(&narrow)
            }
        };
        let mut request = Request::new(indices, self.packed.at(0));
        if let Some(flags) = call.flags {
            request = request.flags(Flags::Bytes(flags));
        }
        Ok(plan.copy(call.direction, request)?)
    }
}

fn layer_name(at: usize) -> String {
    format!("layers.{at}")
}
