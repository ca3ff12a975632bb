//! Where the harness's decisions come from: the bytes of a fuzzer, or of a seed.

/// Reads decisions off a string of bytes, until it is used up.
#[derive(Debug)]
pub(super) struct Input<'a> {
    bytes: &'a [u8],
}

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// The next byte; `None` when there is none left.
    pub(super) fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(*first)
    }

    /// The next byte, or zero.
    pub(super) fn byte(&mut self) -> u8 {
        self.next().unwrap_or(0)
    }

    /// A number below `end`, which is 1 to 256, from one byte.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        u64::from(self.byte()) % end
    }

    /// A number of 64 bits, or what is left filled up with zeros.
    pub(super) fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// Up to so many bytes.
    pub(super) fn take(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.bytes.split_at(most.min(self.bytes.len()));
        self.bytes = rest;
        taken
    }
}

/// Bytes that look random and are the same for the same seed (splitmix64).
pub(super) fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let word = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    };
    let words = std::iter::repeat_with(word).flat_map(u64::to_le_bytes);
    words.take(len).collect()
}
