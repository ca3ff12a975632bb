//! The metrics and their handles. All are there, at zero, from the first scrape.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder as _};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use statecopy_kernels::findings::Finding;
use statecopy_proto::{Direction, RefusalCode};

use super::declared::{self, Kind, METRICS, Metric};
use crate::counters::Counter as DeviceCounter;
use crate::machine::Found;
use crate::supervisor::device::DeviceHandle;
use crate::supervisor::services::Method;
use crate::supervisor::sessions::{EndReason, Totals};

/// The states of sessions in the table, as [`declared::SESSIONS`] labels them.
const SESSION_STATES: [&str; 4] = ["attaching", "attached", "registering", "published"];

/// What findings about no device are labelled with.
const HOST: &str = "host";

/// Every metric's handle.
pub(crate) struct Metrics {
    prometheus: PrometheusHandle,
    refusals: Vec<(RefusalCode, Counter)>,
    calls: Vec<(Method, Histogram)>,
    copies: Vec<(Direction, Histogram)>,
    sessions_opened: Counter,
    sessions_ended: Vec<(&'static str, Counter)>,
    event_streams_lost: Counter,
    log_lines_suppressed: Counter,
    gauges: Gauges,
    devices: Vec<DeviceMetrics>,
    findings: Ones,
    registry: Registry,
}

/// What is set at each scrape.
struct Gauges {
    uptime: Gauge,
    ready: Gauge,
    draining: Gauge,
    sessions: Vec<(&'static str, Gauge)>,
    regions: Gauge,
    region_bytes: Gauge,
    layers: Gauge,
    graph_slots: Gauge,
    descriptors_pending: Gauge,
    requests_pending: Gauge,
}

struct DeviceMetrics {
    device: DeviceHandle,
    up: Gauge,
    restarts: Counter,
    footprint: Footprint,
    uuid: String,
    machine: Ones,
    memory_free: Gauge,
    connections: Gauge,
    stream_operations: Gauge,
    ordered_copy: Gauge,
    counters: Vec<(DeviceCounter, Counter)>,
}

/// What the device's process takes for itself, by part.
struct Footprint {
    context: Gauge,
    tables: Gauge,
    words: Gauge,
}

/// What a scrape shows beside the counters.
#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    /// Since the daemon started.
    pub(crate) uptime: Duration,
    /// Whether it is ready.
    pub(crate) ready: bool,
    /// Whether it drains.
    pub(crate) draining: bool,
    /// Copies and registrations that wait or run, over gRPC and in the workers' rings.
    pub(crate) requests_pending: u64,
    /// What the sessions own.
    pub(crate) totals: Totals,
}

impl Metrics {
    /// Declares every metric, at zero.
    ///
    /// # Errors
    /// When a histogram has no buckets.
    pub(crate) fn new(devices: &[DeviceHandle], host: &[Finding]) -> Result<Self, BuildError> {
        let registry = Registry::new()?;
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        registry.gauge(&declared::BUILD_INFO, &version).set(1.0);
        let labelled = |name: &'static str, value: &'static str| [(name, value)];
        let counters = |metric: &Metric, name: &'static str, value: &'static str| {
            registry.counter(metric, &labelled(name, value))
        };
        let metrics = Self {
            refusals: RefusalCode::ALL
                .map(|code| (code, counters(&declared::REFUSALS, "code", code.label())))
                .into(),
            calls: Method::ALL
                .map(|method| {
                    let labels = labelled("method", method.label());
                    (method, registry.histogram(&declared::CALL_DURATION, &labels))
                })
                .into(),
            copies: Direction::ALL
                .map(|direction| {
                    let labels = labelled("direction", direction.label());
                    (direction, registry.histogram(&declared::COPY_DURATION, &labels))
                })
                .into(),
            sessions_opened: registry.counter(&declared::SESSIONS_OPENED, &[]),
            sessions_ended: EndReason::ALL
                .map(|reason| {
                    let label = reason.label();
                    (label, counters(&declared::SESSIONS_ENDED, "reason", label))
                })
                .into(),
            event_streams_lost: registry.counter(&declared::EVENT_STREAMS_LOST, &[]),
            log_lines_suppressed: registry.counter(&declared::LOG_LINES_SUPPRESSED, &[]),
            gauges: Gauges::new(&registry),
            devices: devices.iter().map(|device| DeviceMetrics::new(&registry, device)).collect(),
            prometheus: registry.recorder.handle(),
            findings: Ones::default(),
            registry,
        };
        metrics.show(Some(HOST), host);
        Ok(metrics)
    }

    /// A refusal was answered.
    pub(crate) fn refused(&self, code: RefusalCode) {
        find(&self.refusals, &code, |counter| counter.increment(1));
    }

    /// A call was answered.
    pub(crate) fn called(&self, method: Method, took: Duration) {
        find(&self.calls, &method, |histogram| histogram.record(took.as_secs_f64()));
    }

    /// A copy was answered.
    pub(crate) fn copied(&self, direction: Direction, took: Duration) {
        find(&self.copies, &direction, |histogram| histogram.record(took.as_secs_f64()));
    }

    /// A session was opened.
    pub(crate) fn session_opened(&self) {
        self.sessions_opened.increment(1);
    }

    /// A session ended.
    pub(crate) fn session_ended(&self, reason: &EndReason) {
        find(&self.sessions_ended, &reason.label(), |counter| counter.increment(1));
    }

    /// Event streams were ended because their clients did not read.
    pub(crate) fn event_streams_lost(&self, count: u64) {
        self.event_streams_lost.increment(count);
    }

    /// A log line was held back.
    pub(crate) fn log_line_suppressed(&self) {
        self.log_lines_suppressed.increment(1);
    }

    /// Shows what was found, of that device where one is named; what was found before, and no longer is, is 0.
    pub(crate) fn show(&self, device: Option<&str>, findings: &[Finding]) {
        let device = device.unwrap_or("starting");
        let labels = findings.iter().map(|finding| {
            vec![
                ("device", device.to_owned()),
                ("check", finding.check.to_owned()),
                ("severity", finding.severity.label().to_owned()),
            ]
        });
        self.findings.set(&self.registry, &declared::MACHINE_FINDING, device, labels);
    }

    /// Everything in Prometheus' text format.
    pub(crate) fn render(&self, snapshot: &Snapshot) -> String {
        self.gauges.set(snapshot);
        for device in &self.devices {
            let found = device.read(&self.registry);
            self.show(Some(&device.uuid), &found.findings);
        }
        self.prometheus.render()
    }

    /// Folds recorded durations into their buckets; without it they pile up between scrapes.
    pub(crate) fn run_upkeep(&self) {
        self.prometheus.run_upkeep();
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Gauges {
    fn new(registry: &Registry) -> Self {
        let gauge = |metric: &Metric| registry.gauge(metric, &[]);
        let sessions = SESSION_STATES
            .map(|state| (state, registry.gauge(&declared::SESSIONS, &[("state", state)])));
        Self {
            uptime: gauge(&declared::UPTIME),
            ready: gauge(&declared::READY),
            draining: gauge(&declared::DRAINING),
            sessions: sessions.into(),
            regions: gauge(&declared::REGIONS),
            region_bytes: gauge(&declared::REGION_BYTES),
            layers: gauge(&declared::LAYERS),
            graph_slots: gauge(&declared::GRAPH_SLOTS),
            descriptors_pending: gauge(&declared::DESCRIPTORS_PENDING),
            requests_pending: gauge(&declared::REQUESTS_PENDING),
        }
    }

    fn set(&self, snapshot: &Snapshot) {
        let totals = &snapshot.totals;
        self.uptime.set(snapshot.uptime.as_secs_f64());
        self.ready.set(f64::from(u8::from(snapshot.ready)));
        self.draining.set(f64::from(u8::from(snapshot.draining)));
        for (state, gauge) in &self.sessions {
            gauge.set(float(totals.sessions.get(state).copied().unwrap_or(0)));
        }
        self.regions.set(float(totals.regions));
        self.region_bytes.set(float(totals.region_bytes));
        self.layers.set(float(totals.layers));
        self.graph_slots.set(float(totals.graph_slots));
        self.descriptors_pending.set(float(totals.descriptors_pending));
        self.requests_pending.set(float(snapshot.requests_pending));
    }
}

impl DeviceMetrics {
    fn new(registry: &Registry, device: &DeviceHandle) -> Self {
        let uuid = device.description().uuid.to_string();
        let labels = [("device", uuid.as_str())];
        let part = |part: &'static str| {
            let labels = [("device", uuid.as_str()), ("part", part)];
            registry.gauge(&declared::DEVICE_FOOTPRINT, &labels)
        };
        let counters = DeviceCounter::all().filter_map(|counter| {
            let metric = METRICS.iter().find(|metric| metric.name == counter.name())?;
            let mut labels = vec![("device", uuid.as_str())];
            labels.extend(counter.label());
            Some((counter, registry.counter(metric, &labels)))
        });
        Self {
            up: registry.gauge(&declared::DEVICE_UP, &labels),
            restarts: registry.counter(&declared::DEVICE_RESTARTS, &labels),
            footprint: Footprint {
                context: part("context"),
                tables: part("tables"),
                words: part("words"),
            },
            counters: counters.collect(),
            machine: Ones::default(),
            memory_free: registry.gauge(&declared::DEVICE_MEMORY_FREE, &labels),
            connections: registry.gauge(&declared::DEVICE_CONNECTIONS, &labels),
            stream_operations: registry.gauge(&declared::DEVICE_STREAM_OPERATIONS, &labels),
            ordered_copy: registry.gauge(&declared::DEVICE_ORDERED_COPY, &labels),
            uuid: uuid.clone(),
            device: device.clone(),
        }
    }

    /// What the process's start found is shown by whoever shows the host's too.
    fn read(&self, registry: &Registry) -> Arc<Found> {
        let state = self.device.state().borrow().clone();
        self.up.set(f64::from(u8::from(state.ready)));
        self.restarts.absolute(state.restarts);
        self.footprint.context.set(float(state.footprint.context));
        self.footprint.tables.set(float(state.footprint.tables));
        self.footprint.words.set(float(state.footprint.words));
        for (from, to) in &self.counters {
            to.absolute(self.device.counters().get(*from));
        }
        let machine = &state.found.machine;
        let label = |name: &'static str, value: &str| (name, value.to_owned());
        let labels = vec![
            label("device", &self.uuid),
            label("sharing", machine.sharing),
            label("compute_mode", machine.compute_mode),
            label("mig", machine.mig),
            label("driver", &machine.driver),
            label("driver_release", &machine.driver_release),
            label("nvrtc", &machine.nvrtc),
        ];
        self.machine.set(registry, &declared::DEVICE_MACHINE, &self.uuid, [labels].into_iter());
        self.memory_free.set(float(machine.memory_free));
        self.connections.set(f64::from(machine.connections));
        self.stream_operations.set(f64::from(u8::from(machine.stream_operations)));
        self.ordered_copy.set(float(machine.ordered_copy_ns) / 1e9);
        state.found
    }
}

/// The labels of one gauge.
type Labels = Vec<(&'static str, String)>;

/// Gauges of one metric that are 1 for what holds, and 0 for what held once. Their labels come from closed sets, or from a
/// driver's version.
#[derive(Default)]
struct Ones(Mutex<BTreeMap<(String, Labels), Gauge>>);

impl Ones {
    fn set(
        &self,
        registry: &Registry,
        metric: &Metric,
        of: &str,
        holding: impl Iterator<Item = Labels>,
    ) {
        let mut gauges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        gauges.iter().filter(|((known, _), _)| known == of).for_each(|(_, gauge)| gauge.set(0.0));
        for labels in holding {
            let gauge = gauges.entry((of.to_owned(), labels.clone())).or_insert_with(|| {
                let labels: Vec<_> =
                    labels.iter().map(|(name, value)| (*name, value.as_str())).collect();
                registry.gauge(metric, &labels)
            });
            gauge.set(1.0);
        }
    }
}

/// Makes handles; each daemon has its own, so that two in one process do not mix.
struct Registry {
    recorder: PrometheusRecorder,
}

impl Registry {
    fn new() -> Result<Self, BuildError> {
        let mut builder = PrometheusBuilder::new();
        for metric in METRICS {
            if let Kind::Histogram(buckets) = metric.kind {
                let name = Matcher::Full(metric.name.to_owned());
                builder = builder.set_buckets_for_metric(name, buckets)?;
            }
        }
        let recorder = builder.build_recorder();
        for metric in METRICS {
            let name = KeyName::from_const_str(metric.name);
            let (unit, help) = (Some(metric.unit), metric.help.into());
            match metric.kind {
                Kind::Counter => recorder.describe_counter(name, unit, help),
                Kind::Gauge => recorder.describe_gauge(name, unit, help),
                Kind::Histogram(_) => recorder.describe_histogram(name, unit, help),
            }
        }
        Ok(Self { recorder })
    }

    fn counter(&self, metric: &Metric, labels: &[(&'static str, &str)]) -> Counter {
        let counter = self.recorder.register_counter(&key(metric, labels), &METADATA);
        counter.absolute(0);
        counter
    }

    fn gauge(&self, metric: &Metric, labels: &[(&'static str, &str)]) -> Gauge {
        self.recorder.register_gauge(&key(metric, labels), &METADATA)
    }

    fn histogram(&self, metric: &Metric, labels: &[(&'static str, &str)]) -> Histogram {
        self.recorder.register_histogram(&key(metric, labels), &METADATA)
    }
}

const METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, None);

fn key(metric: &Metric, labels: &[(&'static str, &str)]) -> Key {
    let labels: Vec<Label> =
        labels.iter().map(|(name, value)| Label::new(*name, (*value).to_owned())).collect();
    Key::from_parts(metric.name, labels)
}

fn find<K: PartialEq, H>(handles: &[(K, H)], key: &K, act: impl FnOnce(&H)) {
    if let Some((_, handle)) = handles.iter().find(|(at, _)| at == key) {
        act(handle);
    }
}

/// A count as Prometheus holds it; exact up to 2^53.
fn float(count: u64) -> f64 {
    #[expect(
        clippy::cast_precision_loss,
        reason = "gauges are floats in Prometheus; counts past 2^53 lose their last digits"
    )]
    let float = count as f64;
    float
}

#[cfg(test)]
mod tests;
