//! Points in time that two processes of one machine agree on.

use std::time::Duration;

use rustix::time::{ClockId, clock_getres, clock_gettime};

/// Nanoseconds of CLOCK_MONOTONIC: one clock for all processes of a machine. (A time namespace shifts it; the supervisor and
/// the device process share theirs. A worker need not: see [`DaemonClock`].)
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MonotonicNs(pub u64);

impl MonotonicNs {
    /// A point that is never reached.
    pub const NEVER: Self = Self(u64::MAX);

    /// Now. The rings never ask for it; their users do.
    #[must_use]
    pub fn now() -> Self {
        Self::of(ClockId::Monotonic)
    }

    /// Now, or up to [`MonotonicNs::coarse_tick`] ago: it costs a fraction of what [`MonotonicNs::now`] does.
    #[must_use]
    pub fn coarse() -> Self {
        Self::of(ClockId::MonotonicCoarse)
    }

    /// By how much the coarse clock is behind as a rule: a tick of the kernel, some milliseconds. A tick that comes late, as in
    /// a virtual machine that was not run for a while, makes it more.
    #[must_use]
    pub fn coarse_tick() -> Duration {
        Duration::try_from(clock_getres(ClockId::MonotonicCoarse)).unwrap_or_default()
    }

    fn of(clock: ClockId) -> Self {
        let now = clock_gettime(clock);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanoseconds = u64::try_from(now.tv_nsec).unwrap_or(0);
        Self(seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds))
    }

    /// So much later.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanoseconds))
    }

    /// How long ago `earlier` was; zero if it is still to come.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// How a worker tells points of the daemon's clock: its own clock may be shifted by a time namespace, always by as much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DaemonClock {
    /// Added to the worker's clock, wrapping around.
    shift: u64,
}

impl DaemonClock {
    /// Compares the clocks: the daemon's said `made_at` at some moment between `asked` and `heard` of the worker's. What may
    /// be one clock is taken for one. A shift is known to half of the time in between.
    #[must_use]
    pub fn new(asked: MonotonicNs, made_at: MonotonicNs, heard: MonotonicNs) -> Self {
        if (asked..=heard).contains(&made_at) {
            return Self { shift: 0 };
        }
        let middle = asked.0 + heard.0.saturating_sub(asked.0) / 2;
        Self { shift: made_at.0.wrapping_sub(middle) }
    }

    /// A point of the worker's clock on the daemon's.
    #[must_use]
    pub fn at(self, worker: MonotonicNs) -> MonotonicNs {
        MonotonicNs(worker.0.wrapping_add(self.shift))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coarse_clock_is_never_ahead_and_ticks_after_the_other() {
        let start = MonotonicNs::now();
        let patience = Duration::from_secs(10);
        while MonotonicNs::coarse() < start {
            let coarse = MonotonicNs::coarse();
            assert!(coarse <= MonotonicNs::now());
            assert!(MonotonicNs::now().since(start) < patience, "it stands still");
            std::thread::sleep(MonotonicNs::coarse_tick());
        }
    }

    #[test]
    fn one_clock_is_not_shifted_and_another_is_met_within_half_of_the_answer() {
        let clock = |asked, made_at, heard| {
            DaemonClock::new(MonotonicNs(asked), MonotonicNs(made_at), MonotonicNs(heard))
        };
        for made_at in [1_000, 1_004, 1_010] {
            assert_eq!(clock(1_000, made_at, 1_010).at(MonotonicNs(5_000)), MonotonicNs(5_000));
        }
        // The daemon's is ahead by about 5,000, then behind by about 900.
        assert_eq!(clock(1_000, 6_005, 1_010).at(MonotonicNs(2_000)), MonotonicNs(7_000));
        assert_eq!(clock(1_000, 105, 1_010).at(MonotonicNs(2_000)), MonotonicNs(1_100));
    }
}
