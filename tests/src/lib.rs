//! What the end-to-end tests of statecopy share.
//!
//! **What it is.** [`Daemon`] is the real `statecopyd` in a runtime directory of its own; [`Wire`] and [`Session`] speak its
//! wire by hand, so that a test can say what no client would; [`CudaBed`] is a CUDA driver without a GPU; [`Rig`] is a session with caches whose every byte is
//! compared with the reference after every step; [`GraphWorker`] is a client with captured graphs; [`WorkerProcess`] is a worker that can be killed; [`Footprint`] is what a
//! process holds.
//!
//! **What it is not.** It is no client: nothing here recovers from anything. Whatever a test did not ask for is a panic
//! that says what was found.
//!
//! **Invariant.** Nothing outlives a test: dropping a [`Daemon`] or a [`WorkerProcess`] ends its processes.
#![forbid(unsafe_code)]

mod cuda;
mod daemon;
mod footprint;
mod graph_worker;
mod http;
mod poll;
mod random;
mod rig;
mod session;
mod shared;
mod wire;
mod worker;

pub use cuda::{CudaBed, CudaWorker, PIECES};
pub use daemon::{Daemon, DaemonOptions, binary, runs, send_signal};
pub use footprint::Footprint;
pub use graph_worker::{GraphPlans, GraphWorker, replay_step};
pub use http::{Answer, get};
pub use poll::{PATIENCE, eventually, until};
pub use random::{Random, random_bytes};
pub use rig::{Indices, Layer, Rig, layer_spec, wire_layout};
pub use session::{Published, Session};
pub use shared::Shared;
pub use wire::{Wire, refusal};
pub use worker::WorkerProcess;
