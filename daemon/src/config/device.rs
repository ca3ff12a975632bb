//! The names of devices.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use statecopy_kernels::cuda::CudaSelector;
use statecopy_kernels::findings::{CONNECTIONS, DAEMON_CONNECTIONS};

/// A device that the daemon is to serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceName {
    /// The memory and the cores of the machine.
    Host,
    /// An NVIDIA GPU, or a MIG slice of one.
    Cuda(CudaSelector),
}

/// A text that names no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" names no device: known are \"host\", \"cuda:ORDINAL\" and \"cuda:UUID\", as nvidia-smi -L prints both"
)]
pub struct UnknownDevice(String);

impl DeviceName {
    /// What the driver of the device must find in the environment of its process.
    #[must_use]
    pub fn environment(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Host => &[],
            Self::Cuda(_) => &[(CONNECTIONS, DAEMON_CONNECTIONS)],
        }
    }
}

impl FromStr for DeviceName {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, UnknownDevice> {
        match text.split_once(':') {
            None if text == "host" => Ok(Self::Host),
            Some(("cuda", which)) => {
                which.parse().map(Self::Cuda).map_err(|_| UnknownDevice(text.to_owned()))
            }
            _ => Err(UnknownDevice(text.to_owned())),
        }
    }
}

impl TryFrom<String> for DeviceName {
    type Error = UnknownDevice;

    fn try_from(text: String) -> Result<Self, UnknownDevice> {
        text.parse()
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        name.to_string()
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(selector) => selector.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_as_it_is_printed() {
        let uuid = "01234567-89ab-cdef-0011-2233445566ff";
        for name in ["host".to_owned(), "cuda:0".to_owned(), format!("cuda:{uuid}")] {
            assert_eq!(name.parse::<DeviceName>().unwrap().to_string(), name);
        }
        let plain: DeviceName = format!("cuda:{uuid}").parse().unwrap();
        assert_eq!(format!("cuda:GPU-{uuid}").parse(), Ok(plain));
    }

    #[test]
    fn anything_else_is_refused_with_what_is_known() {
        for text in ["", "tpu", "cuda", "cuda:", "cuda:-1", "cuda:all", "host:0", "CUDA:0", "0"] {
            let error = text.parse::<DeviceName>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("\"{text}\"")), "{error}");
            assert!(error.contains("cuda:UUID"), "{error}");
        }
    }
}
