use statecopy_proto::{Refusal, RefusalCode, v1};

use crate::supervisor::device::CopyIndices;
use crate::supervisor::testing::{TestDaemon, code, eventually, refusal};

#[tokio::test]
async fn a_copy_reaches_the_device_as_it_was_asked_for() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    let request = v1::CopyRequest { lane: 5, ..worker.gather(&binding) };
    let reply = daemon.copies().gather(request).await.unwrap().into_inner();
    assert_eq!((reply.rows_copied, reply.rows_masked), (2, 1));
    assert_eq!(reply.incarnation, worker.session.incarnation);
    let copy = daemon.device.script.lock().unwrap().copies.remove(0);
    assert_eq!(copy.session.0, worker.session.session_id);
    assert_eq!((copy.binding.0, copy.signature.0), (binding.binding_id, binding.signature));
    assert_eq!((copy.selected, copy.lane.0, copy.packed.1, copy.packed.2), (2, 5, 2048, 64));
    assert!(matches!(copy.indices, CopyIndices::Inline(_, bytes) if bytes.len() == 8));
    assert_eq!(daemon.metric("statecopy_copy_seconds_count{direction=\"gather\"}").await, "1");
}

#[tokio::test]
async fn the_devices_refusal_reaches_the_caller_whole_and_is_counted() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    let told = refusal(RefusalCode::SelectedTooLarge).about("selected");
    daemon.device.script.lock().unwrap().refuse_copies.push_back(told.clone());
    let status = daemon.copies().scatter(worker.gather(&binding)).await.unwrap_err();
    assert_eq!(Refusal::from_status(&status), Some(told));
    daemon.copies().scatter(worker.gather(&binding)).await.unwrap();
    let shown = daemon.inspect().await.sessions.remove(0);
    assert_eq!((shown.copies, shown.refusals), (1, 1));
    let counted = daemon.metric("statecopy_refusals_total{code=\"SELECTED_TOO_LARGE\"}").await;
    assert_eq!(counted, "1");
}

#[tokio::test]
async fn each_of_many_copies_has_its_own_answer_and_a_refused_one_does_not_stop_the_next() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    let good = worker.gather(&binding);
    let short = v1::CopyRequest { selected: 3, ..good.clone() };
    let directed = |direction: v1::Direction, copy: Option<v1::CopyRequest>| v1::DirectedCopy {
        direction: direction.into(),
        copy,
    };
    let copies = vec![
        directed(v1::Direction::Gather, Some(good.clone())),
        directed(v1::Direction::Gather, Some(short)),
        directed(v1::Direction::Unspecified, Some(good.clone())),
        directed(v1::Direction::Scatter, None),
        directed(v1::Direction::Scatter, Some(good)),
    ];
    let request = v1::CopyManyRequest { session: worker.session(), copies };
    let answers = daemon.copies().copy_many(request).await.unwrap().into_inner().answers;
    let codes: Vec<i32> = answers
        .into_iter()
        .map(|answer| match answer.answer.unwrap() {
            v1::copy_answer::Answer::Done(_) => 0,
            v1::copy_answer::Answer::Refused(refusal) => refusal.code,
        })
        .collect();
    let (index, packed) = (v1::RefusalCode::IndexType, v1::RefusalCode::PackedMismatch);
    assert_eq!(codes, [0, index as i32, packed as i32, packed as i32, 0]);
    assert_eq!(daemon.device.script.lock().unwrap().copies.len(), 2);
}

#[tokio::test]
async fn nothing_is_copied_before_layers_are_published_nor_after_they_are_released() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let unpublished = v1::Binding { binding_id: 1, ..v1::Binding::default() };
    let copy = async |binding: &v1::Binding| daemon.copies().gather(worker.gather(binding)).await;
    assert_eq!(code(copy(&unpublished).await), RefusalCode::NotSealed);
    let binding = worker.publish(&daemon).await;
    copy(&binding).await.unwrap();
    let release = v1::ReleaseLayersRequest { session: worker.session() };
    daemon.registry().release_layers(release).await.unwrap();
    assert_eq!(code(copy(&binding).await), RefusalCode::NotSealed);
    assert_eq!(daemon.device.script.lock().unwrap().copies.len(), 1);
}

#[tokio::test]
async fn more_requests_than_the_limit_are_overloaded_and_nobody_waits_for_them() {
    let daemon = TestDaemon::start(|settings| settings.limits.requests_pending_max = 2).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    daemon.device.script.lock().unwrap().held = true;
    let held: Vec<_> = (0..2)
        .map(|_| {
            let (mut copies, request) = (daemon.copies(), worker.gather(&binding));
            tokio::spawn(async move { copies.gather(request).await })
        })
        .collect();
    eventually("two copies", || async {
        (daemon.device.script.lock().unwrap().copies.len() == 2).then_some(())
    })
    .await;
    assert_eq!(daemon.metric("statecopy_requests_pending").await, "2");
    let third = daemon.copies().gather(worker.gather(&binding)).await;
    assert_eq!(code(third), RefusalCode::Overloaded);
    daemon.device.release();
    for copy in held {
        copy.await.unwrap().unwrap();
    }
    daemon.copies().gather(worker.gather(&binding)).await.unwrap();
}

#[tokio::test]
async fn a_copys_deadline_is_the_shorter_of_its_own_and_the_calls() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    let left = async |deadline_ms, timeout_ms: Option<u64>| {
        let request = v1::CopyRequest { deadline_ms, ..worker.gather(&binding) };
        let mut request = tonic::Request::new(request);
        if let Some(ms) = timeout_ms {
            request.set_timeout(std::time::Duration::from_millis(ms));
        }
        let before = std::time::Instant::now();
        daemon.copies().gather(request).await.unwrap();
        let copy = daemon.device.script.lock().unwrap().copies.remove(0);
        copy.deadline.saturating_duration_since(before).as_millis()
    };
    let default = left(0, None).await;
    assert!((20_000..=60_000).contains(&default), "{default}");
    let own = left(70_000, None).await;
    assert!(own <= 60_000, "{own}");
    let call = left(70_000, Some(9_000)).await;
    assert!((1_000..9_000).contains(&call), "{call}");
    let shorter = left(8_000, Some(9_000_000)).await;
    assert!((1_000..=16_000).contains(&shorter), "{shorter}");
}
