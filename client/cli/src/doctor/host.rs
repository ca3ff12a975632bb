//! What any daemon of this machine needs, with or without a GPU.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Access, access};
use rustix::param::page_size;
use rustix::process::{Resource, geteuid, getrlimit};
use statecopy_client::blocking::Admin;
use statecopy_client::{Address, Error, RefusalCode};
use statecopy_descriptors::SealedMemory;
use statecopy_kernels::findings::{self, Finding, Severity};
use statecopy_kernels::host::cpus_allowed;

use crate::failure::Failure;

/// Descriptors below which a large worker does not register: one region of expandable segments may be thousands.
const DESCRIPTORS_WANTED: u64 = 4_096;
/// Writers beside the owner.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Every finding about the host.
pub(super) fn judge(address: &Address, timeout: Duration) -> Vec<Finding> {
    let mut findings = vec![
        findings::page_size(page_size()),
        shared_memory(),
        findings::cpus(cpus_allowed().get()),
        open_files(getrlimit(Resource::Nofile).maximum),
        locked_memory(getrlimit(Resource::Memlock).current),
    ];
    findings.extend(address.socket().parent().map(runtime_directory));
    findings.push(daemon(address, timeout));
    findings
}

fn shared_memory() -> Finding {
    let made = SealedMemory::create("statecopy-doctor", page_size() as u64)
        .and_then(|memory| memory.map().map(drop));
    match made {
        Ok(()) => Finding::new(Severity::Ok, "shared_memory", "a memfd is made, sealed and mapped"),
        Err(error) => Finding::new(Severity::Problem, "shared_memory", error.to_string())
            .means("Daemon and workers share sealed memory (memfd); without it no session is opened.")
            .remedied_by("Allow memfd_create and F_ADD_SEALS (the container's seccomp profile), and leave memory."),
    }
}

fn open_files(hard: Option<u64>) -> Finding {
    let limit = hard.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let evidence = format!("RLIMIT_NOFILE: {limit} at most; the daemon raises its own to that");
    if hard.is_none_or(|limit| limit >= DESCRIPTORS_WANTED) {
        return Finding::new(Severity::Ok, "open_files", evidence);
    }
    Finding::new(Severity::Warning, "open_files", evidence)
        .means(
            "A region of PyTorch's expandable segments is one descriptor for each 20 MiB: a cache of 60 GB is about 3,000, and its \
             registration would be refused.",
        )
        .remedied_by("Raise the hard limit (ulimit -Hn, LimitNOFILE=, the container's ulimits).")
}

fn locked_memory(soft: Option<u64>) -> Finding {
    let limit = soft.map_or("unlimited".to_owned(), |limit| format!("{limit} bytes"));
    Finding::new(
        Severity::Ok,
        "locked_memory",
        format!("RLIMIT_MEMLOCK: {limit}; statecopy locks none itself"),
    )
}

/// The rules are those by which the daemon refuses a directory.
fn runtime_directory(directory: &Path) -> Finding {
    let path = directory.display();
    let finding =
        |severity, evidence: String| Finding::new(severity, "runtime_directory", evidence);
    let refused = |evidence: String| {
        finding(Severity::Problem, evidence)
            .means("A daemon that is started here refuses the directory, and ends with 73.")
            .remedied_by("Give the directory to the daemon's user with mode 0700, or name another (--runtime-dir, XDG_RUNTIME_DIR).")
    };
    let found = match fs::symlink_metadata(directory) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return not_there(directory),
        Err(error) => return refused(format!("{path}: {error}")),
    };
    let (owner, mode, own) = (found.uid(), found.mode() & 0o7777, geteuid().as_raw());
    if !found.is_dir() {
        return refused(format!("{path} is no directory"));
    }
    if mode & WRITABLE_BY_OTHERS != 0 {
        return refused(format!("{path} has mode {mode:04o}: others may write it"));
    }
    let evidence = format!("{path} has mode {mode:04o} and is of user {owner}");
    if owner != own {
        return finding(Severity::Note, format!("{evidence}; this is user {own}")).means(
            "Its user can start a daemon here. Another one may call it where allow_uids names it.",
        );
    }
    finding(Severity::Ok, evidence)
}

fn not_there(directory: &Path) -> Finding {
    let path = directory.display();
    let parent = directory.parent().unwrap_or(directory);
    let evidence = format!("{path} is not there");
    if access(parent, Access::WRITE_OK | Access::EXEC_OK).is_ok() {
        return Finding::new(Severity::Ok, "runtime_directory", evidence + "; the daemon makes it");
    }
    Finding::new(Severity::Warning, "runtime_directory", format!("{evidence}, and this user cannot make it in {}", parent.display()))
        .means("A daemon that is started as this user ends with 73.")
        .remedied_by("Make the directory for the daemon's user, or name another (--runtime-dir, XDG_RUNTIME_DIR).")
}

fn daemon(address: &Address, timeout: Duration) -> Finding {
    let asked = Admin::connect(address.clone(), timeout).and_then(|admin| admin.inspect());
    let error = match asked {
        Ok(reply) if reply.ready => {
            return Finding::new(
                Severity::Ok,
                "daemon",
                format!("one answers at {address}, and is ready"),
            );
        }
        Ok(_) => {
            return Finding::new(
                Severity::Warning,
                "daemon",
                format!("one answers at {address}, and is not ready"),
            )
            .means("It takes no registration now.")
            .remedied_by("See `statecopy status` and the daemon's log.");
        }
        Err(error) => error,
    };
    let absent = matches!(&error, Error::Unavailable { .. });
    let code = error.code();
    let failure = Failure::of(&error.into());
    let evidence = failure.sentence;
    if absent && code == Some(RefusalCode::Unavailable) {
        return Finding::new(Severity::Note, "daemon", evidence)
            .means("No daemon serves at this address.")
            .remedied_by("Start statecopyd, unless that is still to come.");
    }
    Finding::new(Severity::Problem, "daemon", evidence)
        .means("Somebody is there and does not serve this user.")
        .remedied_by(failure.remedy)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn few_cpus_and_few_descriptors_are_warnings() {
        assert_eq!(findings::cpus(1).severity, Severity::Warning);
        assert_eq!(findings::cpus(2).severity, Severity::Ok);
        assert_eq!(open_files(Some(1_024)).severity, Severity::Warning);
        assert_eq!(open_files(Some(4_096)).severity, Severity::Ok);
        assert_eq!(open_files(None).severity, Severity::Ok);
    }

    #[test]
    fn a_runtime_directory_is_judged_as_the_daemon_judges_it() {
        let place = tempfile::tempdir().unwrap();
        let own = place.path().join("own");
        assert_eq!(runtime_directory(&own).severity, Severity::Ok, "the daemon makes it");
        fs::create_dir(&own).unwrap();
        fs::set_permissions(&own, fs::Permissions::from_mode(0o711)).unwrap();
        assert_eq!(runtime_directory(&own).severity, Severity::Ok);
        fs::set_permissions(&own, fs::Permissions::from_mode(0o770)).unwrap();
        let found = runtime_directory(&own);
        assert_eq!(found.severity, Severity::Problem);
        assert!(found.evidence.contains("0770"), "{found:?}");
        let link = place.path().join("link");
        symlink(&own, &link).unwrap();
        assert_eq!(runtime_directory(&link).severity, Severity::Problem);
    }
}
