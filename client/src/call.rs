//! One call: its name, its deadline, and what a failure of it means.

use std::error::Error as StdError;
use std::future::Future;
use std::time::Duration;

use statecopy_proto::{Leaves, Refusal, RefusalCode};
use tokio::time::{Instant, timeout_at};
use tonic::{Code, ConnectError, Request, Response, Status, TimeoutExpired};

use crate::address::Address;
use crate::error::{BoxError, ConnectionError, Error, ProtocolError};

/// A call of the library: several round trips may serve it, all before one deadline.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) name: &'static str,
    started: Instant,
    pub(crate) deadline: Instant,
}

/// Why a round trip failed, before the call's name and the address are known.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The daemon answered.
    Refused(Refusal),
    /// There was no connection: the daemon never saw it.
    NotSent(BoxError),
    /// The connection broke: the daemon may have seen it.
    Lost(BoxError),
    /// The deadline passed before it was sent.
    Late,
    /// The deadline passed before the answer came.
    Unanswered,
    /// gRPC failed in another way.
    Status(Box<Status>),
    /// The answer is wrong.
    Protocol(ProtocolError),
    /// It failed on this side.
    Local(Error),
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<ProtocolError> for Failure {
    fn from(error: ProtocolError) -> Self {
        Self::Protocol(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Local(error)
    }
}

/// What may follow a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Connect anew and repeat it: nothing happened.
    Repeat,
    /// Connect anew; repeat it only if doing it twice does no harm.
    RepeatIfHarmless,
    /// The caller hears of it.
    Final,
}

impl Failure {
    /// Reads a failed round trip.
    pub(crate) fn of(status: Status) -> Self {
        if let Some(refusal) = Refusal::from_status(&status) {
            return Self::Refused(refusal);
        }
        if in_chain::<TimeoutExpired>(&status) || status.code() == Code::DeadlineExceeded {
            return Self::Unanswered;
        }
        if in_chain::<ConnectError>(&status) {
            return Self::NotSent(status.into());
        }
        if status.code() == Code::Unavailable || in_chain::<tonic::transport::Error>(&status) {
            return Self::Lost(status.into());
        }
        Self::Status(Box::new(status))
    }

    /// What may follow. One exhaustive match, so that a new failure is thought about.
    pub(crate) fn verdict(&self) -> Verdict {
        match self {
            Self::Refused(refusal) => match refusal.code() {
                RefusalCode::SessionUnknown | RefusalCode::IncarnationMismatch => Verdict::Repeat,
                _ => Verdict::Final,
            },
            Self::NotSent(_) => Verdict::Repeat,
            Self::Lost(_) => Verdict::RepeatIfHarmless,
            Self::Late
            | Self::Unanswered
            | Self::Status(_)
            | Self::Protocol(_)
            | Self::Local(_) => Verdict::Final,
        }
    }

    /// Whether the next call needs another link.
    pub(crate) fn ends_link(&self) -> bool {
        self.verdict() != Verdict::Final
    }

    /// Whether the daemon may or may not have done what it was asked.
    pub(crate) fn is_unknown(&self) -> bool {
        match self {
            Self::Lost(_) | Self::Unanswered | Self::Status(_) | Self::Protocol(_) => true,
            Self::Refused(_) | Self::NotSent(_) | Self::Late | Self::Local(_) => false,
        }
    }

    /// The same failure, when an earlier attempt of its call may have moved bytes.
    pub(crate) fn after_unknown(self) -> Self {
        match self {
            Self::Refused(refusal) => Self::Lost(refusal.into()),
            Self::NotSent(source) => Self::Lost(source),
            Self::Late => Self::Unanswered,
            other @ (Self::Lost(_)
            | Self::Unanswered
            | Self::Status(_)
            | Self::Protocol(_)
            | Self::Local(_)) => other,
        }
    }

    /// Whether a daemon that is starting or ending may be behind it, so that waiting helps.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::NotSent(_) | Self::Lost(_) => true,
            Self::Refused(refusal) => matches!(
                refusal.code(),
                RefusalCode::Draining
                    | RefusalCode::Unavailable
                    | RefusalCode::SessionUnknown
                    | RefusalCode::IncarnationMismatch
            ),
            Self::Late
            | Self::Unanswered
            | Self::Status(_)
            | Self::Protocol(_)
            | Self::Local(_) => false,
        }
    }
}

impl Call {
    pub(crate) fn new(name: &'static str, timeout: Duration) -> Self {
        Self::since(name, Instant::now(), timeout)
    }

    /// A call that began before.
    pub(crate) fn since(name: &'static str, started: Instant, timeout: Duration) -> Self {
        Self { name, started, deadline: started + timeout.min(FOREVER) }
    }

    /// The same call, with an earlier deadline, counted from its start, for a part of it.
    pub(crate) fn part(self, timeout: Duration) -> Self {
        let deadline = self.deadline.min(self.started + timeout.min(FOREVER));
        Self { deadline, ..self }
    }

    /// The same call, with an earlier deadline for a part of it.
    pub(crate) fn within(self, timeout: Duration) -> Self {
        let deadline = self.deadline.min(Instant::now() + timeout.min(FOREVER));
        Self { deadline, ..self }
    }

    /// What is left until the deadline; `None` when it has passed.
    pub(crate) fn left(&self) -> Option<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// A message with what is left as its `grpc-timeout`.
    pub(crate) fn request<M>(&self, message: M) -> Result<Request<M>, Failure> {
        let mut request = Request::new(message);
        request.set_timeout(self.left().ok_or(Failure::Late)?);
        Ok(request)
    }

    /// Waits for one round trip.
    pub(crate) async fn answer<T>(
        &self,
        answer: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Failure> {
        match timeout_at(self.deadline, answer).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(Failure::of(status)),
            Err(_) => Err(Failure::Unanswered),
        }
    }

    /// The error that the caller sees.
    pub(crate) fn error(&self, address: &Address, failure: Failure) -> Error {
        let (call, address) = (self.name, address.clone());
        let late = |leaves| {
            let after = self.started.elapsed();
            Error::DeadlineExceeded { call, after, leaves }
        };
        match failure {
            Failure::Refused(refusal) => Error::Refused(refusal),
            Failure::NotSent(source) => {
                let source = ConnectionError::none(source);
                Error::Unavailable { call, address, leaves: Leaves::NothingMoved, source }
            }
            Failure::Lost(source) => {
                let source = ConnectionError::broke(source);
                Error::Unavailable { call, address, leaves: Leaves::Unknown, source }
            }
            Failure::Late => late(Leaves::NothingMoved),
            Failure::Unanswered => late(Leaves::Unknown),
            Failure::Status(status) => Error::Transport { call, status },
            Failure::Protocol(source) => Error::Protocol { call, source },
            Failure::Local(error) => error,
        }
    }
}

/// Longer than any worker runs, and short enough that a clock takes it.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Whether an error of that type stands among the sources.
fn in_chain<E: StdError + 'static>(error: &(dyn StdError + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<E>() {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(status: Status) -> (&'static str, Verdict) {
        let failure = Failure::of(status);
        let name = match &failure {
            Failure::Refused(_) => "refused",
            Failure::NotSent(_) => "not sent",
            Failure::Lost(_) => "lost",
            Failure::Unanswered => "unanswered",
            Failure::Status(_) => "status",
            Failure::Late | Failure::Protocol(_) | Failure::Local(_) => "local",
        };
        (name, failure.verdict())
    }

    #[test]
    fn a_status_is_read_by_what_stands_behind_it() {
        let refused = |code| read(Refusal::new(code, "s").to_status());
        assert_eq!(refused(RefusalCode::StalePlan), ("refused", Verdict::Final));
        assert_eq!(refused(RefusalCode::Unavailable), ("refused", Verdict::Final));
        assert_eq!(refused(RefusalCode::Draining), ("refused", Verdict::Final));
        assert_eq!(refused(RefusalCode::SessionUnknown), ("refused", Verdict::Repeat));
        assert_eq!(refused(RefusalCode::IncarnationMismatch), ("refused", Verdict::Repeat));

        let nobody = Status::from_error(Box::new(ConnectError("refused".into())));
        assert_eq!(read(nobody), ("not sent", Verdict::Repeat));
        // The same code without the cause: it may have been sent.
        assert_eq!(read(Status::unavailable("")), ("lost", Verdict::RepeatIfHarmless));
        let timeout = Status::from_error(Box::new(TimeoutExpired(())));
        assert_eq!(read(timeout), ("unanswered", Verdict::Final));
        assert_eq!(read(Status::deadline_exceeded("")), ("unanswered", Verdict::Final));
        assert_eq!(read(Status::internal("")), ("status", Verdict::Final));
    }
}
