//! The test's side: a folder for the processes of one test, and what a test asks and learns of them.

use std::env;
use std::ffi::{CString, OsString, c_char};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use rustix::fs::statvfs;
use statecopy_kernels::cuda::class::CudaClass;
use statecopy_kernels::cuda::compile::{Arch, source_hash};
use statecopy_kernels::cuda::store::{ArtifactKey, Store};
use tempfile::TempDir;

use crate::abi::CUresult;
use crate::control::{Control, Fault, Knob, Whose};
use crate::devices::StubDevice;
use crate::functions::Function;
use crate::ledger::Ledger;
use crate::trace::{self, ProcessReport};

/// Where cargo put the driver: beside the running test.
///
/// # Panics
/// When it is not there. Cargo builds it for every test that depends on this crate.
#[must_use]
pub fn stub_library() -> PathBuf {
    let test = env::current_exe().expect("the running test has a path");
    // target/PROFILE/deps/TEST, or target/PROFILE/PROGRAM
    let folder = test.parent().expect("a program lies in a folder");
    let places = ["deps/libstatecopy_stub_cuda.so", "libstatecopy_stub_cuda.so"]
        .map(|name| folder.join(name));
    let found = places.iter().find(|place| place.exists());
    found.unwrap_or_else(|| panic!("no stub driver at any of {places:?}")).clone()
}

/// Where folders are made: in memory where there is room, because a disk writes back what tests write.
fn place() -> PathBuf {
    const ROOM_BYTES: u64 = 4 << 30;
    let memory = Path::new("/dev/shm");
    let room = statvfs(memory).map_or(0, |system| system.f_bavail * system.f_frsize);
    if room >= ROOM_BYTES { memory.to_owned() } else { env::temp_dir() }
}

/// A stub driver for the processes of one test. Dropped, its folder is removed.
#[derive(Debug)]
pub struct Stub {
    directory: TempDir,
    control: Control,
}

impl Stub {
    /// With one device, as [`StubDevice::default`] describes it.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn create() -> io::Result<Self> {
        Self::create_with(&[StubDevice::default()])
    }

    /// With these devices.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn create_with(devices: &[StubDevice]) -> io::Result<Self> {
        let directory = tempfile::Builder::new().prefix("stub-cuda-").tempdir_in(place())?;
        fs::write(directory.path().join("devices"), StubDevice::describe(devices))?;
        let control = Control::open(directory.path())?;
        let stub = Self { directory, control };
        fs::create_dir(stub.library_folder())?;
        symlink(stub_library(), stub.library())?;
        Ok(stub)
    }

    /// The folder that its processes share.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    fn library_folder(&self) -> PathBuf {
        self.directory().join("lib")
    }

    /// The driver, under the name of a driver.
    #[must_use]
    pub fn library(&self) -> PathBuf {
        self.library_folder().join("libcuda.so.1")
    }

    /// From now on processes with the stub's [`Stub::environment`] find a compiler that stands in for NVRTC.
    ///
    /// # Errors
    /// When the folder cannot be changed.
    pub fn provide_compiler(&self) -> io::Result<()> {
        symlink(stub_library(), self.compiler())
    }

    /// The compiler, where it was provided.
    #[must_use]
    pub fn compiler(&self) -> PathBuf {
        self.library_folder().join("libnvrtc.so.13")
    }

    /// Where [`Stub::fill_store`] puts kernels.
    #[must_use]
    pub fn store(&self) -> PathBuf {
        self.directory().join("kernels")
    }

    /// Makes a store with code of every class for the stub's own chip, as far as the stub looks at code; gives its directory.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn fill_store(&self) -> PathBuf {
        let store = Store::create(self.store()).expect("a store");
        let (arch, source) = (Arch::of_capability(9, 0), source_hash());
        for class in CudaClass::all() {
            let (source, compiler) = (source.clone(), "nvrtc-0.0".to_owned());
            let key = ArtifactKey { arch, class, source, compiler };
            store.save(&key, b"\x7fELF of no compiler").expect("a store");
        }
        self.store()
    }

    /// What a process needs in its environment to use the stub wherever it opens `libcuda.so.1`.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the loader's path is added to, not replaced")]
    pub fn environment(&self) -> [(&'static str, OsString); 2] {
        const LOADER: &str = "LD_LIBRARY_PATH";
        let mut path = self.library_folder().into_os_string();
        if let Some(before) = env::var_os(LOADER) {
            path.push(":");
            path.push(before);
        }
        [("STATECOPY_STUB_CUDA_DIR", self.directory().into()), (LOADER, path)]
    }

    /// Loads the driver into this process, where it uses this stub until the answer is dropped: then everything that the
    /// process did is undone. Another test in the same process waits meanwhile.
    ///
    /// # Panics
    /// When the driver cannot be loaded.
    #[must_use]
    pub fn enter(&self) -> Entered {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the stub's initialisers ask nothing of the caller.
        let library = unsafe { Library::open(Some(stub_library()), RTLD_NOW | RTLD_LOCAL) };
        let library = library.expect("the stub driver can be loaded");
        let directory = CString::new(self.directory().as_os_str().as_bytes()).expect("a path");
        // SAFETY: the symbol is the stub's own, of this type.
        let enter = unsafe {
            library.get::<unsafe extern "C" fn(*const c_char) -> CUresult>(
                b"statecopy_stub_cuda_enter",
            )
        };
        let enter = enter.expect("the stub driver has its own functions");
        // SAFETY: the path ends with a zero, and no test but this has its turn.
        let entered = unsafe { enter(directory.as_ptr()) };
        assert_eq!(entered, CUresult::SUCCESS);
        Entered { library, _turn: turn }
    }

    /// Turns something on or off for every process.
    pub fn set(&self, knob: Knob, on: bool) {
        self.control.set(knob, on);
    }

    /// Asks for a fault, in place of one asked for before.
    pub fn arm(&self, function: Function, fault: Fault) {
        self.control.arm(function, fault);
    }

    /// Takes a fault back; calls that hang return.
    pub fn clear(&self, function: Function) {
        self.control.clear(function);
    }

    /// Kernels that begin from now on run only when this is set to `None` again.
    pub fn hold_kernels(&self, whose: Option<Whose>) {
        self.control.hold_kernels(whose);
    }

    /// The next kernel that begins raises a sticky error.
    pub fn fault_next_kernel(&self, whose: Option<Whose>) {
        self.control.fault_next_kernel(whose);
    }

    /// A process that allocates memory or loads code is aborted.
    pub fn abort_on_allocation(&self, whose: Option<Whose>) {
        self.control.abort_on_allocation(whose);
    }

    /// What each process did, in the order in which they began.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn processes(&self) -> io::Result<Vec<ProcessReport>> {
        trace::reports(self.directory())
    }

    /// The newest process with this id.
    #[must_use]
    pub fn process(&self, pid: u32) -> Option<ProcessReport> {
        self.processes().ok()?.into_iter().rev().find(|report| report.pid == pid)
    }

    /// Bytes of a device that anyone uses: who maps them or holds a descriptor. A process that is being started has the
    /// descriptors of its parent until it runs its program: poll.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn used_bytes(&self, device: &StubDevice) -> io::Result<u64> {
        Ledger::open(self.directory())?.used(device.uuid)
    }
}

/// The driver in this process: see [`Stub::enter`].
#[derive(Debug)]
pub struct Entered {
    library: Library,
    _turn: MutexGuard<'static, ()>,
}

impl Entered {
    /// The driver's library.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.library
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: the symbol is the stub's own, of this type.
        let leave = unsafe {
            self.library.get::<unsafe extern "C" fn() -> CUresult>(b"statecopy_stub_cuda_leave")
        };
        if let Ok(leave) = leave {
            // SAFETY: the test is over, and with it every use of the driver's memory.
            let left = unsafe { leave() };
            debug_assert_eq!(left, CUresult::SUCCESS);
        }
    }
}
