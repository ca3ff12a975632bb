//! What findings about GPUs are made from beside what a process told: this machine, as the settings see it.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;
use statecopy_kernels::cuda::store::Store;
use statecopy_kernels::findings::mps::{self, Mps};
use statecopy_kernels::findings::{CONNECTIONS, Circumstances, DAEMON_CONNECTIONS};

use crate::config::{DeviceName, DeviceSettings};

/// Looks at what is there of MPS and at the stores. It reads files, and calls no driver.
#[must_use]
pub fn look(settings: &DeviceSettings) -> Circumstances {
    let directory = variable("CUDA_MPS_PIPE_DIRECTORY").filter(|path| !path.is_empty());
    let directory = directory.map_or_else(|| mps::DEFAULT_DIRECTORY.into(), PathBuf::from);
    let connections = variable(CONNECTIONS);
    Circumstances {
        mps: Mps::look(directory, Path::new("/proc"), geteuid().as_raw()),
        gpu_wanted: matches!(settings.device, DeviceName::Cuda(_)),
        chips: chips(settings),
        searched: settings.cuda.nvrtc_directory.as_ref().map_or_else(
            || "looked for where the loader searches".to_owned(),
            |directory| format!("looked for in {}", directory.display()),
        ),
        selected_max: settings.selected_max,
        connections: connections.map(|text| text.to_string_lossy().into_owned()),
        daemon_connections: DAEMON_CONNECTIONS,
    }
}

/// The chips that the stores hold kernels for. A store that cannot be read holds none.
fn chips(settings: &DeviceSettings) -> Vec<String> {
    let stores = settings.artifact_stores.iter().chain([&settings.artifact_store]);
    let entries =
        stores.filter_map(|directory| Store::open(directory).ok()?.entries().ok()).flatten();
    let mut chips: Vec<String> =
        entries.filter_map(|entry| Some(entry.found.ok()?.arch.to_string())).collect();
    chips.sort();
    chips.dedup();
    chips
}

#[expect(clippy::disallowed_methods, reason = "what the driver itself reads of the environment")]
fn variable(name: &str) -> Option<OsString> {
    env::var_os(name)
}
