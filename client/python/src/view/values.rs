//! Values of host tensors, copied out element by element: memory that other threads and processes may write is never behind
//! a reference.

#![expect(unsafe_code, reason = "reads foreign memory by its address")]
#![expect(clippy::cast_possible_truncation, reason = "addresses of this process are 64 bits wide")]

use std::ptr;

use super::View;

/// Plain numbers, for which any bits are a value.
pub(crate) trait Plain: Copy {}

impl Plain for u8 {}
impl Plain for i32 {}
impl Plain for i64 {}

impl View {
    /// The values, last axis fastest. The caller knows that the element type has `T`'s size, and that it lies in host memory.
    pub(crate) fn values<T: Plain>(&self) -> Vec<T> {
        let mut values = Vec::with_capacity(usize::try_from(self.numel()).unwrap_or_default());
        if self.is_contiguous() {
            values.extend((0..self.numel().cast_signed()).map(|offset| self.read::<T>(offset)));
        } else {
            self.each_offset(|offset| values.push(self.read(offset)));
        }
        values
    }

    /// Whether each element has a bit that is set, as one byte each: the truth of integers and of bools.
    pub(crate) fn truths(&self, item_bytes: u8) -> Vec<u8> {
        let mut truths = Vec::with_capacity(usize::try_from(self.numel()).unwrap_or_default());
        self.each_offset(|offset| {
            let is_true = (0..item_bytes).any(|byte| {
                let at = offset * i64::from(item_bytes) + i64::from(byte);
                self.read::<u8>(at) != 0
            });
            truths.push(u8::from(is_true));
        });
        truths
    }

    /// The element `offset` elements of `T` after the first.
    fn read<T: Plain>(&self, offset: i64) -> T {
        let first = ptr::with_exposed_provenance::<T>(self.address as usize);
        let at = first.wrapping_offset(offset as isize);
        // SAFETY: the producer of the view vouches for each element within shape and strides, its memory is lent while the view
        // lives, any bits are a T, and no alignment is assumed.
        unsafe { ptr::read_unaligned(at) }
    }

    /// Calls with the offset of each element from the first, in elements.
    fn each_offset(&self, mut each: impl FnMut(i64)) {
        if self.shape.contains(&0) {
            return;
        }
        let mut at = vec![0_i64; self.shape.len()];
        loop {
            each(at.iter().zip(&self.strides).map(|(at, stride)| at * stride).sum());
            let Some(axis) = (0..at.len()).rev().find(|axis| at[*axis] + 1 < self.shape[*axis])
            else {
                return;
            };
            at[axis] += 1;
            at[axis + 1..].fill(0);
        }
    }
}
