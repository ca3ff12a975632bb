//! Tables by ids that this daemon gave out.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A table by ids. The daemon counts them up itself, so no worker chooses what lies in a table, and hashing need not be hard to
/// foresee: whatever id a worker asks for, its look-up is as short as any.
pub(super) type ById<Id, T> = HashMap<Id, T, BuildHasherDefault<IdHasher>>;

/// Spreads numbers that were counted up. One multiplication, where the usual hash takes as long as the rest of a check.
#[derive(Debug, Default)]
pub(super) struct IdHasher(u64);

/// 2^64 divided by the golden ratio: neighbours end up far apart.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for IdHasher {
    fn write_u64(&mut self, id: u64) {
        self.0 = (self.0 ^ id).wrapping_mul(SPREAD);
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64((*byte).into());
        }
    }

    fn finish(&self) -> u64 {
        // A table takes its place from the low bits and a tag from the high ones.
        self.0 ^ self.0 >> 32
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::BuildHasher as _;

    use statecopy_proto::RegionId;

    use super::*;

    #[test]
    fn ids_that_were_counted_up_fall_apart_in_places_and_in_tags() {
        let hasher = BuildHasherDefault::<IdHasher>::default();
        let hashes: Vec<u64> = (1..=1024).map(|id| hasher.hash_one(RegionId(id))).collect();
        let places: HashSet<u64> = hashes.iter().map(|hash| hash % 2048).collect();
        let tags: HashSet<u64> = hashes.iter().map(|hash| hash >> 57).collect();
        // As many as of a random function, about 806, or more.
        assert!(places.len() > 700, "{} places", places.len());
        assert_eq!(tags.len(), 128);
    }
}
