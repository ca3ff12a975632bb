//! /metrics, /healthz and /readyz.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::serve::Listener;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::supervisor::control::Control;
use crate::supervisor::placed::{ACCEPT_PAUSE, Placed};

/// The format that Prometheus' text has.
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Connections at once; more wait.
const CONNECTIONS_MAX: usize = 256;
/// How long a connection lives. Whoever keeps one open and silent gives its place back then, long before a probe fails for
/// the third time; a scrape takes milliseconds and connects anew.
const CONNECTION_MAX: Duration = Duration::from_secs(5);

/// A listener with a bounded number of connections.
struct Bounded {
    listener: TcpListener,
    room: Arc<Semaphore>,
}

impl Listener for Bounded {
    type Io = Placed<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            // The semaphore is never closed.
            if let Ok(place) = Arc::clone(&self.room).acquire_owned().await
                && let Ok((stream, peer)) = self.listener.accept().await
            {
                return (Placed::for_at_most(stream, place, CONNECTION_MAX), peer);
            }
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// Serves HTTP until the daemon has drained.
///
/// # Errors
/// What the system says of the listener.
pub(crate) async fn serve(listener: TcpListener, control: Arc<Control>) -> io::Result<()> {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let listener = Bounded { listener, room };
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
