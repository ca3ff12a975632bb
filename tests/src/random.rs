//! Values that look random and are the same for the same seed.

/// splitmix64.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next word.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.word() % end
    }
}

/// That many random bytes.
#[must_use]
pub fn random_bytes(seed: u64, len: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let words = (0..len.div_ceil(8)).flat_map(|_| random.word().to_le_bytes());
    words.take(usize::try_from(len).expect("an address")).collect()
}
