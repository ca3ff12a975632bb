//! Who is connected, and what they own.
//!
//! One table behind one lock that is held for a few map operations and never across an await. Whatever takes longer
//! (the device's share of a registration, the end of a session) is done by tasks outside, in the session's turn: at most
//! one of them works for a session at a time.

mod attach;
mod ending;
mod graphs;
mod publication;
mod ring;
mod session;
mod state;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use statecopy_kernels::device::AllocationId;
use statecopy_proto::descriptor_socket::Token;
use statecopy_proto::{
    BindingId, Incarnation, ProtocolVersion, Refusal, RefusalCode, RegionId, SessionId, v1,
};
use statecopy_session::SessionMemory;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use self::session::Session;
use self::state::{NoEdge, SessionEvent, SessionState};
use super::device::DeviceHandle;
use super::message;
use super::peer::Caller;
use crate::config::Limits;
use crate::record::RegionRecord;

pub(crate) use self::attach::serve_descriptors;
pub(crate) use self::ending::{end_session, watch_attach};
pub(crate) use self::publication::{Publication, PublishedLayer};
pub(crate) use self::session::{Ended, HeldRegion};
pub(crate) use self::state::EndReason;

/// Events that a session's stream holds before the client must read. A client that falls behind loses its stream.
const EVENTS_HELD: usize = 16;

/// Descriptors that a session costs by itself: two connections and its worker's pidfd.
const DESCRIPTORS_A_SESSION: u64 = 3;

/// How many descriptors sessions may hold together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DescriptorRoom {
    /// RLIMIT_NOFILE.
    pub(crate) limit: u64,
    /// What it leaves for sessions.
    pub(crate) room: u64,
}

impl DescriptorRoom {
    /// Refuses more than there is room for.
    fn check(self, wanted: u64) -> Result<(), Refusal> {
        let Self { limit, room } = self;
        if wanted <= room {
            return Ok(());
        }
        let sentence = format!(
            "Sessions would hold {wanted} descriptors; the daemon's limit of open files \
             (RLIMIT_NOFILE = {limit}) leaves {room} for them"
        );
        Err(Refusal::new(RefusalCode::QuotaExceeded, sentence)
            .about("RLIMIT_NOFILE")
            .remedied_by("Close sessions, or start the daemon with a higher limit of open files."))
    }
}

/// One item of a session's event stream.
pub(crate) type EventItem = Result<v1::Event, Status>;

/// What a session is opened with.
#[derive(Debug)]
pub(crate) struct Opening {
    /// Who opens it.
    pub(crate) caller: Caller,
    /// The version that was agreed on.
    pub(crate) version: ProtocolVersion,
    /// Its name for status and logs.
    pub(crate) label: String,
    /// Its device.
    pub(crate) device: DeviceHandle,
    /// The one-time token.
    pub(crate) token: Token,
    /// When the token expires.
    pub(crate) until: Instant,
}

/// A session that a caller may use.
#[derive(Debug, Clone)]
pub(crate) struct Grant {
    /// Its id.
    pub(crate) id: SessionId,
    /// Its device.
    pub(crate) device: DeviceHandle,
    /// The version that it speaks.
    pub(crate) version: ProtocolVersion,
    /// Whoever changes what the session owns holds the one permit.
    pub(crate) turn: Arc<Semaphore>,
    /// Cancelled when the session is over.
    pub(crate) over: CancellationToken,
    /// Why it is over, once nothing of it is left.
    pub(crate) given_back: watch::Receiver<Option<EndReason>>,
}

/// What all sessions own together, for the gauges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Sessions, by the label of their state.
    pub(crate) sessions: BTreeMap<&'static str, u64>,
    /// Registered regions.
    pub(crate) regions: u64,
    /// Their bytes. Memory that is registered twice counts twice.
    pub(crate) region_bytes: u64,
    /// Published layers.
    pub(crate) layers: u64,
    /// Armed slots of captured graphs.
    pub(crate) graph_slots: u64,
    /// Descriptors that wait for the registration of their region.
    pub(crate) descriptors_pending: u64,
}

/// The session table.
#[derive(Debug)]
pub(crate) struct Sessions {
    incarnation: Incarnation,
    limits: Limits,
    descriptors: DescriptorRoom,
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    sessions: BTreeMap<SessionId, Session>,
    next_session: u64,
    next_region: u64,
    next_binding: u64,
    closed: bool,
}

impl Table {
    fn descriptors_held(&self) -> u64 {
        let held = self.sessions.values().map(|session| {
            let regions = session.regions.values().map(|region| region.record.descriptors());
            let regions: u64 = regions.sum();
            DESCRIPTORS_A_SESSION + regions + u64::from(session.descriptors_pending)
        });
        held.sum()
    }
}

impl Sessions {
    /// An empty table.
    pub(crate) fn new(
        incarnation: Incarnation,
        limits: Limits,
        descriptors: DescriptorRoom,
    ) -> Self {
        let table = Table {
            sessions: BTreeMap::new(),
            next_session: 1,
            next_region: 1,
            next_binding: 1,
            closed: false,
        };
        Self { incarnation, limits, descriptors, table: Mutex::new(table) }
    }

    /// RLIMIT_NOFILE.
    pub(crate) fn descriptor_limit(&self) -> u64 {
        self.descriptors.limit
    }

    /// Opens a session.
    ///
    /// # Errors
    /// QUOTA_EXCEEDED at `limits.sessions_max` and where no descriptors are left, DRAINING once the table is closed.
    pub(crate) fn open(&self, opening: Opening) -> Result<Grant, Refusal> {
        let mut table = self.lock();
        if table.closed {
            return Err(Refusal::new(RefusalCode::Draining, "The daemon is about to end"));
        }
        let open = table.sessions.len() as u64;
        within("sessions", "limits.sessions_max", open + 1, self.limits.sessions_max.into())?;
        self.descriptors.check(table.descriptors_held() + DESCRIPTORS_A_SESSION)?;
        let id = SessionId(table.next_session);
        table.next_session += 1;
        let session = Session::new(opening);
        let grant = session.grant(id);
        table.sessions.insert(id, session);
        Ok(grant)
    }

    /// Ties a session to the worker that presents its token.
    ///
    /// # Errors
    /// PERMISSION_DENIED for a token that is unknown, used, or presented by another user; SESSION_UNKNOWN when it is
    /// too late.
    pub(crate) fn attach(
        &self,
        token: &Token,
        uid: u32,
        pid: Option<u32>,
        now: Instant,
    ) -> Result<Grant, Refusal> {
        let mut table = self.lock();
        let mut refused = None;
        for (id, session) in &mut table.sessions {
            match session.state.next(SessionEvent::Attach { token: token.clone(), now }) {
                Ok(_) if session.opener.uid != uid => {
                    let sentence = format!(
                        "User {uid} presents the token of session {id}, which user {} opened",
                        session.opener.uid
                    );
                    return Err(Refusal::new(RefusalCode::PermissionDenied, sentence));
                }
                Ok(state) => {
                    session.state = state;
                    session.worker_pid = pid;
                    return Ok(session.grant(*id));
                }
                Err(NoEdge::TooLate) => refused = Some(NoEdge::TooLate.to_refusal(*id)),
                Err(_) => {}
            }
        }
        Err(refused.unwrap_or_else(|| {
            Refusal::new(
                RefusalCode::PermissionDenied,
                "The token belongs to no session that waits for its worker",
            )
            .remedied_by("Open a session and present its token once, in time.")
        }))
    }

    /// The session of a caller.
    ///
    /// # Errors
    /// SESSION_UNKNOWN when there is none of that id, PERMISSION_DENIED when another user opened it.
    pub(crate) fn grant(&self, id: SessionId, caller: Caller) -> Result<Grant, Refusal> {
        self.with(id, |session| {
            if session.opener.uid != caller.uid {
                let sentence = format!("Session {id} belongs to another user than {}", caller.uid);
                return Err(Refusal::new(RefusalCode::PermissionDenied, sentence).about("session"));
            }
            Ok(session.grant(id))
        })
    }

    /// Changes a session's state.
    ///
    /// # Errors
    /// When no edge of the diagram leads there, or the session is over.
    fn step(&self, id: SessionId, event: SessionEvent) -> Result<(), Refusal> {
        self.with(id, |session| {
            session.state = session.state.next(event).map_err(|edge| edge.to_refusal(id))?;
            Ok(())
        })
    }

    /// A registration starts: what was published is withdrawn.
    pub(crate) fn begin_registration(&self, id: SessionId) -> Result<(), Refusal> {
        self.step(id, SessionEvent::Begin)
    }

    /// The registration was refused.
    pub(crate) fn fail_registration(&self, id: SessionId) -> Result<(), Refusal> {
        self.step(id, SessionEvent::Fail)
    }

    /// Everything is published.
    pub(crate) fn publish(&self, id: SessionId, all: Arc<Publication>) -> Result<(), Refusal> {
        self.step(id, SessionEvent::Publish(all))
    }

    /// Published layers moved to other memory.
    pub(crate) fn move_layers(&self, id: SessionId, all: Arc<Publication>) -> Result<(), Refusal> {
        self.step(id, SessionEvent::Move(all))
    }

    /// The layers are given back.
    pub(crate) fn withdraw(&self, id: SessionId) -> Result<(), Refusal> {
        self.step(id, SessionEvent::Withdraw)
    }

    /// What a session has published.
    ///
    /// # Errors
    /// NOT_SEALED when nothing is, also while a registration runs.
    pub(crate) fn published(&self, id: SessionId) -> Result<Arc<Publication>, Refusal> {
        self.with(id, |session| {
            session.state.published().cloned().map_err(|edge| edge.to_refusal(id))
        })
    }

    /// Adds descriptors that wait under a tag, and says how many wait there now. Where it refuses, they stay with the
    /// caller: closing a foreign descriptor may take as long as its file system likes.
    ///
    /// # Errors
    /// QUOTA_EXCEEDED at `limits.descriptors_pending_max` and where the daemon can hold no more.
    pub(crate) fn add_descriptors(
        &self,
        id: SessionId,
        tag: u64,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<u32, Refusal> {
        let max = self.limits.descriptors_pending_max;
        let held = self.lock().descriptors_held();
        self.descriptors.check(held + descriptors.len() as u64)?;
        self.with(id, |session| session.add_descriptors(tag, descriptors, max))
    }

    /// Takes what waits under a tag.
    ///
    /// # Errors
    /// HANDLE_INVALID when another number waits there; they are closed then, so call it where that may take its time.
    pub(crate) fn take_descriptors(
        &self,
        id: SessionId,
        tag: u64,
        count: u32,
    ) -> Result<Vec<OwnedFd>, Refusal> {
        // Closed after the lock is given back.
        let taken = self.with(id, |session| Ok(session.take_descriptors(tag)))?;
        let found = taken.len();
        if found != count as usize {
            let sentence = format!(
                "Descriptor tag {tag} is announced with {count} descriptors and has {found}"
            );
            return Err(Refusal::new(RefusalCode::HandleInvalid, sentence).about("descriptors"));
        }
        Ok(taken)
    }

    /// An id for a new region.
    ///
    /// # Errors
    /// QUOTA_EXCEEDED at `limits.regions_max`.
    pub(crate) fn next_region(&self, id: SessionId) -> Result<RegionId, Refusal> {
        let max = u64::from(self.limits.regions_max);
        self.with(id, |session| {
            within("regions", "limits.regions_max", session.regions.len() as u64 + 1, max)
        })?;
        let mut table = self.lock();
        let region = RegionId(table.next_region);
        table.next_region += 1;
        Ok(region)
    }

    /// A region is mapped. `file`: the file behind it, where it is one.
    pub(crate) fn add_region(
        &self,
        id: SessionId,
        region: RegionRecord,
        file: Option<AllocationId>,
    ) -> Result<(), Refusal> {
        self.with(id, |session| {
            session.add_region(region, file);
            Ok(())
        })
    }

    /// The regions of a session.
    pub(crate) fn regions(&self, id: SessionId) -> Result<BTreeMap<RegionId, HeldRegion>, Refusal> {
        self.with(id, |session| Ok(session.regions.clone()))
    }

    /// A session's ring is served.
    fn add_ring(&self, id: SessionId, ring: SessionMemory) -> Result<(), Refusal> {
        self.with(id, |session| {
            session.ring = Some(ring);
            Ok(())
        })
    }

    /// Requests in the workers' rings that wait or run, as the rings say.
    pub(crate) fn ring_requests_pending(&self) -> u64 {
        let rings: Vec<SessionMemory> =
            self.lock().sessions.values().filter_map(|session| session.ring.clone()).collect();
        rings.iter().map(SessionMemory::pending).sum()
    }

    /// Takes a region out. Published layers that lie in it fall asleep.
    ///
    /// # Errors
    /// REGION_UNKNOWN.
    pub(crate) fn remove_region(
        &self,
        id: SessionId,
        region: RegionId,
    ) -> Result<HeldRegion, Refusal> {
        self.with(id, |session| session.remove_region(id, region))
    }

    /// `count` binding ids that no other binding ever has.
    pub(crate) fn next_bindings(&self, count: u64) -> impl Iterator<Item = BindingId> + use<> {
        let mut table = self.lock();
        let first = table.next_binding;
        table.next_binding = first.saturating_add(count);
        (first..table.next_binding).map(BindingId)
    }

    /// Counts the answer of a copy.
    pub(crate) fn count_copy(&self, id: SessionId, done: bool) {
        if let Some(session) = self.lock().sessions.get_mut(&id) {
            if done {
                session.copies += 1;
            } else {
                session.refusals += 1;
            }
        }
    }

    /// The session's events from now on, in place of its earlier stream.
    pub(crate) fn subscribe(
        &self,
        id: SessionId,
    ) -> Result<(mpsc::Sender<EventItem>, mpsc::Receiver<EventItem>), Refusal> {
        let (sender, receiver) = mpsc::channel(EVENTS_HELD);
        self.with(id, |session| {
            session.events = Some(sender.clone());
            Ok((sender, receiver))
        })
    }

    /// Sends an event to the sessions that it concerns. Returns how many streams were ended because their client does
    /// not read.
    pub(crate) fn send_event(
        &self,
        event: &v1::Event,
        concerns: impl Fn(&DeviceHandle) -> bool,
    ) -> u64 {
        let mut lost = 0;
        for session in self.lock().sessions.values_mut() {
            if concerns(&session.device) && session.send_event(event.clone()) {
                lost += 1;
            }
        }
        lost
    }

    /// Takes a session out of the table: from now on it is SESSION_UNKNOWN.
    pub(crate) fn end(&self, id: SessionId, reason: EndReason) -> Option<Ended> {
        self.finish(id, SessionEvent::End(reason))
    }

    /// Ends a session that is not attached in time.
    pub(crate) fn expire(&self, id: SessionId, now: Instant) -> Option<Ended> {
        self.finish(id, SessionEvent::Expire { now })
    }

    fn finish(&self, id: SessionId, event: SessionEvent) -> Option<Ended> {
        let mut table = self.lock();
        let SessionState::Ended(reason) = table.sessions.get(&id)?.state.next(event).ok()? else {
            return None;
        };
        let last = message::session_ended(self.incarnation, &reason);
        table.sessions.remove(&id).map(|session| session.into_ended(id, reason, last))
    }

    /// Takes every session out, and opens no other.
    pub(crate) fn close(&self, reason: &EndReason) -> Vec<Ended> {
        let mut table = self.lock();
        table.closed = true;
        let sessions = std::mem::take(&mut table.sessions);
        let last = message::session_ended(self.incarnation, reason);
        let end = |(id, session): (SessionId, Session)| {
            session.into_ended(id, reason.clone(), last.clone())
        };
        sessions.into_iter().map(end).collect()
    }

    /// What `statecopy status` shows of the sessions.
    pub(crate) fn inspect(&self) -> Vec<v1::SessionStatus> {
        self.lock().sessions.iter().map(|(id, session)| session.inspect(*id)).collect()
    }

    /// What all sessions own together.
    pub(crate) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for session in self.lock().sessions.values() {
            *totals.sessions.entry(session.state.label()).or_default() += 1;
            totals.regions += session.regions.len() as u64;
            for region in session.regions.values() {
                totals.region_bytes = totals.region_bytes.saturating_add(region.record.bytes);
            }
            if let Ok(publication) = session.state.published() {
                totals.layers += publication.layers.len() as u64;
            }
            totals.graph_slots += session.armed_slots();
            totals.descriptors_pending += u64::from(session.descriptors_pending);
        }
        totals
    }

    fn with<T>(
        &self,
        id: SessionId,
        act: impl FnOnce(&mut Session) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        match self.lock().sessions.get_mut(&id) {
            Some(session) => act(session),
            None => {
                let sentence = format!("Session {id} is not open: it has ended, or never was");
                Err(Refusal::new(RefusalCode::SessionUnknown, sentence).about("session"))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses a count past its limit.
pub(crate) fn within(what: &str, setting: &str, wanted: u64, max: u64) -> Result<(), Refusal> {
    if wanted <= max {
        return Ok(());
    }
    let sentence = format!("{wanted} {what} would be more than {setting} = {max}");
    Err(Refusal::new(RefusalCode::QuotaExceeded, sentence).about(setting))
}

#[cfg(test)]
mod tests;
