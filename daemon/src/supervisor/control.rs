//! What every task of the supervisor shares.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use statecopy_kernels::findings::Finding;
use statecopy_proto::{Incarnation, Refusal, RefusalCode, SessionId, v1};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::device::DeviceHandle;
use super::peer::{AllowedUsers, Caller};
use super::sessions::{DescriptorRoom, Grant, Sessions};
use super::telemetry::metrics::{Metrics, Snapshot};
use super::telemetry::rate_limit::TokenBucket;
use crate::config::Settings;

/// Log lines about bad requests, and about sessions that come and go: so many at once.
const LINES_AT_ONCE: u32 = 20;
/// And so many a second.
const LINES_A_SECOND: u32 = 5;

/// What every task of the supervisor shares. Settings and devices do not change; the rest takes care of itself.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) incarnation: Incarnation,
    pub(crate) settings: Settings,
    pub(crate) users: AllowedUsers,
    pub(crate) devices: Vec<DeviceHandle>,
    pub(crate) sessions: Sessions,
    pub(crate) metrics: Metrics,
    /// Every task of the supervisor.
    pub(crate) tasks: TaskTracker,
    /// Cancelled when the daemon starts to drain.
    pub(crate) draining: CancellationToken,
    /// Cancelled when a device process cannot be started again: the daemon ends.
    pub(crate) failed: CancellationToken,
    /// Told when readiness may have changed.
    pub(crate) readiness: Notify,
    /// Cancelled when nothing is served any more.
    pub(crate) stopped: CancellationToken,
    /// Path of the descriptor socket.
    pub(crate) descriptor_socket: PathBuf,
    /// Where HTTP is served, or empty.
    pub(crate) http_address: String,
    /// What was found of the host.
    pub(crate) findings: Vec<Finding>,
    requests: Arc<Semaphore>,
    started: Instant,
    bad_request_lines: Mutex<TokenBucket>,
    session_lines: Mutex<TokenBucket>,
}

/// What [`Control`] is made of.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) incarnation: Incarnation,
    pub(crate) settings: Settings,
    pub(crate) own_uid: u32,
    pub(crate) devices: Vec<DeviceHandle>,
    pub(crate) metrics: Metrics,
    pub(crate) descriptors: DescriptorRoom,
    pub(crate) descriptor_socket: PathBuf,
    pub(crate) http_address: String,
    pub(crate) findings: Vec<Finding>,
    pub(crate) stopped: CancellationToken,
}

impl Control {
    /// A supervisor that serves.
    pub(crate) fn new(parts: Parts) -> Self {
        let now = Instant::now();
        let settings = parts.settings;
        let lines = || Mutex::new(TokenBucket::new(LINES_AT_ONCE, LINES_A_SECOND, now));
        Self {
            incarnation: parts.incarnation,
            users: AllowedUsers::new(parts.own_uid, settings.allow_uids.clone()),
            devices: parts.devices,
            sessions: Sessions::new(parts.incarnation, settings.limits.clone(), parts.descriptors),
            metrics: parts.metrics,
            tasks: TaskTracker::new(),
            draining: CancellationToken::new(),
            failed: CancellationToken::new(),
            readiness: Notify::new(),
            stopped: parts.stopped,
            findings: parts.findings,
            descriptor_socket: parts.descriptor_socket,
            http_address: parts.http_address,
            requests: Arc::new(Semaphore::new(settings.limits.requests_pending_max as usize)),
            started: now,
            bad_request_lines: lines(),
            session_lines: lines(),
            settings,
        }
    }

    /// The session that a message names: incarnation first, then the session, then its user.
    ///
    /// # Errors
    /// INCARNATION_MISMATCH, SESSION_UNKNOWN, PERMISSION_DENIED.
    pub(crate) fn session(
        &self,
        session: Option<v1::SessionRef>,
        caller: Caller,
    ) -> Result<Grant, Refusal> {
        let session = session.ok_or_else(|| {
            Refusal::new(RefusalCode::SessionUnknown, "The request names no session")
                .about("session")
        })?;
        match Incarnation::parse(&session.incarnation) {
            Ok(incarnation) if incarnation == self.incarnation => {}
            Ok(incarnation) => {
                let sentence = format!(
                    "The session belongs to incarnation {incarnation}; this daemon is {}",
                    self.incarnation
                );
                return Err(Refusal::new(RefusalCode::IncarnationMismatch, sentence));
            }
            Err(error) => {
                return Err(Refusal::new(RefusalCode::IncarnationMismatch, error.to_string()));
            }
        }
        self.sessions.grant(SessionId(session.session_id), caller)
    }

    /// Refuses new work while the daemon drains.
    ///
    /// # Errors
    /// DRAINING.
    pub(crate) fn accepting(&self) -> Result<(), Refusal> {
        if self.draining.is_cancelled() {
            return Err(Refusal::new(RefusalCode::Draining, "The daemon is about to end"));
        }
        Ok(())
    }

    /// A place among the requests that wait or run.
    ///
    /// # Errors
    /// DRAINING; OVERLOADED at `limits.requests_pending_max`.
    pub(crate) fn admit(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        self.accepting()?;
        Arc::clone(&self.requests).try_acquire_owned().map_err(|_| {
            let max = self.settings.limits.requests_pending_max;
            let sentence =
                format!("{max} requests wait or run: limits.requests_pending_max = {max}");
            Refusal::new(RefusalCode::Overloaded, sentence)
                .remedied_by("Wait for earlier requests to be answered, then try again.")
        })
    }

    /// Waits until nothing is waiting or running.
    pub(crate) async fn idle(&self) {
        // The semaphore is never closed.
        let _all = self.requests.acquire_many(self.settings.limits.requests_pending_max).await;
    }

    /// Why the daemon is not ready; `None` when it is.
    pub(crate) fn not_ready(&self) -> Option<String> {
        if self.draining.is_cancelled() {
            return Some("draining".to_owned());
        }
        self.devices.iter().find_map(|device| {
            let state = device.state();
            let state = state.borrow();
            let uuid = device.description().uuid.to_string();
            match (state.failed, state.ready) {
                (true, _) => Some(format!("the device process of {uuid} cannot be started again")),
                (false, false) => Some(format!("the device process of {uuid} is being started")),
                (false, true) => None,
            }
        })
    }

    /// Time since the daemon started.
    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// The same in milliseconds.
    pub(crate) fn uptime_ms(&self) -> u64 {
        u64::try_from(self.uptime().as_millis()).unwrap_or(u64::MAX)
    }

    /// What a scrape shows.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let max = self.settings.limits.requests_pending_max as usize;
        Snapshot {
            uptime: self.uptime(),
            ready: self.not_ready().is_none(),
            draining: self.draining.is_cancelled(),
            requests_pending: max.saturating_sub(self.requests.available_permits()) as u64
                + self.sessions.ring_requests_pending(),
            totals: self.sessions.totals(),
        }
    }

    /// Counts a refusal, and logs it unless there were too many.
    pub(crate) fn refused(&self, what: &'static str, refusal: &Refusal) {
        self.metrics.refused(refusal.code());
        if let Some(suppressed) = self.take_line(&self.bad_request_lines) {
            tracing::warn!(
                what,
                code = refusal.code().label(),
                subject = %refusal.subject().escape_debug(),
                suppressed,
                "refused: {}",
                refusal.sentence().escape_debug()
            );
        }
    }

    /// Logs what was found in a worker's ring, unless there were too many such lines.
    pub(crate) fn ring_broken(&self, session: SessionId, found: &str) {
        if let Some(suppressed) = self.take_line(&self.bad_request_lines) {
            tracing::warn!(%session, found, suppressed, "a worker's ring makes no sense any more");
        }
    }

    /// Whether a session's coming or going may be logged now, and how many were not since the last one.
    pub(crate) fn session_line(&self) -> Option<u64> {
        self.take_line(&self.session_lines)
    }

    fn take_line(&self, lines: &Mutex<TokenBucket>) -> Option<u64> {
        let taken = lines.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now());
        if taken.is_none() {
            self.metrics.log_line_suppressed();
        }
        taken
    }

    /// Sends an event to every session that it concerns.
    pub(crate) fn send_event(&self, event: &v1::Event, concerns: impl Fn(&DeviceHandle) -> bool) {
        let lost = self.sessions.send_event(event, concerns);
        self.metrics.event_streams_lost(lost);
    }
}
