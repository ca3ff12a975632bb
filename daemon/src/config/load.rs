//! Where settings come from.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use clap::Arg;
use config::builder::{ConfigBuilder, DefaultState};
use config::{Config, File, FileFormat};
use statecopy_kernels::cuda::store::default_directory;

use super::{ConfigError, DeviceName, LogFormat, Settings};

/// The file that is read when no flag names one, if it is there.
const DEFAULT_FILE: &str = "/etc/statecopy/statecopyd.toml";
/// What every variable begins with.
const PREFIX: &str = "STATECOPY_";
/// Variables of the same beginning that belong to clients.
const OF_CLIENTS: [&str; 1] = ["STATECOPY_ADDR"];
/// Between a table and its field in the name of a variable.
const SEPARATOR: &str = "__";

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

/// The effective settings.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// Checked against every rule.
    pub settings: Settings,
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// Variables that begin like a setting and are none.
    pub ignored: Vec<String>,
}

/// Reads the settings. `environment` are the variables of the process.
///
/// # Errors
/// [`ConfigError`], naming file or variable, key, value and limit.
pub fn load(
    flags: &Flags,
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Loaded, ConfigError> {
    let environment: Vec<(String, String)> = environment.into_iter().collect();
    let mut builder = Config::builder();
    for (key, path) in directories(&environment) {
        builder =
            builder.set_default(key, &*path.to_string_lossy()).map_err(|error| refused(&error))?;
    }
    let file = file(flags)?;
    if let Some(path) = &file {
        let text = std::fs::read_to_string(path).map_err(|error| unread(path, &error))?;
        let source = File::from_str(&text, FileFormat::Toml);
        // By itself first: an unknown key is only then told with its file.
        let alone = Config::builder().add_source(source.clone()).build();
        let _: Settings = alone
            .and_then(Config::try_deserialize)
            .map_err(|error| ConfigError::Value(format!("{error} in {}", path.display())))?;
        check_types(path, &text)?;
        builder = builder.add_source(source);
    }
    let variables = Variables::read(&environment);
    for (key, variable, text) in &variables.known {
        builder = over(builder, key, from_text(key, text), variable)?;
    }
    for (key, value) in flag_values(flags) {
        builder = over(builder, key, value, "a flag")?;
    }
    let settings: Settings =
        builder.build().and_then(Config::try_deserialize).map_err(|error| refused(&error))?;
    settings.check()?;
    Ok(Loaded { settings, file, ignored: variables.ignored })
}

/// Refuses a value of another type than its key's: otherwise 1.6 would become 1, and "yes" true, without a word.
fn check_types(path: &Path, text: &str) -> Result<(), ConfigError> {
    let typed: Result<Settings, _> = toml::from_str(text);
    let refused = |error| ConfigError::Value(format!("{}: {error}", path.display()));
    typed.map(drop).map_err(refused)
}

/// The directories that follow from where the user keeps such things.
fn directories(environment: &[(String, String)]) -> Vec<(&'static str, PathBuf)> {
    let set = |name: &str| {
        let (_, value) = environment.iter().find(|(known, _)| known == name)?;
        Some(OsStr::new(value))
    };
    let runtime = set("XDG_RUNTIME_DIR").filter(|directory| !directory.is_empty());
    let runtime = runtime.map(|it| ("runtime_dir", Path::new(it).join("statecopy")));
    let store = default_directory(set("XDG_CACHE_HOME"), set("HOME"));
    runtime.into_iter().chain([("artifact_store", store)]).collect()
}

fn refused(error: &config::ConfigError) -> ConfigError {
    ConfigError::Value(error.to_string())
}

fn file(flags: &Flags) -> Result<Option<PathBuf>, ConfigError> {
    let path = flags.config.as_deref().unwrap_or(Path::new(DEFAULT_FILE));
    match std::fs::metadata(path) {
        Ok(_) => Ok(Some(path.to_owned())),
        Err(error) if flags.config.is_none() && error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unread(path, &error)),
    }
}

fn unread(path: &Path, error: &io::Error) -> ConfigError {
    ConfigError::File { path: path.to_owned(), reason: error.to_string() }
}

type Builder = ConfigBuilder<DefaultState>;

fn over(
    builder: Builder,
    key: &str,
    value: config::Value,
    origin: &str,
) -> Result<Builder, ConfigError> {
    let value = config::Value::new(Some(&origin.to_owned()), value.kind);
    builder.set_override(key, value).map_err(|error| refused(&error))
}

/// The variables that concern the daemon.
struct Variables {
    /// Key, variable, value.
    known: Vec<(String, String, String)>,
    ignored: Vec<String>,
}

impl Variables {
    fn read(environment: &[(String, String)]) -> Self {
        let keys = Settings::keys();
        let mut variables = Self { known: Vec::new(), ignored: Vec::new() };
        for (variable, value) in environment {
            let Some(rest) = variable.strip_prefix(PREFIX) else {
                continue;
            };
            let key = rest.to_ascii_lowercase().replace(SEPARATOR, ".");
            if keys.contains(&key) {
                variables.known.push((key, variable.clone(), value.clone()));
            } else if !OF_CLIENTS.contains(&variable.as_str()) {
                variables.ignored.push(variable.clone());
            }
        }
        variables
    }
}

/// A value as a variable writes it: lists are separated by commas, with or without the brackets and quotes of the file.
fn from_text(key: &str, text: &str) -> config::Value {
    if !Settings::is_list(key) {
        return config::Value::from(text.to_owned());
    }
    let text = text.trim();
    let text = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let items =
        text.split(',').map(|item| item.trim().trim_matches('"')).filter(|item| !item.is_empty());
    config::Value::from(items.map(ToOwned::to_owned).collect::<Vec<String>>())
}

fn flag_values(flags: &Flags) -> Vec<(&'static str, config::Value)> {
    let mut values: Vec<(&'static str, config::Value)> = Vec::new();
    let mut put = |key, value: Option<config::Value>| {
        values.extend(value.map(|value| (key, value)));
    };
    let path = flags.runtime_dir.as_ref().map(|path| path.to_string_lossy().into_owned());
    put("runtime_dir", path.map(Into::into));
    let devices: Vec<String> = flags.devices.iter().map(DeviceName::to_string).collect();
    put("devices", (!devices.is_empty()).then(|| devices.into()));
    put("http_address", flags.http_address.clone().map(Into::into));
    let uids = flags.allow_uids.clone();
    put("allow_uids", (!uids.is_empty()).then(|| uids.into()));
    put("drain_grace_ms", flags.drain_grace_ms.map(Into::into));
    put("copy_threads", flags.copy_threads.map(Into::into));
    put("spin_us", flags.spin_us.map(Into::into));
    put("busy_poll", flags.busy_poll.then(|| true.into()));
    put("executor_cpu", flags.executor_cpu.map(Into::into));
    put("debug.abort_after_seal", flags.abort_after_seal.then(|| true.into()));
    put("log.format", flags.log_format.map(|format| format.label().into()));
    put("log.level", flags.log_level.clone().map(Into::into));
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn with_file(text: &str) -> (tempfile::TempDir, Flags) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("statecopyd.toml");
        std::fs::write(&path, text).unwrap();
        (directory, Flags { config: Some(path), ..Flags::default() })
    }

    #[test]
    fn each_source_overrides_the_one_before() {
        let (_directory, mut flags) = with_file(
            "drain_grace_ms = 1\ndefault_deadline_ms = 1\nspin_us = 1\n[limits]\nlayers_max = 7\n",
        );
        flags.spin_us = Some(3);
        let environment = variables(&[
            ("STATECOPY_DEFAULT_DEADLINE_MS", "2"),
            ("STATECOPY_SPIN_US", "2"),
            ("STATECOPY_LIMITS__REGIONS_MAX", "9"),
            ("STATECOPY_ALLOW_UIDS", "7, 8"),
            ("STATECOPY_ARTIFACT_STORES", r#"["/a", "/b"]"#),
            ("XDG_RUNTIME_DIR", "/run/user/7"),
        ]);
        let settings = load(&flags, environment).unwrap().settings;
        assert_eq!(settings.drain_grace_ms, 1);
        assert_eq!(settings.default_deadline_ms, 2);
        assert_eq!(settings.spin_us, 3);
        assert_eq!((settings.limits.layers_max, settings.limits.regions_max), (7, 9));
        assert_eq!(settings.limits.selected_max, Settings::default().limits.selected_max);
        assert_eq!(settings.allow_uids, [7, 8]);
        assert_eq!(settings.artifact_stores, [Path::new("/a"), Path::new("/b")]);
        assert_eq!(settings.runtime_dir, Path::new("/run/user/7/statecopy"));
        assert_eq!(settings.artifact_store, Settings::default().artifact_store);
    }

    #[test]
    fn an_error_names_file_key_and_value() {
        let (_directory, flags) = with_file("[limits]\nlayers_max = \"many\"\n");
        let text = load(&flags, []).unwrap_err().to_string();
        for part in ["statecopyd.toml", "limits.layers_max", "many"] {
            assert!(text.contains(part), "{text}");
        }
        let (_directory, flags) = with_file("[limits]\nlayer_max = 3\n");
        let text = load(&flags, []).unwrap_err().to_string();
        for part in ["statecopyd.toml", "limits", "layer_max"] {
            assert!(text.contains(part), "{text}");
        }
        let text = load(&Flags::default(), variables(&[("STATECOPY_SPIN_US", "-1")])).unwrap_err();
        for part in ["STATECOPY_SPIN_US", "spin_us", "-1"] {
            assert!(text.to_string().contains(part), "{text}");
        }
        let (_directory, flags) = with_file("devices = [\"tpu\"]\n");
        let text = load(&flags, []).unwrap_err().to_string();
        for part in ["statecopyd.toml", "devices", "tpu", "host", "cuda:ORDINAL"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_value_of_another_type_is_refused_and_not_converted() {
        for line in [
            "lane_slots = 1023.6",
            "lane_slots = \"1024\"",
            "busy_poll = \"yes\"",
            "busy_poll = 1",
            "http_address = 9090",
            "limits.layers_max = \"7\"",
        ] {
            let (_directory, flags) = with_file(&format!("{line}\n"));
            let text = load(&flags, []).unwrap_err().to_string();
            assert!(text.contains("statecopyd.toml") && text.contains(line), "{line}: {text}");
        }
        for wrong in ["1023.6", "many", ""] {
            let text = load(&Flags::default(), variables(&[("STATECOPY_LANE_SLOTS", wrong)]));
            assert!(text.is_err(), "{wrong:?}: {text:?}");
        }
    }

    #[test]
    fn compiled_kernels_are_kept_where_the_user_keeps_what_can_be_made_again() {
        let store = |pairs: &[(&str, &str)]| {
            load(&Flags::default(), variables(pairs)).unwrap().settings.artifact_store
        };
        let home = ("HOME", "/home/a");
        assert_eq!(store(&[home]), Path::new("/home/a/.cache/statecopy/kernels"));
        let cache = ("XDG_CACHE_HOME", "/cache");
        assert_eq!(store(&[home, cache]), Path::new("/cache/statecopy/kernels"));
        for relative in ["", "cache"] {
            let expected = Path::new("/home/a/.cache/statecopy/kernels");
            assert_eq!(store(&[home, ("XDG_CACHE_HOME", relative)]), expected);
        }
        let named = ("STATECOPY_ARTIFACT_STORE", "/kernels");
        assert_eq!(store(&[home, cache, named]), Path::new("/kernels"));
    }

    #[test]
    fn a_file_that_a_flag_names_must_be_there() {
        let flags = Flags { config: Some("/nowhere/statecopyd.toml".into()), ..Flags::default() };
        let text = load(&flags, []).unwrap_err().to_string();
        assert!(text.contains("/nowhere/statecopyd.toml"), "{text}");
    }

    #[test]
    fn a_variable_that_is_no_setting_is_reported_and_ignored() {
        let environment = variables(&[("STATECOPY_SOKET", "x"), ("STATECOPY_ADDR", "/run/x")]);
        let loaded = load(&Flags::default(), environment).unwrap();
        assert_eq!(loaded.ignored, ["STATECOPY_SOKET"]);
    }
}
