//! The preparing thread's loop: one request of the supervisor at a time.

use std::os::fd::OwnedFd;

use statecopy_descriptors::{Connection, Doorbell, MESSAGE_BYTES_MAX};
use statecopy_kernels::device::Device;
use statecopy_proto::{Incarnation, Refusal, SessionId};
use statecopy_session::{Identity, LayoutError, PairNumber, Parameters, SessionMemory};

use crate::link::{self, FindingMessage, LinkError, PIECES_A_PART, Reply, Request};
use crate::record::{
    Progress, RebindRecord, RegistrationRecord, RingInspection, SetRecord, SlotRecord,
};

use super::preparer::Preparer;
use super::reply;

/// The most descriptors that a request brings.
const REQUEST_DESCRIPTORS: usize = PIECES_A_PART;

/// A request that came in parts and is not complete.
#[derive(Debug, Default)]
struct Parts {
    registration: RegistrationRecord,
    moves: Vec<RebindRecord>,
    slots: Vec<SlotRecord>,
}

/// Serves until the supervisor asks for the end.
///
/// # Errors
/// When the link fails: it is closed when the supervisor dies.
pub(super) fn serve<D: Device>(
    link: &Connection,
    preparer: &mut Preparer<D>,
) -> Result<(), LinkError> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let mut parts = Parts::default();
    loop {
        let received = link.receive(&mut bytes, REQUEST_DESCRIPTORS)?;
        let message = link::decode::<Request>(&bytes[..received.bytes])?;
        let id = message.id;
        if matches!(message.body, Request::Shutdown) {
            preparer.end();
            return reply(link, id, Reply::Done);
        }
        let answers = answer(link, id, preparer, &mut parts, message.body, received.descriptors)?;
        let lost = answers.iter().find_map(device_lost);
        for answer in answers {
            reply(link, id, answer)?;
        }
        if let Some(reason) = lost {
            preparer.fail(&reason);
        }
    }
}

/// Why nothing more can be asked of the device, if a request met that.
fn device_lost(answer: &Reply) -> Option<String> {
    match answer {
        Reply::Refused(refusal) => refusal.device_lost().map(str::to_owned),
        _ => None,
    }
}

fn answer<D: Device>(
    link: &Connection,
    id: u64,
    preparer: &mut Preparer<D>,
    parts: &mut Parts,
    request: Request,
    descriptors: Vec<OwnedFd>,
) -> Result<Vec<Reply>, LinkError> {
    match request {
        Request::Start(_) => Err(LinkError::OutOfTurn("a second start")),
        Request::Shutdown => Ok(Vec::new()),
        Request::ImportRegion { session, region, announced, pieces, last } => {
            let pieces = link::join(pieces, descriptors)?;
            let taken = preparer.import_part((session, region), announced.into(), pieces, last);
            Ok(if last || taken.is_err() { done(taken) } else { vec![Reply::Taken] })
        }
        Request::OpenSession { session, slots, inline_bytes, lane_slots, resumed } => {
            let sizes = Parameters::new(slots, inline_bytes)
                .and_then(|parameters| parameters.with_lanes(lane_slots));
            let (memory, bell) = open_memory(session, sizes, exactly(descriptors)?)?;
            Ok(done(preparer.open_session(session, &memory, bell, resumed)))
        }
        Request::DropRegion { session, region } => Ok(done(preparer.drop_region(session, region))),
        Request::Register { session, layers, sets, last, resumed } => {
            parts.registration.layers.extend(parsed(layers)?);
            parts.registration.sets.extend(sets.into_iter().map(SetRecord::from));
            if !last {
                return Ok(vec![Reply::Taken]);
            }
            let registration = std::mem::take(&mut parts.registration);
            if resumed {
                return Ok(done(preparer.restore(session, registration)));
            }
            register(link, id, preparer, session, registration)
        }
        Request::Rebind { session, layers, last } => {
            parts.moves.extend(parsed(layers)?);
            Ok(match last {
                false => vec![Reply::Taken],
                true => done(preparer.rebind(session, &std::mem::take(&mut parts.moves))),
            })
        }
        Request::ArmGraphs { session, slots, last, resumed } => {
            parts.slots.extend(parsed::<_, SlotRecord>(slots)?);
            Ok(match last {
                false => vec![Reply::Taken],
                true => done(preparer.arm(session, std::mem::take(&mut parts.slots), resumed)),
            })
        }
        Request::DisarmGraph { session, pair } => {
            Ok(done(preparer.disarm(session, pair_of(pair)?)))
        }
        Request::Drain => Ok(done(preparer.drain())),
        Request::ReleaseLayers { session } => Ok(done(preparer.withdraw(session))),
        Request::CloseSession { session } => Ok(done(preparer.close_session(session))),
        Request::Inspect => {
            let inspection = preparer.inspect();
            let mut findings = Vec::new();
            for plan in inspection.plans {
                findings.push(FindingMessage::Plan(plan.try_into()?));
            }
            findings.extend(inspection.rings.into_iter().map(|ring| {
                let RingInspection { session, copies, refusals } = ring;
                FindingMessage::Ring { session, copies, refusals }
            }));
            in_parts(findings, |findings, last| Reply::Inspected { findings, last })
        }
    }
}

fn pair_of(number: u32) -> Result<PairNumber, LinkError> {
    PairNumber::of_graph(number).ok_or(LinkError::OutOfTurn("a pair that no graph has"))
}

/// The records of one part.
fn parsed<M, R>(messages: Vec<M>) -> Result<Vec<R>, LinkError>
where
    R: TryFrom<M, Error = LinkError>,
{
    messages.into_iter().map(R::try_from).collect()
}

/// Maps a worker's session memory.
fn open_memory(
    session: SessionId,
    sizes: Result<Parameters, LayoutError>,
    [memory, executor_bell]: [OwnedFd; 2],
) -> Result<(SessionMemory, Doorbell), LinkError> {
    let broken = |_| LinkError::OutOfTurn("a ring that cannot be mapped");
    let sizes = sizes.map_err(|_| LinkError::OutOfTurn("sizes that are no ring's"))?;
    let identity = Identity { incarnation: Incarnation::new([0; 16]), session };
    let memory = SessionMemory::attach(memory, sizes, identity).map_err(broken)?;
    let bell = Doorbell::from_fd(executor_bell).map_err(|_| LinkError::OutOfTurn("no doorbell"))?;
    Ok((memory, bell))
}

fn exactly<const N: usize>(descriptors: Vec<OwnedFd>) -> Result<[OwnedFd; N], LinkError> {
    let wrong = |_| LinkError::OutOfTurn("a request without its descriptors");
    descriptors.try_into().map_err(wrong)
}

fn register<D: Device>(
    link: &Connection,
    id: u64,
    preparer: &mut Preparer<D>,
    session: SessionId,
    registration: RegistrationRecord,
) -> Result<Vec<Reply>, LinkError> {
    let mut lost = None;
    let mut progress = |progress: Progress| {
        if let Err(error) = reply(link, id, progress.into()) {
            lost = Some(error);
        }
    };
    let outcome = preparer.register(session, registration, &mut progress);
    match (lost, outcome) {
        (Some(error), _) => Err(error),
        (None, Err(refusal)) => Ok(vec![Reply::Refused((&refusal).into())]),
        (None, Ok(published)) => {
            let bindings = published.into_iter().map(Into::into).collect();
            in_parts(bindings, |bindings, last| Reply::Published { bindings, last })
        }
    }
}

fn in_parts<T: serde::Serialize>(
    items: Vec<T>,
    reply: impl Fn(Vec<T>, bool) -> Reply,
) -> Result<Vec<Reply>, LinkError> {
    let parts = link::chunks(items)?;
    let last_at = parts.len() - 1;
    Ok(parts.into_iter().enumerate().map(|(at, part)| reply(part, at == last_at)).collect())
}

fn done(outcome: Result<(), Refusal>) -> Vec<Reply> {
    vec![match outcome {
        Ok(()) => Reply::Done,
        Err(refusal) => Reply::Refused((&refusal).into()),
    }]
}
