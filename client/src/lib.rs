//! The statecopy client for workers written in Rust.
//!
//! A worker shares memory with the daemon, registers the layers whose state caches lie in it, and asks for copies:
//! gather initial states into a packed buffer, scatter final states back. [`Client`] is asynchronous (tokio),
//! [`blocking::Client`] is its twin for programs without a runtime.
//!
//! Copies go over the session's ring, in memory shared with the daemon: in steady state without a system call. gRPC carries
//! them where the daemon serves no ring, or where [`ConnectOptions::transport`] says so.
//!
//! A worker whose work is queued on streams need not wait for a copy: [`blocking::Client::open_lane`] gives a [`StreamLane`], whose
//! copies take their places in the stream by two words of memory that is shared with the daemon. Work that is captured into a graph and
//! replayed takes a [`GraphLane`] instead ([`blocking::Client::open_graph_lane`]).
//!
//! Memory of a CUDA device comes from the worker's own allocator: [`Client::register_device_memory`] finds out how it can be
//! shared and gives its place in a region, as a layer and a packed buffer want it.
//!
//! A program whose buffers come and go as its framework likes finds a pool of them, and what it takes to register memory when
//! it is first seen, in [`sharing`].
//!
//! It runs no kernel and starts no process. Its invariant: whatever becomes of the daemon, the client holds the plain
//! records (memory, regions, layers) from which a session is made anew, and a copy is repeated by itself only where
//! nothing moved.
//!
//! ```no_run
//! use statecopy_client::blocking::Client;
//! use statecopy_client::*;
//!
//! # fn main() -> Result<(), Error> {
//! let client = Client::connect(Address::from_env()?, ConnectOptions::default())?;
//! let cache = client.allocate("cache", 64 << 20)?;
//! let packed = client.allocate("packed", 8 << 20)?;
//! let cache_region = client.register_region(&cache, Use::Cache)?;
//! let packed_region = client.register_region(&packed, Use::Packed)?;
//! let registration = Registration::new().layer(Layer {
//!     name: "layers.0".into(),
//!     dtype: DataType::Float32,
//!     shape: [32, 4, 128, 128],
//!     strides: Strides::PageStride(4 * 128 * 128),
//!     region: cache_region,
//!     offset_bytes: 0,
//!     max_selected: 8,
//!     check_unique: false,
//! });
//! let bindings = client.register(&registration, |_| {})?;
//! let plan = bindings.layer("layers.0")?;
//! plan.gather(Request::new(Indices::Int32(&[3, 1, -1]), packed_region.at(0)))?;
//! // ... the chunk maths ...
//! plan.scatter(Request::new(Indices::Int32(&[3, 1, -1]), packed_region.at(0)))?;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod address;
mod admin;
mod attempt;
pub mod blocking;
mod call;
mod client;
mod copies;
mod device_memory;
mod error;
mod events;
mod graphs;
mod in_flight;
mod lanes;
mod link;
mod lock;
mod memory;
mod options;
mod plan;
mod populate;
mod records;
mod region;
mod registration;
mod request;
mod ring;
pub mod sharing;
mod socket;
pub mod status;
mod sync;
mod transport;

pub use address::{ADDRESS_VARIABLE, Address, AddressError, SOCKET_NAME};
pub use admin::Admin;
pub use client::Client;
pub use error::{ArgumentError, BoxError, ConnectionError, Error, ProtocolError};
pub use events::{Event, Events};
pub use graphs::{Armed, GraphLane, Step};
pub use in_flight::InFlight;
pub use lanes::{Asked, LaneWord, Ordered, StreamLane, Tried};
pub use link::Session;
pub use memory::Memory;
pub use options::{ConnectOptions, Transport};
pub use plan::Plan;
pub use region::{Region, Slice, Use};
pub use registration::{Bindings, Layer, Progress, Rebind, Registration, Stage, Strides};
pub use request::{Flags, Indices, PlannedCopy, Request};
pub use statecopy_kernels::device::Moved;
pub use statecopy_kernels::layout::CacheLayout;
pub use statecopy_proto::{
    DataType, Direction, IndexWidth, Lane, Leaves, PlanKind, Refusal, RefusalCode, SignatureHash,
    v1,
};
