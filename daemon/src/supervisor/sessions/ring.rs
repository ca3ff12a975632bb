//! The ring that a worker gets when it is attached.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use statecopy_descriptors::Doorbell;
use statecopy_proto::{Refusal, RefusalCode};
use statecopy_session::{Identity, Parameters, SessionMemory};
use tokio::sync::{oneshot, watch};

use super::Grant;
use crate::record::RingRecord;
use crate::supervisor::control::Control;

/// A served ring: what the worker is handed, and how the daemon learns of changes.
#[derive(Debug)]
pub(super) struct WorkerRing {
    pub(super) record: RingRecord,
    /// The device process that serves it.
    pub(super) process: watch::Receiver<Option<Arc<OwnedFd>>>,
    /// Told once it is broken.
    pub(super) broken: oneshot::Receiver<String>,
}

impl WorkerRing {
    /// Makes a session memory and has it served. Its pages are the worker's: whoever touches one first pays for it.
    ///
    /// # Errors
    /// QUOTA_EXCEEDED when the system gives no descriptor or memory, UNAVAILABLE when the device is gone for good.
    pub(super) async fn open(control: &Control, grant: &Grant) -> Result<Self, Refusal> {
        let settings = &control.settings;
        let rows = u32::try_from(settings.limits.selected_max).unwrap_or(u32::MAX);
        let lane_slots = if grant.version.has_lanes() { settings.lane_slots } else { 0 };
        let parameters = Parameters::for_rows(settings.session_slots, rows)
            .and_then(|parameters| parameters.with_lanes(lane_slots))
            .map_err(|error| no_room(&error.to_string()))?;
        let identity = Identity { incarnation: control.incarnation, session: grant.id };
        let (memory, mapped) = SessionMemory::create(parameters, identity)
            .map_err(|error| no_room(&error.to_string()))?;
        let record = RingRecord {
            parameters,
            memory: Arc::new(memory.try_clone_fd().map_err(|error| no_descriptor(&error))?),
            executor_bell: Arc::new(
                Doorbell::create()
                    .and_then(|bell| bell.try_clone_fd())
                    .map_err(|error| no_descriptor(&error))?,
            ),
        };
        let ring = Self {
            record: record.clone(),
            process: grant.device.process(),
            broken: grant.device.broken_ring(grant.id),
        };
        grant.device.open_session(grant.id, record).await?;
        control.sessions.add_ring(grant.id, mapped)?;
        Ok(ring)
    }

    /// The pidfd of the device process that serves the ring now; waits while there is none.
    ///
    /// # Errors
    /// UNAVAILABLE when the device is gone for good.
    pub(super) async fn serving(&mut self) -> Result<Arc<OwnedFd>, Refusal> {
        match self.process.wait_for(Option::is_some).await {
            Ok(process) => Ok(process.clone().ok_or_else(gone)?),
            Err(_) => Err(gone()),
        }
    }

    /// The next news of it. Nothing comes after [`News::Broken`].
    pub(super) async fn news(&mut self) -> News {
        let Self { process, broken, .. } = self;
        tokio::select! {
            process = next_process(process) => News::Process(process),
            Ok(found) = &mut *broken, if !broken.is_terminated() => News::Broken(found),
        }
    }
}

/// What happens to a ring.
#[derive(Debug)]
pub(super) enum News {
    /// Another device process serves it.
    Process(Arc<OwnedFd>),
    /// Its words make no sense: what was found there.
    Broken(String),
}

async fn next_process(process: &mut watch::Receiver<Option<Arc<OwnedFd>>>) -> Arc<OwnedFd> {
    loop {
        if process.changed().await.is_err() {
            // The device is gone for good, and the daemon ends.
            std::future::pending::<()>().await;
        }
        if let Some(process) = process.borrow_and_update().clone() {
            return process;
        }
    }
}

fn gone() -> Refusal {
    Refusal::new(RefusalCode::Unavailable, "The device process is gone and is not started again")
}

fn no_descriptor(error: &io::Error) -> Refusal {
    no_room(&error.to_string())
}

fn no_room(why: &str) -> Refusal {
    let sentence = format!("A ring for the session cannot be made: {why}");
    Refusal::new(RefusalCode::QuotaExceeded, sentence)
        .remedied_by("Raise the daemon's limits of memory and open files (RLIMIT_NOFILE).")
}
