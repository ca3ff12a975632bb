//! The seam between a copy and what carries it.
//!
//! A [`Carrier`] is given copies whose ids belong to its own session, and answers each: over the session's ring, or over
//! gRPC.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use statecopy_kernels::device::Moved;
use statecopy_proto::{
    BindingId, DataType, Direction, IndexWidth, Lane, MESSAGE_BYTES_MAX, Refusal, RegionId,
    SessionId, SignatureHash, v1,
};
use statecopy_session::{CopyRequest, FlagSource, IndexSource, Indices, MonotonicNs, Packed};
use tonic::transport::Channel;
use v1::copy_service_client::CopyServiceClient;

use crate::call::{Call, Failure};
use crate::error::ProtocolError;
use crate::lanes::Lanes;
use crate::ring::{Held, RingCopies, TaskFlight};
use crate::sync::{AtomicU64, Ordering};

/// A copy as one session of the daemon understands it.
#[derive(Debug)]
pub(crate) struct ResolvedCopy<'a> {
    pub(crate) direction: Direction,
    pub(crate) binding: BindingId,
    pub(crate) signature: SignatureHash,
    pub(crate) selected: u64,
    pub(crate) indices: ResolvedIndices<'a>,
    pub(crate) flags: ResolvedFlags<'a>,
    pub(crate) packed: ResolvedSlice,
    pub(crate) packed_dtype: DataType,
    pub(crate) packed_bytes: u64,
    /// How long it may wait for its start.
    pub(crate) deadline: Duration,
    pub(crate) lane: Lane,
    /// What its plan allows.
    pub(crate) max_selected: u64,
    /// The memory that it touches.
    pub(crate) held: Held,
}

/// A place in a region of the session.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResolvedSlice {
    pub(crate) region: RegionId,
    pub(crate) offset: u64,
}

#[derive(Debug)]
pub(crate) enum ResolvedIndices<'a> {
    Int32(&'a [i32]),
    Int64(&'a [i64]),
    Shared(IndexWidth, ResolvedSlice),
}

#[derive(Debug)]
pub(crate) enum ResolvedFlags<'a> {
    None,
    Inline(&'a [u8]),
    Shared(ResolvedSlice),
}

/// What carries the copies of one session.
#[derive(Debug)]
pub(crate) enum Carrier {
    Ring(RingCopies),
    Grpc(GrpcCopies),
}

impl Carrier {
    /// The lanes of the session, where it has any.
    pub(crate) fn lanes(&self) -> Option<&Arc<Lanes>> {
        match self {
            Self::Ring(ring) => ring.lanes(),
            Self::Grpc(_) => None,
        }
    }

    /// Whether a copy was not answered yet, whoever waits for it.
    pub(crate) fn has_unanswered(&self) -> bool {
        match self {
            Self::Ring(ring) => ring.has_unanswered(),
            Self::Grpc(grpc) => grpc.unanswered.any(),
        }
    }

    /// Whether a copy that nobody waits for any more was not answered yet. Over gRPC it is not known who waits.
    pub(crate) fn has_given_up(&self) -> bool {
        match self {
            Self::Ring(ring) => ring.has_given_up(),
            Self::Grpc(grpc) => grpc.unanswered.any(),
        }
    }

    /// One copy, answered.
    pub(crate) async fn copy(
        &self,
        start: &Call,
        whole: &Call,
        copy: ResolvedCopy<'_>,
    ) -> Result<Moved, Failure> {
        match self {
            Self::Ring(ring) => ring.submit_task(copy, start).await?.wait(whole).await,
            Self::Grpc(grpc) => grpc.copy(*whole, copy).await,
        }
    }

    /// Several copies in order, each answered by itself.
    pub(crate) async fn copy_many(
        &self,
        start: &Call,
        whole: &Call,
        copies: Vec<ResolvedCopy<'_>>,
    ) -> Result<Vec<Result<Moved, Refusal>>, Failure> {
        match self {
            Self::Ring(ring) => copy_many_on(ring, start, whole, copies).await,
            Self::Grpc(grpc) => grpc.copy_many(whole, copies).await,
        }
    }
}

/// As many in flight as there are places.
async fn copy_many_on(
    ring: &RingCopies,
    start: &Call,
    whole: &Call,
    copies: Vec<ResolvedCopy<'_>>,
) -> Result<Vec<Result<Moved, Refusal>>, Failure> {
    let mut answers: Vec<Option<Result<Moved, Refusal>>> = vec![None; copies.len()];
    let mut flying: VecDeque<(usize, TaskFlight)> = VecDeque::new();
    for (at, copy) in copies.into_iter().enumerate() {
        if flying.len() == ring.slots()
            && let Some((at, flight)) = flying.pop_front()
        {
            answers[at] = Some(each(flight.wait(whole).await)?);
        }
        match ring.submit_task(copy, start).await {
            Ok(flight) => flying.push_back((at, flight)),
            Err(failure) => answers[at] = Some(each(Err(failure))?),
        }
    }
    for (at, flight) in flying {
        answers[at] = Some(each(flight.wait(whole).await)?);
    }
    Ok(answers.into_iter().flatten().collect())
}

impl ResolvedCopy<'_> {
    /// The copy as a session memory carries it, with no deadline.
    pub(crate) fn request(&self, session: SessionId) -> CopyRequest {
        let (width, source) = match self.indices {
            ResolvedIndices::Int32(_) => (IndexWidth::Int32, IndexSource::Inline),
            ResolvedIndices::Int64(_) => (IndexWidth::Int64, IndexSource::Inline),
            ResolvedIndices::Shared(width, at) => {
                (width, IndexSource::Shared { region: at.region, offset: at.offset })
            }
        };
        let flags = match &self.flags {
            ResolvedFlags::None => FlagSource::None,
            ResolvedFlags::Inline(_) => FlagSource::Inline,
            ResolvedFlags::Shared(at) => {
                FlagSource::Shared { region: at.region, offset: at.offset }
            }
        };
        CopyRequest {
            session,
            binding: self.binding,
            signature: self.signature,
            direction: self.direction,
            selected: self.selected,
            packed: Packed {
                region: self.packed.region,
                offset: self.packed.offset,
                bytes: self.packed_bytes,
                dtype: self.packed_dtype.number(),
            },
            indices: Indices { width, source },
            flags,
            lane: self.lane,
            deadline: MonotonicNs::NEVER,
            submitted_at: MonotonicNs(0),
        }
    }
}

/// A refusal is one copy's; any other failure is all copies'.
pub(crate) fn each(outcome: Result<Moved, Failure>) -> Result<Result<Moved, Refusal>, Failure> {
    match outcome {
        Ok(moved) => Ok(Ok(moved)),
        Err(Failure::Refused(refusal)) => Ok(Err(refusal)),
        Err(failure) => Err(failure),
    }
}

/// Copies over `CopyService`.
#[derive(Debug)]
pub(crate) struct GrpcCopies {
    stub: CopyServiceClient<Channel>,
    session: v1::SessionRef,
    unanswered: Unanswered,
}

/// Counts calls that were sent and of which it is not known what became.
#[derive(Debug, Clone, Default)]
struct Unanswered(Arc<AtomicU64>);

impl Unanswered {
    /// Counts a call until its outcome is known: one that is dropped half-way stays counted.
    async fn until_known<T>(
        self,
        call: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        // SYNC: a count and nothing more; whoever reads it asks again.
        self.0.fetch_add(1, Ordering::Relaxed);
        let outcome = call.await;
        if !matches!(&outcome, Err(failure) if failure.is_unknown()) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
        outcome
    }

    fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl GrpcCopies {
    pub(crate) fn new(channel: Channel, session: v1::SessionRef) -> Self {
        let stub = CopyServiceClient::new(channel)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        Self { stub, session, unanswered: Unanswered::default() }
    }

    /// One copy, answered. What it sends is owned, so that it need not be awaited where it was asked for.
    pub(crate) fn copy(
        &self,
        call: Call,
        copy: ResolvedCopy<'_>,
    ) -> impl Future<Output = Result<Moved, Failure>> + Send + use<> {
        let direction = copy.direction;
        let message = message(&copy, Some(self.session.clone()));
        let held = copy.held;
        let session = self.session.clone();
        let (mut stub, unanswered) = (self.stub.clone(), self.unanswered.clone());
        async move {
            let request = call.request(message)?;
            let reply = match direction {
                Direction::Gather => {
                    unanswered.until_known(call.answer(stub.gather(request))).await?
                }
                Direction::Scatter => {
                    unanswered.until_known(call.answer(stub.scatter(request))).await?
                }
            };
            drop(held);
            same_life(&session, &reply.incarnation)?;
            Ok(read_moved(&reply))
        }
    }

    async fn copy_many(
        &self,
        call: &Call,
        copies: Vec<ResolvedCopy<'_>>,
    ) -> Result<Vec<Result<Moved, Refusal>>, Failure> {
        let wanted = copies.len();
        let copies = copies
            .into_iter()
            .map(|copy| v1::DirectedCopy {
                direction: direction_message(copy.direction).into(),
                copy: Some(message(&copy, None)),
            })
            .collect();
        let request =
            call.request(v1::CopyManyRequest { session: Some(self.session.clone()), copies })?;
        let mut stub = self.stub.clone();
        let unanswered = self.unanswered.clone();
        let reply = unanswered.until_known(call.answer(stub.copy_many(request))).await?;
        same_life(&self.session, &reply.incarnation)?;
        if reply.answers.len() != wanted {
            let given = reply.answers.len();
            return Err(ProtocolError::Answers { given, wanted }.into());
        }
        reply.answers.into_iter().map(read_answer).collect()
    }
}

fn same_life(session: &v1::SessionRef, incarnation: &[u8]) -> Result<(), Failure> {
    if incarnation == session.incarnation {
        return Ok(());
    }
    Err(ProtocolError::Incarnation.into())
}

fn read_moved(reply: &v1::CopyReply) -> Moved {
    Moved { copied: reply.rows_copied, masked: reply.rows_masked }
}

fn read_answer(answer: v1::CopyAnswer) -> Result<Result<Moved, Refusal>, Failure> {
    match answer.answer {
        Some(v1::copy_answer::Answer::Done(reply)) => Ok(Ok(read_moved(&reply))),
        Some(v1::copy_answer::Answer::Refused(refusal)) => Refusal::from_message(refusal)
            .map(Err)
            .map_err(|_| ProtocolError::Field("CopyAnswer.refused.code").into()),
        None => Err(ProtocolError::Field("CopyAnswer.answer").into()),
    }
}

pub(crate) fn direction_message(direction: Direction) -> v1::Direction {
    match direction {
        Direction::Gather => v1::Direction::Gather,
        Direction::Scatter => v1::Direction::Scatter,
    }
}

pub(crate) fn message(copy: &ResolvedCopy<'_>, session: Option<v1::SessionRef>) -> v1::CopyRequest {
    use v1::copy_request::{Flags, Indices};

    let indices = match copy.indices {
        ResolvedIndices::Int32(values) => {
            Indices::Int32(v1::Int32Indices { values: values.to_vec() })
        }
        ResolvedIndices::Int64(values) => {
            Indices::Int64(v1::Int64Indices { values: values.to_vec() })
        }
        ResolvedIndices::Shared(width, at) => {
            let width = match width {
                IndexWidth::Int32 => v1::IndexType::IndexInt32,
                IndexWidth::Int64 => v1::IndexType::IndexInt64,
            };
            Indices::Shared(v1::SharedIndices { r#type: width.into(), at: Some(slice(at)) })
        }
    };
    let flags = match copy.flags {
        ResolvedFlags::None => None,
        ResolvedFlags::Inline(flags) => Some(Flags::InlineFlags(flags.to_vec())),
        ResolvedFlags::Shared(at) => Some(Flags::SharedFlags(slice(at))),
    };
    v1::CopyRequest {
        session,
        binding_id: copy.binding.0,
        signature: copy.signature.0,
        selected: copy.selected,
        indices: Some(indices),
        flags,
        packed: Some(slice(copy.packed)),
        packed_dtype: copy.packed_dtype.to_message().into(),
        packed_bytes: copy.packed_bytes,
        deadline_ms: milliseconds(copy.deadline),
        lane: copy.lane.0,
    }
}

fn slice(at: ResolvedSlice) -> v1::RegionSlice {
    v1::RegionSlice { region_id: at.region.0, offset_bytes: at.offset }
}

/// Whole milliseconds, at least one: 0 would be the daemon's default.
fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX).max(1)
}
