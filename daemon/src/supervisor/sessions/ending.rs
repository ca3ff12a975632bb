//! The end of a session: everything that it owned is given back.

use std::sync::Arc;

use statecopy_proto::SessionId;
use tokio::time::Instant;

use super::{Ended, Grant};
use crate::supervisor::control::Control;

/// Ends a session that is not attached in time. Returns when it is attached or over.
pub(crate) async fn watch_attach(control: Arc<Control>, grant: Grant, until: Instant) {
    tokio::select! {
        () = grant.over.cancelled() => {}
        () = tokio::time::sleep_until(until) => {
            if let Some(ended) = control.sessions.expire(grant.id, until.into_std()) {
                end_session(control, ended).await;
            }
        }
    }
}

/// Gives back what a session owned. Returns when nothing of it is left.
pub(crate) async fn end_session(control: Arc<Control>, ended: Ended) {
    let Ended { id, reason, device, turn, held, given_back } = ended;
    control.metrics.session_ended(&reason);
    if let Some(suppressed) = control.session_line() {
        tracing::info!(session = id.0, reason = reason.label(), suppressed, "session ended");
    }
    // A registration that runs comes to its own end first; whoever comes later in the turn finds no session.
    let _turn = turn.acquire().await;
    close_on_device(id, &device).await;
    given_back.send_replace(Some(reason));
    // Descriptors of foreign file systems may take long to close.
    let _ = tokio::task::spawn_blocking(move || drop(held)).await;
}

async fn close_on_device(id: SessionId, device: &crate::supervisor::device::DeviceHandle) {
    if let Err(refusal) = device.close_session(id).await {
        // The device process is gone for good, and with it what it had mapped.
        tracing::warn!(session = id.0, %refusal, "the device process did not close a session");
    }
}
