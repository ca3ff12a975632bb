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
}

#[derive(Debug)]
struct Free<T> {
    bytes: u64,
    /// The stream whose work may still reach it.
    stream: Option<u64>,
    value: T,
}

/// One that is free no more.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Taken<T> {
    pub(super) value: T,
    /// Another stream, whose work may still reach it.
    pub(super) busy_on: Option<u64>,
}

impl<T> Free<T> {
    fn into_taken(self) -> Taken<T> {
        Taken { value: self.value, busy_on: self.stream }
    }
}

impl<T> Shelf<T> {
    pub(super) fn new(room: Room) -> Self {
        Self { room, free: Vec::new(), lent: 0, lent_bytes: 0, free_bytes: 0 }
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

    /// The same as [`Shelf::take`], of those that no other stream may still reach.
    pub(super) fn take_settled(&mut self, bytes: u64, stream: Option<u64>) -> Option<T> {
        let (place, busy_on) = self.best(bytes, stream)?;
        busy_on.is_none().then(|| self.lend(place))
    }

    /// A free buffer of so many bytes and at most twice as many, or of the smallest there are.
    pub(super) fn take(&mut self, bytes: u64, stream: Option<u64>) -> Option<Taken<T>> {
        let (place, busy_on) = self.best(bytes, stream)?;
        Some(Taken { value: self.lend(place), busy_on })
    }

    /// The place of the free buffer that fits best, and the other stream that may still reach it.
    fn best(&self, bytes: u64, stream: Option<u64>) -> Option<(usize, Option<u64>)> {
        let most = bytes.saturating_mul(2).max(self.room.unit_bytes);
        let is_busy = |free: &Free<T>| free.stream.is_some() && free.stream != stream;
        // Among equals the one that came back last: it is the one that caches know.
        let fits = self.free.iter().enumerate().rev();
        let best = fits
            .filter(|(_, free)| (bytes..=most).contains(&free.bytes))
            .min_by_key(|(_, free)| (is_busy(free), free.bytes))?;
        let (place, free) = best;
        Some((place, free.stream.filter(|_| is_busy(free))))
    }

    fn lend(&mut self, place: usize) -> T {
        let Free { bytes, value, .. } = self.free.remove(place);
        self.free_bytes -= bytes;
        self.lent_bytes += bytes;
        self.lent += 1;
        value
    }

    /// Whether there is room for a new buffer without giving any up.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.bytes().checked_add(bytes).is_some_and(|bytes| bytes <= self.room.bytes_max)
    }

    /// Makes room for a new buffer and counts it as lent. What is given up for it comes out.
    pub(super) fn reserve(&mut self, bytes: u64) -> Result<Vec<Taken<T>>, Full> {
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
        Ok(self.free.drain(..given_up).map(Free::into_taken).collect())
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
        self.free.push(Free { bytes, stream, value });
    }

    /// Gives up all that are free.
    pub(super) fn clear(&mut self) -> Vec<Taken<T>> {
        self.free_bytes = 0;
        self.free.drain(..).map(Free::into_taken).collect()
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROOM: Room = Room { bytes_max: 10_000, unit_bytes: 100 };

    /// Lends new buffers, which are named by their numbers, and takes them back.
    fn stocked(buffers: &[(u64, Option<u64>)]) -> Shelf<usize> {
        let mut shelf = Shelf::new(ROOM);
        for (number, (bytes, stream)) in buffers.iter().enumerate() {
            assert_eq!(reserved(&mut shelf, *bytes), Ok(vec![]));
            shelf.give_back(number, *bytes, *stream);
        }
        shelf
    }

    /// Those that are given up for a new one.
    fn reserved(shelf: &mut Shelf<usize>, bytes: u64) -> Result<Vec<usize>, Full> {
        let given_up = shelf.reserve(bytes)?;
        Ok(given_up.into_iter().map(|taken| taken.value).collect())
    }

    fn taken(shelf: &mut Shelf<usize>, bytes: u64, stream: u64) -> Option<(usize, Option<u64>)> {
        shelf.take(bytes, Some(stream)).map(|taken| (taken.value, taken.busy_on))
    }

    #[test]
    fn the_smallest_that_fits_is_taken_and_none_that_is_twice_too_large() {
        let mut shelf = stocked(&[(800, None), (400, None), (500, None), (900, None)]);
        assert_eq!(taken(&mut shelf, 450, 1), Some((2, None)));
        assert_eq!(taken(&mut shelf, 450, 1), Some((0, None)));
        assert_eq!(taken(&mut shelf, 450, 1), Some((3, None)));
        assert_eq!(taken(&mut shelf, 450, 1), None);
        assert_eq!(taken(&mut shelf, 199, 1), None);
        assert_eq!(taken(&mut shelf, 200, 1), Some((1, None)));
        assert_eq!((shelf.bytes(), shelf.lent_bytes(), shelf.buffers()), (2600, 2600, 4));
    }

    #[test]
    fn one_of_the_smallest_size_serves_the_smallest_request() {
        let mut shelf = stocked(&[(100, None)]);
        assert_eq!(taken(&mut shelf, 1, 1), Some((0, None)));
    }

    #[test]
    fn one_that_another_stream_may_use_comes_after_all_that_are_idle() {
        let mut shelf = stocked(&[(400, Some(2)), (600, Some(1)), (700, None)]);
        assert_eq!(taken(&mut shelf, 400, 1), Some((1, None)));
        assert_eq!(taken(&mut shelf, 400, 1), Some((2, None)));
        assert_eq!(taken(&mut shelf, 400, 1), Some((0, Some(2))));
    }

    #[test]
    fn what_is_given_up_names_the_stream_that_may_still_reach_it() {
        let mut shelf = stocked(&[(4000, Some(2)), (3000, None), (3000, Some(1))]);
        assert!(!shelf.has_room(1) && Shelf::<usize>::new(ROOM).has_room(10_000));
        let given_up = shelf.reserve(4000).unwrap();
        assert_eq!(given_up, [Taken { value: 0, busy_on: Some(2) }]);
        let cleared = shelf.clear();
        assert_eq!(cleared.iter().map(|taken| taken.busy_on).collect::<Vec<_>>(), [None, Some(1)]);
    }

    #[test]
    fn room_is_made_by_giving_up_what_came_back_longest_ago() {
        let mut shelf = stocked(&[(4000, None), (3000, None), (3000, None)]);
        assert_eq!(taken(&mut shelf, 4000, 1), Some((0, None)));
        shelf.give_back(0, 4000, None);
        assert_eq!(reserved(&mut shelf, 2000), Ok(vec![1]));
        assert_eq!(reserved(&mut shelf, 2000), Ok(vec![2]));
        assert_eq!(reserved(&mut shelf, 6001), Err(Full { lent_bytes: 4000 }));
        assert_eq!((shelf.bytes(), shelf.buffers()), (8000, 3), "nothing was given up for nothing");
        assert_eq!(reserved(&mut shelf, 6000), Ok(vec![0]));
        assert_eq!((shelf.bytes(), shelf.lent_bytes(), shelf.buffers()), (10_000, 10_000, 3));
    }

    proptest! {
        #[test]
        fn a_new_buffer_is_at_most_an_eighth_too_large(bytes in 1_u64..1 << 50) {
            let room = Room { bytes_max: u64::MAX, unit_bytes: 4096 };
            let class = Shelf::<()>::new(room).class_bytes(bytes).unwrap();
            prop_assert!(class >= bytes && class.is_multiple_of(4096));
            prop_assert!(class <= bytes + bytes / STEPS + 4096, "{class}");
        }

        #[test]
        fn there_are_never_more_bytes_than_the_room_has(
            steps in prop::collection::vec((1_u64..4000, 0_usize..8, any::<bool>()), 0..200),
        ) {
            let mut shelf = Shelf::new(ROOM);
            let mut lent: Vec<(usize, u64)> = Vec::new();
            for (number, (bytes, at, comes_back)) in steps.into_iter().enumerate() {
                if comes_back && !lent.is_empty() {
                    let buffer = lent.swap_remove(at % lent.len());
                    shelf.give_back(buffer, buffer.1, None);
                } else if let Some(Taken { value: buffer, .. }) = shelf.take(bytes, None) {
                    prop_assert!(bytes <= buffer.1 && buffer.1 <= (2 * bytes).max(100));
                    lent.push(buffer);
                } else {
                    let class = shelf.class_bytes(bytes).unwrap();
                    if let Ok(given_up) = shelf.reserve(class) {
                        prop_assert!(given_up.iter().all(|gone| !lent.contains(&gone.value)));
                        lent.push((number, class));
                    }
                }
                prop_assert!(shelf.bytes() <= ROOM.bytes_max);
                let bytes: u64 = lent.iter().map(|lent| lent.1).sum();
                prop_assert_eq!(shelf.lent_bytes(), bytes);
            }
        }
    }

    #[test]
    fn a_size_past_64_bits_has_no_class() {
        assert_eq!(Shelf::<()>::new(ROOM).class_bytes(u64::MAX), None);
    }
}
