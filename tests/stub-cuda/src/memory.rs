//! What lies where: every address that the device may touch, in one map.
//!
//! A kernel holds the map while it copies a row, so that memory which goes meanwhile is an illegal address and no crash.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::process;
use std::sync::Arc;

use crate::abi::{CUdevice, CUresult};
use crate::control::Knob;
use crate::ledger::PAGE_BYTES;
use crate::mapping::{self, Address};
use crate::process::{Answer, Process, failed};
use crate::trace::Object;
use crate::vmm::Physical;

/// Memory at consecutive addresses, of one kind.
#[derive(Debug)]
pub(crate) struct Range {
    /// As many as were asked for.
    pub(crate) bytes: u64,
    pub(crate) device: CUdevice,
    /// Never given twice in a process.
    pub(crate) buffer: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    pub(crate) kind: Kind,
}

/// What memory is. A file behind it is kept in use by the mapping: no descriptor of it stays open.
#[derive(Debug)]
pub(crate) enum Kind {
    /// Of `cuMemAlloc_v2`. Its file is known to other processes by `slot`.
    Legacy { slot: u64 },
    /// Of another process, by its handle, opened so many times.
    Imported { handle: [u8; 64], opened: u64 },
    /// Physical memory in a reservation.
    Piece { physical: Arc<Physical> },
    /// Of a pool.
    Pool,
    /// Of `cuMemHostAlloc`.
    Host,
    /// The process's own, registered.
    Registered,
}

/// The map.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    ranges: BTreeMap<Address, Range>,
    reservations: BTreeMap<Address, u64>,
    /// Slots of freed legacy memory.
    free_slots: BTreeSet<u64>,
    buffers: u64,
}

impl Memory {
    pub(crate) fn add(&mut self, at: Address, bytes: u64, device: CUdevice, kind: Kind) {
        self.buffers += 1;
        let usable = !matches!(kind, Kind::Piece { .. });
        let buffer = self.buffers;
        let range = Range { bytes, device, buffer, readable: usable, writable: usable, kind };
        let before = self.ranges.insert(at, range);
        assert!(before.is_none(), "the kernel gave an address that is in use");
    }

    pub(crate) fn remove(&mut self, at: Address) -> Option<Range> {
        self.ranges.remove(&at)
    }

    /// The range that begins there.
    pub(crate) fn at(&self, at: Address) -> Option<&Range> {
        self.ranges.get(&at)
    }

    pub(crate) fn at_mut(&mut self, at: Address) -> Option<&mut Range> {
        self.ranges.get_mut(&at)
    }

    /// The range that holds an address, and where it begins.
    pub(crate) fn find(&self, address: Address) -> Option<(Address, &Range)> {
        let (start, range) = self.ranges.range(..=address).next_back()?;
        (address - start < range.bytes).then_some((*start, range))
    }

    /// The places of the ranges that a condition holds for.
    pub(crate) fn places(&self, wanted: impl Fn(&Range) -> bool) -> Vec<Address> {
        self.ranges.iter().filter(|(_, range)| wanted(range)).map(|(at, _)| *at).collect()
    }

    /// The places of the ranges that lie in `at..at + bytes`, when they fill it without a gap and without an overhang.
    pub(crate) fn filling(&self, at: Address, bytes: u64) -> Option<Vec<Address>> {
        let end = at.checked_add(bytes)?;
        let (mut next, mut places) = (at, Vec::new());
        while next < end {
            places.push(next);
            next += self.ranges.get(&next)?.bytes;
        }
        (next == end).then_some(places)
    }

    /// Whether anything lies in `at..at + bytes`.
    pub(crate) fn occupied(&self, at: Address, bytes: u64) -> bool {
        let last = self.ranges.range(..at.saturating_add(bytes)).next_back();
        last.is_some_and(|(start, range)| start + range.bytes > at)
    }

    /// Whether the device may read, or write, every byte. Ranges side by side are as good as one.
    pub(crate) fn allows(&self, at: Address, bytes: u64, write: bool) -> bool {
        let Some(end) = at.checked_add(bytes) else { return false };
        let mut next = at;
        while next < end {
            match self.find(next) {
                Some((start, range)) if if write { range.writable } else { range.readable } => {
                    next = start + range.bytes;
                }
                _ => return false,
            }
        }
        true
    }

    pub(crate) fn reserve(&mut self, at: Address, bytes: u64) {
        self.reservations.insert(at, bytes);
    }

    /// Gives a reservation back, when it is one and nothing lies in it.
    pub(crate) fn unreserve(&mut self, at: Address, bytes: u64) -> Answer {
        if self.reservations.get(&at) != Some(&bytes) || self.occupied(at, bytes) {
            return Err(CUresult::INVALID_VALUE);
        }
        self.reservations.remove(&at);
        Ok(())
    }

    /// Whether a range lies in one reservation.
    pub(crate) fn reserved(&self, at: Address, bytes: u64) -> bool {
        let before = self.reservations.range(..=at).next_back();
        before.is_some_and(|(start, size)| {
            at.checked_add(bytes).is_some_and(|end| end <= start + size)
        })
    }

    /// Unmaps everything, without a word to anyone.
    pub(crate) fn forget(&mut self) {
        for (at, range) in std::mem::take(&mut self.ranges) {
            unmap(at, &range);
        }
        for (at, bytes) in std::mem::take(&mut self.reservations) {
            mapping::unmap(at, bytes);
        }
    }
}

/// Unmaps what a range held; a piece leaves its addresses reserved.
pub(crate) fn unmap(at: Address, range: &Range) {
    match range.kind {
        Kind::Registered => {}
        Kind::Piece { .. } => {
            let unmapped = mapping::unmap_reserved(at, range.bytes);
            debug_assert!(unmapped.is_ok(), "a reservation can be made anew");
        }
        Kind::Legacy { .. } | Kind::Imported { .. } | Kind::Pool | Kind::Host => {
            mapping::unmap(at, range.bytes.next_multiple_of(PAGE_BYTES));
        }
    }
}

/// The name of legacy memory among the files of a device.
pub(crate) fn legacy_label(pid: u32, slot: u64) -> String {
    format!("legacy-{pid}-{slot}")
}

impl Process {
    /// `cuMemAlloc_v2`.
    pub(crate) fn allocate(&self, bytes: u64) -> Answer<Address> {
        if self.control.is_set(Knob::PoolMemory) {
            return self.allocate_from_pool(bytes);
        }
        let device = self.context()?;
        let mut memory = self.memory_mut();
        let again = self.control.is_set(Knob::ReuseHandles).then(|| memory.free_slots.pop_first());
        let slot = again.flatten().unwrap_or_else(|| self.control.number());
        let file = self.physical(device, &legacy_label(process::id(), slot), bytes)?;
        let at = mapping::map(&file, bytes.next_multiple_of(PAGE_BYTES)).map_err(failed)?;
        memory.add(at, bytes, device, Kind::Legacy { slot });
        self.trace.add(Object::Allocation);
        Ok(at)
    }

    /// `cuMemAllocAsync`, from the device's default pool.
    pub(crate) fn allocate_from_pool(&self, bytes: u64) -> Answer<Address> {
        let device = self.context()?;
        let label = format!("pool-{}", self.control.number());
        let file = self.physical(device, &label, bytes)?;
        let at = mapping::map(&file, bytes.next_multiple_of(PAGE_BYTES)).map_err(failed)?;
        self.memory_mut().add(at, bytes, device, Kind::Pool);
        self.trace.add(Object::Allocation);
        Ok(at)
    }

    /// Memory of a device.
    pub(crate) fn physical(&self, device: CUdevice, label: &str, bytes: u64) -> Answer<File> {
        if bytes == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let device = self.device(device)?;
        self.ledger.create(device.uuid, device.memory, label, bytes)
    }

    /// `cuMemFree_v2`: waits for the device first, as the driver does.
    pub(crate) fn free(&self, at: Address) -> Answer {
        self.synchronise()?;
        self.free_now(at)
    }

    /// Frees memory of `cuMemAlloc_v2` or of a pool that nothing uses any more.
    pub(crate) fn free_now(&self, at: Address) -> Answer {
        let mut memory = self.memory_mut();
        let kind = memory.at(at).map(|range| &range.kind);
        if !matches!(kind, Some(Kind::Legacy { .. } | Kind::Pool)) {
            return Err(CUresult::INVALID_VALUE);
        }
        self.drop_range(&mut memory, at);
        self.trace.remove(Object::Allocation);
        Ok(())
    }

    fn drop_range(&self, memory: &mut Memory, at: Address) {
        let Some(range) = memory.remove(at) else { return };
        unmap(at, &range);
        if let Kind::Legacy { slot, .. } = range.kind
            && let Ok(device) = self.device(range.device)
        {
            let label = legacy_label(process::id(), slot);
            let hidden = self.ledger.hide(device.uuid, &label, self.control.number());
            debug_assert!(hidden.is_ok(), "the file of live memory is there");
            memory.free_slots.insert(slot);
        }
    }

    /// `cuMemHostAlloc`.
    pub(crate) fn allocate_host(&self, bytes: u64) -> Answer<Address> {
        if bytes == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let device = self.context()?;
        let whole = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(CUresult::OUT_OF_MEMORY)?;
        let at = mapping::map_private(whole).map_err(|_| CUresult::OUT_OF_MEMORY)?;
        self.memory_mut().add(at, bytes, device, Kind::Host);
        self.trace.add(Object::HostAllocation);
        Ok(at)
    }

    /// `cuMemFreeHost`.
    pub(crate) fn free_host(&self, at: Address) -> Answer {
        self.synchronise()?;
        let mut memory = self.memory_mut();
        if !matches!(memory.at(at), Some(Range { kind: Kind::Host, .. })) {
            return Err(CUresult::INVALID_VALUE);
        }
        self.drop_range(&mut memory, at);
        self.trace.remove(Object::HostAllocation);
        Ok(())
    }

    /// `cuMemHostRegister_v2`.
    pub(crate) fn register(&self, at: Address, bytes: u64) -> Answer {
        if at == 0 || bytes == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        let device = self.context()?;
        let mut memory = self.memory_mut();
        if memory.occupied(at, bytes) {
            return Err(CUresult::HOST_MEMORY_ALREADY_REGISTERED);
        }
        memory.add(at, bytes, device, Kind::Registered);
        self.trace.add(Object::Registration);
        Ok(())
    }

    /// `cuMemHostUnregister`.
    pub(crate) fn unregister(&self, at: Address) -> Answer {
        self.synchronise()?;
        let mut memory = self.memory_mut();
        if !matches!(memory.at(at), Some(Range { kind: Kind::Registered, .. })) {
            return Err(CUresult::HOST_MEMORY_NOT_REGISTERED);
        }
        memory.remove(at);
        self.trace.remove(Object::Registration);
        Ok(())
    }

    /// What the last user of a context leaves: all memory that was made in it. Reservations and pieces belong to the process.
    pub(crate) fn tear_memory_down(&self, device: CUdevice) {
        let mut memory = self.memory_mut();
        let of_context =
            |range: &Range| range.device == device && !matches!(range.kind, Kind::Piece { .. });
        for at in memory.places(of_context) {
            let object = match memory.at(at).map(|range| &range.kind) {
                Some(Kind::Legacy { .. } | Kind::Pool) => Object::Allocation,
                Some(Kind::Imported { .. }) => Object::OpenHandle,
                Some(Kind::Host) => Object::HostAllocation,
                Some(Kind::Registered) => Object::Registration,
                Some(Kind::Piece { .. }) | None => continue,
            };
            self.drop_range(&mut memory, at);
            self.trace.tear_down(object);
        }
    }
}
