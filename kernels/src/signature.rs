//! Layout signatures (contract: Layout signature).

use statecopy_proto::SignatureHash;

use crate::layout::CacheLayout;

/// Which device: its UUID, the same for every process that sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceUuid(pub [u8; 16]);

/// Bytes to which packed buffers, indices and flags are aligned, and by which the class of a base address is told.
pub const ALIGNMENT_BYTES: u64 = 16;

/// (device identity, dtype, shape, strides, base address mod 16). It names a layout, not an allocation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Signature {
    device: DeviceUuid,
    layout: CacheLayout,
    base_mod_16: u8,
}

impl Signature {
    /// The signature of a layout whose base lies `offset` bytes into a region. Regions begin on a multiple of 16.
    #[must_use]
    pub fn new(device: DeviceUuid, layout: CacheLayout, offset: u64) -> Self {
        let base_mod_16 = offset.to_le_bytes()[0] % 16;
        Self { device, layout, base_mod_16 }
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> DeviceUuid {
        self.device
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// The base address mod 16.
    #[must_use]
    pub fn base_mod_16(&self) -> u8 {
        self.base_mod_16
    }

    /// The hash that every request carries: the first eight bytes, little-endian, of BLAKE3 over a fixed encoding.
    #[must_use]
    pub fn hash(&self) -> SignatureHash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"statecopy layout signature 1");
        hasher.update(&self.device.0);
        hasher.update(&self.layout.dtype().number().to_le_bytes());
        for value in self.layout.shape().iter().chain(self.layout.strides()) {
            hasher.update(&value.to_le_bytes());
        }
        hasher.update(&[self.base_mod_16]);
        let mut first = [0; 8];
        first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        SignatureHash(u64::from_le_bytes(first))
    }
}
