//! The callback on the launch path of this process's device.
//!
//! A profiler in this process may watch launches. A plan with a foreign callback on its launch path is not sealed, and one
//! that appears after the seal stops serving (contract: Seal): whether one is there is a single load.

use std::mem;
use std::ptr;

use statecopy_proto::{Refusal, RefusalCode};

use crate::plan::Variant;
use crate::sync::{AtomicPtr, Ordering};

/// Called at the start of each launch with the variant that serves it.
pub type LaunchHook = fn(Variant);

/// The hook as a pointer, or null. Written by [`install_launch_hook`] and [`remove_launch_hook`] alone.
static LAUNCH_HOOK: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// Installs the callback of this process, in place of an earlier one.
pub fn install_launch_hook(hook: LaunchHook) {
    LAUNCH_HOOK.store(hook as *mut (), Ordering::Release);
}

/// Removes it.
pub fn remove_launch_hook() {
    LAUNCH_HOOK.store(ptr::null_mut(), Ordering::Release);
}

/// Whether a callback is installed: one load.
#[must_use]
pub fn launch_hook_present() -> bool {
    !LAUNCH_HOOK.load(Ordering::Acquire).is_null()
}

/// Refuses a seal while one is installed.
///
/// # Errors
/// HOOK_PRESENT.
pub(crate) fn check_launch_path() -> Result<(), Refusal> {
    if launch_hook_present() {
        let sentence = "A callback is installed on the launch path of the device";
        return Err(Refusal::new(RefusalCode::HookPresent, sentence).about("launch callback"));
    }
    Ok(())
}

/// Calls it, if there is one.
pub(crate) fn at_launch(variant: Variant) {
    let hook = LAUNCH_HOOK.load(Ordering::Acquire);
    if hook.is_null() {
        return;
    }
    // SAFETY: the word is null or was made from a `LaunchHook`, which has the size and validity of a pointer.
    let hook = unsafe { mem::transmute::<*mut (), LaunchHook>(hook) };
    hook(variant);
}
