//! The metrics and their handles. All are there, at zero, from the first scrape.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder as _};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use statecopy_proto::{Direction, RefusalCode};

use super::declared::{self, Kind, METRICS, Metric};
use crate::counters::Counter as DeviceCounter;
use crate::supervisor::device::DeviceHandle;
use crate::supervisor::services::Method;
use crate::supervisor::sessions::{EndReason, Totals};

/// The states of sessions in the table, as [`declared::SESSIONS`] labels them.
const SESSION_STATES: [&str; 4] = ["attaching", "attached", "registering", "published"];

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
    descriptors_pending: Gauge,
    requests_pending: Gauge,
}

struct DeviceMetrics {
    device: DeviceHandle,
    up: Gauge,
    restarts: Counter,
    footprint: Footprint,
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
    pub(crate) fn new(devices: &[DeviceHandle]) -> Result<Self, BuildError> {
        let registry = Registry::new()?;
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        registry.gauge(&declared::BUILD_INFO, &version).set(1.0);
        let labelled = |name: &'static str, value: &'static str| [(name, value)];
        let counters = |metric: &Metric, name: &'static str, value: &'static str| {
            registry.counter(metric, &labelled(name, value))
        };
        Ok(Self {
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
        })
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

    /// Everything in Prometheus' text format.
    pub(crate) fn render(&self, snapshot: &Snapshot) -> String {
        self.gauges.set(snapshot);
        for device in &self.devices {
            device.read();
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
            device: device.clone(),
        }
    }

    fn read(&self) {
        let state = self.device.state().borrow().clone();
        self.up.set(f64::from(u8::from(state.ready)));
        self.restarts.absolute(state.restarts);
        self.footprint.context.set(float(state.footprint.context));
        self.footprint.tables.set(float(state.footprint.tables));
        self.footprint.words.set(float(state.footprint.words));
        for (from, to) in &self.counters {
            to.absolute(self.device.counters().get(*from));
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
