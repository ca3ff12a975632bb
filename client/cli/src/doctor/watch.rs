//! The parent of the child that tries the driver: it listens, and ends the child where that falls silent.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use statecopy_kernels::cuda::CudaSelector;
use statecopy_kernels::findings::told::{Ending, Event, Probed};
use statecopyd::config::DeviceName;

use super::probe::Libraries;
use crate::spawn;

/// How long a killed child may take to be gone.
const KILLED_MAX: Duration = Duration::from_secs(5);
/// Lines that wait to be read.
const LINES_HELD: usize = 64;

/// Lets a child try the driver. Each of its steps may take `deadline`.
///
/// # Errors
/// When it cannot be started.
pub(super) fn try_driver(
    libraries: &Libraries,
    device: Option<CudaSelector>,
    deadline: Duration,
) -> anyhow::Result<Probed> {
    let mut command = spawn::again("doctor-probe");
    command.arg("--driver-library").arg(&libraries.driver);
    if let Some(directory) = &libraries.nvrtc_directory {
        command.arg("--nvrtc-directory").arg(directory);
    }
    if let Some(selector) = device {
        let name = selector.to_string();
        command.arg("--device").arg(name.strip_prefix("cuda:").unwrap_or(&name));
    }
    // As a device process of the daemon has it.
    let any = DeviceName::Cuda(device.unwrap_or(CudaSelector::Ordinal(0)));
    command.envs(any.environment().iter().copied());
    let mut child = command.stdout(Stdio::piped()).spawn().context("Starting the probe")?;
    let lines = child.stdout.take().map(listen).transpose()?;
    let (events, silent) = lines.map_or((Vec::new(), false), |lines| collect(&lines, deadline));
    let ending = if silent { end(&mut child, deadline)? } else { reap(&mut child, deadline)? };
    Ok(Probed { events, ending })
}

/// A thread of its own reads: one that waits for a pipe cannot be given a deadline.
fn listen(from: ChildStdout) -> anyhow::Result<Receiver<Event>> {
    let (told, heard) = sync_channel(LINES_HELD);
    let read = move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            // A driver may print something of its own.
            if let Ok(event) = serde_json::from_str(&line)
                && told.send(event).is_err()
            {
                return;
            }
        }
    };
    let builder = thread::Builder::new().name("probe-reader".to_owned());
    // It ends with the child: nobody else holds the other end of the pipe.
    let _reader = builder.spawn(read).context("Listening to the probe")?;
    Ok(heard)
}

/// Everything that was told, and whether the child then fell silent without an end.
fn collect(lines: &Receiver<Event>, deadline: Duration) -> (Vec<Event>, bool) {
    let mut events = Vec::new();
    loop {
        match lines.recv_timeout(deadline) {
            Ok(event) => events.push(event),
            Err(RecvTimeoutError::Disconnected) => return (events, false),
            Err(RecvTimeoutError::Timeout) => return (events, true),
        }
    }
}

/// The end of a child that has said everything.
fn reap(child: &mut Child, deadline: Duration) -> anyhow::Result<Ending> {
    match spawn::wait_within(child, deadline)? {
        Some(status) => Ok(Ending::Ended(status)),
        None => end(child, deadline),
    }
}

fn end(child: &mut Child, silent: Duration) -> anyhow::Result<Ending> {
    child.kill().context("Killing the probe")?;
    let gone = spawn::wait_within(child, KILLED_MAX)?.is_some();
    Ok(if gone { Ending::Killed(silent) } else { Ending::Stuck(silent) })
}
