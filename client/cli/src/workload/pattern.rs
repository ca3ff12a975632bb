//! States that can be told apart at a glance.
//!
//! A state is a run of 64-bit words `first + i * STEP`, where `first` is mixed from seed, layer and the state's number.
//! Whether a row holds a given state can be checked word by word without keeping a copy of it, so a worker's model of a
//! cache of gigabytes is one number a row. A row that is shifted, mixed from two states, or another layer's differs in
//! its very first words.

use std::fmt;

use super::random::{GOLDEN, mix};

/// The step from one word to the next: odd, so that no two words of a state are equal.
const STEP: u64 = GOLDEN;

/// Bytes of one word.
const WORD: usize = size_of::<u64>();

/// Which state a row holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// All zero bytes: a row that was never written, or the initial state of a new sequence.
    Zero,
    /// The state of that number; numbers are given once in a run.
    Numbered(u64),
}

/// A byte of a state that is not what it must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Which byte of the state.
    pub(crate) byte: usize,
    pub(crate) is: u8,
    pub(crate) must_be: u8,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { byte, is, must_be } = self;
        write!(f, "byte {byte} is {is:#04x}, not {must_be:#04x}")
    }
}

/// The states of one layer of one worker.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patterns {
    layer_seed: u64,
}

impl Patterns {
    /// The states of a layer under a seed.
    pub(crate) fn new(seed: u64, layer: usize) -> Self {
        Self { layer_seed: mix(mix(seed).wrapping_add(layer as u64)) }
    }

    /// Writes the part of a state that begins at byte `offset`, a multiple of 8.
    pub(crate) fn fill(self, state: State, offset: usize, bytes: &mut [u8]) {
        let Some(mut word) = self.word_at(state, offset) else {
            bytes.fill(0);
            return;
        };
        let (words, tail) = bytes.as_chunks_mut::<WORD>();
        for at in words {
            *at = word.to_le_bytes();
            word = word.wrapping_add(STEP);
        }
        let last = word.to_le_bytes();
        tail.copy_from_slice(&last[..tail.len()]);
    }

    /// Counts the words (the last one may be shorter) in which `bytes` is not that part of the state.
    pub(crate) fn mismatches(self, state: State, offset: usize, bytes: &[u8]) -> u64 {
        let (words, tail) = bytes.as_chunks::<WORD>();
        let Some(first) = self.word_at(state, offset) else {
            let nonzero = |differs: u64, word: &[u8; WORD]| {
                differs + u64::from(u64::from_le_bytes(*word) != 0)
            };
            let whole = words.iter().fold(0, nonzero);
            return whole + u64::from(tail.iter().any(|byte| *byte != 0));
        };
        let mut word = first;
        let mut differs = 0;
        for at in words {
            differs += u64::from(u64::from_le_bytes(*at) != word);
            word = word.wrapping_add(STEP);
        }
        differs + u64::from(tail != &word.to_le_bytes()[..tail.len()])
    }

    /// The first byte in which `bytes` is not that part of the state.
    pub(crate) fn first_difference(
        self,
        state: State,
        offset: usize,
        bytes: &[u8],
    ) -> Option<Difference> {
        let mut right = vec![0; bytes.len()];
        self.fill(state, offset, &mut right);
        let mut pairs = bytes.iter().zip(&right).enumerate();
        let (at, (is, must_be)) = pairs.find(|(_, (is, must_be))| is != must_be)?;
        Some(Difference { byte: offset + at, is: *is, must_be: *must_be })
    }

    fn word_at(self, state: State, offset: usize) -> Option<u64> {
        match state {
            State::Zero => None,
            State::Numbered(number) => {
                let first = mix(self.layer_seed ^ mix(number));
                Some(first.wrapping_add(STEP.wrapping_mul((offset / WORD) as u64)))
            }
        }
    }
}

/// Gives every state its number.
#[derive(Debug, Default)]
pub(crate) struct States(u64);

impl States {
    /// A state that never was before.
    pub(crate) fn fresh(&mut self) -> State {
        self.0 += 1;
        State::Numbered(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE: State = State::Numbered(5);

    fn filled(patterns: Patterns, state: State, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; len];
        patterns.fill(state, 0, &mut bytes);
        bytes
    }

    #[test]
    fn a_state_matches_itself_whole_and_in_parts_of_any_length() {
        let patterns = Patterns::new(3, 1);
        for len in [8, 64, 61, 7, 4096] {
            for state in [State::Zero, STATE] {
                let bytes = filled(patterns, state, len);
                assert_eq!(patterns.mismatches(state, 0, &bytes), 0);
                for cut in (0..len).step_by(8) {
                    assert_eq!(patterns.mismatches(state, cut, &bytes[cut..]), 0);
                }
            }
        }
    }

    #[test]
    fn any_flipped_bit_is_one_mismatch() {
        let patterns = Patterns::new(3, 1);
        for state in [State::Zero, STATE] {
            let mut bytes = filled(patterns, state, 61);
            for at in 0..bytes.len() {
                bytes[at] ^= 0x10;
                assert_eq!(patterns.mismatches(state, 0, &bytes), 1, "byte {at}");
                let first = patterns.first_difference(state, 0, &bytes).unwrap();
                assert_eq!((first.byte, first.is), (at, bytes[at]));
                assert_eq!(first.must_be, bytes[at] ^ 0x10);
                bytes[at] ^= 0x10;
            }
        }
    }

    #[test]
    fn other_states_layers_seeds_and_shifts_differ_in_every_word() {
        let patterns = Patterns::new(3, 1);
        let bytes = filled(patterns, STATE, 800);
        assert_eq!(patterns.mismatches(State::Zero, 0, &bytes), 100);
        assert_eq!(patterns.mismatches(State::Numbered(6), 0, &bytes), 100);
        assert_eq!(Patterns::new(3, 2).mismatches(STATE, 0, &bytes), 100);
        assert_eq!(Patterns::new(4, 1).mismatches(STATE, 0, &bytes), 100);
        assert_eq!(patterns.mismatches(STATE, 8, &bytes), 100);
    }

    #[test]
    fn fresh_states_are_never_given_twice() {
        let mut states = States::default();
        assert_ne!(states.fresh(), states.fresh());
    }
}
