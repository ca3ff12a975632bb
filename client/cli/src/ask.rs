//! Questions to a running daemon that need no session.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use statecopy_client::blocking::Admin;
use statecopy_client::v1;

use crate::cli::AskOptions;
use crate::terminal;

/// `statecopy ping`.
///
/// # Errors
/// When the daemon does not answer in time.
pub(crate) fn ping(options: &AskOptions) -> anyhow::Result<ExitCode> {
    let address = options.address()?;
    let admin = Admin::connect(address.clone(), options.timeout())?;
    let start = Instant::now();
    let reply = admin.ping()?;
    let took = start.elapsed();
    let incarnation: String = reply.incarnation.iter().map(|byte| format!("{byte:02x}")).collect();
    terminal::print(&format!(
        "statecopyd {} at {address}: incarnation {incarnation}, up {} ms, round trip {} us\n",
        reply.version,
        reply.uptime_ms,
        took.as_micros()
    ))?;
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
