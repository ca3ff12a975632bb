//! What this machine shows of NVIDIA's Multi-Process Service without a call of the driver.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Where clients look for it, unless `CUDA_MPS_PIPE_DIRECTORY` names another place.
pub const DEFAULT_DIRECTORY: &str = "/tmp/nvidia-mps";
/// The pipe to the control daemon, in that directory.
const CONTROL: &str = "control";
/// The server's program.
const SERVER: &str = "nvidia-cuda-mps-server";

/// A server's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Server {
    /// Its number.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
}

/// What is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mps {
    /// Where clients of this environment look.
    pub directory: PathBuf,
    /// Whose the control pipe in it is, where there is one.
    pub control_owner: Option<u32>,
    /// Servers that this process can see: those of its PID namespace.
    pub servers: Vec<Server>,
    /// Who asks.
    pub own_uid: u32,
}

impl Mps {
    /// Looks at a pipe directory, and at the processes of `/proc`.
    #[must_use]
    pub fn look(directory: PathBuf, processes: &Path, own_uid: u32) -> Self {
        let control = fs::metadata(directory.join(CONTROL));
        Self {
            control_owner: control.ok().map(|it| it.uid()),
            directory,
            servers: servers(processes),
            own_uid,
        }
    }

    /// A server of another user than the one who asks.
    #[must_use]
    pub fn foreign_server(&self) -> Option<Server> {
        let own = self.servers.iter().any(|server| server.uid == self.own_uid);
        self.servers.first().copied().filter(|_| !own)
    }

    /// In a sentence.
    #[must_use]
    pub fn evidence(&self) -> String {
        let directory = self.directory.display();
        let control = match self.control_owner {
            Some(uid) => format!("{directory}/{CONTROL} is there, of user {uid}"),
            None => format!("there is no {directory}/{CONTROL}"),
        };
        let servers: Vec<String> = self.servers.iter().map(ToString::to_string).collect();
        if servers.is_empty() { control } else { format!("{control}; {}", servers.join(", ")) }
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{SERVER} is process {} of user {}", self.pid, self.uid)
    }
}

fn servers(processes: &Path) -> Vec<Server> {
    let entries = fs::read_dir(processes).into_iter().flatten().flatten();
    let mut found: Vec<Server> = entries
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let command = fs::read(entry.path().join("cmdline")).ok()?;
            let program = command.split(|byte| *byte == 0).next()?;
            let name = program.rsplit(|byte| *byte == b'/').next()?;
            let uid = entry.metadata().ok()?.uid();
            (name == SERVER.as_bytes()).then_some(Server { pid, uid })
        })
        .collect();
    found.sort_by_key(|server| server.pid);
    found
}

#[cfg(test)]
mod tests {
    use rustix::process::geteuid;

    use super::*;

    #[test]
    fn servers_and_the_control_pipe_are_found_with_their_users() {
        let place = tempfile::tempdir().unwrap();
        let own = geteuid().as_raw();
        for (pid, command) in [
            ("41", &b"/usr/bin/nvidia-cuda-mps-server\0-x\0"[..]),
            ("42", b"nvidia-cuda-mps-control\0-d\0"),
            ("self", b"nvidia-cuda-mps-server\0"),
        ] {
            fs::create_dir(place.path().join(pid)).unwrap();
            fs::write(place.path().join(pid).join("cmdline"), command).unwrap();
        }
        let nowhere = Mps::look(place.path().join("pipes"), place.path(), own);
        assert_eq!(nowhere.control_owner, None);
        assert_eq!(nowhere.servers, [Server { pid: 41, uid: own }]);
        assert_eq!(nowhere.foreign_server(), None);
        fs::write(place.path().join("control"), "").unwrap();
        let other = Mps::look(place.path().to_owned(), place.path(), own + 1);
        assert_eq!(other.control_owner, Some(own));
        assert_eq!(other.foreign_server(), Some(Server { pid: 41, uid: own }));
        assert!(other.evidence().contains("process 41"), "{}", other.evidence());
    }
}
