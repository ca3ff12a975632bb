//! What goes wrong, with the closed list of refusals inside.

use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use statecopy_proto::descriptor_socket::RecordError;
use statecopy_proto::{Leaves, Refusal, RefusalCode};

use crate::address::{Address, AddressError};

/// The cause of a failure on this side.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// What became of the connection, in one plain sentence.
#[derive(Debug, thiserror::Error)]
#[error("{sentence}")]
pub struct ConnectionError {
    sentence: String,
    /// What the transport said, for a log: its text is none for a user.
    cause: BoxError,
}

impl ConnectionError {
    /// There was no connection.
    pub(crate) fn none(cause: BoxError) -> Self {
        let sentence = match innermost_io(&*cause).map(io::Error::kind) {
            Some(io::ErrorKind::NotFound) => "there is no such socket".to_owned(),
            Some(io::ErrorKind::ConnectionRefused) => "nobody listens on the socket".to_owned(),
            _ => said(&*cause),
        };
        Self { sentence, cause }
    }

    /// There was one, and it broke.
    pub(crate) fn broke(cause: BoxError) -> Self {
        Self { sentence: format!("the connection to the daemon broke: {}", said(&*cause)), cause }
    }

    /// Adds what the daemon said before it went away.
    #[must_use]
    pub(crate) fn after(mut self, refusal: &Refusal) -> Self {
        let (code, sentence) = (refusal.code(), refusal.sentence());
        self.sentence = format!("{} (the daemon had said: {code}: {sentence})", self.sentence);
        self
    }

    /// What the transport said.
    #[must_use]
    pub fn cause(&self) -> &(dyn StdError + Send + Sync + 'static) {
        &*self.cause
    }
}

/// The innermost words of an error: the operating system's where it has any.
fn said(error: &(dyn StdError + 'static)) -> String {
    if let Some(error) = innermost_io(error) {
        return match error.kind() {
            io::ErrorKind::Other => error.to_string(),
            kind => kind.to_string(),
        };
    }
    let innermost = chain(error).last().unwrap_or(error);
    match innermost.downcast_ref::<tonic::Status>() {
        Some(status) if status.message().is_empty() => status.code().description().to_owned(),
        Some(status) => status.message().to_owned(),
        None => innermost.to_string(),
    }
}

fn innermost_io<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a io::Error> {
    chain(error).filter_map(<dyn StdError>::downcast_ref).last()
}

fn chain<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn StdError + 'static)| (*error).source())
}

/// Why a call of this library failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(clippy::error_impl_error, reason = "the one error of this crate's boundary")]
pub enum Error {
    /// The daemon refused, with a code of the closed list.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The daemon is gone, or cannot be reached.
    #[error("{call}: the daemon at {address} is gone or cannot be reached")]
    Unavailable {
        /// The call.
        call: &'static str,
        /// Where the daemon was sought.
        address: Address,
        /// What the call leaves behind: nothing when it was never sent.
        leaves: Leaves,
        /// What became of the connection.
        #[source]
        source: ConnectionError,
    },
    /// This side stopped waiting.
    #[error("{call}: no answer within {} ms", after.as_millis())]
    DeadlineExceeded {
        /// The call.
        call: &'static str,
        /// How long it was waited for.
        after: Duration,
        /// What the call leaves behind. Unknown for a copy that was sent: it may run yet.
        leaves: Leaves,
    },
    /// gRPC failed without a refusal.
    #[error("{call}: gRPC failed ({:?}): {}", status.code(), status.message())]
    Transport {
        /// The call.
        call: &'static str,
        /// What it said.
        status: Box<tonic::Status>,
    },
    /// The daemon's answer is not what the two sides agreed on.
    #[error("{call}: the daemon's answer breaks the protocol")]
    Protocol {
        /// The call.
        call: &'static str,
        /// In what way.
        #[source]
        source: ProtocolError,
    },
    /// A text is no address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// An argument that no daemon needs to see.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// The operating system gave no memory, or took none.
    #[error("Memory {name} cannot be {what}")]
    Memory {
        /// The memory's name.
        name: String,
        /// What was tried.
        what: &'static str,
        /// Why not.
        #[source]
        source: BoxError,
    },
    /// The runtime of a blocking client could not be made.
    #[error("A runtime for the blocking client cannot be made")]
    Runtime(#[source] io::Error),
    /// [`Client::close`](crate::Client::close) was called before.
    #[error("The client is closed")]
    Closed,
}

/// How a daemon's answer breaks the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A field is missing or has no meaning.
    #[error("The field {0} is missing or malformed")]
    Field(&'static str),
    /// An answer of another life of the daemon.
    #[error("The answer carries another incarnation than the session")]
    Incarnation,
    /// The stream of a registration ended without its last message.
    #[error("The registration ended without being published")]
    NotPublished,
    /// What was published is not what was registered.
    #[error("{name} was registered, but not published")]
    MissingBinding {
        /// A layer or a binding set.
        name: String,
    },
    /// The daemon published another signature than the client computed.
    #[error(
        "Layer {name} was published with the signature {daemon}, where the client computed {client}"
    )]
    Signature {
        /// The layer.
        name: String,
        /// The client's.
        client: String,
        /// The daemon's.
        daemon: String,
    },
    /// Another number of answers than copies.
    #[error("{given} answers came for {wanted} copies")]
    Answers {
        /// How many came.
        given: usize,
        /// How many were due.
        wanted: usize,
    },
    /// A record of the descriptor socket cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The session memory is not this session's, or something in it cannot be read.
    #[error("The session's ring cannot be used: {reason}")]
    Ring {
        /// What is wrong with it.
        reason: String,
    },
    /// A record that does not belong here.
    #[error("The descriptor socket said something else than was due")]
    UnexpectedRecord,
}

/// An argument that is wrong before any daemon sees it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgumentError {
    /// A call that blocks was made while this thread makes another one.
    #[error(
        "A call that waits for the daemon was made within another one, by its progress for example"
    )]
    Within,
    /// No such layer among these bindings.
    #[error("No layer {name} was registered")]
    NoSuchLayer {
        /// The name that was asked for.
        name: String,
    },
    /// No such binding set among these bindings.
    #[error("No binding set {name} was registered")]
    NoSuchSet {
        /// The name that was asked for.
        name: String,
    },
    /// Bytes past the end of a memory or region.
    #[error("Bytes {offset} to {end} were asked for; {name} has {limit}")]
    OutOfRange {
        /// The memory or region.
        name: String,
        /// The first byte.
        offset: u64,
        /// One past the last byte.
        end: u64,
        /// How many there are.
        limit: u64,
    },
    /// Memory of no bytes.
    #[error("Memory {name} of 0 bytes was asked for")]
    NoBytes {
        /// The memory's name.
        name: String,
    },
    /// A range of protocol versions with nothing in it.
    #[error("The range of allowed protocol versions is empty")]
    NoVersion,
}

impl Error {
    /// The code of the closed list, where one fits: the daemon's own, `UNAVAILABLE` for an outcome that is unknown, and
    /// `DEADLINE_EXCEEDED` for a call that was given up before it was sent.
    #[must_use]
    pub fn code(&self) -> Option<RefusalCode> {
        match self {
            Self::Refused(refusal) => Some(refusal.code()),
            Self::Unavailable { .. } => Some(RefusalCode::Unavailable),
            Self::DeadlineExceeded { leaves: Leaves::NothingMoved, .. } => {
                Some(RefusalCode::DeadlineExceeded)
            }
            Self::DeadlineExceeded { .. } => Some(RefusalCode::Unavailable),
            Self::Transport { .. }
            | Self::Protocol { .. }
            | Self::Address(_)
            | Self::Argument(_)
            | Self::Memory { .. }
            | Self::Runtime(_)
            | Self::Closed => None,
        }
    }

    /// What a copy that failed this way leaves behind.
    #[must_use]
    pub fn leaves(&self) -> Leaves {
        match self {
            Self::Refused(refusal) => refusal.code().leaves(),
            Self::Unavailable { leaves, .. } | Self::DeadlineExceeded { leaves, .. } => *leaves,
            Self::Transport { .. } | Self::Protocol { .. } => Leaves::Unknown,
            Self::Address(_)
            | Self::Argument(_)
            | Self::Memory { .. }
            | Self::Runtime(_)
            | Self::Closed => Leaves::NothingMoved,
        }
    }

    /// Adds what the daemon had said before it went away.
    pub(crate) fn after(self, refusal: &Refusal) -> Self {
        match self {
            Self::Unavailable { call, address, leaves, source } => {
                Self::Unavailable { call, address, leaves, source: source.after(refusal) }
            }
            other => other,
        }
    }

    /// The same failure of a call that changes nothing and touches no buffer.
    pub(crate) fn of_question(self) -> Self {
        match self {
            Self::Unavailable { call, address, source, .. } => {
                Self::Unavailable { call, address, leaves: Leaves::NothingMoved, source }
            }
            Self::DeadlineExceeded { call, after, .. } => {
                Self::DeadlineExceeded { call, after, leaves: Leaves::NothingMoved }
            }
            Self::Refused(refusal) if refusal.code() == RefusalCode::Unavailable => {
                Self::Refused(refusal.remedied_by("Ask again; the daemon's log tells more."))
            }
            other => other,
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn remedy(&self) -> &str {
        match self {
            Self::Refused(refusal) => refusal.remedy(),
            Self::Unavailable { leaves: Leaves::NothingMoved, .. } => {
                "Start statecopyd, or correct the address."
            }
            Self::Unavailable { .. } => RefusalCode::Unavailable.remedy(),
            Self::DeadlineExceeded { leaves: Leaves::NothingMoved, .. } => {
                RefusalCode::DeadlineExceeded.remedy()
            }
            Self::DeadlineExceeded { .. } => {
                "The call may take effect yet: leave its buffers alone until the daemon has answered a later request of \
                 the same lane, or is known dead."
            }
            Self::Transport { .. } => {
                "Look at the daemon's log; client and daemon may be of different builds."
            }
            Self::Protocol { .. } => "Install a client and a daemon of the same build.",
            Self::Address(_) => {
                "Give unix:///path/of/the/socket, the socket's path, or a runtime directory."
            }
            Self::Argument(ArgumentError::Within) => {
                "Make the call once the other one has returned, or in another thread."
            }
            Self::Argument(_) => "Correct the argument named here.",
            Self::Memory { .. } => {
                "Free memory, or raise the limit of this process's memory group or of /dev/shm."
            }
            Self::Runtime(_) => "Raise the limits of open files and threads of this process.",
            Self::Closed => "Connect a new client.",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_error_is_told_in_the_words_of_the_operating_system() {
        let io = |kind| tonic::Status::from_error(Box::new(io::Error::from(kind)));
        let none = |kind| ConnectionError::none(io(kind).into()).to_string();
        assert_eq!(none(io::ErrorKind::NotFound), "there is no such socket");
        assert_eq!(none(io::ErrorKind::ConnectionRefused), "nobody listens on the socket");
        assert_eq!(none(io::ErrorKind::PermissionDenied), "permission denied");
        let reset = ConnectionError::broke(io(io::ErrorKind::ConnectionReset).into());
        assert_eq!(reset.to_string(), "the connection to the daemon broke: connection reset");
        assert!(reset.source().is_none(), "the transport's own text stays out of sight");
        let status = ConnectionError::broke(tonic::Status::unavailable("going away").into());
        assert_eq!(status.to_string(), "the connection to the daemon broke: going away");
        let draining = Refusal::new(RefusalCode::Draining, "The daemon is about to end");
        let after = ConnectionError::none(io(io::ErrorKind::NotFound).into()).after(&draining);
        assert_eq!(
            after.to_string(),
            "there is no such socket (the daemon had said: DRAINING: The daemon is about to end)"
        );
    }

    #[test]
    fn a_question_leaves_no_buffer_to_hold() {
        let unavailable = Error::Unavailable {
            call: "ping",
            address: "/run/x".parse().unwrap(),
            leaves: Leaves::Unknown,
            source: ConnectionError::broke("gone".into()),
        };
        let late = Error::DeadlineExceeded {
            call: "ping",
            after: Duration::ZERO,
            leaves: Leaves::Unknown,
        };
        let refused = Refusal::new(RefusalCode::Unavailable, "The device process is gone");
        for error in [unavailable, late, refused.into()] {
            let error = error.of_question();
            assert!(!error.remedy().contains("uffers"), "{error:?}");
            assert!(!error.remedy().contains("statecopy ping"), "{error:?}");
        }
    }

    #[test]
    fn an_error_of_this_side_has_the_code_that_says_what_it_leaves() {
        let address: Address = "/run/x".parse().unwrap();
        let unavailable = |leaves| Error::Unavailable {
            call: "gather",
            address: address.clone(),
            leaves,
            source: ConnectionError::broke("gone".into()),
        };
        let late =
            |leaves| Error::DeadlineExceeded { call: "gather", after: Duration::ZERO, leaves };
        let errors = [
            (unavailable(Leaves::NothingMoved), Some(RefusalCode::Unavailable)),
            (unavailable(Leaves::Unknown), Some(RefusalCode::Unavailable)),
            (late(Leaves::NothingMoved), Some(RefusalCode::DeadlineExceeded)),
            (late(Leaves::Unknown), Some(RefusalCode::Unavailable)),
            (Error::Closed, None),
            (ArgumentError::NoVersion.into(), None),
            (AddressError::Empty.into(), None),
        ];
        for (error, code) in errors {
            assert_eq!(error.code(), code, "{error:?}");
            assert!(error.remedy().ends_with('.'), "{error:?}");
            if let Error::Unavailable { leaves, .. } | Error::DeadlineExceeded { leaves, .. } =
                error
            {
                assert_eq!(error.leaves(), leaves);
            } else {
                assert_eq!(error.leaves(), Leaves::NothingMoved);
            }
        }
    }
}
