//! The words in which a copy is described, shared by the wire, the session memory and the devices.

use std::fmt;

use crate::v1;

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the cache into the packed buffer.
    Gather,
    /// From the packed buffer into the cache.
    Scatter,
}

impl Direction {
    /// Both directions.
    pub const ALL: [Self; 2] = [Self::Gather, Self::Scatter];

    /// The name in metrics and messages.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Gather => "gather",
            Self::Scatter => "scatter",
        }
    }
}

/// How wide one index is. INT32 is never widened to another buffer (contract: Both).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IndexWidth {
    /// Four bytes, signed.
    Int32,
    /// Eight bytes, signed.
    Int64,
}

impl IndexWidth {
    /// Both widths.
    pub const ALL: [Self; 2] = [Self::Int32, Self::Int64];

    /// Bytes of one index.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Int32 => 4,
            Self::Int64 => 8,
        }
    }

    /// The name in metrics and messages.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Int32 => "int32",
            Self::Int64 => "int64",
        }
    }
}

/// The plan kinds of the contract ("Choice").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PlanKind {
    /// FP32 or BF16 on a device that declares the capability: four variants.
    Fused,
    /// The masked fallback for every other valid layout and dtype: one variant.
    ByteCopy,
}

impl PlanKind {
    /// The name in metrics and messages.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Fused => "fused",
            Self::ByteCopy => "byte_copy",
        }
    }

    /// The message's value.
    #[must_use]
    pub const fn to_message(self) -> v1::PlanKind {
        match self {
            Self::Fused => v1::PlanKind::Fused,
            Self::ByteCopy => v1::PlanKind::ByteCopy,
        }
    }
}

/// Bytes of a handle that travels by value: a legacy CUDA IPC handle, a fabric handle.
pub const HANDLE_BYTES: usize = 64;

/// How the memory of a region comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HandleKind {
    /// One sealed memfd, by descriptor.
    Memfd,
    /// One CUDA allocation, by a legacy IPC handle.
    CudaIpc,
    /// CUDA virtual memory, by one or many descriptors, mapped side by side.
    CudaVmm,
    /// CUDA virtual memory, by one or many fabric handles, mapped side by side.
    CudaFabric,
}

impl HandleKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Memfd, Self::CudaIpc, Self::CudaVmm, Self::CudaFabric];

    /// The name in messages and in `statecopy status`.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Memfd => "memfd",
            Self::CudaIpc => "cuda_ipc",
            Self::CudaVmm => "cuda_vmm",
            Self::CudaFabric => "cuda_fabric",
        }
    }

    /// Whether its pieces are file descriptors; otherwise they are bytes.
    #[must_use]
    pub const fn travels_by_descriptor(self) -> bool {
        matches!(self, Self::Memfd | Self::CudaVmm)
    }

    /// The kind of device whose memory it names.
    #[must_use]
    pub const fn device_kind(self) -> &'static str {
        match self {
            Self::Memfd => "host",
            Self::CudaIpc | Self::CudaVmm | Self::CudaFabric => "cuda",
        }
    }

    /// The value on the wire.
    #[must_use]
    pub fn to_message(self) -> v1::HandleKind {
        match self {
            Self::Memfd => v1::HandleKind::Memfd,
            Self::CudaIpc => v1::HandleKind::CudaIpc,
            Self::CudaVmm => v1::HandleKind::CudaVmm,
            Self::CudaFabric => v1::HandleKind::CudaFabric,
        }
    }

    /// Reads the number on the wire; `None` for one that is no kind.
    #[must_use]
    pub fn from_message(number: i32) -> Option<Self> {
        match v1::HandleKind::try_from(number).ok()? {
            v1::HandleKind::Unspecified => None,
            v1::HandleKind::Memfd => Some(Self::Memfd),
            v1::HandleKind::CudaIpc => Some(Self::CudaIpc),
            v1::HandleKind::CudaVmm => Some(Self::CudaVmm),
            v1::HandleKind::CudaFabric => Some(Self::CudaFabric),
        }
    }
}

macro_rules! data_types {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $label:literal, $bytes:literal;)*) => {
        /// The type of one element of a cache. Copies move bits; the type decides the plan kind and the item size.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum DataType {
            $($(#[$doc])* $name = $number,)*
        }

        impl DataType {
            /// Every type, in the order of its number.
            pub const ALL: [Self; [$($number),*].len()] = [$(Self::$name),*];

            /// Bytes of one element: 1, 2, 4 or 8.
            #[must_use]
            pub const fn item_bytes(self) -> u64 {
                match self {
                    $(Self::$name => $bytes,)*
                }
            }

            /// The name in messages, as PyTorch writes it.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)*
                }
            }
        }
    };
}

data_types! {
    /// IEEE 754 binary32.
    Float32 = 1, "float32", 4;
    /// The upper half of a binary32.
    BFloat16 = 2, "bfloat16", 2;
    /// IEEE 754 binary16.
    Float16 = 3, "float16", 2;
    /// IEEE 754 binary64.
    Float64 = 4, "float64", 8;
    /// Signed, one byte.
    Int8 = 5, "int8", 1;
    /// Signed, two bytes.
    Int16 = 6, "int16", 2;
    /// Signed, four bytes.
    Int32 = 7, "int32", 4;
    /// Signed, eight bytes.
    Int64 = 8, "int64", 8;
    /// Unsigned, one byte.
    UInt8 = 9, "uint8", 1;
    /// Unsigned, two bytes.
    UInt16 = 10, "uint16", 2;
    /// Unsigned, four bytes.
    UInt32 = 11, "uint32", 4;
    /// Unsigned, eight bytes.
    UInt64 = 12, "uint64", 8;
    /// One byte a truth value.
    Bool = 13, "bool", 1;
    /// Eight bits, four of them exponent.
    Float8E4M3 = 14, "float8_e4m3fn", 1;
    /// Eight bits, five of them exponent.
    Float8E5M2 = 15, "float8_e5m2", 1;
    /// Two binary32.
    Complex64 = 16, "complex64", 8;
}

/// A number on the wire that stands for no data type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no data type that this version knows")]
pub struct UnknownDataType(pub u32);

impl DataType {
    /// The number in messages and in the session memory.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The message's value.
    #[must_use]
    pub fn to_message(self) -> v1::DataType {
        v1::DataType::try_from(self.number().cast_signed()).unwrap_or_default()
    }
}

impl TryFrom<u32> for DataType {
    type Error = UnknownDataType;

    fn try_from(number: u32) -> Result<Self, UnknownDataType> {
        usize::try_from(number)
            .ok()
            .and_then(|number| number.checked_sub(1))
            .and_then(|at| Self::ALL.get(at).copied())
            .ok_or(UnknownDataType(number))
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_types_are_the_ones_on_the_wire() {
        for dtype in DataType::ALL {
            assert_eq!(DataType::try_from(dtype.number()), Ok(dtype));
            assert_eq!(dtype.to_message() as u32, dtype.number());
            assert!([1, 2, 4, 8].contains(&dtype.item_bytes()));
        }
        let after = u32::try_from(DataType::ALL.len()).unwrap() + 1;
        assert_eq!(DataType::try_from(after), Err(UnknownDataType(after)));
        assert!(v1::DataType::try_from(after.cast_signed()).is_err());
        assert_eq!(DataType::try_from(0), Err(UnknownDataType(0)));
    }
}
