//! What operators see: metrics, health, reflection, status, configuration, logs.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use prometheus_parse::{Scrape, Value};
use rustix::process::Signal;
use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::v1::PingRequest;
use statecopy_proto::{DataType, Direction, RefusalCode};
use statecopy_tests::{Daemon, DaemonOptions, Indices, Rig, Session, binary, send_signal, until};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

fn rig(daemon: &Daemon) -> Rig {
    let layout = CacheLayout::with_page_stride(DataType::Float32, [6, 2, 4, 16], 200).unwrap();
    Rig::new(&daemon.connect(), &[(layout, 0)], 4)
}

fn scrape(daemon: &Daemon) -> Scrape {
    let answer = daemon.get("/metrics");
    assert_eq!(answer.status, 200);
    assert!(
        answer.head.to_ascii_lowercase().contains("content-type: text/plain"),
        "{}",
        answer.head
    );
    let lines = answer.body.lines().map(|line| Ok(line.to_owned()));
    Scrape::parse(lines).unwrap_or_else(|error| panic!("{error}:\n{}", answer.body))
}

/// The value of a metric with exactly this label.
fn value(scrape: &Scrape, metric: &str, label: (&str, &str)) -> f64 {
    let samples = scrape.samples.iter().filter(|sample| sample.metric == metric);
    let found: Vec<_> =
        samples.filter(|sample| sample.labels.get(label.0) == Some(label.1)).collect();
    assert_eq!(found.len(), 1, "{metric} {label:?}: {found:?}");
    match found[0].value {
        Value::Counter(value) | Value::Gauge(value) | Value::Untyped(value) => value,
        Value::Histogram(_) | Value::Summary(_) => panic!("{metric} is no number"),
    }
}

#[test]
fn metrics_are_valid_and_complete_from_the_first_scrape() {
    let daemon = Daemon::start();
    let first = scrape(&daemon);
    assert!(first.samples.len() > 40, "{:?}", first.samples);
    for sample in &first.samples {
        assert!(sample.metric.starts_with("statecopy_"), "{sample:?}");
    }
    // Every metric has a help and a type.
    let text = daemon.get("/metrics").body;
    let families: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    for family in &families {
        assert!(text.contains(&format!("# HELP {family} ")), "{family} has no help");
    }
    // Each code is a label from the start, and no other label ever is.
    for code in RefusalCode::ALL {
        let count = value(&first, "statecopy_refusals_total", ("code", code.label()));
        assert!(count.abs() < f64::EPSILON, "{code}");
    }

    let mut rig = rig(&daemon);
    rig.copy(Direction::Gather, 0, &Indices::Int32(vec![1, -1, 2]), None).unwrap();
    rig.copy(Direction::Scatter, 0, &Indices::Int64(vec![1]), None).unwrap();
    let mut request = rig.request(0, &Indices::Int32(vec![1]), None);
    request.signature ^= 1;
    rig.session.copy(Direction::Gather, request).unwrap_err();

    let after = scrape(&daemon);
    let gather = ("direction", "gather");
    let payload = 2.0 * 4.0 * 16.0 * 4.0;
    for (metric, label, expected) in [
        ("statecopy_copies_total", gather, 1.0),
        ("statecopy_rows_copied_total", gather, 2.0),
        ("statecopy_rows_masked_total", gather, 1.0),
        ("statecopy_bytes_copied_total", gather, 3.0 * payload),
        ("statecopy_copies_total", ("direction", "scatter"), 1.0),
        ("statecopy_launches_total", ("variant", "gather/int32"), 1.0),
        ("statecopy_launches_total", ("variant", "scatter/int64"), 1.0),
        ("statecopy_refusals_total", ("code", "SIGNATURE_MISMATCH"), 1.0),
        ("statecopy_sessions", ("state", "published"), 1.0),
        ("statecopy_entries_while_serving_total", ("door", "compiler"), 0.0),
    ] {
        let now = value(&after, metric, label);
        assert!(
            (now - expected).abs() < f64::EPSILON,
            "{metric} {label:?} is {now}, not {expected}"
        );
    }
    let names = |scrape: &Scrape| -> BTreeSet<String> {
        scrape.samples.iter().map(|sample| sample.metric.clone()).collect()
    };
    assert_eq!(names(&first), names(&after), "no metric appears later");
}

#[test]
fn counters_never_fall_when_the_device_process_is_started_again() {
    let daemon = Daemon::start();
    let mut rig = rig(&daemon);
    for _ in 0..5 {
        rig.copy(Direction::Gather, 0, &Indices::Int32(vec![1]), None).unwrap();
    }
    let old = daemon.device_process();
    send_signal(old, Signal::KILL).unwrap();
    until("another one serves", || daemon.inspect().ready && daemon.device_process() != old);
    rig.copy(Direction::Gather, 0, &Indices::Int32(vec![1]), None).unwrap();
    let copies = value(&scrape(&daemon), "statecopy_copies_total", ("direction", "gather"));
    assert!((copies - 6.0).abs() < f64::EPSILON, "{copies}");
}

#[test]
fn health_metrics_and_status_answer_while_a_device_call_never_returns() {
    let daemon = Daemon::start();
    let rig = rig(&daemon);
    let device = daemon.device_process();
    send_signal(device, Signal::STOP).unwrap();
    let (wire, request) =
        (rig.session.wire().clone(), rig.request(0, &Indices::Int32(vec![1]), None));
    let copy = std::thread::spawn(move || wire.ask(wire.copies().gather(request)));
    until("it is in flight", || daemon.metric("statecopy_requests_pending") == 1.0);
    for _ in 0..20 {
        assert_eq!(daemon.get("/healthz").status, 200);
        scrape(&daemon);
        let wire = daemon.wire();
        wire.ask(wire.admin().ping(PingRequest {})).unwrap();
    }
    // The plans are the device process's to tell; everything else is shown without it.
    assert_eq!(daemon.inspect().sessions.len(), 1);
    send_signal(device, Signal::CONT).unwrap();
    copy.join().unwrap().unwrap();
}

#[test]
fn http_answers_what_it_knows_and_404_to_the_rest() {
    let daemon = Daemon::start();
    for (path, status) in
        [("/healthz", 200), ("/readyz", 200), ("/metrics", 200), ("/", 404), ("/etc/passwd", 404)]
    {
        assert_eq!(daemon.get(path).status, status, "{path}");
    }
}

#[test]
fn the_standard_health_service_answers() {
    let daemon = Daemon::start();
    let wire = daemon.wire();
    let mut client = HealthClient::new(wire.channel());
    for service in ["", "statecopy.v1.SessionService", "statecopy.v1.CopyService"] {
        let request = HealthCheckRequest { service: service.to_owned() };
        let reply = wire.ask(client.check(request)).unwrap();
        assert_eq!(reply.status(), ServingStatus::Serving, "{service}");
    }
    let request = HealthCheckRequest { service: "no.such.Service".to_owned() };
    assert_eq!(wire.ask(client.check(request)).unwrap_err().code(), tonic::Code::NotFound);
}

#[test]
fn reflection_lists_every_service() {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

    let daemon = Daemon::start();
    let wire = daemon.wire();
    let mut client = ServerReflectionClient::new(wire.channel());
    let ask =
        |message| ServerReflectionRequest { host: String::new(), message_request: Some(message) };
    let requests = tokio_stream::iter(vec![
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol("statecopy.v1.CopyService".to_owned())),
    ]);
    let mut answers = wire.ask(client.server_reflection_info(requests)).unwrap();
    let first = wire.wait(answers.message()).unwrap().unwrap().message_response;
    let Some(MessageResponse::ListServicesResponse(list)) = first else { panic!("{first:?}") };
    let names: BTreeSet<String> = list.service.into_iter().map(|service| service.name).collect();
    for service in ["SessionService", "RegistryService", "CopyService", "AdminService"] {
        assert!(names.contains(&format!("statecopy.v1.{service}")), "{names:?}");
    }
    assert!(names.contains("grpc.health.v1.Health"), "{names:?}");
    let second = wire.wait(answers.message()).unwrap().unwrap().message_response;
    assert!(matches!(second, Some(MessageResponse::FileDescriptorResponse(_))), "{second:?}");
}

#[test]
fn inspect_shows_sessions_regions_layers_and_plans() {
    let daemon = Daemon::start();
    let mut rig = rig(&daemon);
    rig.copy(Direction::Gather, 0, &Indices::Int32(vec![1]), None).unwrap();
    let status = daemon.inspect();
    assert_eq!(status.incarnation, rig.session.opened.incarnation);
    assert_eq!(status.supervisor_pid, daemon.supervisor());
    assert!(status.ready && !status.draining && !status.version.is_empty());
    let session = &status.sessions[0];
    assert_eq!((session.session_id, session.label.as_str()), (rig.session.id(), "end-to-end"));
    assert_eq!((session.state.as_str(), session.worker_pid), ("published", std::process::id()));
    assert_eq!((session.copies, session.refusals), (1, 0));
    let regions: Vec<_> = session.regions.iter().map(|it| (it.region_id, it.size_bytes)).collect();
    let expected = [(rig.cache_region, rig.cache.bytes()), (rig.packed_region, rig.packed.bytes())];
    assert_eq!(regions, expected);
    let (layer, published) = (&session.layers[0], &rig.layers[0].published);
    assert_eq!((&layer.name, layer.binding_id), (&published.name, published.binding_id));
    assert_eq!((layer.signature, layer.max_selected), (published.signature, 4));
    let plan = &status.devices[0].plans[0];
    assert_eq!((plan.signature, plan.state.as_str()), (published.signature, "published"));
    let launched: Vec<u64> = plan.variants.iter().map(|variant| variant.launches).collect();
    assert_eq!(launched.iter().sum::<u64>(), 1, "{plan:?}");
}

fn statecopyd(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(binary("statecopyd", "statecopyd"));
    command.args(arguments).envs(variables.iter().copied()).output().unwrap()
}

#[test]
fn config_prints_the_effective_configuration_and_reads_it_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("statecopyd.toml");
    std::fs::write(&file, "drain_grace_ms = 1\nspin_us = 1\n[limits]\nlayers_max = 7\n").unwrap();
    let file = file.to_str().unwrap();
    let variables = [("STATECOPY_SPIN_US", "2"), ("STATECOPY_LIMITS__REGIONS_MAX", "9")];
    let output = statecopyd(&["config", "--config", file, "--drain-grace-ms", "3"], &variables);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    for line in ["drain_grace_ms = 3", "spin_us = 2", "layers_max = 7", "regions_max = 9"] {
        assert!(text.lines().any(|it| it.trim() == line), "{line}:\n{text}");
    }
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(variables.iter().all(|(variable, _)| !said.contains(variable)), "{said}");
    let misspelled = statecopyd(&["config"], &[("STATECOPY_SPINUS", "3")]);
    let said = String::from_utf8(misspelled.stderr).unwrap();
    assert!(misspelled.status.success() && said.contains("STATECOPY_SPINUS"), "{said}");
    // What it prints is a configuration file that says the same.
    let printed = folder.path().join("printed.toml");
    std::fs::write(&printed, &text).unwrap();
    let again = statecopyd(&["config", "--config", printed.to_str().unwrap()], &[]);
    assert!(again.status.success(), "{again:?}");
    assert_eq!(String::from_utf8(again.stdout).unwrap(), text);
}

#[test]
fn a_setting_that_is_wrong_is_named_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("statecopyd.toml");
    for (text, named) in [
        ("drain_grace = 5\n", "drain_grace"),
        ("[limits]\nlayers_max = -4\n", "layers_max"),
        ("devices = [\"toaster\"]\n", "toaster"),
    ] {
        std::fs::write(&file, text).unwrap();
        for command in ["config", "serve"] {
            let output = statecopyd(&[command, "--config", file.to_str().unwrap()], &[]);
            assert!(!output.status.success(), "{command}: {text}");
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(said.contains(named), "{said}");
            assert!(said.contains("statecopyd.toml"), "{said}");
        }
    }
}

#[test]
fn logs_are_lines_of_json_where_asked_and_show_no_token() {
    let mut daemon = DaemonOptions::default().setting("log.format", "\"json\"").start();
    let rig = rig(&daemon);
    let mut request = rig.request(0, &Indices::Int32(vec![1]), None);
    request.packed_bytes += 1;
    for _ in 0..200 {
        rig.session.copy(Direction::Gather, request.clone()).unwrap_err();
    }
    let token = rig.session.opened.token.clone();
    drop(rig);
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
    let log = daemon.log();
    let mut lines = 0;
    for line in log.lines().filter(|line| line.starts_with('{')) {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(line["level"].is_string() && line["timestamp"].is_string(), "{line}");
        lines += 1;
    }
    assert!(lines > 2, "{log}");
    let refusals = log.lines().filter(|line| line.contains("PACKED_MISMATCH")).count();
    assert!((1..150).contains(&refusals), "lines about bad requests are limited: {refusals}");
    let hex: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(!log.contains(&hex));
}

#[test]
fn a_daemon_whose_log_cannot_be_written_serves_on() {
    let daemon = DaemonOptions::default().log_to(Path::new("/dev/full")).start();
    let first = Session::open(&daemon.connect());
    drop(first);
    drop(Session::open(&daemon.connect()));
    assert!(daemon.inspect().ready);
}
