//! The effective configuration, as a person or a program reads it.

use std::fmt::Write as _;

use serde::Serialize;

use super::{Cuda, Debugging, Limits, Log, Settings};

type Fields = &'static [(&'static str, &'static [&'static str])];

/// The tables inside the settings.
const TABLES: [(&str, Fields); 4] = [
    ("limits", Limits::FIELDS),
    ("cuda", Cuda::FIELDS),
    ("log", Log::FIELDS),
    ("debug", Debugging::FIELDS),
];

impl Settings {
    /// The key of every setting, with dots between a table and its field.
    pub(crate) fn keys() -> Vec<String> {
        let mut keys = Vec::new();
        for (field, _) in Self::FIELDS {
            match TABLES.iter().find(|(table, _)| table == field) {
                None => keys.push((*field).to_owned()),
                Some((table, fields)) => {
                    keys.extend(fields.iter().map(|(field, _)| format!("{table}.{field}")));
                }
            }
        }
        keys
    }

    /// The name of every table.
    pub(crate) fn tables<'a>() -> impl Iterator<Item = &'a str> {
        TABLES.iter().map(|(table, _)| *table)
    }

    /// Whether a setting is a list.
    pub(crate) fn is_list(key: &str) -> bool {
        table(&Self::default()).get(key).is_some_and(toml::Value::is_array)
    }

    /// What holds where a setting is not set: in the words of its documentation if it has any, else its value.
    pub(crate) fn default_of(key: &str) -> String {
        let defaults = table(&Self::default());
        let (name, fields, values) = match key.split_once('.') {
            None => (key, Self::FIELDS, Some(&defaults)),
            Some((of, name)) => {
                let fields = TABLES.iter().find(|(table, _)| *table == of);
                let values = defaults.get(of).and_then(toml::Value::as_table);
                (name, fields.map_or(&[][..], |(_, fields)| *fields), values)
            }
        };
        let doc = fields.iter().find(|(field, _)| *field == name).map(|(_, doc)| doc.concat());
        for beginning in ["Default: ", "Unset: "] {
            let words = doc.as_deref().and_then(|doc| doc.split_once(beginning));
            if let Some((_, words)) = words {
                return words.trim_end_matches('.').to_owned();
            }
        }
        let text =
            |value: &toml::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        match values.and_then(|values| values.get(name)) {
            None => "none".to_owned(),
            Some(toml::Value::Array(items)) if items.is_empty() => "none".to_owned(),
            Some(toml::Value::Array(items)) => {
                items.iter().map(text).collect::<Vec<_>>().join(", ")
            }
            Some(value) => text(value),
        }
    }
}

/// The settings as a TOML file that gives the same settings again, with a comment above each.
#[must_use]
pub fn to_toml(settings: &Settings) -> String {
    let values = table(settings);
    let mut text = String::new();
    for (field, doc) in Settings::FIELDS {
        if !TABLES.iter().any(|(table, _)| table == field) {
            push(&mut text, &values, field, doc);
        }
    }
    let empty = toml::Table::new();
    for (name, fields) in TABLES {
        text.push_str(&["[", name, "]\n\n"].concat());
        let values = values.get(name).and_then(toml::Value::as_table).unwrap_or(&empty);
        for (field, doc) in fields {
            push(&mut text, values, field, doc);
        }
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

/// The settings as one JSON object.
///
/// # Errors
/// When a path is not UTF-8.
pub fn to_json(settings: &Settings) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(settings)
}

fn push(text: &mut String, values: &toml::Table, field: &str, doc: &[&str]) {
    for line in doc {
        text.push_str(&["#", line, "\n"].concat());
    }
    // Writing to a String cannot fail.
    let _ = match values.get(field) {
        Some(value) => write!(text, "{field} = {value}\n\n"),
        None => write!(text, "# {field} is not set\n\n"),
    };
}

/// Empty when a path is not UTF-8.
fn table(settings: &impl Serialize) -> toml::Table {
    toml::Table::try_from(settings).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Flags, load};

    #[test]
    fn what_is_printed_gives_the_same_settings_again() {
        let mut settings =
            Settings { copy_threads: std::num::NonZeroUsize::new(3), ..Settings::default() };
        settings.allow_uids = vec![1, 2];
        settings.devices = vec!["cuda:1".parse().unwrap(), "host".parse().unwrap()];
        settings.cuda.nvrtc_directory = Some("/opt/nvrtc".into());
        settings.limits.layers_max = 5;
        settings.log.level = "debug".to_owned();
        for settings in [settings, Settings::default()] {
            let text = to_toml(&settings);
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("printed.toml");
            std::fs::write(&path, &text).unwrap();
            let flags = Flags { config: Some(path), ..Flags::default() };
            assert_eq!(load(&flags, []).unwrap().settings, settings, "{text}");
        }
    }

    #[test]
    fn every_setting_is_printed_with_a_comment() {
        let text = to_toml(&Settings::default());
        for key in Settings::keys() {
            let field = key.rsplit('.').next().unwrap();
            let at = text.lines().position(|line| {
                line.starts_with(&format!("{field} = ")) || line == format!("# {field} is not set")
            });
            let at = at.unwrap_or_else(|| panic!("{key} is missing:\n{text}"));
            assert!(text.lines().nth(at - 1).unwrap().starts_with("# "), "{key}");
        }
    }

    #[test]
    fn json_holds_every_setting() {
        let json = to_json(&Settings::default()).unwrap();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        for key in Settings::keys() {
            let pointer = format!("/{}", key.replace('.', "/"));
            assert!(value.pointer(&pointer).is_some(), "{key}");
        }
    }
}
