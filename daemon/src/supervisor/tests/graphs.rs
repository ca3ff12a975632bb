use statecopy_proto::{Direction, PROTOCOL_NEWEST, Refusal, RefusalCode, v1};
use statecopy_session::IndexSource;
use tonic::Status;

use crate::supervisor::testing::{TestDaemon, Worker, code, refusal};

/// A gather of two rows with shared INT64 indices, in that slot.
fn slot(worker: &Worker, binding: &v1::Binding, pair: u32, slot: u32) -> v1::ArmGraphRequest {
    let at = Some(v1::RegionSlice { region_id: 1, offset_bytes: 512 });
    let shared = v1::SharedIndices { r#type: v1::IndexType::IndexInt64.into(), at };
    let copy = v1::CopyRequest {
        session: None,
        indices: Some(v1::copy_request::Indices::Shared(shared)),
        ..worker.gather(binding)
    };
    let copy = v1::DirectedCopy { direction: v1::Direction::Gather.into(), copy: Some(copy) };
    v1::ArmGraphRequest { session: worker.session(), pair, slot, copy: Some(copy) }
}

async fn arm(daemon: &TestDaemon, request: v1::ArmGraphRequest) -> Result<(), Status> {
    daemon.registry().arm_graph(request).await.map(drop)
}

async fn disarm(daemon: &TestDaemon, worker: &Worker, pair: u32) -> Result<(), Status> {
    let request = v1::DisarmGraphRequest { session: worker.session(), pair };
    daemon.registry().disarm_graph(request).await.map(drop)
}

#[tokio::test]
async fn a_slot_reaches_the_device_as_it_was_armed() {
    let daemon = TestDaemon::start(|settings| settings.default_deadline_ms = 7).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    arm(&daemon, slot(&worker, &binding, 64, 65_535)).await.unwrap();
    let mut soon = slot(&worker, &binding, 511, 1);
    soon.copy.as_mut().unwrap().copy.as_mut().unwrap().deadline_ms = 3;
    arm(&daemon, soon).await.unwrap();
    let armed = daemon.device.script.lock().unwrap().armed.clone();
    let [first, second] = armed.as_slice() else { panic!("{armed:?}") };
    assert_eq!((first.pair.get(), first.slot.get(), first.patience_ns), (64, 65_535, 7_000_000));
    assert_eq!((second.pair.get(), second.slot.get(), second.patience_ns), (511, 1, 3_000_000));
    let request = first.request;
    assert_eq!(request.session.0, worker.session.session_id);
    assert_eq!((request.binding.0, request.direction), (binding.binding_id, Direction::Gather));
    let IndexSource::Shared { region, offset } = request.indices.source else { panic!() };
    assert_eq!((region.0, offset, request.packed.offset, request.selected), (1, 512, 2048, 2));
}

#[tokio::test]
async fn pairs_and_slots_that_there_are_not_and_slots_that_are_armed_are_refused() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    for (pair, number) in [(0, 1), (63, 1), (512, 1), (u32::MAX, 1), (64, 0), (64, 65_536)] {
        let refused = arm(&daemon, slot(&worker, &binding, pair, number)).await;
        assert_eq!(code(refused), RefusalCode::QuotaExceeded, "{pair} {number}");
    }
    assert_eq!(code(disarm(&daemon, &worker, 63).await), RefusalCode::QuotaExceeded);
    arm(&daemon, slot(&worker, &binding, 64, 1)).await.unwrap();
    let again = arm(&daemon, slot(&worker, &binding, 64, 1)).await.unwrap_err();
    let again = Refusal::from_status(&again).unwrap();
    assert_eq!((again.code(), again.subject()), (RefusalCode::QuotaExceeded, "slot"));
    arm(&daemon, slot(&worker, &binding, 65, 1)).await.unwrap();
    disarm(&daemon, &worker, 64).await.unwrap();
    arm(&daemon, slot(&worker, &binding, 64, 1)).await.unwrap();
    // What the device refuses is not armed.
    let told = refusal(RefusalCode::Overlap).about("packed");
    daemon.device.script.lock().unwrap().refuse_copies.push_back(told.clone());
    let status = arm(&daemon, slot(&worker, &binding, 64, 2)).await.unwrap_err();
    assert_eq!(Refusal::from_status(&status), Some(told));
    arm(&daemon, slot(&worker, &binding, 64, 2)).await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_replayed_is_refused_before_the_device_is_asked() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let unknown = v1::Binding::default();
    let early = arm(&daemon, slot(&worker, &unknown, 64, 1)).await;
    assert_eq!(code(early), RefusalCode::NotSealed);
    let binding = worker.publish(&daemon).await;
    let good = slot(&worker, &binding, 64, 1);
    let changed = |change: fn(&mut v1::CopyRequest)| {
        let mut changed = good.clone();
        change(changed.copy.as_mut().unwrap().copy.as_mut().unwrap());
        changed
    };
    let inline = changed(|copy| {
        let values = vec![0, 1];
        copy.indices = Some(v1::copy_request::Indices::Int32(v1::Int32Indices { values }));
    });
    let flags = changed(|copy| copy.flags = Some(v1::copy_request::Flags::InlineFlags(vec![1, 1])));
    let unpacked = changed(|copy| copy.packed = None);
    let nothing = v1::ArmGraphRequest { copy: None, ..good.clone() };
    for (request, refused) in [
        (inline, RefusalCode::IndexType),
        (flags, RefusalCode::IndexType),
        (unpacked, RefusalCode::PackedMismatch),
        (nothing, RefusalCode::PackedMismatch),
    ] {
        assert_eq!(code(arm(&daemon, request).await), refused);
    }
    let other = daemon.worker_of(PROTOCOL_NEWEST - 1).await;
    let binding = other.publish(&daemon).await;
    let refused = arm(&daemon, slot(&other, &binding, 64, 1)).await;
    assert_eq!(code(refused), RefusalCode::VersionMismatch);
    assert!(!daemon.device.asked().iter().any(|asked| asked == "arm"));
}

#[tokio::test]
async fn a_session_arms_as_many_slots_as_are_allowed_and_its_end_forgets_them() {
    let daemon = TestDaemon::start(|settings| settings.limits.graph_slots_max = 2).await;
    assert_eq!(daemon.open().await.unwrap().limits.unwrap().graph_slots_max, 2);
    for _ in 0..2 {
        let worker = daemon.worker().await;
        let binding = worker.publish(&daemon).await;
        arm(&daemon, slot(&worker, &binding, 64, 1)).await.unwrap();
        arm(&daemon, slot(&worker, &binding, 65, 1)).await.unwrap();
        let refused = arm(&daemon, slot(&worker, &binding, 65, 2)).await.unwrap_err();
        let refused = Refusal::from_status(&refused).unwrap();
        assert_eq!(refused.subject(), "limits.graph_slots_max");
        disarm(&daemon, &worker, 64).await.unwrap();
        assert_eq!(daemon.metric("statecopy_graph_slots").await, "1");
        arm(&daemon, slot(&worker, &binding, 65, 2)).await.unwrap();
        let request = v1::CloseRequest { session: worker.session() };
        daemon.sessions().close(request).await.unwrap();
        assert_eq!(daemon.metric("statecopy_graph_slots").await, "0");
    }
}
