use super::*;
use crate::supervisor::testing::scripted_device;

const DOCUMENTATION: &str = include_str!("../../../../../docs/metrics.md");

fn snapshot() -> Snapshot {
    Snapshot {
        uptime: Duration::from_secs(7),
        ready: true,
        draining: false,
        requests_pending: 3,
        totals: Totals::default(),
    }
}

/// The lines of a metric in a scrape, without comments.
fn samples<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let begins =
        |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ', '_']));
    text.lines().filter(begins).collect()
}

#[test]
fn every_metric_is_emitted_from_the_first_scrape_and_documented() {
    let device = scripted_device();
    let metrics =
        Metrics::new(std::slice::from_ref(&device.handle), &crate::machine::host()).unwrap();
    let text = metrics.render(&snapshot());
    for metric in METRICS {
        assert!(!samples(&text, metric.name).is_empty(), "{} is missing:\n{text}", metric.name);
        assert!(
            text.contains(&format!("# HELP {} {}", metric.name, metric.help)),
            "{}",
            metric.name
        );
        let kind = match metric.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram(_) => "histogram",
        };
        assert!(text.contains(&format!("# TYPE {} {kind}", metric.name)), "{}", metric.name);
        let row = format!("| `{}` | {kind} |", metric.name);
        assert!(DOCUMENTATION.contains(&row), "docs/metrics.md lacks {row}");
    }
    for line in DOCUMENTATION.lines().filter(|line| line.starts_with("| `statecopy_")) {
        let name = line.split('`').nth(1).unwrap();
        assert!(METRICS.iter().any(|metric| metric.name == name), "{name} is documented only");
    }
}

#[test]
fn every_counter_of_the_device_process_is_declared_and_exported() {
    for counter in DeviceCounter::all() {
        assert!(METRICS.iter().any(|metric| metric.name == counter.name()), "{counter:?}");
    }
    let device = scripted_device();
    let metrics =
        Metrics::new(std::slice::from_ref(&device.handle), &crate::machine::host()).unwrap();
    for (at, counter) in DeviceCounter::all().enumerate() {
        device.handle.counters().add(counter, at as u64 + 1);
    }
    let text = metrics.render(&snapshot());
    for (at, counter) in DeviceCounter::all().enumerate() {
        let label = counter.label().map(|(label, value)| format!(",{label}=\"{value}\""));
        let wanted = format!("{}}} {}", label.unwrap_or_default(), at + 1);
        let lines = samples(&text, counter.name());
        assert!(lines.iter().any(|line| line.ends_with(&wanted)), "{wanted} in {lines:?}");
    }
}

#[test]
fn what_is_counted_is_shown() {
    let device = scripted_device();
    let metrics =
        Metrics::new(std::slice::from_ref(&device.handle), &crate::machine::host()).unwrap();
    metrics.refused(RefusalCode::Overlap);
    metrics.called(Method::Ping, Duration::from_micros(200));
    metrics.copied(Direction::Gather, Duration::from_micros(40));
    metrics.session_opened();
    metrics.session_ended(&EndReason::WorkerDied);
    metrics.event_streams_lost(2);
    metrics.log_line_suppressed();
    let text = metrics.render(&snapshot());
    for line in [
        "statecopy_refusals_total{code=\"OVERLAP\"} 1",
        "statecopy_refusals_total{code=\"DRAINING\"} 0",
        "statecopy_grpc_call_seconds_bucket{method=\"Ping\",le=\"0.0001\"} 0",
        "statecopy_grpc_call_seconds_bucket{method=\"Ping\",le=\"0.00025\"} 1",
        "statecopy_copy_seconds_count{direction=\"gather\"} 1",
        "statecopy_sessions_opened_total 1",
        "statecopy_sessions_ended_total{reason=\"worker_died\"} 1",
        "statecopy_event_streams_lost_total 2",
        "statecopy_log_lines_suppressed_total 1",
        "statecopy_uptime_seconds 7",
        "statecopy_ready 1",
        "statecopy_requests_pending 3",
        "statecopy_sessions{state=\"published\"} 0",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} is missing:\n{text}");
    }
}
