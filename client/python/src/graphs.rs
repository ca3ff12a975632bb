//! Copies that a captured graph makes at every replay.
//!
//! ```text
//! a request ──refused: an exception, the capture goes on
//!    └─armed──> the graph holds its four steps ──> each replay copies in between ──graph gone──> let go
//! ```
//!
//! A graph has a lane for each stream that it was captured on. What its copies touch of the pool belongs to it and is never used
//! again, also once every tensor over it is gone: a replay writes it. Everything else is memory of the tensor library, which keeps
//! it for its graphs. The driver tells of a graph's end in a thread in which nothing may be let go that the driver has a part in:
//! there a flag is set, and the next call lets go.

#![expect(unsafe_code, reason = "a stream is known by its raw handle")]

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use statecopy_client::sharing::Buffer;
use statecopy_client::{GraphLane, Step};
use statecopy_kernels::cuda::{Capture, GuestWords, StreamOp};

use crate::lock::lock;
use crate::streams::{Ask, Failed, Streams};
use crate::sync::{AtomicBool, Ordering};

/// The graphs of one client's session.
#[derive(Debug, Default)]
pub(crate) struct Graphs(Mutex<Vec<Arc<Graph>>>);

/// What was captured into one graph on one stream.
#[derive(Debug)]
struct Graph {
    capture: u64,
    stream: u64,
    has_ended: Arc<AtomicBool>,
    recorded: Mutex<Recorded>,
}

#[derive(Debug)]
struct Recorded {
    lane: GraphLane,
    buffers: Vec<Arc<Buffer>>,
    words: Arc<GuestWords>,
}

impl Graphs {
    /// Lets go of what graphs had that are gone.
    fn sweep(&self) {
        let mut graphs = lock(&self.0);
        // SYNC: acquires what the driver's thread saw before the end.
        let gone = graphs.extract_if(.., |graph| graph.has_ended.load(Ordering::Acquire));
        let gone: Vec<_> = gone.collect();
        drop(graphs);
        drop(gone);
    }

    fn find(&self, capture: &Capture, stream: u64) -> Option<Arc<Graph>> {
        let is_it = |graph: &&Arc<Graph>| graph.capture == capture.id() && graph.stream == stream;
        lock(&self.0).iter().find(is_it).cloned()
    }

    /// Whether every replay so far was or will be copied.
    ///
    /// # Errors
    /// Why the first one was not.
    pub(crate) fn check(&self) -> Result<(), Failed> {
        self.sweep();
        let graphs = lock(&self.0);
        // One that is being captured was not replayed.
        let mut captured = graphs.iter().filter_map(|graph| graph.recorded.try_lock().ok());
        captured.try_for_each(|recorded| recorded.lane.check().map_err(Failed::Graph))
    }

    /// Whether no graph may be replayed any more.
    pub(crate) fn is_empty(&self) -> bool {
        self.sweep();
        lock(&self.0).is_empty()
    }
}

impl Streams {
    /// Gives a buffer of the pool to the graph that the stream is captured into, before anything of the capture touches it: what was
    /// captured is replayed, also where the copy is refused that it was for.
    ///
    /// # Errors
    /// See [`Failed`].
    pub(crate) fn give(
        &self,
        py: Python<'_>,
        (capture, stream): (&Capture, u64),
        buffer: &Arc<Buffer>,
    ) -> Result<(), Failed> {
        py.detach(|| {
            let graph = self.graph(capture, stream)?;
            // Nobody knows when the last replay's readers are done.
            buffer.discard();
            lock(&graph.recorded).buffers.push(Arc::clone(buffer));
            Ok(())
        })
    }

    /// Puts a copy into the graph that the stream is captured into. Arming it is a call of the daemon.
    ///
    /// # Errors
    /// See [`Failed`].
    pub(crate) fn record(
        &self,
        py: Python<'_>,
        ask: Ask<'_>,
        capture: &Capture,
    ) -> Result<(), Failed> {
        py.detach(|| {
            let graph = self.graph(capture, ask.stream)?;
            self.record_in(&mut lock(&graph.recorded), ask)
        })
    }

    fn graph(&self, capture: &Capture, stream: u64) -> Result<Arc<Graph>, Failed> {
        self.graphs.sweep();
        match self.graphs.find(capture, stream) {
            Some(graph) => Ok(graph),
            None => self.open_graph(capture, stream),
        }
    }

    fn record_in(&self, recorded: &mut Recorded, ask: Ask<'_>) -> Result<(), Failed> {
        let armed = recorded.lane.arm(ask.plan, ask.direction, ask.request);
        let armed = armed.map_err(|error| match recorded.lane.check() {
            Ok(()) => Failed::Refused(error),
            Err(_) => Failed::Graph(error),
        })?;
        let operations = armed.steps().map(|step| match step {
            Step::Write(word) => {
                StreamOp::Write { at: recorded.words.address(word.offset), value: word.value }
            }
            Step::WaitAny(word) => {
                StreamOp::WaitAny { at: recorded.words.address(word.offset), bits: word.value }
            }
        });
        // SAFETY: the caller's current stream, which its library keeps; the words stay shared until the graph is gone.
        unsafe { self.guest().enqueue(ask.handle, &operations) }.map_err(Failed::Driver)
    }

    fn open_graph(&self, capture: &Capture, stream: u64) -> Result<Arc<Graph>, Failed> {
        let lane = self.client().open_graph_lane().map_err(Failed::Refused)?;
        let (mapping, range) = lane.memory();
        let words = self.words(mapping, range)?;
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_ended);
        // SYNC: releases whatever the driver's thread did before.
        let end = Box::new(move || ended.store(true, Ordering::Release));
        // SAFETY: the caller's capture goes on: it is the one that captures here.
        unsafe { self.guest().on_graph_end(capture, end) }.map_err(Failed::Driver)?;
        let recorded = Mutex::new(Recorded { lane, buffers: Vec::new(), words });
        let capture = capture.id();
        let graph = Arc::new(Graph { capture, stream, has_ended, recorded });
        lock(&self.graphs.0).push(Arc::clone(&graph));
        Ok(graph)
    }
}
