//! Finding a live session, and repeating a call in another one where that does no harm.
//!
//! ```text
//!            link()                    round trip fails
//!  no link ----------> live link ------------------------+
//!     ^   open, send                                     |
//!     |   records again                                  v
//!     +----------------------------------- failed(): repeat, or tell the caller
//! ```

use std::sync::Arc;
use std::time::Duration;

use statecopy_proto::v1;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::call::{Call, Failure, Verdict};
use crate::error::{Error, ProtocolError};
use crate::link::{Bound, Link, read_published};
use crate::records::{RegistrationNumber, Shared};
use crate::registration::{Progress, Registration, Stage};

/// A call connects anew at most this often, however long its deadline is.
const REPEATS_MAX: u32 = 8;
const BACKOFF_FIRST: Duration = Duration::from_millis(5);
const BACKOFF_MAX: Duration = Duration::from_millis(250);

/// What a call does, as far as repeating it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It changes what the session owns, which is on record: a new session makes up for whatever became of it.
    Session,
    /// It moves bytes.
    Copy {
        /// It has to be sent by then.
        start: Instant,
        /// The caller says that doing it twice does no harm.
        repeat_unknown: bool,
    },
}

/// One call that may be repeated.
#[derive(Debug)]
pub(crate) struct Attempts<'a> {
    shared: &'a Shared,
    pub(crate) call: Call,
    effect: Effect,
    repeats: u32,
    /// An earlier attempt may have moved bytes, whatever becomes of the next.
    moved: bool,
}

impl<'a> Attempts<'a> {
    pub(crate) fn new(shared: &'a Shared, call: Call, effect: Effect) -> Self {
        Self { shared, call, effect, repeats: 0, moved: false }
    }

    /// The live link, if there is one.
    pub(crate) fn live_link(&self) -> Result<Option<Arc<Link>>, Error> {
        self.shared.live_link()
    }

    /// A live link, opened anew if there is none.
    pub(crate) async fn link(&self) -> Result<Arc<Link>, Error> {
        if let Some(link) = self.live_link()? {
            return Ok(link);
        }
        if !self.shared.options.reregister {
            let gone = std::io::Error::from(std::io::ErrorKind::NotConnected);
            return Err(self.error(Failure::NotSent(gone.into())));
        }
        let until = match self.effect {
            Effect::Session => self.call.deadline,
            Effect::Copy { start, .. } => start,
        };
        self.reconnect(until, self.shared.options.reconnect_for).await
    }

    /// The first link. A daemon that is not there is waited for until then.
    pub(crate) async fn connect(&self, until: Instant) -> Result<Arc<Link>, Error> {
        self.reconnect(until, Duration::MAX).await
    }

    /// `Ok`: repeat it with the next link. `Err`: the caller hears of it.
    pub(crate) fn failed(&mut self, link: &Link, failure: Failure) -> Result<(), Error> {
        let again = match (failure.verdict(), self.effect) {
            (Verdict::Final, effect) => {
                if effect == Effect::Session && failure.is_unknown() {
                    // The daemon may have done it or not: the next session is made from the records.
                    link.retire();
                }
                return Err(self.error(failure));
            }
            (Verdict::Repeat, _) | (Verdict::RepeatIfHarmless, Effect::Session) => true,
            (Verdict::RepeatIfHarmless, Effect::Copy { repeat_unknown, .. }) => repeat_unknown,
        };
        link.retire();
        self.moved |= matches!(self.effect, Effect::Copy { .. }) && failure.is_unknown();
        self.repeats += 1;
        let allowed = self.shared.options.reregister && self.repeats <= REPEATS_MAX;
        self.shared.hear(&failure);
        if again && allowed && self.call.left().is_some() {
            tracing::debug!(call = self.call.name, ?failure, "connecting anew");
            return Ok(());
        }
        Err(self.error(failure))
    }

    pub(crate) fn error(&self, failure: Failure) -> Error {
        let failure = if self.moved { failure.after_unknown() } else { failure };
        self.shared.error(&self.call, failure)
    }

    /// Whoever else connects is waited for until then; a daemon that is not there for that long, if that is less.
    async fn reconnect(&self, until: Instant, for_daemon: Duration) -> Result<Arc<Link>, Error> {
        // One at a time. The permit is no lock: nobody waits for it who could go on without a link. The client owns the
        // semaphore and never closes it, so a permit always comes, or the deadline.
        let permit = timeout_at(until, self.shared.connecting.acquire()).await;
        let _permit = permit.map_err(|_| self.error(Failure::Late))?;
        let until = until.min(self.call.within(for_daemon).deadline);
        let mut backoff = BACKOFF_FIRST;
        loop {
            if let Some(link) = self.shared.live_link()? {
                return Ok(link);
            }
            let failure = match open(self.shared, &self.call).await {
                Ok(link) => return self.shared.adopt(link),
                Err(failure) => failure,
            };
            self.shared.hear(&failure);
            let next = Instant::now() + backoff;
            if !failure.is_passing() || next >= until {
                return Err(self.error(unsent(failure)));
            }
            sleep_until(next).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }
}

/// Whatever went wrong while connecting, the call itself was not sent.
fn unsent(failure: Failure) -> Failure {
    match failure {
        Failure::Lost(source) => Failure::NotSent(source),
        Failure::Unanswered => Failure::Late,
        other => other,
    }
}

/// Opens a session and tells it everything that the client has on record.
async fn open(shared: &Shared, call: &Call) -> Result<Arc<Link>, Failure> {
    let number = shared.next_link();
    let link = Arc::new(Link::open(number, &shared.address, &shared.options, call).await?);
    let (regions, registration) = shared.records();
    for region in regions {
        let told = link.register_region(&region, call).await;
        let is_needed =
            || registration.as_ref().is_some_and(|record| record.registration.uses(region.key));
        match told {
            // Whoever freed it asks for no copy there; a layer's cache is another matter.
            Err(failure) if region.is_gone() && !is_needed() => {
                tracing::debug!(?failure, region = region.key.0, "the memory is gone");
                shared.forget_region(region.key);
            }
            told => told?,
        }
    }
    // Layers whose memory was given back sleep: the rebind that wakes them registers them here.
    if let Some(record) = registration.filter(|record| link.has_memory_of(&record.registration)) {
        let (number, registration) = (record.number, &record.registration);
        let bound = register_layers(&link, call, number, registration, &mut |_| {}).await?;
        link.bind(bound);
    }
    Ok(link)
}

/// Registers layers in a session and reads what it published.
pub(crate) async fn register_layers(
    link: &Arc<Link>,
    call: &Call,
    number: RegistrationNumber,
    registration: &Registration,
    on_progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Bound, Failure> {
    use v1::register_layers_event::Event;

    let request = call.request(link.registration_message(registration))?;
    let mut events = call.answer(link.registry().register_layers(request)).await?;
    loop {
        let next = timeout_at(call.deadline, events.message()).await;
        let message = next
            .map_err(|_| Failure::Unanswered)?
            .map_err(Failure::of)?
            .ok_or(ProtocolError::NotPublished)?;
        link.same_life(&message.incarnation)?;
        match message.event {
            Some(Event::Progress(progress)) => {
                if let Some(progress) = read_progress(&progress) {
                    on_progress(progress);
                }
            }
            Some(Event::Published(published)) => {
                return Ok(read_published(link, number, registration, published)?);
            }
            // An event of a newer daemon.
            None => {}
        }
    }
}

fn read_progress(progress: &v1::RegistrationProgress) -> Option<Progress> {
    let stage = match progress.stage() {
        v1::registration_progress::Stage::Preparing => Stage::Preparing,
        v1::registration_progress::Stage::Sealing => Stage::Sealing,
        v1::registration_progress::Stage::Publishing => Stage::Publishing,
        v1::registration_progress::Stage::Unspecified => return None,
    };
    let (layers_done, layers_total) = (progress.layers_done, progress.layers_total);
    Some(Progress { stage, layers_done, layers_total })
}
