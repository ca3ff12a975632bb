//! Where the bytes of an operand lie, as far as the daemon can reach them.

use std::any::Any;
use std::sync::{Arc, Weak};

use statecopy_client::blocking::Client;
use statecopy_client::sharing::{self, RegionCounters};
use statecopy_client::{Error, Region, Slice};

use crate::memory::{self, Device, Place};
use crate::sync::{AtomicU64, Ordering};

/// Allocations that were registered at first sight: memory of `statecopy.empty` on the host, whatever a CUDA device's
/// allocators gave.
#[derive(Debug)]
pub(crate) struct Regions {
    known: sharing::Regions,
    /// How many allocations of the host had gone when their regions were last released.
    swept: AtomicU64,
}

impl Regions {
    /// None yet.
    pub(crate) fn new(client: &Client) -> Self {
        Self { known: sharing::Regions::new(client), swept: AtomicU64::new(0) }
    }

    /// Whether there is nothing to do for an operand: it lies in ordinary host memory, and no region is to be released.
    pub(crate) fn is_ordinary(&self, place: Place, bytes: u64) -> bool {
        place.device == Device::Host
            && !self.is_sweep_due()
            && memory::find_host(place.address, bytes).is_none()
    }

    /// The place of an operand whose memory is registered already. Waits for nobody.
    pub(crate) fn known(&self, place: Place, bytes: u64) -> Option<Slice> {
        // A region may be of memory that went, where other memory is now: that is for the sweep to find out.
        if place.device == Device::Host && self.is_sweep_due() {
            return None;
        }
        self.known.known(place.address, bytes)
    }

    /// The place of an operand in the allocation that another operand of the request lies in.
    pub(crate) fn known_beside(address: u64, bytes: u64, beside: &Slice) -> Option<Slice> {
        sharing::Regions::known_beside(address, bytes, beside)
    }

    /// Whether memory of this process went since regions were last released.
    fn is_sweep_due(&self) -> bool {
        self.swept.load(Ordering::Relaxed) != memory::allocations_gone()
    }

    /// The place of an operand. `None`: its memory cannot be shared, or not now, and is copied instead. The interpreter's lock
    /// is not held.
    ///
    /// # Errors
    /// As [`sharing::Regions::of_memory`] and [`sharing::Regions::of_device`].
    pub(crate) fn slice(&self, place: Place, bytes: u64) -> Result<Option<Slice>, Error> {
        if place.device != Device::Host {
            return self.known.of_device(place.address, bytes);
        }
        self.sweep();
        let Some((allocation, offset)) = memory::find_host(place.address, bytes) else {
            return Ok(None);
        };
        let holder: Weak<dyn Any + Send + Sync> = Arc::downgrade(&allocation) as _;
        self.known.of_memory(allocation.memory(), holder, offset, bytes)
    }

    /// The place of a layer's cache, which stays registered. `None`: host memory that is not of `statecopy.empty`.
    ///
    /// # Errors
    /// As [`sharing::Regions::pin_memory`] and [`sharing::Regions::pin_device`].
    pub(crate) fn pin(&self, place: Place, bytes: u64) -> Result<Option<Slice>, Error> {
        if place.device != Device::Host {
            return self.known.pin_device(place.address, bytes).map(Some);
        }
        let Some((allocation, offset)) = memory::find_host(place.address, bytes) else {
            return Ok(None);
        };
        self.known.pin_memory(allocation.memory(), offset, bytes).map(Some)
    }

    /// Keeps the regions of these caches, and releases those of all others.
    pub(crate) fn pin_only(&self, regions: &[Region]) {
        self.known.pin_only(regions);
    }

    /// Registers nothing from now on but caches.
    pub(crate) fn freeze(&self) {
        self.known.freeze();
    }

    /// Whether it is so.
    pub(crate) fn is_frozen(&self) -> bool {
        self.known.is_frozen()
    }

    /// Releases everything but caches. The answer is how many bytes that were.
    pub(crate) fn trim(&self) -> u64 {
        self.known.trim()
    }

    /// Lets go of all memory: the client is closed.
    pub(crate) fn close(&self) {
        self.known.close();
    }

    pub(crate) fn counters(&self) -> RegionCounters {
        self.known.counters()
    }

    /// Releases regions of memory that no tensor of this process has any more, once after one of them went.
    fn sweep(&self) {
        // SYNC: the number only tells when to look; what is looked at is behind a lock.
        let gone = memory::allocations_gone();
        if self.swept.load(Ordering::Relaxed) != gone {
            self.swept.store(gone, Ordering::Relaxed);
            self.known.sweep();
        }
    }
}
