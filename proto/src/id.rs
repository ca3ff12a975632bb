//! Identifiers. Each is its own type, so that none is passed where another is meant.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

id!(
    /// One worker's session with the daemon. Never used again within an incarnation.
    SessionId(u64)
);
id!(
    /// One registered region of shared memory. Never used again within an incarnation.
    RegionId(u64)
);
id!(
    /// One published binding, or one set of bindings. Never used again within an incarnation: an older id is STALE_PLAN.
    BindingId(u64)
);
id!(
    /// One ordered sequence of a session's requests (contract: Both).
    Lane(u32)
);

/// The 64-bit hash of a layout signature (contract: Layout signature).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SignatureHash(pub u64);

impl fmt::Display for SignatureHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// One life of the daemon. A client that sees another one registers again.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Incarnation([u8; 16]);

/// An incarnation on the wire was not 16 bytes long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("An incarnation has 16 bytes, not {0}")]
pub struct IncarnationError(usize);

impl Incarnation {
    /// An incarnation from its bytes.
    #[must_use]
    pub fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Reads an incarnation from the wire.
    ///
    /// # Errors
    /// When it is not 16 bytes long.
    pub fn parse(bytes: &[u8]) -> Result<Self, IncarnationError> {
        bytes.try_into().map(Self).map_err(|_| IncarnationError(bytes.len()))
    }

    /// The bytes on the wire.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// A new vector of the bytes, as messages hold them.
    #[must_use]
    pub fn to_vec(self) -> Vec<u8> {
        self.0.to_vec()
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Incarnation({self})")
    }
}
