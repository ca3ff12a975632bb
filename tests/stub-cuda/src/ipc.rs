//! Legacy handles: 64 bytes that name an allocation of another process.

use std::process;

use crate::abi::{CUipcMemHandle, CUresult, HANDLE_BYTES};
use crate::devices::StubDevice;
use crate::ledger::PAGE_BYTES;
use crate::mapping::{self, Address};
use crate::memory::{self, Kind, legacy_label};
use crate::process::{Answer, Process, failed};
use crate::trace::{self, Object};

const MAGIC: [u8; 8] = *b"stub-ipc";

/// What a handle says.
struct Named {
    pid: u32,
    slot: u64,
    device: [u8; 16],
}

impl Named {
    fn handle(&self) -> CUipcMemHandle {
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.pid.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.slot.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.device);
        CUipcMemHandle(bytes)
    }

    fn parse(handle: &CUipcMemHandle) -> Option<Self> {
        let named = Self {
            pid: u32::from_le_bytes(handle.0[8..12].try_into().ok()?),
            slot: u64::from_le_bytes(handle.0[16..24].try_into().ok()?),
            device: handle.0[24..40].try_into().ok()?,
        };
        (named.handle() == *handle).then_some(named)
    }
}

impl Process {
    /// `cuIpcGetMemHandle`: of the whole allocation that holds the address, and of nothing but `cuMemAlloc_v2`'s memory.
    pub(crate) fn export_legacy(&self, address: Address) -> Answer<CUipcMemHandle> {
        let memory = self.memory();
        let (_, range) = memory.find(address).ok_or(CUresult::INVALID_VALUE)?;
        let Kind::Legacy { slot, .. } = range.kind else { return Err(CUresult::INVALID_VALUE) };
        let device = self.device(range.device)?.uuid;
        Ok(Named { pid: process::id(), slot, device }.handle())
    }

    /// `cuIpcOpenMemHandle_v2`. A handle that is open already gives the same address, whatever has become of the exporter.
    pub(crate) fn open_legacy(&self, handle: &CUipcMemHandle, flags: u32) -> Answer<Address> {
        let current = self.context()?;
        let named = Named::parse(handle).filter(|_| flags == 1).ok_or(CUresult::INVALID_VALUE)?;
        if named.pid == process::id() {
            return Err(CUresult::INVALID_CONTEXT);
        }
        let mut memory = self.memory_mut();
        let same = |range: &memory::Range| matches!(&range.kind, Kind::Imported { handle: open, .. } if *open == handle.0);
        if let Some(at) = memory.places(same).first().copied() {
            if let Some(Kind::Imported { opened, .. }) =
                memory.at_mut(at).map(|range| &mut range.kind)
            {
                *opened += 1;
            }
            return Ok(at);
        }
        let of_device = |device: &StubDevice| device.uuid == named.device;
        let device = self.devices.iter().position(of_device).ok_or(CUresult::INVALID_DEVICE)?;
        if device != usize::try_from(current).unwrap_or(usize::MAX) {
            return Err(CUresult::INVALID_DEVICE);
        }
        if !trace::lives(&self.directory, named.pid).map_err(failed)? {
            return Err(CUresult::INVALID_VALUE);
        }
        let file = self.ledger.find(named.device, &legacy_label(named.pid, named.slot))?;
        let bytes = file.metadata().map_err(failed)?.len();
        let at = mapping::map(&file, bytes.next_multiple_of(PAGE_BYTES)).map_err(failed)?;
        let kind = Kind::Imported { handle: handle.0, opened: 1 };
        memory.add(at, bytes, current, kind);
        self.trace.add(Object::OpenHandle);
        Ok(at)
    }

    /// `cuIpcCloseMemHandle`: the last close unmaps.
    pub(crate) fn close_legacy(&self, at: Address) -> Answer {
        let mut memory = self.memory_mut();
        let range = memory.at_mut(at).ok_or(CUresult::INVALID_VALUE)?;
        let Kind::Imported { opened, .. } = &mut range.kind else {
            return Err(CUresult::INVALID_VALUE);
        };
        *opened -= 1;
        if *opened == 0
            && let Some(range) = memory.remove(at)
        {
            memory::unmap(at, &range);
            self.trace.remove(Object::OpenHandle);
        }
        Ok(())
    }
}
