//! How a client connects and waits.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use statecopy_kernels::cuda::DRIVER_LIBRARY;

use statecopy_proto::{PROTOCOL_NEWEST, PROTOCOL_OLDEST};

/// What carries copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Transport {
    /// The session's shared memory, where the daemon serves it there; else gRPC.
    #[default]
    Ring,
    /// gRPC.
    Grpc,
}

/// How a client connects and waits. `ConnectOptions { label: "rank 0".into(), ..Default::default() }`.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// A name for `statecopy status` and the daemon's log, at most 128 bytes.
    pub label: String,
    /// UUID of the device that the worker's memory lives on, with or without `GPU-` or `MIG-`; `None` for the daemon's only
    /// device.
    pub device: Option<String>,
    /// The CUDA driver of this process, which is opened when device memory is first registered: a name that the loader
    /// searches for, or a path.
    pub cuda_driver_library: PathBuf,
    /// How long [`Client::connect`](crate::Client::connect) waits for a daemon that is not there yet. Zero: one try.
    pub wait_for: Duration,
    /// The deadline of every call but registrations and copies, and the deadline of a copy that names none.
    pub call_timeout: Duration,
    /// The deadline of a registration, which may compile kernels.
    pub register_timeout: Duration,
    /// How much longer than a copy's own deadline the client waits for its answer: the time in which a copy that
    /// started just before its deadline finishes.
    pub copy_slack: Duration,
    /// Whether pages are populated by this process before the daemon touches them, so that the daemon's memory group
    /// never pays for a worker's memory: the pages that payloads touch when layers are registered or bound again, and
    /// regions registered as [`Use::Packed`](crate::Use::Packed).
    pub populate: bool,
    /// Whether a client that meets another life of the daemon opens a session and registers again by itself.
    pub reregister: bool,
    /// How long a call looks for a daemon that went away, at most until its own deadline. Zero: once.
    pub reconnect_for: Duration,
    /// What carries copies.
    pub transport: Transport,
    /// On the ring: how long a blocking call looks for its answer before it sleeps. A copy that moves bytes is then looked for
    /// as long again as they may take (8 bytes a nanosecond, at most a millisecond), unless other threads want the CPU. Not at
    /// all with zero, or where this process may use one CPU only.
    pub spin: Duration,
    /// Protocol versions that may be spoken; the newest is asked for first.
    pub versions: RangeInclusive<u32>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            label: String::new(),
            device: None,
            cuda_driver_library: PathBuf::from(DRIVER_LIBRARY),
            wait_for: Duration::from_secs(5),
            call_timeout: Duration::from_secs(10),
            register_timeout: Duration::from_secs(120),
            copy_slack: Duration::from_secs(5),
            populate: true,
            reregister: true,
            reconnect_for: Duration::MAX,
            transport: Transport::Ring,
            spin: Duration::from_micros(50),
            versions: PROTOCOL_OLDEST..=PROTOCOL_NEWEST,
        }
    }
}
