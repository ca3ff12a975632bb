//! One session in the table.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use statecopy_kernels::device::AllocationId;
use statecopy_proto::{ProtocolVersion, Refusal, RefusalCode, RegionId, SessionId, v1};
use statecopy_session::{PairNumber, SessionMemory, SlotNumber};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::state::{EndReason, SessionState};
use super::{EventItem, Grant, Opening, within};
use crate::record::RegionRecord;
use crate::supervisor::device::DeviceHandle;
use crate::supervisor::message;
use crate::supervisor::peer::Caller;

/// A region that a session owns.
#[derive(Debug, Clone)]
pub(crate) struct HeldRegion {
    /// The record that the device process was told.
    pub(crate) record: RegionRecord,
    /// The allocation behind it: the file, or what the session's worker says is the same memory. Never compared between
    /// sessions.
    pub(crate) allocation: AllocationId,
}

/// What a session held to its end: its memory, descriptors that were never used, its ring as mapped here.
type Held = (BTreeMap<RegionId, HeldRegion>, BTreeMap<u64, Vec<OwnedFd>>, Option<SessionMemory>);

/// A session that was taken out of the table, and what is to be given back.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Which one it was.
    pub(crate) id: SessionId,
    /// Why it ended.
    pub(crate) reason: EndReason,
    /// Its device.
    pub(crate) device: DeviceHandle,
    /// Its turn: a registration may still run.
    pub(crate) turn: Arc<Semaphore>,
    /// What may take its time to give back.
    pub(crate) held: Held,
    /// Tells whoever waits that nothing of it is left, and why.
    pub(crate) given_back: watch::Sender<Option<EndReason>>,
}

/// One session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) opener: Caller,
    pub(super) worker_pid: Option<u32>,
    pub(super) state: SessionState,
    pub(super) device: DeviceHandle,
    pub(super) regions: BTreeMap<RegionId, HeldRegion>,
    /// Mapped only to be watched: what it says is the worker's.
    pub(super) ring: Option<SessionMemory>,
    /// Slots of captured graphs that are armed, by their pair.
    pub(super) graphs: BTreeMap<PairNumber, BTreeSet<SlotNumber>>,
    pub(super) descriptors_pending: u32,
    pub(super) events: Option<mpsc::Sender<EventItem>>,
    pub(super) copies: u64,
    pub(super) refusals: u64,
    version: ProtocolVersion,
    label: String,
    descriptors: BTreeMap<u64, Vec<OwnedFd>>,
    turn: Arc<Semaphore>,
    over: CancellationToken,
    given_back: watch::Sender<Option<EndReason>>,
}

impl Session {
    pub(super) fn new(opening: Opening) -> Self {
        Self {
            opener: opening.caller,
            worker_pid: opening.caller.pid,
            state: SessionState::Attaching { token: opening.token, until: opening.until },
            device: opening.device,
            regions: BTreeMap::new(),
            ring: None,
            graphs: BTreeMap::new(),
            descriptors_pending: 0,
            events: None,
            copies: 0,
            refusals: 0,
            version: opening.version,
            label: opening.label,
            descriptors: BTreeMap::new(),
            turn: Arc::new(Semaphore::new(1)),
            over: CancellationToken::new(),
            given_back: watch::Sender::new(None),
        }
    }

    pub(super) fn grant(&self, id: SessionId) -> Grant {
        Grant {
            id,
            device: self.device.clone(),
            version: self.version,
            turn: Arc::clone(&self.turn),
            over: self.over.clone(),
            given_back: self.given_back.subscribe(),
        }
    }

    pub(super) fn add_descriptors(
        &mut self,
        tag: u64,
        descriptors: &mut Vec<OwnedFd>,
        max: u32,
    ) -> Result<u32, Refusal> {
        let count = u32::try_from(descriptors.len()).unwrap_or(u32::MAX);
        let pending = self.descriptors_pending.saturating_add(count);
        let setting = "limits.descriptors_pending_max";
        within("waiting descriptors", setting, pending.into(), max.into())?;
        self.descriptors_pending = pending;
        let tagged = self.descriptors.entry(tag).or_default();
        tagged.append(descriptors);
        Ok(u32::try_from(tagged.len()).unwrap_or(u32::MAX))
    }

    pub(super) fn take_descriptors(&mut self, tag: u64) -> Vec<OwnedFd> {
        let taken = self.descriptors.remove(&tag).unwrap_or_default();
        let count = u32::try_from(taken.len()).unwrap_or(u32::MAX);
        self.descriptors_pending = self.descriptors_pending.saturating_sub(count);
        taken
    }

    pub(super) fn add_region(&mut self, record: RegionRecord, file: Option<AllocationId>) {
        let said = || {
            let same = self.regions.values().find(|held| held.record.is_said_to_be(&record));
            // No file lies on device 0.
            same.map_or(AllocationId(0, record.id.0), |held| held.allocation)
        };
        let allocation = file.unwrap_or_else(said);
        self.regions.insert(record.id, HeldRegion { record, allocation });
    }

    pub(super) fn remove_region(
        &mut self,
        id: SessionId,
        region: RegionId,
    ) -> Result<HeldRegion, Refusal> {
        self.regions.remove(&region).ok_or_else(|| {
            let sentence = format!("Session {id} has no region {region}");
            Refusal::new(RefusalCode::RegionUnknown, sentence).about("region_id")
        })
    }

    /// How many slots of captured graphs are armed.
    pub(super) fn armed_slots(&self) -> u64 {
        self.graphs.values().map(|slots| slots.len() as u64).sum()
    }

    /// Sends an event. Returns whether the stream was ended because its client does not read.
    pub(super) fn send_event(&mut self, event: v1::Event) -> bool {
        let Some(events) = &self.events else {
            return false;
        };
        match events.try_send(Ok(event)) {
            Ok(()) => false,
            Err(mpsc::error::TrySendError::Closed(_)) => {
                self.events = None;
                false
            }
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.events = None;
                true
            }
        }
    }

    pub(super) fn into_ended(mut self, id: SessionId, reason: EndReason, last: v1::Event) -> Ended {
        self.over.cancel();
        self.send_event(last);
        Ended {
            id,
            reason,
            device: self.device,
            turn: self.turn,
            held: (self.regions, self.descriptors, self.ring),
            given_back: self.given_back,
        }
    }

    pub(super) fn inspect(&self, id: SessionId) -> v1::SessionStatus {
        let layers = match &self.state {
            SessionState::Published(publication) => publication.layers.as_slice(),
            SessionState::Attaching { .. }
            | SessionState::Attached
            | SessionState::Registering
            | SessionState::Ended(_) => &[],
        };
        v1::SessionStatus {
            session_id: id.0,
            label: self.label.clone(),
            protocol_version: self.version.get(),
            worker_pid: self.worker_pid.unwrap_or(0),
            worker_uid: self.opener.uid,
            device_uuid: self.device.description().uuid.to_string(),
            state: self.state.label().to_owned(),
            regions: self.regions.values().map(message::region_status).collect(),
            layers: layers.iter().map(message::layer_status).collect(),
            copies: self.copies,
            refusals: self.refusals,
        }
    }
}
