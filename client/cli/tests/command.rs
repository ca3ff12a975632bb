//! The command as a user runs it: the real program, its own daemon, its own workers.
#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Ten times what any of these may take.
const DEADLINE: Duration = Duration::from_secs(120);

const SMALL_TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/small-trace.jsonl");

/// A directory for everything temporary that a command makes, so that what it leaves behind is seen.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::Builder::new().prefix("t").tempdir().unwrap())
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_statecopy"));
        command.args(arguments).env("TMPDIR", self.0.path()).env_remove("STATECOPY_ADDR");
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn start(&self, arguments: &[&str]) -> Running {
        let mut command = self.command(arguments);
        Running(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    fn left_behind(&self) -> Vec<PathBuf> {
        fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// Waits until a daemon that some command here started answers, and returns its runtime directory.
    fn answering_daemon(&self) -> String {
        let found = wait_for(|| {
            let runtime = self.left_behind().pop()?.join("run").to_str()?.to_owned();
            self.run(&["ping", "--address", &runtime]).status.success().then_some(runtime)
        });
        found.expect("a daemon answers")
    }
}

/// A command that is killed at the end of its test, if not before.
struct Running(Child);

impl Running {
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + DEADLINE;
    while Instant::now() < deadline {
        if let Some(found) = look() {
            return Some(found);
        }
        thread::sleep(Duration::from_millis(10));
    }
    None
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Processes whose command line names a path: what a command started for itself.
fn processes_naming(path: &Path) -> usize {
    let wanted = path.to_str().unwrap();
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let lines = entries.filter_map(|entry| {
        let mut line = String::new();
        fs::File::open(entry.path().join("cmdline")).ok()?.read_to_string(&mut line).ok()?;
        Some(line)
    });
    lines.filter(|line| line.contains(wanted)).count()
}

#[test]
fn the_demonstration_verifies_every_preset_and_leaves_nothing_behind() {
    for preset in ["kimi-k3-tp8", "kimi-linear", "tiny"] {
        let place = Place::new();
        let output = place.run(&[
            "demo", "--json", "--preset", preset, "--steps", "12", "--layers", "5", "--rows", "9",
        ]);
        assert!(output.status.success(), "{output:?}");
        let report = json(&output);
        for key in
            ["rows_gathered", "rows_cleared", "rows_scattered", "rows_skipped", "bytes_copied"]
        {
            assert!(report[key].as_u64().unwrap() > 0, "{key} in {report}");
        }
        for key in ["gather_us_p50", "gather_us_p99", "scatter_us_p50", "scatter_us_p99"] {
            assert!(report[key].as_f64().unwrap() > 0.0, "{key} in {report}");
        }
        for key in ["mismatches", "compiles_after_seal", "refusals"] {
            assert_eq!(report[key], 0, "{key} in {report}");
        }
        assert_eq!(report["preset"], preset);
        assert_eq!([&report["layers"], &report["workers"], &report["steps"]], [5, 2, 12]);
        assert!(report["device"].is_string());
        assert_eq!(place.left_behind(), Vec::<PathBuf>::new());
        assert_eq!(processes_naming(place.0.path()), 0);
    }
}

#[test]
fn one_wrong_byte_ends_the_demonstration_with_exit_code_one() {
    let place = Place::new();
    let output =
        place.run(&["demo", "--json", "--preset", "tiny", "--steps", "4", "--inject-fault"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let report = json(&output);
    assert_eq!(report["mismatches"], 1);
    let place = report["first_mismatches"][0].as_str().unwrap();
    assert!(place.starts_with("worker 0, layer 0, row 0, byte 0 is "), "{place}");
}

#[test]
fn without_json_the_result_is_a_table_and_no_progress_is_drawn_into_a_pipe() {
    let place = Place::new();
    let output = place.run(&["demo", "--preset", "tiny", "--steps", "4", "--workers", "1"]);
    let table = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(
        table.lines().any(|line| line.starts_with("mismatches") && line.ends_with(" 0")),
        "{table}"
    );
    assert_eq!(stderr(&output).lines().count(), 1, "only the daemon's address: {output:?}");
}

#[test]
fn status_and_ping_answer_while_a_demonstration_runs_and_a_given_daemon_stays() {
    let place = Place::new();
    let _host = place.start(&["demo", "--json", "--preset", "tiny", "--steps", "1000000"]);
    let runtime = place.answering_daemon();
    let shown = wait_for(|| {
        let status = json(&place.run(&["status", "--json", "--address", &runtime]));
        let copies = status["sessions"][1]["copies"].as_u64()?;
        (copies > 0).then_some(status)
    });
    let status = shown.expect("two workers copy");
    let plan = &status["devices"][0]["plans"][0];
    assert_eq!(plan["state"], "published");
    assert_eq!(plan["variants"].as_array().unwrap().len(), 4);
    assert_eq!(status["sessions"][0]["layers"].as_array().unwrap().len(), 4);
    assert_eq!(status["sessions"][0]["layers"][0]["signature"], plan["signature"]);

    let pong = json(&place.run(&["ping", "--json", "--address", &format!("unix://{runtime}")]));
    assert_eq!(pong["incarnation"], status["incarnation"]);
    assert!(pong["uptime_ms"].is_u64() && pong["round_trip_us"].is_u64(), "{pong}");
    let guest =
        place.run(&["demo", "--json", "--preset", "tiny", "--steps", "4", "--address", &runtime]);
    assert_eq!(json(&guest)["mismatches"], 0);
    assert!(place.run(&["ping", "--address", &runtime]).status.success());
}

#[test]
fn a_killed_demonstration_takes_its_daemon_workers_and_files_with_it() {
    let place = Place::new();
    let mut demo = place.start(&["demo", "--json", "--preset", "tiny", "--steps", "1000000"]);
    place.answering_daemon();
    demo.kill();
    let gone = wait_for(|| (processes_naming(place.0.path()) == 0).then_some(()));
    assert!(gone.is_some(), "processes are left");
    let removed = wait_for(|| place.left_behind().is_empty().then_some(()));
    assert!(removed.is_some(), "{:?}", place.left_behind());
}

#[test]
fn a_killed_worker_ends_the_demonstration_at_once_and_is_named() {
    let place = Place::new();
    let arguments = ["demo", "--json", "--preset", "tiny", "--steps", "1000000"];
    let mut command = place.command(&arguments);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut demo = Running(command.spawn().unwrap());
    let runtime = place.answering_daemon();
    let worker = wait_for(|| {
        let status = json(&place.run(&["status", "--json", "--address", &runtime]));
        let sessions = status["sessions"].as_array()?.clone();
        let second = sessions.iter().find(|session| session["label"] == "demo worker 1")?;
        second["worker_pid"].as_i64()
    });
    let worker = i32::try_from(worker.expect("the second worker")).unwrap();
    let worker = rustix::process::Pid::from_raw(worker).unwrap();
    rustix::process::kill_process(worker, rustix::process::Signal::KILL).unwrap();
    let exit = wait_for(|| demo.0.try_wait().unwrap()).expect("the demonstration ends");
    assert_eq!(exit.code(), Some(3));
    let mut told = String::new();
    demo.0.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert!(told.contains("Worker 1") && told.contains("SIGKILL"), "{told}");
    assert!(told.contains("out of memory"), "{told}");
}

#[test]
fn a_killed_daemon_of_its_own_ends_a_command_at_once_and_is_named() {
    let trace = ["replay", SMALL_TRACE, "--json", "--layers", "1024", "--per-layer"];
    let steps = ["demo", "--json", "--preset", "tiny", "--steps", "1000000"];
    for arguments in [&steps[..], &trace] {
        let place = Place::new();
        let mut command = place.command(arguments);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut running = Running(command.spawn().unwrap());
        let runtime = place.answering_daemon();
        let copies = wait_for(|| {
            let status = json(&place.run(&["status", "--json", "--address", &runtime]));
            status["sessions"][0]["copies"].as_u64().filter(|copies| *copies > 0)
        });
        assert!(copies.is_some(), "{arguments:?} copies");
        let serves = |process: &str| {
            let line = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains(&runtime) && line.contains("\0serve\0")
        };
        let mut processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        let supervisor = processes.find_map(|entry| {
            let process = entry.file_name().into_string().ok()?;
            serves(&process).then(|| process.parse().unwrap())
        });
        let supervisor = rustix::process::Pid::from_raw(supervisor.unwrap()).unwrap();
        rustix::process::kill_process(supervisor, rustix::process::Signal::KILL).unwrap();
        let killed = Instant::now();
        let exit = wait_for(|| running.0.try_wait().unwrap()).expect("the command ends");
        // The deadline of a call, for which it would look for the next daemon.
        assert!(killed.elapsed() < Duration::from_secs(9), "{:?}", killed.elapsed());
        assert_eq!(exit.code(), Some(3), "{arguments:?}");
        let mut told = String::new();
        running.0.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        assert!(told.contains("The daemon ended with signal: 9 (SIGKILL)"), "{told}");
        assert!(told.contains("out of memory"), "{told}");
    }
}

#[test]
fn the_small_trace_replays_in_batches_and_layer_by_layer() {
    let place = Place::new();
    let mut rows = Vec::new();
    for more in [&[][..], &["--per-layer"]] {
        let arguments = ["replay", SMALL_TRACE, "--json", "--layers", "5", "--max-num-seqs", "8"];
        let output = place.run(&[&arguments, more].concat());
        assert!(output.status.success(), "{output:?}");
        let report = json(&output);
        assert_eq!(report["requests"], 60);
        for key in ["mismatches", "compiles_after_seal", "refusals"] {
            assert_eq!(report[key], 0, "{key} in {report}");
        }
        for key in ["steps", "prefix_hits", "rows_gathered", "rows_cleared", "rows_scattered"] {
            assert!(report[key].as_u64().unwrap() > 0, "{key} in {report}");
        }
        let share = report["copy_share_of_wall"].as_f64().unwrap();
        assert!(share > 0.0 && share < 1.0, "{report}");
        assert!(report["copy_us_p50"].as_f64() <= report["copy_us_p99"].as_f64());
        rows.push(report["rows_scattered"].clone());
    }
    assert_eq!(rows[0], rows[1]);
    assert_eq!(place.left_behind(), Vec::<PathBuf>::new());
}

#[test]
fn a_broken_trace_line_is_named_and_nothing_is_started() {
    let place = Place::new();
    let trace = place.0.path().join("broken.jsonl");
    let small = fs::read_to_string(SMALL_TRACE).unwrap();
    let broken: Vec<&str> = small.lines().take(6).chain(["{\"timestamp\": 1}"]).collect();
    fs::write(&trace, broken.join("\n")).unwrap();
    let output = place.run(&["replay", trace.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(stderr(&output).contains("line 7"), "{output:?}");
    assert!(stderr(&output).contains("input_length"), "{output:?}");
    assert!(output.stdout.is_empty());
}

#[test]
fn what_cannot_be_used_is_told_with_a_way_out() {
    let place = Place::new();
    for (arguments, exit, sentence, remedy) in [
        (
            &["bench", "--output", "/nowhere/b.json"][..],
            2,
            "/nowhere/b.json cannot be made",
            "Name a new file in a directory that exists",
        ),
        (
            &["bench", "report", "/nowhere.json"],
            2,
            "/nowhere.json cannot be read",
            "Name a file that `statecopy bench --output` wrote",
        ),
        (&["demo", "--steps", "0"], 2, "invalid value '0' for '--steps", "0 is not in 1.."),
        (&["replay", "/nowhere.jsonl"], 2, "/nowhere.jsonl", "Name a file of one JSON object"),
        (&["replay", SMALL_TRACE, "--rows", "1"], 2, "rows is 1", "Give --rows 256 or more"),
        (
            &["replay", SMALL_TRACE, "--max-num-seqs", "0"],
            2,
            "max-num-seqs is 0",
            "--max-num-seqs 1",
        ),
    ] {
        let output = place.run(arguments);
        assert_eq!(output.status.code(), Some(exit), "{arguments:?}: {output:?}");
        let told = stderr(&output);
        assert!(told.contains(sentence) && told.contains(remedy), "{arguments:?}: {told}");
        assert!(output.stdout.is_empty(), "{arguments:?}: {output:?}");
    }
    let output = place.command(&["demo"]).env("TMPDIR", "/nowhere").output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(stderr(&output).contains("Let TMPDIR name a directory"), "{output:?}");
}

#[test]
fn a_reader_that_stops_early_is_no_failure() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let place = Place::new();
    let mut command = place.command(&["replay", SMALL_TRACE, "--dry-run"]);
    let output = command.stdout(writer).stderr(Stdio::piped()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(stderr(&output), "");
}

#[test]
fn the_version_is_that_of_the_command() {
    let output = Place::new().run(&["-V"]);
    let told = String::from_utf8(output.stdout).unwrap();
    assert_eq!(told, concat!("statecopy ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn nobody_answering_is_unavailable_with_a_remedy() {
    let place = Place::new();
    for command in [&["ping"][..], &["status"], &["demo"], &["replay", SMALL_TRACE]] {
        let nowhere = place.0.path().join("nowhere");
        let output = place.run(&[command, &["--address", nowhere.to_str().unwrap()]].concat());
        assert_eq!(output.status.code(), Some(46), "{output:?}");
        assert!(stderr(&output).contains("Start statecopyd"), "{output:?}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_wrong_address_in_the_environment_is_wrong_usage() {
    let place = Place::new();
    for question in ["ping", "status"] {
        let mut command = place.command(&[question]);
        let output = command.env("STATECOPY_ADDR", "http://127.0.0.1:1").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stderr(&output).contains("STATECOPY_ADDR: http:// is not spoken"), "{output:?}");
    }
}

#[test]
fn a_refusal_ends_the_command_with_its_own_exit_code() {
    let place = Place::new();
    let runtime = place.0.path().join("run");
    let address = runtime.to_str().unwrap();
    let mut daemon =
        place.command(&["daemon", "serve", "--http-address", "off", "--runtime-dir", address]);
    daemon.env("STATECOPY_LIMITS__LAYERS_MAX", "3").stderr(Stdio::null());
    let _daemon = Running(daemon.spawn().unwrap());
    let ping = || place.run(&["ping", "--address", address]).status.success().then_some(());
    assert!(wait_for(ping).is_some());
    let output = place.run(&["demo", "--preset", "tiny", "--address", address]);
    assert_eq!(output.status.code(), Some(41), "{output:?}");
    assert!(stderr(&output).contains("QUOTA_EXCEEDED"), "{output:?}");
}
