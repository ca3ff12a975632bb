//! Shared memory as this process sees it.

#![expect(unsafe_code, reason = "this is where memory becomes atomics")]

use std::ops::Range;
use std::os::fd::OwnedFd;
#[expect(
    clippy::disallowed_types,
    reason = "this is where memory becomes atomics; loom cannot make them from memory"
)]
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

/// Bytes of a word: what [`Mapping::read`] and [`Mapping::write`] move at a time.
const WORD: usize = size_of::<u64>();

/// An access outside a mapping, or a word that is not aligned in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OutOfMapping {
    /// The range reaches past the end.
    #[error("Bytes {offset}..+{len} reach past a mapping of {bytes} bytes")]
    Range {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Size of the mapping.
        bytes: u64,
    },
    /// An atomic word must lie at a multiple of its size.
    #[error("Offset {offset} is no multiple of a word's {bytes} bytes")]
    Unaligned {
        /// Where the word would lie.
        offset: u64,
        /// Its size.
        bytes: u64,
    },
}

/// Sealed memory, mapped for reading and writing. Other processes may write it at any time.
///
/// Every access is made of relaxed atomic loads and stores, so that a value once read is read no second time, and a peer
/// that writes meanwhile causes mixed bytes and nothing worse. Device code that needs more gets the base address.
#[derive(Debug)]
pub struct Mapping {
    memory: MmapRaw,
}

#[expect(clippy::disallowed_types, reason = "memory becomes atomics here")]
impl Mapping {
    /// Maps the first `len` bytes of a file that has at least so many, for ever: the caller checked its seals.
    pub(crate) fn of(fd: &OwnedFd, len: usize) -> std::io::Result<Self> {
        let memory = MmapOptions::new().len(len).map_raw(fd)?;
        Ok(Self { memory })
    }

    /// The first byte. It is aligned to a page, valid for [`Mapping::len`] bytes while `self` lives, and shared.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.memory.as_mut_ptr()
    }

    /// Size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Never: sealed memory has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.len() == 0
    }

    /// Copies bytes out, once each.
    ///
    /// # Errors
    /// [`OutOfMapping::Range`]; then nothing was copied.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfMapping> {
        let from = self.range(offset, into.len())?;
        let (head, words) = split(from.start, into.len());
        let (first, rest) = into.split_at_mut(head);
        let (middle, last) = rest.split_at_mut(words * WORD);
        for (at, byte) in (from.start..).zip(first) {
            *byte = self.byte(at).load(Ordering::Relaxed);
        }
        let start = from.start + head;
        for (at, word) in (start..).step_by(WORD).zip(middle.chunks_exact_mut(WORD)) {
            word.copy_from_slice(&self.word(at).load(Ordering::Relaxed).to_ne_bytes());
        }
        for (at, byte) in (start + words * WORD..).zip(last) {
            *byte = self.byte(at).load(Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`OutOfMapping::Range`]; then nothing was copied.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), OutOfMapping> {
        let into = self.range(offset, from.len())?;
        let (head, words) = split(into.start, from.len());
        let (first, rest) = from.split_at(head);
        let (middle, last) = rest.split_at(words * WORD);
        for (at, byte) in (into.start..).zip(first) {
            self.byte(at).store(*byte, Ordering::Relaxed);
        }
        let start = into.start + head;
        for (at, word) in (start..).step_by(WORD).zip(middle.as_chunks::<WORD>().0) {
            self.word(at).store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        for (at, byte) in (start + words * WORD..).zip(last) {
            self.byte(at).store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sets every byte of a range.
    ///
    /// # Errors
    /// [`OutOfMapping::Range`]; then nothing was written.
    pub fn fill(&self, offset: u64, len: u64, byte: u8) -> Result<(), OutOfMapping> {
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let into = self.range(offset, bytes)?;
        let (head, words) = split(into.start, bytes);
        let start = into.start + head;
        let end = start + words * WORD;
        for at in (into.start..start).chain(end..into.end) {
            self.byte(at).store(byte, Ordering::Relaxed);
        }
        for at in (start..end).step_by(WORD) {
            self.word(at).store(u64::from_ne_bytes([byte; WORD]), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies words out, each by one load.
    ///
    /// # Errors
    /// When the range leaves the mapping, or `offset` is no multiple of 8.
    pub fn read_words(&self, offset: u64, into: &mut [u64]) -> Result<(), OutOfMapping> {
        let from = self.aligned::<u64>(offset, into.len())?;
        for (at, word) in from.step_by(WORD).zip(into) {
            *word = self.word(at).load(Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies words in, each by one store.
    ///
    /// # Errors
    /// When the range leaves the mapping, or `offset` is no multiple of 8.
    pub fn write_words(&self, offset: u64, from: &[u64]) -> Result<(), OutOfMapping> {
        let into = self.aligned::<u64>(offset, from.len())?;
        for (at, word) in into.step_by(WORD).zip(from) {
            self.word(at).store(*word, Ordering::Relaxed);
        }
        Ok(())
    }

    /// A word that both sides use as an atomic.
    ///
    /// # Errors
    /// When it leaves the mapping, or `offset` is no multiple of 8.
    pub fn atomic_u64(&self, offset: u64) -> Result<&AtomicU64, OutOfMapping> {
        Ok(self.word(self.aligned::<u64>(offset, 1)?.start))
    }

    /// A 32-bit word that both sides use as an atomic, for example with a futex.
    ///
    /// # Errors
    /// When it leaves the mapping, or `offset` is no multiple of 4.
    pub fn atomic_u32(&self, offset: u64) -> Result<&AtomicU32, OutOfMapping> {
        let at = self.aligned::<u32>(offset, 1)?.start;
        let word = self.base().wrapping_add(at).cast::<u32>();
        // SAFETY: `aligned` says that the word lies in the mapping, at a multiple of its size from a page-aligned base. The
        // mapping outlives the reference, stays as large as it is (the file is sealed), and is only ever used atomically.
        Ok(unsafe { AtomicU32::from_ptr(word) })
    }

    /// # Panics
    /// Never: callers pass offsets that [`Mapping::range`] gave.
    fn byte(&self, at: usize) -> &AtomicU8 {
        debug_assert!(at < self.len(), "an offset past the mapping");
        // SAFETY: `at` was checked by `range`. The mapping outlives the reference, stays as large as it is (the file is
        // sealed), and is only ever used atomically.
        unsafe { AtomicU8::from_ptr(self.base().wrapping_add(at)) }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(
            at.is_multiple_of(WORD) && at + WORD <= self.len(),
            "a word past the mapping"
        );
        let word = self.base().wrapping_add(at).cast::<u64>();
        // SAFETY: `at` is a multiple of 8 from a page-aligned base, in a range that was checked by `range`. The mapping
        // outlives the reference, stays as large as it is (the file is sealed), and is only ever used atomically.
        unsafe { AtomicU64::from_ptr(word) }
    }

    /// The range of `count` words of type `T`, if it is inside the mapping and aligned.
    fn aligned<T>(&self, offset: u64, count: usize) -> Result<Range<usize>, OutOfMapping> {
        let bytes = size_of::<T>();
        let range = self.range(offset, count.saturating_mul(bytes))?;
        if !range.start.is_multiple_of(bytes) {
            return Err(OutOfMapping::Unaligned { offset, bytes: bytes as u64 });
        }
        Ok(range)
    }

    /// The range, if it is inside the mapping.
    fn range(&self, offset: u64, len: usize) -> Result<Range<usize>, OutOfMapping> {
        let outside =
            OutOfMapping::Range { offset, len: len as u64, bytes: self.memory.len() as u64 };
        let start = usize::try_from(offset).map_err(|_| outside)?;
        let end = start.checked_add(len).filter(|end| *end <= self.len()).ok_or(outside)?;
        Ok(start..end)
    }
}

/// How many single bytes stand before the first aligned word of a range, and how many whole words follow.
fn split(start: usize, len: usize) -> (usize, usize) {
    let head = (start.next_multiple_of(WORD) - start).min(len);
    (head, (len - head) / WORD)
}
