//! Whether a daemon answers while a case keeps it busy.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use statecopy_client::Address;
use statecopy_client::blocking::Admin;
use statecopy_tests::get;

use crate::daemon::Daemon;

/// Ten times what health and metrics may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

/// A thread that asks a daemon for health, metrics and its state again and again.
#[derive(Debug)]
pub(crate) struct Watch {
    over: Sender<()>,
    thread: JoinHandle<Result<(u64, Duration)>>,
}

impl Watch {
    /// Begins to ask a daemon that was started to be shown.
    pub(crate) fn of(daemon: &Daemon) -> Result<Self> {
        let http_address = daemon.inspect()?.http_address;
        let admin = Admin::connect(Address::of_socket(daemon.socket())?, ANSWER_WITHIN)?;
        let (over, end) = channel();
        let thread = thread::Builder::new().name("watch".to_owned());
        Ok(Self { over, thread: thread.spawn(move || ask(&http_address, &admin, &end))? })
    }

    /// Ends, and says how long the slowest answer took.
    pub(crate) fn end(self) -> Result<String> {
        drop(self.over);
        let (rounds, slowest) = self.thread.join().map_err(|_| anyhow!("the watch panicked"))??;
        ensure!(rounds > 0, "nothing was asked");
        let slowest = slowest.as_secs_f64() * 1e3;
        Ok(format!(
            "health, metrics and inspect answered {rounds} times, the slowest after {slowest:.1} ms"
        ))
    }
}

/// Asks until the end; gives how often, and what the slowest answer took.
fn ask(http_address: &str, admin: &Admin, end: &Receiver<()>) -> Result<(u64, Duration)> {
    let (mut rounds, mut slowest) = (0, Duration::ZERO);
    while end.try_recv() == Err(TryRecvError::Empty) {
        for path in ["/healthz", "/metrics", "inspect"] {
            let asked = Instant::now();
            if path == "inspect" {
                admin.inspect()?;
            } else {
                let status = get(http_address, path)?.status;
                ensure!(status == 200, "{path} answered {status}");
            }
            let took = asked.elapsed();
            ensure!(took < ANSWER_WITHIN, "{path} answered after {took:?}");
            slowest = slowest.max(took);
        }
        rounds += 1;
        thread::sleep(PAUSE);
    }
    Ok((rounds, slowest))
}
