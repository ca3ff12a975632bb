//! What a test asks of the driver while processes run: one file of words in the stub's folder, mapped by all.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::process;

use crate::abi::CUresult;
use crate::functions::Function;
use crate::sync::Ordering;
use crate::words::Words;

/// Which processes something is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// Every process.
    Any,
    /// The process with this id.
    Process(u32),
}

impl Whose {
    fn word(self) -> u64 {
        match self {
            Self::Any => u64::MAX,
            Self::Process(pid) => u64::from(pid),
        }
    }
}

/// How the whole stub behaves; everything is off at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Knob {
    /// Memory can be created with fabric handles, and these can be imported.
    Fabric,
    /// The processes share one MPS server: a sticky error of one is a sticky error of all, and while one of those lives a
    /// new process is refused.
    Mps,
    /// The handle of freed legacy memory comes back, byte for byte, for the next allocation of the process.
    ReuseHandles,
    /// No module has code for this device.
    NoBinary,
    /// `cuMemAlloc_v2` gives memory of a pool, as `cuMemAllocAsync` does.
    PoolMemory,
    /// Devices say that only one process may have a context on them. Nobody is refused for it.
    Exclusive,
    /// Streams share a process's connections to the device: so many as `CUDA_DEVICE_MAX_CONNECTIONS` says, or 8, or 2 with MPS.
    SharedConnections,
}

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// It does nothing and answers this.
    Answer(CUresult),
    /// It does not return until the fault is cleared.
    Hang,
    /// It aborts the process.
    Abort,
}

/// A fault of one function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// What happens.
    pub act: Act,
    /// To which call from now on: 1 is the next.
    pub nth: u64,
    /// Whether it happens to every call after that one too.
    pub lasting: bool,
    /// Whose calls are counted and hit.
    pub whose: Whose,
}

impl Fault {
    /// Of the next call of any process, once.
    #[must_use]
    pub fn next(act: Act) -> Self {
        Self { act, nth: 1, lasting: false, whose: Whose::Any }
    }

    /// The `nth` call instead of the next.
    #[must_use]
    pub fn nth(self, nth: u64) -> Self {
        Self { nth, ..self }
    }

    /// Every call from then on.
    #[must_use]
    pub fn lasting(self) -> Self {
        Self { lasting: true, ..self }
    }

    /// Calls of one process only.
    #[must_use]
    pub fn of(self, pid: u32) -> Self {
        Self { whose: Whose::Process(pid), ..self }
    }
}

const HOLD_KERNELS: usize = 8;
const FAULT_NEXT_KERNEL: usize = 9;
const ABORT_ON_ALLOCATION: usize = 10;
const MPS_FAULTS: usize = 11;
const NEXT_NUMBER: usize = 12;
const FAULTS: usize = 16;

/// Words of one function's fault.
const FAULT_WORDS: usize = 4;
const FAULT_WHOSE: usize = 0;
const FAULT_COUNTDOWN: usize = 1;
const FAULT_ACT: usize = 2;
const FAULT_LASTING: usize = 3;

/// Acts that are no answer, told apart from a [`CUresult`] by their upper half.
const ACT_HANG: u64 = 1 << 32;
const ACT_ABORT: u64 = 2 << 32;

const WORDS: usize = FAULTS + Function::ALL.len() * FAULT_WORDS;

/// The control file, mapped.
#[derive(Debug)]
pub(crate) struct Control {
    words: Words,
}

impl Control {
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        Ok(Self { words: Words::map(&options.open(directory.join("control"))?, WORDS)? })
    }

    pub(crate) fn set(&self, knob: Knob, on: bool) {
        self.words.store(knob as usize, u64::from(on));
    }

    pub(crate) fn is_set(&self, knob: Knob) -> bool {
        self.words.load(knob as usize) != 0
    }

    /// A number that no process of this stub was given before; never zero.
    pub(crate) fn number(&self) -> u64 {
        self.words.at(NEXT_NUMBER).fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn hold_kernels(&self, whose: Option<Whose>) {
        self.words.store(HOLD_KERNELS, whose.map_or(0, Whose::word));
    }

    pub(crate) fn holds_kernels(&self) -> bool {
        self.names_me(HOLD_KERNELS)
    }

    pub(crate) fn fault_next_kernel(&self, whose: Option<Whose>) {
        self.words.store(FAULT_NEXT_KERNEL, whose.map_or(0, Whose::word));
    }

    /// Whether the kernel that begins now is the one to fault; true once for each time that it was asked for.
    pub(crate) fn takes_kernel_fault(&self) -> bool {
        let word = self.words.load(FAULT_NEXT_KERNEL);
        self.names_me(FAULT_NEXT_KERNEL)
            && self
                .words
                .at(FAULT_NEXT_KERNEL)
                .compare_exchange(word, 0, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
    }

    pub(crate) fn abort_on_allocation(&self, whose: Option<Whose>) {
        self.words.store(ABORT_ON_ALLOCATION, whose.map_or(0, Whose::word));
    }

    pub(crate) fn aborts_on_allocation(&self) -> bool {
        self.names_me(ABORT_ON_ALLOCATION)
    }

    /// How many sticky errors the MPS server had; a process is hurt by those that came after it began.
    pub(crate) fn mps_faults(&self) -> u64 {
        self.words.load(MPS_FAULTS)
    }

    pub(crate) fn add_mps_fault(&self) {
        self.words.at(MPS_FAULTS).fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn arm(&self, function: Function, fault: Fault) {
        self.clear(function);
        let act = match fault.act {
            Act::Answer(result) => u64::from(result.0.cast_unsigned()),
            Act::Hang => ACT_HANG,
            Act::Abort => ACT_ABORT,
        };
        self.words.store(fault_word(function, FAULT_COUNTDOWN), fault.nth);
        self.words.store(fault_word(function, FAULT_ACT), act);
        self.words.store(fault_word(function, FAULT_LASTING), u64::from(fault.lasting));
        self.words.store(fault_word(function, FAULT_WHOSE), fault.whose.word());
    }

    pub(crate) fn clear(&self, function: Function) {
        self.words.store(fault_word(function, FAULT_WHOSE), 0);
        self.words.store(fault_word(function, FAULT_ACT), 0);
        self.words.store(fault_word(function, FAULT_COUNTDOWN), 0);
    }

    /// Whether calls of a function hang: those that do look again and again.
    pub(crate) fn hangs(&self, function: Function) -> bool {
        self.words.load(fault_word(function, FAULT_ACT)) == ACT_HANG
    }

    /// Counts a call of this process against the function's fault, and says what happens to it.
    pub(crate) fn fault(&self, function: Function) -> Option<Act> {
        if !self.names_me(fault_word(function, FAULT_WHOSE)) {
            return None;
        }
        let lasting = self.words.load(fault_word(function, FAULT_LASTING)) != 0;
        let countdown = self.words.at(fault_word(function, FAULT_COUNTDOWN));
        let before =
            countdown.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| match left {
                0 => None,
                1 if lasting => Some(1),
                left => Some(left - 1),
            });
        if before != Ok(1) {
            return None;
        }
        Some(match self.words.load(fault_word(function, FAULT_ACT)) {
            ACT_HANG => Act::Hang,
            ACT_ABORT => Act::Abort,
            code => Act::Answer(CUresult(i32::try_from(code).unwrap_or(CUresult::UNKNOWN.0))),
        })
    }

    fn names_me(&self, place: usize) -> bool {
        let whose = self.words.load(place);
        whose == u64::MAX || (whose != 0 && whose == u64::from(process::id()))
    }
}

fn fault_word(function: Function, word: usize) -> usize {
    FAULTS + function as usize * FAULT_WORDS + word
}

#[cfg(test)]
mod tests {
    use super::*;

    const FUNCTION: Function = Function::cuMemAlloc_v2;

    fn control() -> (tempfile::TempDir, Control) {
        let directory = tempfile::tempdir().unwrap();
        let control = Control::open(directory.path()).unwrap();
        (directory, control)
    }

    #[test]
    fn a_fault_hits_the_nth_call_once() {
        let (_directory, control) = control();
        let out_of_memory = Act::Answer(CUresult::OUT_OF_MEMORY);
        control.arm(FUNCTION, Fault::next(out_of_memory).nth(3));
        let hits: Vec<_> = (0..5).map(|_| control.fault(FUNCTION)).collect();
        assert_eq!(hits, [None, None, Some(out_of_memory), None, None]);
        assert_eq!(control.fault(Function::cuMemFree_v2), None);
    }

    #[test]
    fn a_lasting_fault_hits_until_it_is_cleared() {
        let (_directory, control) = control();
        control.arm(FUNCTION, Fault::next(Act::Abort).nth(2).lasting());
        let hits: Vec<_> = (0..3).map(|_| control.fault(FUNCTION)).collect();
        assert_eq!(hits, [None, Some(Act::Abort), Some(Act::Abort)]);
        control.clear(FUNCTION);
        assert_eq!(control.fault(FUNCTION), None);
    }

    #[test]
    fn a_fault_of_another_process_is_not_mine() {
        let (_directory, control) = control();
        control.arm(FUNCTION, Fault::next(Act::Hang).of(process::id() + 1));
        assert_eq!(control.fault(FUNCTION), None);
        control.arm(FUNCTION, Fault::next(Act::Hang).of(process::id()));
        assert_eq!(control.fault(FUNCTION), Some(Act::Hang));
    }

    #[test]
    fn a_kernel_fault_is_taken_once() {
        let (_directory, control) = control();
        assert!(!control.takes_kernel_fault());
        control.fault_next_kernel(Some(Whose::Any));
        assert!(control.takes_kernel_fault());
        assert!(!control.takes_kernel_fault());
    }
}
