//! The rules that a configuration obeys, and what is said when it does not.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use rustix::thread::CpuSet;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::Settings;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("Configuration file {} cannot be read: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// A value has the wrong type, or a key is unknown. The text names file or variable, key and value.
    #[error("Configuration: {0}")]
    Value(String),
    /// A value breaks its rule.
    #[error("Configuration: {key} = {value}{}: {rule}", of_source(source_name.as_deref()))]
    Rule {
        /// The setting.
        key: &'static str,
        /// Its value.
        value: String,
        /// Where it was given: a flag, a variable or a file. `None` where nobody gave it.
        source_name: Option<String>,
        /// What it must be.
        rule: String,
    },
}

impl ConfigError {
    /// Says where the value was given that breaks its rule.
    pub(super) fn given(mut self, source_of: impl FnOnce(&str) -> Option<String>) -> Self {
        if let Self::Rule { key, source_name, .. } = &mut self {
            *source_name = source_of(key);
        }
        self
    }
}

/// Where HTTP is served, if at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HttpAddress {
    /// Nowhere.
    Off,
    /// There.
    At(SocketAddr),
}

/// More threads than any machine has CPUs to copy with.
const COPY_THREADS_MAX: u64 = 1024;

impl Settings {
    /// Checks every rule.
    ///
    /// # Errors
    /// The first rule that a value breaks, with the key, the value and the limit.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.http()?;
        if self.devices.is_empty() {
            return rule("devices", "[]", "must name at least one device");
        }
        for (at, device) in self.devices.iter().enumerate() {
            if self.devices[..at].contains(device) {
                return rule("devices", device, "must name each device once");
            }
        }
        for (key, directory) in self.directories() {
            if !directory.is_absolute() {
                return rule(key, directory.display(), "must be an absolute path");
            }
        }
        if !self.slots.is_power_of_two() || !(2..=1024).contains(&self.slots) {
            return rule("slots", self.slots, "must be a power of two from 2 to 1024");
        }
        if !self.session_slots.is_power_of_two() || !(2..=1024).contains(&self.session_slots) {
            let range = "must be a power of two from 2 to 1024";
            return rule("session_slots", self.session_slots, range);
        }
        if !self.lane_slots.is_power_of_two() || !(2..=4096).contains(&self.lane_slots) {
            return rule("lane_slots", self.lane_slots, "must be a power of two from 2 to 4096");
        }
        if self.spin_us > 1_000_000 {
            return rule("spin_us", self.spin_us, "must be 0 to 1000000");
        }
        if !is_filter(&self.log.level) {
            let levels = "must be error, warn, info, debug or trace, or a list of filters";
            return rule("log.level", &self.log.level, levels);
        }
        self.check_ranges()
    }

    fn directories(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let stores = self.artifact_stores.iter().map(|store| ("artifact_stores", &**store));
        let nvrtc = self.cuda.nvrtc_directory.as_deref();
        [("runtime_dir", &*self.runtime_dir), ("artifact_store", &*self.artifact_store)]
            .into_iter()
            .chain(stores)
            .chain(nvrtc.map(|directory| ("cuda.nvrtc_directory", directory)))
    }

    fn check_ranges(&self) -> Result<(), ConfigError> {
        let limits = &self.limits;
        let copy_threads = self.copy_threads.map_or(1, |threads| threads.get() as u64);
        if let Some(cpu) = self.executor_cpu.filter(|cpu| *cpu >= CpuSet::MAX_CPU) {
            let range = format!("must be 0 to {}", CpuSet::MAX_CPU - 1);
            return rule("executor_cpu", cpu, range);
        }
        if !(1 << 16..=1 << 40).contains(&self.launch_bytes_max) {
            let range = "must be 65536 to 1099511627776";
            return rule("launch_bytes_max", self.launch_bytes_max, range);
        }
        for (key, value, max) in [
            ("drain_grace_ms", u64::from(self.drain_grace_ms), 3_600_000),
            ("default_deadline_ms", self.default_deadline_ms.into(), 3_600_000),
            ("register_deadline_ms", self.register_deadline_ms.into(), 86_400_000),
            ("attach_timeout_ms", self.attach_timeout_ms.into(), 600_000),
            ("limits.sessions_max", limits.sessions_max.into(), 65_536),
            ("limits.regions_max", limits.regions_max.into(), 65_536),
            ("limits.layers_max", limits.layers_max.into(), 65_536),
            ("limits.pieces_max", limits.pieces_max.into(), 65_536),
            ("limits.descriptors_pending_max", limits.descriptors_pending_max.into(), 65_536),
            ("limits.region_bytes_max", limits.region_bytes_max, 1 << 62),
            ("limits.selected_max", limits.selected_max, 1 << 20),
            ("limits.graph_slots_max", limits.graph_slots_max.into(), 1 << 20),
            ("cuda.driver_timeout_ms", self.cuda.driver_timeout_ms.into(), 600_000),
            ("limits.requests_pending_max", limits.requests_pending_max.into(), 65_536),
            ("copy_threads", copy_threads, COPY_THREADS_MAX),
        ] {
            if !(1..=max).contains(&value) {
                return rule(key, value, format!("must be 1 to {max}"));
            }
        }
        Ok(())
    }

    /// Where HTTP is served.
    ///
    /// # Errors
    /// When it is neither "off" nor an address, or one that other machines reach without `http_public`.
    pub(crate) fn http(&self) -> Result<HttpAddress, ConfigError> {
        if self.http_address == "off" {
            return Ok(HttpAddress::Off);
        }
        let Ok(address) = self.http_address.parse::<SocketAddr>() else {
            let form = "must be an address like 127.0.0.1:9464, or \"off\"";
            return rule("http_address", &self.http_address, form);
        };
        if !address.ip().is_loopback() && !self.http_public {
            let loopback = "must be a loopback address unless http_public = true";
            return rule("http_address", address, loopback);
        }
        Ok(HttpAddress::At(address))
    }
}

fn rule<T>(
    key: &'static str,
    value: impl std::fmt::Display,
    rule: impl Into<String>,
) -> Result<T, ConfigError> {
    let (value, rule) = (format!("{value}"), rule.into());
    Err(ConfigError::Rule { key, value, source_name: None, rule })
}

fn of_source(source: Option<&str>) -> String {
    source.map(|source| format!(" of {source}")).unwrap_or_default()
}

/// Whether it is a filter of log lines that was meant as one: a word alone is a level, and no module that nobody has.
fn is_filter(level: &str) -> bool {
    let meant = |part: &str| {
        let part = part.trim();
        part.contains(['=', '[']) || !part.is_empty() && part.parse::<LevelFilter>().is_ok()
    };
    level.split(',').all(meant) && level.parse::<EnvFilter>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DeviceName;

    fn refused(change: impl FnOnce(&mut Settings)) -> String {
        let mut settings = Settings::default();
        change(&mut settings);
        settings.check().unwrap_err().to_string()
    }

    #[test]
    fn the_defaults_obey_every_rule() {
        Settings::default().check().unwrap();
    }

    #[test]
    fn a_broken_rule_names_key_value_and_limit() {
        let text = refused(|settings| settings.limits.layers_max = 0);
        assert_eq!(text, "Configuration: limits.layers_max = 0: must be 1 to 65536");
        let text = refused(|settings| settings.slots = 1000);
        assert_eq!(text, "Configuration: slots = 1000: must be a power of two from 2 to 1024");
        let text = refused(|settings| settings.devices = vec![DeviceName::Host; 2]);
        assert!(text.contains("devices = host"), "{text}");
        for level in ["loud", "", "info,loud"] {
            let text = refused(|settings| settings.log.level = level.to_owned());
            assert!(text.contains("log.level = "), "{text}");
        }
        let text = refused(|settings| settings.log.level = "statecopyd=loud".to_owned());
        assert!(text.contains("log.level = statecopyd=loud"), "{text}");
        let text = refused(|settings| settings.runtime_dir = "run".into());
        assert!(text.contains("runtime_dir = run"), "{text}");
        let text = refused(|settings| settings.artifact_stores = vec!["/a".into(), "b".into()]);
        assert!(text.contains("artifact_stores = b"), "{text}");
    }

    #[test]
    fn http_is_served_on_loopback_unless_told_otherwise() {
        let text = refused(|settings| settings.http_address = "0.0.0.0:9464".to_owned());
        assert!(text.contains("0.0.0.0:9464"), "{text}");
        let text = refused(|settings| settings.http_address = "localhost".to_owned());
        assert!(text.contains("localhost"), "{text}");
        let mut settings = Settings { http_address: "0.0.0.0:1".to_owned(), ..Settings::default() };
        settings.http_public = true;
        assert!(matches!(settings.http(), Ok(HttpAddress::At(_))));
        settings.http_address = "off".to_owned();
        assert_eq!(settings.http().unwrap(), HttpAddress::Off);
    }
}
