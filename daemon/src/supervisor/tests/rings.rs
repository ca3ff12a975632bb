use std::os::fd::OwnedFd;
use std::sync::Arc;

use statecopy_descriptors::{Doorbell, has_exited, open_pidfd_self};
use statecopy_proto::descriptor_socket::{DaemonRecord, Token, WorkerRecord};
use statecopy_proto::{
    BindingId, Direction, Incarnation, IndexWidth, Lane, RefusalCode, RegionId, SessionId,
    SignatureHash, v1,
};
use statecopy_session::{
    Answer, CopyRequest, Fault, FlagSource, IndexSource, Indices, MonotonicNs, Packed,
    SessionMemory, Waker,
};

use crate::supervisor::sessions::EndReason;
use crate::supervisor::testing::{TestDaemon, Worker, connect, eventually, reference};

/// An attached worker, and what came with its attachment.
async fn attach(daemon: &TestDaemon) -> (Worker, Vec<OwnedFd>) {
    let opened = daemon.open().await.unwrap();
    let worker = Worker { session: reference(&opened), connection: connect(&opened) };
    let token = Token::parse(&opened.token).unwrap();
    worker.connection.send(&WorkerRecord::Attach { token }.encode(), &[]).await.unwrap();
    let (record, descriptors) = worker.hear().await;
    assert_eq!(record, DaemonRecord::Attached);
    (worker, descriptors)
}

#[tokio::test]
async fn a_worker_is_handed_its_own_ring_and_the_process_that_serves_it() {
    let daemon = TestDaemon::start(|settings| settings.session_slots = 16).await;
    let (worker, descriptors) = attach(&daemon).await;
    let [memory, bell, process]: [OwnedFd; 3] = descriptors.try_into().unwrap();
    let memory = SessionMemory::open(memory).unwrap();
    assert_eq!(memory.parameters().slots(), 16);
    let identity = memory.identity();
    assert_eq!(identity.session, SessionId(worker.session.session_id));
    assert_eq!(identity.incarnation, Incarnation::parse(&worker.session.incarnation).unwrap());
    Doorbell::from_fd(bell).unwrap();
    assert!(!has_exited(process).unwrap());
    assert!(daemon.device.asked().contains(&"open".to_owned()));
}

#[tokio::test]
async fn what_waits_in_a_workers_ring_is_pending_until_its_answer() {
    let daemon = TestDaemon::start(|_| {}).await;
    let (_worker, descriptors) = attach(&daemon).await;
    let [memory, bell, _process]: [OwnedFd; 3] = descriptors.try_into().unwrap();
    let memory = SessionMemory::open(memory).unwrap();
    assert_eq!(daemon.metric("statecopy_requests_pending").await, "0");
    let mut submitter = memory.submitter(Doorbell::from_fd(bell).unwrap());
    let request = CopyRequest {
        session: SessionId(0),
        binding: BindingId(1),
        signature: SignatureHash(1),
        direction: Direction::Gather,
        selected: 0,
        packed: Packed { region: RegionId(1), offset: 0, bytes: 0, dtype: 1 },
        indices: Indices { width: IndexWidth::Int32, source: IndexSource::Inline },
        flags: FlagSource::None,
        lane: Lane(0),
        deadline: MonotonicNs::NEVER,
        submitted_at: MonotonicNs(0),
    };
    let sequences = [(); 3].map(|()| submitter.try_submit(&request, &[], &[]).unwrap());
    assert_eq!(daemon.metric("statecopy_requests_pending").await, "3");
    let mut executor = memory.executor(Waker::Futex);
    executor.take().unwrap().unwrap();
    let answer = Answer { result: Err(Fault::of(RefusalCode::StalePlan)), executor_ns: 0 };
    executor.answer(sequences[0], &answer);
    assert_eq!(daemon.metric("statecopy_requests_pending").await, "2");
}

#[tokio::test]
async fn a_worker_is_told_of_the_next_device_process() {
    let daemon = TestDaemon::start(|_| {}).await;
    let (worker, _) = attach(&daemon).await;
    daemon.device.process.send_replace(None);
    daemon.device.process.send_replace(Some(Arc::new(open_pidfd_self().unwrap())));
    let (record, descriptors) = worker.hear().await;
    assert_eq!((record, descriptors.len()), (DaemonRecord::DeviceProcess, 1));
}

#[tokio::test]
async fn a_broken_ring_ends_its_session_and_no_other() {
    let daemon = TestDaemon::start(|_| {}).await;
    let (broken, _) = attach(&daemon).await;
    let (_other, _) = attach(&daemon).await;
    let session = SessionId(broken.session.session_id);
    // However many others break at the same moment, and whatever is said of sessions that are over.
    for other in 1000..2000 {
        daemon.device.broken_rings.tell(SessionId(other), "went back".to_owned());
    }
    daemon.device.broken_rings.tell(session, "jumped".to_owned());
    eventually("the end of the session", || async {
        (daemon.inspect().await.sessions.len() == 1).then_some(())
    })
    .await;
    let ended = "statecopy_sessions_ended_total{reason=\"ring_broken\"}";
    assert_eq!(daemon.metric(ended).await, "1");
    let (last, _) = broken.hear().await;
    let DaemonRecord::SessionEnded { sentence } = last else { panic!("{last:?}") };
    assert!(sentence.contains("jumped"), "{sentence}");
}

#[tokio::test]
async fn a_worker_hears_why_its_session_ended_once_the_device_has_let_go_of_it() {
    let daemon = TestDaemon::start(|_| {}).await;
    let (worker, _) = attach(&daemon).await;
    let request = v1::CloseRequest { session: worker.session() };
    daemon.sessions().close(request).await.unwrap();
    let (last, _) = worker.hear().await;
    assert_eq!(last, DaemonRecord::SessionEnded { sentence: EndReason::Closed.sentence() });
    assert!(daemon.device.asked().contains(&"close".to_owned()));
}
