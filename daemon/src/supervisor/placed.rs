//! Connections that give their place back at their end.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;
use tonic::transport::server::{Connected, UdsConnectInfo};

/// How long to wait after an accept that failed: it fails again until descriptors are given back.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A connection in one of a bounded number of places.
#[derive(Debug)]
pub(crate) struct Placed<S> {
    stream: S,
    /// When it is cut, if it is.
    end: Option<Pin<Box<Sleep>>>,
    _place: OwnedSemaphorePermit,
}

impl<S> Placed<S> {
    /// A connection that may stay.
    pub(crate) fn new(stream: S, place: OwnedSemaphorePermit) -> Self {
        Self { stream, end: None, _place: place }
    }

    /// A connection that is cut after that time, whatever its peer does.
    pub(crate) fn for_at_most(stream: S, place: OwnedSemaphorePermit, time: Duration) -> Self {
        let end = Some(Box::pin(tokio::time::sleep(time)));
        Self { stream, end, _place: place }
    }
}

impl Connected for Placed<UnixStream> {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Placed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(end) = &mut self.end
            && end.as_mut().poll(cx).is_ready()
        {
            self.end = None;
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Placed<S> {
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
