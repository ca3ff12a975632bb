//! One copy: its operands made ready, asked for, and what comes of it.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use statecopy_client::blocking::{InFlight, Plan};
use statecopy_client::sharing::Buffer;
use statecopy_client::{Direction, Error, Leaves, Moved, Request, Slice};

use crate::errors;
use crate::operands::{Asker, FlagOperand, IndexOperand, Shared};
use crate::plan::Published;
use crate::session::{Session, lane_of_this_thread};
use crate::view::View;

/// How a call wants its copy carried out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manner {
    pub(crate) lane: Option<u32>,
    pub(crate) deadline: Option<Duration>,
}

impl Manner {
    /// # Errors
    /// ArgumentError for a lane or a time that is none.
    pub(crate) fn new(py: Python<'_>, lane: Option<i64>, timeout_s: Option<f64>) -> PyResult<Self> {
        let lane = lane.map(|number| lane_of(py, number)).transpose()?;
        let deadline = timeout_s.map(|seconds| seconds_of(py, "timeout_s", seconds)).transpose()?;
        Ok(Self { lane, deadline })
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
}

/// The packed side of a copy.
#[derive(Debug)]
enum Packed {
    /// A scatter reads it.
    Source(Shared),
    /// A gather writes a buffer of the pool, which becomes a tensor of that shape.
    Pooled(Arc<Buffer>, Vec<u64>),
    /// A gather writes the caller's own tensor, where it lies.
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
        let (indices, flags, out) = arguments;
        let asker = asker(py, session, published)?;
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
                let buffer = session.take(py, bytes, asker.stream)?;
                Packed::CopiedBack(buffer, shape, view, out.clone().unbind())
            }
            None => Packed::Pooled(session.take(py, bytes, asker.stream)?, shape),
        };
        let (session, plan, direction) =
            (Arc::clone(session), published.plan.clone(), Direction::Gather);
        let stream = asker.stream;
        Ok(Self { session, plan, direction, indices, flags, packed, manner, stream })
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
        let (packed, indices) = arguments;
        let asker = asker(py, session, published)?;
        let indices = asker.indices(indices)?;
        let shape = published.packed_shape(indices.selected());
        let packed = Packed::Source(asker.packed_in(packed, &shape)?);
        let (session, plan, direction) =
            (Arc::clone(session), published.plan.clone(), Direction::Scatter);
        let stream = asker.stream;
        Ok(Self { session, plan, direction, indices, flags: None, packed, manner, stream })
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
        let session = &self.session;
        let counters = &session.counters;
        match self.direction {
            Direction::Gather => counters.gathers.add(1),
            Direction::Scatter => counters.scatters.add(1),
        }
        counters.bytes_moved.add(self.plan.packed_bytes(self.indices.selected()));
        if let Packed::CopiedBack(buffer, shape, view, out) = self.packed {
            let bytes = self.plan.packed_bytes(self.indices.selected());
            let dtype = self.plan.as_async().dtype();
            session.copy_back(py, buffer, (dtype, &shape), (&view, &out), bytes)?;
            // The call returns when the bytes are there.
            session.synchronise(py, self.stream)?;
        }
        result
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
) -> PyResult<Asker<'a>> {
    session.check(py)?;
    let stream = session.stream(py)?;
    if session.is_capturing(py, stream)? {
        return Err(errors::capturing(py));
    }
    Ok(Asker { session, published, stream, beside: None })
}
