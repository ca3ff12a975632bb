//! Questions to a running daemon that need no session.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::Serialize;
use statecopy_client::blocking::Admin;
use statecopy_client::v1;

use crate::cli::PingOptions;
use crate::terminal;

/// What `statecopy ping --json` prints.
#[derive(Debug, Serialize)]
struct Pong {
    address: String,
    version: String,
    incarnation: String,
    uptime_ms: u64,
    round_trip_us: u64,
}

/// `statecopy ping`.
///
/// # Errors
/// When the daemon does not answer in time.
pub(crate) fn ping(options: &PingOptions) -> anyhow::Result<ExitCode> {
    let address = options.ask.address()?;
    let admin = Admin::connect(address.clone(), options.ask.timeout())?;
    let start = Instant::now();
    let reply = admin.ping()?;
    let took = start.elapsed();
    let incarnation: String = reply.incarnation.iter().map(|byte| format!("{byte:02x}")).collect();
    let pong = Pong {
        address: address.to_string(),
        version: reply.version,
        incarnation,
        uptime_ms: reply.uptime_ms,
        round_trip_us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
    };
    if options.json {
        terminal::print_json(&pong)?;
    } else {
        terminal::print(&format!(
            "statecopyd {} at {}: incarnation {}, up {} ms, round trip {} us\n",
            pong.version, pong.address, pong.incarnation, pong.uptime_ms, pong.round_trip_us
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// How long the daemon may take to answer an operator's question.
pub(crate) const ADMIN_TIMEOUT: Duration = Duration::from_secs(10);

/// How often compilers were entered while plans were sealed, over all devices: 0, or something is wrong.
pub(crate) fn compiles_while_serving(reply: &v1::InspectReply) -> u64 {
    let counters = reply.devices.iter().flat_map(|device| &device.counters);
    let compiles = counters.filter(|counter| {
        counter.name == "statecopy_entries_while_serving_total" && counter.label == "compiler"
    });
    compiles.map(|counter| counter.value).sum()
}
