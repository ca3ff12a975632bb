//! Log lines, on standard error.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::util::{SubscriberInitExt as _, TryInitError};

use crate::config::{Log, LogFormat};

/// Why logging cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoggingError {
    /// The level is none.
    #[error("The log level is not understood")]
    Level(#[from] ParseError),
    /// Something else logs already.
    #[error("Logging was started before")]
    Started(#[from] TryInitError),
}

/// Starts logging for the whole process.
pub(crate) fn start(log: &Log) -> Result<(), LoggingError> {
    let filter = EnvFilter::builder().parse(&log.level)?;
    let lines = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        // A line that cannot be written is lost. Reporting that on the very same stream would panic.
        .log_internal_errors(false)
        .with_env_filter(filter);
    match log.format {
        LogFormat::Text => {
            lines.with_ansi(std::io::stderr().is_terminal()).finish().try_init()?;
        }
        LogFormat::Json => lines.json().flatten_event(true).finish().try_init()?,
    }
    Ok(())
}
