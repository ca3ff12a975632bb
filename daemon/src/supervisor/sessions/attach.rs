//! The descriptor socket: it ties a session to its worker's life, and brings descriptors.
//!
//! A session lives as long as its worker's process (seen by a pidfd, because a forked child keeps a dead worker's
//! connection open) and as long as its connection, whichever ends first.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use statecopy_descriptors::{
    AsyncConnection, ChannelError, Listener, Peer, PeerError, Received, process_exit,
};
use statecopy_proto::descriptor_socket::{
    DESCRIPTORS_MAX, DaemonRecord, RECORD_BYTES_MAX, WorkerRecord,
};
use statecopy_proto::{Refusal, RefusalCode};
use tokio::sync::Semaphore;

use super::ring::{News, WorkerRing};
use super::{EndReason, Grant, end_session};
use crate::supervisor::control::Control;
use crate::supervisor::peer::unreadable;
use crate::supervisor::placed::ACCEPT_PAUSE;

/// Connections that may wait to be attached, beside those of the sessions.
const UNATTACHED_MAX: usize = 32;
/// How long a worker may take to read an answer before its connection is given up.
const SEND_MAX: Duration = Duration::from_secs(5);

/// Serves the descriptor socket until the daemon stops.
pub(crate) async fn serve_descriptors(control: Arc<Control>, listener: Listener) {
    let sessions_max = control.settings.limits.sessions_max as usize;
    let room = Arc::new(Semaphore::new(sessions_max + UNATTACHED_MAX));
    loop {
        // The semaphore is never closed. Peers past the limit wait in the listener's queue.
        let Ok(place) = Arc::clone(&room).acquire_owned().await else {
            return;
        };
        tokio::select! {
            () = control.stopped.cancelled() => return,
            accepted = listener.accept() => match accepted {
                Ok(connection) => {
                    let control = Arc::clone(&control);
                    control.tasks.clone().spawn(async move {
                        serve_worker(control, connection).await;
                        drop(place);
                    });
                }
                Err(error) => {
                    let sentence = format!("A connection cannot be accepted: {}", chain(&error));
                    let refusal = Refusal::new(RefusalCode::QuotaExceeded, sentence);
                    control.refused("descriptor socket", &refusal);
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
}

/// One connection, from its attach to its end.
async fn serve_worker(control: Arc<Control>, connection: AsyncConnection) {
    let (mut grant, exit) = match attach(&control, &connection).await {
        Ok(attached) => attached,
        Err(refusal) => {
            control.refused("attach", &refusal);
            // The connection is closed next: a worker that does not read learns it from that.
            let _ = send(&connection, &DaemonRecord::refused(&refusal), &[]).await;
            return;
        }
    };
    let reason = tokio::select! {
        () = grant.over.cancelled() => None,
        reason = worker_exit(exit) => Some(reason),
        reason = serve_attached(&control, &grant, &connection) => Some(reason),
    };
    if let Some(ended) = reason.and_then(|reason| control.sessions.end(grant.id, reason)) {
        end_session(control, ended).await;
    }
    tell_end(&mut grant, &connection).await;
}

/// Tells the worker why its session is over, once nothing of it is left: whoever waits for an answer in its ring learns then
/// that none comes.
async fn tell_end(grant: &mut Grant, connection: &AsyncConnection) {
    let reason = match grant.given_back.wait_for(Option::is_some).await {
        Ok(reason) => reason.clone(),
        // A daemon that is cut off did not wait for the device.
        Err(_) => None,
    };
    if let Some(reason) = reason {
        let last = DaemonRecord::SessionEnded { sentence: reason.sentence() };
        // A worker that is dead or does not read needs no answer.
        send(connection, &last, &[]).await.ok();
    }
}

/// Ties the connection to the session whose token it presents.
async fn attach(
    control: &Control,
    connection: &AsyncConnection,
) -> Result<(Grant, Option<OwnedFd>), Refusal> {
    let peer = Peer::of(connection).map_err(|error| match error {
        PeerError::Dead | PeerError::Unreadable(_) => unreadable(),
    })?;
    control.users.check(peer.uid)?;
    let timeout = Duration::from_millis(control.settings.attach_timeout_ms.into());
    let mut buffer = [0; RECORD_BYTES_MAX];
    let received = match tokio::time::timeout(timeout, connection.receive(&mut buffer, 0)).await {
        Ok(received) => received.map_err(|error| bad_message(&error))?,
        Err(_) => {
            let sentence = "No token was presented in time";
            return Err(Refusal::new(RefusalCode::SessionUnknown, sentence));
        }
    };
    let record = buffer.get(..received.bytes).unwrap_or_default();
    let token = match WorkerRecord::decode(record) {
        Ok(WorkerRecord::Attach { token }) => token,
        Ok(WorkerRecord::Descriptors { .. }) => {
            let sentence = "Descriptors came before the session's token";
            return Err(Refusal::new(RefusalCode::PermissionDenied, sentence));
        }
        Err(error) => return Err(invalid(error.to_string())),
    };
    let grant = control.sessions.attach(&token, peer.uid, peer.pid, Instant::now())?;
    Ok((grant, peer.exit))
}

/// Returns when the worker's process is dead; never where the kernel cannot tell.
async fn worker_exit(exit: Option<OwnedFd>) -> EndReason {
    match exit {
        Some(exit) => match process_exit(exit).await {
            Ok(()) => EndReason::WorkerDied,
            Err(error) => {
                tracing::warn!(%error, "a worker's process cannot be watched; its connection is");
                std::future::pending().await
            }
        },
        None => std::future::pending().await,
    }
}

/// Takes descriptors until the connection ends.
async fn serve_attached(
    control: &Control,
    grant: &Grant,
    connection: &AsyncConnection,
) -> EndReason {
    let mut ring = match hand_over(control, grant, connection).await {
        Ok(ring) => ring,
        Err(refusal) => {
            control.refused("attach", &refusal);
            send(connection, &DaemonRecord::refused(&refusal), &[]).await.ok();
            return EndReason::ConnectionEnded;
        }
    };
    loop {
        let mut buffer = [0; RECORD_BYTES_MAX];
        let received = tokio::select! {
            received = connection.receive(&mut buffer, DESCRIPTORS_MAX as usize) => received,
            news = ring.news() => match news {
                News::Broken(found) => {
                    control.ring_broken(grant.id, &found);
                    return EndReason::RingBroken(found.into());
                }
                News::Process(process) => {
                    let process = [process.as_fd()];
                    if send(connection, &DaemonRecord::DeviceProcess, &process).await.is_err() {
                        return EndReason::ConnectionEnded;
                    }
                    continue;
                }
            },
        };
        let answer = match received {
            Ok(mut received) => {
                let answer = take(control, grant, &buffer, &mut received);
                // What was not taken may take long to close.
                let _ = tokio::task::spawn_blocking(move || drop(received)).await;
                answer
            }
            Err(
                error @ (ChannelError::MessageTruncated { .. }
                | ChannelError::TooManyDescriptors { .. }),
            ) => Err(bad_message(&error)),
            Err(error @ ChannelError::DescriptorsTruncated) => Err(lost(control, &error)),
            Err(_) => return EndReason::ConnectionEnded,
        };
        let answer = answer.unwrap_or_else(|refusal| {
            control.refused("descriptors", &refusal);
            DaemonRecord::refused(&refusal)
        });
        if send(connection, &answer, &[]).await.is_err() {
            return EndReason::ConnectionEnded;
        }
    }
}

/// Gives the worker its ring: from now on it can ask for copies without a call.
async fn hand_over(
    control: &Control,
    grant: &Grant,
    connection: &AsyncConnection,
) -> Result<WorkerRing, Refusal> {
    let mut ring = WorkerRing::open(control, grant).await?;
    let process = ring.serving().await?;
    let descriptors =
        [ring.record.memory.as_fd(), ring.record.executor_bell.as_fd(), process.as_fd()];
    let sent = send(connection, &DaemonRecord::Attached, &descriptors).await;
    sent.map_err(|error| bad_message(&error))?;
    Ok(ring)
}

fn take(
    control: &Control,
    grant: &Grant,
    buffer: &[u8],
    received: &mut Received,
) -> Result<DaemonRecord, Refusal> {
    let record = buffer.get(..received.bytes).unwrap_or_default();
    let (tag, count) = match WorkerRecord::decode(record) {
        Ok(WorkerRecord::Descriptors { tag, count }) => (tag, count),
        Ok(WorkerRecord::Attach { .. }) => {
            let sentence = "The session is attached already: a token serves once";
            return Err(Refusal::new(RefusalCode::PermissionDenied, sentence));
        }
        Err(error) => return Err(invalid(error.to_string())),
    };
    let came = received.descriptors.len();
    if came != count as usize {
        return Err(invalid(format!(
            "The record announces {count} descriptors under tag {tag}, and {came} came with it"
        )));
    }
    let total = control.sessions.add_descriptors(grant.id, tag, &mut received.descriptors)?;
    Ok(DaemonRecord::Received { tag, total })
}

async fn send(
    connection: &AsyncConnection,
    record: &DaemonRecord,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), ChannelError> {
    let bytes = record.encode();
    match tokio::time::timeout(SEND_MAX, connection.send(&bytes, descriptors)).await {
        Ok(sent) => sent,
        Err(_) => Err(ChannelError::TimedOut),
    }
}

fn bad_message(error: &ChannelError) -> Refusal {
    invalid(chain(error))
}

fn lost(control: &Control, error: &ChannelError) -> Refusal {
    let limit = control.sessions.descriptor_limit();
    let sentence =
        format!("The daemon's limit of open files (RLIMIT_NOFILE = {limit}) is reached: {error}");
    Refusal::new(RefusalCode::QuotaExceeded, sentence)
        .about("RLIMIT_NOFILE")
        .remedied_by("Close sessions, or start the daemon with a higher limit of open files.")
}

fn invalid(sentence: String) -> Refusal {
    Refusal::new(RefusalCode::HandleInvalid, sentence)
}

/// An error and what caused it.
fn chain(error: &ChannelError) -> String {
    let error: &dyn std::error::Error = error;
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
