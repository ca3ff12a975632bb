//! The directory of the sockets and of the lock.
//!
//! | file | what it is |
//! | --- | --- |
//! | `statecopyd.lock` | an empty file with an flock. The device processes inherit its descriptor: the next daemon starts only when they and the supervisor are all gone, and waits a moment for device processes that are about to end |
//! | `statecopyd.sock` | gRPC |
//! | `statecopyd.fds.sock` | descriptors |
//!
//! The directory is made with mode 0700 and the sockets with 0600. Where other users are allowed, the sockets get 0666 and
//! the directory 0711: who may call is then decided by peer credentials, and nobody else can list or change the directory.
//!
//! Refused, with nothing changed: a directory that is a symbolic link, belongs to another user, or may be written by its
//! group or by others; a lock that is held; a lock or socket path at which anything lies that is not this user's own file
//! of that kind.
//!
//! A socket left behind by a dead daemon is replaced; one on which somebody listens is refused even to the holder of the
//! lock, because a lock file that was deleted by hand locks nothing. An end leaves nothing in the directory, nor does a
//! start that fails; where a device process still lives, its lock stays until it is gone.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Stat, chmod, fchmod, flock, fstat, mkdir,
    openat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;

const LOCK: &str = "statecopyd.lock";
const CONTROL_SOCKET: &str = "statecopyd.sock";
const DESCRIPTOR_SOCKET: &str = "statecopyd.fds.sock";

/// The longest path of a Unix socket, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// How often the lock is taken again because its path names another file by then.
const LOCK_ATTEMPTS: u32 = 8;
/// How long a start waits for the device process of a dead daemon to end.
const DYING_MAX: Duration = Duration::from_secs(3);
const DYING_PAUSE: Duration = Duration::from_millis(20);

/// Why the directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeDirectoryError {
    /// Another daemon lives, or its device process does.
    #[error("Another daemon serves {}: its lock is held", directory.display())]
    AlreadyRunning {
        /// The directory.
        directory: PathBuf,
    },
    /// Something lies there that must not.
    #[error("{}: {what}; nothing was changed", path.display())]
    Refused {
        /// Where.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The path of a socket would be too long.
    #[error("{}: a socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes", path.display())]
    PathTooLong {
        /// The socket.
        path: PathBuf,
    },
    /// The system refused.
    #[error("{}: cannot {action} (--runtime-dir and XDG_RUNTIME_DIR choose another place)", path.display())]
    System {
        /// Where.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system says.
        source: io::Error,
    },
}

type Result<T> = std::result::Result<T, RuntimeDirectoryError>;

/// The directory, held by its lock. What was made in it is taken away when this is dropped: the order of the fields is
/// the order of the end.
#[derive(Debug)]
pub(crate) struct RuntimeDirectory {
    /// Taken away while the lock is held.
    sockets: Sockets,
    lock: Arc<OwnedFd>,
    /// Taken away by whoever can take the lock once more.
    lock_file: LockFile,
    shared: bool,
}

/// The directory itself.
#[derive(Debug)]
struct Place {
    path: PathBuf,
    /// Files are reached from here, whatever becomes of the path.
    directory: OwnedFd,
}

#[derive(Debug)]
struct Sockets {
    place: Arc<Place>,
    /// Those that were bound here.
    bound: Vec<&'static str>,
}

#[derive(Debug)]
struct LockFile {
    place: Arc<Place>,
    /// How long its end waits for those who inherited the lock.
    patience: Duration,
}

impl RuntimeDirectory {
    /// Makes the directory if it is missing, checks it, and takes its lock. `shared`: whether other users may connect.
    pub(crate) fn open(path: &Path, shared: bool) -> Result<Self> {
        let longest = path.join(DESCRIPTOR_SOCKET);
        if longest.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            return Err(RuntimeDirectoryError::PathTooLong { path: longest });
        }
        match mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(system(path, "make the directory")(errno)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = match openat(CWD, path, flags, Mode::empty()) {
            Ok(directory) => directory,
            Err(Errno::LOOP | Errno::NOTDIR) => {
                return Err(refused(path, "is a symbolic link or no directory"));
            }
            Err(errno) => return Err(system(path, "open the directory")(errno)),
        };
        let stat = fstat(&directory).map_err(system(path, "look at the directory"))?;
        if stat.st_uid != geteuid().as_raw() {
            return Err(refused(path, "belongs to another user"));
        }
        if mode(&stat).intersects(Mode::WGRP | Mode::WOTH) {
            return Err(refused(path, "may be written by its group or by others"));
        }
        let place = Arc::new(Place { path: path.to_owned(), directory });
        let lock = Arc::new(place.take_lock(DYING_MAX)?);
        let lock_file = LockFile { place: Arc::clone(&place), patience: Duration::ZERO };
        if shared {
            let entering = Mode::RWXU | Mode::XGRP | Mode::XOTH;
            fchmod(&place.directory, entering).map_err(system(path, "let other users enter"))?;
        }
        let sockets = Sockets { place, bound: Vec::new() };
        Ok(Self { sockets, lock, lock_file, shared })
    }

    /// Lets the end wait a moment for device processes that are about to end, so that the lock's file goes with them.
    pub(crate) fn wait_for_heirs(&mut self) {
        self.lock_file.patience = DYING_MAX;
    }

    /// The lock, for the device processes to inherit.
    pub(crate) fn lock(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.lock)
    }

    /// Where gRPC is served.
    pub(crate) fn control_socket(&self) -> PathBuf {
        self.sockets.place.path.join(CONTROL_SOCKET)
    }

    /// Where descriptors are passed.
    pub(crate) fn descriptor_socket(&self) -> PathBuf {
        self.sockets.place.path.join(DESCRIPTOR_SOCKET)
    }

    /// Binds the control socket, over a stale one.
    pub(crate) fn bind_control<L>(
        &mut self,
        bind: impl FnOnce(&Path) -> io::Result<L>,
    ) -> Result<L> {
        self.bind(CONTROL_SOCKET, bind)
    }

    /// Binds the descriptor socket, over a stale one.
    pub(crate) fn bind_descriptor<L>(
        &mut self,
        bind: impl FnOnce(&Path) -> io::Result<L>,
    ) -> Result<L> {
        self.bind(DESCRIPTOR_SOCKET, bind)
    }

    fn bind<L>(
        &mut self,
        name: &'static str,
        bind: impl FnOnce(&Path) -> io::Result<L>,
    ) -> Result<L> {
        let path = self.sockets.place.path.join(name);
        self.sockets.place.remove_stale(name, &path)?;
        let listener = bind(&path).map_err(|source| {
            // It may have been made before the rest failed. One on which somebody listens stays.
            self.sockets.place.remove_stale(name, &path).ok();
            RuntimeDirectoryError::System { path: path.clone(), action: "bind the socket", source }
        })?;
        self.sockets.bound.push(name);
        let everyone = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
        let access = if self.shared { everyone } else { Mode::RUSR | Mode::WUSR };
        // Nobody else can put another file at this path: the directory is this user's alone.
        chmod(&path, access).map_err(system(&path, "set the socket's mode"))?;
        Ok(listener)
    }
}

impl Place {
    /// Opens and locks the lock file, and makes sure that its path still names it.
    fn take_lock(&self, patience: Duration) -> Result<OwnedFd> {
        let path = self.path.join(LOCK);
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        for _ in 0..LOCK_ATTEMPTS {
            let lock = match openat(&self.directory, LOCK, flags, Mode::RUSR | Mode::WUSR) {
                Ok(lock) => lock,
                Err(Errno::LOOP) => return Err(refused(&path, "is a symbolic link")),
                Err(Errno::NXIO | Errno::ISDIR) => {
                    return Err(refused(&path, "is no regular file"));
                }
                Err(errno) => return Err(system(&path, "open the lock")(errno)),
            };
            let stat = fstat(&lock).map_err(system(&path, "look at the lock"))?;
            check_file(&path, &stat, FileType::RegularFile, "is no regular file")?;
            match self.lock_within(&lock, patience) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    let directory = self.path.clone();
                    return Err(RuntimeDirectoryError::AlreadyRunning { directory });
                }
                Err(errno) => return Err(system(&path, "take the lock")(errno)),
            }
            // A daemon that ended in between took the file away: the lock is on a file that nobody else will find.
            if let Ok(named) = statat(&self.directory, LOCK, AtFlags::SYMLINK_NOFOLLOW)
                && (named.st_dev, named.st_ino) == (stat.st_dev, stat.st_ino)
            {
                return Ok(lock);
            }
        }
        Err(refused(&path, "is replaced again and again"))
    }

    /// Locks an open lock file; waits so long for the device process of a dead daemon to end, but for no daemon that serves.
    fn lock_within(&self, lock: &OwnedFd, patience: Duration) -> std::result::Result<(), Errno> {
        let until = Instant::now() + patience;
        loop {
            let locked = flock(lock, FlockOperation::NonBlockingLockExclusive);
            let dying = || Instant::now() < until && is_stale(&self.path.join(CONTROL_SOCKET));
            if locked != Err(Errno::WOULDBLOCK) || !dying() {
                return locked;
            }
            std::thread::sleep(DYING_PAUSE);
        }
    }

    /// Takes a dead daemon's socket away.
    fn remove_stale(&self, name: &str, path: &Path) -> Result<()> {
        let stat = match statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(system(path, "look at the socket")(errno)),
        };
        check_file(path, &stat, FileType::Socket, "is no socket")?;
        if !is_stale(path) {
            return Err(refused(path, "somebody listens on it"));
        }
        unlinkat(&self.directory, name, AtFlags::empty())
            .map_err(system(path, "take the stale socket away"))
    }

    /// Takes a file of ours away.
    fn remove(&self, name: &str, kind: FileType) {
        let ours = statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| check_file(&self.path, &stat, kind, "").is_ok());
        if ours && let Err(errno) = unlinkat(&self.directory, name, AtFlags::empty()) {
            tracing::warn!(name, %errno, "a file was left in the runtime directory");
        }
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for name in &self.bound {
            self.place.remove(name, FileType::Socket);
        }
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // A device process may still hold the lock by the descriptor that it inherited. Then the file stays, and with it the
        // lock: whoever took it away now would let the next daemon start beside that process. Who can take the lock once
        // more is alone. The file goes while it is locked: whoever waits for it finds its path gone and makes a new one.
        if let Ok(_alone) = self.place.take_lock(self.patience) {
            self.place.remove(LOCK, FileType::RegularFile);
        }
    }
}

/// Whether nobody listens on the socket at a path. Where that cannot be known, somebody may.
fn is_stale(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = SocketAddrUnix::new(path).and_then(|address| {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &address)
    });
    // A listener of another type is EPROTOTYPE, a full queue EAGAIN: both live.
    matches!(connected, Err(Errno::CONNREFUSED | Errno::NOENT))
}

/// Refuses what is not this user's own file of that kind.
fn check_file(path: &Path, stat: &Stat, kind: FileType, otherwise: &'static str) -> Result<()> {
    if FileType::from_raw_mode(stat.st_mode) != kind {
        return Err(refused(path, otherwise));
    }
    if stat.st_uid != geteuid().as_raw() {
        return Err(refused(path, "belongs to another user"));
    }
    Ok(())
}

fn mode(stat: &Stat) -> Mode {
    Mode::from_raw_mode(stat.st_mode)
}

fn refused(path: &Path, what: &'static str) -> RuntimeDirectoryError {
    RuntimeDirectoryError::Refused { path: path.to_owned(), what }
}

fn system(path: &Path, action: &'static str) -> impl FnOnce(Errno) -> RuntimeDirectoryError {
    let path = path.to_owned();
    move |errno| RuntimeDirectoryError::System { path, action, source: errno.into() }
}

#[cfg(test)]
mod tests;
