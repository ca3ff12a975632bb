//! Plain records of what sessions own. From them a device process can be rebuilt: the supervisor keeps them, a device
//! process is told them, and a restarted one is told them again with the same ids.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use statecopy_kernels::layout::{CacheLayout, Placement};
use statecopy_proto::{BindingId, HandleKind, PlanKind, RegionId, SessionId, SignatureHash};
use statecopy_session::{CopyRequest, PairNumber, Parameters, SlotNumber};

/// What names the memory of a piece.
#[derive(Debug)]
pub enum HandleRecord {
    /// A descriptor.
    Descriptor(Arc<OwnedFd>),
    /// Bytes of the driver's.
    Value(Box<[u8]>),
}

/// One handle of a region's memory.
#[derive(Debug)]
pub struct PieceRecord {
    /// Bytes behind it.
    pub bytes: u64,
    /// The allocation's number in the worker's process; 0 where the kind has none.
    pub buffer: u64,
    /// The handle.
    pub handle: HandleRecord,
}

/// One registered region.
#[derive(Debug, Clone)]
pub struct RegionRecord {
    /// Its id.
    pub id: RegionId,
    /// How it came.
    pub kind: HandleKind,
    /// Its size.
    pub bytes: u64,
    /// What lies side by side in it. Descriptors stay with the supervisor until the region is released.
    pub pieces: Arc<[PieceRecord]>,
}

impl RegionRecord {
    /// Descriptors that it holds.
    #[must_use]
    pub fn descriptors(&self) -> u64 {
        if self.kind.travels_by_descriptor() { self.pieces.len() as u64 } else { 0 }
    }

    /// Whether its worker says of both that they are the same memory: pieces of the same allocations, in the same order.
    #[must_use]
    pub fn is_said_to_be(&self, other: &Self) -> bool {
        let is_same = |(a, b): (&PieceRecord, &PieceRecord)| {
            let values = match (&a.handle, &b.handle) {
                (HandleRecord::Value(a), HandleRecord::Value(b)) => a == b,
                (HandleRecord::Descriptor(_), HandleRecord::Descriptor(_)) => true,
                _ => false,
            };
            values && a.buffer != 0 && (a.bytes, a.buffer) == (b.bytes, b.buffer)
        };
        self.kind == other.kind
            && self.pieces.len() == other.pieces.len()
            && self.pieces.iter().zip(&*other.pieces).all(is_same)
    }
}

/// One worker's ring. It outlives device processes.
#[derive(Debug, Clone)]
pub struct RingRecord {
    /// Its sizes. The daemon believes this record, not the header that the worker can write over.
    pub parameters: Parameters,
    /// The session memory.
    pub memory: Arc<OwnedFd>,
    /// The doorbell that the worker rings when the executor sleeps.
    pub executor_bell: Arc<OwnedFd>,
}

/// One armed slot of a captured graph: what is copied whenever the graph rings it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotRecord {
    /// The graph's pair of words.
    pub pair: PairNumber,
    /// What the graph rings with.
    pub slot: SlotNumber,
    /// The copy. Its indices and flags are shared.
    pub request: CopyRequest,
    /// How long it may wait for its start after each bell, in nanoseconds.
    pub patience_ns: u64,
}

/// One layer that passed every check that needs no device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerRecord {
    /// The worker's name for it.
    pub name: String,
    /// The id of its binding.
    pub binding: BindingId,
    /// Where it lies.
    pub region: RegionId,
    /// Its layout, and its place in that region.
    pub placement: Placement,
    /// No request selects more rows.
    pub max_selected: u64,
    /// Debug: refuse scatters whose valid destinations repeat.
    pub check_unique: bool,
}

/// Layers that one request copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetRecord {
    /// The worker's name for it.
    pub name: String,
    /// The id of the set.
    pub binding: BindingId,
    /// Its layers, in the order of the packed buffer. All of one signature.
    pub layers: Vec<BindingId>,
}

/// Everything that a session publishes: all or nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RegistrationRecord {
    /// The layers.
    pub layers: Vec<LayerRecord>,
    /// The sets.
    pub sets: Vec<SetRecord>,
}

/// What a device process answers for one published binding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedBinding {
    /// The binding or set.
    pub binding: BindingId,
    /// The hash that requests carry.
    pub signature: SignatureHash,
    /// The plan kind that was chosen.
    pub plan: PlanKind,
}

/// How far a registration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The stage.
    pub stage: Stage,
    /// Layers done in this stage.
    pub layers_done: u32,
    /// Layers of the registration.
    pub layers_total: u32,
}

/// The stages of a registration (contract: Plan).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Compiling and running on scratch.
    Preparing,
    /// Comparing the configuration.
    Sealing,
    /// Handing the tables to the executor.
    Publishing,
}

/// A layer that moves to other memory of the same signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RebindRecord {
    /// Its binding.
    pub binding: BindingId,
    /// The region that it moves to.
    pub region: RegionId,
    /// Its place there.
    pub placement: Placement,
}

/// One compiled table, as `statecopy status` shows it.
#[derive(Debug, Clone)]
pub struct PlanInspection {
    /// The signature it serves.
    pub signature: SignatureHash,
    /// Its kind.
    pub plan: PlanKind,
    /// The layout.
    pub layout: CacheLayout,
    /// The base address class.
    pub base_mod_16: u8,
    /// Whether a binding uses it; a table without one goes at the next registration.
    pub state: PlanState,
    /// Name and launches of each variant.
    pub variants: Vec<(String, u64)>,
    /// Bindings that share it.
    pub bindings: u32,
}

/// What the requests of one worker's ring came to, since the device process that serves it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingInspection {
    /// Whose ring.
    pub session: SessionId,
    /// Requests completed.
    pub copies: u64,
    /// Requests refused.
    pub refusals: u64,
}

/// What a device process tells of itself.
#[derive(Debug, Clone, Default)]
pub struct DeviceInspection {
    /// The compiled tables.
    pub plans: Vec<PlanInspection>,
    /// The workers' rings.
    pub rings: Vec<RingInspection>,
}

/// The states of a compiled table that anyone but its maker can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanState {
    /// Sealed, bound to nothing yet or any more.
    Sealed,
    /// Bound.
    Published,
}

impl PlanState {
    /// The name in `statecopy status`.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Sealed => "sealed",
            Self::Published => "published",
        }
    }
}
