//! Layout signatures (contract: Layout signature).

use std::fmt;
use std::str::FromStr;

use statecopy_proto::SignatureHash;

use crate::layout::CacheLayout;

/// Characters of a text that an error repeats.
const SHOWN_MAX: usize = 64;

/// Which device: its UUID, the same for every process that sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceUuid(pub [u8; 16]);

/// The usual form, in groups of 8, 4, 4, 4 and 12 digits, without the `GPU-` or `MIG-` that tools put before it.
impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = format!("{:032x}", u128::from_be_bytes(self.0));
        let groups = [0..8, 8..12, 12..16, 16..20, 20..32].map(|group| &digits[group]);
        f.write_str(&groups.join("-"))
    }
}

/// A text is no UUID of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no UUID of a device as nvidia-smi -L or statecopy status prints it")]
pub struct DeviceUuidError(String);

/// 32 hexadecimal digits in either case, in groups of 8, 4, 4, 4 and 12 or without any dash, after `GPU-`, `MIG-` or nothing.
impl FromStr for DeviceUuid {
    type Err = DeviceUuidError;

    fn from_str(text: &str) -> Result<Self, DeviceUuidError> {
        let bare = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-")).unwrap_or(text);
        let groups = bare.split('-').map(str::len);
        let is_grouped = groups.clone().eq([8, 4, 4, 4, 12]) || groups.eq([32]);
        let digits = bare.replace('-', "");
        let is_hexadecimal = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        let number =
            u128::from_str_radix(&digits, 16).ok().filter(|_| is_grouped && is_hexadecimal);
        let number =
            number.ok_or_else(|| DeviceUuidError(text.chars().take(SHOWN_MAX).collect()))?;
        Ok(Self(number.to_be_bytes()))
    }
}

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

#[cfg(test)]
mod tests {
    use statecopy_proto::DataType;

    use super::*;

    const DEVICE: DeviceUuid = DeviceUuid([7; 16]);

    fn layout(dtype: DataType, shape: [u64; 4], strides: [u64; 4]) -> CacheLayout {
        CacheLayout::parse(dtype, &shape, &strides).unwrap()
    }

    fn hash(device: DeviceUuid, layout: &CacheLayout, offset: u64) -> u64 {
        Signature::new(device, layout.clone(), offset).hash().0
    }

    #[test]
    fn a_uuid_is_read_as_tools_print_it() {
        const TEXT: &str = "01234567-89ab-cdef-0011-2233445566ff";
        let bytes = 0x0123_4567_89ab_cdef_0011_2233_4455_66ff_u128.to_be_bytes();
        let uuid = Ok(DeviceUuid(bytes));
        for digits in [TEXT.to_owned(), TEXT.to_uppercase()] {
            for digits in [digits.replace('-', ""), digits] {
                for prefix in ["", "GPU-", "MIG-"] {
                    assert_eq!(format!("{prefix}{digits}").parse(), uuid, "{prefix}{digits}");
                }
            }
        }
        assert_eq!(DeviceUuid(bytes).to_string(), TEXT);
    }

    #[test]
    fn what_is_no_uuid_is_an_error_that_repeats_it_in_bounds() {
        const TEXT: &str = "01234567-89ab-cdef-0011-2233445566ff";
        let bare = TEXT.replace('-', "");
        for text in [
            "",
            "GPU-",
            "0",
            &TEXT[1..],
            &format!("{TEXT}0"),
            &format!("GPU-MIG-{TEXT}"),
            &format!("gpu-{TEXT}"),
            &format!("GPU-{}", &bare[4..]),
            &format!("+{}", &TEXT[1..]),
            &format!("+{}", &bare[1..]),
            &format!("{}-{}", &bare[..4], &bare[4..]),
            &format!("{{{TEXT}}}"),
            &format!("urn:uuid:{TEXT}"),
            &TEXT.replace('f', "g"),
            &TEXT.replace('f', "\u{e9}"),
        ] {
            let error = text.parse::<DeviceUuid>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("{text:?}")), "{error}");
        }
        let endless = "0".repeat(10_000).parse::<DeviceUuid>().unwrap_err();
        assert!(endless.to_string().len() < 200, "{endless}");
    }

    #[test]
    fn every_field_changes_the_hash() {
        let base = layout(DataType::Float32, [3, 1, 4, 5], [60, 20, 5, 1]);
        let mut other_device = DEVICE;
        other_device.0[15] += 1;
        let mut hashes = vec![hash(DEVICE, &base, 0), hash(other_device, &base, 0)];
        // Payload or page stride alone do not name a layout: shapes of equal size and free strides count too.
        for (dtype, shape, strides) in [
            (DataType::Int32, [3, 1, 4, 5], [60, 20, 5, 1]),
            (DataType::Float32, [4, 1, 4, 5], [60, 20, 5, 1]),
            (DataType::Float32, [3, 2, 4, 5], [60, 20, 5, 1]),
            (DataType::Float32, [3, 1, 5, 4], [60, 20, 4, 1]),
            (DataType::Float32, [3, 1, 3, 5], [60, 20, 5, 1]),
            (DataType::Float32, [3, 1, 4, 5], [61, 20, 5, 1]),
            (DataType::Float32, [3, 1, 4, 5], [60, 21, 5, 1]),
        ] {
            hashes.push(hash(DEVICE, &layout(dtype, shape, strides), 0));
        }
        hashes.extend((1..16).map(|offset| hash(DEVICE, &base, offset)));
        let count = hashes.len();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), count);
    }

    #[test]
    fn another_allocation_keeps_the_hash() {
        let layout = layout(DataType::Float32, [3, 1, 4, 5], [60, 20, 5, 1]);
        for offset in [0, 4, 12] {
            let hash_there = hash(DEVICE, &layout, offset);
            for moved in [16, 4096, 1 << 40] {
                let signature = Signature::new(DEVICE, layout.clone(), offset + moved);
                assert_eq!(signature, Signature::new(DEVICE, layout.clone(), offset));
                assert_eq!(signature.hash().0, hash_there);
                assert_eq!(u64::from(signature.base_mod_16()), offset);
            }
        }
    }

    #[test]
    fn the_hash_never_changes_by_accident() {
        let layout = layout(DataType::Float32, [4096, 12, 128, 128], [5_308_416, 16_384, 128, 1]);
        assert_eq!(hash(DEVICE, &layout, 393_216 * 4), 0x7189_be19_c6c9_986e);
    }
}
