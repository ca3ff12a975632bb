//! Errors of the client, and of this crate, as the exceptions of `statecopy.errors`.

use std::error::Error as StdError;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;
use statecopy_client::{Error, Leaves, RefusalCode};
use statecopy_kernels::cuda::DriverError;

/// What makes an exception: `statecopy.errors._of`.
static OF: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// An exception, before the interpreter is asked to make it.
struct Failed<'a> {
    /// The class, where the code does not tell.
    family: Option<&'static str>,
    code: Option<RefusalCode>,
    message: &'a str,
    remedy: &'a str,
    leaves: Leaves,
    about: Option<&'a str>,
}

impl Failed<'_> {
    fn make(&self, py: Python<'_>) -> PyErr {
        let made = OF
            .get_or_try_init(py, || {
                PyModule::import(py, "statecopy.errors")?.getattr("_of").map(Bound::unbind)
            })
            .and_then(|of| {
                let code = self.code.map(RefusalCode::label);
                let leaves = label(self.leaves);
                of.bind(py).call1((
                    self.family,
                    code,
                    self.message,
                    self.remedy,
                    leaves,
                    self.about,
                ))
            });
        made.map_or_else(|error| error, PyErr::from_value)
    }
}

fn label(leaves: Leaves) -> &'static str {
    match leaves {
        Leaves::NothingMoved => "nothing_moved",
        Leaves::PerRow => "per_row",
        Leaves::Unknown => "unknown",
    }
}

/// The exception of a failure of the client.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let (family, about) = match error {
        Error::Refused(refusal) => {
            (None, Some(refusal.subject()).filter(|subject| !subject.is_empty()))
        }
        Error::Argument(_) | Error::Address(_) => (Some("ArgumentError"), None),
        Error::Memory { .. } => (Some("HandleError"), None),
        Error::Closed => (Some("ClosedError"), None),
        _ => (None, None),
    };
    let message = match error {
        // The exception begins with the code by itself.
        Error::Refused(refusal) => refusal.sentence().to_owned(),
        error => with_causes(error),
    };
    let (code, remedy, leaves) = (error.code(), error.remedy(), error.leaves());
    Failed { family, code, message: &message, remedy, leaves, about }.make(py)
}

fn with_causes(error: &Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        message.push_str(": ");
        message.push_str(&error.to_string());
        cause = error.source();
    }
    message
}

/// An argument that no daemon needs to see: its name, the code of the closed list that names the rule, a sentence with value and
/// limit, and the code's own remedy.
pub(crate) fn argument(
    py: Python<'_>,
    about: &str,
    code: Option<RefusalCode>,
    message: &str,
) -> PyErr {
    let remedy = code.map_or("Correct the argument named here.", RefusalCode::remedy);
    refused(py, Some("ArgumentError"), (about, code), message, remedy)
}

/// A tensor of another device than the plan's layers.
pub(crate) fn elsewhere(py: Python<'_>, about: &str, message: &str) -> PyErr {
    let remedy = "Move the tensor to the device of the state.";
    let code = Some(RefusalCode::DeviceNotVisible);
    refused(py, Some("ArgumentError"), (about, code), message, remedy)
}

/// An argument as the failure that its code names, with a remedy of its own.
pub(crate) fn argument_remedied(
    py: Python<'_>,
    about: &str,
    code: Option<RefusalCode>,
    message: &str,
    remedy: &str,
) -> PyErr {
    let family = code.is_none().then_some("ArgumentError");
    refused(py, family, (about, code), message, remedy)
}

/// What this side refuses: nothing moved.
fn refused(
    py: Python<'_>,
    family: Option<&'static str>,
    (about, code): (&str, Option<RefusalCode>),
    message: &str,
    remedy: &str,
) -> PyErr {
    let message = format!("{about}: {message}");
    let (leaves, about) = (Leaves::NothingMoved, Some(about));
    Failed { family, code, message: &message, remedy, leaves, about }.make(py)
}

/// A client of the parent process.
pub(crate) fn forked(py: Python<'_>) -> PyErr {
    Failed {
        family: Some("ForkedError"),
        code: None,
        message: "This client was connected in the parent of this process; a forked child's copy of it is closed",
        remedy: "Connect a client of its own in the child.",
        leaves: Leaves::NothingMoved,
        about: None,
    }
    .make(py)
}

/// A call after `close()`.
pub(crate) fn closed(py: Python<'_>) -> PyErr {
    raise(py, &Error::Closed)
}

/// A copy that was waited for before.
pub(crate) fn waited_for(py: Python<'_>) -> PyErr {
    argument_remedied(
        py,
        "pending",
        None,
        "the copy was waited for before",
        "Keep what the first wait returned.",
    )
}

/// A lane was named for a copy that is in the order of its stream.
pub(crate) fn lane_of_stream(py: Python<'_>) -> PyErr {
    argument_remedied(
        py,
        "lane",
        None,
        "a lane was named, and the copy is in the order of the current stream",
        "Leave the lane out, use submit_gather or submit_scatter, or connect with completion=\"host\".",
    )
}

/// A copy of the stream was lost, or may be made too late.
pub(crate) fn stream_failed(py: Python<'_>, error: &Error) -> PyErr {
    let what = "A copy that was put on a stream was not made";
    let remedy = "Write the rows whole again that copies of this stream were to write, then call client.reset_lanes() or register again.";
    lost(py, error, ("stream", what, remedy))
}

/// A captured graph lost a copy, or can make none any more.
pub(crate) fn graph_failed(py: Python<'_>, error: &Error) -> PyErr {
    let what = "A captured graph makes its copies no more";
    let remedy = "Write the rows whole again that its last replay was to write, let go of the graph, and capture it again.";
    lost(py, error, ("graph", what, remedy))
}

fn lost(py: Python<'_>, error: &Error, (about, what, remedy): (&str, &str, &str)) -> PyErr {
    let why = match error {
        Error::Refused(refusal) => refusal.sentence().to_owned(),
        error => with_causes(error),
    };
    Failed {
        family: None,
        code: error.code().or(Some(RefusalCode::Unavailable)),
        message: &format!("{what}: {why}"),
        remedy,
        leaves: Leaves::Unknown,
        about: Some(about),
    }
    .make(py)
}

/// A copy was accepted, and the worker's driver did not put it on the stream, or into the graph that it is captured into.
pub(crate) fn not_enqueued(py: Python<'_>, error: &DriverError) -> PyErr {
    Failed {
        family: Some("Error"),
        code: None,
        message: &format!("The copy could not be put on the current stream: {error}"),
        remedy: "Look for an earlier failure of a kernel of this process, or of the capture; then call client.reset_lanes(), or capture again.",
        leaves: Leaves::NothingMoved,
        about: Some("stream"),
    }
    .make(py)
}

/// A host-completed copy while a graph is captured.
pub(crate) fn capturing(py: Python<'_>) -> PyErr {
    Failed {
        family: Some("Error"),
        code: None,
        message: "The current stream is being captured, and a host-completed copy cannot be captured",
        remedy: "Copy before the capture begins, or after it ended.",
        leaves: Leaves::NothingMoved,
        about: None,
    }
    .make(py)
}

/// The worker's own driver failed.
pub(crate) fn driver(py: Python<'_>, error: &DriverError) -> PyErr {
    Failed {
        family: Some("Error"),
        code: None,
        message: &format!("The driver refuses what is asked of the current stream: {error}"),
        remedy: "Look for an earlier failure of a kernel of this process.",
        leaves: Leaves::NothingMoved,
        about: None,
    }
    .make(py)
}

/// Device memory that only its own library could copy.
pub(crate) fn not_shared(py: Python<'_>) -> PyErr {
    Failed {
        family: None,
        code: Some(RefusalCode::HandleUnsupported),
        message: "A tensor lies in device memory that cannot be shared, and this client copies none by itself",
        remedy: "Allocate it where it can be shared (cudaMalloc, or virtual memory with a handle), or use statecopy.torch.",
        leaves: Leaves::NothingMoved,
        about: None,
    }
    .make(py)
}
