//! /metrics, /healthz and /readyz.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;

use crate::supervisor::control::Control;

/// The format that Prometheus' text has.
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Serves HTTP until the daemon has drained.
///
/// # Errors
/// What the system says of the listener.
pub(crate) async fn serve(listener: TcpListener, control: Arc<Control>) -> std::io::Result<()> {
    let stopped = control.stopped.clone();
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthy))
        .route("/readyz", get(ready))
        .with_state(control);
    axum::serve(listener, routes).with_graceful_shutdown(stopped.cancelled_owned()).await
}

async fn metrics(State(control): State<Arc<Control>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, TEXT_FORMAT)], control.metrics.render(&control.snapshot()))
}

async fn healthy() -> &'static str {
    "alive\n"
}

async fn ready(State(control): State<Arc<Control>>) -> (StatusCode, String) {
    match control.not_ready() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
    }
}
