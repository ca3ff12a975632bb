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

/// The daemon's own counters that a report shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    /// Entries of the compiler while plans were sealed: 0, or something is wrong.
    pub(crate) compiles_after_seal: u64,
    /// Copies refused by the executors.
    pub(crate) refusals: u64,
}

impl Counted {
    /// Reads the counters of all devices.
    pub(crate) fn read(reply: &v1::InspectReply) -> Self {
        let counters = reply.devices.iter().flat_map(|device| &device.counters);
        let mut counted = Self::default();
        for counter in counters {
            match counter.name.as_str() {
                "statecopy_entries_while_serving_total" if counter.label.contains("compiler") => {
                    counted.compiles_after_seal += counter.value;
                }
                "statecopy_executor_refusals_total" => counted.refusals += counter.value,
                _ => {}
            }
        }
        counted
    }

    /// What was counted since.
    pub(crate) fn since(self, before: &Self) -> Self {
        Self {
            compiles_after_seal: self
                .compiles_after_seal
                .saturating_sub(before.compiles_after_seal),
            refusals: self.refusals.saturating_sub(before.refusals),
        }
    }
}
