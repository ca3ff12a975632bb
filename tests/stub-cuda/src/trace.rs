//! What one process did to the driver: its live objects and its latest calls, in a file that a test reads.
//!
//! The file outlives the process. A lock on it says that the process lives.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;
use std::process;

use rustix::fs::{FlockOperation, flock};

use crate::abi::CUresult;
use crate::functions::Function;
use crate::sync::Ordering;
use crate::words::Words;

/// What a process holds of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Object {
    /// Contexts, primary ones that are retained among them.
    Context,
    /// Device memory of `cuMemAlloc_v2` and of pools.
    Allocation,
    /// Host memory of `cuMemHostAlloc`.
    HostAllocation,
    /// Host memory that was registered.
    Registration,
    /// Legacy handles that are open, each counted once.
    OpenHandle,
    /// Reserved address ranges.
    Reservation,
    /// Handles of physical memory, created, imported or retained; each counted once.
    MemoryHandle,
    /// Physical memory mapped into a reservation.
    Mapping,
    /// Streams that were created.
    Stream,
    /// Modules that are loaded.
    Module,
    /// Events that were created.
    Event,
    /// Graphs, captured or made.
    Graph,
    /// Executable graphs.
    Executable,
}

impl Object {
    /// Every kind.
    pub const ALL: [Self; 13] = [
        Self::Context,
        Self::Allocation,
        Self::HostAllocation,
        Self::Registration,
        Self::OpenHandle,
        Self::Reservation,
        Self::MemoryHandle,
        Self::Mapping,
        Self::Stream,
        Self::Module,
        Self::Event,
        Self::Graph,
        Self::Executable,
    ];
}

/// One call of one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallRecord {
    /// Which function.
    pub function: Function,
    /// What it answered.
    pub result: CUresult,
    /// Its arguments in order, as numbers; pointers are addresses.
    pub arguments: [u64; ARGUMENTS],
    /// The thread, by its kernel id.
    pub thread: u32,
}

/// What one process did, and holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessReport {
    /// Its id.
    pub pid: u32,
    /// Whether it still uses the driver.
    pub alive: bool,
    /// The latest calls, the oldest first. A `cuStreamQuery` that answered "not ready" is counted and not listed.
    pub calls: Vec<CallRecord>,
    live: [u64; Object::ALL.len()],
    torn_down: u64,
    kernels: u64,
    counts: Vec<u64>,
}

impl ProcessReport {
    /// How many objects of a kind it holds now; of a dead process, at its end.
    #[must_use]
    pub fn live(&self, object: Object) -> u64 {
        self.live[object as usize]
    }

    /// Objects that nobody gave back: a context took them along when it went.
    #[must_use]
    pub fn torn_down(&self) -> u64 {
        self.torn_down
    }

    /// Kernels that run now, or hang.
    #[must_use]
    pub fn kernels(&self) -> u64 {
        self.kernels
    }

    /// What it still holds, and how many of each.
    #[must_use]
    pub fn held(&self) -> Vec<(Object, u64)> {
        let all = Object::ALL.map(|object| (object, self.live(object)));
        all.into_iter().filter(|(_, count)| *count > 0).collect()
    }

    /// How often it called a function.
    #[must_use]
    pub fn count(&self, function: Function) -> u64 {
        self.counts[function as usize]
    }

    /// The names of the listed calls, in order.
    #[must_use]
    pub fn names(&self) -> Vec<&'static str> {
        self.calls.iter().map(|call| call.function.name()).collect()
    }
}

const PID: usize = 0;
const LOGGED: usize = 1;
const MPS_FAULTS_SEEN: usize = 2;
const TORN_DOWN: usize = 3;
const KERNELS: usize = 4;
const LIVE: usize = 5;
const COUNTS: usize = LIVE + Object::ALL.len();
const LOG: usize = COUNTS + Function::ALL.len();
/// Calls that the log holds.
const RECORDS: usize = 1 << 14;
/// Sequence (1 is the first; zero while it is written), function and result, thread, arguments.
const RECORD_WORDS: usize = 3 + ARGUMENTS;
/// As many as the longest call has.
const ARGUMENTS: usize = 11;
const WORDS: usize = LOG + RECORDS * RECORD_WORDS;

/// This process's file.
#[derive(Debug)]
pub(crate) struct Trace {
    words: Words,
    /// Holds the lock that says that the process lives.
    _file: File,
}

impl Trace {
    pub(crate) fn create(directory: &Path, number: u64, mps_faults: u64) -> io::Result<Self> {
        let folder = directory.join("processes");
        fs::create_dir_all(&folder)?;
        let path = folder.join(format!("{number:08}-{}", process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        // Somebody may be looking whether it is locked.
        flock(&file, FlockOperation::LockExclusive)?;
        let words = Words::map(&file, WORDS)?;
        words.store(MPS_FAULTS_SEEN, mps_faults);
        words.store(PID, u64::from(process::id()));
        Ok(Self { words, _file: file })
    }

    pub(crate) fn count(&self, function: Function) {
        self.words.at(COUNTS + function as usize).fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn log(&self, function: Function, arguments: &[u64], result: CUresult) {
        if function == Function::cuStreamQuery && result == CUresult::NOT_READY {
            return;
        }
        let sequence = self.words.at(LOGGED).fetch_add(1, Ordering::SeqCst);
        let record = record(sequence);
        self.words.store(record, 0);
        let code = u64::from(result.0.cast_unsigned());
        self.words.store(record + 1, u64::from(function as u32) | code << 32);
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.words.store(record + 2, u64::from(thread.cast_unsigned()));
        for place in 0..ARGUMENTS {
            let argument = arguments.get(place).copied().unwrap_or(0);
            self.words.store(record + 3 + place, argument);
        }
        self.words.store(record, sequence + 1);
    }

    pub(crate) fn add(&self, object: Object) {
        self.words.at(LIVE + object as usize).fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn remove(&self, object: Object) {
        self.words.at(LIVE + object as usize).fetch_sub(1, Ordering::SeqCst);
    }

    /// A kernel runs from now on.
    pub(crate) fn begin_kernel(&self) {
        self.words.at(KERNELS).fetch_add(1, Ordering::SeqCst);
    }

    /// A kernel has ended, well or not.
    pub(crate) fn end_kernel(&self) {
        self.words.at(KERNELS).fetch_sub(1, Ordering::SeqCst);
    }

    /// Removes an object that its owner never gave back.
    pub(crate) fn tear_down(&self, object: Object) {
        self.remove(object);
        self.words.at(TORN_DOWN).fetch_add(1, Ordering::SeqCst);
    }
}

fn record(sequence: u64) -> usize {
    let place = sequence % RECORDS as u64;
    LOG + usize::try_from(place).expect("smaller than the log") * RECORD_WORDS
}

/// Every process that used the stub, in the order in which they began.
pub(crate) fn reports(directory: &Path) -> io::Result<Vec<ProcessReport>> {
    files(directory)?
        .iter()
        .map(|file| Ok(report(&Words::map(file, WORDS)?, alive(file))))
        .collect()
}

/// Whether a process lives that holds a context and began before the latest sticky error of the MPS server.
pub(crate) fn faulted_client_lives(directory: &Path, mps_faults: u64) -> io::Result<bool> {
    for file in files(directory)? {
        let words = Words::map(&file, WORDS)?;
        if alive(&file)
            && words.load(MPS_FAULTS_SEEN) < mps_faults
            && words.load(LIVE + Object::Context as usize) > 0
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// How many processes died while a kernel of theirs ran, each told once.
pub(crate) fn take_dead_in_kernels(directory: &Path) -> io::Result<usize> {
    let mut dead = 0;
    for file in files(directory)? {
        let words = Words::map(&file, WORDS)?;
        if words.load(KERNELS) > 0
            && !alive(&file)
            && words.at(KERNELS).swap(0, Ordering::SeqCst) > 0
        {
            dead += 1;
        }
    }
    Ok(dead)
}

/// Whether a process uses the stub now.
pub(crate) fn lives(directory: &Path, pid: u32) -> io::Result<bool> {
    for file in files(directory)? {
        let words = Words::map(&file, WORDS)?;
        if words.load(PID) == u64::from(pid) && alive(&file) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn files(directory: &Path) -> io::Result<Vec<File>> {
    let folder = directory.join("processes");
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let entries: io::Result<Vec<_>> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect();
    let mut paths = entries?;
    paths.sort();
    paths.iter().map(|path| OpenOptions::new().read(true).write(true).open(path)).collect()
}

fn alive(file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockShared).is_err()
}

fn report(words: &Words, alive: bool) -> ProcessReport {
    let logged = words.load(LOGGED);
    let oldest = logged.saturating_sub(RECORDS as u64);
    ProcessReport {
        pid: u32::try_from(words.load(PID)).expect("a process id"),
        alive,
        calls: (oldest..logged).filter_map(|sequence| call(words, sequence)).collect(),
        live: Object::ALL.map(|object| words.load(LIVE + object as usize)),
        torn_down: words.load(TORN_DOWN),
        kernels: words.load(KERNELS),
        counts: Function::ALL.iter().map(|each| words.load(COUNTS + *each as usize)).collect(),
    }
}

/// A call of the log; `None` when it is being written, or was overwritten meanwhile.
fn call(words: &Words, sequence: u64) -> Option<CallRecord> {
    let record = record(sequence);
    if words.load(record) != sequence + 1 {
        return None;
    }
    let what = words.load(record + 1);
    let thread = words.load(record + 2);
    let arguments = std::array::from_fn(|place| words.load(record + 3 + place));
    let function = *Function::ALL.get(usize::try_from(what & 0xffff_ffff).ok()?)?;
    let code = u32::try_from(what >> 32).ok()?;
    (words.load(record) == sequence + 1).then_some(CallRecord {
        function,
        result: CUresult(code.cast_signed()),
        arguments,
        thread: u32::try_from(thread).ok()?,
    })
}
