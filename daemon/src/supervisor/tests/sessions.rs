use std::fs::File;
use std::time::Duration;

use statecopy_descriptors::SealedMemory;
use statecopy_proto::descriptor_socket::{DaemonRecord, Token, WorkerRecord};
use statecopy_proto::{PROTOCOL_NEWEST, PROTOCOL_OLDEST, Refusal, RefusalCode, v1};
use tokio_stream::StreamExt as _;

use crate::supervisor::device::DeviceState;
use crate::supervisor::testing::{TestDaemon, UUID, Worker, code, connect, eventually, reference};

fn refused(record: DaemonRecord) -> RefusalCode {
    match record {
        DaemonRecord::Refused { code, .. } => code,
        other => panic!("{other:?}"),
    }
}

fn descriptors(count: usize) -> Vec<std::os::fd::OwnedFd> {
    (0..count).map(|_| File::open("/dev/null").unwrap().into()).collect()
}

async fn sessions(daemon: &TestDaemon) -> usize {
    daemon.inspect().await.sessions.len()
}

#[tokio::test]
async fn a_session_is_opened_attached_and_shown() {
    let daemon = TestDaemon::start(|_| {}).await;
    let opened = daemon.open().await.unwrap();
    assert_eq!(opened.device.as_ref().unwrap().uuid, UUID.to_string());
    assert_eq!(opened.limits.unwrap().layers_max, 1024);
    assert_eq!(daemon.inspect().await.sessions[0].state, "attaching");
    let worker = Worker { session: reference(&opened), connection: connect(&opened) };
    let token = Token::parse(&opened.token).unwrap();
    let attached = worker.say(&WorkerRecord::Attach { token }, &[]).await;
    assert_eq!(attached, DaemonRecord::Attached);
    let shown = daemon.inspect().await.sessions.remove(0);
    assert_eq!((shown.state.as_str(), shown.label.as_str()), ("attached", "worker"));
    assert_eq!(shown.worker_pid, std::process::id());
    assert_eq!(daemon.metric("statecopy_sessions{state=\"attached\"}").await, "1");
}

#[tokio::test]
async fn an_older_version_is_served_and_a_newer_one_refused_naming_both() {
    let daemon = TestDaemon::start(|_| {}).await;
    let ask = async |protocol_version: u32, label: &str| {
        let label = label.to_owned();
        let request = v1::OpenRequest { protocol_version, device_uuid: String::new(), label };
        daemon.sessions().open(request).await
    };
    assert_eq!(ask(1, "unseen").await.unwrap().into_inner().protocol_version, 1);
    assert_eq!(daemon.inspect().await.sessions[0].label, "");
    let status = ask(PROTOCOL_NEWEST + 1, "").await.unwrap_err();
    let refusal = Refusal::from_status(&status).unwrap();
    assert_eq!(refusal.code(), RefusalCode::VersionMismatch);
    for named in [PROTOCOL_NEWEST + 1, PROTOCOL_OLDEST, PROTOCOL_NEWEST] {
        assert!(refusal.sentence().contains(&named.to_string()), "{refusal}");
    }
    assert_eq!(code(ask(2, &"x".repeat(129)).await), RefusalCode::QuotaExceeded);
}

#[tokio::test]
async fn a_device_that_is_not_served_is_refused_with_a_list_of_those_that_are() {
    let daemon = TestDaemon::start(|_| {}).await;
    for uuid in ["00000000-0000-0000-0000-000000000001", "no uuid"] {
        let request = v1::OpenRequest {
            protocol_version: PROTOCOL_NEWEST,
            device_uuid: uuid.to_owned(),
            label: String::new(),
        };
        let status = daemon.sessions().open(request).await.unwrap_err();
        let refusal = Refusal::from_status(&status).unwrap();
        assert_eq!(refusal.code(), RefusalCode::DeviceNotVisible);
        assert!(refusal.sentence().contains(&UUID.to_string()), "{refusal}");
    }
    for device_uuid in [UUID.to_string().to_uppercase(), format!("GPU-{UUID}")] {
        let request = v1::OpenRequest {
            protocol_version: PROTOCOL_NEWEST,
            device_uuid,
            label: String::new(),
        };
        daemon.sessions().open(request).await.unwrap();
    }
}

#[tokio::test]
async fn incarnation_comes_first_and_then_the_session() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let close = async |session| daemon.sessions().close(v1::CloseRequest { session }).await;
    let with = |incarnation: Vec<u8>, session_id| Some(v1::SessionRef { incarnation, session_id });
    let incarnation = worker.session.incarnation.clone();
    for wrong in [vec![0; 16], vec![0; 15], Vec::new()] {
        assert_eq!(code(close(with(wrong, 999)).await), RefusalCode::IncarnationMismatch);
    }
    assert_eq!(code(close(with(incarnation, 999)).await), RefusalCode::SessionUnknown);
    assert_eq!(code(close(None).await), RefusalCode::SessionUnknown);
    close(worker.session()).await.unwrap();
    assert_eq!(code(close(worker.session()).await), RefusalCode::SessionUnknown);
}

#[tokio::test]
async fn a_token_serves_once_and_only_its_own_session() {
    let daemon = TestDaemon::start(|_| {}).await;
    let opened = daemon.open().await.unwrap();
    let attach = async |token: Token| {
        let worker = Worker { session: reference(&opened), connection: connect(&opened) };
        let answer = worker.say(&WorkerRecord::Attach { token }, &[]).await;
        (worker, answer)
    };
    let token = Token::parse(&opened.token).unwrap();
    let (_, answer) = attach(Token::new([0; 32])).await;
    assert_eq!(refused(answer), RefusalCode::PermissionDenied);
    let (worker, answer) = attach(token.clone()).await;
    assert_eq!(answer, DaemonRecord::Attached);
    let (_, answer) = attach(token.clone()).await;
    assert_eq!(refused(answer), RefusalCode::PermissionDenied);
    // The one that is attached goes on.
    let again = worker.say(&WorkerRecord::Attach { token }, &[]).await;
    assert_eq!(refused(again), RefusalCode::PermissionDenied);
    let record = WorkerRecord::Descriptors { tag: 1, count: 1 };
    let received = worker.say(&record, &descriptors(1)).await;
    assert_eq!(received, DaemonRecord::Received { tag: 1, total: 1 });
}

#[tokio::test]
async fn a_session_that_is_not_attached_in_time_ends() {
    let daemon = TestDaemon::start(|settings| settings.attach_timeout_ms = 20).await;
    let opened = daemon.open().await.unwrap();
    eventually("the session's end", || async { (sessions(&daemon).await == 0).then_some(()) })
        .await;
    let close = v1::CloseRequest { session: Some(reference(&opened)) };
    assert_eq!(code(daemon.sessions().close(close).await), RefusalCode::SessionUnknown);
    let ended = "statecopy_sessions_ended_total{reason=\"attach_timeout\"}";
    assert_eq!(daemon.metric(ended).await, "1");
}

#[tokio::test]
async fn the_end_of_the_connection_ends_the_session_and_gives_everything_back() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    worker.publish(&daemon).await;
    let memory = SealedMemory::create("test", 4096).unwrap();
    let record = WorkerRecord::Descriptors { tag: 9, count: 1 };
    worker.say(&record, &[memory.try_clone_fd().unwrap()]).await;
    assert_eq!(daemon.metric("statecopy_regions").await, "1");
    assert_eq!(daemon.metric("statecopy_descriptors_pending").await, "1");
    let session = worker.session();
    drop(worker);
    eventually("the session's end", || async { (sessions(&daemon).await == 0).then_some(()) })
        .await;
    eventually("the device's part", || async {
        daemon.device.asked().contains(&"close".to_owned()).then_some(())
    })
    .await;
    for metric in ["statecopy_regions", "statecopy_layers", "statecopy_descriptors_pending"] {
        assert_eq!(daemon.metric(metric).await, "0", "{metric}");
    }
    let release = v1::ReleaseLayersRequest { session };
    assert_eq!(code(daemon.registry().release_layers(release).await), RefusalCode::SessionUnknown);
}

#[tokio::test]
async fn sessions_are_limited_and_an_ended_one_makes_room() {
    let daemon = TestDaemon::start(|settings| settings.limits.sessions_max = 2).await;
    let first = daemon.worker().await;
    let _second = daemon.worker().await;
    let status = daemon.open().await.unwrap_err();
    let refusal = Refusal::from_status(&status).unwrap();
    assert_eq!(refusal.code(), RefusalCode::QuotaExceeded);
    assert!(refusal.sentence().contains("limits.sessions_max = 2"), "{refusal}");
    daemon.sessions().close(v1::CloseRequest { session: first.session() }).await.unwrap();
    daemon.open().await.unwrap();
}

#[tokio::test]
async fn waiting_descriptors_are_limited_and_must_be_as_many_as_announced() {
    let daemon = TestDaemon::start(|settings| settings.limits.descriptors_pending_max = 3).await;
    let worker = daemon.worker().await;
    let send = async |tag, count, came| {
        worker.say(&WorkerRecord::Descriptors { tag, count }, &descriptors(came)).await
    };
    assert_eq!(send(1, 2, 2).await, DaemonRecord::Received { tag: 1, total: 2 });
    assert_eq!(refused(send(1, 2, 1).await), RefusalCode::HandleInvalid);
    assert_eq!(refused(send(2, 2, 2).await), RefusalCode::QuotaExceeded);
    assert_eq!(send(1, 1, 1).await, DaemonRecord::Received { tag: 1, total: 3 });
    // Taking them makes room, even though they are no memory.
    let request = v1::RegisterRegionRequest {
        session: worker.session(),
        kind: v1::HandleKind::Memfd.into(),
        size_bytes: 4096,
        descriptors: Some(v1::DescriptorRef { tag: 1, count: 3 }),
        pieces: Vec::new(),
    };
    assert_eq!(code(daemon.registry().register_region(request).await), RefusalCode::HandleInvalid);
    assert_eq!(send(2, 3, 3).await, DaemonRecord::Received { tag: 2, total: 3 });
}

#[tokio::test]
async fn bytes_that_are_no_record_are_refused_and_the_daemon_lives() {
    let daemon = TestDaemon::start(|_| {}).await;
    let opened = daemon.open().await.unwrap();
    for bytes in [vec![0; 8], vec![0xff; 400], b"scds".to_vec()] {
        let connection = connect(&opened);
        connection.send(&bytes, &[]).await.unwrap();
        let mut buffer = [0; 1024];
        let received = connection.receive(&mut buffer, 0).await.unwrap();
        let answer = DaemonRecord::decode(&buffer[..received.bytes]).unwrap();
        assert_eq!(refused(answer), RefusalCode::HandleInvalid);
    }
    daemon.worker().await;
}

#[tokio::test]
async fn events_go_to_the_newest_stream_of_a_session() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let subscribe = async || {
        let request = v1::EventsRequest { session: worker.session() };
        daemon.sessions().events(request).await.unwrap().into_inner()
    };
    let mut first = subscribe().await;
    let mut second = subscribe().await;
    assert!(first.next().await.is_none(), "the first stream ends");
    let state = DeviceState { pid: 78, ready: true, restarts: 1, ..DeviceState::default() };
    daemon.device.state.send(state).unwrap();
    let event = second.next().await.unwrap().unwrap();
    assert_eq!(event.incarnation, worker.session.incarnation);
    let restarted = v1::DeviceRestarted { device_process_pid: 78, restarts: 1 };
    assert_eq!(event.event, Some(v1::event::Event::DeviceRestarted(restarted)));
    assert_eq!(daemon.inspect().await.devices[0].restarts, 1);
    daemon.sessions().close(v1::CloseRequest { session: worker.session() }).await.unwrap();
    let event = second.next().await.unwrap().unwrap().event;
    assert!(matches!(event, Some(v1::event::Event::SessionEnded(_))), "{event:?}");
    assert!(second.next().await.is_none());
}

#[tokio::test]
async fn reflection_and_health_are_served() {
    use tonic_health::pb::health_client::HealthClient;
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
    let daemon = TestDaemon::start(|_| {}).await;
    for name in crate::supervisor::services::SERVICE_NAMES {
        let check = async || {
            let service = name.to_owned();
            let mut health = HealthClient::new(daemon.channel.clone());
            health.check(HealthCheckRequest { service }).await.unwrap().into_inner().status()
        };
        eventually(name, || async { (check().await == ServingStatus::Serving).then_some(()) })
            .await;
        let down = DeviceState::default();
        daemon.device.state.send(down).unwrap();
        eventually(name, || async { (check().await == ServingStatus::NotServing).then_some(()) })
            .await;
        let up = DeviceState { pid: 1, ready: true, ..DeviceState::default() };
        daemon.device.state.send(up).unwrap();
    }
    let mut request = tonic::Request::new(v1::PingRequest {});
    request.set_timeout(Duration::from_secs(5));
    daemon.admin().ping(request).await.unwrap();
}
