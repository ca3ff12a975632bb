//! Bytes of host memory that other libraries own.

#![expect(unsafe_code, reason = "copies foreign memory by its address")]
#![expect(clippy::cast_possible_truncation, reason = "addresses of this process are 64 bits wide")]

use std::ptr;

/// Copies `bytes` bytes from one address of this process to another. The caller knows from a view and a buffer that both hold
/// so many, and that they are different memory.
pub(crate) fn copy(from: u64, to: u64, bytes: u64) {
    let source = ptr::with_exposed_provenance::<u8>(from as usize);
    let target = ptr::with_exposed_provenance_mut::<u8>(to as usize);
    // SAFETY: the producer of the view vouches for its elements, which are dense and lent until the copy is over; a buffer of
    // the pool has at least as many bytes, is mapped while it is held, and overlaps no tensor of another owner. Whoever writes
    // at the same time gets a mix, as with any copy of a tensor.
    unsafe { ptr::copy_nonoverlapping(source, target, bytes as usize) };
}
