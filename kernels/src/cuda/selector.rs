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

    /// An ordinal, or a UUID as [`DeviceUuid`] reads it.
    fn from_str(text: &str) -> Result<Self, SelectorError> {
        if let Ok(ordinal) = text.parse() {
            return Ok(Self::Ordinal(ordinal));
        }
        text.parse().map(Self::Uuid).map_err(|_| SelectorError(text.to_owned()))
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

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "01234567-89ab-cdef-0011-2233445566ff";

    #[test]
    fn a_device_is_named_by_ordinal_or_by_uuid() {
        let uuid: DeviceUuid = TEXT.parse().unwrap();
        assert_eq!("0".parse(), Ok(CudaSelector::Ordinal(0)));
        assert_eq!("17".parse(), Ok(CudaSelector::Ordinal(17)));
        assert_eq!(format!("GPU-{TEXT}").parse(), Ok(CudaSelector::Uuid(uuid)));
        assert_eq!(CudaSelector::Uuid(uuid).to_string(), format!("cuda:{TEXT}"));
        assert_eq!(CudaSelector::Ordinal(3).to_string(), "cuda:3");
    }

    #[test]
    fn what_names_no_device_is_an_error_that_repeats_it() {
        for text in ["", "-1", "cuda:0", "GPU-", "4294967296", &TEXT[1..]] {
            let error = text.parse::<CudaSelector>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("{text:?}")), "{error}");
        }
    }
}
