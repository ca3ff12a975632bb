//! What the daemon lets be seen: logs, metrics, health.

pub(crate) mod declared;
pub(crate) mod http;
pub(crate) mod logging;
pub(crate) mod metrics;
pub(crate) mod rate_limit;
