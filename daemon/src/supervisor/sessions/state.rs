//! The life of one session.
//!
//! ```text
//!              Attach            Begin               Publish
//!  Attaching ---------> Attached -------> Registering -------> Published
//!      |                  ^  ^                |  ^                | | ^
//!      | Expire           |  +----- Fail -----+  +---- Begin -----+ | | Move
//!      |                  +------------------- Withdraw ------------+-+
//!      v
//!    Ended  <--- End, from every state
//! ```
//!
//! - `Attach`: the worker presents the one-time token on the descriptor socket in time. The token is gone then.
//! - `Expire`: the token was not presented in time.
//! - `Begin`: a registration starts; what was published is withdrawn in that moment.
//! - `Fail`: the registration was refused; nothing is published.
//! - `Publish`: every layer is published.
//! - `Move`: a rebind gave published layers other memory.
//! - `Withdraw`: the worker gives its layers back.
//! - `End`: the worker closed the session or died, or the daemon ends. Nothing leaves `Ended`.
//!
//! Every other pair of state and event is refused and changes nothing.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use statecopy_proto::descriptor_socket::Token;
use statecopy_proto::{Refusal, RefusalCode, SessionId};

use super::publication::Publication;

/// Where a session stands.
#[derive(Debug, Clone)]
pub(crate) enum SessionState {
    /// Opened; its worker has not presented the token.
    Attaching {
        /// The one-time token.
        token: Token,
        /// When it is too late.
        until: Instant,
    },
    /// Tied to its worker; nothing is published.
    Attached,
    /// A registration runs.
    Registering,
    /// Every layer is published.
    Published(Arc<Publication>),
    /// Over.
    Ended(EndReason),
}

/// What happens to a session.
#[derive(Debug, Clone)]
pub(crate) enum SessionEvent {
    /// A worker presents a token.
    Attach {
        /// The token.
        token: Token,
        /// When it does.
        now: Instant,
    },
    /// The time to attach is over.
    Expire {
        /// The time now.
        now: Instant,
    },
    /// A registration starts.
    Begin,
    /// The registration was refused.
    Fail,
    /// The registration is published.
    Publish(Arc<Publication>),
    /// Published layers moved.
    Move(Arc<Publication>),
    /// The layers are given back.
    Withdraw,
    /// It is over.
    End(EndReason),
}

/// Why a session ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EndReason {
    /// The worker closed it.
    Closed,
    /// The worker's process is dead.
    WorkerDied,
    /// The worker's connection to the descriptor socket ended.
    ConnectionEnded,
    /// The token was not presented in time.
    AttachTimeout,
    /// The words of its ring make no sense: what was found there.
    RingBroken(Cow<'static, str>),
    /// The daemon ends.
    Draining,
}

impl EndReason {
    /// Every reason, for its label.
    pub(crate) const ALL: [Self; 6] = [
        Self::Closed,
        Self::WorkerDied,
        Self::ConnectionEnded,
        Self::AttachTimeout,
        Self::RingBroken(Cow::Borrowed("")),
        Self::Draining,
    ];

    /// The name in metrics.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::WorkerDied => "worker_died",
            Self::ConnectionEnded => "connection_ended",
            Self::AttachTimeout => "attach_timeout",
            Self::RingBroken(_) => "ring_broken",
            Self::Draining => "draining",
        }
    }

    /// The sentence in the session's last event, and in the last record on its connection.
    pub(crate) fn sentence(&self) -> String {
        let sentence = match self {
            Self::Closed => "The worker closed the session",
            Self::WorkerDied => "The worker's process is dead",
            Self::ConnectionEnded => "The connection to the descriptor socket ended",
            Self::AttachTimeout => "The token was not presented on the descriptor socket in time",
            Self::RingBroken(found) => {
                return format!("The session's ring makes no sense any more: {found}");
            }
            Self::Draining => "The daemon ends",
        };
        sentence.to_owned()
    }
}

/// Why an event is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoEdge {
    /// The token is another one.
    #[error("is opened with another token")]
    TokenDiffers,
    /// The token was used.
    #[error("is attached already: a token serves once")]
    TokenUsed,
    /// The token came too late.
    #[error("was not attached in time")]
    TooLate,
    /// There is time left to attach.
    #[error("has time left to attach")]
    TooEarly,
    /// The worker has not presented its token.
    #[error("is not attached: its worker has not presented the token on the descriptor socket")]
    NotAttached,
    /// Nothing is published.
    #[error("has nothing published")]
    NothingPublished,
    /// A registration runs.
    #[error("has a registration running")]
    RegistrationRuns,
    /// No registration runs.
    #[error("has no registration running")]
    NoRegistrationRuns,
    /// It is over.
    #[error("is over")]
    Over,
}

impl NoEdge {
    /// The refusal for that session.
    pub(crate) fn to_refusal(self, session: SessionId) -> Refusal {
        let code = match self {
            Self::TokenDiffers | Self::TokenUsed => RefusalCode::PermissionDenied,
            Self::TooLate | Self::TooEarly | Self::NotAttached | Self::Over => {
                RefusalCode::SessionUnknown
            }
            Self::NothingPublished | Self::RegistrationRuns | Self::NoRegistrationRuns => {
                RefusalCode::NotSealed
            }
        };
        let refusal = Refusal::new(code, format!("Session {session} {self}")).about("session");
        match self {
            Self::NotAttached => refusal.remedied_by(
                "Present the session's token on the descriptor socket, then call again.",
            ),
            Self::RegistrationRuns => refusal
                .remedied_by("Wait until the running registration has answered, then call again."),
            _ => refusal,
        }
    }
}

impl SessionState {
    /// The state after an event.
    ///
    /// # Errors
    /// When no edge leads away; the state stays.
    pub(crate) fn next(&self, event: SessionEvent) -> Result<Self, NoEdge> {
        match event {
            SessionEvent::Attach { token, now } => self.attach(&token, now),
            SessionEvent::Expire { now } => self.expire(now),
            SessionEvent::Begin => match self {
                Self::Attaching { .. } => Err(NoEdge::NotAttached),
                Self::Attached | Self::Published(_) => Ok(Self::Registering),
                Self::Registering => Err(NoEdge::RegistrationRuns),
                Self::Ended(_) => Err(NoEdge::Over),
            },
            SessionEvent::Fail => self.registering().map(|()| Self::Attached),
            SessionEvent::Publish(publication) => {
                self.registering().map(|()| Self::Published(publication))
            }
            SessionEvent::Move(publication) => {
                self.published().map(|_| Self::Published(publication))
            }
            SessionEvent::Withdraw => match self {
                Self::Attaching { .. } => Err(NoEdge::NotAttached),
                Self::Attached | Self::Published(_) => Ok(Self::Attached),
                Self::Registering => Err(NoEdge::RegistrationRuns),
                Self::Ended(_) => Err(NoEdge::Over),
            },
            SessionEvent::End(reason) => match self {
                Self::Attaching { .. }
                | Self::Attached
                | Self::Registering
                | Self::Published(_) => Ok(Self::Ended(reason)),
                Self::Ended(_) => Err(NoEdge::Over),
            },
        }
    }

    /// What is published.
    ///
    /// # Errors
    /// When nothing is.
    pub(crate) fn published(&self) -> Result<&Arc<Publication>, NoEdge> {
        match self {
            Self::Attaching { .. } | Self::Attached => Err(NoEdge::NothingPublished),
            Self::Registering => Err(NoEdge::RegistrationRuns),
            Self::Published(publication) => Ok(publication),
            Self::Ended(_) => Err(NoEdge::Over),
        }
    }

    /// The name in `statecopy status` and in metrics.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Attaching { .. } => "attaching",
            Self::Attached => "attached",
            Self::Registering => "registering",
            Self::Published(_) => "published",
            Self::Ended(_) => "ended",
        }
    }

    fn attach(&self, presented: &Token, now: Instant) -> Result<Self, NoEdge> {
        match self {
            Self::Attaching { token, until } => {
                if !same_token(token, presented) {
                    Err(NoEdge::TokenDiffers)
                } else if now >= *until {
                    Err(NoEdge::TooLate)
                } else {
                    Ok(Self::Attached)
                }
            }
            Self::Attached | Self::Registering | Self::Published(_) => Err(NoEdge::TokenUsed),
            Self::Ended(_) => Err(NoEdge::Over),
        }
    }

    fn expire(&self, now: Instant) -> Result<Self, NoEdge> {
        match self {
            Self::Attaching { until, .. } if now < *until => Err(NoEdge::TooEarly),
            Self::Attaching { .. } => Ok(Self::Ended(EndReason::AttachTimeout)),
            Self::Attached | Self::Registering | Self::Published(_) => Err(NoEdge::TokenUsed),
            Self::Ended(_) => Err(NoEdge::Over),
        }
    }

    fn registering(&self) -> Result<(), NoEdge> {
        match self {
            Self::Registering => Ok(()),
            Self::Attaching { .. } | Self::Attached | Self::Published(_) => {
                Err(NoEdge::NoRegistrationRuns)
            }
            Self::Ended(_) => Err(NoEdge::Over),
        }
    }
}

/// Compares in a time that does not depend on where the tokens differ.
fn same_token(one: &Token, other: &Token) -> bool {
    let difference = one
        .as_bytes()
        .iter()
        .zip(other.as_bytes())
        .fold(0_u8, |difference, (one, other)| difference | (one ^ other));
    difference == 0
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn token(byte: u8) -> Token {
        Token::new([byte; 32])
    }

    fn states(until: Instant) -> Vec<SessionState> {
        let mut states = vec![
            SessionState::Attaching { token: token(1), until },
            SessionState::Attached,
            SessionState::Registering,
            SessionState::Published(Arc::default()),
        ];
        states.extend(EndReason::ALL.map(SessionState::Ended));
        states
    }

    fn events(until: Instant) -> Vec<(&'static str, SessionEvent)> {
        let early = until - Duration::from_secs(1);
        vec![
            ("attach", SessionEvent::Attach { token: token(1), now: early }),
            ("attach wrong", SessionEvent::Attach { token: token(2), now: early }),
            ("attach late", SessionEvent::Attach { token: token(1), now: until }),
            ("expire early", SessionEvent::Expire { now: early }),
            ("expire", SessionEvent::Expire { now: until }),
            ("begin", SessionEvent::Begin),
            ("fail", SessionEvent::Fail),
            ("publish", SessionEvent::Publish(Arc::default())),
            ("move", SessionEvent::Move(Arc::default())),
            ("withdraw", SessionEvent::Withdraw),
            ("end", SessionEvent::End(EndReason::Closed)),
        ]
    }

    /// The edges, written down a second time: (from, event, to). Everything else is refused.
    const EDGES: &[(&str, &str, &str)] = &[
        ("attaching", "attach", "attached"),
        ("attaching", "expire", "ended"),
        ("attaching", "end", "ended"),
        ("attached", "begin", "registering"),
        ("attached", "withdraw", "attached"),
        ("attached", "end", "ended"),
        ("registering", "fail", "attached"),
        ("registering", "publish", "published"),
        ("registering", "end", "ended"),
        ("published", "begin", "registering"),
        ("published", "move", "published"),
        ("published", "withdraw", "attached"),
        ("published", "end", "ended"),
    ];

    #[test]
    fn exactly_the_edges_of_the_diagram_exist() {
        let until = Instant::now() + Duration::from_secs(60);
        let mut taken = 0;
        for state in states(until) {
            for (name, event) in events(until) {
                let expected = EDGES
                    .iter()
                    .find(|(from, event, _)| *from == state.label() && *event == name)
                    .map(|(_, _, to)| *to);
                let next = state.next(event);
                assert_eq!(
                    next.as_ref().ok().map(SessionState::label),
                    expected,
                    "{state:?} {name}"
                );
                taken += usize::from(next.is_ok());
            }
        }
        assert_eq!(taken, EDGES.len());
    }

    #[test]
    fn only_a_published_session_serves_copies() {
        for state in states(Instant::now()) {
            assert_eq!(state.published().is_ok(), state.label() == "published");
        }
    }

    #[test]
    fn a_refused_edge_names_the_session_and_has_a_code_of_the_list() {
        let refusal = NoEdge::RegistrationRuns.to_refusal(SessionId(7));
        assert_eq!(refusal.code(), RefusalCode::NotSealed);
        assert_eq!(refusal.sentence(), "Session 7 has a registration running");
        let refusal = NoEdge::TokenUsed.to_refusal(SessionId(7));
        assert_eq!(refusal.code(), RefusalCode::PermissionDenied);
    }

    #[test]
    fn tokens_that_differ_in_one_bit_are_different() {
        for at in 0..32 {
            let mut bytes = [7; 32];
            bytes[at] ^= 0x80;
            assert!(!same_token(&token(7), &Token::new(bytes)));
        }
        assert!(same_token(&token(7), &token(7)));
    }
}
