//! Where each setting was given, so that a refusal says it.

use std::path::PathBuf;

use super::Settings;

/// What was read, beside the defaults.
#[derive(Debug, Default)]
pub(super) struct Sources {
    /// Keys whose default a variable of the user's says, and the variable.
    pub(super) under: Vec<(&'static str, &'static str)>,
    pub(super) file: Option<(PathBuf, toml::Table)>,
    /// Keys that variables and flags give, and which of them; the strongest last.
    pub(super) over: Vec<(String, String)>,
}

impl Sources {
    /// Where the value of a setting comes from; `None` where it is the default.
    pub(super) fn of(&self, key: &str) -> Option<String> {
        if let Some((_, name)) = self.over.iter().rev().find(|(known, _)| known == key) {
            return Some(name.clone());
        }
        if let Some((path, _)) = self.file.as_ref().filter(|(_, table)| has(table, key)) {
            return Some(path.display().to_string());
        }
        let under = self.under.iter().find(|(known, _)| *known == key);
        under.map(|(_, variable)| (*variable).to_owned())
    }
}

fn has(table: &toml::Table, key: &str) -> bool {
    match key.split_once('.') {
        None => table.contains_key(key),
        Some((name, rest)) => {
            table.get(name).and_then(toml::Value::as_table).is_some_and(|inner| has(inner, rest))
        }
    }
}

/// The first key of a table that is no setting. What is a table of settings is one.
pub(super) fn unknown_key(table: &toml::Table, within: &str, keys: &[String]) -> Option<String> {
    table.iter().find_map(|(name, value)| {
        let key = format!("{within}{name}");
        let below = format!("{key}.");
        match value.as_table() {
            _ if keys.contains(&key) => None,
            Some(inner) if keys.iter().any(|known| known.starts_with(&below)) => {
                unknown_key(inner, &below, keys)
            }
            _ => Some(key),
        }
    })
}

/// A table of settings that is none in the file. A list would be taken for its values in their order.
pub(super) fn no_table<'a>(file: &toml::Table) -> Option<&'a str> {
    Settings::tables().find(|table| file.get(*table).is_some_and(|value| !value.is_table()))
}

/// The setting that was likely meant, of those that are `known`; in a file, tables are.
pub(super) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    fn last(key: &str) -> &str {
        key.rsplit('.').next().unwrap_or(key)
    }
    let known: Vec<&str> = known.into_iter().collect();
    let in_another_table = known.iter().find(|it| last(it) == last(name));
    let written_otherwise = || {
        let distance = |known: &&&str| strsim::damerau_levenshtein(name, known);
        known.iter().min_by_key(distance).filter(|known| distance(known) * 3 <= name.len())
    };
    in_another_table.or_else(written_otherwise).copied()
}
