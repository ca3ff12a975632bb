//! Shared memory that keeps its size.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    FallocateFlags, MemfdFlags, OFlags, SealFlags, SeekFrom, fallocate, fcntl_add_seals,
    fcntl_get_seals, fcntl_getfl, fstat, fstatfs, ftruncate, memfd_create, seek,
};
use rustix::io::{Errno, retry_on_intr};

use crate::mapping::Mapping;

/// The seals without which a peer could shrink the file under a mapping, or grow it past what was checked.
const SEALS_NEEDED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// The seals that forbid a shared writable mapping.
const SEALS_AGAINST_WRITING: SealFlags = SealFlags::WRITE.union(SealFlags::FUTURE_WRITE);

/// `f_type` of a huge page file.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Why memory was not created, adopted or mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Zero bytes cannot be mapped.
    #[error("Shared memory of 0 bytes cannot be mapped")]
    Empty,
    /// More than this process, or a file, can address.
    #[error("Shared memory of {bytes} bytes cannot be addressed here")]
    TooLarge {
        /// The size asked for.
        bytes: u64,
    },
    /// A regular file, a socket, a device: nothing that has seals.
    #[error("The descriptor is no memory file (memfd)")]
    NotMemoryFile,
    /// Without them the file may shrink under a mapping.
    #[error("The memory file lacks {missing}")]
    SealsMissing {
        /// The seals that are not there.
        missing: Seals,
    },
    /// The seals forbid a shared writable mapping.
    #[error("The memory file cannot be mapped for writing: it has {present}")]
    SealedAgainstWriting {
        /// The seals that stand in the way.
        present: Seals,
    },
    /// The descriptor was opened without write access.
    #[error("The memory file's descriptor is not open for reading and writing")]
    NotWritable,
    /// The size is another one than announced.
    #[error("The memory file has {actual} bytes, not the announced {announced}")]
    SizeDiffers {
        /// What the peer said.
        announced: u64,
        /// What the kernel says.
        actual: u64,
    },
    /// Huge pages that a peer punches out cannot always be had again: the next access would be SIGBUS, whatever the seals.
    #[error("The memory file lies in huge pages of {page_bytes} bytes, which seals do not keep")]
    HugePages {
        /// Size of its pages.
        page_bytes: u64,
    },
    /// A range reaches past the end.
    #[error("Bytes {offset}..+{len} reach past the memory file's {bytes} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Size of the file.
        bytes: u64,
    },
    /// The kernel refused.
    #[error("The kernel refused to {action} a memory file")]
    Kernel {
        /// What was tried.
        action: &'static str,
        /// What it said.
        source: io::Error,
    },
}

impl MemoryError {
    fn kernel(action: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::Kernel { action, source: errno.into() }
    }
}

/// A set of seals, for messages.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Seals(SealFlags);

impl Seals {
    /// Whether F_SEAL_SHRINK is in the set.
    #[must_use]
    pub fn shrink(self) -> bool {
        self.0.contains(SealFlags::SHRINK)
    }

    /// Whether F_SEAL_GROW is in the set.
    #[must_use]
    pub fn grow(self) -> bool {
        self.0.contains(SealFlags::GROW)
    }
}

impl fmt::Display for Seals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = [
            (SealFlags::SHRINK, "F_SEAL_SHRINK"),
            (SealFlags::GROW, "F_SEAL_GROW"),
            (SealFlags::WRITE, "F_SEAL_WRITE"),
            (SealFlags::FUTURE_WRITE, "F_SEAL_FUTURE_WRITE"),
        ];
        let mut first = true;
        for (_, name) in named.iter().filter(|(seal, _)| self.0.contains(*seal)) {
            f.write_str(if first { "" } else { " and " })?;
            f.write_str(name)?;
            first = false;
        }
        Ok(())
    }
}

impl fmt::Debug for Seals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Seals({self})")
    }
}

/// Names the memory itself, however many descriptors lead to it. Two descriptors with equal ids are the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AllocationId {
    /// The file system.
    pub dev: u64,
    /// The file in it.
    pub ino: u64,
}

/// A memory file with F_SEAL_SHRINK and F_SEAL_GROW: its size is a constant.
#[derive(Debug)]
pub struct SealedMemory {
    fd: OwnedFd,
    bytes: u64,
    allocation: AllocationId,
}

impl SealedMemory {
    /// Makes `bytes` bytes of shared memory, all zero and none of it allocated yet. No more seals can be added.
    /// The name shows in `/proc` and means nothing.
    ///
    /// # Errors
    /// [`MemoryError::Empty`], [`MemoryError::TooLarge`], or what the kernel says.
    pub fn create(name: &str, bytes: u64) -> Result<Self, MemoryError> {
        if bytes == 0 {
            return Err(MemoryError::Empty);
        }
        addressable(bytes)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // NOEXEC_SEAL came with Linux 6.3; an older kernel calls it invalid.
        let fd = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => memfd_create(name, flags),
            created => created,
        }
        .map_err(MemoryError::kernel("create"))?;
        ftruncate(&fd, bytes).map_err(MemoryError::kernel("size"))?;
        fcntl_add_seals(&fd, SEALS_NEEDED | SealFlags::SEAL)
            .map_err(MemoryError::kernel("seal"))?;
        Self::adopt(fd, bytes)
    }

    /// Takes a descriptor from a peer. It is closed when it is refused.
    ///
    /// Accepted is only a memory file whose seals contain F_SEAL_SHRINK and F_SEAL_GROW, and no seal against writing, open
    /// for reading and writing, of exactly the announced size. Other seals (NOEXEC, SEAL) do not matter.
    ///
    /// # Errors
    /// Every variant of [`MemoryError`] but `OutOfRange`, each for its own reason.
    pub fn adopt(fd: OwnedFd, announced_bytes: u64) -> Result<Self, MemoryError> {
        if announced_bytes == 0 {
            return Err(MemoryError::Empty);
        }
        addressable(announced_bytes)?;
        check_seals(&fd)?;
        check_pages(&fd)?;
        // Only now is the size a constant.
        let stat = fstat(&fd).map_err(MemoryError::kernel("stat"))?;
        let actual = u64::try_from(stat.st_size).unwrap_or(0);
        if actual != announced_bytes {
            return Err(MemoryError::SizeDiffers { announced: announced_bytes, actual });
        }
        let allocation = AllocationId { dev: stat.st_dev, ino: stat.st_ino };
        Ok(Self { fd, bytes: actual, allocation })
    }

    /// The size, for ever.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Which memory it is.
    #[must_use]
    pub fn allocation(&self) -> AllocationId {
        self.allocation
    }

    /// Another descriptor of the same memory, to keep or to send.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn try_clone_fd(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Maps all of it, shared, for reading and writing. The mapping lives on without the descriptor.
    ///
    /// # Errors
    /// [`MemoryError::Kernel`], for example when a seal against writing was added since.
    pub fn map(&self) -> Result<Mapping, MemoryError> {
        Mapping::of(&self.fd, addressable(self.bytes)?)
            .map_err(|source| MemoryError::Kernel { action: "map", source })
    }

    /// Allocates the pages of a range now, so that the caller's memory group pays for them and no later access can fail.
    /// Bytes that were written before stay.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`], or what the kernel says when memory is short.
    pub fn populate(&self, offset: u64, len: u64) -> Result<(), MemoryError> {
        let end = offset.checked_add(len).filter(|end| *end <= self.bytes);
        if end.is_none() {
            return Err(MemoryError::OutOfRange { offset, len, bytes: self.bytes });
        }
        if len == 0 {
            return Ok(());
        }
        retry_on_intr(|| fallocate(&self.fd, FallocateFlags::empty(), offset, len))
            .map_err(MemoryError::kernel("populate"))
    }

    /// The ranges that were ever read or written, by whomever, in order, to the page. The rest are holes: they cost no
    /// memory, unless they were populated.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn data_ranges(&self) -> Result<Vec<Range<u64>>, MemoryError> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut from = 0;
        while from < self.bytes {
            let start = match seek(&self.fd, SeekFrom::Data(from)) {
                Ok(start) => start,
                // Nothing but a hole is left.
                Err(Errno::NXIO) => break,
                Err(errno) => return Err(MemoryError::kernel("search")(errno)),
            };
            let end =
                seek(&self.fd, SeekFrom::Hole(start)).map_err(MemoryError::kernel("search"))?;
            // A peer may punch the page between the two calls; go on behind its first byte.
            from = end.max(start + 1);
            if end > start {
                ranges.push(start..end);
            }
        }
        Ok(ranges)
    }
}

impl AsFd for SealedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The size of a file as the kernel tells it now. A constant only for a file that is sealed.
///
/// # Errors
/// What the kernel says.
pub fn file_bytes(fd: impl AsFd) -> io::Result<u64> {
    Ok(u64::try_from(fstat(fd)?.st_size).unwrap_or(0))
}

/// The size as an address range of this process. A mapping must fit in an `isize`, and a file in an `i64`.
fn addressable(bytes: u64) -> Result<usize, MemoryError> {
    isize::try_from(bytes)
        .ok()
        .and_then(|size| usize::try_from(size).ok())
        .ok_or(MemoryError::TooLarge { bytes })
}

fn check_seals(fd: &OwnedFd) -> Result<(), MemoryError> {
    let seals = match fcntl_get_seals(fd) {
        Ok(seals) => seals,
        // EINVAL: a file without seals. EBADF: an O_PATH descriptor, which is open for nothing.
        Err(Errno::INVAL | Errno::BADF) => return Err(MemoryError::NotMemoryFile),
        Err(errno) => return Err(MemoryError::kernel("read the seals of")(errno)),
    };
    let missing = SEALS_NEEDED.difference(seals);
    if !missing.is_empty() {
        return Err(MemoryError::SealsMissing { missing: Seals(missing) });
    }
    let present = SEALS_AGAINST_WRITING.intersection(seals);
    if !present.is_empty() {
        return Err(MemoryError::SealedAgainstWriting { present: Seals(present) });
    }
    let flags = fcntl_getfl(fd).map_err(MemoryError::kernel("read the flags of"))?;
    if !flags.contains(OFlags::RDWR) {
        return Err(MemoryError::NotWritable);
    }
    Ok(())
}

fn check_pages(fd: &OwnedFd) -> Result<(), MemoryError> {
    let files = fstatfs(fd).map_err(MemoryError::kernel("read the page size of"))?;
    if u64::try_from(files.f_type).is_ok_and(|kind| kind == HUGETLBFS_MAGIC) {
        let page_bytes = u64::try_from(files.f_bsize).unwrap_or(0);
        return Err(MemoryError::HugePages { page_bytes });
    }
    Ok(())
}
