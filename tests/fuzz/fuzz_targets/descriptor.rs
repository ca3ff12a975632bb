//! The record of one copy, as a worker writes it into its ring.
#![no_main]

use libfuzzer_sys::fuzz_target;
use statecopy_session::{CopyDescriptor, FlagSource, IndexSource};

fuzz_target!(|input: (([u64; 8], [u64; 8]), u32)| {
    let ((low, high), inline_bytes) = input;
    let mut words = [0; 16];
    words[..8].copy_from_slice(&low);
    words[8..].copy_from_slice(&high);
    let descriptor = CopyDescriptor::from_words(words);
    assert_eq!(descriptor.to_words(), words);
    let Ok(request) = descriptor.parse() else { return };
    // What was taken for known is known, and nothing else was let in.
    assert!(matches!(descriptor.direction, 1 | 2));
    assert!(matches!(descriptor.index_width, 4 | 8));
    assert_eq!(u64::from(descriptor.index_width), request.indices.width.bytes());
    assert_eq!(descriptor.reserved, [0; 3]);
    assert_eq!((request.selected, request.packed.bytes), (words[3], words[6]));
    let Ok(ranges) = request.inline_ranges(inline_bytes) else { return };
    let limit = u64::from(inline_bytes);
    assert_eq!(ranges.indices.is_some(), request.indices.source == IndexSource::Inline);
    assert_eq!(ranges.flags.is_some(), request.flags == FlagSource::Inline);
    for (range, width) in [(&ranges.indices, request.indices.width.bytes()), (&ranges.flags, 1)] {
        if let Some(range) = range {
            assert!(range.start <= range.end && range.end <= limit);
            assert_eq!(
                u128::from(range.end - range.start),
                u128::from(request.selected) * u128::from(width)
            );
            assert!(range.start.is_multiple_of(16));
        }
    }
    if let (Some(indices), Some(flags)) = (ranges.indices, ranges.flags) {
        assert!(indices.end <= flags.start);
    }
});
