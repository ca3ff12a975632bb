use statecopy_proto::{RefusalCode, v1};
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;
use tonic::{Response, Status};

use crate::supervisor::device::DeviceState;
use crate::supervisor::testing::{TestDaemon, Worker, code, eventually};
use crate::supervisor::{Outcome, SupervisorError};

/// A copy that the device has and does not answer until it is released.
async fn running_copy(
    daemon: &TestDaemon,
    worker: &Worker,
    binding: &v1::Binding,
) -> JoinHandle<Result<Response<v1::CopyReply>, Status>> {
    daemon.device.script.lock().unwrap().held = true;
    let (mut copies, request) = (daemon.copies(), worker.gather(binding));
    let running = tokio::spawn(async move { copies.gather(request).await });
    eventually("the copy", || async {
        (!daemon.device.script.lock().unwrap().copies.is_empty()).then_some(())
    })
    .await;
    running
}

#[tokio::test]
async fn readiness_says_why_not_and_liveness_stays() {
    let daemon = TestDaemon::start(|_| {}).await;
    assert_eq!(daemon.get("/readyz").await, (200, "ready\n".to_owned()));
    let down = DeviceState::default();
    daemon.device.state.send(down).unwrap();
    let (status, reason) = daemon.get("/readyz").await;
    assert_eq!(status, 503);
    assert!(reason.contains("is being started"), "{reason}");
    assert_eq!(daemon.get("/healthz").await.0, 200);
    assert_eq!(daemon.metric("statecopy_ready").await, "0");
    assert!(!daemon.inspect().await.ready);
}

#[tokio::test]
async fn a_drain_finishes_what_was_accepted_refuses_what_is_new_and_leaves_nothing() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    let events = v1::EventsRequest { session: worker.session() };
    let mut events = daemon.sessions().events(events).await.unwrap().into_inner();
    let running = running_copy(&daemon, &worker, &binding).await;

    let reply = daemon.admin().drain(v1::DrainRequest {}).await.unwrap().into_inner();
    assert_eq!(reply.grace_ms, 10_000);
    let event = events.next().await.unwrap().unwrap().event;
    let draining = v1::event::Event::Draining(v1::Draining { grace_ms: 10_000 });
    assert_eq!(event, Some(draining));
    assert_eq!(daemon.get("/readyz").await, (503, "draining\n".to_owned()));
    assert_eq!(daemon.get("/healthz").await.0, 200);
    assert!(daemon.inspect().await.draining);
    assert_eq!(code(daemon.open().await), RefusalCode::Draining);
    let copy = daemon.copies().gather(worker.gather(&binding)).await;
    assert_eq!(code(copy), RefusalCode::Draining);
    let late = v1::EventsRequest { session: worker.session() };
    let mut late = daemon.sessions().events(late).await.unwrap().into_inner();
    assert!(late.next().await.unwrap().is_ok(), "a late subscriber learns it too");

    daemon.device.release();
    running.await.unwrap().unwrap();
    let event = late.next().await.unwrap().unwrap().event;
    assert!(matches!(event, Some(v1::event::Event::SessionEnded(_))), "{event:?}");
    let asked = daemon.device.script.clone();
    let (outcome, left) = daemon.end().await;
    assert_eq!(outcome.unwrap(), Outcome::Drained);
    assert!(left.is_empty(), "{left:?}");
    let asked = asked.lock().unwrap().asked.clone();
    assert_eq!(asked.last().map(String::as_str), Some("shutdown"));
    assert!(asked.contains(&"close".to_owned()));
}

#[tokio::test]
async fn a_signal_drains_and_a_second_one_ends_it_at_once() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    let _never_answered = running_copy(&daemon, &worker, &binding).await;
    daemon.signals.send("SIGTERM").await.unwrap();
    eventually("the drain", || async { daemon.inspect().await.draining.then_some(()) }).await;
    daemon.signals.send("SIGTERM").await.unwrap();
    let (outcome, left) = daemon.end().await;
    assert_eq!(outcome.unwrap(), Outcome::Cut);
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn the_grace_bounds_the_wait_for_requests_that_run() {
    let daemon = TestDaemon::start(|settings| settings.drain_grace_ms = 20).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    let _never_answered = running_copy(&daemon, &worker, &binding).await;
    daemon.signals.send("SIGTERM").await.unwrap();
    let (outcome, left) = daemon.end().await;
    assert_eq!(outcome.unwrap(), Outcome::Unfinished);
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn a_device_process_that_cannot_be_started_again_ends_the_daemon() {
    let daemon = TestDaemon::start(|_| {}).await;
    let failed = DeviceState { restarts: 9, failed: true, ..DeviceState::default() };
    daemon.device.state.send(failed).unwrap();
    let (outcome, left) = daemon.end().await;
    assert!(matches!(outcome, Err(SupervisorError::DeviceFailed)), "{outcome:?}");
    assert!(left.is_empty(), "{left:?}");
}
