//! The small protocol between the supervisor and its device process: JSON records over a SOCK_SEQPACKET pair.
//!
//! It carries what is rare. Copies never come this way: they go through a ring. The supervisor sends one request at a time
//! and gets one final reply with its id; [`Reply::Progress`] and chunks that are not the last may come before. A list that
//! may outgrow one message travels in chunks. A request of several parts goes on when [`Reply::Taken`] came for the one
//! before, and not after a refusal: neither side ever holds more than one part.

mod device;
mod region;
mod slot;

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use statecopy_descriptors::{ChannelError, MESSAGE_BYTES_MAX};
use statecopy_kernels::findings::told::Event;
use statecopy_kernels::layout::{AXES, CacheLayout, LayoutError, Placement};
use statecopy_proto::{
    BindingId, DataType, PlanKind, Refusal, RefusalCode, RegionId, SessionId, SignatureHash,
    UnknownCode, UnknownDataType,
};

use crate::config::DeviceSettings;
use crate::record::{
    DeviceInspection, LayerRecord, PlanInspection, PlanState, Progress, PublishedBinding,
    RebindRecord, RingInspection, SetRecord, Stage,
};

pub use self::device::{DescriptionMessage, FootprintMessage};
pub use self::region::{AnnouncedMessage, PIECES_A_PART, PieceMessage, join};
pub use self::slot::SlotMessage;

/// One message from the supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub struct Numbered<T> {
    /// The request's number, which its replies repeat.
    pub id: u64,
    /// What is said.
    pub body: T,
}

/// What the supervisor asks.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// The first message. Descriptors, in order: ring memory, executor's doorbell, supervisor's doorbell, counter memory,
    /// and the runtime directory's lock, which is held as long as the device process lives.
    Start(DeviceSettings),
    /// Serve a worker's ring. Descriptors, in order: session memory, executor's doorbell. The worker sleeps on a futex in the
    /// session memory: a doorbell that a worker holds is never rung.
    OpenSession {
        /// Whose it is.
        session: SessionId,
        /// Slots of the ring.
        slots: u32,
        /// Inline bytes of a slot.
        inline_bytes: u32,
        /// Slots of a lane; 0 where there are no lanes.
        lane_slots: u32,
        /// Whether an earlier device process served it: then what it left unanswered is taken again.
        resumed: bool,
    },
    /// A part of a region; the first begins to map it, the last ends it. Descriptors: one for each piece that has no value.
    ImportRegion {
        /// Whose it is.
        session: SessionId,
        /// Its id.
        region: RegionId,
        /// What the worker announced.
        announced: AnnouncedMessage,
        /// Pieces of this part, at most [`PIECES_A_PART`].
        pieces: Vec<PieceMessage>,
        /// Whether the region is complete.
        last: bool,
    },
    /// Unmap a region.
    DropRegion {
        /// Whose it is.
        session: SessionId,
        /// Its id.
        region: RegionId,
    },
    /// A part of a registration; the one that is last starts it.
    Register {
        /// Whose it is.
        session: SessionId,
        /// Layers of this part.
        layers: Vec<LayerMessage>,
        /// Sets of this part.
        sets: Vec<SetMessage>,
        /// Whether the registration is complete.
        last: bool,
        /// Whether an earlier device process had published it: then a layer whose region was released since sleeps.
        resumed: bool,
    },
    /// A part of a rebind; the one that is last starts it.
    Rebind {
        /// Whose it is.
        session: SessionId,
        /// Layers of this part.
        layers: Vec<RebindMessage>,
        /// Whether the rebind is complete.
        last: bool,
    },
    /// Withdraw what a session published.
    ReleaseLayers {
        /// Whose it is.
        session: SessionId,
    },
    /// A part of the slots of captured graphs to arm; the one that is last arms them.
    ArmGraphs {
        /// Whose they are.
        session: SessionId,
        /// Slots of this part.
        slots: Vec<SlotMessage>,
        /// Whether that is all.
        last: bool,
        /// Whether an earlier device process had armed them: then their graphs go on where they stood.
        resumed: bool,
    },
    /// Disarm the slots of a pair.
    DisarmGraph {
        /// Whose it is.
        session: SessionId,
        /// Its number.
        pair: u32,
    },
    /// Forget a session.
    CloseSession {
        /// Which.
        session: SessionId,
    },
    /// Serve what the workers' rings hold, refuse what comes later.
    Drain,
    /// List the compiled tables.
    Inspect,
    /// Answer everything submitted, then end.
    Shutdown,
}

/// What the device process answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// What it is about to do, or saw, before it is ready.
    Told(Event),
    /// It serves.
    Ready {
        /// What the device says of itself.
        description: DescriptionMessage,
        /// What the device process takes of it.
        footprint: FootprintMessage,
    },
    /// Done.
    Done,
    /// A part of a request was taken, and the next may come.
    Taken,
    /// Not done, and nothing of it stays.
    Refused(RefusalMessage),
    /// A registration goes on.
    Progress {
        /// The stage, by its number on the wire.
        stage: StageMessage,
        /// Layers done.
        layers_done: u32,
        /// Layers of the registration.
        layers_total: u32,
    },
    /// News with number 0, asked for by nobody: a worker's ring makes no sense any more.
    RingBroken {
        /// Whose.
        session: SessionId,
        /// What was found.
        reason: String,
    },
    /// News with number 0, the last of this process: its device failed, and what it was given is answered.
    DeviceFailed {
        /// What the driver said.
        reason: String,
    },
    /// A part of what was published.
    Published {
        /// Bindings of this part.
        bindings: Vec<PublishedMessage>,
        /// Whether that was all.
        last: bool,
    },
    /// A part of what an inspection found.
    Inspected {
        /// Findings of this part.
        findings: Vec<FindingMessage>,
        /// Whether that was all.
        last: bool,
    },
}

/// A message of the link was not what it should be: one of the two processes is broken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The socket.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// Not a record of this protocol.
    #[error("A message of the link does not parse")]
    Syntax(#[from] serde_json::Error),
    /// A layout that no supervisor would send.
    #[error("A layout on the link is invalid")]
    Layout(#[from] LayoutError),
    /// An unknown data type.
    #[error(transparent)]
    DataType(#[from] UnknownDataType),
    /// An unknown refusal.
    #[error(transparent)]
    Code(#[from] UnknownCode),
    /// The other side does not read what it is sent.
    #[error("The other process left a message unread for {0:?}")]
    Unread(Duration),
    /// The device of the other process failed, and the process ends.
    #[error("The device failed: {0}")]
    DeviceFailed(String),
    /// A worker's legacy handle cannot be opened by a process of this number. The next one has another.
    #[error("The device process has the number of a worker in another namespace")]
    SameNumber,
    /// The other side spoke out of turn.
    #[error("The other process spoke out of turn: {0}")]
    OutOfTurn(&'static str),
}

/// The bytes of a message.
///
/// # Errors
/// When it cannot be written as JSON.
pub fn encode<T: Serialize>(id: u64, body: T) -> Result<Vec<u8>, LinkError> {
    Ok(serde_json::to_vec(&Numbered { id, body })?)
}

/// A message from its bytes.
///
/// # Errors
/// When it is none.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<Numbered<T>, LinkError> {
    Ok(serde_json::from_slice(bytes)?)
}

/// Splits a list so that each part fits one message with room for its frame. There is always one part, if an empty one.
///
/// # Errors
/// When an item cannot be written as JSON.
pub fn chunks<T: Serialize>(items: Vec<T>) -> Result<Vec<Vec<T>>, LinkError> {
    let room = MESSAGE_BYTES_MAX - MESSAGE_BYTES_MAX / 8;
    let mut parts = vec![Vec::new()];
    let mut used = 0;
    for item in items {
        let bytes = serde_json::to_vec(&item)?.len() + 1;
        if used + bytes > room && used > 0 {
            parts.push(Vec::new());
            used = 0;
        }
        used += bytes;
        if let Some(part) = parts.last_mut() {
            part.push(item);
        }
    }
    Ok(parts)
}

/// A layout and its place in a region, as plain numbers.
#[derive(Debug, Serialize, Deserialize)]
pub struct PlacementMessage {
    dtype: u32,
    shape: [u64; AXES],
    strides: [u64; AXES],
    offset: u64,
}

impl From<&Placement> for PlacementMessage {
    fn from(placement: &Placement) -> Self {
        let layout = placement.layout();
        Self {
            dtype: layout.dtype().number(),
            shape: *layout.shape(),
            strides: *layout.strides(),
            offset: placement.offset(),
        }
    }
}

impl PlacementMessage {
    fn layout(&self) -> Result<CacheLayout, LinkError> {
        Ok(CacheLayout::parse(DataType::try_from(self.dtype)?, &self.shape, &self.strides)?)
    }

    /// The placement. That it fits its region is checked when it is bound.
    fn parse(&self) -> Result<Placement, LinkError> {
        Ok(self.layout()?.place(self.offset, u64::MAX)?)
    }
}

/// A [`LayerRecord`] on the link.
#[derive(Debug, Serialize, Deserialize)]
pub struct LayerMessage {
    name: String,
    binding: BindingId,
    region: RegionId,
    placement: PlacementMessage,
    max_selected: u64,
    check_unique: bool,
}

impl From<&LayerRecord> for LayerMessage {
    fn from(layer: &LayerRecord) -> Self {
        Self {
            name: layer.name.clone(),
            binding: layer.binding,
            region: layer.region,
            placement: PlacementMessage::from(&layer.placement),
            max_selected: layer.max_selected,
            check_unique: layer.check_unique,
        }
    }
}

impl TryFrom<LayerMessage> for LayerRecord {
    type Error = LinkError;

    fn try_from(layer: LayerMessage) -> Result<Self, LinkError> {
        Ok(Self {
            placement: layer.placement.parse()?,
            name: layer.name,
            binding: layer.binding,
            region: layer.region,
            max_selected: layer.max_selected,
            check_unique: layer.check_unique,
        })
    }
}

/// A [`SetRecord`] on the link.
#[derive(Debug, Serialize, Deserialize)]
pub struct SetMessage {
    name: String,
    binding: BindingId,
    layers: Vec<BindingId>,
}

impl From<&SetRecord> for SetMessage {
    fn from(set: &SetRecord) -> Self {
        Self { name: set.name.clone(), binding: set.binding, layers: set.layers.clone() }
    }
}

impl From<SetMessage> for SetRecord {
    fn from(set: SetMessage) -> Self {
        Self { name: set.name, binding: set.binding, layers: set.layers }
    }
}

/// A [`RebindRecord`] on the link.
#[derive(Debug, Serialize, Deserialize)]
pub struct RebindMessage {
    binding: BindingId,
    region: RegionId,
    placement: PlacementMessage,
}

impl From<&RebindRecord> for RebindMessage {
    fn from(rebind: &RebindRecord) -> Self {
        Self {
            binding: rebind.binding,
            region: rebind.region,
            placement: PlacementMessage::from(&rebind.placement),
        }
    }
}

impl TryFrom<RebindMessage> for RebindRecord {
    type Error = LinkError;

    fn try_from(rebind: RebindMessage) -> Result<Self, LinkError> {
        Ok(Self {
            binding: rebind.binding,
            region: rebind.region,
            placement: rebind.placement.parse()?,
        })
    }
}

/// A plan kind on the link.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(remote = "PlanKind")]
enum PlanKindMessage {
    Fused,
    ByteCopy,
}

/// A [`PublishedBinding`] on the link.
#[derive(Debug, Serialize, Deserialize)]
pub struct PublishedMessage {
    binding: BindingId,
    signature: SignatureHash,
    #[serde(with = "PlanKindMessage")]
    plan: PlanKind,
}

impl From<PublishedBinding> for PublishedMessage {
    fn from(published: PublishedBinding) -> Self {
        let PublishedBinding { binding, signature, plan } = published;
        Self { binding, signature, plan }
    }
}

impl From<PublishedMessage> for PublishedBinding {
    fn from(published: PublishedMessage) -> Self {
        let PublishedMessage { binding, signature, plan } = published;
        Self { binding, signature, plan }
    }
}

/// A [`Stage`] on the link.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum StageMessage {
    /// See [`Stage::Preparing`].
    Preparing,
    /// See [`Stage::Sealing`].
    Sealing,
    /// See [`Stage::Publishing`].
    Publishing,
}

impl From<Stage> for StageMessage {
    fn from(stage: Stage) -> Self {
        match stage {
            Stage::Preparing => Self::Preparing,
            Stage::Sealing => Self::Sealing,
            Stage::Publishing => Self::Publishing,
        }
    }
}

impl From<StageMessage> for Stage {
    fn from(stage: StageMessage) -> Self {
        match stage {
            StageMessage::Preparing => Self::Preparing,
            StageMessage::Sealing => Self::Sealing,
            StageMessage::Publishing => Self::Publishing,
        }
    }
}

impl From<Progress> for Reply {
    fn from(progress: Progress) -> Self {
        Self::Progress {
            stage: progress.stage.into(),
            layers_done: progress.layers_done,
            layers_total: progress.layers_total,
        }
    }
}

/// A [`Refusal`] on the link.
#[derive(Debug, Serialize, Deserialize)]
pub struct RefusalMessage {
    code: u16,
    sentence: String,
    remedy: String,
    subject: String,
}

impl RefusalMessage {
    /// The sentence of a DEVICE_LOST: nothing more can be asked of the device.
    #[must_use]
    pub fn device_lost(&self) -> Option<&str> {
        (self.code == RefusalCode::DeviceLost.number()).then_some(&self.sentence)
    }
}

impl From<&Refusal> for RefusalMessage {
    fn from(refusal: &Refusal) -> Self {
        Self {
            code: refusal.code().number(),
            sentence: refusal.sentence().to_owned(),
            remedy: refusal.remedy().to_owned(),
            subject: refusal.subject().to_owned(),
        }
    }
}

impl TryFrom<RefusalMessage> for Refusal {
    type Error = LinkError;

    fn try_from(refusal: RefusalMessage) -> Result<Self, LinkError> {
        let code = RefusalCode::try_from(refusal.code)?;
        Ok(Self::new(code, refusal.sentence).about(refusal.subject).remedied_by(refusal.remedy))
    }
}

/// One finding of an inspection.
#[derive(Debug, Serialize, Deserialize)]
pub enum FindingMessage {
    /// A compiled table.
    Plan(PlanMessage),
    /// A worker's ring.
    Ring {
        /// Whose.
        session: SessionId,
        /// Requests completed.
        copies: u64,
        /// Requests refused.
        refusals: u64,
    },
}

/// A [`PlanInspection`] on the link.
#[derive(Debug, Serialize, Deserialize)]
pub struct PlanMessage {
    signature: SignatureHash,
    #[serde(with = "PlanKindMessage")]
    plan: PlanKind,
    layout: PlacementMessage,
    base_mod_16: u8,
    published: bool,
    variants: Vec<(String, u64)>,
    bindings: u32,
}

impl TryFrom<PlanInspection> for PlanMessage {
    type Error = LinkError;

    fn try_from(plan: PlanInspection) -> Result<Self, LinkError> {
        Ok(Self {
            signature: plan.signature,
            plan: plan.plan,
            layout: PlacementMessage::from(&plan.layout.place(0, u64::MAX)?),
            base_mod_16: plan.base_mod_16,
            published: plan.state == PlanState::Published,
            variants: plan.variants,
            bindings: plan.bindings,
        })
    }
}

impl TryFrom<PlanMessage> for PlanInspection {
    type Error = LinkError;

    fn try_from(plan: PlanMessage) -> Result<Self, LinkError> {
        Ok(Self {
            layout: plan.layout.layout()?,
            signature: plan.signature,
            plan: plan.plan,
            base_mod_16: plan.base_mod_16,
            state: if plan.published { PlanState::Published } else { PlanState::Sealed },
            variants: plan.variants,
            bindings: plan.bindings,
        })
    }
}

impl DeviceInspection {
    /// Takes one finding in.
    ///
    /// # Errors
    /// When it is none.
    pub fn take(&mut self, finding: FindingMessage) -> Result<(), LinkError> {
        match finding {
            FindingMessage::Plan(plan) => self.plans.push(plan.try_into()?),
            FindingMessage::Ring { session, copies, refusals } => {
                self.rings.push(RingInspection { session, copies, refusals });
            }
        }
        Ok(())
    }
}
