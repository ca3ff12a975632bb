//! Replays against a stand-in for the daemon, and broken traces.

use std::io::Write;

use clap::Parser;

use super::*;
use crate::cli::{Cli, Command};
use crate::failure::EXIT_USAGE;
use crate::worker::stand_in::{Fault, StandIn};

const SMALL_TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/small-trace.jsonl");

fn options(more: &[&str]) -> ReplayOptions {
    let arguments = ["statecopy", "replay", SMALL_TRACE, "--layers", "3", "--max-num-seqs", "8"];
    match Cli::try_parse_from(arguments.iter().chain(more)).unwrap().command {
        Command::Replay(options) => options,
        other => panic!("{other:?}"),
    }
}

fn replay(options: &ReplayOptions, fault: Fault) -> (Replayed, Tally) {
    let requests = read_trace(&options.trace, options.requests).unwrap();
    let scheduler = Scheduler::new(limits(options), requests).unwrap();
    let arrangement = Arrangement::new(options.preset, 3, limits(options).rows.into()).unwrap();
    let memory = WorkerMemory::allocate(arrangement, 8, 1, 4096).unwrap();
    let stand_in = StandIn::new(&memory, fault);
    let mut worker = Worker::new(memory, stand_in);
    let replayed = play(options, scheduler, &mut worker).unwrap();
    worker.check_everything().unwrap();
    (replayed, worker.into_parts().0)
}

#[test]
fn the_small_trace_replays_without_a_mismatch_and_hits_prefixes() {
    for more in [&["--rows", "40"][..], &["--per-layer"]] {
        let options = options(more);
        let (replayed, tally) = replay(&options, Fault::None);
        assert_eq!(replayed.requests, 60);
        assert!(replayed.prefix_hits > 20, "{replayed:?}");
        assert_eq!(tally.mismatches, 0);
        assert_eq!(tally.rows_cleared / 3 + replayed.prefix_hits, 60);
        assert_eq!(tally.rows_gathered + tally.rows_cleared, tally.rows_scattered);
        assert_eq!(tally.rows_skipped, 0);
    }
}

#[test]
fn a_wrong_copy_is_a_mismatch() {
    for fault in [Fault::GatherIgnoresFlags, Fault::GatherReadsTheNextRow, Fault::ScatterSkipsARow]
    {
        let (_, tally) = replay(&options(&["--requests", "20"]), fault);
        assert!(tally.mismatches > 0, "{fault:?}");
    }
}

#[test]
fn a_dry_run_counts_what_a_replay_copies() {
    let dry = options(&["--dry-run"]);
    let scheduler = Scheduler::new(limits(&dry), read_trace(&dry.trace, None).unwrap()).unwrap();
    let counted = serde_json::to_value(schedule(&dry, scheduler)).unwrap();
    let (replayed, tally) = replay(&options(&[]), Fault::None);
    let copied = Report::new(&options(&[]), replayed, &tally, DaemonCounts::default());
    let copied = serde_json::to_value(copied).unwrap();
    for key in [
        "requests",
        "steps",
        "prefix_hits",
        "rows_gathered",
        "rows_cleared",
        "rows_scattered",
        "bytes_copied",
    ] {
        assert_eq!(counted[key], copied[key], "{key}");
    }
    assert_eq!(counted["requests_are"], "none");
}

#[test]
fn a_broken_line_is_named_by_its_number() {
    let good = r#"{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writeln!(file, "{good}\n\n{good}\n{{\"timestamp\": 0}}\n{good}").unwrap();
    let failure = |most| {
        let error = read_trace(file.path(), most).unwrap_err();
        Failure::of(&error)
    };
    let broken = failure(None);
    assert!(
        broken.sentence.contains("line 4") && broken.sentence.contains("input_length"),
        "{broken}"
    );
    assert!(!broken.sentence.contains("line 1"), "{broken}");
    assert_eq!(broken.exit, EXIT_USAGE);
    assert_eq!(read_trace(file.path(), Some(2)).unwrap().len(), 2);
    assert_eq!(failure(Some(3)).sentence, broken.sentence);
}

#[test]
fn too_few_requests_and_too_small_chunks_are_wrong_usage() {
    for more in [["--requests", "0"], ["--chunk-tokens", "63"]] {
        let arguments = ["statecopy", "replay", SMALL_TRACE, more[0], more[1]];
        let error = Cli::try_parse_from(arguments).unwrap_err();
        assert_eq!(error.exit_code(), i32::from(EXIT_USAGE), "{error}");
    }
}

#[test]
fn a_missing_an_empty_and_an_endless_trace_are_usage_errors() {
    let exit = |path: &Path| Failure::of(&read_trace(path, None).unwrap_err()).exit;
    assert_eq!(exit(Path::new("/nonexistent/trace.jsonl")), EXIT_USAGE);
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(exit(directory.path()), EXIT_USAGE);
    let file = tempfile::NamedTempFile::new().unwrap();
    assert_eq!(exit(file.path()), EXIT_USAGE);
    file.as_file().set_len(LINE_BYTES_MAX + 2).unwrap();
    let error = Failure::of(&read_trace(file.path(), None).unwrap_err());
    assert!(error.sentence.contains("line 1") && error.sentence.contains("longer than"), "{error}");
}
