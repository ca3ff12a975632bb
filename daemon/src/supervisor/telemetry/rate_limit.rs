//! A token bucket: so many log lines at once, so many a second after that.

use std::time::Instant;

/// Nanoseconds of one second.
const SECOND: u128 = 1_000_000_000;

/// Lets a bounded number of events through. It knows no clock: time is passed in.
#[derive(Debug)]
pub(crate) struct TokenBucket {
    burst: u32,
    per_second: u32,
    /// In nanoseconds of refill: one token is `SECOND`.
    filled: u128,
    refilled: Instant,
    suppressed: u64,
}

impl TokenBucket {
    /// A full bucket.
    pub(crate) fn new(burst: u32, per_second: u32, now: Instant) -> Self {
        let filled = u128::from(burst) * SECOND;
        Self { burst, per_second, filled, refilled: now, suppressed: 0 }
    }

    /// Lets one event through and says how many were held back since the last one, or holds it back.
    pub(crate) fn take(&mut self, now: Instant) -> Option<u64> {
        let passed = now.saturating_duration_since(self.refilled).as_nanos();
        self.refilled = self.refilled.max(now);
        let full = u128::from(self.burst) * SECOND;
        self.filled =
            full.min(self.filled.saturating_add(passed.saturating_mul(self.per_second.into())));
        match self.filled.checked_sub(SECOND) {
            Some(left) => {
                self.filled = left;
                Some(std::mem::take(&mut self.suppressed))
            }
            None => {
                self.suppressed += 1;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_burst_passes_and_then_so_many_a_second() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(3, 2, start);
        let passed = (0..10).filter(|_| bucket.take(start).is_some()).count();
        assert_eq!(passed, 3);
        assert_eq!(bucket.take(start + Duration::from_millis(499)), None);
        assert_eq!(bucket.take(start + Duration::from_millis(500)), Some(8));
        assert_eq!(bucket.take(start + Duration::from_millis(500)), None);
        // A long silence fills it no further than the burst.
        let later = start + Duration::from_secs(1_000_000);
        let passed = (0..10).filter(|_| bucket.take(later).is_some()).count();
        assert_eq!(passed, 3);
    }

    #[test]
    fn a_hundred_thousand_events_a_second_are_as_few_lines_as_the_rate() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(10, 5, start);
        let lines = (0..1_000_000_u64)
            .filter(|at| bucket.take(start + Duration::from_micros(at * 10)).is_some())
            .count();
        assert!((55..=60).contains(&lines), "{lines}");
    }

    #[test]
    fn time_that_runs_backwards_fills_nothing() {
        let start = Instant::now() + Duration::from_secs(10);
        let mut bucket = TokenBucket::new(1, 1, start);
        assert_eq!(bucket.take(start), Some(0));
        assert_eq!(bucket.take(start - Duration::from_secs(5)), None);
        assert_eq!(bucket.take(start + Duration::from_millis(999)), None);
        assert_eq!(bucket.take(start + Duration::from_secs(1)), Some(2));
    }
}
