//! The one file that a run leaves: every raw sample, and all that they depend on.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path as FilePath, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::extras::Extras;
use super::footprint::Footprint;
use super::machine::{CpuPair, DeviceFacts, Machine};
use super::plan::{Case, Kind, Mode, Path};
use super::rival::KernelTimes;
use super::statistics::{median, to_nanoseconds};
use super::trial::Samples;
use crate::failure::Failure;

/// The version of the file's form.
pub(super) const FORMAT: u32 = 1;

const RECORD_REMEDY: &str = "Name a file that `statecopy bench --output` wrote.";

/// Something for each case, mode and path.
pub(super) type ByPath<T> = BTreeMap<String, BTreeMap<String, BTreeMap<String, T>>>;

/// A whole run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Record {
    /// The version of the form.
    pub(super) format: u32,
    /// The middle sample of each case, mode and path, in microseconds.
    pub(super) medians_us: ByPath<f64>,
    /// Seed of orders, rows and bytes.
    pub(super) seed: u64,
    /// Trials of each case.
    pub(super) trials: u64,
    /// When it began, in seconds since 1970.
    pub(super) started_unix_s: u64,
    /// How long it took.
    pub(super) took_s: u64,
    /// What ran.
    pub(super) source: Source,
    /// Where.
    pub(super) machine: Machine,
    /// What copies; `None` in files from before there was a choice: the host.
    #[serde(default)]
    pub(super) device: Option<DeviceFacts>,
    /// On which CPUs; `None`: wherever the kernel put them.
    pub(super) pinning: Option<CpuPair>,
    /// What the rival says of itself.
    #[serde(default)]
    pub(super) rival: Option<BTreeMap<String, String>>,
    /// How.
    pub(super) settings: RunSettings,
    /// What an idle daemon costs; `None` with a daemon of somebody else.
    pub(super) footprint: Option<Footprint>,
    /// Entries of compilers after the warm-up, of the daemon and of this process.
    pub(super) compiler_entries_while_serving: u64,
    /// The cases, in the order in which they ran.
    pub(super) cases: Vec<CaseRecord>,
    /// What the modes mean.
    pub(super) modes: BTreeMap<String, String>,
    /// What the paths mean.
    pub(super) paths: BTreeMap<String, String>,
    /// Every sample in microseconds, in the order of the trials.
    pub(super) samples_us: ByPath<Vec<f64>>,
    /// What a GPU was asked beside.
    #[serde(default)]
    pub(super) extras: Option<Extras>,
    /// Time on the device, by the rival.
    #[serde(default)]
    pub(super) kernels: Option<KernelTimes>,
}

/// What ran.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Source {
    /// Of the package.
    pub(super) version: String,
    /// The commit that was built, if the build or the caller named one.
    pub(super) commit: Option<String>,
    /// BLAKE3 of the executable: worker, daemon and ping-pong are the same one.
    pub(super) executable_blake3: String,
    /// `release` or `debug`.
    pub(super) profile: String,
}

/// How it ran.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RunSettings {
    /// Threads that copy, on each side.
    pub(super) copy_threads: usize,
    /// Whether every CPU copies and nobody is pinned.
    pub(super) all_cores: bool,
    /// The daemon's address, when it was somebody else's; its settings are not known here.
    pub(super) address: Option<String>,
    /// Settings that the daemon was started with.
    pub(super) daemon: BTreeMap<String, String>,
    /// How long the worker looks for an answer on the ring before it sleeps, in microseconds.
    pub(super) worker_spin_us: u128,
    /// What is inside an interval.
    pub(super) interval: String,
    /// What happens right before one.
    pub(super) before_interval: String,
}

/// What a case asks for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CaseRecord {
    /// The name, which the tables are keyed by.
    pub(super) name: String,
    /// `gather`, `clear` or `scatter`.
    pub(super) operation: String,
    /// Bytes of one row.
    pub(super) row_bytes: u64,
    /// Bytes from one row to the next.
    pub(super) page_stride_bytes: u64,
    /// Rows of each layer's cache.
    pub(super) cache_rows: u64,
    /// Rows selected of each layer.
    pub(super) selected: u64,
    /// Layers.
    pub(super) layers: usize,
    /// Whether each interval came right after a call of the same path: on the host with the same inputs, on a GPU with other
    /// rows.
    pub(super) warmed: bool,
}

impl CaseRecord {
    /// Of a case whose caches have so many rows.
    pub(super) fn of(case: Case, cache_rows: u64) -> Self {
        Self {
            name: case.name(),
            operation: case.operation().label().to_owned(),
            row_bytes: case.preset().state_bytes(),
            page_stride_bytes: case.preset().page_bytes(),
            cache_rows,
            selected: case.selected(),
            layers: case.layers(),
            warmed: case.is_warmed(),
        }
    }
}

impl Record {
    /// Adds the samples of a case, and their medians.
    pub(super) fn add(&mut self, case: Case, samples: Samples) {
        for ((mode, path), taken) in samples {
            let (mode, path) = (mode.label().to_owned(), path.label().to_owned());
            let middle = to_nanoseconds(median(&taken));
            let medians = self.medians_us.entry(case.name()).or_default();
            medians.entry(mode.clone()).or_default().insert(path.clone(), middle);
            let all = self.samples_us.entry(case.name()).or_default();
            all.entry(mode).or_default().insert(path, taken);
        }
    }

    /// What modes and paths mean, for whoever reads the file alone.
    pub(super) fn meanings(rival: bool) -> [BTreeMap<String, String>; 2] {
        let modes = Mode::ALL.map(|mode| (mode.label().to_owned(), mode.meaning().to_owned()));
        let paths = Path::ALL.into_iter().filter(|path| rival || !path.is_rival());
        let paths = paths.map(|path| (path.label().to_owned(), path.meaning().to_owned()));
        [modes.into_iter().collect(), paths.collect()]
    }

    /// What was measured.
    pub(super) fn kind(&self) -> Kind {
        match &self.device {
            Some(device) if device.kind == "cuda" => Kind::Cuda,
            _ => Kind::Host,
        }
    }

    /// The samples of a path.
    pub(super) fn samples(&self, case: &str, mode: Mode, path: Path) -> Option<&[f64]> {
        let modes = self.samples_us.get(case)?;
        modes.get(mode.label())?.get(path.label()).map(Vec::as_slice)
    }

    /// The middle sample of a path.
    pub(super) fn median_us(&self, case: &str, mode: Mode, path: Path) -> Option<f64> {
        let modes = self.medians_us.get(case)?;
        modes.get(mode.label())?.get(path.label()).copied()
    }

    /// Reads the file of a run.
    ///
    /// # Errors
    /// When it cannot be read, or has another form.
    pub(super) fn read(path: &FilePath) -> anyhow::Result<Self> {
        let name = path.display();
        let bytes = fs::read(path).map_err(|error| {
            Failure::usage(format!("{name} cannot be read: {error}"), RECORD_REMEDY)
        })?;
        let record: Self = serde_json::from_slice(&bytes).map_err(|error| {
            Failure::usage(format!("{name} is no record of a benchmark: {error}"), RECORD_REMEDY)
        })?;
        if record.format != FORMAT {
            let sentence =
                format!("{name} has form {}, this program reads {FORMAT}", record.format);
            return Err(Failure::usage(sentence, "Use the version that wrote it.").into());
        }
        Ok(record)
    }
}

/// The output, which did not exist before. It is removed again unless the run comes to its end.
#[derive(Debug)]
pub(super) struct Output {
    path: PathBuf,
    file: Option<File>,
}

impl Output {
    /// Makes the file.
    ///
    /// # Errors
    /// When it exists, or cannot be made.
    pub(super) fn create(path: &FilePath) -> anyhow::Result<Self> {
        match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(file) => Ok(Self { path: path.to_owned(), file: Some(file) }),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(Failure::usage(
                format!("{} exists already", path.display()),
                "Each run has a file of its own: name another one.",
            )
            .into()),
            Err(error) => Err(Failure::usage(
                format!("{} cannot be made: {error}", path.display()),
                "Name a new file in a directory that exists and that this user may write.",
            )
            .into()),
        }
    }

    /// Writes the record.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn write(mut self, record: &Record) -> anyhow::Result<()> {
        let file = self.file.take().context("The output is open")?;
        let mut writer = BufWriter::new(file);
        let written = serde_json::to_writer(&mut writer, record)
            .map_err(anyhow::Error::from)
            .and_then(|()| Ok(writer.write_all(b"\n")?))
            .and_then(|()| Ok(writer.flush()?));
        if written.is_err() {
            self.remove();
        }
        written.with_context(|| format!("Writing {}", self.path.display()))
    }

    fn remove(&self) {
        // What is left of it says nothing.
        let _removed = fs::remove_file(&self.path);
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.file.is_some() {
            self.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_output_is_refused_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run.json");
        fs::write(&path, "mine").unwrap();
        let error = Output::create(&path).unwrap_err();
        assert_eq!(Failure::of(&error).exit, crate::failure::EXIT_USAGE);
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    }

    #[test]
    fn a_run_that_fails_leaves_no_output() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run.json");
        drop(Output::create(&path).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_record_is_wrong_usage() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run.json");
        fs::write(&path, "{}").unwrap();
        let error = Record::read(&path).unwrap_err();
        assert_eq!(Failure::of(&error).exit, crate::failure::EXIT_USAGE);
    }
}
