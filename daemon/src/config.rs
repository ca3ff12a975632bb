//! The daemon's configuration: defaults, then a file, then the environment, then flags; each overrides the one before.
//!
//! One structure holds every setting. Its documentation is written once, beside each field: it is what rustdoc shows,
//! what `statecopyd config` prints above each value, and where the unit of a number stands.

mod device;
mod flags;
mod load;
mod print;
mod rules;
mod sources;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use statecopy_kernels::cuda::DRIVER_LIBRARY;

pub use self::device::{DeviceName, UnknownDevice};
pub use self::flags::Flags;
pub use self::load::{Ignored, Loaded, load, texts};
pub use self::print::{to_json, to_toml};
pub use self::rules::ConfigError;
pub(crate) use self::rules::HttpAddress;

/// Declares a table of settings with documentation and defaults.
macro_rules! settings {
    (
        $(#[doc = $about:literal])+
        $name:ident {
            $($(#[doc = $doc:literal])+ $field:ident: $kind:ty = $default:expr;)*
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[doc = $doc])+ pub $field: $kind,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl $name {
            /// Every field in order, with its documentation line by line.
            pub(crate) const FIELDS: &'static [(&'static str, &'static [&'static str])] =
                &[$((stringify!($field), &[$($doc),+]),)*];
        }
    };
}

settings! {
    /// Every setting of the daemon.
    Settings {
        /// Directory of the sockets and of the lock. Created with mode 0700 if missing.
        /// Default: $XDG_RUNTIME_DIR/statecopy, or /run/statecopy where that is not set.
        runtime_dir: PathBuf = PathBuf::from("/run/statecopy");
        /// Devices to serve, each by its own device process: "host", "cuda:ORDINAL" or "cuda:UUID" (as nvidia-smi -L
        /// prints it, with or without GPU- or MIG-). A session chooses among several by UUID.
        devices: Vec<DeviceName> = vec![DeviceName::Host];
        /// Address of /metrics, /healthz and /readyz; port 0 takes any free one; "off" serves no HTTP.
        http_address: String = "127.0.0.1:9464".to_owned();
        /// Whether http_address may be one that other machines reach.
        http_public: bool = false;
        /// Users that may open sessions, beside the daemon's own user and root.
        allow_uids: Vec<u32> = Vec::new();
        /// How long accepted copies may take to finish once the daemon drains.
        drain_grace_ms: u32 = 10_000;
        /// The deadline of a call that brings none: how long a copy may wait for its start.
        default_deadline_ms: u32 = 30_000;
        /// How long a registration may take. Compiling is part of it.
        register_deadline_ms: u32 = 600_000;
        /// How long an opened session waits for its worker on the descriptor socket.
        attach_timeout_ms: u32 = 5_000;
        /// Threads that copy on the host device. Unset: as many as the process may use.
        copy_threads: Option<NonZeroUsize> = None;
        /// How long the executor spins for the next request before it sleeps, in microseconds. 0 where fewer than two
        /// CPUs may be used, whatever stands here.
        spin_us: u64 = 50;
        /// Whether the executor never sleeps: the shortest answer, for one CPU that is always busy. Without effect where
        /// fewer than two CPUs may be used.
        busy_poll: bool = false;
        /// The CPU that the executor stays on. Unset: any.
        executor_cpu: Option<usize> = None;
        /// Requests that the ring between supervisor and device process holds: a power of two.
        slots: u32 = 1024;
        /// Requests that a worker's ring holds: a power of two.
        session_slots: u32 = 64;
        /// Stream-ordered requests of one lane that may be accepted and not done: a power of two. At the bound a worker waits for a
        /// place. 1024 are about seven prefill steps of 138 copies.
        lane_slots: u32 = 1024;
        /// Bytes that one launch moves at most: a larger copy is split, so that it does not hold up the others.
        launch_bytes_max: u64 = 64 << 20;
        /// Libraries that LD_PRELOAD may name in the device process, by file name. Every other one is HOOK_PRESENT.
        allowed_preloads: Vec<String> = Vec::new();
        /// Directory in which compiled kernels are kept. Created if missing. Default: $XDG_CACHE_HOME/statecopy/kernels, or
        /// ~/.cache/statecopy/kernels, or /var/cache/statecopy/kernels where there is no home.
        artifact_store: PathBuf = PathBuf::from("/var/cache/statecopy/kernels");
        /// Directories with compiled kernels that are read before it and never written: those that an image brings along.
        artifact_stores: Vec<PathBuf> = Vec::new();
        /// Bounds on what sessions own. A request past one is QUOTA_EXCEEDED.
        limits: Limits = Limits::default();
        /// Where the libraries of CUDA devices are.
        cuda: Cuda = Cuda::default();
        /// What is logged, and how.
        log: Log = Log::default();
        /// Switches for tests and for the search of faults.
        debug: Debugging = Debugging::default();
    }
}

settings! {
    /// Bounds on what sessions own. A request past one is QUOTA_EXCEEDED.
    Limits {
        /// Sessions of the daemon.
        sessions_max: u32 = 256;
        /// Regions of one session.
        regions_max: u32 = 1024;
        /// Layers, and sets, of one registration.
        layers_max: u32 = 1024;
        /// Pieces of one region: the handles of memory that a driver maps side by side.
        pieces_max: u32 = 16_384;
        /// Descriptors of one session that wait for the registration of their region.
        descriptors_pending_max: u32 = 16_384;
        /// Bytes of one region.
        region_bytes_max: u64 = 1 << 46;
        /// The largest max_selected of a layer.
        selected_max: u64 = 16_384;
        /// Slots of captured graphs that one session may have armed: copies that its graphs hold.
        graph_slots_max: u32 = 16_384;
        /// Copies and registrations of all sessions that may wait or run at once; more are OVERLOADED.
        requests_pending_max: u32 = 512;
    }
}

settings! {
    /// Where the libraries of CUDA devices are.
    Cuda {
        /// The driver: a name that the loader searches for, or a path.
        driver_library: PathBuf = PathBuf::from(DRIVER_LIBRARY);
        /// Directory of NVRTC, which compiles what no store has. Unset: where the loader searches.
        nvrtc_directory: Option<PathBuf> = None;
        /// How long one step of a device process's start may take in the driver before it counts as hanging, in milliseconds:
        /// the process is then killed and started again.
        driver_timeout_ms: u32 = 20_000;
    }
}

settings! {
    /// What is logged, and how.
    Log {
        /// "text" for people or "json" for machines, one line an event, on standard error.
        format: LogFormat = LogFormat::Text;
        /// error, warn, info, debug or trace; or filters for single modules, as in "info,statecopyd=debug".
        level: String = "info".to_owned();
    }
}

settings! {
    /// Switches for tests and for the search of faults.
    Debugging {
        /// End the device process when the compiler, the environment or the device allocator is entered after a seal.
        abort_after_seal: bool = false;
    }
}

/// The form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(try_from = "String", into = "&'static str")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// A name that is none of those known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{given}\" is none of: {known}")]
pub struct UnknownName {
    given: String,
    known: String,
}

/// Gives the values of an enum their names.
macro_rules! names {
    ($kind:ident { $($value:ident = $name:literal,)* }) => {
        impl $kind {
            /// The name in the configuration.
            #[must_use]
            pub fn label(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)*
                }
            }
        }

        impl From<$kind> for &'static str {
            fn from(value: $kind) -> Self {
                value.label()
            }
        }

        impl TryFrom<String> for $kind {
            type Error = UnknownName;

            fn try_from(given: String) -> Result<Self, UnknownName> {
                match given.as_str() {
                    $($name => Ok(Self::$value),)*
                    _ => Err(UnknownName { given, known: [$($name),*].join(", ") }),
                }
            }
        }
    };
}

names!(LogFormat { Text = "text", Json = "json", });

/// What one device process is started with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSettings {
    /// Which device.
    pub device: DeviceName,
    /// Threads that copy on the host device.
    pub copy_threads: Option<NonZeroUsize>,
    /// How long the executor spins before it sleeps, in microseconds.
    pub spin_us: u64,
    /// Whether the executor never sleeps.
    pub busy_poll: bool,
    /// The CPU that the executor stays on.
    pub executor_cpu: Option<usize>,
    /// Whether an entry of the compiler, the environment or the device allocator after a seal ends the process.
    pub abort_after_seal: bool,
    /// Libraries that LD_PRELOAD may name, by file name.
    pub allowed_preloads: Vec<String>,
    /// Requests that the ring holds: a power of two.
    pub slots: u32,
    /// Bytes that one launch moves at most.
    pub launch_bytes_max: u64,
    /// The largest `max_selected` of a layer: the ring has room for so many inline indices and flags a request.
    pub selected_max: u64,
    /// Where compiled kernels are kept.
    pub artifact_store: PathBuf,
    /// Where they are looked for first.
    pub artifact_stores: Vec<PathBuf>,
    /// Where the libraries of CUDA devices are.
    pub cuda: Cuda,
    /// What is logged, and how.
    pub log: Log,
}

/// The arguments with which `/proc/self/exe` becomes a device process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelfProgram {
    /// In order, without the program's own name.
    pub arguments: Vec<String>,
}

impl Settings {
    /// What the process of that device is started with.
    #[must_use]
    pub fn device(&self, device: DeviceName) -> DeviceSettings {
        DeviceSettings {
            device,
            copy_threads: self.copy_threads,
            spin_us: self.spin_us,
            busy_poll: self.busy_poll,
            executor_cpu: self.executor_cpu,
            abort_after_seal: self.debug.abort_after_seal,
            allowed_preloads: self.allowed_preloads.clone(),
            slots: self.slots,
            launch_bytes_max: self.launch_bytes_max,
            selected_max: self.limits.selected_max,
            artifact_store: self.artifact_store.clone(),
            artifact_stores: self.artifact_stores.clone(),
            cuda: self.cuda.clone(),
            log: self.log.clone(),
        }
    }
}
