//! The few calls of the operating system that make and change mappings.

use std::fs::File;
use std::io;
use std::ptr;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

/// Where memory lies in this process.
pub(crate) type Address = u64;

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);
const NO_MEMORY: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

/// Maps a file where the kernel likes, to be read and written.
pub(crate) fn map(file: &File, bytes: u64) -> io::Result<Address> {
    // SAFETY: a new mapping at an address that the kernel chooses touches no memory of anyone.
    let at = unsafe { mmap(ptr::null_mut(), size(bytes), READ_WRITE, MapFlags::SHARED, file, 0) }?;
    Ok(at.expose_provenance() as Address)
}

/// Memory of this process alone, zeroed.
pub(crate) fn map_private(bytes: u64) -> io::Result<Address> {
    // SAFETY: a new mapping at an address that the kernel chooses touches no memory of anyone.
    let at =
        unsafe { mmap_anonymous(ptr::null_mut(), size(bytes), READ_WRITE, MapFlags::PRIVATE) }?;
    Ok(at.expose_provenance() as Address)
}

/// Takes addresses with nothing behind them, at a multiple of `alignment`.
pub(crate) fn reserve(bytes: u64, alignment: u64) -> io::Result<Address> {
    let whole = bytes.checked_add(alignment).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: a new mapping at an address that the kernel chooses touches no memory of anyone.
    let at =
        unsafe { mmap_anonymous(ptr::null_mut(), size(whole), ProtFlags::empty(), NO_MEMORY) }?;
    let from = at.expose_provenance() as Address;
    let start = from.next_multiple_of(alignment);
    unmap(from, start - from);
    unmap(start + bytes, from + whole - (start + bytes));
    Ok(start)
}

/// Puts a file into reserved addresses; nobody may touch it yet.
///
/// The range lies in a reservation that this module made, and nothing is mapped there.
pub(crate) fn map_reserved(at: Address, file: &File, bytes: u64) -> io::Result<()> {
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: the caller owns the reservation; nothing lies in this part of it.
    unsafe { mmap(pointer(at), size(bytes), ProtFlags::empty(), flags, file, 0) }?;
    Ok(())
}

/// Takes a file out of reserved addresses, which stay reserved.
pub(crate) fn unmap_reserved(at: Address, bytes: u64) -> io::Result<()> {
    let flags = NO_MEMORY | MapFlags::FIXED;
    // SAFETY: the caller owns the reservation, and forgot what was mapped in this part of it.
    unsafe { mmap_anonymous(pointer(at), size(bytes), ProtFlags::empty(), flags) }?;
    Ok(())
}

/// Says what may be done with mapped memory.
pub(crate) fn protect(at: Address, bytes: u64, read: bool, write: bool) -> io::Result<()> {
    let mut flags = MprotectFlags::empty();
    flags.set(MprotectFlags::READ, read);
    flags.set(MprotectFlags::WRITE, write);
    // SAFETY: the caller owns the mapping; whoever touches it has looked at its rights first.
    unsafe { mprotect(pointer(at), size(bytes), flags) }?;
    Ok(())
}

/// Removes a mapping that this module made and that its owner has forgotten.
pub(crate) fn unmap(at: Address, bytes: u64) {
    if bytes > 0 {
        // SAFETY: the caller owned the mapping, and nobody uses it any more.
        let unmapped = unsafe { munmap(pointer(at), size(bytes)) };
        debug_assert!(unmapped.is_ok(), "a mapping that was made can be unmade");
    }
}

/// What keeps a file in use without a descriptor: a page of it, mapped, that nobody may touch.
#[derive(Debug)]
pub(crate) struct Keeper(Address);

impl Keeper {
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let flags = MapFlags::SHARED;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory of anyone.
        let at = unsafe { mmap(ptr::null_mut(), 1, ProtFlags::empty(), flags, file, 0) }?;
        Ok(Self(at.expose_provenance() as Address))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        unmap(self.0, 1);
    }
}

/// The pointer of an address.
pub(crate) fn pointer<T>(at: Address) -> *mut T {
    ptr::with_exposed_provenance_mut(size(at))
}

/// A count of bytes as a length in memory.
pub(crate) fn size(bytes: u64) -> usize {
    usize::try_from(bytes).expect("64-bit addresses")
}
