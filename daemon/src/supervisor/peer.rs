//! Who calls.

use statecopy_proto::{Refusal, RefusalCode};
use tonic::transport::server::UdsConnectInfo;

/// The process at the other end of a control connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Its user.
    pub(crate) uid: u32,
    /// Its process, where this PID namespace sees it.
    pub(crate) pid: Option<u32>,
}

/// The users that may call: the daemon's own, root, and those of the configuration.
#[derive(Debug, Clone)]
pub(crate) struct AllowedUsers {
    own: u32,
    others: Vec<u32>,
}

impl AllowedUsers {
    /// The daemon's user, root, and others.
    pub(crate) fn new(own: u32, others: Vec<u32>) -> Self {
        Self { own, others }
    }

    /// Whether a user may call.
    ///
    /// # Errors
    /// PERMISSION_DENIED naming the user.
    pub(crate) fn check(&self, uid: u32) -> Result<(), Refusal> {
        if uid == self.own || uid == 0 || self.others.contains(&uid) {
            return Ok(());
        }
        let sentence = format!("User {uid} is not allowed: this daemon runs as user {}", self.own);
        Err(Refusal::new(RefusalCode::PermissionDenied, sentence).about("allow_uids"))
    }

    /// Whether a caller may end the daemon: its own user and root.
    pub(crate) fn may_drain(&self, caller: Caller) -> bool {
        caller.uid == self.own || caller.uid == 0
    }

    /// The caller of a gRPC request.
    ///
    /// # Errors
    /// PERMISSION_DENIED when the kernel does not say who it is, or it may not call.
    pub(crate) fn caller<T>(&self, request: &tonic::Request<T>) -> Result<Caller, Refusal> {
        let credentials = request
            .extensions()
            .get::<UdsConnectInfo>()
            .and_then(|connection| connection.peer_cred)
            .ok_or_else(unreadable)?;
        self.check(credentials.uid())?;
        let pid = credentials.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid != 0);
        Ok(Caller { uid: credentials.uid(), pid })
    }
}

/// The refusal of a peer that the kernel does not name.
pub(crate) fn unreadable() -> Refusal {
    Refusal::new(RefusalCode::PermissionDenied, "The caller's credentials cannot be read")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_root_and_configured_users_are_allowed_and_nobody_else() {
        let users = AllowedUsers::new(1000, vec![1001]);
        for uid in [1000, 0, 1001] {
            assert_eq!(users.check(uid), Ok(()));
        }
        let refusal = users.check(1002).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::PermissionDenied);
        assert!(refusal.sentence().contains("1002"), "{refusal}");
    }

    #[test]
    fn a_caller_without_readable_credentials_is_refused() {
        let users = AllowedUsers::new(1000, Vec::new());
        let refusal = users.caller(&tonic::Request::new(())).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::PermissionDenied);
    }
}
