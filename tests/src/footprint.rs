//! What a process holds: descriptors, shared mappings, threads.

use std::fs;

use crate::poll::until;

/// Counts of what a process holds. Two are equal when a scenario gave everything back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Open descriptors.
    pub descriptors: usize,
    /// Mappings of memory files.
    pub mappings: usize,
    /// Bytes of these mappings.
    pub mapped_bytes: u64,
    /// Threads.
    pub threads: usize,
}

impl Footprint {
    /// What a process holds now.
    ///
    /// # Panics
    /// When there is no such process.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        let entries = |folder: &str| {
            let path = format!("/proc/{pid}/{folder}");
            fs::read_dir(&path).unwrap_or_else(|error| panic!("{path}: {error}")).count()
        };
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process lives");
        let ranges = maps.lines().filter(|line| line.contains("/memfd:")).map(range_bytes);
        let (mappings, mapped_bytes) =
            ranges.fold((0, 0), |(count, bytes), range| (count + 1, bytes + range));
        Self { descriptors: entries("fd"), mappings, mapped_bytes, threads: entries("task") }
    }

    /// Waits until every process holds again what it held then, no more.
    ///
    /// # Panics
    /// When one still holds more after the patience is over.
    pub fn wait_for(baseline: &[(u32, Self)]) {
        let within = |(pid, then): &(u32, Self)| {
            let now = Self::of(*pid);
            now.descriptors <= then.descriptors
                && now.mappings <= then.mappings
                && now.mapped_bytes <= then.mapped_bytes
                && now.threads <= then.threads
        };
        let now = || baseline.iter().map(|(pid, _)| (*pid, Self::of(*pid))).collect::<Vec<_>>();
        let mut last = now();
        until(&format!("footprints back at {baseline:?}, last {last:?}"), || {
            last = now();
            baseline.iter().all(within)
        });
    }
}

/// Bytes of one line of `/proc/PID/maps`.
fn range_bytes(line: &str) -> u64 {
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let range = line.split(' ').next().unwrap_or_default();
    let ends = range.split_once('-').and_then(|(from, to)| Some((number(from)?, number(to)?)));
    let (from, to) = ends.unwrap_or_else(|| panic!("no range: {line}"));
    to - from
}

/// Processor time of a process so far, in clock ticks.
///
/// # Panics
/// When there is no such process.
pub(crate) fn processor_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    let (_, fields) = stat.rsplit_once(") ").expect("a name in brackets");
    let times = fields.split(' ').skip(11).take(2);
    times.map(|time| time.parse::<u64>().expect("clock ticks")).sum()
}
