use std::fs;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;

use super::*;

fn bind(path: &Path) -> io::Result<UnixListener> {
    UnixListener::bind(path)
}

fn bits(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
}

/// A directory that does not exist yet, in one that is taken away at the end.
fn fresh() -> (tempfile::TempDir, PathBuf) {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("run");
    (parent, path)
}

#[test]
fn a_missing_directory_is_made_for_this_user_alone_and_a_clean_end_leaves_nothing_in_it() {
    let (_parent, path) = fresh();
    let mut directory = RuntimeDirectory::open(&path, false).unwrap();
    let _control = directory.bind_control(bind).unwrap();
    let _descriptors = directory.bind_descriptor(bind).unwrap();
    assert_eq!(bits(&path), 0o700);
    assert_eq!(bits(&directory.control_socket()), 0o600);
    assert_eq!(bits(&directory.descriptor_socket()), 0o600);
    drop(directory);
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
}

#[test]
fn other_users_may_connect_where_they_are_allowed() {
    let (_parent, path) = fresh();
    let mut directory = RuntimeDirectory::open(&path, true).unwrap();
    let _control = directory.bind_control(bind).unwrap();
    assert_eq!(bits(&path), 0o711);
    assert_eq!(bits(&directory.control_socket()), 0o666);
}

#[test]
fn a_second_daemon_is_refused_while_the_first_one_lives() {
    let (_parent, path) = fresh();
    let mut first = RuntimeDirectory::open(&path, false).unwrap();
    let _control = first.bind_control(bind).unwrap();
    let error = RuntimeDirectory::open(&path, false).unwrap_err();
    assert!(matches!(error, RuntimeDirectoryError::AlreadyRunning { .. }), "{error}");
    assert!(first.control_socket().exists());
    drop(first);
    RuntimeDirectory::open(&path, false).unwrap();
}

#[test]
fn a_start_waits_for_a_device_process_that_is_about_to_end() {
    let (_parent, path) = fresh();
    let first = RuntimeDirectory::open(&path, false).unwrap();
    let inherited = first.lock().try_clone().unwrap();
    drop(first);
    let next = std::thread::spawn({
        let path = path.clone();
        move || RuntimeDirectory::open(&path, false).map(drop)
    });
    assert!(!next.is_finished(), "the lock is held");
    drop(inherited);
    next.join().unwrap().unwrap();
}

#[test]
fn the_lock_and_its_file_last_while_a_device_process_holds_its_descriptor() {
    let (_parent, path) = fresh();
    let mut first = RuntimeDirectory::open(&path, false).unwrap();
    let _control = first.bind_control(bind).unwrap();
    let inherited = first.lock().try_clone().unwrap();
    drop(first);
    let left: Vec<_> = fs::read_dir(&path).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(left, [LOCK]);
    let error = RuntimeDirectory::open(&path, false).unwrap_err();
    assert!(matches!(error, RuntimeDirectoryError::AlreadyRunning { .. }), "{error}");
    drop(inherited);
    drop(RuntimeDirectory::open(&path, false).unwrap());
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
}

#[test]
fn an_end_that_waits_for_a_device_process_takes_the_locks_file_away_with_it() {
    let (_parent, path) = fresh();
    let mut directory = RuntimeDirectory::open(&path, false).unwrap();
    let inherited = directory.lock().try_clone().unwrap();
    directory.wait_for_heirs();
    let end = std::thread::spawn(move || drop(directory));
    assert!(!end.is_finished(), "the lock is held");
    drop(inherited);
    end.join().unwrap();
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
}

#[test]
fn a_socket_that_was_made_and_is_not_served_is_taken_away() {
    let (_parent, path) = fresh();
    let mut directory = RuntimeDirectory::open(&path, false).unwrap();
    let error = directory
        .bind_control(|path| UnixListener::bind(path).and(Err::<(), _>(Errno::MFILE.into())))
        .unwrap_err();
    assert!(matches!(error, RuntimeDirectoryError::System { .. }), "{error}");
    drop(directory);
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
}

#[test]
fn a_stale_socket_is_replaced() {
    let (_parent, path) = fresh();
    let mut first = RuntimeDirectory::open(&path, false).unwrap();
    drop(first.bind_control(bind).unwrap());
    let stale = fs::symlink_metadata(first.control_socket()).unwrap();
    assert!(stale.file_type().is_socket());
    let _second = first.bind_control(bind).unwrap();
}

#[test]
fn a_socket_on_which_somebody_listens_is_refused_though_the_lock_is_free_and_outlives_the_refusal()
{
    let (_parent, path) = fresh();
    let mut directory = RuntimeDirectory::open(&path, false).unwrap();
    let socket = directory.descriptor_socket();
    let listener = UnixListener::bind(&socket).unwrap();
    let _control = directory.bind_control(bind).unwrap();
    let error = directory.bind_descriptor(bind).unwrap_err();
    assert!(matches!(error, RuntimeDirectoryError::Refused { .. }), "{error}");
    drop(directory);
    assert!(socket.exists(), "only what was bound here is taken away");
    drop(listener);
    RuntimeDirectory::open(&path, false).unwrap().bind_descriptor(bind).unwrap();
}

#[test]
fn whatever_else_lies_at_a_sockets_path_is_refused_and_left_alone() {
    let (_parent, path) = fresh();
    let mut directory = RuntimeDirectory::open(&path, false).unwrap();
    let socket = directory.control_socket();

    fs::write(&socket, "mine").unwrap();
    let error = directory.bind_control(bind).unwrap_err();
    assert!(matches!(error, RuntimeDirectoryError::Refused { .. }), "{error}");
    assert_eq!(fs::read(&socket).unwrap(), b"mine");
    fs::remove_file(&socket).unwrap();

    let _target = UnixListener::bind(path.join("target")).unwrap();
    symlink("target", &socket).unwrap();
    let error = directory.bind_control(bind).unwrap_err();
    assert!(matches!(error, RuntimeDirectoryError::Refused { .. }), "{error}");
    assert!(fs::symlink_metadata(&socket).unwrap().is_symlink());
    drop(directory);
    assert!(path.join("target").exists());
    assert!(fs::symlink_metadata(&socket).unwrap().is_symlink());
}

#[test]
fn somebody_elses_file_is_refused() {
    let (_parent, path) = fresh();
    fs::create_dir(&path).unwrap();
    let mut stat = fstat(fs::File::open(&path).unwrap()).unwrap();
    stat.st_mode = FileType::Socket.as_raw_mode() | 0o600;
    stat.st_uid = geteuid().as_raw() + 1;
    let error = check_file(&path, &stat, FileType::Socket, "is no socket").unwrap_err();
    assert!(error.to_string().contains("belongs to another user"), "{error}");
}

#[test]
fn a_directory_that_others_may_write_or_that_is_a_link_is_refused() {
    let (_parent, path) = fresh();
    fs::create_dir(&path).unwrap();
    for mode in [0o777, 0o720, 0o702] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let error = RuntimeDirectory::open(&path, false).unwrap_err();
        assert!(error.to_string().contains("may be written"), "{error}");
        assert_eq!(bits(&path), mode);
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let link = path.with_extension("link");
    symlink(&path, &link).unwrap();
    let error = RuntimeDirectory::open(&link, false).unwrap_err();
    assert!(error.to_string().contains("symbolic link"), "{error}");
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    RuntimeDirectory::open(&path, false).unwrap();
}

#[test]
fn a_lock_that_is_a_link_or_no_file_is_refused_and_its_target_left_alone() {
    let (_parent, path) = fresh();
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    let lock = path.join(LOCK);
    symlink("nowhere", &lock).unwrap();
    let error = RuntimeDirectory::open(&path, false).unwrap_err();
    assert!(error.to_string().contains("symbolic link"), "{error}");
    assert!(!path.join("nowhere").exists());
    fs::remove_file(&lock).unwrap();
    fs::create_dir(&lock).unwrap();
    let error = RuntimeDirectory::open(&path, false).unwrap_err();
    assert!(matches!(error, RuntimeDirectoryError::Refused { .. }), "{error}");
}

#[test]
fn a_path_too_long_for_a_socket_is_refused_before_anything_is_made() {
    let (_parent, path) = fresh();
    let long = path.join("a".repeat(100));
    let error = RuntimeDirectory::open(&long, false).unwrap_err();
    assert!(matches!(error, RuntimeDirectoryError::PathTooLong { .. }), "{error}");
    assert!(!path.exists());
}
