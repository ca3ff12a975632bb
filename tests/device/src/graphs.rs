//! Copies that a worker's captured graphs make.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use anyhow::{Result, ensure};
use statecopy_client::blocking::{Client, Plan};
use statecopy_client::{Armed, Direction, GraphLane, Request, Step};
use statecopy_kernels::cuda::{CudaWorker, GuestWords, WordOp, WorkerGraph, WorkerStream};

use crate::lanes::{GATES, Gates};
use crate::patience::eventually;

/// What a graph does for a copy.
pub(crate) fn operations(armed: &Armed) -> [WordOp; 4] {
    armed.steps().map(|step| match step {
        Step::Write(word) => WordOp::Write { offset: word.offset, value: word.value },
        Step::WaitAny(word) => WordOp::WaitAny { offset: word.offset, bits: word.value },
    })
}

/// A stream that records its work, with a graph lane for the copies.
#[derive(Debug)]
pub(crate) struct Capturing {
    lane: GraphLane,
    pub(crate) stream: WorkerStream,
    words: Arc<GuestWords>,
    ended: Receiver<()>,
}

impl Capturing {
    /// Begins to capture a new stream. Everything else that a client does for a graph, it does during the capture.
    pub(crate) fn begin(
        client: &Client,
        worker: &CudaWorker,
        words: &Arc<GuestWords>,
    ) -> Result<Self> {
        let mut stream = worker.stream()?;
        stream.begin_capture()?;
        let lane = client.open_graph_lane()?;
        let (end, ended) = channel();
        stream.on_graph_end(Box::new(move || drop(end)))?;
        Ok(Self { lane, stream, words: Arc::clone(words), ended })
    }

    /// Has the graph make a copy.
    pub(crate) fn copy(
        &mut self,
        plan: &Plan,
        direction: Direction,
        request: &Request<'_>,
    ) -> Result<()> {
        let armed = self.lane.arm(plan, direction, request)?;
        Ok(self.stream.enqueue(&self.words, &operations(&armed))?)
    }

    /// Has the graph make a copy, with a gate behind each of its steps.
    pub(crate) fn copy_with_gates(
        &mut self,
        plan: &Plan,
        direction: Direction,
        request: &Request<'_>,
        gates: &Gates,
    ) -> Result<()> {
        let armed = self.lane.arm(plan, direction, request)?;
        for (operation, gate) in operations(&armed).iter().zip(0..GATES) {
            self.stream.enqueue(&self.words, std::slice::from_ref(operation))?;
            gates.hold(&mut self.stream, gate)?;
        }
        Ok(())
    }

    /// Ends the capture.
    pub(crate) fn end(self) -> Result<Captured> {
        let Self { lane, mut stream, ended, .. } = self;
        let graph = Arc::new(stream.end_capture()?);
        Ok(Captured { lane, stream, graph, ended })
    }
}

/// A captured graph, and the stream that it is replayed on.
#[derive(Debug)]
pub(crate) struct Captured {
    pub(crate) lane: GraphLane,
    pub(crate) stream: WorkerStream,
    graph: Arc<WorkerGraph>,
    ended: Receiver<()>,
}

impl Captured {
    /// Has the stream make the graph's copies again.
    pub(crate) fn replay(&mut self) -> Result<()> {
        Ok(self.stream.launch(&self.graph)?)
    }

    /// Waits until the stream is done, however it came to be.
    pub(crate) fn wait(&self) -> Result<()> {
        eventually("the stream is done", || Ok(self.stream.is_idle()?.then_some(())))
    }

    /// Waits until the stream is done, and looks whether the copies were made.
    pub(crate) fn finish(&self) -> Result<()> {
        self.wait()?;
        Ok(self.lane.check()?)
    }

    /// Lets the graph go, and waits until its end was told.
    pub(crate) fn destroy(self) -> Result<()> {
        let Self { lane, stream, graph, ended } = self;
        ensure!(ended.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty), "it has ended");
        // The stream keeps what it was asked for.
        drop((stream, graph));
        eventually("the end of the graph is told", || {
            let over = Err(std::sync::mpsc::TryRecvError::Disconnected);
            Ok((ended.try_recv() == over).then_some(()))
        })?;
        drop(lane);
        Ok(())
    }
}
