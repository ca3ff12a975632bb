//! Where a daemon listens.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The socket's name inside a runtime directory.
pub const SOCKET_NAME: &str = "statecopyd.sock";
/// The variable that [`Address::from_env`] reads first.
pub const ADDRESS_VARIABLE: &str = "STATECOPY_ADDR";

/// The longest path that the kernel takes for a Unix socket, in bytes (`sun_path` less its terminating zero).
const PATH_BYTES_MAX: usize = 107;
const SYSTEM_DIRECTORY: &str = "/run/statecopy";

/// The Unix socket of a daemon.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    socket: PathBuf,
}

/// Why a text is no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// There is nothing in it.
    #[error(
        "The address is empty; give unix:///path/of/the/socket, the socket's path, or a runtime directory"
    )]
    Empty,
    /// It names another transport.
    #[error("{scheme}:// is not spoken; the daemon listens on a Unix socket (unix:///path)")]
    Scheme {
        /// What stands before `://`.
        scheme: String,
    },
    /// The path cannot be written as a URI.
    #[error("The path {path:?} is not UTF-8")]
    NotText {
        /// The path.
        path: PathBuf,
    },
    /// The kernel takes no such long path.
    #[error(
        "The path {path:?} has {given} bytes; a Unix socket's path has at most {PATH_BYTES_MAX}"
    )]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        given: usize,
    },
}

impl Address {
    /// The address of a socket by its path.
    ///
    /// # Errors
    /// When the path is empty, is not UTF-8 or is longer than a socket's path may be.
    pub fn of_socket(path: impl Into<PathBuf>) -> Result<Self, AddressError> {
        let path = path.into();
        let given = path.as_os_str().len();
        if given == 0 {
            return Err(AddressError::Empty);
        }
        if path.to_str().is_none() {
            return Err(AddressError::NotText { path });
        }
        if given > PATH_BYTES_MAX {
            return Err(AddressError::TooLong { path, given });
        }
        Ok(Self { socket: path })
    }

    /// The address of the daemon whose runtime directory this is.
    ///
    /// # Errors
    /// As [`Address::of_socket`].
    pub fn in_directory(directory: impl AsRef<Path>) -> Result<Self, AddressError> {
        let directory = directory.as_ref();
        if directory.as_os_str().is_empty() {
            return Err(AddressError::Empty);
        }
        Self::of_socket(directory.join(SOCKET_NAME))
    }

    /// The address in `STATECOPY_ADDR`; without it the socket in `$XDG_RUNTIME_DIR/statecopy`, or in `/run/statecopy`
    /// where there is no such variable.
    ///
    /// # Errors
    /// When the variable holds no address.
    pub fn from_env() -> Result<Self, AddressError> {
        Self::resolve(variable(ADDRESS_VARIABLE), variable("XDG_RUNTIME_DIR"))
    }

    fn resolve(
        address: Option<OsString>,
        runtime_directory: Option<OsString>,
    ) -> Result<Self, AddressError> {
        if let Some(address) = address.filter(|address| !address.is_empty()) {
            return Self::parse_bytes(address.as_bytes());
        }
        match runtime_directory.filter(|directory| !directory.is_empty()) {
            Some(directory) => Self::in_directory(Path::new(&directory).join("statecopy")),
            None => Self::in_directory(SYSTEM_DIRECTORY),
        }
    }

    fn parse_bytes(text: &[u8]) -> Result<Self, AddressError> {
        let path = |bytes: &[u8]| PathBuf::from(OsString::from_vec(bytes.to_vec()));
        if let Some(rest) = text.strip_prefix(b"unix://").or_else(|| text.strip_prefix(b"unix:")) {
            let path = path(rest);
            // Some give the scheme to a directory; where there is one, its socket is meant.
            return if path.is_dir() { Self::in_directory(path) } else { Self::of_socket(path) };
        }
        if let Some(at) = text.windows(3).position(|window| window == b"://") {
            let scheme = String::from_utf8_lossy(&text[..at]).into_owned();
            return Err(AddressError::Scheme { scheme });
        }
        let path = path(text);
        if path.extension().is_some_and(|extension| extension == "sock") {
            return Self::of_socket(path);
        }
        Self::in_directory(path)
    }

    /// The path of the gRPC socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

/// `unix:///path` (or `unix:/path`) is a socket, or a runtime directory where there is such a directory; a plain path is a socket when it ends in `.sock`, and otherwise a runtime directory.
impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        Self::parse_bytes(text.as_bytes())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.socket.display())
    }
}

/// The one place where the client reads the environment.
#[expect(
    clippy::disallowed_methods,
    reason = "where the daemon listens is said by the environment"
)]
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(text: &str) -> String {
        text.parse::<Address>().unwrap().socket().to_str().unwrap().to_owned()
    }

    #[test]
    fn a_socket_is_named_by_uri_or_path_or_directory() {
        assert_eq!(socket("unix:///run/a.b"), "/run/a.b");
        assert_eq!(socket("unix:/run/a.b"), "/run/a.b");
        assert_eq!(socket("/run/x/statecopyd.sock"), "/run/x/statecopyd.sock");
        assert_eq!(socket("/run/x"), "/run/x/statecopyd.sock");
        assert_eq!(socket("relative/"), "relative/statecopyd.sock");
        assert_eq!(
            socket(&"/run/x".parse::<Address>().unwrap().to_string()),
            "/run/x/statecopyd.sock"
        );
    }

    #[test]
    fn a_uri_that_names_a_directory_means_its_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        assert_eq!(socket(&format!("unix://{path}")), format!("{path}/statecopyd.sock"));
        assert_eq!(socket(&format!("unix://{path}/other")), format!("{path}/other"));
    }

    #[test]
    fn what_is_no_address_says_why() {
        assert_eq!("".parse::<Address>(), Err(AddressError::Empty));
        assert_eq!("unix://".parse::<Address>(), Err(AddressError::Empty));
        assert_eq!(
            "http://127.0.0.1:1".parse::<Address>(),
            Err(AddressError::Scheme { scheme: "http".to_owned() })
        );
        let long = format!("unix:///{}", "a".repeat(107));
        assert!(matches!(long.parse::<Address>(), Err(AddressError::TooLong { given: 108, .. })));
        let bytes = OsString::from_vec(b"/run/\xff".to_vec());
        assert!(matches!(Address::of_socket(bytes), Err(AddressError::NotText { .. })));
    }

    #[test]
    fn the_environment_is_asked_in_its_order() {
        let resolve = |address: &str, runtime: &str| {
            let address = Address::resolve(Some(address.into()), Some(runtime.into())).unwrap();
            address.socket().to_str().unwrap().to_owned()
        };
        assert_eq!(resolve("/a/b.sock", "/run/user/1"), "/a/b.sock");
        assert_eq!(resolve("", "/run/user/1"), "/run/user/1/statecopy/statecopyd.sock");
        assert_eq!(resolve("", ""), "/run/statecopy/statecopyd.sock");
        let system = Address::resolve(None, None).unwrap();
        assert_eq!(system.socket(), Path::new("/run/statecopy/statecopyd.sock"));
    }
}
