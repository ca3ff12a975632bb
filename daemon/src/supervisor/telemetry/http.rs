//! /metrics, /healthz and /readyz.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::serve::Listener;
use metrics_exporter_prometheus::BuildError;
use statecopy_kernels::findings::Finding;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::metrics::{Metrics, Snapshot};
use crate::machine::Found;
use crate::supervisor::control::Control;
use crate::supervisor::placed::{ACCEPT_PAUSE, Placed};
use crate::supervisor::sessions::Totals;

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

/// What HTTP shows: the daemon, or that its devices are still being started.
pub(crate) struct Front {
    control: OnceLock<Arc<Control>>,
    /// Cancelled when nothing is served any more.
    pub(crate) stopped: CancellationToken,
    waiting: watch::Receiver<Arc<Found>>,
    metrics: Metrics,
    started: Instant,
}

impl Front {
    /// Before any device serves; `waiting` tells what is in the way.
    ///
    /// # Errors
    /// When a metric cannot be declared.
    pub(crate) fn new(
        host: &[Finding],
        waiting: watch::Receiver<Arc<Found>>,
    ) -> Result<Self, BuildError> {
        Ok(Self {
            control: OnceLock::new(),
            stopped: CancellationToken::new(),
            waiting,
            metrics: Metrics::new(&[], host)?,
            started: Instant::now(),
        })
    }

    /// Every device serves: from now on the daemon is shown.
    pub(crate) fn open(&self, control: &Arc<Control>) {
        // It is opened once.
        self.control.set(Arc::clone(control)).ok();
    }

    fn not_ready(&self) -> Option<String> {
        if let Some(control) = self.control.get() {
            return control.not_ready();
        }
        Some(match self.waiting.borrow().findings.first() {
            Some(Finding { evidence, remedy, .. }) => {
                format!("the devices are being started: {evidence}. {remedy}")
            }
            None => "the devices are being started".to_owned(),
        })
    }

    fn render(&self) -> String {
        if let Some(control) = self.control.get() {
            return control.metrics.render(&control.snapshot());
        }
        let snapshot = Snapshot {
            uptime: self.started.elapsed(),
            ready: false,
            draining: false,
            requests_pending: 0,
            totals: Totals::default(),
        };
        self.metrics.show(None, &self.waiting.borrow().findings);
        self.metrics.render(&snapshot)
    }
}

/// Serves HTTP until the daemon has drained.
///
/// # Errors
/// What the system says of the listener.
pub(crate) async fn serve(listener: TcpListener, front: Arc<Front>) -> io::Result<()> {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let listener = Bounded { listener, room };
    let stopped = front.stopped.clone();
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthy))
        .route("/readyz", get(ready))
        .with_state(front);
    axum::serve(listener, routes).with_graceful_shutdown(stopped.cancelled_owned()).await
}

async fn metrics(State(front): State<Arc<Front>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, TEXT_FORMAT)], front.render())
}

async fn healthy() -> &'static str {
    "alive\n"
}

async fn ready(State(front): State<Arc<Front>>) -> (StatusCode, String) {
    match front.not_ready() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
    }
}
