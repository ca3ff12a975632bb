//! Lanes: copies in the order of a worker's stream.
//!
//! ```text
//! order() ──refused: an error, nothing is on the stream
//!    └─accepted──> the stream writes the bell, waits for done ──> the copy ran in between
//! ```
//!
//! The host waits for the check of a request and for nothing else. Two words of memory that is shared with the daemon order the copy
//! between what the stream was asked before and after: [`Ordered::bell`] and [`Ordered::done`]. A CUDA stream writes and waits for
//! them itself; a worker of the host device does it on whatever thread its work runs ([`Ordered::ring`], [`Ordered::wait`]).
//!
//! A copy that cannot be made once its bell has rung frees the stream: every wait of the lane goes on, its packed rows are undefined,
//! and every later call on the lane says why, as [`StreamLane::check`] does. So does the end of the daemon.

mod stream;

use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use statecopy_descriptors::Doorbell;
use statecopy_proto::{Refusal, RefusalCode, SessionId};
use statecopy_session::lane::{LaneWords, phase_of};
use statecopy_session::pair::PairWords;
use statecopy_session::{
    FREED, LaneNumber, LanePhase, MappedLane, MappedPair, Sequence, SessionMemory,
};

use crate::Client;
use crate::blocking;
use crate::call::{Call, Failure};
use crate::error::Error;
use crate::graphs::{self, Pairs};
use crate::link::Link;
use crate::lock::lock;
use crate::ring::Held;
use crate::socket::{DescriptorSocket, Silence};

use stream::no_lanes;
pub use stream::{Asked, LaneWord, Ordered, StreamLane, Tried};
pub(crate) use stream::{Waiting, earlier_life, unread};

/// How often somebody looks whether the daemon lives while lanes are open.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The lanes of one session, shared by those that are open.
#[derive(Debug)]
pub(crate) struct Lanes {
    pub(crate) memory: SessionMemory,
    bell: Doorbell,
    session: SessionId,
    socket: Arc<DescriptorSocket>,
    /// A bit for each lane that is open.
    open: Mutex<u64>,
    pub(crate) graphs: Mutex<Pairs>,
    /// Why nothing is run any more.
    pub(crate) silence: OnceLock<Silence>,
    watched: Mutex<bool>,
    /// What copies touch that nobody waits for any more: kept until the session's end.
    kept: Mutex<Vec<Held>>,
    /// Notified at the end.
    end: Arc<(Mutex<bool>, Condvar)>,
}

impl Lanes {
    pub(crate) fn new(
        memory: SessionMemory,
        bell: Doorbell,
        session: SessionId,
        socket: Arc<DescriptorSocket>,
    ) -> Self {
        Self {
            memory,
            bell,
            session,
            socket,
            open: Mutex::default(),
            graphs: Mutex::default(),
            silence: OnceLock::new(),
            watched: Mutex::default(),
            kept: Mutex::default(),
            end: Arc::default(),
        }
    }

    /// Those of the client's session.
    pub(crate) fn of(client: &blocking::Client, call: Call) -> Result<Arc<Self>, Error> {
        let link = client.link(call)?;
        let lanes = link
            .carrier
            .lanes()
            .ok_or_else(|| call.error(&client.as_async().shared.address, no_lanes().into()))?;
        Self::watch(lanes)?;
        Ok(Arc::clone(lanes))
    }

    /// The link of the session that they are of, while it lives.
    pub(crate) fn live_link(
        self: &Arc<Self>,
        client: &Client,
    ) -> Result<Option<Arc<Link>>, Failure> {
        let live = client.shared.live_link().map_err(Failure::Local)?;
        Ok(live.filter(|link| self.is_of(link)))
    }

    /// Whether they are of the session of that link.
    fn is_of(self: &Arc<Self>, link: &Link) -> bool {
        link.carrier.lanes().is_some_and(|lanes| Arc::ptr_eq(lanes, self))
    }

    /// Takes a lane that nobody has.
    fn take(&self) -> Result<LaneNumber, Refusal> {
        let mut open = lock(&self.open);
        let number = open.trailing_ones();
        let lane = LaneNumber::new(number).ok_or_else(|| {
            let sentence = format!("All {number} lanes of the session are open or were failed");
            Refusal::new(RefusalCode::QuotaExceeded, sentence)
                .about("lane")
                .remedied_by("Drop lanes that are no longer used; use one lane for each stream.")
        })?;
        *open |= 1 << number;
        Ok(lane)
    }

    fn give_back(&self, lane: LaneNumber) {
        *lock(&self.open) &= !(1 << lane.get());
    }

    /// Has a thread look whether the daemon lives, from the first lane on: a stream that waits for it cannot.
    fn watch(lanes: &Arc<Self>) -> Result<(), Error> {
        let mut watched = lock(&lanes.watched);
        if !*watched {
            let (weak, end) = (Arc::downgrade(lanes), Arc::clone(&lanes.end));
            let thread = thread::Builder::new().name("statecopy-lanes".to_owned());
            thread.spawn(move || watch(&weak, &end)).map_err(Error::Runtime)?;
            *watched = true;
        }
        Ok(())
    }

    /// The words of every lane that is open now.
    fn opened(&self) -> impl Iterator<Item = MappedLane> {
        let open = *lock(&self.open);
        let is_open = move |lane: &LaneNumber| open >> lane.get() & 1 == 1;
        LaneNumber::all().filter(is_open).map(|lane| self.memory.lane(lane))
    }

    /// Whether a copy of an open lane or a graph is not over.
    pub(crate) fn has_unsettled(&self) -> bool {
        let is_unsettled = |words: MappedLane| {
            let last = Sequence::new(words.submitted().load_relaxed());
            last.is_some_and(|last| phase_of(&words, last) != Ok(LanePhase::Settled))
        };
        self.opened().any(is_unsettled) || self.has_unsettled_graphs()
    }

    /// What streams may wait for: the words of every open lane and of every graph.
    fn waits(&self) -> Waits {
        Waits { lanes: self.opened().collect(), pairs: self.pairs() }
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        *lock(&self.end.0) = true;
        self.end.1.notify_all();
        let (waits, socket) = (self.waits(), Arc::clone(&self.socket));
        Left { waits, socket, _kept: std::mem::take(&mut lock(&self.kept)) }.let_go();
    }
}

/// The words that streams may wait for.
#[derive(Debug)]
struct Waits {
    lanes: Vec<MappedLane>,
    pairs: Vec<MappedPair>,
}

impl Waits {
    /// Whether a stream has come to a copy that is not over.
    fn is_rung(&self) -> bool {
        self.lanes.iter().any(is_rung) || self.pairs.iter().any(graphs::is_unsettled)
    }

    /// Lets every wait go on. The executor's process is known dead, or never writes for this session again.
    fn free(&self) {
        let done = self.lanes.iter().map(LaneWords::done);
        for done in done.chain(self.pairs.iter().map(PairWords::done)) {
            // SYNC: the worker's stream waits for it; the silence, where there is one, is seen by who sees it.
            done.store_release(FREED);
        }
    }
}

/// What streams may still wait for when nobody has the session any more.
#[derive(Debug)]
struct Left {
    waits: Waits,
    /// The session lives as long.
    socket: Arc<DescriptorSocket>,
    _kept: Vec<Held>,
}

impl Left {
    /// Lets every wait go on: of what was never rung at once, and of what the daemon may be copying once that is done.
    fn let_go(self) {
        if !self.is_served() {
            return self.waits.free();
        }
        let left = Arc::new(self);
        let of_thread = Arc::clone(&left);
        let wait = move || {
            while of_thread.is_served() {
                thread::sleep(LOOK_EVERY);
            }
            of_thread.waits.free();
        };
        if thread::Builder::new().name("statecopy-lanes".to_owned()).spawn(wait).is_err() {
            // So the session goes on, and what was rung is copied.
            std::mem::forget(left);
        }
    }

    /// Whether the daemon may be copying what was rung.
    fn is_served(&self) -> bool {
        self.waits.is_rung() && self.socket.silence().is_none()
    }
}

/// Whether a stream has come to a copy of the lane that is not over.
fn is_rung(words: &MappedLane) -> bool {
    let (bell, last) = (words.bell().load_relaxed(), words.submitted().load_relaxed());
    let first = last.saturating_sub(words.slots()) + 1;
    let mut rung = (first..=last.min(bell)).filter_map(Sequence::new);
    rung.any(|number| phase_of(words, number) != Ok(LanePhase::Settled))
}

/// Frees the lanes once nobody serves them any more, and again as long as they are open: a last write may come late.
fn watch(lanes: &Weak<Lanes>, (ended, end): &(Mutex<bool>, Condvar)) {
    let mut over = lock(ended);
    while !*over {
        over = end.wait_timeout(over, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
        let Some(lanes) = lanes.upgrade() else { return };
        // Not held while the lanes are let go: their end takes it.
        drop(over);
        if let Some(silence) = lanes.socket.silence() {
            if lanes.silence.get().is_none() {
                lanes.note_cut_graphs();
            }
            lanes.silence.get_or_init(|| silence);
            lanes.waits().free();
        }
        lanes.disarm_dropped();
        drop(lanes);
        over = lock(ended);
    }
}
