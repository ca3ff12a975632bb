//! The control socket: gRPC connections, as many as there is room for.

use std::io;
use std::sync::Arc;

use statecopy_proto::{Refusal, RefusalCode};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc};

use super::control::Control;
use super::placed::{ACCEPT_PAUSE, Placed};

/// Connections of a session: its own, and one for an operator's command.
const CONNECTIONS_A_SESSION: usize = 2;
/// Connections beside those of the sessions.
const CONNECTIONS_BESIDE: usize = 32;
/// Connections of users that may not call: each is told so, and none keeps others out.
const STRANGERS_MAX: usize = 16;
/// Connections that wait for the server to take them.
pub(crate) const ACCEPTED_MAX: usize = 16;

/// Accepts connections until the daemon stops.
pub(crate) async fn accept(
    control: Arc<Control>,
    listener: UnixListener,
    accepted: mpsc::Sender<io::Result<Placed<UnixStream>>>,
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
        if accepted.send(Ok(Placed::new(stream, place))).await.is_err() {
            return;
        }
    }
}

fn refuse(control: &Control, sentence: String) {
    control.refused("control socket", &Refusal::new(RefusalCode::QuotaExceeded, sentence));
}
