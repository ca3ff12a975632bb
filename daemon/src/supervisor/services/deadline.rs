//! Until when a call may be answered.

use std::time::Duration;

use tokio::time::Instant;
use tonic::metadata::MetadataMap;

/// The transport ends a call when the client's own time is over. An answer of the daemon is earlier by this.
const MARGIN: Duration = Duration::from_millis(20);
/// Longer deadlines are cut.
const LONGEST: Duration = Duration::from_secs(86_400);

/// Until when a call may be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Deadline(Instant);

impl Deadline {
    /// The deadline of a call: what its client says, or the default.
    pub(super) fn of(metadata: &MetadataMap, default_ms: u32) -> Self {
        let given = metadata
            .get("grpc-timeout")
            .and_then(|value| value.to_str().ok())
            .and_then(parse_timeout)
            .map(|timeout| timeout - MARGIN.min(timeout / 4));
        let timeout = given.unwrap_or(Duration::from_millis(default_ms.into()));
        Self(Instant::now() + timeout.min(LONGEST))
    }

    /// The earlier of this deadline and so many milliseconds from now; 0 stands for the default.
    pub(super) fn within(self, ms: u32, default_ms: u32) -> Self {
        let ms = if ms == 0 { default_ms } else { ms };
        let other = Instant::now() + Duration::from_millis(ms.into()).min(LONGEST);
        Self(self.0.min(other))
    }

    /// The point in time.
    pub(super) fn instant(self) -> Instant {
        self.0
    }
}

/// Reads `grpc-timeout`: at most eight digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let at = text.len().checked_sub(1)?;
    let (digits, unit) = text.split_at_checked(at)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        assert_eq!(parse_timeout("100m"), Some(Duration::from_millis(100)));
        assert_eq!(parse_timeout("7S"), Some(Duration::from_secs(7)));
        assert_eq!(parse_timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(parse_timeout("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse_timeout("5u"), Some(Duration::from_micros(5)));
        assert_eq!(parse_timeout("5n"), Some(Duration::from_nanos(5)));
        for text in ["", "m", "5", "5x", "-5m", "+5m", "123456789m", "5ä", "ä"] {
            assert_eq!(parse_timeout(text), None, "{text}");
        }
    }

    #[test]
    fn the_answer_comes_before_the_client_gives_up() {
        let mut metadata = MetadataMap::new();
        metadata.insert("grpc-timeout", "1000m".parse().unwrap());
        let deadline = Deadline::of(&metadata, 5).instant();
        assert!(deadline < Instant::now() + Duration::from_millis(1000));
        assert!(deadline > Instant::now() + Duration::from_millis(500));
        let default = Deadline::of(&MetadataMap::new(), 60_000);
        assert!(default.instant() > Instant::now() + Duration::from_secs(30));
        assert!(default.within(10, 1).instant() < Instant::now() + Duration::from_secs(30));
        assert!(default.within(0, 10).instant() < Instant::now() + Duration::from_secs(30));
    }
}
