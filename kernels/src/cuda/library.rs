//! Opening NVIDIA's libraries at run time: the same binary runs where there are none.

use std::error::Error as _;
use std::path::Path;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// Opens a library that the loader searches for, or one at a path; otherwise the loader's reason.
///
/// # Safety
/// Its initialisers run: it is one that the operator has installed, or names.
pub(super) unsafe fn open(path: &Path) -> Result<Library, String> {
    // SAFETY: the caller's own promise.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    // The error itself only says that it failed; its source says why.
    library.map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))
}
