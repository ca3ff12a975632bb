//! How the bytes of one row are moved.
//!
//! The memory is shared with other processes, which may write it at any moment, so it never stands behind a reference: raw
//! pointers only, and copies that are right for bytes that change meanwhile. What a peer that breaks its promise gets
//! is a mixture of old and new bytes in its own rows. [`ptr::copy`] rather than its sibling for disjoint memory: the same
//! speed, and nothing undefined should two mappings turn out to be the same pages.
//!
//! Two ways to store: [`ORDINARY`] leaves the row in the cache, and is the portable twin everywhere; the [`streaming`] ones
//! of x86-64 go around the cache. On an EPYC with 32 MiB of last-level cache they copy 1.1 (rows of 24 KiB) to 1.4 times as
//! fast (0.75 MiB), but the next reader finds nothing in the cache: copy and a read of the copy together win from
//! 16 MiB of request on. Rows of 4 KiB lose at any size. `benches/row_copy.rs` measures it again.

use std::ptr;

/// From how many bytes of one request on a copy goes around the cache: less is still there when it is used.
pub(super) const STREAM_REQUEST_BYTES_MIN: u64 = 16 << 20;
/// Rows below this never go around the cache: what is lost at their ends is more than what is gained between.
pub(super) const STREAM_ROW_BYTES_MIN: u64 = 16 << 10;

/// A way to copy and clear bytes, and to make them visible before a completion is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stores {
    /// Copies `bytes` bytes. Both ranges must lie in live memory.
    pub(super) copy: unsafe fn(from: *const u8, to: *mut u8, bytes: usize),
    /// Clears `bytes` bytes. The range must lie in live memory.
    pub(super) clear: unsafe fn(to: *mut u8, bytes: usize),
    /// Orders what was stored before every store that follows.
    pub(super) publish: fn(),
    /// The name in the configuration.
    pub(super) label: &'static str,
}

/// Ordinary stores. A release store is enough to publish them.
pub(super) const ORDINARY: Stores =
    Stores { copy: copy_ordinary, clear: clear_ordinary, publish: || (), label: "ordinary" };

/// The stores that win for large copies on this machine, if any do.
pub(super) fn streaming() -> Option<Stores> {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            return Some(avx512::STORES);
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            return Some(avx2::STORES);
        }
    }
    None
}

/// # Safety
/// `from` is valid for reads and `to` for writes of `bytes` bytes.
pub(super) unsafe fn copy_ordinary(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: both ranges are valid by this function's own condition; bytes need no alignment, and may overlap.
    unsafe { ptr::copy(from, to, bytes) }
}

/// # Safety
/// `to` is valid for writes of `bytes` bytes.
pub(super) unsafe fn clear_ordinary(to: *mut u8, bytes: usize) {
    // SAFETY: the range is valid by this function's own condition; bytes need no alignment.
    unsafe { ptr::write_bytes(to, 0, bytes) }
}

/// One module of streaming stores: `$line` bytes at a time through `$vector` registers.
#[cfg(target_arch = "x86_64")]
macro_rules! streaming_stores {
    ($name:ident, $feature:literal, $vector:ident, $load:ident, $store:ident, $stream:ident, $zero:ident) => {
        mod $name {
            use std::arch::x86_64::{_mm_sfence, $load, $store, $stream, $vector, $zero};

            use super::{Stores, clear_ordinary, copy_ordinary};

            const VECTOR: usize = size_of::<$vector>();
            /// Vectors in flight: enough to keep the line-fill buffers busy.
            const UNROLLED: usize = 4;

            pub(super) const STORES: Stores =
                Stores { copy, clear, publish, label: concat!($feature, " streaming") };

            /// Streaming stores are weakly ordered: without the fence a completion could be seen before them.
            fn publish() {
                // SAFETY: every x86-64 processor has the instruction.
                unsafe { _mm_sfence() };
            }

            /// # Safety
            /// As [`copy_ordinary`], and the processor has the feature.
            unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
                if bytes < 2 * VECTOR {
                    // SAFETY: the same condition.
                    return unsafe { copy_ordinary(from, to, bytes) };
                }
                // SAFETY: the ranges are valid and long enough, the feature is there.
                unsafe { copy_long(from, to, bytes) }
            }

            /// # Safety
            /// As [`clear_ordinary`], and the processor has the feature.
            unsafe fn clear(to: *mut u8, bytes: usize) {
                if bytes < 2 * VECTOR {
                    // SAFETY: the same condition.
                    return unsafe { clear_ordinary(to, bytes) };
                }
                // SAFETY: the range is valid and long enough, the feature is there.
                unsafe { clear_long(to, bytes) }
            }

            /// # Safety
            /// As [`copy`]; at least two vectors.
            #[target_feature(enable = $feature)]
            unsafe fn copy_long(from: *const u8, to: *mut u8, bytes: usize) {
                // The first and the last vector are stored as they lie; whole aligned vectors stream between them.
                let last = bytes - VECTOR;
                // SAFETY: both ranges hold at least one vector.
                let head = unsafe { load(from) };
                // SAFETY: as above, counted from the end.
                let tail = unsafe { load(from.wrapping_add(last)) };
                let mut at = to.addr().wrapping_neg() % VECTOR;
                while at + UNROLLED * VECTOR <= bytes {
                    let (from, to) = (from.wrapping_add(at), to.wrapping_add(at));
                    // SAFETY: the loop's condition keeps all of them inside; `to + at` is aligned.
                    unsafe { stream_four(from, to) };
                    at += UNROLLED * VECTOR;
                }
                while at < last {
                    // SAFETY: `at + VECTOR < bytes`.
                    let middle = unsafe { load(from.wrapping_add(at)) };
                    // SAFETY: as above; `to + at` is aligned.
                    unsafe { stream(to.wrapping_add(at), middle) };
                    at += VECTOR;
                }
                // SAFETY: the range holds at least one vector.
                unsafe { store(to, head) };
                // SAFETY: as above, counted from the end.
                unsafe { store(to.wrapping_add(last), tail) };
            }

            /// # Safety
            /// As [`clear`]; at least two vectors.
            #[target_feature(enable = $feature)]
            unsafe fn clear_long(to: *mut u8, bytes: usize) {
                let zero = $zero();
                let last = bytes - VECTOR;
                // SAFETY: the range holds at least one vector.
                unsafe { store(to, zero) };
                // SAFETY: as above, counted from the end.
                unsafe { store(to.wrapping_add(last), zero) };
                let mut at = to.addr().wrapping_neg() % VECTOR;
                while at < last {
                    // SAFETY: `at + VECTOR < bytes`; `to + at` is aligned.
                    unsafe { stream(to.wrapping_add(at), zero) };
                    at += VECTOR;
                }
            }

            /// # Safety
            /// Both ranges hold four vectors, and `to` is aligned to one.
            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn stream_four(from: *const u8, to: *mut u8) {
                // SAFETY: the first of four.
                let first = unsafe { load(from) };
                // SAFETY: the second of four.
                let second = unsafe { load(from.wrapping_add(VECTOR)) };
                // SAFETY: the third of four.
                let third = unsafe { load(from.wrapping_add(2 * VECTOR)) };
                // SAFETY: the fourth of four.
                let fourth = unsafe { load(from.wrapping_add(3 * VECTOR)) };
                // SAFETY: the first of four, aligned.
                unsafe { stream(to, first) };
                // SAFETY: the second of four, aligned.
                unsafe { stream(to.wrapping_add(VECTOR), second) };
                // SAFETY: the third of four, aligned.
                unsafe { stream(to.wrapping_add(2 * VECTOR), third) };
                // SAFETY: the fourth of four, aligned.
                unsafe { stream(to.wrapping_add(3 * VECTOR), fourth) };
            }

            /// # Safety
            /// `from` is valid for reads of one vector.
            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn load(from: *const u8) -> $vector {
                // SAFETY: the same condition; the load needs no alignment.
                unsafe { $load(from.cast()) }
            }

            /// # Safety
            /// `to` is valid for writes of one vector.
            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn store(to: *mut u8, vector: $vector) {
                // SAFETY: the same condition; the store needs no alignment.
                unsafe { $store(to.cast(), vector) }
            }

            /// # Safety
            /// `to` is valid for writes of one vector, and aligned to it.
            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn stream(to: *mut u8, vector: $vector) {
                // SAFETY: the same condition.
                unsafe { $stream(to.cast(), vector) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
streaming_stores!(
    avx512,
    "avx512f",
    __m512i,
    _mm512_loadu_si512,
    _mm512_storeu_si512,
    _mm512_stream_si512,
    _mm512_setzero_si512
);
#[cfg(target_arch = "x86_64")]
streaming_stores!(
    avx2,
    "avx2",
    __m256i,
    _mm256_loadu_si256,
    _mm256_storeu_si256,
    _mm256_stream_si256,
    _mm256_setzero_si256
);

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Stores> {
        let mut all = vec![ORDINARY];
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") {
                all.push(avx512::STORES);
            }
            if std::arch::is_x86_feature_detected!("avx2") {
                all.push(avx2::STORES);
            }
        }
        all
    }

    fn pattern(bytes: usize) -> Vec<u8> {
        (0_u8..=250).cycle().take(bytes).collect()
    }

    #[test]
    fn every_length_at_every_alignment_is_exact_and_touches_nothing_else() {
        const ROOM: usize = 1024;
        let source = pattern(ROOM);
        for stores in all() {
            for bytes in (0..300).chain([511, 512, 513, 640, 700]) {
                for start in (0..65).step_by(if bytes < 200 { 1 } else { 7 }) {
                    let from = 64 - start;
                    let mut copied = vec![0xA5; ROOM];
                    let mut expected = copied.clone();
                    expected[start..start + bytes].copy_from_slice(&source[from..from + bytes]);
                    // SAFETY: `from + bytes` is at most 64 + 700, inside both vectors.
                    unsafe {
                        (stores.copy)(
                            source.as_ptr().wrapping_add(from),
                            copied.as_mut_ptr().wrapping_add(start),
                            bytes,
                        );
                    }
                    (stores.publish)();
                    assert!(copied == expected, "{} {bytes} at {start}", stores.label);
                    expected[start..start + bytes].fill(0);
                    // SAFETY: `start + bytes` is at most 64 + 700, inside the vector.
                    unsafe { (stores.clear)(copied.as_mut_ptr().wrapping_add(start), bytes) };
                    (stores.publish)();
                    assert!(copied == expected, "{} {bytes} at {start}", stores.label);
                }
            }
        }
    }
}
