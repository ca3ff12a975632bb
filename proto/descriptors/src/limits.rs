//! How many descriptors this process may have.

use std::io;

use rustix::process::{Resource, getrlimit, setrlimit};

/// RLIMIT_NOFILE. `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorLimit {
    /// What is in force.
    pub soft: Option<u64>,
    /// What an unprivileged process can raise it to.
    pub hard: Option<u64>,
}

/// Raises the soft limit to the hard one, and says what stands now. It is a limit of the whole process; call it once, at its start.
///
/// # Errors
/// What the kernel says.
pub fn raise_descriptor_limit() -> io::Result<DescriptorLimit> {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        setrlimit(Resource::Nofile, limit)?;
    }
    Ok(DescriptorLimit { soft: limit.current, hard: limit.maximum })
}
