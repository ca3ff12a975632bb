//! The settings that flags can give.

use std::path::PathBuf;

use clap::Arg;

use super::{DeviceName, LogFormat, Settings};

/// The file that is read when no flag names one, if it is there.
pub(super) const DEFAULT_FILE: &str = "/etc/statecopy/statecopyd.toml";

/// The settings that flags can give. A flag that was not given is `None` or empty.
///
/// Each is named for its setting, of which its help takes the default.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(mut_args(with_default))]
pub struct Flags {
    /// A file in place of the usual one.
    #[arg(long, value_name = "FILE", help = format!("Read this file [default: {DEFAULT_FILE}, where it is there]"))]
    pub config: Option<PathBuf>,
    /// Directory of the sockets and of the lock
    #[arg(long, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// Serve this device: host, cuda:ORDINAL or cuda:UUID; may repeat
    #[arg(long = "device", value_name = "DEVICE")]
    pub devices: Vec<DeviceName>,
    /// Address of /metrics, /healthz and /readyz, or "off"
    #[arg(long, value_name = "ADDRESS")]
    pub http_address: Option<String>,
    /// Let this user open sessions, beside the daemon's own and root; may repeat
    #[arg(long = "allow-uid", value_name = "UID")]
    pub allow_uids: Vec<u32>,
    /// How long accepted copies may take to finish once the daemon drains
    #[arg(long, value_name = "MS")]
    pub drain_grace_ms: Option<u32>,
    /// Threads that copy on the host device
    #[arg(long, value_name = "COUNT")]
    pub copy_threads: Option<u32>,
    /// How long the executor spins for the next request before it sleeps
    #[arg(long, value_name = "US")]
    pub spin_us: Option<u32>,
    /// Let the executor never sleep
    #[arg(long)]
    pub busy_poll: bool,
    /// The CPU that the executor stays on
    #[arg(long, value_name = "CPU")]
    pub executor_cpu: Option<u32>,
    /// End the device process when something is compiled, or the environment or allocator entered, after a seal
    #[arg(long)]
    pub abort_after_seal: bool,
    /// Form of a log line
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
    /// error, warn, info, debug or trace, or filters for single modules
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
}

/// Adds to a flag's help what holds without it.
fn with_default(flag: Arg) -> Arg {
    let id = flag.get_id().as_str();
    // A flag is named for its key, with or without the table.
    let named = |key: &String| key.replace('.', "_") == id || key.rsplit('.').next() == Some(id);
    let Some(key) = Settings::keys().into_iter().find(named) else { return flag };
    let help = flag.get_help().map(ToString::to_string).unwrap_or_default();
    let default = Settings::default_of(&key);
    flag.help(format!("{help} [default: {default}]"))
}

impl Flags {
    /// Key, flag and value of each that was given.
    pub(super) fn values(&self) -> Vec<(&'static str, &'static str, config::Value)> {
        let mut values: Vec<(&'static str, &'static str, config::Value)> = Vec::new();
        let mut put = |key, flag, value: Option<config::Value>| {
            values.extend(value.map(|value| (key, flag, value)));
        };
        let path = self.runtime_dir.as_ref().map(|path| path.to_string_lossy().into_owned());
        put("runtime_dir", "--runtime-dir", path.map(Into::into));
        let devices: Vec<String> = self.devices.iter().map(DeviceName::to_string).collect();
        put("devices", "--device", (!devices.is_empty()).then(|| devices.into()));
        put("http_address", "--http-address", self.http_address.clone().map(Into::into));
        let uids = self.allow_uids.clone();
        put("allow_uids", "--allow-uid", (!uids.is_empty()).then(|| uids.into()));
        put("drain_grace_ms", "--drain-grace-ms", self.drain_grace_ms.map(Into::into));
        put("copy_threads", "--copy-threads", self.copy_threads.map(Into::into));
        put("spin_us", "--spin-us", self.spin_us.map(Into::into));
        put("busy_poll", "--busy-poll", self.busy_poll.then(|| true.into()));
        put("executor_cpu", "--executor-cpu", self.executor_cpu.map(Into::into));
        let abort = self.abort_after_seal.then(|| true.into());
        put("debug.abort_after_seal", "--abort-after-seal", abort);
        put("log.format", "--log-format", self.log_format.map(|format| format.label().into()));
        put("log.level", "--log-level", self.log_level.clone().map(Into::into));
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_of_a_value_is_one_of_the_command() {
        let all = Flags {
            config: None,
            runtime_dir: Some("/run".into()),
            devices: vec![DeviceName::Host],
            http_address: Some("off".to_owned()),
            allow_uids: vec![7],
            drain_grace_ms: Some(1),
            copy_threads: Some(1),
            spin_us: Some(1),
            busy_poll: true,
            executor_cpu: Some(0),
            abort_after_seal: true,
            log_format: Some(LogFormat::Json),
            log_level: Some("info".to_owned()),
        };
        let command = <Flags as clap::Args>::augment_args(clap::Command::new("statecopyd"));
        let known: Vec<String> = command
            .get_arguments()
            .filter_map(Arg::get_long)
            .map(|long| format!("--{long}"))
            .collect();
        let values = all.values();
        // All but --config.
        assert_eq!(values.len(), known.len() - 1);
        for (key, flag, _) in values {
            assert!(known.iter().any(|it| it == flag), "{key}: {flag}");
        }
    }
}
