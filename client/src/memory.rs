//! Memory that a worker shares with the daemon.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use statecopy_descriptors::{Mapping, MemoryError, OutOfMapping, SealedMemory};

use crate::error::{ArgumentError, Error};

/// Shared memory of this process: a memfd that can neither grow nor shrink. Pages that nobody touched cost nothing and
/// read as zero.
///
/// The daemon may read and write every byte of it once it is registered, so it is never behind a reference: bytes are
/// copied in and out. Clones name the same memory, which is given back with the last of them.
#[derive(Debug, Clone)]
pub struct Memory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    sealed: SealedMemory,
    mapping: Mapping,
}

impl Memory {
    /// Allocates `bytes` bytes. The name shows in `/proc/PID/maps`.
    ///
    /// # Errors
    /// When `bytes` is 0 or the operating system gives none.
    pub fn allocate(name: impl Into<String>, bytes: u64) -> Result<Self, Error> {
        let name = name.into();
        let made = SealedMemory::create(&name, bytes)
            .and_then(|sealed| sealed.map().map(|mapping| (sealed, mapping)));
        match made {
            Ok((sealed, mapping)) => Ok(Self { inner: Arc::new(Inner { name, sealed, mapping }) }),
            Err(source) => Err(failed(name, "allocated", source)),
        }
    }

    /// The name that it was allocated with.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// How many bytes it has.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.inner.sealed.bytes()
    }

    /// Where it is mapped in this process, for libraries that know memory by its address. It is aligned to a page, and stays
    /// until the last clone is gone. The daemon may write the bytes there at any time.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.inner.mapping.base().expose_provenance() as u64
    }

    /// Copies bytes out, from `offset` on. Reading a page that nobody touched allocates it.
    ///
    /// # Errors
    /// When the range reaches past the end; nothing is copied then.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let bytes = into.len() as u64;
        self.inner.mapping.read(offset, into).map_err(|_: OutOfMapping| self.outside(offset, bytes))
    }

    /// Copies `bytes` bytes out, from `offset` on. Reading a page that nobody touched allocates it.
    ///
    /// # Errors
    /// When the range reaches past the end.
    pub fn read_vec(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, Error> {
        if bytes as u64 > self.bytes() {
            return Err(self.outside(offset, bytes as u64));
        }
        let mut read = vec![0; bytes];
        self.read(offset, &mut read)?;
        Ok(read)
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    /// When the range reaches past the end; nothing is copied then.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        let bytes = from.len() as u64;
        self.inner
            .mapping
            .write(offset, from)
            .map_err(|_: OutOfMapping| self.outside(offset, bytes))
    }

    /// Sets every byte of a range.
    ///
    /// # Errors
    /// When the range reaches past the end; nothing is written then.
    pub fn fill(&self, offset: u64, bytes: u64, byte: u8) -> Result<(), Error> {
        let outside = |_: OutOfMapping| self.outside(offset, bytes);
        self.inner.mapping.fill(offset, bytes, byte).map_err(outside)
    }

    /// The ranges that were ever written or read, in order, to the page. The rest are holes, which cost no memory, and
    /// pages that were populated and not touched since.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn data_ranges(&self) -> Result<Vec<Range<u64>>, Error> {
        let ranges = self.inner.sealed.data_ranges();
        ranges.map_err(|source| failed(self.inner.name.clone(), "searched for holes", source))
    }

    fn outside(&self, offset: u64, bytes: u64) -> Error {
        let end = offset.saturating_add(bytes);
        let name = self.inner.name.clone();
        ArgumentError::OutOfRange { name, offset, end, limit: self.bytes() }.into()
    }
}

fn failed(name: String, what: &'static str, source: MemoryError) -> Error {
    match source {
        MemoryError::Empty => ArgumentError::NoBytes { name }.into(),
        source => Error::Memory { name, what, source: source.into() },
    }
}

/// The memfd, for whatever this library does not do: mapping it again, sending it elsewhere.
impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.sealed.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_in_and_out_and_nothing_past_the_end() {
        let memory = Memory::allocate("m", 100).unwrap();
        memory.write(97, &[1, 2, 3]).unwrap();
        assert_eq!(memory.read_vec(96, 4).unwrap(), [0, 1, 2, 3]);
        memory.fill(0, 100, 9).unwrap();
        assert_eq!(memory.read_vec(0, 100).unwrap(), [9; 100]);

        let outside = |error: Error| {
            let Error::Argument(ArgumentError::OutOfRange { name, end, limit, .. }) = error else {
                panic!("{error:?}");
            };
            (name, end, limit)
        };
        let end = |end| ("m".to_owned(), end, 100);
        assert_eq!(outside(memory.write(98, &[7; 3]).unwrap_err()), end(101));
        assert_eq!(outside(memory.read_vec(u64::MAX, 1).unwrap_err()), end(u64::MAX));
        assert_eq!(outside(memory.read_vec(0, 101).unwrap_err()), end(101));
        assert_eq!(outside(memory.fill(50, u64::MAX, 0).unwrap_err()), end(u64::MAX));
        assert_eq!(memory.read_vec(98, 2).unwrap(), [9, 9], "nothing of it was written");
    }

    #[test]
    fn memory_of_no_bytes_is_an_argument_error() {
        let error = Memory::allocate("m", 0).unwrap_err();
        assert!(matches!(error, Error::Argument(ArgumentError::NoBytes { .. })), "{error:?}");
    }
}
