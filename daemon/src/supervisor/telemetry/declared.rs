//! Every metric: name, kind, unit, help. Nothing else is emitted; docs/metrics.md lists the same.

use metrics::Unit;

/// How a metric behaves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// Only rises.
    Counter,
    /// Rises and falls.
    Gauge,
    /// Counts values by size, in these buckets.
    Histogram(&'static [f64]),
}

/// One metric.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Metric {
    /// The name, with its unit last.
    pub(crate) name: &'static str,
    /// How it behaves.
    pub(crate) kind: Kind,
    /// The unit.
    pub(crate) unit: Unit,
    /// What it says.
    pub(crate) help: &'static str,
}

/// Seconds of a call: from a tenth of a millisecond, in which a call over the socket is answered, to the longest deadline.
const CALL_SECONDS: &[f64] =
    &[0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0];
/// Seconds of a copy, from submission to answer: from a few microseconds to a device that is started again.
const COPY_SECONDS: &[f64] = &[
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.025, 0.1, 1.0, 10.0,
];

const fn counter(name: &'static str, unit: Unit, help: &'static str) -> Metric {
    Metric { name, kind: Kind::Counter, unit, help }
}

const fn gauge(name: &'static str, unit: Unit, help: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, unit, help }
}

const fn histogram(name: &'static str, buckets: &'static [f64], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Histogram(buckets), unit: Unit::Seconds, help }
}

pub(crate) const BUILD_INFO: Metric =
    gauge("statecopy_build_info", Unit::Count, "1, labelled with the daemon's version.");
pub(crate) const UPTIME: Metric =
    gauge("statecopy_uptime_seconds", Unit::Seconds, "Time since the daemon started.");
pub(crate) const READY: Metric = gauge(
    "statecopy_ready",
    Unit::Count,
    "1 while every device serves and the daemon does not drain.",
);
pub(crate) const DRAINING: Metric =
    gauge("statecopy_draining", Unit::Count, "1 once the daemon drains.");
pub(crate) const DEVICE_UP: Metric =
    gauge("statecopy_device_up", Unit::Count, "1 while the device's process serves.");
pub(crate) const DEVICE_RESTARTS: Metric = counter(
    "statecopy_device_restarts_total",
    Unit::Count,
    "How often the device's process was started again.",
);
pub(crate) const DEVICE_FOOTPRINT: Metric = gauge(
    "statecopy_device_footprint_bytes",
    Unit::Bytes,
    "What the device's process takes for itself: its context and tables in device memory, words in host memory.",
);
pub(crate) const SESSIONS: Metric =
    gauge("statecopy_sessions", Unit::Count, "Open sessions, by state.");
pub(crate) const SESSIONS_OPENED: Metric =
    counter("statecopy_sessions_opened_total", Unit::Count, "Sessions opened.");
pub(crate) const SESSIONS_ENDED: Metric =
    counter("statecopy_sessions_ended_total", Unit::Count, "Sessions ended, by reason.");
pub(crate) const REGIONS: Metric = gauge("statecopy_regions", Unit::Count, "Registered regions.");
pub(crate) const REGION_BYTES: Metric = gauge(
    "statecopy_region_bytes",
    Unit::Bytes,
    "Bytes of registered regions; memory that is registered twice counts twice.",
);
pub(crate) const LAYERS: Metric = gauge("statecopy_layers", Unit::Count, "Published layers.");
pub(crate) const GRAPH_SLOTS: Metric = gauge(
    "statecopy_graph_slots",
    Unit::Count,
    "Copies of captured graphs that are armed. While there are any the executor looks for their bells.",
);
pub(crate) const DESCRIPTORS_PENDING: Metric = gauge(
    "statecopy_descriptors_pending",
    Unit::Count,
    "Descriptors that wait for the registration of their region.",
);
pub(crate) const REQUESTS_PENDING: Metric = gauge(
    "statecopy_requests_pending",
    Unit::Count,
    "Copies and registrations that wait or run, over gRPC and in the workers' rings.",
);
pub(crate) const REFUSALS: Metric = counter(
    "statecopy_refusals_total",
    Unit::Count,
    "Refusals answered over gRPC and on the descriptor socket, by code.",
);
pub(crate) const CALL_DURATION: Metric = histogram(
    "statecopy_grpc_call_seconds",
    CALL_SECONDS,
    "Time from a gRPC call to its answer, by method; of a stream, to its first message.",
);
pub(crate) const COPY_DURATION: Metric = histogram(
    "statecopy_copy_seconds",
    COPY_SECONDS,
    "Time of a copy that was asked for over gRPC, from submission to answer, by direction.",
);
pub(crate) const EVENT_STREAMS_LOST: Metric = counter(
    "statecopy_event_streams_lost_total",
    Unit::Count,
    "Event streams ended because their client did not read.",
);
pub(crate) const LOG_LINES_SUPPRESSED: Metric = counter(
    "statecopy_log_lines_suppressed_total",
    Unit::Count,
    "Log lines about bad requests and about sessions that the rate limit held back.",
);
pub(crate) const COPIES: Metric =
    counter("statecopy_copies_total", Unit::Count, "Copies completed, by direction.");
pub(crate) const ROWS_COPIED: Metric = counter(
    "statecopy_rows_copied_total",
    Unit::Count,
    "Rows whose payload was copied, by direction.",
);
pub(crate) const ROWS_MASKED: Metric = counter(
    "statecopy_rows_masked_total",
    Unit::Count,
    "Rows that were cleared (gather) or skipped (scatter), by direction.",
);
pub(crate) const ROWS_ORDERED: Metric = counter(
    "statecopy_rows_ordered_total",
    Unit::Count,
    "Rows of stream-ordered copies and captured graphs, copied or masked as the device sees, by direction.",
);
pub(crate) const BYTES_COPIED: Metric =
    counter("statecopy_bytes_copied_total", Unit::Bytes, "Payload bytes written, by direction.");
pub(crate) const EXECUTOR_NANOSECONDS: Metric = counter(
    "statecopy_executor_nanoseconds_total",
    Unit::Nanoseconds,
    "Time from taking a request to its answer in the device process, by direction.",
);
pub(crate) const EXECUTOR_REFUSALS: Metric = counter(
    "statecopy_executor_refusals_total",
    Unit::Count,
    "Requests that the executor refused, by code.",
);
pub(crate) const LAUNCHES: Metric =
    counter("statecopy_launches_total", Unit::Count, "Launches, by compiled variant.");
pub(crate) const ENTRIES: Metric = counter(
    "statecopy_entries_total",
    Unit::Count,
    "Entries of the compiler, the environment and the device allocator, by door.",
);
pub(crate) const ENTRIES_WHILE_SERVING: Metric = counter(
    "statecopy_entries_while_serving_total",
    Unit::Count,
    "The same between a seal and the next registration: 0, or something is wrong.",
);
pub(crate) const RINGS_BROKEN: Metric = counter(
    "statecopy_rings_broken_total",
    Unit::Count,
    "Rings of workers whose words made no sense: their sessions were ended.",
);
pub(crate) const LANES_FAILED: Metric = counter(
    "statecopy_lanes_failed_total",
    Unit::Count,
    "Lanes of stream-ordered copies that were failed: a copy could not be made at its bell, and every wait was let go.",
);
pub(crate) const GRAPHS_FAILED: Metric = counter(
    "statecopy_graphs_failed_total",
    Unit::Count,
    "Captured graphs that were failed: a copy could not be made at its bell, and every wait was let go.",
);
pub(crate) const BELL_LOOKS: Metric = counter(
    "statecopy_bell_looks_total",
    Unit::Count,
    "Short sleeps of the executor between two looks at the bells of lanes and graphs: what waiting for streams costs while nothing runs.",
);

pub(crate) const MACHINE_FINDING: Metric = gauge(
    "statecopy_machine_finding",
    Unit::Count,
    "1 for what was found of the machine when the devices were started, by check and severity.",
);
pub(crate) const DEVICE_MACHINE: Metric = gauge(
    "statecopy_device_machine_info",
    Unit::Count,
    "1, labelled with how the device is shared, its modes and the versions of driver and compiler.",
);
pub(crate) const DEVICE_MEMORY_FREE: Metric = gauge(
    "statecopy_device_memory_free_at_start_bytes",
    Unit::Bytes,
    "Device memory that was free beside the context when the device's process was started.",
);
pub(crate) const DEVICE_CONNECTIONS: Metric = gauge(
    "statecopy_device_connections",
    Unit::Count,
    "Hardware connections of the device process's context.",
);
pub(crate) const DEVICE_STREAM_OPERATIONS: Metric = gauge(
    "statecopy_device_stream_operations",
    Unit::Count,
    "1 where memory operations of streams were tried at the start, and work.",
);
pub(crate) const DEVICE_ORDERED_COPY: Metric = gauge(
    "statecopy_device_stream_ordered_copy_expected_seconds",
    Unit::Seconds,
    "What a stream-ordered copy of one state is expected to take, by what was measured on one H200.",
);

/// All of them.
pub(crate) const METRICS: [Metric; 41] = [
    BUILD_INFO,
    UPTIME,
    READY,
    DRAINING,
    DEVICE_UP,
    DEVICE_RESTARTS,
    DEVICE_FOOTPRINT,
    SESSIONS,
    SESSIONS_OPENED,
    SESSIONS_ENDED,
    REGIONS,
    REGION_BYTES,
    LAYERS,
    GRAPH_SLOTS,
    DESCRIPTORS_PENDING,
    REQUESTS_PENDING,
    REFUSALS,
    CALL_DURATION,
    COPY_DURATION,
    EVENT_STREAMS_LOST,
    LOG_LINES_SUPPRESSED,
    COPIES,
    ROWS_COPIED,
    ROWS_MASKED,
    ROWS_ORDERED,
    BYTES_COPIED,
    EXECUTOR_NANOSECONDS,
    EXECUTOR_REFUSALS,
    LAUNCHES,
    ENTRIES,
    ENTRIES_WHILE_SERVING,
    RINGS_BROKEN,
    MACHINE_FINDING,
    DEVICE_MACHINE,
    DEVICE_MEMORY_FREE,
    DEVICE_CONNECTIONS,
    DEVICE_STREAM_OPERATIONS,
    DEVICE_ORDERED_COPY,
    LANES_FAILED,
    GRAPHS_FAILED,
    BELL_LOOKS,
];
