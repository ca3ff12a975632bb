//! Which rows a step selects, and what the contract says of them.

use statecopy_proto::IndexWidth;

use super::random::Random;

/// The rows that one step's gather and scatter select.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selection {
    /// How wide the indices are sent.
    pub(crate) width: IndexWidth,
    /// The gather's indices: valid ones may repeat, and some are no row at all.
    pub(crate) sources: Vec<i64>,
    /// One initial-state flag a row, zero is false; `None`: every valid row.
    pub(crate) flags: Option<Vec<u8>>,
    /// The scatter's indices, as many: no valid one repeats.
    pub(crate) destinations: Vec<i64>,
    /// Whether the scatter gets the flags too. They describe the initial state only and change nothing there.
    pub(crate) scatter_with_flags: bool,
}

/// What a selected row is to its sequence.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// A new sequence: its row holds somebody's old state, and the flag is false.
    New,
    /// A sequence that goes on.
    Continued,
    /// The row of an earlier place once more: two sequences that share a prefix.
    Repeated,
    /// Padding.
    Invalid,
}

impl Selection {
    /// Chooses the rows of one step of a cache of `rows` rows: from 1 to `selected_max` of them.
    pub(crate) fn choose(random: &mut Random, step: u64, rows: u64, selected_max: u64) -> Self {
        let width = if step.is_multiple_of(2) { IndexWidth::Int32 } else { IndexWidth::Int64 };
        let selected = 1 + random.below(selected_max);
        // Without flags every valid row is continued: one step in eight.
        let flagged = step % 8 != 7;
        let mut sources = Vec::new();
        let mut flags = Vec::new();
        for _ in 0..selected {
            let kind = draw(random);
            let index = match kind {
                Kind::New | Kind::Continued => row(random, rows),
                Kind::Repeated if sources.is_empty() => row(random, rows),
                Kind::Repeated => sources[random.place(sources.len())],
                Kind::Invalid => no_row(random, width, rows),
            };
            sources.push(index);
            flags.push(flag(random, kind));
        }
        let destinations = destinations(random, &sources, width, rows);
        Self {
            width,
            sources,
            flags: flagged.then_some(flags),
            destinations,
            scatter_with_flags: step % 3 == 2,
        }
    }

    /// Which row the gather reads at a place: `None` where it clears.
    pub(crate) fn source(&self, place: usize, rows: u64) -> Option<usize> {
        let wanted = self.flags.as_ref().is_none_or(|flags| flags[place] != 0);
        wanted.then(|| valid(self.sources[place], rows)).flatten()
    }

    /// Which row the scatter writes from a place: `None` where it skips.
    pub(crate) fn destination(&self, place: usize, rows: u64) -> Option<usize> {
        valid(self.destinations[place], rows)
    }
}

/// The row that an index names, if it names one.
fn valid(index: i64, rows: u64) -> Option<usize> {
    let row = u64::try_from(index).ok().filter(|row| *row < rows)?;
    usize::try_from(row).ok()
}

fn draw(random: &mut Random) -> Kind {
    match random.below(100) {
        0..30 => Kind::New,
        30..75 => Kind::Continued,
        75..88 => Kind::Repeated,
        _ => Kind::Invalid,
    }
}

fn row(random: &mut Random, rows: u64) -> i64 {
    i64::try_from(random.below(rows)).unwrap_or(0)
}

/// An index that names no row: just outside, or an extreme of its type.
fn no_row(random: &mut Random, width: IndexWidth, rows: u64) -> i64 {
    let (lowest, highest) = match width {
        IndexWidth::Int32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        IndexWidth::Int64 => (i64::MIN, i64::MAX),
    };
    let past = i64::try_from(rows).unwrap_or(highest).min(highest);
    let choices = [-1, past, past.saturating_add(1).min(highest), lowest, highest];
    choices[random.place(choices.len())]
}

/// False is zero; every other byte is true.
fn flag(random: &mut Random, kind: Kind) -> u8 {
    const TRUE: [u8; 4] = [1, 2, 0x80, 0xff];
    match kind {
        Kind::New => 0,
        Kind::Continued | Kind::Repeated => TRUE[random.place(TRUE.len())],
        Kind::Invalid => u8::from(random.percent(50)),
    }
}

/// Each valid row at most once: a repeated source goes on in a free row, or nowhere.
fn destinations(random: &mut Random, sources: &[i64], width: IndexWidth, rows: u64) -> Vec<i64> {
    let mut free: Vec<i64> =
        (0..i64::try_from(rows).unwrap_or(i64::MAX)).filter(|row| !sources.contains(row)).collect();
    random.shuffle(&mut free);
    let mut taken = Vec::new();
    for source in sources {
        let usable = valid(*source, rows).is_some() && !taken.contains(source);
        let destination = if usable && !random.percent(5) {
            *source
        } else if random.percent(70) {
            free.pop().unwrap_or(-1)
        } else {
            no_row(random, width, rows)
        };
        taken.push(destination);
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: u64 = 24;

    fn steps() -> impl Iterator<Item = Selection> {
        let mut random = Random::new(11);
        (0..400).map(move |step| Selection::choose(&mut random, step, ROWS, 16))
    }

    #[test]
    fn valid_destinations_never_repeat() {
        for selection in steps() {
            let places = 0..selection.destinations.len();
            let mut rows: Vec<usize> =
                places.filter_map(|place| selection.destination(place, ROWS)).collect();
            let all = rows.len();
            rows.sort_unstable();
            rows.dedup();
            assert_eq!(rows.len(), all, "{selection:?}");
        }
    }

    #[test]
    fn every_kind_of_row_comes_up_in_both_widths() {
        for width in IndexWidth::ALL {
            let steps: Vec<_> = steps().filter(|step| step.width == width).collect();
            let sources = || steps.iter().flat_map(|step| step.sources.iter().copied());
            let extremes = match width {
                IndexWidth::Int32 => [i64::from(i32::MIN), i64::from(i32::MAX)],
                IndexWidth::Int64 => [i64::MIN, i64::MAX],
            };
            for index in extremes.into_iter().chain([-1, 24, 0, 23]) {
                assert!(sources().any(|source| source == index), "{index} in {width:?}");
            }
            if width == IndexWidth::Int32 {
                assert!(sources().all(|source| i32::try_from(source).is_ok()));
            }
            let repeated = |step: &Selection| {
                let first = step.sources.first().copied();
                step.sources.iter().filter(|source| Some(**source) == first).count() > 1
            };
            assert!(steps.iter().any(repeated));
        }
    }

    #[test]
    fn flags_decide_what_a_gather_reads_and_no_flags_mean_every_valid_row() {
        let mut cleared_with_valid_index = 0;
        for selection in steps() {
            for place in 0..selection.sources.len() {
                let valid = valid(selection.sources[place], ROWS);
                match &selection.flags {
                    None => assert_eq!(selection.source(place, ROWS), valid),
                    Some(flags) if flags[place] == 0 => {
                        assert_eq!(selection.source(place, ROWS), None);
                        cleared_with_valid_index += usize::from(valid.is_some());
                    }
                    Some(_) => assert_eq!(selection.source(place, ROWS), valid),
                }
            }
        }
        assert!(cleared_with_valid_index > 100);
        assert!(steps().any(|step| step.flags.is_none()));
    }

    #[test]
    fn the_same_seed_gives_the_same_steps() {
        assert!(steps().eq(steps()));
    }

    #[test]
    fn one_row_and_one_selected_are_enough() {
        let mut random = Random::new(2);
        for step in 0..100 {
            let selection = Selection::choose(&mut random, step, 1, 1);
            assert_eq!(selection.sources.len(), 1);
        }
    }
}
