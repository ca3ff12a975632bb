//! `statecopy kernels` as a user runs it. What compiles needs `STATECOPY_NVRTC`, the directory of `libnvrtc.so`.
#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn kernels<I: AsRef<OsStr>>(arguments: &[I]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_statecopy"));
    command.arg("kernels").args(arguments).env_remove("LD_LIBRARY_PATH").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[expect(clippy::disallowed_methods, reason = "what the runner of the tests has installed")]
#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
fn nvrtc() -> Option<String> {
    let directory = std::env::var("STATECOPY_NVRTC").ok();
    if directory.is_none() {
        eprintln!("skipped: STATECOPY_NVRTC names no directory with libnvrtc.so");
    }
    directory
}

fn arguments<'a>(store: &'a Path, more: &'a [&'a str]) -> Vec<&'a OsStr> {
    let store = [OsStr::new("--store"), store.as_os_str(), OsStr::new("--json")];
    more.iter().map(OsStr::new).chain(store).collect()
}

#[test]
fn a_store_is_filled_listed_verified_and_mended() {
    let Some(nvrtc) = nvrtc() else { return };
    let place = tempfile::tempdir().unwrap();
    let store = place.path().join("kernels");
    let build =
        ["build", "--arch", "sm_90,sm_100", "--preset", "kimi-k3-tp8,tiny", "--nvrtc", &nvrtc];
    let compiled = |report: &Value| -> Vec<bool> {
        let artifacts = report["artifacts"].as_array().unwrap();
        artifacts.iter().map(|built| built["compiled"].as_bool().unwrap()).collect()
    };
    let first = json(&kernels(&arguments(&store, &build)));
    assert_eq!(compiled(&first), [true, true], "one class for two chips: {first}");
    let second = json(&kernels(&arguments(&store, &build)));
    assert_eq!(compiled(&second), [false, false], "{second}");
    let listed = json(&kernels(&arguments(&store, &["list"])));
    assert_eq!((&listed["whole"], &listed["broken"]), (&2.into(), &0.into()), "{listed}");

    let path = PathBuf::from(first["artifacts"][0]["path"].as_str().unwrap());
    let mut file = fs::read(&path).unwrap();
    *file.last_mut().unwrap() ^= 1;
    fs::write(&path, file).unwrap();
    let verified = kernels(&arguments(&store, &["verify"]));
    assert_eq!(verified.status.code(), Some(1));
    assert!(text(&verified.stdout).contains("BLAKE3"), "{}", text(&verified.stdout));
    let mended = json(&kernels(&arguments(&store, &build)));
    assert_eq!(compiled(&mended).iter().filter(|compiled| **compiled).count(), 1, "{mended}");
    assert_eq!(kernels(&arguments(&store, &["verify"])).status.code(), Some(0));
}

#[test]
fn without_a_compiler_the_command_says_where_to_get_one() {
    let place = tempfile::tempdir().unwrap();
    let nowhere = place.path().join("nowhere");
    let nowhere = nowhere.to_str().unwrap();
    let store = place.path().join("kernels");
    let build = ["build", "--arch", "sm_90", "--all", "--nvrtc", nowhere];
    let output = kernels(&arguments(&store, &build));
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(40), "{told}");
    assert!(told.contains("NVRTC cannot be loaded") && told.contains(nowhere), "{told}");
    assert!(told.contains("pip install nvidia-cuda-nvrtc") && told.contains("--nvrtc"), "{told}");
    assert!(!store.exists(), "nothing was made");
}

#[test]
fn wrong_usage_is_told_in_a_sentence() {
    for (wrong, told) in [
        (&["build", "--all", "--arch", "sm_90a"][..], "\"sm_90a\" is no architecture"),
        (&["build", "--all", "--arch", "90"], "as in sm_80, sm_90 or sm_100"),
        (&["build", "--arch", "sm_90"], "--all"),
        (&["build", "--all"], "--arch"),
        (&["build", "--arch", "sm_90", "--preset", "other"], "kimi-k3-tp8"),
    ] {
        let output = kernels(wrong);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
        assert!(text(&output.stderr).contains(told), "{wrong:?}: {}", text(&output.stderr));
    }
}

#[test]
fn a_store_that_others_may_write_is_refused() {
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).unwrap();
    for command in ["list", "verify"] {
        let output = kernels(&arguments(place.path(), &[command]));
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{told}");
        assert!(
            told.contains("others than its owner may write it") && told.contains("chmod go-w"),
            "{told}"
        );
    }
    let missing = kernels(&arguments(&place.path().join("missing"), &["list"]));
    assert_eq!(missing.status.code(), Some(2));
    assert!(text(&missing.stderr).contains("cannot be read"), "{}", text(&missing.stderr));
}

#[test]
fn what_cannot_be_read_is_never_told_as_whole() {
    let place = tempfile::tempdir().unwrap();
    fs::create_dir(place.path().join("sm_90")).unwrap();
    let class = place.path().join("sm_90/fused-item4-vector16-even");
    // A link to itself stands for a directory without permission: root may read those.
    std::os::unix::fs::symlink(&class, &class).unwrap();
    for command in ["list", "verify"] {
        let output = kernels(&arguments(place.path(), &[command]));
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains(&format!("{} cannot be read", class.display())), "{told}");
        assert!(told.contains("Name a store that this user may use"), "{told}");
        assert!(output.stdout.is_empty(), "{output:?}");
    }
}

#[test]
fn a_directory_without_kernels_is_not_verified() {
    let place = tempfile::tempdir().unwrap();
    let output = kernels(&arguments(place.path(), &["verify"]));
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains(&format!("no kernels in {}", place.path().display())), "{told}");
    assert!(told.contains("kernels build"), "{told}");
    fs::write(place.path().join("some-file"), b"").unwrap();
    assert_eq!(kernels(&arguments(place.path(), &["verify"])).status.code(), Some(2));
    let listed = json(&kernels(&arguments(place.path(), &["list"])));
    assert_eq!(listed["whole"], 0, "{listed}");
}
