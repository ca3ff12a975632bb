//! What sessions own, as the keeper remembers it: enough to tell a new device process everything again.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::Serialize;
use statecopy_proto::{RegionId, SessionId};
use statecopy_session::PairNumber;

use crate::link::{self, LinkError, PIECES_A_PART, Request, SlotMessage};
use crate::record::{
    HandleRecord, PieceRecord, RebindRecord, RegionRecord, RegistrationRecord, RingRecord,
    SlotRecord,
};

/// A request of the link, with the descriptors that go along.
pub(super) type Message = (Request, Vec<Arc<OwnedFd>>);

/// One session's records.
#[derive(Debug, Default)]
struct SessionRecords {
    ring: Option<RingRecord>,
    regions: BTreeMap<RegionId, RegionRecord>,
    registration: Option<RegistrationRecord>,
    graphs: BTreeMap<PairNumber, Vec<SlotRecord>>,
}

/// All sessions' records, in the order of their ids.
#[derive(Debug, Default)]
pub(super) struct Records {
    sessions: BTreeMap<SessionId, SessionRecords>,
}

impl Records {
    pub(super) fn open(&mut self, session: SessionId, ring: RingRecord) {
        self.sessions.entry(session).or_default().ring = Some(ring);
    }

    pub(super) fn add_region(&mut self, session: SessionId, region: RegionRecord) {
        self.sessions.entry(session).or_default().regions.insert(region.id, region);
    }

    pub(super) fn drop_region(&mut self, session: SessionId, region: RegionId) {
        if let Some(records) = self.sessions.get_mut(&session) {
            records.regions.remove(&region);
        }
    }

    pub(super) fn publish(&mut self, session: SessionId, registration: RegistrationRecord) {
        self.sessions.entry(session).or_default().registration = Some(registration);
    }

    pub(super) fn withdraw(&mut self, session: SessionId) {
        if let Some(records) = self.sessions.get_mut(&session) {
            records.registration = None;
        }
    }

    pub(super) fn rebind(&mut self, session: SessionId, moves: &[RebindRecord]) {
        let registration =
            self.sessions.get_mut(&session).and_then(|records| records.registration.as_mut());
        for layer in registration.into_iter().flat_map(|registration| &mut registration.layers) {
            if let Some(moved) = moves.iter().find(|moved| moved.binding == layer.binding) {
                layer.region = moved.region;
                layer.placement = moved.placement.clone();
            }
        }
    }

    pub(super) fn arm(&mut self, session: SessionId, slot: SlotRecord) {
        let records = self.sessions.entry(session).or_default();
        records.graphs.entry(slot.pair).or_default().push(slot);
    }

    pub(super) fn disarm(&mut self, session: SessionId, pair: PairNumber) {
        if let Some(records) = self.sessions.get_mut(&session) {
            records.graphs.remove(&pair);
        }
    }

    pub(super) fn close(&mut self, session: SessionId) {
        self.sessions.remove(&session);
    }

    /// Everything that a new device process must be told, one request after the other.
    pub(super) fn replay(&self) -> Result<Vec<(SessionId, Vec<Message>)>, LinkError> {
        let mut requests = Vec::new();
        for (session, records) in &self.sessions {
            for region in records.regions.values() {
                requests.push((*session, import(*session, region)));
            }
            if let Some(registration) = &records.registration {
                requests.push((*session, register(*session, registration, true)?));
            }
            // Then: what the ring holds is served against the tables above.
            if let Some(ring) = &records.ring {
                requests.push((*session, vec![open(*session, ring, true)]));
            }
            // Last: graphs ring in the memory that came with the ring.
            if !records.graphs.is_empty() {
                requests.push((*session, arm(*session, records.graphs.values().flatten(), true)?));
            }
        }
        Ok(requests)
    }
}

/// The message that opens a ring. `resumed`: an earlier device process served it.
pub(super) fn open(session: SessionId, ring: &RingRecord, resumed: bool) -> Message {
    let request = Request::OpenSession {
        session,
        slots: ring.parameters.slots(),
        inline_bytes: ring.parameters.inline_bytes(),
        lane_slots: ring.parameters.lane_slots(),
        resumed,
    };
    (request, vec![Arc::clone(&ring.memory), Arc::clone(&ring.executor_bell)])
}

/// The messages that map a region.
pub(super) fn import(session: SessionId, region: &RegionRecord) -> Vec<Message> {
    let parts = region.pieces.chunks(PIECES_A_PART);
    let last_at = parts.len().saturating_sub(1);
    let message = |(at, part): (usize, &[PieceRecord])| {
        let descriptors = part.iter().filter_map(|piece| match &piece.handle {
            HandleRecord::Descriptor(descriptor) => Some(Arc::clone(descriptor)),
            HandleRecord::Value(_) => None,
        });
        let request = Request::ImportRegion {
            session,
            region: region.id,
            announced: region.into(),
            pieces: part.iter().map(Into::into).collect(),
            last: at == last_at,
        };
        (request, descriptors.collect())
    };
    parts.enumerate().map(message).collect()
}

/// The messages of a registration. `resumed`: an earlier device process had published it.
pub(super) fn register(
    session: SessionId,
    registration: &RegistrationRecord,
    resumed: bool,
) -> Result<Vec<Message>, LinkError> {
    let layers = link::chunks(registration.layers.iter().map(Into::into).collect())?;
    let part = |layers, sets, last| {
        (Request::Register { session, layers, sets, last, resumed }, Vec::new())
    };
    let mut messages: Vec<Message> =
        layers.into_iter().map(|layers| part(layers, Vec::new(), false)).collect();
    let sets = registration.sets.iter().map(Into::into).collect();
    messages.extend(in_parts(sets, |sets, last| part(Vec::new(), sets, last))?);
    Ok(messages)
}

/// The messages of a rebind.
pub(super) fn rebind(
    session: SessionId,
    moves: &[RebindRecord],
) -> Result<Vec<Message>, LinkError> {
    let moves = moves.iter().map(Into::into).collect();
    in_parts(moves, |layers, last| (Request::Rebind { session, layers, last }, Vec::new()))
}

/// The messages that arm slots. `resumed`: an earlier device process had armed them.
pub(super) fn arm<'a>(
    session: SessionId,
    slots: impl IntoIterator<Item = &'a SlotRecord>,
    resumed: bool,
) -> Result<Vec<Message>, LinkError> {
    let slots = slots.into_iter().map(SlotMessage::from).collect();
    in_parts(slots, |slots, last| {
        (Request::ArmGraphs { session, slots, last, resumed }, Vec::new())
    })
}

/// The messages of a list that may outgrow one, each told whether it is the last.
fn in_parts<T: Serialize>(
    items: Vec<T>,
    message: impl Fn(Vec<T>, bool) -> Message,
) -> Result<Vec<Message>, LinkError> {
    let parts = link::chunks(items)?;
    let last_at = parts.len() - 1;
    let numbered = parts.into_iter().enumerate();
    Ok(numbered.map(|(at, part)| message(part, at == last_at)).collect())
}
