//! `statecopy kernels`: compiled kernels on disk, made and looked at without a GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::Context;
use indicatif::ProgressBar;
use serde::Serialize;
use statecopy_client::Error;
use statecopy_kernels::cuda::class::{self, CudaClass};
use statecopy_kernels::cuda::compile::{Arch, Compiler, source_hash};
use statecopy_kernels::cuda::store::{
    Artifact, ArtifactKey, Artifacts, Entry, Origin, Store, StoreError, default_directory,
};
use statecopy_kernels::host::cpus_allowed;
use statecopy_kernels::plan::KernelClass;
use statecopy_proto::{DataType, PlanKind, Refusal};

use crate::cli::{KernelsBuildOptions, KernelsCommand, KernelsOptions, KernelsStoreOptions};
use crate::failure::{EXIT_MISMATCHES, Failure};
use crate::terminal::{self, Table, bytes, grouped};
use crate::workload::preset::Preset;

/// What to do where NVRTC cannot be opened.
const NO_COMPILER: &str = "Install NVRTC 11.7 or newer (pip install nvidia-cuda-nvrtc), and name the directory of its libnvrtc.so \
                           with --nvrtc.";

/// Does what was asked for.
///
/// # Errors
/// When a store cannot be used, there is no compiler, or it fails.
pub(crate) fn run(options: &KernelsOptions) -> anyhow::Result<ExitCode> {
    match &options.command {
        KernelsCommand::Build(options) => build(options),
        KernelsCommand::List(options) => list(options),
        KernelsCommand::Verify(options) => verify(options),
    }
}

// --- build ------------------------------------------------------------------------------------------------------------

/// One artifact of a build.
#[derive(Debug, Serialize)]
struct Built {
    arch: String,
    class: String,
    /// Whether it was compiled now; otherwise it was there.
    compiled: bool,
    bytes: usize,
    path: PathBuf,
}

#[derive(Debug, Serialize)]
struct BuildReport {
    store: PathBuf,
    compiler: String,
    source: String,
    elapsed_ms: u128,
    artifacts: Vec<Built>,
}

fn build(options: &KernelsBuildOptions) -> anyhow::Result<ExitCode> {
    let begin = Instant::now();
    let compiler = Compiler::open(options.nvrtc.as_deref())
        .map_err(|error| refused(Refusal::from(error).remedied_by(NO_COMPILER)))?;
    let version = compiler.version().to_string();
    let store = Store::create(directory(&options.store)).map_err(|error| unusable(&error))?;
    let directory = store.directory().to_owned();
    let artifacts = Artifacts::new(Vec::new(), Some(store), Ok(compiler));
    let work = work(options);
    let bar = terminal::progress(work.len() as u64, "kernels", options.store.json);
    let mut built = compile_all(&artifacts, work, options.force, &bar)?;
    bar.finish_and_clear();
    built.sort_by(|a, b| (&a.arch, &a.class).cmp(&(&b.arch, &b.class)));
    let report = BuildReport {
        store: directory,
        compiler: version,
        source: source_hash(),
        elapsed_ms: begin.elapsed().as_millis(),
        artifacts: built,
    };
    if options.store.json {
        terminal::print_json(&report)?;
    } else {
        terminal::print(&build_text(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What was asked for, each once.
fn work(options: &KernelsBuildOptions) -> Vec<(Arch, CudaClass)> {
    let mut classes = if options.all { CudaClass::all() } else { Vec::new() };
    classes.extend(options.preset.iter().copied().flat_map(classes_of));
    classes.sort_unstable();
    classes.dedup();
    let mut chips = options.arch.clone();
    chips.sort_unstable();
    chips.dedup();
    chips.into_iter().flat_map(|chip| classes.iter().map(move |class| (chip, *class))).collect()
}

/// The classes of a preset's layers: they may lie differently against 16 bytes.
fn classes_of(preset: Preset) -> Vec<CudaClass> {
    let places = 0..preset.shape().layers_per_page as u64;
    let class = |place| {
        CudaClass::of(&KernelClass {
            // Every preset is FP32, which is fused on all chips but those before sm_80.
            kind: PlanKind::Fused,
            dtype: DataType::Float32,
            payload_bytes: preset.state_bytes(),
            base_mod_16: preset.offset_bytes(place).to_le_bytes()[0] % 16,
        })
    };
    places.map(class).collect()
}

/// Compiles on every CPU; the first failure ends it.
fn compile_all(
    artifacts: &Artifacts,
    work: Vec<(Arch, CudaClass)>,
    force: bool,
    bar: &ProgressBar,
) -> anyhow::Result<Vec<Built>> {
    let threads = cpus_allowed().get().min(work.len());
    let queue = Mutex::new(work);
    let done = Mutex::new(Vec::new());
    let take = || queue.lock().ok()?.pop();
    let run = || -> anyhow::Result<()> {
        while let Some((arch, class)) = take() {
            bar.set_message(format!("{arch} {}", class.name()));
            let outcome = compile_one(artifacts, arch, class, force);
            if outcome.is_err()
                && let Ok(mut queue) = queue.lock()
            {
                queue.clear();
            }
            let built = outcome?;
            if let Ok(mut done) = done.lock() {
                done.push(built);
            }
            bar.inc(1);
        }
        Ok(())
    };
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        running.into_iter().try_for_each(|thread| match thread.join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    done.into_inner().context("A compiling thread panicked")
}

fn compile_one(
    artifacts: &Artifacts,
    arch: Arch,
    class: CudaClass,
    force: bool,
) -> anyhow::Result<Built> {
    let obtained = if force { artifacts.renew(arch, class) } else { artifacts.obtain(arch, class) };
    let Artifact { code, origin, problems } = obtained.map_err(refused)?;
    let (compiled, path) = match origin {
        Origin::Stored(path) => (false, path),
        Origin::Compiled(Some(path)) => (true, path),
        Origin::Compiled(None) => {
            let written = |problem: &StoreError| matches!(problem, StoreError::Io { .. });
            let problem = problems.into_iter().rfind(written);
            return Err(problem.map_or_else(
                || anyhow::anyhow!("The compiled kernel was not kept"),
                |problem| unusable(&problem).into(),
            ));
        }
    };
    Ok(Built { arch: arch.to_string(), class: class.name(), compiled, bytes: code.len(), path })
}

fn build_text(report: &BuildReport) -> String {
    let mut chips: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
    for built in &report.artifacts {
        let (compiled, there, size) = chips.entry(&built.arch).or_default();
        *compiled += u64::from(built.compiled);
        *there += u64::from(!built.compiled);
        *size += built.bytes as u64;
    }
    let mut table = Table::new(["CHIP", "COMPILED", "THERE BEFORE", "SIZE"]);
    for (chip, (compiled, there, size)) in chips {
        table.row([chip.to_owned(), grouped(compiled), grouped(there), bytes(size)]);
    }
    format!(
        "{}\nStore {}, by {}, in {}.{} s\n",
        table.render(),
        report.store.display(),
        report.compiler,
        report.elapsed_ms / 1_000,
        report.elapsed_ms % 1_000 / 100
    )
}

// --- list and verify --------------------------------------------------------------------------------------------------

/// One file of a store.
#[derive(Debug, Serialize)]
struct Listed {
    path: PathBuf,
    bytes: u64,
    arch: Option<String>,
    class: Option<String>,
    compiler: Option<String>,
    /// Whether it is of the source that this program has: what its daemon would use.
    current: bool,
    /// Why it cannot be used.
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct StoreReport {
    store: PathBuf,
    source: String,
    whole: usize,
    broken: usize,
    artifacts: Vec<Listed>,
}

fn list(options: &KernelsStoreOptions) -> anyhow::Result<ExitCode> {
    let report = look(options)?;
    if options.json {
        terminal::print_json(&report)?;
    } else {
        terminal::print(&list_text(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn verify(options: &KernelsStoreOptions) -> anyhow::Result<ExitCode> {
    let report = look(options)?;
    if report.artifacts.is_empty() {
        // An empty or a wrong directory must not pass for a store that is whole.
        let sentence = format!("There are no kernels in {}", report.store.display());
        let remedy = "Name the store, or fill this one with `statecopy kernels build`.";
        return Err(Failure::usage(sentence, remedy).into());
    }
    if options.json {
        terminal::print_json(&report)?;
    } else {
        terminal::print(&verify_text(&report))?;
    }
    let whole = report.broken == 0;
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::from(EXIT_MISMATCHES) })
}

fn look(options: &KernelsStoreOptions) -> anyhow::Result<StoreReport> {
    let store = Store::open(directory(options)).map_err(|error| unusable(&error))?;
    let source = source_hash();
    let entries = store.entries().map_err(|error| unusable(&error))?;
    let artifacts: Vec<Listed> = entries.into_iter().map(|entry| listed(entry, &source)).collect();
    let broken = artifacts.iter().filter(|listed| listed.problem.is_some()).count();
    let whole = artifacts.len() - broken;
    Ok(StoreReport { store: store.directory().to_owned(), source, whole, broken, artifacts })
}

fn listed(entry: Entry, source: &str) -> Listed {
    let Entry { path, bytes, found } = entry;
    match found {
        Ok(ArtifactKey { arch, class, source: of, compiler }) => Listed {
            path,
            bytes,
            arch: Some(arch.to_string()),
            class: Some(class.name()),
            compiler: Some(compiler),
            current: of == source,
            problem: None,
        },
        Err(error) => Listed {
            path,
            bytes,
            arch: None,
            class: None,
            compiler: None,
            current: false,
            problem: Some(error.to_string()),
        },
    }
}

fn list_text(report: &StoreReport) -> String {
    let mut table = Table::new(["CHIP", "CLASS", "COMPILER", "SOURCE", "SIZE"]);
    for listed in report.artifacts.iter().filter(|listed| listed.problem.is_none()) {
        let cell = |value: &Option<String>| value.clone().unwrap_or_default();
        let source = if listed.current { "this program's" } else { "another" };
        table.row([
            cell(&listed.arch),
            cell(&listed.class),
            cell(&listed.compiler),
            source.to_owned(),
            bytes(listed.bytes),
        ]);
    }
    let mut text = format!("{}\n", report.store.display());
    if !table.is_empty() {
        text.push_str(&format!("\n{}\n", table.render()));
    }
    text.push_str(&summary(report));
    text.push_str(&problems(report));
    text
}

/// For each chip how much of what this program needs is there, and what is broken.
fn summary(report: &StoreReport) -> String {
    let mut chips: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for listed in report.artifacts.iter().filter(|listed| listed.current) {
        if let (Some(arch), Some(class)) = (&listed.arch, &listed.class) {
            chips.entry(arch).or_default().insert(class);
        }
    }
    let mut text = String::new();
    for (chip, classes) in chips {
        text.push_str(&format!("{chip}: {} of {} kernels\n", classes.len(), class::COUNT));
    }
    if text.is_empty() {
        text.push_str("Nothing that this program can use; `statecopy kernels build --help` says how to fill it\n");
    }
    text
}

fn verify_text(report: &StoreReport) -> String {
    let counts = format!("{} whole, {} broken\n", report.whole, report.broken);
    summary(report) + &problems(report) + &counts
}

/// What cannot be used, each file named.
fn problems(report: &StoreReport) -> String {
    let problems = report.artifacts.iter().filter_map(|listed| listed.problem.as_ref());
    problems.map(|problem| format!("{problem}\n")).collect()
}

// --- both -------------------------------------------------------------------------------------------------------------

#[expect(clippy::disallowed_methods, reason = "where this user keeps what can be made again")]
fn directory(options: &KernelsStoreOptions) -> PathBuf {
    let variable = |name| std::env::var_os(name);
    options.store.clone().unwrap_or_else(|| {
        default_directory(variable("XDG_CACHE_HOME").as_deref(), variable("HOME").as_deref())
    })
}

fn unusable(error: &StoreError) -> Failure {
    match error {
        StoreError::Io { what: "read", .. } | StoreError::Crowded { .. } => {
            Failure::usage(error.to_string(), error.remedy())
        }
        _ => Failure::other(error.to_string(), error.remedy()),
    }
}

fn refused(refusal: Refusal) -> anyhow::Error {
    Error::from(refusal).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(classes: Vec<CudaClass>) -> Vec<String> {
        let mut names: Vec<String> = classes.into_iter().map(CudaClass::name).collect();
        names.dedup();
        names
    }

    #[test]
    fn presets_need_one_kernel_each() {
        for preset in [Preset::KimiK3Tp8, Preset::KimiLinear, Preset::Tiny] {
            assert_eq!(names(classes_of(preset)), ["fused-item4-vector16-even"], "{preset:?}");
        }
    }

    #[test]
    fn a_report_tells_what_is_there_and_what_is_broken() {
        let listed = |arch: &str, current, problem: Option<&str>| Listed {
            path: "/store/file".into(),
            bytes: 2_048,
            arch: Some(arch.to_owned()),
            class: Some("fused-item4-vector16-even".to_owned()),
            compiler: Some("nvrtc-13.0".to_owned()),
            current,
            problem: problem.map(str::to_owned),
        };
        let mut report = StoreReport {
            store: "/store".into(),
            source: String::new(),
            whole: 2,
            broken: 1,
            artifacts: vec![
                listed("sm_90", true, None),
                listed("sm_90", false, None),
                listed("sm_90", false, Some("The artifact /store/file is broken: cut")),
            ],
        };
        let expected =
            "sm_90: 1 of 42 kernels\nThe artifact /store/file is broken: cut\n2 whole, 1 broken\n";
        assert_eq!(verify_text(&report), expected);
        let text = list_text(&report);
        for part in
            ["/store\n", "this program's", "another", "/store/file is broken: cut", "2.00 KiB"]
        {
            assert!(text.contains(part), "{text}");
        }
        report.artifacts.clear();
        assert!(list_text(&report).contains("kernels build --help"));
    }
}
