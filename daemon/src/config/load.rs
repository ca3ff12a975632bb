//! Where settings come from.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::{fmt, io};

use config::builder::{ConfigBuilder, DefaultState};
use config::{Config, File, FileFormat, FileSourceString};
use statecopy_kernels::cuda::store::default_directory;

use super::flags::DEFAULT_FILE;
use super::sources::{Sources, nearest, no_table, unknown_key};
use super::{ConfigError, Flags, Settings};

/// What every variable begins with.
const PREFIX: &str = "STATECOPY_";
/// Variables of the same beginning that belong to clients.
const OF_CLIENTS: [&str; 1] = ["STATECOPY_ADDR"];
/// Where the user's sockets lie.
const RUNTIME_DIRECTORY: &str = "XDG_RUNTIME_DIR";
/// Between a table and its field in the name of a variable.
const SEPARATOR: &str = "__";

/// The effective settings.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// Checked against every rule.
    pub settings: Settings,
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// Variables that begin like a setting and are none.
    pub ignored: Vec<Ignored>,
}

/// A variable that begins like a setting and is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ignored {
    /// Its name.
    pub variable: String,
    /// The variable that was likely meant.
    pub meant: Option<String>,
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is no setting and is ignored", self.variable)?;
        self.meant.iter().try_for_each(|meant| write!(f, "; did you mean {meant}?"))
    }
}

/// The variables of a process as text. One that is no text and no setting is left out.
///
/// # Errors
/// [`ConfigError::Value`] of a setting whose value is no text: the daemon would serve without it, somewhere else.
pub fn texts(
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Vec<(String, String)>, ConfigError> {
    let mut texts = Vec::new();
    for (name, value) in environment {
        let Ok(name) = name.into_string() else { continue };
        match value.into_string() {
            Ok(value) => texts.push((name, value)),
            Err(value) if name.starts_with(PREFIX) || name == RUNTIME_DIRECTORY => {
                return Err(ConfigError::Value(format!("{name} = {value:?} is no UTF-8 text")));
            }
            Err(_) => {}
        }
    }
    Ok(texts)
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
    let mut sources = Sources::default();
    for (key, variable, path) in directories(&environment) {
        builder =
            builder.set_default(key, &*path.to_string_lossy()).map_err(|error| refused(&error))?;
        sources.under.extend(variable.map(|variable| (key, variable)));
    }
    let file = file(flags)?;
    if let Some(path) = &file {
        let text = std::fs::read_to_string(path).map_err(|error| unread(path, &error))?;
        let source = File::from_str(&text, FileFormat::Toml);
        sources.file = Some((path.clone(), check_file(path, &text, source.clone())?));
        builder = builder.add_source(source);
    }
    let (known, ignored) = variables(&environment);
    for (key, variable, text) in known {
        builder = over(builder, &key, from_text(&key, &text), &variable)?;
        sources.over.push((key, variable));
    }
    for (key, flag, value) in flags.values() {
        builder = over(builder, key, value, flag)?;
        sources.over.push((key.to_owned(), flag.to_owned()));
    }
    let settings: Result<Settings, _> = builder.build().and_then(Config::try_deserialize);
    let settings = settings.map_err(|error| refused_of(&error, &sources))?;
    settings.check().map_err(|error| error.given(|key| sources.of(key)))?;
    Ok(Loaded { settings, file, ignored })
}

/// Refuses a key that is no setting, and a value of another type than its key's: otherwise 1.6 would become 1, and "yes" true,
/// without a word.
fn check_file(
    path: &Path,
    text: &str,
    source: File<FileSourceString, FileFormat>,
) -> Result<toml::Table, ConfigError> {
    let refused = |what: &dyn fmt::Display| {
        ConfigError::Value(format!("{}: {}", path.display(), what.to_string().trim_end()))
    };
    let table: toml::Table = toml::from_str(text).map_err(|error| refused(&error))?;
    if let Some(name) = no_table(&table) {
        return Err(refused(&format!("{name} is a table of settings: write [{name}] above them")));
    }
    let keys = Settings::keys();
    if let Some(key) = unknown_key(&table, "", &keys) {
        let known = keys.iter().map(String::as_str).chain(Settings::tables());
        let guess = nearest(&key, known).map(|meant| format!("; did you mean {meant}?"));
        let guess = guess.unwrap_or_default();
        return Err(refused(&format!("{key} is no setting{guess} (statecopyd config prints all)")));
    }
    // Each tells of some values what the other takes, and the first one names the whole key.
    let alone = Config::builder().add_source(source).build();
    let _: Settings = alone.and_then(Config::try_deserialize).map_err(|error| refused(&error))?;
    let typed: Result<Settings, _> = toml::from_str(text);
    typed.map(|_| table).map_err(|error| refused(&error))
}

/// The directories that follow from where the user keeps such things: key, the variable where one says it, path.
fn directories(
    environment: &[(String, String)],
) -> Vec<(&'static str, Option<&'static str>, PathBuf)> {
    let set = |name: &str| {
        let (_, value) = environment.iter().find(|(known, _)| known == name)?;
        Some(OsStr::new(value))
    };
    let name = RUNTIME_DIRECTORY;
    let runtime = set(name).filter(|directory| !directory.is_empty());
    let runtime = runtime.map(|it| ("runtime_dir", Some(name), Path::new(it).join("statecopy")));
    // A variable that is no absolute path is passed over.
    let store = default_directory(set("XDG_CACHE_HOME"), set("HOME"));
    runtime.into_iter().chain([("artifact_store", None, store)]).collect()
}

fn refused(error: &config::ConfigError) -> ConfigError {
    ConfigError::Value(error.to_string())
}

/// With where it was given, where the error does not say so itself.
fn refused_of(error: &config::ConfigError, sources: &Sources) -> ConfigError {
    let text = error.to_string();
    match error {
        config::ConfigError::At { key: Some(key), origin: None, .. }
        | config::ConfigError::Type { key: Some(key), origin: None, .. } => {
            // An element of a list is of its list.
            let key = key.split('[').next().unwrap_or(key);
            let source = sources.of(key).map(|source| format!(" in {source}"));
            ConfigError::Value(text + &source.unwrap_or_default())
        }
        _ => ConfigError::Value(text),
    }
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

/// Key, variable and value of each variable that is a setting; and what is said of those that begin like one and are none.
fn variables(environment: &[(String, String)]) -> (Vec<(String, String, String)>, Vec<Ignored>) {
    let keys = Settings::keys();
    let (mut known, mut ignored) = (Vec::new(), Vec::new());
    for (variable, value) in environment {
        let Some(rest) = variable.strip_prefix(PREFIX) else {
            continue;
        };
        let key = rest.to_ascii_lowercase().replace(SEPARATOR, ".");
        if keys.contains(&key) {
            known.push((key, variable.clone(), value.clone()));
        } else if !OF_CLIENTS.contains(&variable.as_str()) {
            let meant = nearest(&key, keys.iter().map(String::as_str)).map(variable_of);
            ignored.push(Ignored { variable: variable.clone(), meant });
        }
    }
    (known, ignored)
}

/// The variable of a setting.
fn variable_of(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', SEPARATOR).to_ascii_uppercase())
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

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;
    use crate::config::DeviceName;

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
    fn a_value_that_breaks_a_rule_is_told_with_where_it_was_given() {
        let (_directory, mut flags) = with_file("drain_grace_ms = 0\n[limits]\nlayers_max = 0\n");
        let file = flags.config.clone().unwrap().display().to_string();
        let refused = |flags: &Flags, pairs: &[(&str, &str)]| {
            load(flags, variables(pairs)).unwrap_err().to_string()
        };
        let text = refused(&flags, &[]);
        assert!(text.contains("drain_grace_ms = 0 of ") && text.contains(&file), "{text}");
        let variable = ("STATECOPY_DRAIN_GRACE_MS", "0");
        let text = refused(&flags, &[variable]);
        assert!(text.contains(" of STATECOPY_DRAIN_GRACE_MS") && !text.contains(&file), "{text}");
        flags.drain_grace_ms = Some(0);
        let text = refused(&flags, &[variable]);
        assert!(text.contains(" of --drain-grace-ms"), "{text}");
        flags.drain_grace_ms = Some(1);
        let text = refused(&flags, &[variable]);
        assert!(text.contains("limits.layers_max = 0 of ") && text.contains(&file), "{text}");
        let text = refused(&flags, &[("STATECOPY_LIMITS__LAYERS_MAX", "0")]);
        assert!(text.contains(" of STATECOPY_LIMITS__LAYERS_MAX"), "{text}");
        let text = refused(&Flags::default(), &[("XDG_RUNTIME_DIR", "run")]);
        assert!(text.contains("runtime_dir = run/statecopy of XDG_RUNTIME_DIR"), "{text}");
        let twice = [("STATECOPY_drain_grace_ms", "1"), ("STATECOPY_DRAIN_GRACE_MS", "0")];
        let text = refused(&Flags::default(), &twice);
        assert!(text.contains(" of STATECOPY_DRAIN_GRACE_MS"), "{text}");
    }

    #[test]
    fn a_value_of_a_flag_is_told_with_the_flag() {
        let none = Flags::default;
        for (flags, flag) in [
            (Flags { runtime_dir: Some("run".into()), ..none() }, "--runtime-dir"),
            (Flags { devices: vec![DeviceName::Host; 2], ..none() }, "--device"),
            (Flags { http_address: Some("nowhere".to_owned()), ..none() }, "--http-address"),
            (Flags { drain_grace_ms: Some(0), ..none() }, "--drain-grace-ms"),
            (Flags { copy_threads: Some(0), ..none() }, "--copy-threads"),
            (Flags { spin_us: Some(u32::MAX), ..none() }, "--spin-us"),
            (Flags { executor_cpu: Some(u32::MAX), ..none() }, "--executor-cpu"),
            (Flags { log_level: Some("loud".to_owned()), ..none() }, "--log-level"),
        ] {
            let text = load(&flags, []).unwrap_err().to_string();
            assert!(text.contains(&format!(" {flag}")), "{flag}: {text}");
        }
    }

    #[test]
    fn a_name_that_is_no_setting_is_told_with_the_one_that_was_meant() {
        for (wrong, meant) in [
            ("drain_grace = 5", "drain_grace_ms"),
            ("limits.layer_max = 5", "limits.layers_max"),
            ("layers_max = 5", "limits.layers_max"),
            ("limit.layers_max = 5", "limits"),
            ("lane_slot = 5", "lane_slots"),
        ] {
            let (_directory, flags) = with_file(&format!("{wrong}\n"));
            let text = load(&flags, []).unwrap_err().to_string();
            assert!(text.contains("statecopyd.toml"), "{text}");
            assert!(text.contains(&format!("did you mean {meant}?")), "{wrong}: {text}");
        }
        let (_directory, flags) = with_file("nothing_like_it = 5\n");
        let text = load(&flags, []).unwrap_err().to_string();
        assert!(
            text.contains("nothing_like_it is no setting (") && !text.contains("mean"),
            "{text}"
        );
        for (wrong, meant) in [
            ("STATECOPY_LIMITS_LAYERS_MAX", Some("STATECOPY_LIMITS__LAYERS_MAX")),
            ("STATECOPY_LAYERS_MAX", Some("STATECOPY_LIMITS__LAYERS_MAX")),
            // A table is no setting.
            ("STATECOPY_LOG", None),
            ("STATECOPY_LIMIT", None),
        ] {
            let ignored = load(&Flags::default(), variables(&[(wrong, "5")])).unwrap().ignored;
            assert_eq!(ignored[0].meant.as_deref(), meant, "{wrong}");
            assert_eq!(ignored[0].to_string().contains("did you mean"), meant.is_some());
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
            let key = line.split(' ').next().unwrap();
            assert!(text.contains("statecopyd.toml") && text.contains(key), "{line}: {text}");
        }
        for wrong in ["1023.6", "many", ""] {
            let text = load(&Flags::default(), variables(&[("STATECOPY_LANE_SLOTS", wrong)]));
            assert!(text.is_err(), "{wrong:?}: {text:?}");
        }
    }

    #[test]
    fn a_table_is_a_table_and_no_list_of_values() {
        for line in ["debug = [true]", "limits = [3, 4]", "limits = []", "log = 5", "[[cuda]]"] {
            let (_directory, flags) = with_file(&format!("{line}\n"));
            let text = load(&flags, []).unwrap_err().to_string();
            assert!(text.contains("statecopyd.toml") && text.contains(" is a table"), "{text}");
        }
    }

    #[test]
    fn a_setting_that_is_no_text_is_refused_and_other_variables_are_left_alone() {
        let no_text = || OsString::from_vec(vec![b'/', 0xff]);
        let all = |name: &str| texts([(name.into(), no_text()), ("HOME".into(), "/home".into())]);
        assert_eq!(all("OLDPWD").unwrap(), variables(&[("HOME", "/home")]));
        for name in ["STATECOPY_RUNTIME_DIR", "XDG_RUNTIME_DIR"] {
            let text = all(name).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains("UTF-8"), "{text}");
        }
    }

    #[test]
    fn an_element_of_a_list_is_told_with_its_variable() {
        for (variable, value) in
            [("STATECOPY_ALLOW_UIDS", "1,x"), ("STATECOPY_DEVICES", "host,cpu")]
        {
            let text = load(&Flags::default(), variables(&[(variable, value)])).unwrap_err();
            assert!(text.to_string().contains(variable), "{text}");
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
        let ignored = Ignored { variable: "STATECOPY_SOKET".to_owned(), meant: None };
        assert_eq!(loaded.ignored, [ignored]);
    }
}
