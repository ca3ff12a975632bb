//! What `tests/device/run` does beside what it starts: an MPS server of its own comes, and goes.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use statecopy_tests::{runs, send_signal, until};
use tempfile::TempDir;

/// Stands in for NVIDIA's: with -d it leaves a process behind, and with "quit" ends it. `deaf` is one that does not listen.
const CONTROL: &str = r#"#!/bin/sh
if [ "$1" = -d ]; then
    sleep 600 >/dev/null 2>&1 </dev/null &
    echo $! >"$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
    echo $! >"$STAGE/server"
    exit 0
fi
read -r word
[ "$word" = quit ] && [ ! -e "$STAGE/deaf" ] && kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid")"
"#;

/// Stands in for the suite.
const SUITE: &str = r#"#!/bin/sh
echo $$ >"$STAGE/suite"
echo "$@" "pipes ${CUDA_MPS_PIPE_DIRECTORY-nowhere}" >"$STAGE/said"
mv "$STAGE/said" "$STAGE/seen"
[ ! -e "$STAGE/waits" ] || exec sleep 600
exit "$(cat "$STAGE/code")"
"#;

/// A folder as `build` makes it, and a machine with MPS or without.
struct Stage(TempDir);

impl Stage {
    fn new(code: u8) -> Self {
        let stage = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(stage.at("from/kernels")).unwrap();
        fs::create_dir(stage.at("bin")).unwrap();
        stage.write("code", &code.to_string());
        stage.write("from/commit", "none");
        stage.write("from/statecopyd", "#!/bin/sh\n");
        stage.write("from/statecopy-device-suite", SUITE);
        stage.write("bin/nvidia-cuda-mps-control", CONTROL);
        stage
    }

    fn at(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.at(name), text).unwrap();
        fs::set_permissions(self.at(name), Permissions::from_mode(0o755)).unwrap();
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.at(name)).unwrap().trim().to_owned()
    }

    fn has(&self, name: &str) -> bool {
        Path::new(&self.at(name)).exists()
    }

    /// `tests/device/run suite`, with that before the case.
    fn suite(&self, options: &[&str]) -> Command {
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/run"));
        command
            .args(["suite", "--from", &self.at("from"), "--output", &self.at("out")])
            .args(options)
            .arg("a_case")
            .env("STAGE", self.0.path())
            .env("TMPDIR", self.0.path())
            .env("PATH", format!("{}:/usr/bin:/bin", self.at("bin")))
            .stdin(Stdio::null());
        command
    }

    fn pid(&self, name: &str) -> u32 {
        self.read(name).parse().unwrap()
    }

    /// Nothing is left of a run: neither its processes nor its folder.
    fn is_clean(&self) -> bool {
        let folders = fs::read_dir(self.0.path()).unwrap();
        let left = folders.filter(|entry| {
            entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("tmp.")
        });
        !["server", "suite"].iter().any(|name| runs(self.pid(name))) && left.count() == 0
    }
}

#[test]
fn what_runs_is_a_client_of_a_server_that_ends_with_it() {
    for code in [0, 1] {
        let stage = Stage::new(code);
        let run = stage.suite(&["--mps"]).output().unwrap();
        assert_eq!(run.status.code(), Some(code.into()), "{run:?}");
        let seen = stage.read("seen");
        assert!(seen.contains(" --mps a_case pipes ") && !seen.ends_with("nowhere"), "{seen}");
        until("nothing is left", || stage.is_clean());
    }
}

#[test]
fn without_the_option_there_is_no_server() {
    let stage = Stage::new(0);
    assert!(stage.suite(&[]).output().unwrap().status.success());
    assert!(!stage.has("server"));
    assert!(!stage.read("seen").contains("--mps"));
}

#[test]
fn a_script_that_is_ended_ends_what_it_started() {
    let stage = Stage::new(0);
    stage.write("waits", "");
    let mut script = stage.suite(&["--mps"]).stdout(Stdio::null()).spawn().unwrap();
    until("the suite runs", || stage.has("seen"));
    send_signal(script.id(), Signal::TERM).unwrap();
    assert!(!script.wait().unwrap().success());
    until("nothing is left", || stage.is_clean());
}

#[test]
fn a_server_that_does_not_listen_is_ended() {
    let stage = Stage::new(0);
    stage.write("deaf", "");
    let run = stage.suite(&["--mps"]).output().unwrap();
    assert!(run.status.success(), "{run:?}");
    assert!(String::from_utf8_lossy(&run.stderr).contains("because it does not end"), "{run:?}");
    until("nothing is left", || stage.is_clean());
}

#[test]
fn a_machine_without_mps_is_told_in_a_sentence() {
    let stage = Stage::new(0);
    fs::remove_file(stage.at("bin/nvidia-cuda-mps-control")).unwrap();
    if Path::new("/usr/bin/nvidia-cuda-mps-control").exists() {
        println!("this machine has MPS");
        return;
    }
    let run = stage.suite(&["--mps"]).output().unwrap();
    assert_eq!(run.status.code(), Some(2));
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(
        said.contains("needs nvidia-cuda-mps-control, and it is not on this machine"),
        "{said}"
    );
    assert!(!stage.has("seen"));
}
