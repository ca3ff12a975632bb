//! Copies in the order of the caller's streams.
//!
//! ```text
//! a request ──refused: an exception, nothing is on the stream
//!    └─accepted──> the stream is given bell and wait ──> what follows on it finds the bytes
//! ```
//!
//! Each stream has a lane of its own, known by the stream's number: handles come again. A lane belongs to one life of the daemon.
//! One whose copies are all done is replaced unnoticed after it; one that lost a copy stays, and raises, until it is reset.
//!
//! Locks: a lane's is held from the request until its stream was given bell and wait, so that two threads of one stream keep one
//! order. The table's is taken for moments, also with a lane's held; nobody waits for a lane's with the table's or the interpreter's
//! lock held, and nothing of Python is called with either held.

#![expect(unsafe_code, reason = "a stream is known by its raw handle")]

use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use statecopy_client::blocking::{Client, Plan};
use statecopy_client::{
    Direction, Error, LaneWord, Leaves, RefusalCode, Request, StreamLane, Tried,
};
use statecopy_descriptors::Mapping;
use statecopy_kernels::cuda::{CudaGuest, DriverError, GuestWords, StreamOp};
use statecopy_proto::Refusal;

use crate::errors;
use crate::graphs::Graphs;
use crate::lock::lock;

/// For how long the interpreter's lock is kept while the daemon checks a request: many times what it takes.
const PATIENCE: Duration = Duration::from_micros(50);
/// From so many copies ahead on, the driver may make a stream's next one wait: not with the interpreter's lock kept.
const AHEAD: u64 = 64;
/// For how long copies on streams are waited for whose client is gone.
const LEFT_MAX: Duration = Duration::from_secs(60);
/// Between two looks whether copies are done.
const PAUSE: Duration = Duration::from_micros(100);
/// The same where nobody waits for it.
const LOOK: Duration = Duration::from_millis(5);

/// The lanes of one client's streams.
#[derive(Debug)]
pub(crate) struct Streams {
    client: Client,
    guest: CudaGuest,
    table: Mutex<Table>,
    pub(crate) graphs: Graphs,
}

#[derive(Debug, Default)]
struct Table {
    lanes: Vec<Known>,
    /// Counts the uses.
    uses: u64,
    /// The words of each life of the daemon, by the place of their mapping. Those of earlier ones stay: the driver would wait for
    /// every stream of the process before it gives them back.
    words: Vec<(usize, Arc<GuestWords>)>,
}

#[derive(Debug)]
struct Known {
    stream: u64,
    /// The last use.
    used: u64,
    lane: Arc<Mutex<Lane>>,
}

/// The lane of one stream.
#[derive(Debug)]
struct Lane {
    /// The stream's number. Another one where the lane was given away since it was looked for.
    stream: u64,
    lane: StreamLane,
    words: Arc<GuestWords>,
}

/// Why a copy is not on its stream.
#[derive(Debug)]
pub(crate) enum Failed {
    /// It was refused, and the stream goes on.
    Refused(Error),
    /// An earlier copy of the stream was lost.
    Stream(Error),
    /// It was accepted, and the driver did not take it.
    Driver(DriverError),
    /// A graph lost a copy, or can make none any more.
    Graph(Error),
}

impl Failed {
    /// The exception.
    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Refused(error) => errors::raise(py, error),
            Self::Stream(error) => errors::stream_failed(py, error),
            Self::Driver(error) => errors::not_enqueued(py, error),
            Self::Graph(error) => errors::graph_failed(py, error),
        }
    }

    /// Whether what the copy touches may change yet.
    pub(crate) fn is_unknown(&self) -> bool {
        match self {
            Self::Refused(error) => error.leaves() == Leaves::Unknown,
            Self::Stream(_) | Self::Driver(_) | Self::Graph(_) => true,
        }
    }
}

/// One copy, and the stream in whose order it is to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask<'a> {
    /// The stream's handle.
    pub(crate) handle: u64,
    /// The stream's number.
    pub(crate) stream: u64,
    pub(crate) plan: &'a Plan,
    pub(crate) direction: Direction,
    pub(crate) request: &'a Request<'a>,
}

impl Lane {
    /// Gives the stream the bell and the wait of an accepted copy.
    fn enqueue(
        &mut self,
        guest: &CudaGuest,
        handle: u64,
        [bell, done]: [LaneWord; 2],
    ) -> Result<(), Failed> {
        let at = |word: LaneWord| self.words.address(word.offset);
        let operations = [
            StreamOp::Write { at: at(bell), value: bell.value },
            StreamOp::WaitAtLeast { at: at(done), value: done.value },
        ];
        // SAFETY: the caller's current stream, which its library keeps; the words stay shared until every copy is done.
        let enqueued = unsafe { guest.enqueue(handle, &operations) };
        enqueued.map_err(|error| {
            self.lane.distrust();
            Failed::Driver(error)
        })
    }

    /// Whether it is the request that failed, or the stream.
    fn failed(&self, error: Error) -> Failed {
        if self.check().is_err() { Failed::Stream(error) } else { Failed::Refused(error) }
    }
}

impl Streams {
    /// No lane yet.
    pub(crate) fn new(client: &Client, guest: &CudaGuest) -> Self {
        let (client, guest) = (client.clone(), guest.clone());
        Self { client, guest, table: Mutex::default(), graphs: Graphs::default() }
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn guest(&self) -> &CudaGuest {
        &self.guest
    }

    /// Puts a copy on its stream. In steady state nobody but the daemon's check is waited for, and the interpreter's lock is kept.
    ///
    /// # Errors
    /// See [`Failed`].
    pub(crate) fn order(&self, py: Python<'_>, ask: Ask<'_>) -> Result<(), Failed> {
        if let Some(known) = self.known(ask.stream)
            && let Ok(mut lane) = known.try_lock()
            && lane.stream == ask.stream
        {
            match lane.lane.try_order(ask.plan, ask.direction, ask.request, PATIENCE) {
                Ok(Tried::Accepted(words)) if lane.lane.ahead() < AHEAD => {
                    return lane.enqueue(&self.guest, ask.handle, words);
                }
                Ok(Tried::Accepted(words)) => {
                    let lane = &mut *lane;
                    return py.detach(|| lane.enqueue(&self.guest, ask.handle, words));
                }
                Ok(Tried::Asked(asked)) => {
                    let lane = &mut *lane;
                    let waited = py.detach(|| match lane.lane.accepted(&asked) {
                        Ok(words) => Some(lane.enqueue(&self.guest, ask.handle, words)),
                        Err(_) if lane.lane.is_spent() => None,
                        Err(error) => Some(Err(lane.failed(error))),
                    });
                    if let Some(put) = waited {
                        return put;
                    }
                }
                Ok(Tried::Full) => {}
                Err(_) if lane.lane.is_spent() => {}
                Err(error) => return Err(lane.failed(error)),
            }
        }
        py.detach(|| self.order_patiently(ask))
    }

    /// The same, for whatever has to be waited for.
    fn order_patiently(&self, ask: Ask<'_>) -> Result<(), Failed> {
        let mut is_replaced = false;
        loop {
            let known = match self.known(ask.stream) {
                Some(known) => known,
                None => self.open(ask.stream)?,
            };
            let mut lane = lock(&known);
            if lane.stream != ask.stream {
                continue;
            }
            if lane.lane.is_spent() && !mem::replace(&mut is_replaced, true) {
                *lane = self.new_lane(ask.stream)?;
            }
            let ordered = lane.lane.order(ask.plan, ask.direction, ask.request);
            match ordered.map(|ordered| [ordered.bell(), ordered.done()]) {
                Ok(words) => return lane.enqueue(&self.guest, ask.handle, words),
                // The daemon went away under it.
                Err(_) if lane.lane.is_spent() && !is_replaced => {}
                Err(error) => return Err(lane.failed(error)),
            }
        }
    }

    /// The lane of a stream.
    fn known(&self, stream: u64) -> Option<Arc<Mutex<Lane>>> {
        let mut table = lock(&self.table);
        table.uses += 1;
        let used = table.uses;
        let known = table.lanes.iter_mut().find(|known| known.stream == stream)?;
        known.used = used;
        Some(Arc::clone(&known.lane))
    }

    /// A lane for a stream that has none; where the session has no more, that of a stream whose copies are all done.
    fn open(&self, stream: u64) -> Result<Arc<Mutex<Lane>>, Failed> {
        let opened = match self.new_lane(stream) {
            Ok(opened) => Ok(opened),
            Err(Failed::Refused(error)) if error.code() == Some(RefusalCode::QuotaExceeded) => {
                Err(Failed::Refused(error))
            }
            Err(failed) => return Err(failed),
        };
        let mut table = lock(&self.table);
        if let Some(known) = table.lanes.iter().find(|known| known.stream == stream) {
            // Another thread was faster.
            return Ok(Arc::clone(&known.lane));
        }
        let used = table.uses;
        match opened {
            Ok(opened) => {
                let lane = Arc::new(Mutex::new(opened));
                table.lanes.push(Known { stream, used, lane: Arc::clone(&lane) });
                Ok(lane)
            }
            Err(full) => table.reassign(stream).ok_or(full),
        }
    }

    fn new_lane(&self, stream: u64) -> Result<Lane, Failed> {
        let lane = self.client.open_lane().map_err(Failed::Refused)?;
        let (mapping, range) = lane.memory();
        let words = self.words(mapping, range)?;
        Ok(Lane { stream, lane, words })
    }

    /// The words of a session's lanes and graphs, as streams reach them: one range, shared once.
    pub(crate) fn words(
        &self,
        mapping: &Arc<Mapping>,
        range: Range<u64>,
    ) -> Result<Arc<GuestWords>, Failed> {
        let place = Arc::as_ptr(mapping).addr();
        let mut table = lock(&self.table);
        if let Some((_, words)) = table.words.iter().find(|(of, _)| *of == place) {
            return Ok(Arc::clone(words));
        }
        let words = Arc::new(self.guest.share_words(mapping, range).map_err(Failed::Driver)?);
        table.words.push((place, Arc::clone(&words)));
        Ok(words)
    }

    /// Every lane, out of the table.
    fn lanes(&self) -> Vec<Arc<Mutex<Lane>>> {
        lock(&self.table).lanes.iter().map(|known| Arc::clone(&known.lane)).collect()
    }

    /// Whether every copy that was put on a stream so far was or will be made. A load or two for each stream.
    ///
    /// # Errors
    /// Why the first one was not.
    pub(crate) fn check(&self, py: Python<'_>) -> Result<(), Failed> {
        let mut held = Vec::new();
        for known in &lock(&self.table).lanes {
            match known.lane.try_lock() {
                Ok(lane) => lane.check()?,
                Err(_) => held.push(Arc::clone(&known.lane)),
            }
        }
        if !held.is_empty() {
            py.detach(|| held.iter().try_for_each(|lane| lock(lane).check()))?;
        }
        self.graphs.check()
    }

    /// The same for one stream. Whoever uses its lane now finds out by itself.
    ///
    /// # Errors
    /// Why a copy of it was not.
    pub(crate) fn check_stream(&self, stream: u64) -> Result<(), Failed> {
        let Some(known) = self.known(stream) else { return Ok(()) };
        known.try_lock().map_or(Ok(()), |lane| lane.check())
    }

    /// Forgets the lanes of streams that lost a copy: their next copies begin anew.
    pub(crate) fn reset(&self) {
        let mut lanes = self.lanes();
        lanes.retain(|lane| lock(lane).check().is_err());
        let is_lost = |known: &Known| lanes.iter().any(|lane| Arc::ptr_eq(lane, &known.lane));
        lock(&self.table).lanes.retain(|known| !is_lost(known));
    }

    /// Lets go of the memory that copies held which are done.
    pub(crate) fn let_go(&self) {
        self.lanes().iter().for_each(|lane| lock(lane).lane.let_go());
    }

    /// Waits until every copy that was put on a stream is over. Those of streams that lost one are not waited for.
    ///
    /// # Errors
    /// DEADLINE_EXCEEDED.
    pub(crate) fn settle(&self, timeout: Duration) -> Result<(), Error> {
        if !wait_for(&self.lanes(), timeout, PAUSE) {
            return Err(unsettled(timeout));
        }
        self.let_go();
        Ok(())
    }
}

impl Lane {
    /// Whether no copy is to come any more.
    fn is_over(&self) -> bool {
        self.lane.is_settled() || self.lane.check().is_err()
    }

    fn check(&self) -> Result<(), Failed> {
        match self.lane.check() {
            Err(error) if !self.lane.is_spent() => Err(Failed::Stream(error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

impl Table {
    /// Gives the stream the lane of the one that was used longest ago, of those whose copies are all done.
    fn reassign(&mut self, stream: u64) -> Option<Arc<Mutex<Lane>>> {
        self.lanes.sort_by_key(|known| known.used);
        let used = self.uses;
        for known in &mut self.lanes {
            let Ok(mut lane) = known.lane.try_lock() else { continue };
            if lane.lane.is_settled() && lane.lane.check().is_ok() {
                lane.stream = stream;
                (known.stream, known.used) = (stream, used);
                return Some(Arc::clone(&known.lane));
            }
        }
        None
    }
}

impl Streams {
    /// Gives the words back, once the session is closed. The driver waits for every stream of the process first.
    pub(crate) fn close(&self) {
        let Table { lanes, words, .. } = mem::take(&mut *lock(&self.table));
        let is_over = lanes.iter().all(|known| lock(&known.lane).lane.is_settled());
        if !is_over || !self.graphs.is_empty() {
            // A stream may still reach them, and a replay at any time.
            mem::forget(words);
        }
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        // Nobody waits here, for streams or for the driver: it may be the interpreter's own thread, at its end too.
        let Table { lanes, words, .. } = mem::take(&mut *lock(&self.table));
        mem::forget(words);
        let lanes: Vec<_> = lanes.into_iter().map(|known| known.lane).collect();
        if lanes.iter().any(|lane| !lock(lane).is_over()) {
            let left = move || wait_for(&lanes, LEFT_MAX, LOOK);
            // Without a thread everything stays, with the session.
            let _spawned = thread::Builder::new().name("statecopy-left".to_owned()).spawn(left);
        }
    }
}

/// Waits until the copies are over that were put on streams, which are looked at again after each pause. Whether they are.
fn wait_for(lanes: &[Arc<Mutex<Lane>>], patience: Duration, pause: Duration) -> bool {
    let until = Instant::now().checked_add(patience);
    while lanes.iter().any(|lane| !lock(lane).is_over()) {
        if until.is_some_and(|until| Instant::now() >= until) {
            return false;
        }
        thread::sleep(pause);
    }
    true
}

fn unsettled(timeout: Duration) -> Error {
    let sentence = format!("Copies that were put on streams were not done within {timeout:?}");
    Refusal::new(RefusalCode::DeadlineExceeded, sentence)
        .about("stream")
        .remedied_by("Synchronise the streams first, or allow more time (connect(timeout_s=..)).")
        .into()
}
