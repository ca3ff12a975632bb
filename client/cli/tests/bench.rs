//! The benchmark as a user runs it, with trials too few to say anything: it must run, and say what it did. No speed is
//! asserted.
#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

fn statecopy(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_statecopy"));
    command.args(arguments).env_remove("STATECOPY_ADDR").output().unwrap()
}

/// A run of that many trials of some cases, in little time.
fn bench(output: &str, cases: &str, further: &[&str]) -> Output {
    let mut arguments =
        vec!["bench", "--output", output, "--cases", cases, "--trials", "2", "--seed", "7"];
    arguments.extend(["--sessions", "20", "--idle-ms", "100"]);
    arguments.extend(further);
    statecopy(&arguments)
}

/// The paths that a case must have been measured on.
fn labels(record: &Value, table: &str, case: &str, mode: &str) -> Vec<String> {
    let paths = record[table][case][mode].as_object();
    let mut labels: Vec<String> =
        paths.map(|paths| paths.keys().cloned().collect()).unwrap_or_default();
    labels.sort();
    labels
}

const COPIES: [&str; 6] =
    ["control", "grpc", "inproc", "inproc_nocheck", "inproc_preallocated", "ring"];

#[test]
fn a_run_records_every_path_of_every_case_and_is_reported_with_a_plot() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("run.json");
    let output = file.to_str().unwrap();
    let ran = bench(output, "empty,batch69,24576/s8/,262144/s1/scatter", &["--commit", "abc"]);
    assert!(ran.status.success(), "{ran:?}");

    let record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let cases = ["24576/s8/gather", "24576/s8/clear", "24576/s8/scatter", "262144/s1/scatter"];
    for case in cases.into_iter().chain(["batch69", "empty"]) {
        for mode in ["host_enqueue", "wall"] {
            for table in ["medians_us", "samples_us"] {
                let mut expected: Vec<&str> = COPIES.into();
                if case == "empty" && mode == "wall" {
                    expected.push("pingpong_spin");
                    expected.sort_unstable();
                }
                assert_eq!(labels(&record, table, case, mode), expected, "{table} {case} {mode}");
            }
            for (path, samples) in record["samples_us"][case][mode].as_object().unwrap() {
                let samples: Vec<f64> = samples
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|sample| sample.as_f64().unwrap())
                    .collect();
                assert_eq!(samples.len(), 2, "{case} {mode} {path}");
                let median = record["medians_us"][case][mode][path].as_f64().unwrap();
                assert!((median - f64::midpoint(samples[0], samples[1])).abs() < 0.01);
            }
        }
    }
    assert_eq!(
        labels(&record, "samples_us", "empty_after_sleep", "wall"),
        ["control", "pingpong_futex", "ring"]
    );
    assert_eq!(record["seed"], 7);
    assert_eq!(record["trials"], 2);
    assert_eq!(record["compiler_entries_while_serving"], 0);
    assert_eq!(record["source"]["commit"], "abc");
    assert_eq!(record["source"]["executable_blake3"].as_str().unwrap().len(), 64);
    assert_eq!(record["settings"]["copy_threads"], 1);
    assert_ne!(record["pinning"]["worker"], record["pinning"]["executor"]);
    assert!(!record["machine"]["cpu_model"].as_str().unwrap().is_empty());
    assert!(record["footprint"]["idle_daemon_rss_anon_kib"].as_u64().unwrap() > 0);
    assert_eq!(record["footprint"]["sessions"], 20);
    assert_eq!(record["paths"].as_object().unwrap().len(), 9);

    let table = String::from_utf8(ran.stdout).unwrap();
    for text in ["batch69", "RING/INPROC", "empty: ring / pingpong_spin", "idle daemon: CPU"] {
        assert!(table.contains(text), "{text} is missing in:\n{table}");
    }
    let reported = statecopy(&["bench", "report", output]);
    assert!(reported.status.success(), "{reported:?}");
    let again = String::from_utf8(reported.stdout).unwrap();
    assert!(again.contains(&table), "the report holds the table of the run");
    let plot = fs::read_to_string(directory.path().join("run.svg")).unwrap();
    assert!(plot.starts_with("<svg") && plot.trim_end().ends_with("</svg>"));
    for text in ["microseconds", "S=8", "gather, rows of 24576 bytes", "batch69", "inproc"] {
        assert!(plot.contains(text), "{text} is missing in the plot");
    }
    fs::remove_file(directory.path().join("run.svg")).unwrap();
    fs::create_dir(directory.path().join("run.svg")).unwrap();
    let unwritable = statecopy(&["bench", "report", output]);
    assert_eq!(unwritable.status.code(), Some(2), "{unwritable:?}");
    let told = String::from_utf8(unwritable.stderr).unwrap();
    assert!(told.contains("run.svg cannot be written: Is a directory"), "{told}");
    assert!(told.contains("a directory that this user may write"), "{told}");
}

#[test]
fn all_cores_copy_without_being_pinned() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("run.json");
    let ran = bench(file.to_str().unwrap(), "24576/s1/gather", &["--all-cores"]);
    assert!(ran.status.success(), "{ran:?}");
    let record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(record["settings"]["all_cores"], true);
    assert_eq!(record["settings"]["copy_threads"], record["machine"]["cpus"]);
    assert!(record["pinning"].is_null());
}

#[test]
fn an_existing_output_and_an_unknown_case_are_wrong_usage() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("run.json");
    let output = file.to_str().unwrap();
    fs::write(&file, "an older run").unwrap();
    let refused = bench(output, "empty", &[]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "an older run");

    fs::remove_file(&file).unwrap();
    let refused = bench(output, "no such case", &[]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(!file.exists());
    let none = statecopy(&["bench"]);
    assert_eq!(none.status.code(), Some(2), "{none:?}");
    let not_one = statecopy(&["bench", "report", env!("CARGO_MANIFEST_PATH")]);
    assert_eq!(not_one.status.code(), Some(2), "{not_one:?}");
}
