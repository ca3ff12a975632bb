//! Virtual memory: physical memory, the addresses that it is mapped to, and the ways to share it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{BorrowedFd, IntoRawFd as _, OwnedFd, RawFd};
use std::sync::Arc;

use crate::abi::{
    ACCESS_READ, ACCESS_READ_WRITE, ALLOCATION_PINNED, CUdevice, CUmemAccessDesc,
    CUmemAllocationProp, CUmemGenericAllocationHandle, CUmemLocation, CUresult, HANDLE_BYTES,
    HANDLE_FABRIC, HANDLE_POSIX, LOCATION_DEVICE,
};
use crate::control::Knob;
use crate::devices::{StubDevice, hex};
use crate::mapping::{self, Address, Keeper};
use crate::memory::{self, Kind};
use crate::process::{Answer, Process, failed};
use crate::trace::Object;

/// Sizes, addresses and alignments of virtual memory are multiples of this.
pub const GRANULARITY_BYTES: u64 = 2 << 20;

const FABRIC_MAGIC: [u8; 8] = *b"stub-fab";

/// Physical memory.
#[derive(Debug)]
pub(crate) struct Physical {
    _keeper: Keeper,
    number: u64,
    bytes: u64,
    pub(crate) types: u32,
    device: CUdevice,
}

/// Handles of physical memory, each with how often it was given.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    handles: BTreeMap<CUmemGenericAllocationHandle, (Arc<Physical>, u64)>,
    last: u64,
}

impl Handles {
    fn add(&mut self, physical: Arc<Physical>) -> CUmemGenericAllocationHandle {
        self.last += 1;
        self.handles.insert(self.last, (physical, 1));
        self.last
    }

    fn get(&self, handle: CUmemGenericAllocationHandle) -> Answer<Arc<Physical>> {
        let found = self.handles.get(&handle).map(|(physical, _)| Arc::clone(physical));
        found.ok_or(CUresult::INVALID_VALUE)
    }
}

fn is_granular(bytes: u64) -> bool {
    bytes.is_multiple_of(GRANULARITY_BYTES)
}

/// The file name of physical memory holds what an importer must know of it.
fn label(number: u64, types: u32) -> String {
    format!("physical-{number}-{types}")
}

fn parse_label(label: &str) -> Option<(u64, u32)> {
    let (number, types) = label.strip_prefix("physical-")?.split_once('-')?;
    Some((number.parse().ok()?, types.parse().ok()?))
}

impl Process {
    /// The device of properties that the stub can serve.
    fn wanted(&self, properties: &CUmemAllocationProp) -> Answer<CUdevice> {
        if properties.kind != ALLOCATION_PINNED || properties.location.kind != LOCATION_DEVICE {
            return Err(CUresult::INVALID_VALUE);
        }
        self.device(properties.location.id)?;
        let types = properties.requested_handle_types;
        if types & !(HANDLE_POSIX | HANDLE_FABRIC) != 0 {
            return Err(CUresult::NOT_SUPPORTED);
        }
        if types & HANDLE_FABRIC != 0 && !self.control.is_set(Knob::Fabric) {
            return Err(CUresult::NOT_PERMITTED);
        }
        Ok(properties.location.id)
    }

    /// `cuMemGetAllocationGranularity`.
    pub(crate) fn granularity(&self, properties: &CUmemAllocationProp) -> Answer<u64> {
        self.wanted(properties).map(|_| GRANULARITY_BYTES)
    }

    /// `cuMemAddressReserve`.
    pub(crate) fn reserve(&self, bytes: u64, alignment: u64, flags: u64) -> Answer<Address> {
        let alignment = alignment.max(GRANULARITY_BYTES);
        if bytes == 0 || !is_granular(bytes) || !alignment.is_power_of_two() || flags != 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let at = mapping::reserve(bytes, alignment).map_err(|_| CUresult::OUT_OF_MEMORY)?;
        self.memory_mut().reserve(at, bytes);
        self.trace.add(Object::Reservation);
        Ok(at)
    }

    /// `cuMemAddressFree`: of a whole reservation with nothing in it.
    pub(crate) fn unreserve(&self, at: Address, bytes: u64) -> Answer {
        self.memory_mut().unreserve(at, bytes)?;
        mapping::unmap(at, bytes);
        self.trace.remove(Object::Reservation);
        Ok(())
    }

    /// `cuMemCreate`.
    pub(crate) fn create(
        &self,
        bytes: u64,
        properties: &CUmemAllocationProp,
        flags: u64,
    ) -> Answer<CUmemGenericAllocationHandle> {
        let device = self.wanted(properties)?;
        if bytes == 0 || !is_granular(bytes) || flags != 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let (number, types) = (self.control.number(), properties.requested_handle_types);
        let file = self.physical(device, &label(number, types), bytes)?;
        self.add_handle(&file, number, types, device)
    }

    fn add_handle(
        &self,
        file: &File,
        number: u64,
        types: u32,
        device: CUdevice,
    ) -> Answer<CUmemGenericAllocationHandle> {
        let bytes = file.metadata().map_err(failed)?.len();
        let keeper = Keeper::of(file).map_err(failed)?;
        let physical = Physical { _keeper: keeper, number, bytes, types, device };
        self.trace.add(Object::MemoryHandle);
        Ok(self.objects().handles.add(Arc::new(physical)))
    }

    /// The file behind physical memory, opened for a moment.
    fn file(&self, physical: &Physical) -> Answer<File> {
        let device = self.device(physical.device)?.uuid;
        self.ledger.find(device, &label(physical.number, physical.types))
    }

    /// `cuMemRelease`.
    pub(crate) fn release(&self, handle: CUmemGenericAllocationHandle) -> Answer {
        let handles = &mut self.objects().handles.handles;
        let (_, given) = handles.get_mut(&handle).ok_or(CUresult::INVALID_VALUE)?;
        *given -= 1;
        if *given == 0 {
            handles.remove(&handle);
            self.trace.remove(Object::MemoryHandle);
        }
        Ok(())
    }

    /// `cuMemRetainAllocationHandle`: of the mapping that holds the address.
    pub(crate) fn retain(&self, address: Address) -> Answer<CUmemGenericAllocationHandle> {
        let memory = self.memory();
        let (_, range) = memory.find(address).ok_or(CUresult::INVALID_VALUE)?;
        let Kind::Piece { physical } = &range.kind else { return Err(CUresult::INVALID_VALUE) };
        let handles = &mut self.objects().handles;
        let same = handles.handles.iter_mut().find(|(_, (held, _))| Arc::ptr_eq(held, physical));
        if let Some((handle, (_, given))) = same {
            *given += 1;
            return Ok(*handle);
        }
        self.trace.add(Object::MemoryHandle);
        Ok(handles.add(Arc::clone(physical)))
    }

    /// `cuMemGetAllocationPropertiesFromHandle`.
    pub(crate) fn properties(
        &self,
        handle: CUmemGenericAllocationHandle,
    ) -> Answer<CUmemAllocationProp> {
        let physical = self.objects().handles.get(handle)?;
        Ok(CUmemAllocationProp {
            kind: ALLOCATION_PINNED,
            requested_handle_types: physical.types,
            location: CUmemLocation { kind: LOCATION_DEVICE, id: physical.device },
            win32_handle_metadata: 0,
            flags: [0; 8],
        })
    }

    /// `cuMemMap`: from the start of the memory, and no more than there is of it.
    pub(crate) fn map(
        &self,
        at: Address,
        bytes: u64,
        offset: u64,
        handle: CUmemGenericAllocationHandle,
        flags: u64,
    ) -> Answer {
        let physical = self.objects().handles.get(handle)?;
        let granular = is_granular(at) && is_granular(bytes) && bytes > 0;
        let mut memory = self.memory_mut();
        let free = memory.reserved(at, bytes) && !memory.occupied(at, bytes);
        if !granular || offset != 0 || flags != 0 || !free {
            return Err(CUresult::INVALID_VALUE);
        }
        if bytes != physical.bytes {
            return Err(CUresult::NOT_SUPPORTED);
        }
        mapping::map_reserved(at, &self.file(&physical)?, bytes).map_err(failed)?;
        memory.add(at, bytes, physical.device, Kind::Piece { physical });
        self.trace.add(Object::Mapping);
        Ok(())
    }

    /// `cuMemUnmap`: whole mappings, side by side.
    pub(crate) fn unmap(&self, at: Address, bytes: u64) -> Answer {
        let mut memory = self.memory_mut();
        for place in pieces(&memory, at, bytes)? {
            if let Some(range) = memory.remove(place) {
                memory::unmap(place, &range);
                self.trace.remove(Object::Mapping);
            }
        }
        Ok(())
    }

    /// `cuMemSetAccess`: for whole mappings, side by side.
    pub(crate) fn set_access(&self, at: Address, bytes: u64, access: &[CUmemAccessDesc]) -> Answer {
        let mut memory = self.memory_mut();
        let places = pieces(&memory, at, bytes)?;
        for each in access {
            if each.location.kind != LOCATION_DEVICE {
                return Err(CUresult::INVALID_VALUE);
            }
            self.device(each.location.id)?;
            let (read, write) = match each.flags {
                0 => (false, false),
                ACCESS_READ => (true, false),
                ACCESS_READ_WRITE => (true, true),
                _ => return Err(CUresult::INVALID_VALUE),
            };
            for place in &places {
                let Some(range) = memory.at_mut(*place) else { continue };
                mapping::protect(*place, range.bytes, read, write).map_err(failed)?;
                (range.readable, range.writable) = (read, write);
            }
        }
        if access.is_empty() { Err(CUresult::INVALID_VALUE) } else { Ok(()) }
    }

    /// `cuMemExportToShareableHandle` for a descriptor, which is the caller's.
    pub(crate) fn export_descriptor(&self, handle: CUmemGenericAllocationHandle) -> Answer<RawFd> {
        let physical = self.objects().handles.get(handle)?;
        if physical.types & HANDLE_POSIX == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        Ok(OwnedFd::from(self.file(&physical)?).into_raw_fd())
    }

    /// `cuMemExportToShareableHandle` for a fabric handle.
    pub(crate) fn export_fabric(
        &self,
        handle: CUmemGenericAllocationHandle,
    ) -> Answer<[u8; HANDLE_BYTES]> {
        let physical = self.objects().handles.get(handle)?;
        if physical.types & HANDLE_FABRIC == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..8].copy_from_slice(&FABRIC_MAGIC);
        bytes[8..16].copy_from_slice(&physical.number.to_le_bytes());
        bytes[16..20].copy_from_slice(&physical.types.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.device(physical.device)?.uuid);
        Ok(bytes)
    }

    /// `cuMemImportFromShareableHandle` for a descriptor, which stays the caller's.
    pub(crate) fn import_descriptor(
        &self,
        descriptor: RawFd,
    ) -> Answer<CUmemGenericAllocationHandle> {
        if descriptor < 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        // SAFETY: the caller lends the descriptor for the call; a number that is none is refused by the first use of it.
        let lent = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let own = lent.try_clone_to_owned().map_err(|_| CUresult::INVALID_VALUE)?;
        // So says driver 580 of a descriptor that is not of device memory.
        let (device, label) = self.ledger.label(&own).ok_or(CUresult::UNKNOWN)?;
        let (number, types) = parse_label(&label).ok_or(CUresult::INVALID_VALUE)?;
        self.import(|each| hex(each.uuid) == device, &File::from(own), number, types)
    }

    /// `cuMemImportFromShareableHandle` for a fabric handle.
    pub(crate) fn import_fabric(
        &self,
        bytes: &[u8; HANDLE_BYTES],
    ) -> Answer<CUmemGenericAllocationHandle> {
        if !self.control.is_set(Knob::Fabric) {
            return Err(CUresult::NOT_PERMITTED);
        }
        let parts = bytes[8..16].try_into().ok().zip(bytes[16..20].try_into().ok());
        let (number, types) = parts.ok_or(CUresult::INVALID_VALUE)?;
        let (number, types) = (u64::from_le_bytes(number), u32::from_le_bytes(types));
        let device: [u8; 16] = bytes[24..40].try_into().map_err(|_| CUresult::INVALID_VALUE)?;
        if bytes[..8] != FABRIC_MAGIC {
            return Err(CUresult::INVALID_VALUE);
        }
        let file = self.ledger.find(device, &label(number, types))?;
        self.import(|each| each.uuid == device, &file, number, types)
    }

    fn import(
        &self,
        of_device: impl Fn(&StubDevice) -> bool,
        file: &File,
        number: u64,
        types: u32,
    ) -> Answer<CUmemGenericAllocationHandle> {
        let device = self.devices.iter().position(of_device);
        let device = device.and_then(|place| CUdevice::try_from(place).ok());
        let device = device.ok_or(CUresult::INVALID_DEVICE)?;
        self.add_handle(file, number, types, device)
    }
}

/// The places of the pieces that fill a range.
fn pieces(memory: &memory::Memory, at: Address, bytes: u64) -> Answer<Vec<Address>> {
    let places = memory.filling(at, bytes).filter(|places| !places.is_empty());
    let places = places.ok_or(CUresult::INVALID_VALUE)?;
    let piece = |place: &Address| {
        memory.at(*place).is_some_and(|range| matches!(range.kind, Kind::Piece { .. }))
    };
    if places.iter().all(piece) { Ok(places) } else { Err(CUresult::INVALID_VALUE) }
}
