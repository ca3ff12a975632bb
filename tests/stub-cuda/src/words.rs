//! A file of 64-bit words that several processes map.

use std::fs::File;
use std::io;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::sync::{AtomicU64, Ordering};

/// Words of a file, reached by atomic operations only.
#[derive(Debug)]
pub(crate) struct Words {
    base: *mut AtomicU64,
    count: usize,
}

// SAFETY: the words are reached by atomic operations only, and stay mapped while the value lives.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Maps a file, which becomes at least `count` words long.
    pub(crate) fn map(file: &File, count: usize) -> io::Result<Self> {
        let bytes = count * size_of::<u64>();
        if file.metadata()?.len() < bytes as u64 {
            file.set_len(bytes as u64)?;
        }
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory of anyone.
        let base = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0)
        }?;
        Ok(Self { base: base.cast(), count })
    }

    pub(crate) fn at(&self, place: usize) -> &AtomicU64 {
        assert!(place < self.count, "word {place} of {}", self.count);
        let word = self.base.wrapping_add(place);
        // SAFETY: the word lies inside the mapping, which lives as long as `self`; the file is never shortened.
        unsafe { &*word }
    }

    pub(crate) fn load(&self, place: usize) -> u64 {
        self.at(place).load(Ordering::SeqCst)
    }

    pub(crate) fn store(&self, place: usize, value: u64) {
        self.at(place).store(value, Ordering::SeqCst);
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: `map` made this mapping, and no reference into it outlives `self`.
        let unmapped = unsafe { munmap(self.base.cast(), self.count * size_of::<u64>()) };
        debug_assert!(unmapped.is_ok(), "a mapping that was made can be unmade");
    }
}
