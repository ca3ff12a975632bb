//! Protocol versions and the rule by which two sides agree on one.

use crate::{Refusal, RefusalCode};

/// The oldest version that this build serves.
pub const PROTOCOL_OLDEST: u32 = 1;
/// The newest version that this build speaks. Version 2 added `OpenRequest.label`, version 3 `RegisterRegionRequest.pieces`,
/// version 4 the lanes of the session memory and `ArmGraph`.
pub const PROTOCOL_NEWEST: u32 = 4;

/// A version that both sides speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProtocolVersion(u32);

impl ProtocolVersion {
    /// Agrees on the version that the client asked for.
    ///
    /// # Errors
    /// `VERSION_MISMATCH`, naming both, when it lies outside the served range.
    pub fn agree(asked: u32) -> Result<Self, Refusal> {
        if (PROTOCOL_OLDEST..=PROTOCOL_NEWEST).contains(&asked) {
            return Ok(Self(asked));
        }
        Err(Refusal::new(
            RefusalCode::VersionMismatch,
            format!(
                "The client speaks protocol version {asked}; this daemon serves versions {PROTOCOL_OLDEST} to \
                 {PROTOCOL_NEWEST}"
            ),
        )
        .about("protocol_version"))
    }

    /// The number on the wire.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }

    /// Whether a session of this version carries a label (since version 2).
    #[must_use]
    pub fn has_label(self) -> bool {
        self.0 >= 2
    }

    /// Whether a session of this version registers regions of pieces (since version 3).
    #[must_use]
    pub fn has_pieces(self) -> bool {
        self.0 >= 3
    }

    /// Whether the session memory of this version has lanes (since version 4).
    #[must_use]
    pub fn has_lanes(self) -> bool {
        self.0 >= 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_served_version_is_agreed_on_and_its_neighbours_are_refused_naming_both() {
        for asked in PROTOCOL_OLDEST..=PROTOCOL_NEWEST {
            assert_eq!(ProtocolVersion::agree(asked).unwrap().get(), asked);
        }
        for asked in [0, PROTOCOL_NEWEST + 1, u32::MAX] {
            let refusal = ProtocolVersion::agree(asked).unwrap_err();
            assert_eq!(refusal.code(), RefusalCode::VersionMismatch);
            assert!(refusal.sentence().contains(&asked.to_string()), "{refusal}");
            assert!(refusal.sentence().contains(&PROTOCOL_NEWEST.to_string()), "{refusal}");
        }
    }

    #[test]
    fn the_label_came_with_version_two() {
        assert!(!ProtocolVersion::agree(1).unwrap().has_label());
        assert!(ProtocolVersion::agree(2).unwrap().has_label());
    }

    #[test]
    fn lanes_came_with_version_four() {
        assert!(!ProtocolVersion::agree(3).unwrap().has_lanes());
        assert!(ProtocolVersion::agree(4).unwrap().has_lanes());
    }

    #[test]
    fn pieces_came_with_version_three() {
        assert!(!ProtocolVersion::agree(2).unwrap().has_pieces());
        assert!(ProtocolVersion::agree(3).unwrap().has_pieces());
    }
}
