//! What the driver says of an address.

use crate::abi::{
    ACCESS_READ, ACCESS_READ_WRITE, CUresult, MEMORY_DEVICE, MEMORY_HOST, pointer_attribute as name,
};
use crate::mapping::Address;
use crate::memory::{Kind, Range};
use crate::process::{Answer, Process, context_of};

/// The value of an attribute, as wide as the driver writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value {
    /// `int` or `unsigned int`.
    Int(u32),
    /// `unsigned long long`, `size_t`, or a pointer.
    Long(u64),
    /// `bool`.
    Bool(bool),
}

/// The default pool of a device, as a handle.
const POOL: u64 = 0x2000;

impl Process {
    /// `cuPointerGetAttribute`.
    pub(crate) fn attribute(&self, attribute: u32, address: Address) -> Answer<Value> {
        let memory = self.memory();
        let (start, range) = memory.find(address).ok_or(CUresult::INVALID_VALUE)?;
        value(attribute, address, start, range)
    }

    /// `cuMemGetAddressRange_v2`: of mapped memory, one mapping.
    pub(crate) fn address_range(&self, address: Address) -> Answer<(Address, u64)> {
        let memory = self.memory();
        let (start, range) = memory.find(address).ok_or(CUresult::NOT_FOUND)?;
        Ok((start, range.bytes))
    }
}

fn value(attribute: u32, address: Address, start: Address, range: &Range) -> Answer<Value> {
    let host = matches!(range.kind, Kind::Host | Kind::Registered);
    Ok(match attribute {
        name::CONTEXT => Value::Long(match range.kind {
            // Physical memory belongs to no context.
            Kind::Piece { .. } => 0,
            _ => context_of(range.device),
        }),
        name::MEMORY_TYPE => Value::Int(if host { MEMORY_HOST } else { MEMORY_DEVICE }),
        name::DEVICE_POINTER => Value::Long(address),
        name::HOST_POINTER if host => Value::Long(address),
        name::SYNC_MEMOPS | name::IS_MANAGED => Value::Int(0),
        name::BUFFER_ID | name::MEMORY_BLOCK_ID => Value::Long(range.buffer),
        name::DEVICE_ORDINAL => Value::Int(range.device.cast_unsigned()),
        name::IS_LEGACY_CUDA_IPC_CAPABLE => {
            Value::Int(u32::from(matches!(range.kind, Kind::Legacy { .. })))
        }
        name::RANGE_START_ADDR | name::MAPPING_BASE_ADDR => Value::Long(start),
        name::RANGE_SIZE | name::MAPPING_SIZE => Value::Long(range.bytes),
        name::MAPPED => Value::Bool(true),
        name::ALLOWED_HANDLE_TYPES => Value::Long(match &range.kind {
            Kind::Piece { physical } => u64::from(physical.types),
            _ => 0,
        }),
        name::ACCESS_FLAGS => Value::Int(match (range.readable, range.writable) {
            (_, true) => ACCESS_READ_WRITE,
            (true, false) => ACCESS_READ,
            (false, false) => 0,
        }),
        name::MEMPOOL_HANDLE => Value::Long(match range.kind {
            Kind::Pool => POOL + u64::from(range.device.cast_unsigned()),
            _ => 0,
        }),
        _ => return Err(CUresult::INVALID_VALUE),
    })
}
