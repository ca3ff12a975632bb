//! When a dead device process is started again, and when the daemon gives up.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Deaths within [`WINDOW`] that end the daemon.
const DEATHS_MAX: usize = 10;
const WINDOW: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

/// What to do about a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    /// Start again after a pause.
    StartAfter(Duration),
    /// It dies too often: end the daemon.
    GiveUp,
}

/// Remembers the deaths of the last minute.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    deaths: VecDeque<Instant>,
}

impl Restarts {
    /// Notes a death. The first is answered at once, each further one within a minute after twice the pause.
    pub(super) fn died(&mut self, now: Instant) -> Decision {
        while self.deaths.front().is_some_and(|death| now.duration_since(*death) >= WINDOW) {
            self.deaths.pop_front();
        }
        self.deaths.push_back(now);
        match self.deaths.len() {
            0 | 1 => Decision::StartAfter(Duration::ZERO),
            deaths if deaths >= DEATHS_MAX => Decision::GiveUp,
            deaths => {
                let doublings = u32::try_from(deaths - 2).unwrap_or(u32::MAX);
                let pause = FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(doublings));
                Decision::StartAfter(pause.min(LONGEST_PAUSE))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tenth_death_in_a_minute_ends_the_daemon() {
        let start = Instant::now();
        let mut restarts = Restarts::default();
        for death in 0..9 {
            let decision = restarts.died(start + Duration::from_secs(death));
            assert!(matches!(decision, Decision::StartAfter(_)), "death {death}: {decision:?}");
        }
        assert_eq!(restarts.died(start + Duration::from_secs(9)), Decision::GiveUp);
    }

    #[test]
    fn pauses_grow_and_a_quiet_minute_forgives() {
        let start = Instant::now();
        let mut restarts = Restarts::default();
        let mut last = Duration::ZERO;
        for _ in 0..9 {
            let Decision::StartAfter(pause) = restarts.died(start) else { panic!("gave up") };
            assert!(pause >= last && pause <= LONGEST_PAUSE);
            last = pause;
        }
        assert!(last > Duration::ZERO);
        let later = start + WINDOW;
        assert_eq!(restarts.died(later), Decision::StartAfter(Duration::ZERO));
    }

    #[test]
    fn ten_deaths_with_all_their_pauses_fit_one_minute() {
        let mut restarts = Restarts::default();
        let mut now = Instant::now();
        let start = now;
        while let Decision::StartAfter(pause) = restarts.died(now) {
            now += pause;
        }
        assert!(now.duration_since(start) < WINDOW, "giving up would never happen");
    }
}
