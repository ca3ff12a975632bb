//! What a client did, in numbers.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::sync::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counted since the client was connected.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $($(#[$doc])* pub(crate) $name: Count,)*
        }

        impl Counters {
            pub(crate) fn write_into(&self, dict: &Bound<'_, PyDict>) -> PyResult<()> {
                $(dict.set_item(stringify!($name), self.$name.get())?;)*
                Ok(())
            }
        }
    };
}

counters! {
    /// Gathers that were answered with success.
    gathers,
    /// Scatters that were answered with success.
    scatters,
    /// Payload bytes that they moved or cleared.
    bytes_moved,
    /// Operands that the daemon read or wrote where they lay.
    operands_in_place,
    /// Indices and flags that went with the request.
    operands_inline,
    /// Operands that were copied once, because their memory could not be shared or was new after `freeze()`.
    operands_copied,
    /// The bytes of those.
    bytes_copied_to_share,
    /// Operands that were strided, unaligned or of another type.
    normalised,
}

/// One number.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
