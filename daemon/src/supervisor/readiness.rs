//! Readiness, as the devices' processes come and go.

use std::sync::Arc;

use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::control::Control;
use super::device::DeviceHandle;
use super::message;
use super::services::SERVICE_NAMES;

/// Tells sessions and health of one device's changes until the daemon stops.
pub(crate) async fn watch_device(control: Arc<Control>, device: DeviceHandle) {
    let uuid = device.description().uuid;
    let mut state = device.state();
    let mut restarts = state.borrow_and_update().restarts;
    loop {
        let changed = tokio::select! {
            () = control.stopped.cancelled() => return,
            changed = state.changed() => changed,
        };
        let now = state.borrow_and_update().clone();
        control.readiness.notify_one();
        if now.failed || changed.is_err() {
            control.failed.cancel();
            return;
        }
        if now.ready && now.restarts != restarts {
            restarts = now.restarts;
            tracing::info!(pid = now.pid, restarts, "the device process was started again");
            let event = message::device_restarted(control.incarnation, &now);
            control.send_event(&event, |device| device.description().uuid == uuid);
        }
    }
}

/// Keeps the standard gRPC health of every service true until the daemon stops.
pub(crate) async fn keep_health(control: Arc<Control>, reporter: HealthReporter) {
    loop {
        let status = match control.not_ready() {
            None => ServingStatus::Serving,
            Some(_) => ServingStatus::NotServing,
        };
        for name in SERVICE_NAMES {
            reporter.set_service_status(name, status).await;
        }
        tokio::select! {
            () = control.stopped.cancelled() => return,
            () = control.readiness.notified() => {}
        }
    }
}
