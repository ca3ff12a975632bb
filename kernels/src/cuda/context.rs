//! A device's context, and the calls that need one.
//!
//! The driver keeps a current context for each thread. [`Context::enter`] makes ours the current one, once a thread, and gives
//! a [`Current`] as the proof: what needs a context is a method of it (`memory_calls`, `stream_calls` and others). A guest in a
//! thread of somebody else uses [`Context::visit`], which puts things back. Statuses become results here; owners with a
//! `Drop` stand in the files that know what the memory is for.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use super::driver::{Driver, DriverError};
use super::sys::{self, Functions, status};
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// The last [`Context::serial`].
static SERIALS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Which context [`Context::enter`] made current in this thread; 0 before the first.
    static ENTERED: Cell<u64> = const { Cell::new(0) };
}

/// The primary context of a device, retained.
#[derive(Debug)]
pub(super) struct Context {
    driver: Arc<Driver>,
    device: sys::Device,
    context: sys::Context,
    /// A number of its own, because the driver gives the address of an ended context to the next.
    serial: u64,
    faulted: AtomicBool,
}

/// How threads wait in the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduling {
    /// Asleep. Set before the context is made; for the process that owns it.
    Sleep,
    /// As whoever made the context wants it; for a guest.
    Unchanged,
}

impl Context {
    /// Retains the primary context, and makes it where there is none.
    pub(super) fn retain(
        driver: Arc<Driver>,
        device: sys::Device,
        scheduling: Scheduling,
    ) -> Result<Self, DriverError> {
        if scheduling == Scheduling::Sleep {
            // SAFETY: no condition.
            let status = unsafe {
                (driver.functions().device_primary_ctx_set_flags)(
                    device,
                    sys::CTX_SCHED_BLOCKING_SYNC,
                )
            };
            driver.check("cuDevicePrimaryCtxSetFlags", status)?;
        }
        let mut context = sys::Context(0);
        // SAFETY: the driver writes one handle.
        let status =
            unsafe { (driver.functions().device_primary_ctx_retain)(&raw mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", status)?;
        let serial = SERIALS.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Self { driver, device, context, serial, faulted: AtomicBool::new(false) })
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    pub(super) fn device(&self) -> sys::Device {
        self.device
    }

    /// Makes the context current in this thread, where it is not yet.
    pub(super) fn enter(&self) -> Result<Current<'_>, DriverError> {
        if ENTERED.get() != self.serial {
            // SAFETY: the context is retained.
            let status = unsafe { (self.driver.functions().ctx_set_current)(self.context) };
            self.check("cuCtxSetCurrent", status)?;
            ENTERED.set(self.serial);
        }
        Ok(Current { context: self, thread: PhantomData })
    }

    /// Makes the context current in this thread for the length of a call, and gives the thread back as it was.
    pub(super) fn visit<T, E: From<DriverError>>(
        &self,
        call: impl FnOnce(Current<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let here = Current { context: self, thread: PhantomData };
        // As in most calls of a worker, whose library uses the same context.
        if self.is_current()? {
            return call(here);
        }
        // SAFETY: the context is retained.
        let status = unsafe { (self.driver.functions().ctx_push_current)(self.context) };
        self.check("cuCtxPushCurrent", status)?;
        let result = call(here);
        let mut popped = sys::Context(0);
        // SAFETY: the driver writes one handle.
        let status = unsafe { (self.driver.functions().ctx_pop_current)(&raw mut popped) };
        self.check("cuCtxPopCurrent", status)?;
        result
    }

    fn is_current(&self) -> Result<bool, DriverError> {
        let mut current = sys::Context(0);
        // SAFETY: the driver writes one handle.
        let status = unsafe { (self.driver.functions().ctx_get_current)(&raw mut current) };
        self.check("cuCtxGetCurrent", status)?;
        Ok(current == self.context)
    }

    /// Whether a call found the context of no more use. Then nothing is given back any more: the device may still write what
    /// it was writing, and the process ends.
    pub(super) fn faulted(&self) -> bool {
        self.faulted.load(Ordering::Relaxed)
    }

    fn check(&self, call: &'static str, status: sys::Status) -> Result<(), DriverError> {
        if status == status::SUCCESS { Ok(()) } else { Err(self.failed(call, status)) }
    }

    #[cold]
    fn failed(&self, call: &'static str, status: sys::Status) -> DriverError {
        let error = self.driver.error(call, status);
        if error.is_sticky() {
            self.faulted.store(true, Ordering::Relaxed);
        }
        error
    }

    /// Calls while giving something back. What fails then is remembered where it matters ([`Context::faulted`]), and a
    /// context of no more use is left alone.
    pub(super) fn give_back(&self, call: impl FnOnce(Current<'_>) -> Result<(), DriverError>) {
        if self.faulted() {
            return;
        }
        // A driver that refuses to take something back is one that the process ends with soon.
        let _refused = self.enter().and_then(call);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.faulted() {
            return;
        }
        // SAFETY: it was retained once and is released once. Whoever uses it holds it.
        let _status = unsafe { (self.driver.functions().device_primary_ctx_release)(self.device) };
    }
}

/// The proof that a context is current in this thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Current<'a> {
    context: &'a Context,
    /// It stays in its thread.
    thread: PhantomData<*const ()>,
}

impl<'a> Current<'a> {
    pub(super) fn driver(self) -> &'a Driver {
        self.context.driver()
    }

    pub(super) fn functions(self) -> &'a Functions {
        self.context.driver.functions()
    }

    pub(super) fn device(self) -> sys::Device {
        self.context.device
    }

    /// An error where a call found the context of no more use: nothing is given back to it.
    pub(super) fn check_alive(self) -> Result<(), DriverError> {
        if self.context.faulted() {
            return Err(self.driver().error("an earlier call", status::CONTEXT_IS_DESTROYED));
        }
        Ok(())
    }

    /// `Ok` where the call succeeded. A sticky error is remembered.
    pub(super) fn check(self, call: &'static str, status: sys::Status) -> Result<(), DriverError> {
        self.context.check(call, status)
    }
}
