//! The executor's view of the sessions: their tables, and the hooks that were seen.

use std::hash::BuildHasherDefault;
use std::sync::Arc;

use statecopy_kernels::device::{Device, Launcher};
use statecopy_proto::SessionId;

use crate::sync::{AtomicU64, Ordering};

use super::ids::ById;
use super::table::SessionTable;

/// Sessions that the map has room for before it grows.
const SESSIONS_ROOM: usize = 1024;

/// The tables by session. Changed only by the preparing thread's commands.
#[derive(Debug)]
pub(super) struct Sessions<D: Device> {
    tables: ById<SessionId, Arc<SessionTable<D>>>,
    hook_epoch: Arc<AtomicU64>,
}

impl<D: Device> Sessions<D> {
    pub(super) fn new(hook_epoch: Arc<AtomicU64>) -> Self {
        let tables = ById::with_capacity_and_hasher(SESSIONS_ROOM, BuildHasherDefault::default());
        Self { tables, hook_epoch }
    }

    pub(super) fn table(&self, session: SessionId) -> Option<&Arc<SessionTable<D>>> {
        self.tables.get(&session)
    }

    /// Puts a session's new table in place; gives back the old one.
    pub(super) fn install(
        &mut self,
        session: SessionId,
        table: Arc<SessionTable<D>>,
    ) -> Option<Arc<SessionTable<D>>> {
        self.tables.insert(session, table)
    }

    /// Takes a session's table away.
    pub(super) fn remove(&mut self, session: SessionId) -> Option<Arc<SessionTable<D>>> {
        self.tables.remove(&session)
    }

    /// Looks for a hook on the launch path (one load), and tells how often one was seen. What was sealed before the last
    /// sighting refuses.
    pub(super) fn look_for_hooks(&self, launcher: &D::Launcher) -> u64 {
        if launcher.hooked() {
            self.hook_epoch.fetch_add(1, Ordering::AcqRel) + 1
        } else {
            self.hook_epoch()
        }
    }

    /// How often a hook was seen.
    pub(super) fn hook_epoch(&self) -> u64 {
        self.hook_epoch.load(Ordering::Acquire)
    }
}
