//! The end of the daemon: what was accepted is finished, nothing new is taken.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::control::Control;
use super::message;
use super::sessions::{EndReason, end_session};

/// How long sessions and device processes may take to end, once the grace is over.
const END_MAX: Duration = Duration::from_secs(3);

/// Drains: readiness off, sessions told, accepted work finished within the grace, everything given back. Whether all of it
/// was.
pub(crate) async fn drain(control: &Arc<Control>) -> bool {
    let grace_ms = control.settings.drain_grace_ms;
    tracing::info!(grace_ms, "draining");
    control.draining.cancel();
    control.readiness.notify_one();
    control.send_event(&message::draining(control.incarnation, grace_ms), |_| true);
    let grace = Duration::from_millis(grace_ms.into());
    let mut finished = tokio::time::timeout(grace, finish(control)).await.is_ok();
    if !finished {
        let pending = control.snapshot().requests_pending;
        tracing::warn!(pending, "the grace is over and requests still run");
    }
    let until = Instant::now() + END_MAX;
    let mut ends = JoinSet::new();
    for ended in control.sessions.close(&EndReason::Draining) {
        ends.spawn(end_session(Arc::clone(control), ended));
    }
    let all = async { while ends.join_next().await.is_some() {} };
    if tokio::time::timeout_at(until, all).await.is_err() {
        finished = false;
        tracing::warn!("sessions did not end in time");
    }
    for device in &control.devices {
        match tokio::time::timeout_at(until, device.shutdown()).await {
            Ok(Ok(())) => {}
            Ok(Err(refusal)) => tracing::warn!(%refusal, "a device process was gone already"),
            Err(_) => {
                finished = false;
                tracing::warn!("a device process did not end in time");
            }
        }
    }
    control.stopped.cancel();
    finished
}

/// Returns when everything that was accepted is answered, over gRPC and in the workers' rings.
async fn finish(control: &Control) {
    control.idle().await;
    for device in &control.devices {
        if let Err(refusal) = device.drain().await {
            tracing::warn!(%refusal, "a device process did not drain");
        }
    }
}
