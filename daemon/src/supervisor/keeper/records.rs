//! What sessions own, as the keeper remembers it: enough to tell a new device process everything again.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use statecopy_proto::{RegionId, SessionId};

use crate::link::{self, LinkError, Request};
use crate::record::{RebindRecord, RegionHandle, RegionRecord, RegistrationRecord};

/// A request of the link, with the descriptor that goes along.
pub(super) type Message = (Request, Option<Arc<OwnedFd>>);

/// One session's records.
#[derive(Debug, Default)]
struct SessionRecords {
    regions: BTreeMap<RegionId, RegionRecord>,
    registration: Option<RegistrationRecord>,
}

/// All sessions' records, in the order of their ids.
#[derive(Debug, Default)]
pub(super) struct Records {
    sessions: BTreeMap<SessionId, SessionRecords>,
}

impl Records {
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

    pub(super) fn close(&mut self, session: SessionId) {
        self.sessions.remove(&session);
    }

    /// Everything that a new device process must be told, one request after the other.
    pub(super) fn replay(&self) -> Result<Vec<(SessionId, Vec<Message>)>, LinkError> {
        let mut requests = Vec::new();
        for (session, records) in &self.sessions {
            for region in records.regions.values() {
                requests.push((*session, vec![import(*session, region)]));
            }
            if let Some(registration) = &records.registration {
                requests.push((*session, register(*session, registration)?));
            }
        }
        Ok(requests)
    }
}

/// The message that maps a region.
pub(super) fn import(session: SessionId, region: &RegionRecord) -> Message {
    let RegionHandle::Memfd(descriptor) = &region.handle;
    let request = Request::ImportRegion { session, region: region.id, bytes: region.bytes };
    (request, Some(Arc::clone(descriptor)))
}

/// The messages of a registration.
pub(super) fn register(
    session: SessionId,
    registration: &RegistrationRecord,
) -> Result<Vec<Message>, LinkError> {
    let layers = link::chunks(registration.layers.iter().map(Into::into).collect())?;
    let sets = link::chunks(registration.sets.iter().map(Into::into).collect())?;
    let mut messages: Vec<Message> = layers
        .into_iter()
        .map(|layers| (Request::Register { session, layers, sets: Vec::new(), last: false }, None))
        .collect();
    let last_at = sets.len() - 1;
    messages.extend(sets.into_iter().enumerate().map(|(at, sets)| {
        (Request::Register { session, layers: Vec::new(), sets, last: at == last_at }, None)
    }));
    Ok(messages)
}

/// The messages of a rebind.
pub(super) fn rebind(
    session: SessionId,
    moves: &[RebindRecord],
) -> Result<Vec<Message>, LinkError> {
    let parts = link::chunks(moves.iter().map(Into::into).collect())?;
    let last_at = parts.len() - 1;
    let message = |(at, layers)| (Request::Rebind { session, layers, last: at == last_at }, None);
    Ok(parts.into_iter().enumerate().map(message).collect())
}
