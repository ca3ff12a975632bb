//! The control socket: gRPC connections, as many as there is room for.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use statecopy_proto::{Refusal, RefusalCode};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::transport::server::{Connected, UdsConnectInfo};

use super::control::Control;

/// Connections of a session: its own, and one for an operator's command.
const CONNECTIONS_A_SESSION: usize = 2;
/// Connections beside those of the sessions.
const CONNECTIONS_BESIDE: usize = 32;
/// Connections of users that may not call: each is told so, and none keeps others out.
const STRANGERS_MAX: usize = 16;
/// Connections that wait for the server to take them.
pub(crate) const ACCEPTED_MAX: usize = 16;
/// How long to wait after an accept that failed: it fails again until descriptors are given back.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A connection that gives its place back at its end.
#[derive(Debug)]
pub(crate) struct ControlStream {
    stream: UnixStream,
    _place: OwnedSemaphorePermit,
}

/// Accepts connections until the daemon stops.
pub(crate) async fn accept(
    control: Arc<Control>,
    listener: UnixListener,
    accepted: mpsc::Sender<io::Result<ControlStream>>,
) {
    let sessions_max = control.settings.limits.sessions_max as usize;
    let room = Arc::new(Semaphore::new(sessions_max * CONNECTIONS_A_SESSION + CONNECTIONS_BESIDE));
    let strangers = Arc::new(Semaphore::new(STRANGERS_MAX));
    loop {
        let stream = tokio::select! {
            () = control.stopped.cancelled() => return,
            stream = listener.accept() => match stream {
                Ok((stream, _)) => stream,
                Err(error) => {
                    refuse(&control, format!("A connection cannot be accepted: {error}"));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        let known = stream.peer_cred().is_ok_and(|peer| control.users.check(peer.uid()).is_ok());
        let room = if known { &room } else { &strangers };
        let Ok(place) = Arc::clone(room).try_acquire_owned() else {
            refuse(&control, "There are too many connections to the control socket".to_owned());
            continue;
        };
        if accepted.send(Ok(ControlStream { stream, _place: place })).await.is_err() {
            return;
        }
    }
}

fn refuse(control: &Control, sentence: String) {
    control.refused("control socket", &Refusal::new(RefusalCode::QuotaExceeded, sentence));
}

impl Connected for ControlStream {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for ControlStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for ControlStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
