//! The books of a pool: what lies free, what is lent, and what is given up when room is wanted.
//!
//! ```text
//!             reserve                   give_back
//!   (nothing) -------> lent -------------------------> free
//!                       ^                               | |
//!                       +---------- take ---------------+ +--> given up: reserve of another, or clear
//! ```
//! - `take`: the smallest free one that fits, before all others those that are idle for the asker's stream.
//! - `give_back`: it may still be read by work of the stream that it was taken for.
//! - given up: the one that was given back longest ago goes first.

/// Steps between a power of two and the next: a buffer is at most an eighth larger than it would have to be.
const STEPS: u64 = 8;

/// How much a pool holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    /// Bytes that are free or lent, together, at most.
    pub(super) bytes_max: u64,
    /// Every buffer has at least so many, and a multiple of it.
    pub(super) unit_bytes: u64,
}

/// No room, even without any of the free ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full {
    /// Bytes that are lent.
    pub(super) lent_bytes: u64,
}

/// What a pool has.
#[derive(Debug)]
pub(super) struct Shelf<T> {
    room: Room,
    /// In the order in which they came back.
    free: Vec<Free<T>>,
    lent: u64,
    lent_bytes: u64,
    free_bytes: u64,
    /// How many came back.
    returns: u64,
}

#[derive(Debug)]
struct Free<T> {
    bytes: u64,
    /// The stream whose work may still reach it.
    stream: Option<u64>,
    /// Counts those that came back.
    returned: u64,
    value: T,
}

/// A free one that fits.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Taken<T> {
    pub(super) value: T,
    /// Another stream, whose work may still reach it: see [`Shelf::settled`].
    pub(super) busy_on: Option<u64>,
}

impl<T> Shelf<T> {
    pub(super) fn new(room: Room) -> Self {
        Self { room, free: Vec::new(), lent: 0, lent_bytes: 0, free_bytes: 0, returns: 0 }
    }

    /// How large a new buffer for so many bytes is; `None` past 64 bits.
    pub(super) fn class_bytes(&self, bytes: u64) -> Option<u64> {
        let unit = self.room.unit_bytes;
        let power = 1_u64 << bytes.max(1).ilog2();
        bytes
            .max(1)
            .checked_next_multiple_of((power / STEPS).max(1))?
            .checked_next_multiple_of(unit)
    }

    /// A free buffer of so many bytes and at most twice as many, or of the smallest there are.
    pub(super) fn take(&mut self, bytes: u64, stream: Option<u64>) -> Option<Taken<T>> {
        let most = bytes.saturating_mul(2).max(self.room.unit_bytes);
        let is_busy = |free: &Free<T>| free.stream.is_some() && free.stream != stream;
        // Among equals the one that came back last: it is the one that caches know.
        let fits = self.free.iter().enumerate().rev();
        let best = fits
            .filter(|(_, free)| (bytes..=most).contains(&free.bytes))
            .min_by_key(|(_, free)| (is_busy(free), free.bytes))?;
        let place = best.0;
        let free = self.free.remove(place);
        let busy_on = free.stream.filter(|_| is_busy(&free));
        let Free { bytes, value, .. } = free;
        self.free_bytes -= bytes;
        self.lent_bytes += bytes;
        self.lent += 1;
        Some(Taken { value, busy_on })
    }

    /// Makes room for a new buffer and counts it as lent. What is given up for it comes out.
    pub(super) fn reserve(&mut self, bytes: u64) -> Result<Vec<T>, Full> {
        let left = self.room.bytes_max.saturating_sub(self.lent_bytes);
        let Some(room) = left.checked_sub(bytes) else {
            return Err(Full { lent_bytes: self.lent_bytes });
        };
        let mut given_up = 0;
        for free in &self.free {
            if self.free_bytes <= room {
                break;
            }
            self.free_bytes -= free.bytes;
            given_up += 1;
        }
        self.lent_bytes += bytes;
        self.lent += 1;
        Ok(self.free.drain(..given_up).map(|free| free.value).collect())
    }

    /// A lent one is no more: it could not be made, or is not given back.
    pub(super) fn strike(&mut self, bytes: u64) {
        self.lent_bytes -= bytes;
        self.lent -= 1;
    }

    /// A lent one is free again. Work of the stream may still reach it; of `None`, none does.
    pub(super) fn give_back(&mut self, value: T, bytes: u64, stream: Option<u64>) {
        self.strike(bytes);
        self.free_bytes += bytes;
        self.returns += 1;
        self.free.push(Free { bytes, stream, returned: self.returns, value });
    }

    /// How many came back so far: to be remembered before a wait for the device.
    pub(super) fn returns(&self) -> u64 {
        self.returns
    }

    /// The device has done everything that was asked for when so many had come back.
    pub(super) fn settled(&mut self, returns: u64) {
        let done = self.free.iter_mut().filter(|free| free.returned <= returns);
        done.for_each(|free| free.stream = None);
    }

    /// Gives up all that are free.
    pub(super) fn clear(&mut self) -> Vec<T> {
        self.free_bytes = 0;
        self.free.drain(..).map(|free| free.value).collect()
    }

    pub(super) fn room(&self) -> Room {
        self.room
    }

    /// Bytes of all.
    pub(super) fn bytes(&self) -> u64 {
        self.free_bytes + self.lent_bytes
    }

    pub(super) fn lent_bytes(&self) -> u64 {
        self.lent_bytes
    }

    /// How many there are.
    pub(super) fn buffers(&self) -> u64 {
        self.free.len() as u64 + self.lent
    }
}
