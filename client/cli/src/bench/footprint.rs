//! What a daemon costs while nobody asks for anything: private memory, memory a session, CPU time.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use statecopy_client::blocking::{Admin, Client};
use statecopy_descriptors::raise_descriptor_limit;

use super::machine::{cpu_time, rss_anon_kib};
use super::statistics::slope;
use crate::ask::ADMIN_TIMEOUT;
use crate::cli::connect_options;
use crate::spawn::OwnDaemon;

/// Sessions between two looks.
const SESSIONS_PER_LOOK: usize = 10;

/// What was seen.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Footprint {
    /// Private memory (RssAnon) of supervisor and device process together, right after the start, without a session.
    pub(super) idle_daemon_rss_anon_kib: u64,
    /// CPU time of both while one attached session asks for nothing, in percent of one CPU.
    pub(super) idle_cpu_percent: f64,
    /// How long that was looked at.
    pub(super) idle_s: f64,
    /// Sessions that were opened, attached, held together, and then closed.
    pub(super) sessions: usize,
    /// Private memory of both over the number of sessions held: the slope of the straight line.
    pub(super) growth_kib_per_session: f64,
    /// What of it stayed when all of them were closed, divided by their number.
    pub(super) left_kib_per_session: f64,
    /// Sessions held, and private memory of both in KiB.
    pub(super) rss_anon_kib: Vec<(usize, u64)>,
}

/// The two processes of a daemon.
#[derive(Debug, Clone, Copy)]
struct Processes {
    supervisor: u32,
    device: u32,
}

impl Processes {
    fn rss_anon_kib(self) -> anyhow::Result<u64> {
        Ok(rss_anon_kib(self.supervisor)? + rss_anon_kib(self.device)?)
    }

    fn cpu_time(self) -> anyhow::Result<Duration> {
        Ok(cpu_time(self.supervisor)? + cpu_time(self.device)?)
    }
}

/// Starts a daemon of its own and looks at it.
///
/// # Errors
/// When the daemon refuses or a process cannot be looked at.
pub(super) fn look(sessions: usize, idle: Duration) -> anyhow::Result<Footprint> {
    raise_descriptor_limit().context("More descriptors")?;
    let room = (sessions + 1).to_string();
    let daemon = OwnDaemon::start_with(&[("STATECOPY_LIMITS__SESSIONS_MAX", room.as_str())])?;
    let address = daemon.address().clone();
    let admin = Admin::connect(address.clone(), ADMIN_TIMEOUT)?;
    let reply = admin.inspect()?;
    let device = reply.devices.first().context("The daemon has no device")?;
    let processes =
        Processes { supervisor: reply.supervisor_pid, device: device.device_process_pid };
    let idle_daemon_rss_anon_kib = processes.rss_anon_kib()?;

    let connect =
        || Client::connect(address.clone(), connect_options("footprint".to_owned(), None));
    let mut held = vec![connect()?];
    let (idle_s, idle_cpu_percent) = idle_cpu(processes, idle)?;
    let mut seen = vec![(held.len(), processes.rss_anon_kib()?)];
    while held.len() < sessions {
        held.push(connect()?);
        if held.len().is_multiple_of(SESSIONS_PER_LOOK) {
            seen.push((held.len(), processes.rss_anon_kib()?));
        }
    }
    let first = seen.first().map_or(0, |look| look.1);
    for client in held.drain(1..) {
        client.close()?;
    }
    let left = processes.rss_anon_kib()?.saturating_sub(first);
    drop(held);
    drop(admin);
    daemon.stop()?;
    let points: Vec<(f64, f64)> =
        seen.iter().map(|(count, kib)| (*count as f64, *kib as f64)).collect();
    Ok(Footprint {
        idle_daemon_rss_anon_kib,
        idle_cpu_percent,
        idle_s,
        sessions,
        growth_kib_per_session: slope(&points),
        left_kib_per_session: left as f64 / sessions as f64,
        rss_anon_kib: seen,
    })
}

/// Seconds looked, and percent of one CPU.
fn idle_cpu(processes: Processes, idle: Duration) -> anyhow::Result<(f64, f64)> {
    // What the last call left to do is done within that.
    thread::sleep(idle / 5);
    let (start, before) = (Instant::now(), processes.cpu_time()?);
    thread::sleep(idle);
    let (took, used) = (start.elapsed(), processes.cpu_time()?.saturating_sub(before));
    Ok((took.as_secs_f64(), used.as_secs_f64() / took.as_secs_f64() * 100.0))
}
