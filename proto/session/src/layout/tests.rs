use std::mem::offset_of;

use super::*;
use crate::CopyDescriptor;

/// What people read about the layout.
const PAGE: &str = include_str!("../../../../docs/session-memory.md");

/// The rows of the table under a heading, as (offset, field), for rows that name a field.
fn rows(heading: &str) -> Vec<(usize, &'static str)> {
    let (_, section) = PAGE.split_once(&format!("\n## {heading}\n")).unwrap();
    let section = section.split_once("\n## ").map_or(section, |(section, _)| section);
    let row = |line: &'static str| {
        let mut cells = line.strip_prefix('|')?.split('|').map(str::trim);
        let offset = cells.next()?.replace(',', "").parse().ok()?;
        let field = cells.nth(1)?.strip_prefix('`')?.strip_suffix('`')?;
        Some((offset, field))
    };
    section.lines().filter_map(row).collect()
}

macro_rules! offsets {
    ($type:ty: $($field:ident),* $(,)?) => {
        vec![$((offset_of!($type, $field), stringify!($field))),*]
    };
}

#[test]
fn the_page_tells_every_field_of_the_header() {
    let fields = offsets!(Header:
        magic, abi_version, header_bytes, total_bytes, slots, inline_bytes, descriptor_bytes,
        completion_bytes, submitter_offset, executor_offset, timeline_offset, completions_offset,
        descriptors_offset, inline_offset, lanes, line_bytes, session, incarnation, made_at_ns,
    );
    assert_eq!(rows("Header"), fields);
}

#[test]
fn the_page_tells_every_field_of_the_second_header() {
    let fields = offsets!(LaneHeader:
        lane_slots, pairs, pair_bytes, lane_state_bytes, pairs_offset, lane_states_offset,
        lane_descriptors_offset, lane_reserved,
    );
    assert_eq!(rows("Second header"), fields);
}

#[test]
fn the_page_tells_every_field_of_a_descriptor() {
    let fields = offsets!(CopyDescriptor:
        sequence, binding, signature, selected, packed_region, packed_offset, packed_bytes,
        packed_dtype, direction, index_source, index_width, flag_source, deadline_ns, index_region,
        index_offset, flag_region, flag_offset, session, submitted_at_ns, lane, completion,
        reserved,
    );
    assert_eq!(rows("Descriptor"), fields);
}

#[test]
fn the_page_tells_every_word() {
    let at = |offset: u64| usize::try_from(offset).unwrap();
    let words = [
        (at(SUBMITTED), "submitted"),
        (at(SUBMITTER_SLEEPING), "submitter_sleeping"),
        (at(LANES_FRESH), "lanes_fresh"),
        (at(EXECUTOR_SLEEPING), "executor_sleeping"),
        (at(WAKE), "wake"),
        (at(PAIRS_FAILED), "pairs_failed"),
    ];
    assert_eq!(rows("Words"), words);
    let executor_ns = at(COMPLETION_ANSWER) + 8 * (ANSWER_WORDS - 1);
    let slot = [(at(COMPLETION_STATE), "state"), (executor_ns, "executor_ns")];
    assert_eq!(rows("Completion slot"), slot);
    assert!(PAGE.contains(&format!("Layout version {ABI_VERSION}.")));
}

#[test]
fn the_magic_is_text() {
    assert!(PAGE.contains(std::str::from_utf8(&MAGIC).unwrap()));
}
