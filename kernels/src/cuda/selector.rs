//! Which device is meant: by ordinal, or by UUID.

use std::fmt;
use std::str::FromStr;

use crate::signature::DeviceUuid;

/// Names a device among those that a process sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CudaSelector {
    /// By its place in the order of the driver, which `CUDA_VISIBLE_DEVICES` changes.
    Ordinal(u32),
    /// By its UUID, the same wherever the device is seen. A MIG slice has one of its own.
    Uuid(DeviceUuid),
}

/// A text names no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither an ordinal nor a UUID as nvidia-smi -L prints it")]
pub struct SelectorError(String);

impl FromStr for CudaSelector {
    type Err = SelectorError;

    /// An ordinal, or a UUID with or without the `GPU-` or `MIG-` before it.
    fn from_str(text: &str) -> Result<Self, SelectorError> {
        if let Ok(ordinal) = text.parse() {
            return Ok(Self::Ordinal(ordinal));
        }
        let bare = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-")).unwrap_or(text);
        parse_uuid(bare).map(Self::Uuid).ok_or_else(|| SelectorError(text.to_owned()))
    }
}

impl fmt::Display for CudaSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordinal(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Uuid(uuid) => write!(f, "cuda:{uuid}"),
        }
    }
}

/// The usual form: groups of 8, 4, 4, 4 and 12 digits.
fn parse_uuid(text: &str) -> Option<DeviceUuid> {
    let groups: Vec<&str> = text.split('-').collect();
    if !groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12]) {
        return None;
    }
    let digits = groups.concat();
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    Some(DeviceUuid(u128::from_str_radix(&digits, 16).ok()?.to_be_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "01234567-89ab-cdef-0011-2233445566ff";

    #[test]
    fn a_device_is_named_by_ordinal_or_by_uuid_in_any_of_its_forms() {
        let mut uuid = DeviceUuid([0; 16]);
        uuid.0[..8].copy_from_slice(&[0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef]);
        uuid.0[8..].copy_from_slice(&[0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0xff]);
        assert_eq!("0".parse(), Ok(CudaSelector::Ordinal(0)));
        assert_eq!("17".parse(), Ok(CudaSelector::Ordinal(17)));
        for text in
            [TEXT.to_owned(), format!("GPU-{TEXT}"), format!("MIG-{TEXT}"), TEXT.to_uppercase()]
        {
            assert_eq!(text.parse(), Ok(CudaSelector::Uuid(uuid)), "{text}");
        }
        assert_eq!(CudaSelector::Uuid(uuid).to_string(), format!("cuda:{TEXT}"));
        assert_eq!(CudaSelector::Ordinal(3).to_string(), "cuda:3");
    }

    #[test]
    fn what_names_no_device_is_an_error_that_repeats_it() {
        let without_dashes = TEXT.replace('-', "");
        let signed = format!("+{}", &TEXT[1..]);
        for text in ["", "-1", "cuda:0", "GPU-", "4294967296", &TEXT[1..], &without_dashes, &signed]
        {
            let error = text.parse::<CudaSelector>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("{text:?}")), "{error}");
        }
    }
}
