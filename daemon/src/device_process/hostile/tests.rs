//! The harness over many seeds.

use std::thread;

use super::{Arena, Tally, input_of_seed};

/// Says which seed it was when a test fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the seed is {}", self.0);
        }
    }
}

#[test]
fn a_hostile_ring_is_refused_or_copied_right_and_nothing_else_moves() {
    let mut arena = Arena::new();
    let mut all = Tally::default();
    for seed in 0..20_000 {
        let seed = Seed(seed);
        let tally = arena.run(&input_of_seed(seed.0, 100 + usize::try_from(seed.0 % 300).unwrap()));
        all.copied += tally.copied;
        all.refused += tally.refused;
        all.broken += tally.broken;
        all.others += tally.others;
    }
    // It reaches what it is about.
    assert!(all.copied.min(all.refused).min(all.broken).min(all.others) > 5_000, "{all:?}");
}
