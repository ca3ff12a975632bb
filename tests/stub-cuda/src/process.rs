//! The driver of one process: its devices, contexts, memory and streams, and the stub's folder that it shares.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::abi::{CUdevice, CUresult, Opaque};
use crate::captures::{self, Capture};
use crate::connections::Connections;
use crate::control::{Act, Control, Knob};
use crate::devices::StubDevice;
use crate::events::Event;
use crate::functions::{Function, Needs};
use crate::graphs::{self, Graphs};
use crate::ledger::Ledger;
use crate::memory::Memory;
use crate::modules::Modules;
use crate::streams::Stream;
use crate::sync::{AtomicI32, AtomicU64, Ordering};
use crate::trace::{self, Object, Trace};
use crate::vmm::Handles;

/// How often whoever waits looks again.
pub(crate) const STEP: Duration = Duration::from_micros(200);

/// The folder that the processes of one stub share.
const DIRECTORY: &str = "STATECOPY_STUB_CUDA_DIR";
/// The devices of this process, when it sees others than the folder's file `devices` says.
const DEVICES: &str = "STATECOPY_STUB_CUDA_DEVICES";

/// The driver of this process, once it is initialised.
static CURRENT: RwLock<Option<Arc<Process>>> = RwLock::new(None);
/// The folder that a test named, in place of the environment.
static ENTERED: Mutex<Option<PathBuf>> = Mutex::new(None);

thread_local! {
    /// The contexts that this thread pushed; the last is current.
    static CONTEXTS: RefCell<Vec<Opaque>> = const { RefCell::new(Vec::new()) };
}

/// What a call of the driver gives, or why it does not.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

/// Everything of one process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) directory: PathBuf,
    pub(crate) control: Control,
    pub(crate) trace: Trace,
    pub(crate) ledger: Ledger,
    pub(crate) devices: Vec<StubDevice>,
    pub(crate) connections: Connections,
    memory: RwLock<Memory>,
    objects: Mutex<Objects>,
    /// The error that every call gives from now on; zero while there is none.
    sticky: AtomicI32,
    /// Sticky errors of the MPS server that came before this process.
    mps_faults: u64,
    began: Instant,
    /// When this process last looked for dead ones, in milliseconds since it began.
    looked_ms: AtomicU64,
}

/// Handles of a process, and what is behind each.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    /// How often the primary context of each device is retained.
    pub(crate) retained: BTreeMap<CUdevice, u64>,
    pub(crate) streams: BTreeMap<Opaque, Arc<Stream>>,
    /// Destroyed streams that may still have work.
    ending: Vec<Arc<Stream>>,
    pub(crate) modules: Modules,
    pub(crate) handles: Handles,
    pub(crate) graphs: Graphs,
    pub(crate) events: BTreeMap<Opaque, Arc<Event>>,
    /// Captures that go on, or were invalidated and not ended.
    pub(crate) captures: Vec<Arc<Capture>>,
}

impl Objects {
    /// Every stream that may have work.
    fn all_streams(&self, wanted: impl Fn(&Stream) -> bool) -> Vec<Arc<Stream>> {
        let all = self.streams.values().chain(&self.ending);
        all.filter(|stream| wanted(stream)).cloned().collect()
    }

    /// Takes a stream's handle away. What it still has to do is done, and waited for where the device is.
    pub(crate) fn end_stream(&mut self, handle: Opaque) -> Answer {
        let stream = self.streams.remove(&handle).ok_or(CUresult::INVALID_HANDLE)?;
        stream.end();
        self.ending.retain(|earlier| !earlier.is_idle());
        self.ending.push(stream);
        Ok(())
    }
}

impl Process {
    fn open(directory: PathBuf) -> Answer<Self> {
        let devices = devices(&directory)?;
        let control = Control::open(&directory).map_err(failed)?;
        if control.is_set(Knob::Mps) {
            let dead = trace::take_dead_in_kernels(&directory).map_err(failed)?;
            (0..dead).for_each(|_| control.add_mps_fault());
        }
        let mps_faults = control.mps_faults();
        if control.is_set(Knob::Mps)
            && trace::faulted_client_lives(&directory, mps_faults).map_err(failed)?
        {
            return Err(CUresult::MPS_SERVER_NOT_READY);
        }
        let trace = Trace::create(&directory, control.number(), mps_faults).map_err(failed)?;
        let ledger = Ledger::open(&directory).map_err(failed)?;
        Ok(Self {
            directory,
            connections: Connections::new(&control),
            control,
            trace,
            ledger,
            devices,
            memory: RwLock::default(),
            objects: Mutex::default(),
            sticky: AtomicI32::new(0),
            mps_faults,
            began: Instant::now(),
            looked_ms: AtomicU64::new(u64::MAX),
        })
    }

    pub(crate) fn memory(&self) -> RwLockReadGuard<'_, Memory> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn memory_mut(&self) -> RwLockWriteGuard<'_, Memory> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn device(&self, ordinal: CUdevice) -> Answer<&StubDevice> {
        let place = usize::try_from(ordinal).map_err(|_| CUresult::INVALID_DEVICE)?;
        self.devices.get(place).ok_or(CUresult::INVALID_DEVICE)
    }

    /// The error that every call gives, if there is one.
    pub(crate) fn sticky(&self) -> Answer {
        let own = CUresult(self.sticky.load(Ordering::SeqCst));
        if own != CUresult::SUCCESS {
            return Err(own);
        }
        if self.control.is_set(Knob::Mps) {
            self.look_for_the_dead();
            if self.control.mps_faults() > self.mps_faults {
                return Err(CUresult::ILLEGAL_ADDRESS);
            }
        }
        Ok(())
    }

    /// A process that was killed in its own kernel takes the MPS server along. Somebody has to notice: whoever calls.
    fn look_for_the_dead(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if self.looked_ms.swap(now, Ordering::SeqCst) == now {
            return;
        }
        let dead = trace::take_dead_in_kernels(&self.directory).unwrap_or(0);
        (0..dead).for_each(|_| self.control.add_mps_fault());
    }

    /// The device has failed under a kernel of this process.
    pub(crate) fn fault(&self, error: CUresult) {
        let first = self.sticky.compare_exchange(0, error.0, Ordering::SeqCst, Ordering::SeqCst);
        if first.is_ok() && self.control.is_set(Knob::Mps) {
            self.control.add_mps_fault();
        }
    }

    /// Waits until nothing runs on any stream.
    pub(crate) fn synchronise(&self) -> Answer {
        self.wait_for(|_| true)
    }

    /// Waits for what a call without a stream comes after.
    pub(crate) fn synchronise_blocking(&self) -> Answer {
        self.wait_for(|stream| !stream.is_non_blocking())
    }

    fn wait_for(&self, wanted: impl Fn(&Stream) -> bool) -> Answer {
        let streams = self.objects().all_streams(wanted);
        streams.iter().for_each(|stream| stream.wait_idle());
        self.sticky()
    }

    /// The context of this thread, which is retained.
    pub(crate) fn context(&self) -> Answer<CUdevice> {
        let device = CONTEXTS
            .with_borrow(|contexts| contexts.last().copied())
            .and_then(device_of)
            .ok_or(CUresult::INVALID_CONTEXT)?;
        let retained = self.objects().retained.get(&device).is_some_and(|count| *count > 0);
        retained.then_some(device).ok_or(CUresult::INVALID_CONTEXT)
    }

    /// Gives the primary context back; with its last user everything goes that was made in it.
    pub(crate) fn release_context(&self, device: CUdevice) -> Answer {
        let mut objects = self.objects();
        let count = objects.retained.get_mut(&device).filter(|count| **count > 0);
        let count = count.ok_or(CUresult::INVALID_CONTEXT)?;
        *count -= 1;
        self.trace.remove(Object::Context);
        if *count > 0 {
            return Ok(());
        }
        let of_context = |stream: &Arc<Stream>| stream.device() == device;
        let streams = objects.all_streams(|stream| stream.device() == device);
        let created = |stream: &Arc<Stream>| of_context(stream) && !stream.is_default();
        let left = objects.streams.values().filter(|stream| created(stream)).count();
        objects.streams.retain(|_, stream| !of_context(stream));
        let modules = objects.modules.remove_of(device);
        let graphs = std::mem::take(&mut objects.graphs);
        drop(objects);
        drop(graphs);
        for stream in streams {
            stream.wait_idle();
            stream.end();
        }
        (0..left).for_each(|_| self.trace.tear_down(Object::Stream));
        (0..modules).for_each(|_| self.trace.tear_down(Object::Module));
        self.tear_memory_down(device);
        Ok(())
    }
}

/// A primary context as a handle: its device's ordinal, never zero.
pub(crate) fn context_of(device: CUdevice) -> Opaque {
    0x1000 + u64::from(device.cast_unsigned())
}

fn device_of(context: Opaque) -> Option<CUdevice> {
    CUdevice::try_from(context.checked_sub(0x1000)?).ok()
}

/// Puts a context on this thread's stack; zero is none.
pub(crate) fn push_context(context: Opaque) {
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
}

/// Takes the current context off this thread's stack.
pub(crate) fn pop_context() -> Option<Opaque> {
    CONTEXTS.with_borrow_mut(Vec::pop)
}

/// The current context of this thread; zero is none.
pub(crate) fn current_context() -> Opaque {
    CONTEXTS.with_borrow(|contexts| contexts.last().copied().unwrap_or(0))
}

/// Wraps what the operating system refused.
pub(crate) fn failed(_: io::Error) -> CUresult {
    CUresult::OPERATING_SYSTEM
}

#[expect(clippy::disallowed_methods, reason = "a driver is set up by its environment")]
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

fn devices(directory: &Path) -> Answer<Vec<StubDevice>> {
    let text = match variable(DEVICES) {
        Some(text) => text.into_os_string().into_string().ok(),
        None => std::fs::read_to_string(directory.join("devices")).ok(),
    };
    let devices = match text {
        Some(text) => StubDevice::parse(&text).ok_or(CUresult::UNKNOWN)?,
        None => vec![StubDevice::default()],
    };
    if devices.is_empty() { Err(CUresult::NO_DEVICE) } else { Ok(devices) }
}

/// `cuInit`.
fn initialise() -> Answer<Arc<Process>> {
    let mut current = CURRENT.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(process) = &*current {
        return Ok(Arc::clone(process));
    }
    let entered = ENTERED.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let directory = entered.or_else(|| variable(DIRECTORY)).ok_or(CUresult::NO_DEVICE)?;
    let process = Arc::new(Process::open(directory)?);
    *current = Some(Arc::clone(&process));
    Ok(process)
}

/// From now on this process uses the stub's folder, whatever its environment says.
pub(crate) fn enter(directory: PathBuf) {
    leave();
    *ENTERED.lock().unwrap_or_else(PoisonError::into_inner) = Some(directory);
}

/// Forgets everything of this process, as its end would.
pub(crate) fn leave() {
    *ENTERED.lock().unwrap_or_else(PoisonError::into_inner) = None;
    let process = CURRENT.write().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(process) = process {
        // What hangs is let go: the error makes kernels and waits end.
        process.sticky.store(CUresult::UNKNOWN.0, Ordering::SeqCst);
        let streams = process.objects().all_streams(|_| true);
        streams.iter().for_each(|stream| stream.end());
        process.memory_mut().forget();
    }
}

/// One call of the driver: counted, held against the faults that are armed, done, logged.
pub(crate) fn call(
    function: Function,
    arguments: &[u64],
    body: impl FnOnce(&Arc<Process>) -> Answer,
) -> CUresult {
    let current = CURRENT.read().unwrap_or_else(PoisonError::into_inner).clone();
    let process = match current {
        Some(process) => process,
        None if function == Function::cuInit => match initialise() {
            Ok(process) => process,
            Err(error) => return error,
        },
        None => return CUresult::NOT_INITIALIZED,
    };
    process.trace.count(function);
    let result = meet_fault(&process, function)
        .and_then(|()| match function.needs() {
            Needs::Driver => Ok(()),
            Needs::Process => process.sticky(),
            Needs::Context => process.sticky().and_then(|()| process.context().map(drop)),
        })
        .and_then(|()| graphs::check_host_function())
        .and_then(|()| captures::check(&process, function))
        .and_then(|()| body(&process));
    let result = result.err().unwrap_or(CUresult::SUCCESS);
    process.trace.log(function, arguments, result);
    result
}

/// One call of something beside the driver: as [`call`], where the driver is initialised, and else nothing.
pub(crate) fn outside(function: Function, arguments: &[u64]) -> Answer {
    let current = CURRENT.read().unwrap_or_else(PoisonError::into_inner).clone();
    let Some(process) = current else { return Ok(()) };
    process.trace.count(function);
    let met = meet_fault(&process, function);
    process.trace.log(function, arguments, met.err().unwrap_or(CUresult::SUCCESS));
    met
}

/// Does what a test wants of this call.
fn meet_fault(process: &Process, function: Function) -> Answer {
    if function.allocates() && process.control.aborts_on_allocation() {
        abort(function, "allocates where nothing may be allocated");
    }
    match process.control.fault(function) {
        None => Ok(()),
        Some(Act::Answer(error)) => Err(error),
        Some(Act::Abort) => abort(function, "was told to abort"),
        Some(Act::Hang) => {
            while process.control.hangs(function) {
                thread::sleep(STEP);
            }
            Ok(())
        }
    }
}

#[expect(clippy::print_stderr, reason = "the last words of a process that is ended")]
fn abort(function: Function, why: &str) -> ! {
    eprintln!("stub driver: {} {why}; the process is aborted", function.name());
    process::abort()
}
