//! One copy: its operands made ready, asked for, and what comes of it.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use statecopy_client::blocking::{InFlight, Plan};
use statecopy_client::sharing::Buffer;
use statecopy_client::{Direction, Error, Leaves, Moved, Request, Slice};
use statecopy_kernels::cuda::StreamLook;

use crate::errors;
use crate::operands::{Asker, FlagOperand, IndexOperand, Shared};
use crate::plan::Published;
use crate::session::{Completion, Session, lane_of_this_thread};
use crate::streams::Ask;
use crate::view::View;

/// How a call wants its copy carried out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manner {
    pub(crate) lane: Option<u32>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) completion: Completion,
}

impl Manner {
    /// # Errors
    /// ArgumentError for a lane or a time that is none.
    pub(crate) fn new(
        py: Python<'_>,
        lane: Option<i64>,
        timeout_s: Option<f64>,
        completion: Completion,
    ) -> PyResult<Self> {
        if lane.is_some() && completion == Completion::Stream {
            return Err(errors::lane_of_stream(py));
        }
        let lane = lane.map(|number| lane_of(py, number)).transpose()?;
        let deadline = timeout_s.map(|seconds| seconds_of(py, "timeout_s", seconds)).transpose()?;
        Ok(Self { lane, deadline, completion })
    }
}

fn lane_of(py: Python<'_>, number: i64) -> PyResult<u32> {
    u32::try_from(number).map_err(|_| {
        let message = format!("{number} was given; a number from 0 to {} is needed", u32::MAX);
        errors::argument(py, "lane", None, &message)
    })
}

/// # Errors
/// ArgumentError for a number that is no time.
pub(crate) fn seconds_of(py: Python<'_>, name: &str, seconds: f64) -> PyResult<Duration> {
    time_of(py, name, seconds, seconds, "seconds")
}

/// # Errors
/// As [`seconds_of`].
pub(crate) fn micros_of(py: Python<'_>, name: &str, micros: f64) -> PyResult<Duration> {
    time_of(py, name, micros, micros / 1e6, "microseconds")
}

fn time_of(py: Python<'_>, name: &str, given: f64, seconds: f64, unit: &str) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        let message = format!("{given} was given; a finite number of {unit}, 0 or more, is needed");
        errors::argument(py, name, None, &message)
    })
}

/// A copy whose operands are ready.
#[derive(Debug)]
pub(crate) struct Prepared {
    session: Arc<Session>,
    plan: Plan,
    direction: Direction,
    indices: IndexOperand,
    flags: Option<FlagOperand>,
    packed: Packed,
    manner: Manner,
    stream: u64,
    /// The stream in whose order it is.
    order: Option<StreamLook>,
}

/// The packed side of a copy.
#[derive(Debug)]
enum Packed {
    /// A scatter reads it.
    Source(Shared),
    /// A gather writes a buffer of the pool, which becomes a tensor of that shape.
    Pooled(Arc<Buffer>, Vec<u64>),
    /// A gather writes a tensor where it lies: the caller's own, or one that was made for it.
    InPlace(Shared),
    /// A gather writes a buffer of the pool, which is then copied to the caller's own tensor.
    CopiedBack(Arc<Buffer>, Vec<u64>, View, Py<PyAny>),
}

impl Packed {
    fn slice(&self) -> Slice {
        match self {
            Self::Source(shared) | Self::InPlace(shared) => shared.slice.clone(),
            Self::Pooled(buffer, _) | Self::CopiedBack(buffer, ..) => buffer.slice().clone(),
        }
    }

    fn buffer(&self) -> Option<&Arc<Buffer>> {
        match self {
            Self::Source(shared) | Self::InPlace(shared) => shared.copied_to.as_ref(),
            Self::Pooled(buffer, _) | Self::CopiedBack(buffer, ..) => Some(buffer),
        }
    }
}

impl Prepared {
    /// # Errors
    /// ArgumentError for an operand that does not fit; what sharing it says.
    pub(crate) fn gather(
        py: Python<'_>,
        session: &Arc<Session>,
        published: &Published,
        arguments: (&Bound<'_, PyAny>, &Bound<'_, PyAny>, &Bound<'_, PyAny>),
        manner: Manner,
    ) -> PyResult<Self> {
        let asker = asker(py, session, published, manner.completion)?;
        Self::gather_of(py, session, asker, arguments, manner)
            .map_err(|error| session.explain(py, asker.order, error))
    }

    fn gather_of(
        py: Python<'_>,
        session: &Arc<Session>,
        asker: Asker<'_>,
        (indices, flags, out): (&Bound<'_, PyAny>, &Bound<'_, PyAny>, &Bound<'_, PyAny>),
        manner: Manner,
    ) -> PyResult<Self> {
        let published = asker.published;
        let indices = asker.indices(indices)?;
        let selected = indices.selected();
        let beside = indices.shared().map(|shared| &shared.slice);
        let flags = Asker { beside, ..asker }.flags(flags, selected)?;
        let shape = published.packed_shape(selected);
        let bytes = published.plan.packed_bytes(selected);
        let given = if out.is_none() { None } else { Some(asker.packed_out(out, &shape)?) };
        let packed = match given {
            Some((_, Some(shared))) => Packed::InPlace(shared),
            Some((view, None)) => {
                let buffer = asker.take(py, bytes)?;
                Packed::CopiedBack(buffer, shape, view, out.clone().unbind())
            }
            None => match asker.made(py, &shape, bytes)? {
                Some(made) => Packed::InPlace(made),
                None => Packed::Pooled(asker.take(py, bytes)?, shape),
            },
        };
        let (session, plan, direction) =
            (Arc::clone(session), published.plan.clone(), Direction::Gather);
        let (stream, order) = (asker.stream, asker.order);
        Ok(Self { session, plan, direction, indices, flags, packed, manner, stream, order })
    }

    /// # Errors
    /// ArgumentError for an operand that does not fit; what sharing it says.
    pub(crate) fn scatter(
        py: Python<'_>,
        session: &Arc<Session>,
        published: &Published,
        arguments: (&Bound<'_, PyAny>, &Bound<'_, PyAny>),
        manner: Manner,
    ) -> PyResult<Self> {
        let asker = asker(py, session, published, manner.completion)?;
        Self::scatter_of(session, asker, arguments, manner)
            .map_err(|error| session.explain(py, asker.order, error))
    }

    fn scatter_of(
        session: &Arc<Session>,
        asker: Asker<'_>,
        (packed, indices): (&Bound<'_, PyAny>, &Bound<'_, PyAny>),
        manner: Manner,
    ) -> PyResult<Self> {
        let published = asker.published;
        let indices = asker.indices(indices)?;
        let shape = published.packed_shape(indices.selected());
        let packed = Packed::Source(asker.packed_in(packed, &shape)?);
        let (session, plan, direction) =
            (Arc::clone(session), published.plan.clone(), Direction::Scatter);
        let (stream, order) = (asker.stream, asker.order);
        Ok(Self { session, plan, direction, indices, flags: None, packed, manner, stream, order })
    }

    fn request(&self) -> Request<'_> {
        let lane = self.manner.lane.unwrap_or_else(lane_of_this_thread);
        let mut request = Request::new(self.indices.as_request(), self.packed.slice()).lane(lane);
        if let Some(flags) = &self.flags {
            request = request.flags(flags.as_request());
        }
        match self.manner.deadline {
            Some(deadline) => request.deadline(deadline),
            None => request,
        }
    }

    /// Asks, waits, and gives what the call returns.
    ///
    /// # Errors
    /// What the daemon or the client says.
    pub(crate) fn run<'py>(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(look) = self.order {
            return self.run_in_order(py, look);
        }
        self.session.synchronise(py, self.stream)?;
        // Nobody is waited for, and the interpreter's lock is kept.
        let started = match self.plan.start(self.direction, self.request()) {
            Ok(started) => started,
            Err(error) => return Err(self.failed(py, &error)),
        };
        // The tensor is made while the device copies.
        let result = self.result(py);
        let outcome = py.detach(|| started.wait());
        self.finish_with(py, outcome, result)
    }

    /// Puts the copy on the caller's stream, and gives what the call returns: what follows on the stream finds its bytes there.
    fn run_in_order<'py>(self, py: Python<'py>, look: StreamLook) -> PyResult<Bound<'py, PyAny>> {
        let Some(streams) = self.session.streams() else { return Err(errors::closed(py)) };
        let (plan, direction, request) = (&self.plan, self.direction, &self.request());
        let ask = Ask { handle: self.stream, stream: look.id, plan, direction, request };
        let put = match &look.capture {
            None => streams.order(py, ask),
            Some(capture) => streams.record(py, ask, capture),
        };
        if let Err(failed) = put {
            if failed.is_unknown() {
                self.abandon();
            }
            return Err(failed.raise(py));
        }
        let result = self.result(py)?;
        self.count();
        // In the stream's order, too.
        self.copied_back(py)?;
        Ok(result)
    }

    /// Asks, to be waited for later.
    ///
    /// # Errors
    /// As [`Prepared::run`].
    pub(crate) fn submit(self, py: Python<'_>) -> PyResult<(Self, InFlight)> {
        self.session.synchronise(py, self.stream)?;
        match py.detach(|| self.plan.submit(self.direction, self.request())) {
            Ok(flight) => Ok((self, flight)),
            Err(error) => Err(self.failed(py, &error)),
        }
    }

    pub(crate) fn is_foreign(&self) -> bool {
        self.session.is_foreign()
    }

    /// What the call returns, once the copy was answered.
    ///
    /// # Errors
    /// The exception of the outcome.
    pub(crate) fn finish<'py>(
        self,
        py: Python<'py>,
        outcome: Result<Moved, Error>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let result = self.result(py);
        self.finish_with(py, outcome, result)
    }

    /// The object that the call returns, whose bytes are those of the copy once it was answered.
    fn result<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.packed {
            Packed::Source(_) => Ok(py.None().into_bound(py)),
            Packed::InPlace(shared) => Ok(shared.owner.bind(py).clone()),
            Packed::Pooled(buffer, shape) => {
                let dtype = self.plan.as_async().dtype();
                self.session.tensor_over(py, Arc::clone(buffer), dtype, shape)
            }
            Packed::CopiedBack(.., out) => Ok(out.bind(py).clone()),
        }
    }

    fn finish_with<'py>(
        self,
        py: Python<'py>,
        outcome: Result<Moved, Error>,
        result: PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Err(error) = outcome {
            // Before the result goes, and its buffer with it.
            return Err(self.failed(py, &error));
        }
        self.count();
        if self.copied_back(py)? {
            // The call returns when the bytes are there.
            self.session.synchronise(py, self.stream)?;
        }
        result
    }

    fn count(&self) {
        let counters = &self.session.counters;
        match self.direction {
            Direction::Gather => counters.gathers.add(1),
            Direction::Scatter => counters.scatters.add(1),
        }
        counters.bytes_moved.add(self.plan.packed_bytes(self.indices.selected()));
    }

    /// Copies what was gathered to the tensor that the caller wants it in, if that was not where it was gathered to. Whether it was
    /// so.
    fn copied_back(&self, py: Python<'_>) -> PyResult<bool> {
        let Packed::CopiedBack(buffer, shape, view, out) = &self.packed else { return Ok(false) };
        let bytes = self.plan.packed_bytes(self.indices.selected());
        let dtype = self.plan.as_async().dtype();
        let buffer = Arc::clone(buffer);
        self.session.copy_back(py, buffer, (dtype, shape), (view, out), bytes)?;
        Ok(true)
    }

    fn failed(&self, py: Python<'_>, error: &Error) -> PyErr {
        if error.leaves() == Leaves::Unknown {
            self.abandon();
        }
        errors::raise(py, error)
    }

    /// The copy may run yet: what it touches is never used for another one.
    pub(crate) fn abandon(&self) {
        let indices = self.indices.shared().and_then(|shared| shared.copied_to.as_ref());
        let flags = self.flags.as_ref().and_then(FlagOperand::shared);
        let flags = flags.and_then(|shared| shared.copied_to.as_ref());
        for buffer in [indices, flags, self.packed.buffer()].into_iter().flatten() {
            buffer.discard();
        }
    }
}

fn asker<'a>(
    py: Python<'_>,
    session: &'a Session,
    published: &'a Published,
    completion: Completion,
) -> PyResult<Asker<'a>> {
    session.check(py)?;
    let stream = session.stream(py)?;
    let order = match completion {
        Completion::Stream => Some(session.look(py, stream)?),
        Completion::Host if session.is_capturing(py, stream)? => return Err(errors::capturing(py)),
        Completion::Host => None,
    };
    Ok(Asker { session, published, stream, order, beside: None })
}
