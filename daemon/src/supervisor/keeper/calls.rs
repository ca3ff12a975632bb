//! Requests of the link on their way: what was asked, what has been heard so far, and what follows from the answer.

use std::collections::VecDeque;

use statecopy_kernels::cuda::SAME_PROCESS_SUBJECT;
use statecopy_proto::{Refusal, RefusalCode, RegionId, SessionId};

use crate::link::{LinkError, Reply, Request};
use crate::record::{DeviceInspection, Progress, PublishedBinding};

use super::super::device::{Answer, Command};
use super::process::{self, DeviceProcess, StartError};
use super::records::{self, Message, Records};

/// Deaths of the device process under one call after which the call is the suspect.
const DEATHS_MAX: u32 = 2;

/// What a reply means for its call.
pub(super) enum Outcome {
    /// More is to come.
    More,
    /// That was all.
    Final,
}

/// One request that waits for its answer.
#[derive(Debug)]
pub(super) struct Call {
    /// Taken out once it is answered; the shutdown has none.
    command: Option<Command>,
    shutdown: bool,
    pub(super) sent: bool,
    pub(super) id: u64,
    /// What is still to be sent, and whether the answer to what was sent last is awaited.
    parts: VecDeque<Message>,
    awaiting: bool,
    deaths: u32,
    heard: Heard,
}

/// Parts of an answer.
#[derive(Debug, Default)]
struct Heard {
    refused: Option<Refusal>,
    published: Vec<PublishedBinding>,
    found: DeviceInspection,
}

impl Call {
    /// A call for a command of the link; `None` for the others, which go elsewhere.
    pub(super) fn new(command: Command) -> Option<Self> {
        match command {
            Command::Copy(..) | Command::Shutdown(_) => None,
            command => Some(Self::of(Some(command), false)),
        }
    }

    /// The call that ends the device process.
    pub(super) fn shutdown() -> Self {
        Self::of(None, true)
    }

    fn of(command: Option<Command>, shutdown: bool) -> Self {
        Self {
            command,
            shutdown,
            sent: false,
            id: 0,
            parts: VecDeque::new(),
            awaiting: false,
            deaths: 0,
            heard: Heard::default(),
        }
    }

    /// Puts it on its way under that number.
    pub(super) fn begin(&mut self, id: u64) -> Result<(), LinkError> {
        self.parts = self.messages()?.into();
        self.sent = true;
        self.id = id;
        Ok(())
    }

    /// The next message, if it may be sent now.
    pub(super) fn next_part(&mut self) -> Option<Message> {
        if self.awaiting {
            return None;
        }
        self.awaiting = true;
        self.parts.pop_front()
    }

    pub(super) fn is_shutdown(&self) -> bool {
        self.shutdown
    }

    /// The session that it closes, if it closes one.
    pub(super) fn closing(&self) -> Option<SessionId> {
        match &self.command {
            Some(Command::CloseSession(session, _)) => Some(*session),
            _ => None,
        }
    }

    /// The messages that ask it.
    fn messages(&self) -> Result<Vec<Message>, LinkError> {
        let plain = |request| Ok(vec![(request, Vec::new())]);
        match &self.command {
            None | Some(Command::Copy(..) | Command::Shutdown(_)) => {
                Ok(vec![super::shutdown_message()])
            }
            Some(Command::OpenSession(session, ring, _)) => {
                Ok(vec![records::open(*session, ring, self.deaths > 0)])
            }
            Some(Command::ImportRegion(session, region, _)) => {
                Ok(records::import(*session, region))
            }
            Some(Command::DropRegion(session, region, _)) => {
                plain(Request::DropRegion { session: *session, region: *region })
            }
            Some(Command::Register(session, registration, ..)) => {
                records::register(*session, registration, false)
            }
            Some(Command::Rebind(session, moves, _)) => records::rebind(*session, moves),
            Some(Command::ReleaseLayers(session, _)) => {
                plain(Request::ReleaseLayers { session: *session })
            }
            Some(Command::ArmGraph(session, slot, _)) => records::arm(*session, [slot], false),
            Some(Command::DisarmGraph(session, pair, _)) => {
                plain(Request::DisarmGraph { session: *session, pair: pair.get() })
            }
            Some(Command::CloseSession(session, _)) => {
                plain(Request::CloseSession { session: *session })
            }
            Some(Command::Drain(_)) => plain(Request::Drain),
            Some(Command::Inspect(_)) => plain(Request::Inspect),
        }
    }

    /// Takes a reply in.
    pub(super) fn hear(&mut self, reply: Reply) -> Result<Outcome, LinkError> {
        match reply {
            Reply::Done => Ok(Outcome::Final),
            Reply::Taken if self.parts.is_empty() => {
                Err(LinkError::OutOfTurn("it wants more than there is"))
            }
            Reply::Taken => {
                self.awaiting = false;
                Ok(Outcome::More)
            }
            Reply::Refused(refusal) => {
                self.heard.refused = Some(refusal.try_into()?);
                Ok(Outcome::Final)
            }
            Reply::Progress { stage, layers_done, layers_total } => {
                if let Some(Command::Register(_, _, progress, _)) = &self.command {
                    // A client that does not read its progress misses some of it.
                    let stage = stage.into();
                    progress.try_send(Progress { stage, layers_done, layers_total }).ok();
                }
                Ok(Outcome::More)
            }
            Reply::Published { bindings, last } => {
                self.heard.published.extend(bindings.into_iter().map(PublishedBinding::from));
                Ok(if last { Outcome::Final } else { Outcome::More })
            }
            Reply::Inspected { findings, last } => {
                for finding in findings {
                    self.heard.found.take(finding)?;
                }
                Ok(if last { Outcome::Final } else { Outcome::More })
            }
            Reply::DeviceFailed { reason } => Err(LinkError::DeviceFailed(reason)),
            Reply::RingBroken { .. } => Err(LinkError::OutOfTurn("news as an answer")),
            Reply::Ready { .. } | Reply::Told(_) => {
                Err(LinkError::OutOfTurn("it was ready before"))
            }
        }
    }

    /// Whether it was refused for the number of its device process: another one may do it. Asked once.
    pub(super) fn wants_another_process(&self) -> bool {
        let refused = self.heard.refused.as_ref();
        self.deaths == 0
            && matches!(self.command, Some(Command::ImportRegion(..)))
            && refused.is_some_and(|refusal| refusal.subject() == SAME_PROCESS_SUBJECT)
    }

    /// Writes down what the answer changed, and passes it on.
    pub(super) fn finish(self, records: &mut Records) {
        let Self { command, heard, parts, .. } = self;
        let Heard { refused, published, found } = heard;
        let done = refused.map_or(Ok(()), Err);
        let accepted = done.is_ok();
        match command {
            None | Some(Command::Copy(..) | Command::Shutdown(_)) => {}
            Some(Command::OpenSession(session, ring, answer)) => {
                if accepted {
                    records.open(session, ring);
                }
                drop(answer.send(done));
            }
            Some(Command::ImportRegion(session, region, answer)) => {
                // Before the answer: whoever waits for it closes the descriptors of a refused region, where that may take long.
                if accepted {
                    records.add_region(session, region);
                } else {
                    drop((region, parts));
                }
                drop(answer.send(done));
            }
            Some(Command::DropRegion(session, region, answer)) => {
                records.drop_region(session, region);
                drop(answer.send(done));
            }
            Some(Command::Register(session, registration, _, answer)) => {
                if accepted {
                    records.publish(session, registration);
                } else {
                    records.withdraw(session);
                }
                drop(answer.send(done.map(|()| published)));
            }
            Some(Command::Rebind(session, moves, answer)) => {
                if accepted {
                    records.rebind(session, &moves);
                }
                drop(answer.send(done));
            }
            Some(Command::ReleaseLayers(session, answer)) => {
                records.withdraw(session);
                drop(answer.send(done));
            }
            Some(Command::ArmGraph(session, slot, answer)) => {
                if accepted {
                    records.arm(session, slot);
                }
                drop(answer.send(done));
            }
            Some(Command::DisarmGraph(session, pair, answer)) => {
                records.disarm(session, pair);
                drop(answer.send(done));
            }
            Some(Command::CloseSession(session, answer)) => {
                records.close(session);
                drop(answer.send(done));
            }
            Some(Command::Drain(answer)) => drop(answer.send(done)),
            Some(Command::Inspect(answer)) => drop(answer.send(done.map(|()| found))),
        }
    }

    /// The device process died under it: it is asked again, unless it is the second time. A session is closed however often:
    /// the next device process is not told of it, and nobody would ask again.
    pub(super) fn survived_death(&mut self) {
        self.heard = Heard::default();
        self.parts.clear();
        self.awaiting = false;
        self.deaths += 1;
        if self.deaths >= DEATHS_MAX && self.closing().is_none() {
            let sentence = "The device process died twice while it was doing this";
            self.refuse(&Refusal::new(RefusalCode::PrepareFailed, sentence));
        }
    }

    /// Whether it has been answered by [`Call::survived_death`].
    pub(super) fn is_spent(&self) -> bool {
        self.command.is_none() && !self.shutdown
    }

    /// There will be no device process any more.
    pub(super) fn abandon(mut self) {
        let sentence = "The device process is gone and is not started again";
        self.refuse(&Refusal::new(RefusalCode::Unavailable, sentence));
    }

    /// Too many calls wait.
    pub(super) fn overloaded(mut self) {
        let sentence = "Too many requests wait for the device process";
        self.refuse(&Refusal::new(RefusalCode::Overloaded, sentence));
    }

    fn refuse(&mut self, refusal: &Refusal) {
        fn send<T>(answer: Answer<T>, refusal: &Refusal) {
            drop(answer.send(Err(refusal.clone())));
        }
        match self.command.take() {
            None => {}
            Some(Command::Copy(_, answer)) => send(answer, refusal),
            Some(Command::Register(_, _, _, answer)) => send(answer, refusal),
            Some(Command::Inspect(answer)) => send(answer, refusal),
            Some(
                Command::OpenSession(_, _, answer)
                | Command::ImportRegion(_, _, answer)
                | Command::DropRegion(_, _, answer)
                | Command::Rebind(_, _, answer)
                | Command::ReleaseLayers(_, answer)
                | Command::ArmGraph(_, _, answer)
                | Command::DisarmGraph(_, _, answer)
                | Command::CloseSession(_, answer)
                | Command::Drain(answer)
                | Command::Shutdown(answer),
            ) => send(answer, refusal),
        }
    }
}

/// What a new device process had to say to the records.
#[derive(Debug, Default)]
pub(super) struct Replayed {
    /// Sessions whose layers were refused; their regions stay.
    pub(super) refused: Vec<(SessionId, Refusal)>,
    /// Regions whose memory is gone; layers in them sleep.
    pub(super) lost: Vec<(SessionId, RegionId, Refusal)>,
    /// Rings that broke while no device process looked at them, or that this one cannot serve, and why. It serves the others all
    /// the same.
    pub(super) broken: Vec<(SessionId, String)>,
}

/// What a record is of that a new device process is told.
#[derive(Debug, Clone, Copy)]
enum About {
    Region(RegionId),
    Layers,
    Ring,
    Graphs,
}

impl About {
    fn of(first: Option<&Message>) -> Self {
        match first {
            Some((Request::ImportRegion { region, .. }, _)) => Self::Region(*region),
            Some((Request::OpenSession { .. }, _)) => Self::Ring,
            Some((Request::ArmGraphs { .. }, _)) => Self::Graphs,
            _ => Self::Layers,
        }
    }
}

/// Tells a new device process one of the requests of the records again.
pub(super) async fn replay(
    process: &mut DeviceProcess,
    session: SessionId,
    messages: Vec<Message>,
    replayed: &mut Replayed,
) -> Result<(), StartError> {
    let id = process.next_id();
    let about = About::of(messages.first());
    let mut call = Call { parts: messages.into(), ..Call::of(None, true) };
    loop {
        if let Some(part) = call.next_part() {
            process.send(id, &part).await?;
        }
        let (answered, reply) = process::receive(&process.link).await?;
        if let Reply::RingBroken { session, reason } = reply {
            replayed.broken.push((session, reason));
            continue;
        }
        if answered != id {
            return Err(LinkError::OutOfTurn("an answer that nobody waits for").into());
        }
        if matches!(call.hear(reply)?, Outcome::Final) {
            break;
        }
    }
    match (call.heard.refused, about) {
        (Some(refusal), About::Region(region)) => {
            replayed.lost.push((session, region, refusal));
        }
        // Nobody serves it: its worker must hear of it, or waits for ever.
        (Some(refusal), About::Ring) => {
            replayed.broken.push((session, refusal.sentence().to_owned()));
        }
        (Some(refusal), About::Layers) => replayed.refused.push((session, refusal)),
        // Graphs are refused with their ring, of which the worker hears.
        (Some(_), About::Graphs) | (None, _) => {}
    }
    Ok(())
}
