//! Allocations that are registered when they are first seen.
//!
//! ```text
//!          of_memory, of_device         another allocation there, the holder gone,
//!  unseen ----------------------> known     least recently used, trim
//!     |                             |  ----------------------------------------> released
//!     | pin_memory, pin_device      v pin                                           ^
//!     +--------------------------> pinned ------------------------------------------+
//!                                          another allocation there, pin_only
//! ```

use std::any::Any;
use std::sync::{Arc, Mutex, Weak};

use statecopy_proto::RefusalCode;

use super::pool::release_regions;
use super::ranges::Ranges;
use crate::blocking::Client;
use crate::error::Error;
use crate::lock::lock;
use crate::memory::Memory;
use crate::region::{Region, Slice, Source, Use};

/// How many regions are kept that nobody pinned.
const KEPT_MAX: usize = 256;
/// How many allocations are remembered that cannot be shared.
const REFUSED_MAX: usize = 256;

/// Regions of memory that others allocated, known by its address. On a CUDA device it is checked at each use that the same
/// allocation is there.
#[derive(Debug)]
pub struct Regions {
    client: Client,
    table: Mutex<Table>,
}

/// What was registered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RegionCounters {
    /// How many were registered.
    pub registered: u64,
    /// How many were released, for whatever reason.
    pub dropped: u64,
    /// How many there are.
    pub kept: u64,
}

#[derive(Debug, Default)]
struct Table {
    known: Ranges<Known>,
    /// Numbers of allocations that cannot be shared, the oldest first.
    refused: Vec<u64>,
    frozen: bool,
    /// Counts the uses.
    uses: u64,
    registered: u64,
    dropped: u64,
}

#[derive(Debug)]
struct Known {
    region: Region,
    pinned: bool,
    /// The last use.
    used: u64,
    /// Whoever owns the memory, where the region alone would keep it.
    holder: Option<Weak<dyn Any + Send + Sync>>,
}

impl Known {
    /// Whether it may go: no layer needs it, and no place in it is held by a request that is not answered.
    fn is_idle(&self) -> bool {
        // One is held here, and one by the client's records.
        !self.pinned && Arc::strong_count(&self.region.record) <= 2
    }

    fn is_orphan(&self) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.strong_count() == 0)
    }

    /// Whether the bytes at an address are those that were registered.
    fn is_unchanged(&self, address: u64, bytes: u64) -> bool {
        match &self.region.record.source {
            Source::Memory(_) | Source::Descriptor(_) => true,
            Source::Device(memory) => memory.is_unchanged(address, bytes),
        }
    }

    /// Where its region begins.
    fn range(&self) -> (u64, u64) {
        let record = &self.region.record;
        let start = match &record.source {
            Source::Memory(memory) => memory.address(),
            Source::Device(memory) => memory.start(),
            // Nobody registers one here.
            Source::Descriptor(_) => 0,
        };
        (start, record.bytes)
    }
}

impl Table {
    /// The known region of so many bytes, noted as used if it is what was registered.
    fn touch(&mut self, address: u64, bytes: u64) -> Touched<'_> {
        self.uses += 1;
        let used = self.uses;
        let Some((place, offset)) = self.known.find(address, bytes) else {
            return Touched::Unknown;
        };
        let known = self.known.at(place);
        if !known.is_unchanged(address, bytes) {
            return Touched::Changed(place);
        }
        known.used = used;
        Touched::Unchanged(known, offset)
    }

    /// The region of so many bytes, and their place in it. One of other memory than is there now comes out.
    fn look(&mut self, address: u64, bytes: u64, keeps: Keeps) -> Looked {
        match self.touch(address, bytes) {
            Touched::Unchanged(known, offset) => {
                known.pinned |= keeps == Keeps::Always;
                Looked::Found(known.region.at(offset))
            }
            Touched::Changed(place) => {
                self.dropped += 1;
                Looked::Replaced(self.known.remove(place).region)
            }
            Touched::Unknown => Looked::Unknown,
        }
    }

    /// Adds a region, unless there is one for these bytes by now. The place, and the regions that are to go.
    fn keep(
        &mut self,
        slice: Slice,
        address: u64,
        bytes: u64,
        keeps: Keeps,
        holder: Option<Weak<dyn Any + Send + Sync>>,
    ) -> (Slice, Vec<Region>) {
        let mut gone = Vec::new();
        match self.look(address, bytes, keeps) {
            Looked::Found(known) => {
                gone.push(slice.region);
                return (known, gone);
            }
            Looked::Replaced(region) => gone.push(region),
            Looked::Unknown => {}
        }
        let pinned = keeps == Keeps::Always;
        let known = Known { region: slice.region.clone(), pinned, used: self.uses, holder };
        let (start, length) = known.range();
        self.known.insert(start, length, known);
        self.registered += 1;
        gone.extend(self.drop_surplus());
        (slice, gone)
    }

    /// Remembers an allocation that cannot be shared.
    fn refuse(&mut self, number: u64) {
        if self.refused.len() == REFUSED_MAX {
            self.refused.remove(0);
        }
        self.refused.push(number);
    }

    /// Those that are to go, out of the table.
    fn drop_where(&mut self, goes: impl FnMut(&mut Known) -> bool) -> Vec<Region> {
        let gone = self.known.extract(goes);
        self.dropped += gone.len() as u64;
        gone.into_iter().map(|known| known.region).collect()
    }

    /// Orphans, and what was not used for longest where there are too many.
    fn drop_surplus(&mut self) -> Vec<Region> {
        let mut gone = self.drop_where(|known| known.is_idle() && known.is_orphan());
        let unpinned = self.known.values().filter(|known| !known.pinned).count();
        let Some(surplus) = unpinned.checked_sub(KEPT_MAX + 1) else { return gone };
        let idle = self.known.values().filter(|known| known.is_idle());
        let mut uses: Vec<u64> = idle.map(|known| known.used).collect();
        uses.sort_unstable();
        if let Some(last) = uses.get(surplus).or(uses.last()).copied() {
            gone.extend(self.drop_where(|known| known.is_idle() && known.used <= last));
        }
        gone
    }
}

/// Why there is no place.
enum Missing {
    /// It may be registered.
    Unknown,
    /// Nothing is registered any more.
    Frozen,
}

/// How long a region is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keeps {
    WhileUsed,
    Always,
}

/// What lies in the table for an address.
enum Touched<'a> {
    /// The region, and how far from its start.
    Unchanged(&'a mut Known, u64),
    /// Of other memory than is there now: its place in the table.
    Changed(usize),
    Unknown,
}

/// What a look into the table found.
enum Looked {
    Found(Slice),
    Replaced(Region),
    Unknown,
}

impl Regions {
    /// None yet.
    #[must_use]
    pub fn new(client: &Client) -> Self {
        Self { client: client.clone(), table: Mutex::default() }
    }

    /// The place of a part of shared host memory, which is registered when it is first seen. It is released when it was not
    /// used for long, and by the next [`Regions::sweep`] when the holder is gone. `None`: it is not known, and cannot be
    /// registered now.
    ///
    /// # Errors
    /// As [`Client::register_region`].
    pub fn of_memory(
        &self,
        memory: &Memory,
        holder: Weak<dyn Any + Send + Sync>,
        offset: u64,
        bytes: u64,
    ) -> Result<Option<Slice>, Error> {
        let address = memory.address().saturating_add(offset);
        match self.look(address, bytes, Keeps::WhileUsed) {
            Ok(slice) => Ok(Some(slice)),
            Err(Missing::Unknown) => {
                let register = || Ok(self.client.register_region(memory, Use::Packed)?.at(offset));
                let slice = self.or_nothing(register)?;
                Ok(slice
                    .map(|slice| self.keep(slice, address, bytes, Keeps::WhileUsed, Some(holder))))
            }
            Err(Missing::Frozen) => Ok(None),
        }
    }

    /// The place of host memory that a layer's cache lies in. It stays registered until it is unpinned.
    ///
    /// # Errors
    /// As [`Client::register_region`].
    pub fn pin_memory(&self, memory: &Memory, offset: u64, bytes: u64) -> Result<Slice, Error> {
        let address = memory.address().saturating_add(offset);
        self.look(address, bytes, Keeps::Always).or_else(|_| {
            let region = self.client.register_region(memory, Use::Cache)?;
            Ok(self.keep(region.at(offset), address, bytes, Keeps::Always, None))
        })
    }

    /// The place of device memory, whose allocation is registered when it is first seen. It is released when it was not used
    /// for long, or when another allocation is found at its address. `None`: it is not known, and cannot be registered now,
    /// or the allocator's memory cannot be shared at all.
    ///
    /// # Errors
    /// As [`Client::register_device_memory`].
    pub fn of_device(&self, address: u64, bytes: u64) -> Result<Option<Slice>, Error> {
        match self.look(address, bytes, Keeps::WhileUsed) {
            Ok(slice) => return Ok(Some(slice)),
            Err(Missing::Frozen) => return Ok(None),
            Err(Missing::Unknown) => {}
        }
        let exporter = self.client.as_async().shared.opened_exporter();
        let number = exporter.and_then(|exporter| exporter.buffer_at(address).ok()).unwrap_or(0);
        if number != 0 && lock(&self.table).refused.contains(&number) {
            return Ok(None);
        }
        match self.or_nothing(|| self.client.register_device_memory(address, bytes)) {
            Err(error) if error.code() == Some(RefusalCode::HandleUnsupported) => {
                lock(&self.table).refuse(number);
                Ok(None)
            }
            slice => {
                Ok(slice?.map(|slice| self.keep(slice, address, bytes, Keeps::WhileUsed, None)))
            }
        }
    }

    /// The place of device memory that a layer's cache lies in. It stays registered until it is unpinned, or another
    /// allocation is found at its address.
    ///
    /// # Errors
    /// As [`Client::register_device_memory`].
    pub fn pin_device(&self, address: u64, bytes: u64) -> Result<Slice, Error> {
        self.look(address, bytes, Keeps::Always).or_else(|_| {
            let slice = self.client.register_device_memory(address, bytes)?;
            Ok(self.keep(slice, address, bytes, Keeps::Always, None))
        })
    }

    /// Keeps these pinned, and releases every other that was: their caches are no longer registered.
    pub fn pin_only(&self, regions: &[Region]) {
        let is_kept = |known: &Known| {
            regions.iter().any(|region| region.record.key == known.region.record.key)
        };
        let gone = lock(&self.table).drop_where(|known| known.pinned && !is_kept(known));
        release_regions(&self.client, gone);
    }

    /// Registers nothing from now on but what is pinned.
    pub fn freeze(&self) {
        lock(&self.table).frozen = true;
    }

    /// Whether nothing is registered any more but what is pinned.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        lock(&self.table).frozen
    }

    /// Releases the regions whose holders are gone.
    pub fn sweep(&self) {
        let gone = lock(&self.table).drop_where(|known| known.is_idle() && known.is_orphan());
        release_regions(&self.client, gone);
    }

    /// Releases everything that is not pinned, and in which no place is held. The answer is how many bytes that were.
    pub fn trim(&self) -> u64 {
        let gone = lock(&self.table).drop_where(|known| known.is_idle());
        let bytes = gone.iter().map(Region::bytes).sum();
        release_regions(&self.client, gone);
        bytes
    }

    /// For a client that is closed: lets go of all memory.
    pub fn close(&self) {
        // The regions went with the session.
        let _gone = lock(&self.table).drop_where(|_| true);
    }

    /// What it registered.
    #[must_use]
    pub fn counters(&self) -> RegionCounters {
        let table = lock(&self.table);
        let (registered, dropped) = (table.registered, table.dropped);
        RegionCounters { registered, dropped, kept: table.known.len() as u64 }
    }

    /// The place of memory that is registered already, if it is what it was then. Asks no daemon.
    #[must_use]
    pub fn known(&self, address: u64, bytes: u64) -> Option<Slice> {
        match lock(&self.table).touch(address, bytes) {
            Touched::Unchanged(known, offset) => Some(known.region.at(offset)),
            Touched::Changed(_) | Touched::Unknown => None,
        }
    }

    /// The same for device memory of the allocation that a place from [`Regions::known`] lies in: for the other operand of one
    /// request, right after the first. Nothing is asked.
    #[must_use]
    pub fn known_beside(address: u64, bytes: u64, beside: &Slice) -> Option<Slice> {
        let Source::Device(memory) = &beside.region.record.source else { return None };
        let offset = memory.offset_of(address, bytes)?;
        memory.is_of_one(beside.offset, offset, bytes).then(|| beside.region.at(offset))
    }

    fn look(&self, address: u64, bytes: u64, keeps: Keeps) -> Result<Slice, Missing> {
        loop {
            let (looked, frozen) = {
                let mut table = lock(&self.table);
                (table.look(address, bytes, keeps), table.frozen)
            };
            match looked {
                Looked::Found(slice) => return Ok(slice),
                // Another region may hold the memory that is there now.
                Looked::Replaced(region) => release_regions(&self.client, vec![region]),
                Looked::Unknown if frozen => return Err(Missing::Frozen),
                Looked::Unknown => return Err(Missing::Unknown),
            }
        }
    }

    /// Registers; where the daemon takes no more regions, after everything else was let go, or not at all.
    fn or_nothing(
        &self,
        register: impl Fn() -> Result<Slice, Error>,
    ) -> Result<Option<Slice>, Error> {
        let is_full = |error: &Error| error.code() == Some(RefusalCode::QuotaExceeded);
        match register() {
            Err(error) if is_full(&error) => {}
            other => return other.map(Some),
        }
        if self.trim() == 0 {
            return Ok(None);
        }
        match register() {
            Err(error) if is_full(&error) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Puts a new region into the table. Another thread may have been faster: its region is taken then.
    fn keep(
        &self,
        slice: Slice,
        address: u64,
        bytes: u64,
        keeps: Keeps,
        holder: Option<Weak<dyn Any + Send + Sync>>,
    ) -> Slice {
        let (slice, gone) = lock(&self.table).keep(slice, address, bytes, keeps, holder);
        release_regions(&self.client, gone);
        slice
    }
}
