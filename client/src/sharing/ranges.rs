//! Ranges of addresses, each with what is known of it.

/// A table of ranges, in the order of their starts. They may overlap.
#[derive(Debug)]
pub(super) struct Ranges<T> {
    entries: Vec<Entry<T>>,
}

#[derive(Debug)]
struct Entry<T> {
    start: u64,
    end: u64,
    /// The furthest end among this range and those before it.
    reach: u64,
    value: T,
}

impl<T> Default for Ranges<T> {
    fn default() -> Self {
        Self { entries: Vec::new() }
    }
}

impl<T> Ranges<T> {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Adds a range, which has at least one byte.
    pub(super) fn insert(&mut self, start: u64, bytes: u64, value: T) {
        let end = start.saturating_add(bytes);
        let at = self.entries.partition_point(|entry| entry.start <= start);
        self.entries.insert(at, Entry { start, end, reach: end, value });
        self.settle_from(at);
    }

    /// A range that all of these bytes lie in: its place in the table, and how far from its start they begin.
    pub(super) fn find(&self, address: u64, bytes: u64) -> Option<(usize, u64)> {
        let end = address.checked_add(bytes)?;
        let after = self.entries.partition_point(|entry| entry.start <= address);
        let before = self.entries[..after].iter().enumerate().rev();
        let mut near = before.take_while(|(_, entry)| entry.reach >= end);
        let (place, entry) = near.find(|(_, entry)| entry.end >= end)?;
        Some((place, address - entry.start))
    }

    pub(super) fn at(&mut self, place: usize) -> &mut T {
        &mut self.entries[place].value
    }

    pub(super) fn remove(&mut self, place: usize) -> T {
        let removed = self.entries.remove(place);
        self.settle_from(place);
        removed.value
    }

    /// Every value, in the order of the starts.
    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().map(|entry| &entry.value)
    }

    /// Takes the values out that are not to stay.
    pub(super) fn extract(&mut self, mut leaves: impl FnMut(&mut T) -> bool) -> Vec<T> {
        let taken = self.entries.extract_if(.., |entry| leaves(&mut entry.value));
        let taken = taken.map(|entry| entry.value).collect();
        self.settle_from(0);
        taken
    }

    fn settle_from(&mut self, place: usize) {
        let before = place.checked_sub(1).map_or(0, |before| self.entries[before].reach);
        self.entries[place..].iter_mut().fold(before, |reach, entry| {
            entry.reach = reach.max(entry.end);
            entry.reach
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_range_is_found_exactly_where_one_holds_all_of_the_bytes(
            ranges in prop::collection::vec((0_u64..200, 1_u64..60), 0..20),
            removed in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
            asked in prop::collection::vec((0_u64..260, 0_u64..60), 50),
        ) {
            let mut table = Ranges::default();
            let mut model = ranges.clone();
            for range in ranges {
                table.insert(range.0, range.1, range);
            }
            for index in removed {
                if !model.is_empty() {
                    let range = table.remove(index.index(table.len()));
                    let place = model.iter().position(|other| *other == range).unwrap();
                    model.remove(place);
                }
            }
            for (address, bytes) in asked {
                let holds = |range: &(u64, u64)| {
                    range.0 <= address && address + bytes <= range.0 + range.1
                };
                match table.find(address, bytes) {
                    None => prop_assert!(!model.iter().any(holds)),
                    Some((place, offset)) => {
                        let range = *table.at(place);
                        prop_assert!(holds(&range));
                        prop_assert_eq!(offset, address - range.0);
                    }
                }
            }
        }

        #[test]
        fn what_is_extracted_is_found_no_more(
            ranges in prop::collection::vec((0_u64..200, 1_u64..60), 0..20),
        ) {
            let mut table = Ranges::default();
            for range in &ranges {
                table.insert(range.0, range.1, *range);
            }
            let short = |range: &(u64, u64)| range.1 < 30;
            let taken = table.extract(|range| short(range));
            prop_assert_eq!(taken.len(), ranges.iter().filter(|range| short(range)).count());
            prop_assert!(table.values().all(|range| !short(range)));
            for range in ranges.iter().filter(|range| !short(range)) {
                prop_assert!(table.find(range.0, range.1).is_some());
            }
        }
    }

    #[test]
    fn bytes_past_the_last_address_are_in_no_range() {
        let mut table = Ranges::default();
        table.insert(u64::MAX - 10, 10, ());
        assert_eq!(table.find(u64::MAX - 10, 10), Some((0, 0)));
        assert_eq!(table.find(u64::MAX - 10, 11), None);
        assert_eq!(table.find(u64::MAX, 1), None);
    }
}
