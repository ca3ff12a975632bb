//! Points in time that two processes of one machine agree on.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of CLOCK_MONOTONIC: one clock for all processes of a machine. (A time namespace shifts it; the supervisor and
/// the device process share theirs. A worker need not, so its ring carries durations.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MonotonicNs(pub u64);

impl MonotonicNs {
    /// A point that is never reached.
    pub const NEVER: Self = Self(u64::MAX);

    /// Now. The rings never ask for it; their users do.
    #[must_use]
    pub fn now() -> Self {
        let now = clock_gettime(ClockId::Monotonic);
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
