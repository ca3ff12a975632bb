//! The files behind device memory, and how much of a device they use.
//!
//! Physical memory is one file. Whoever maps it or holds a descriptor of it keeps a lock on it, because a lock belongs to
//! the open file and goes with the last descriptor and mapping of it: so memory is in use exactly as long as it would be on
//! a device, even when a process that knows no driver holds the descriptor, and even after a SIGKILL.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::abi::CUresult;
use crate::devices::hex;
use crate::mapping::size;
use crate::process::{Answer, failed};

/// Memory is taken in pages of this many bytes.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// New memory is full of this where it is small, and begins and ends with it where it is not: a device gives memory as the
/// last owner left it.
const LEFTOVER: u8 = 0xA5;
const SPOILED_BYTES: u64 = 4 << 10;

/// The folder of memory files.
#[derive(Debug)]
pub(crate) struct Ledger {
    directory: PathBuf,
    /// Locked while a file is made, opened by its name, or looked at.
    turn: PathBuf,
}

impl Ledger {
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        let ledger = Self { directory: directory.join("memory"), turn: directory.join("turn") };
        fs::create_dir_all(&ledger.directory)?;
        Ok(ledger)
    }

    /// Makes memory of a device, or refuses when the device has not so much left.
    ///
    /// `label` names the file; it is not in use.
    pub(crate) fn create(
        &self,
        device: [u8; 16],
        memory: u64,
        label: &str,
        bytes: u64,
    ) -> Answer<File> {
        let turn = self.lock().map_err(failed)?;
        let path = self.path(device, label);
        let estimate = self.estimate(device).map_err(failed)?;
        let mut known = [0; 8];
        estimate.read_exact_at(&mut known, 0).map_err(failed)?;
        let taken = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(CUresult::OUT_OF_MEMORY)?;
        // The estimate counts what was made since the files were looked at, and not what went.
        let mut used =
            taken.checked_add(u64::from_le_bytes(known)).ok_or(CUresult::OUT_OF_MEMORY)?;
        if used > memory {
            used = taken + self.count(device).map_err(failed)?;
        }
        if used > memory {
            return Err(CUresult::OUT_OF_MEMORY);
        }
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(path).map_err(failed)?;
        file.set_len(bytes).map_err(failed)?;
        spoil(&file, bytes).map_err(failed)?;
        flock(&file, FlockOperation::LockShared).map_err(|error| failed(error.into()))?;
        estimate.write_all_at(&used.to_le_bytes(), 0).map_err(failed)?;
        drop(turn);
        Ok(file)
    }

    /// Opens memory by its label, when somebody has it.
    pub(crate) fn find(&self, device: [u8; 16], label: &str) -> Answer<File> {
        let _turn = self.lock().map_err(failed)?;
        let path = self.path(device, label);
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|_| CUresult::INVALID_VALUE)?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let removed = fs::remove_file(&path);
            return Err(removed.err().map_or(CUresult::INVALID_VALUE, failed));
        }
        flock(&file, FlockOperation::LockShared).map_err(|error| failed(error.into()))?;
        Ok(file)
    }

    /// Makes memory nameless: whoever has it keeps it, and nobody else finds it.
    pub(crate) fn hide(&self, device: [u8; 16], label: &str, number: u64) -> Answer {
        let _turn = self.lock().map_err(failed)?;
        let hidden = self.path(device, &format!("hidden-{number}"));
        fs::rename(self.path(device, label), hidden).map_err(failed)
    }

    /// The label and the device of memory by its descriptor; `None` when the descriptor is something else.
    pub(crate) fn label(&self, descriptor: &OwnedFd) -> Option<(String, String)> {
        use std::os::fd::AsRawFd as _;
        let link = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let path = fs::read_link(link).ok()?;
        let named = path.strip_prefix(self.directory.canonicalize().ok()?).ok()?.to_str()?;
        let (device, label) = named.split_once('-')?;
        Some((device.to_owned(), label.to_owned()))
    }

    /// Bytes of a device that are in use.
    pub(crate) fn used(&self, device: [u8; 16]) -> io::Result<u64> {
        let _turn = self.lock()?;
        self.count(device)
    }

    fn count(&self, device: [u8; 16]) -> io::Result<u64> {
        let prefix = hex(device);
        let mut used = 0;
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            if !entry.file_name().to_string_lossy().starts_with(&prefix) {
                continue;
            }
            let file = OpenOptions::new().read(true).write(true).open(entry.path())?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                fs::remove_file(entry.path())?;
            } else {
                used += file.metadata()?.size().next_multiple_of(PAGE_BYTES);
            }
        }
        Ok(used)
    }

    /// The file that holds at least as many bytes as are in use.
    fn estimate(&self, device: [u8; 16]) -> io::Result<File> {
        let path = self.directory.with_file_name(format!("used-{}", hex(device)));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path)?;
        if file.metadata()?.len() == 0 {
            file.set_len(8)?;
        }
        Ok(file)
    }

    fn path(&self, device: [u8; 16], label: &str) -> PathBuf {
        self.directory.join(format!("{}-{label}", hex(device)))
    }

    fn lock(&self) -> io::Result<File> {
        let turn = OpenOptions::new().write(true).create(true).truncate(false).open(&self.turn)?;
        flock(&turn, FlockOperation::LockExclusive)?;
        Ok(turn)
    }
}

fn spoil(file: &File, bytes: u64) -> io::Result<()> {
    let leftover = vec![LEFTOVER; size(bytes.min(SPOILED_BYTES))];
    file.write_all_at(&leftover, 0)?;
    file.write_all_at(&leftover, bytes - leftover.len() as u64)
}
