//! Stores as an operator finds them: filled, empty, damaged, foreign.

use std::os::unix::fs::PermissionsExt;
use std::thread;

use tempfile::TempDir;

use super::*;

const HOPPER: Arch = Arch::of_capability(9, 0);
const BLACKWELL: Arch = Arch::of_capability(10, 0);

fn class() -> CudaClass {
    CudaClass::named("fused-item4-vector16-even").unwrap()
}

fn key(arch: Arch, compiler: &str) -> ArtifactKey {
    ArtifactKey { arch, class: class(), source: source_hash(), compiler: compiler.to_owned() }
}

fn new_store() -> (TempDir, Store) {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::create(directory.path().join("kernels")).unwrap();
    (directory, store)
}

fn without_compiler(stores: Vec<Store>) -> Artifacts {
    let compiler = Compiler::open(Some(Path::new("/nowhere")));
    assert!(compiler.is_err());
    Artifacts::new(stores, None, compiler)
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn what_is_saved_is_loaded_and_is_for_this_user_alone() {
    let (_directory, store) = new_store();
    let key = key(HOPPER, "nvrtc-13.0");
    assert_eq!(store.load(&key).unwrap(), None);
    let path = store.save(&key, b"code").unwrap();
    assert_eq!(store.load(&key).unwrap().as_deref(), Some(&b"code"[..]));
    assert_eq!(mode(&path), 0o600);
    for directory in path.ancestors().skip(1).take(3) {
        assert_eq!(mode(directory), 0o700, "{}", directory.display());
    }
    let below = path.strip_prefix(store.directory()).unwrap().to_str().unwrap();
    let name = format!("sm_90/fused-item4-vector16-even/{}-nvrtc-13.0.cubin", &source_hash()[..16]);
    assert_eq!(below, name);
    let entries = store.entries().unwrap();
    assert_eq!(entries.len(), 1);
    assert_eq!(entries[0].found.as_ref().unwrap(), &key);
}

#[test]
fn each_user_has_a_store_and_so_has_the_system() {
    let directory = |cache: Option<&str>, home: Option<&str>| {
        default_directory(cache.map(OsStr::new), home.map(OsStr::new))
    };
    assert_eq!(directory(Some("/c"), Some("/h")), Path::new("/c/statecopy/kernels"));
    assert_eq!(directory(Some("relative"), Some("/h")), Path::new("/h/.cache/statecopy/kernels"));
    assert_eq!(directory(None, None), Path::new("/var/cache/statecopy/kernels"));
}

#[test]
fn a_damaged_file_is_named_and_never_used() {
    let (_directory, store) = new_store();
    let key = key(HOPPER, "nvrtc-13.0");
    let path = store.save(&key, b"some machine code").unwrap();
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let artifacts = without_compiler(vec![store.clone()]);
    for damaged in [&whole[..whole.len() - 1], &whole[..20], &[], &flipped] {
        fs::write(&path, damaged).unwrap();
        let error = store.load(&key).unwrap_err();
        assert!(matches!(error, StoreError::Broken { .. }), "{error}");
        let refusal = artifacts.obtain(HOPPER, class()).unwrap_err();
        assert_eq!(refusal.code(), RefusalCode::PrepareFailed);
        assert!(refusal.sentence().contains(path.to_str().unwrap()), "{refusal}");
        assert!(store.entries().unwrap()[0].found.is_err());
    }
    // The next writer puts a whole one there.
    store.save(&key, b"some machine code").unwrap();
    assert!(store.load(&key).unwrap().is_some());
}

#[test]
fn an_artifact_in_the_place_of_another_is_refused() {
    let (_directory, store) = new_store();
    let foreign = store.save(&key(BLACKWELL, "nvrtc-13.0"), b"for another chip").unwrap();
    let wanted = key(HOPPER, "nvrtc-13.0");
    let place = store.path_of(&wanted);
    fs::create_dir_all(place.parent().unwrap()).unwrap();
    fs::copy(foreign, &place).unwrap();
    let error = store.load(&wanted).unwrap_err().to_string();
    assert!(error.contains("it is the artifact of another arch: sm_100"), "{error}");
    let refusal = without_compiler(vec![store]).obtain(HOPPER, class()).unwrap_err();
    assert!(refusal.sentence().contains("another arch: sm_100"), "{refusal}");
}

#[test]
fn without_a_compiler_any_compilers_artifact_of_this_source_will_do() {
    let (_directory, store) = new_store();
    let mut stale = key(HOPPER, "nvrtc-13.0");
    stale.source = "0".repeat(64);
    store.save(&stale, b"of an older source").unwrap();
    let artifacts = without_compiler(vec![store.clone()]);
    let refusal = artifacts.obtain(HOPPER, class()).unwrap_err();
    assert!(refusal.sentence().contains("there is no compiler"), "{refusal}");
    let path = store.save(&key(HOPPER, "nvrtc-12.9"), b"of this source").unwrap();
    let found = artifacts.obtain(HOPPER, class()).unwrap();
    assert_eq!(
        (found.code.as_slice(), found.origin),
        (&b"of this source"[..], Origin::Stored(path))
    );
    assert!(artifacts.renew(HOPPER, class()).is_err());
}

#[test]
fn a_store_for_another_chip_is_refused_with_both_chips_named() {
    let (_directory, store) = new_store();
    store.save(&key(BLACKWELL, "nvrtc-13.0"), b"code").unwrap();
    let refusal = without_compiler(vec![store]).obtain(HOPPER, class()).unwrap_err();
    assert_eq!(refusal.subject(), "sm_90");
    for part in
        ["There is no kernel fused-item4-vector16-even for sm_90", "holds kernels for sm_100"]
    {
        assert!(refusal.sentence().contains(part), "{refusal}");
    }
    assert!(refusal.remedy().contains("statecopy kernels build --arch sm_90"), "{refusal}");
    let nowhere = without_compiler(Vec::new()).obtain(HOPPER, class()).unwrap_err();
    assert!(nowhere.sentence().contains("no store is named"), "{nowhere}");
}

#[test]
fn stores_are_read_in_order() {
    let (_first, baked) = new_store();
    let (_second, other) = new_store();
    let other_path = other.save(&key(HOPPER, "nvrtc-13.0"), b"other").unwrap();
    let artifacts = without_compiler(vec![baked.clone(), other]);
    assert_eq!(
        artifacts.obtain(HOPPER, class()).unwrap().origin,
        Origin::Stored(other_path.clone())
    );
    // A broken file does not hide a good one behind it, and is told.
    let baked_path = baked.save(&key(HOPPER, "nvrtc-13.0"), b"baked").unwrap();
    fs::write(&baked_path, b"broken").unwrap();
    let found = artifacts.obtain(HOPPER, class()).unwrap();
    assert_eq!((found.origin, found.problems.len()), (Origin::Stored(other_path), 1));
    baked.save(&key(HOPPER, "nvrtc-13.0"), b"baked").unwrap();
    assert_eq!(artifacts.obtain(HOPPER, class()).unwrap().code, b"baked");
}

#[test]
fn a_directory_with_too_many_entries_is_told_and_not_read_in_part() {
    let (_directory, store) = new_store();
    let path = store.save(&key(HOPPER, "nvrtc-13.0"), b"code").unwrap();
    let directory = path.parent().unwrap();
    for number in 1..FILES_MAX {
        fs::write(directory.join(number.to_string()), "").unwrap();
    }
    assert_eq!(store.entries().unwrap().len(), 1);
    fs::write(directory.join("one more"), "").unwrap();
    let error = store.entries().unwrap_err();
    assert!(matches!(&error, StoreError::Crowded { path } if path == directory), "{error}");
    assert!(error.to_string().contains("more than 1024 entries"), "{error}");
    assert!(error.remedy().contains("older versions"), "{}", error.remedy());
    let refusal = without_compiler(vec![store]).obtain(HOPPER, class()).unwrap_err();
    assert!(refusal.sentence().contains("more than 1024 entries"), "{refusal}");
}

#[test]
fn writers_at_once_leave_one_whole_file() {
    let (_directory, store) = new_store();
    let key = key(HOPPER, "nvrtc-13.0");
    let codes: Vec<Vec<u8>> = (0..4_u8).map(|writer| vec![writer; 100_000]).collect();
    thread::scope(|scope| {
        for code in &codes {
            scope.spawn(|| {
                for _ in 0..20 {
                    store.save(&key, code).unwrap();
                    let found = store.load(&key).unwrap().unwrap();
                    assert!(codes.contains(&found));
                }
            });
        }
    });
    let directory = store.path_of(&key);
    let left = fs::read_dir(directory.parent().unwrap()).unwrap().count();
    assert_eq!(left, 1, "temporary files stay behind");
}

#[test]
fn a_store_that_cannot_be_written_says_so_and_keeps_what_it_has() {
    let (_directory, store) = new_store();
    let first = key(HOPPER, "nvrtc-13.0");
    let path = store.save(&first, b"code").unwrap();
    // A file where a directory must be stands for a read-only directory: root may write those.
    fs::write(store.directory().join("sm_100"), b"").unwrap();
    let error = store.save(&key(BLACKWELL, "nvrtc-13.0"), b"code").unwrap_err();
    assert!(matches!(error, StoreError::Io { what: "created", .. }), "{error}");
    assert_eq!(store.load(&key(BLACKWELL, "nvrtc-13.0")).unwrap(), None);
    fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o500)).unwrap();
    assert_eq!(store.load(&first).unwrap().as_deref(), Some(&b"code"[..]));
    if !rustix::process::geteuid().is_root() {
        assert!(matches!(store.save(&first, b"new"), Err(StoreError::Io { what: "written", .. })));
    }
    fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn a_store_that_cannot_be_read_is_not_an_empty_one() {
    let (_directory, store) = new_store();
    let key = key(HOPPER, "nvrtc-13.0");
    let class_directory = store.path_of(&key).parent().unwrap().to_owned();
    fs::create_dir_all(class_directory.parent().unwrap()).unwrap();
    // A link to itself stands for a directory without permission: root may read those.
    std::os::unix::fs::symlink(&class_directory, &class_directory).unwrap();
    let error = store.entries().unwrap_err();
    assert!(matches!(error, StoreError::Io { what: "read", .. }), "{error}");
    let refusal = without_compiler(vec![store.clone()]).obtain(HOPPER, class()).unwrap_err();
    let told = format!("{} cannot be read", class_directory.display());
    assert!(refusal.sentence().contains(&told), "{refusal}");
    let chip = store.directory().join("sm_100");
    std::os::unix::fs::symlink(&chip, &chip).unwrap();
    let error = store.entries().unwrap_err().to_string();
    assert!(error.starts_with(&format!("{} cannot be read", chip.display())), "{error}");
    fs::remove_dir_all(store.directory()).unwrap();
    std::os::unix::fs::symlink(store.directory(), store.directory()).unwrap();
    assert!(store.entries().is_err());
    let refusal = without_compiler(vec![store.clone()]).obtain(HOPPER, class()).unwrap_err();
    let told = format!("{} cannot be read", store.directory().display());
    assert!(refusal.sentence().contains(&told), "{refusal}");
}

#[test]
fn a_place_that_others_may_write_holds_no_code() {
    for (owner, mode, user, trusted) in [
        (1000, 0o40_700, 1000, true),
        (1000, 0o40_755, 1000, true),
        (0, 0o40_755, 1000, true),
        (0, 0o40_755, 0, true),
        (1001, 0o40_700, 1000, false),
        (1000, 0o40_700, 0, false),
        (1000, 0o40_770, 1000, false),
        (1000, 0o40_702, 1000, false),
        (0, 0o41_777, 1000, false),
    ] {
        let why = untrusted(owner, mode, user);
        assert_eq!(why.is_none(), trusted, "{owner} {mode:o} {user}: {why:?}");
    }
    let (_directory, store) = new_store();
    let key = key(HOPPER, "nvrtc-13.0");
    let path = store.save(&key, b"code").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    let error = store.load(&key).unwrap_err();
    assert!(error.to_string().contains("(mode 0666)"), "{error}");
    fs::set_permissions(store.directory(), fs::Permissions::from_mode(0o777)).unwrap();
    let error = Store::open(store.directory()).unwrap_err();
    assert!(matches!(error, StoreError::Untrusted { .. }), "{error}");
    assert!(Refusal::from(error).remedy().contains("chmod go-w"));
}

#[test]
fn what_is_no_regular_file_is_not_read() {
    let (directory, store) = new_store();
    let key = key(HOPPER, "nvrtc-13.0");
    let path = store.save(&key, b"code").unwrap();
    let elsewhere = directory.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    assert!(matches!(store.load(&key), Err(StoreError::Io { what: "read", .. })));
    fs::remove_file(&path).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
    assert!(matches!(store.load(&key), Err(StoreError::Untrusted { .. })));
    assert!(Store::open(elsewhere).is_err());
}
