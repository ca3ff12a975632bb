//! A small seeded generator (splitmix64): the same seed gives the same work on every machine.

/// A seeded sequence of 64-bit values.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// The sequence of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next value.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// A value below `bound`, which is at least 1. The bias of a modulus does not matter to a workload.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// A place in a slice of `len` elements, which is at least 1.
    pub(crate) fn place(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap_or(0)
    }

    /// True in `percent` of a hundred cases.
    pub(crate) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Puts a slice into random order.
    pub(crate) fn shuffle<T>(&mut self, values: &mut [T]) {
        for last in (1..values.len()).rev() {
            values.swap(last, self.place(last + 1));
        }
    }
}

/// 2^64 divided by the golden ratio, odd: the step of splitmix64.
pub(crate) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of splitmix64: a bijection in which every input bit reaches every output bit.
pub(crate) const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_values_and_another_seed_others() {
        let values = |seed| {
            let mut random = Random::new(seed);
            (0..8).map(|_| random.next()).collect::<Vec<_>>()
        };
        assert_eq!(values(7), values(7));
        assert_ne!(values(7), values(8));
    }

    #[test]
    fn shuffling_keeps_every_value() {
        let mut values: Vec<u32> = (0..100).collect();
        Random::new(1).shuffle(&mut values);
        assert_ne!(values, (0..100).collect::<Vec<_>>());
        values.sort_unstable();
        assert_eq!(values, (0..100).collect::<Vec<_>>());
    }
}
