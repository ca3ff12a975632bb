use std::os::fd::OwnedFd;

use statecopy_descriptors::SealedMemory;
use statecopy_proto::{Refusal, RefusalCode, v1};
use tokio_stream::StreamExt as _;

use crate::supervisor::testing::{TestDaemon, Worker, code, eventually, layer, published, refusal};

fn asked(daemon: &TestDaemon, what: &str) -> usize {
    daemon.device.asked().iter().filter(|asked| *asked == what).count()
}

async fn state(daemon: &TestDaemon) -> String {
    daemon.inspect().await.sessions[0].state.clone()
}

#[tokio::test]
async fn layers_are_published_after_progress_and_shown() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let region = worker.region(&daemon, 4096).await;
    let layers = vec![layer("a", region, 0), layer("b", region, 32)];
    let both = v1::BindingSetSpec { name: "both".into(), layers: vec!["b".into(), "a".into()] };
    let events = worker.register(&daemon, layers, vec![both]).await.unwrap();
    let first = events[0].event.clone().unwrap();
    assert!(matches!(first, v1::register_layers_event::Event::Progress(_)), "{first:?}");
    let all = published(&events);
    assert_eq!(all.bindings.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!((all.sets[0].name.as_str(), all.sets[0].layers), ("both", 2));
    assert_eq!(all.sets[0].signature, all.bindings[0].signature);
    let shown = daemon.inspect().await.sessions.remove(0);
    assert_eq!(shown.state, "published");
    assert_eq!(shown.layers[1].offset_bytes, 32);
    assert_eq!(daemon.metric("statecopy_layers").await, "2");
}

#[tokio::test]
async fn ids_of_bindings_are_never_used_again() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(worker.publish(&daemon).await.binding_id);
    }
    let other = daemon.worker().await;
    ids.push(other.publish(&daemon).await.binding_id);
    let mut unique = ids.clone();
    unique.dedup();
    assert_eq!(unique, ids);
    assert!(ids.is_sorted());
}

#[tokio::test]
async fn one_bad_layer_of_69_publishes_nothing_withdraws_what_was_and_is_named() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    let region = worker.region(&daemon, 69 * 256).await;
    let mut layers: Vec<_> =
        (0..69).map(|at| layer(&format!("layer.{at}"), region, at * 256)).collect();
    layers[40].layout.as_mut().unwrap().strides[0] = 7;
    let status = worker.register(&daemon, layers, Vec::new()).await.unwrap_err();
    let refusal = Refusal::from_status(&status).unwrap();
    assert_eq!(refusal.code(), RefusalCode::LayoutInvalid);
    assert_eq!(refusal.subject(), "layer.40");
    assert!(refusal.sentence().contains("stride(0) is 7"), "{refusal}");
    assert_eq!(state(&daemon).await, "attached");
    assert_eq!((asked(&daemon, "register"), asked(&daemon, "release")), (1, 1));
    let copy = daemon.copies().gather(worker.gather(&binding)).await;
    assert_eq!(code(copy), RefusalCode::NotSealed);
}

#[tokio::test]
async fn what_the_device_refuses_is_withdrawn_too_and_the_next_registration_works() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    worker.publish(&daemon).await;
    let told = refusal(RefusalCode::PrepareFailed).about("a");
    daemon.device.script.lock().unwrap().refuse_registration = Some(told.clone());
    let region = worker.region(&daemon, 4096).await;
    let status =
        worker.register(&daemon, vec![layer("a", region, 0)], Vec::new()).await.unwrap_err();
    assert_eq!(Refusal::from_status(&status), Some(told));
    assert_eq!(asked(&daemon, "release"), 1);
    assert_eq!(state(&daemon).await, "attached");
    worker.publish(&daemon).await;
    assert_eq!(state(&daemon).await, "published");
}

#[tokio::test]
async fn a_registration_comes_to_its_end_when_its_client_goes_away() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    let region = worker.region(&daemon, 4096).await;
    daemon.device.script.lock().unwrap().held = true;
    let request = v1::RegisterLayersRequest {
        session: worker.session(),
        layers: vec![layer("a", region, 0)],
        sets: Vec::new(),
    };
    let mut stream = daemon.registry().register_layers(request).await.unwrap().into_inner();
    stream.next().await.unwrap().unwrap();
    // While it runs nothing is served, also not what was published before.
    assert_eq!(state(&daemon).await, "registering");
    let copy = daemon.copies().gather(worker.gather(&binding)).await;
    assert_eq!(code(copy), RefusalCode::NotSealed);
    drop(stream);
    daemon.device.release();
    eventually("the publication", || async { (state(&daemon).await == "published").then_some(()) })
        .await;
}

#[tokio::test]
async fn a_registration_past_its_deadline_is_withdrawn() {
    let daemon = TestDaemon::start(|settings| settings.register_deadline_ms = 30).await;
    let worker = daemon.worker().await;
    let region = worker.region(&daemon, 4096).await;
    daemon.device.script.lock().unwrap().held = true;
    let refused = worker.register(&daemon, vec![layer("a", region, 0)], Vec::new()).await;
    assert_eq!(code(refused), RefusalCode::DeadlineExceeded);
    assert_eq!(state(&daemon).await, "attached");
    assert_eq!(asked(&daemon, "release"), 1);
}

fn piece(handle: &[u8]) -> v1::RegionPiece {
    v1::RegionPiece { size_bytes: 4096, buffer_id: 3, handle: handle.to_vec() }
}

#[tokio::test]
async fn only_sealed_memory_of_the_announced_kind_size_and_count_becomes_a_region() {
    let daemon = TestDaemon::start(|settings| settings.limits.region_bytes_max = 1 << 20).await;
    let worker = daemon.worker().await;
    let sealed = || SealedMemory::create("test", 4096).unwrap().try_clone_fd().unwrap();
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    let unsealed = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, 4096).unwrap();
    for (descriptor, bytes) in
        [(file, 4096), (unsealed, 4096), (sealed(), 4095), (sealed(), 8192), (sealed(), 0)]
    {
        let refused = worker.offer(&daemon, descriptor, bytes).await;
        assert_eq!(code(refused), RefusalCode::HandleInvalid);
    }
    let refused = worker.offer(&daemon, sealed(), (1 << 20) + 1).await;
    assert_eq!(code(refused), RefusalCode::QuotaExceeded);
    let named = |kind: v1::HandleKind, descriptors, handles: &[&[u8]]| v1::RegisterRegionRequest {
        session: worker.session(),
        kind: kind.into(),
        size_bytes: 4096,
        descriptors,
        pieces: handles.iter().map(|handle| piece(handle)).collect(),
    };
    let none = Some(v1::DescriptorRef { tag: 99, count: 1 });
    let handle: &[u8] = &[1; 64];
    for (request, expected) in [
        (named(v1::HandleKind::Memfd, none, &[]), RefusalCode::HandleInvalid),
        (named(v1::HandleKind::Memfd, None, &[]), RefusalCode::HandleInvalid),
        (named(v1::HandleKind::Memfd, None, &[handle]), RefusalCode::HandleInvalid),
        (named(v1::HandleKind::Memfd, None, &[&[], &[]]), RefusalCode::HandleInvalid),
        (named(v1::HandleKind::Unspecified, None, &[]), RefusalCode::HandleInvalid),
        (named(v1::HandleKind::CudaIpc, None, &[handle]), RefusalCode::HandleUnsupported),
    ] {
        assert_eq!(code(daemon.registry().register_region(request).await), expected);
    }
    assert_eq!(asked(&daemon, "import"), 0);
    worker.offer(&daemon, sealed(), 4096).await.unwrap();
    assert_eq!(asked(&daemon, "import"), 1);
}

#[tokio::test]
async fn regions_are_limited_and_released() {
    let daemon = TestDaemon::start(|settings| settings.limits.regions_max = 2).await;
    let worker = daemon.worker().await;
    let first = worker.region(&daemon, 4096).await;
    worker.region(&daemon, 4096).await;
    let memory = SealedMemory::create("test", 4096).unwrap().try_clone_fd().unwrap();
    let third = worker.offer(&daemon, memory, 4096).await;
    assert_eq!(code(third), RefusalCode::QuotaExceeded);
    let release = async |worker: &Worker| {
        let request = v1::ReleaseRegionRequest { session: worker.session(), region_id: first };
        daemon.registry().release_region(request).await
    };
    let other = daemon.worker().await;
    assert_eq!(code(release(&other).await), RefusalCode::RegionUnknown);
    release(&worker).await.unwrap();
    assert_eq!(asked(&daemon, "drop"), 1);
    assert_eq!(code(release(&worker).await), RefusalCode::RegionUnknown);
    worker.region(&daemon, 4096).await;
}

#[tokio::test]
async fn a_layer_sleeps_and_is_bound_again_to_memory_of_the_same_signature_only() {
    let daemon = TestDaemon::start(|_| {}).await;
    let worker = daemon.worker().await;
    let binding = worker.publish(&daemon).await;
    let shown = daemon.inspect().await.sessions.remove(0);
    let request = v1::ReleaseRegionRequest {
        session: worker.session(),
        region_id: shown.layers[0].region_id,
    };
    daemon.registry().release_region(request).await.unwrap();
    assert_eq!(state(&daemon).await, "published");
    let region = worker.region(&daemon, 4096).await;
    let rebind = async |binding_id, offset_bytes| {
        let layout = layer("a", region, 0).layout;
        let to = v1::RebindLayer { binding_id, layout, region_id: region, offset_bytes };
        let request = v1::RebindRequest { session: worker.session(), layers: vec![to] };
        daemon.registry().rebind(request).await
    };
    assert_eq!(code(rebind(binding.binding_id, 4).await), RefusalCode::SignatureMismatch);
    assert_eq!(code(rebind(binding.binding_id + 1, 0).await), RefusalCode::StalePlan);
    assert_eq!(code(rebind(binding.binding_id, 4096).await), RefusalCode::LayoutInvalid);
    assert_eq!(asked(&daemon, "rebind"), 0);
    rebind(binding.binding_id, 1024).await.unwrap();
    assert_eq!(asked(&daemon, "rebind"), 1);
    let shown = daemon.inspect().await.sessions.remove(0);
    assert_eq!((shown.layers[0].region_id, shown.layers[0].offset_bytes), (region, 1024));
    assert_eq!(shown.layers[0].binding_id, binding.binding_id);
}

#[tokio::test]
async fn nothing_is_registered_before_the_session_is_attached() {
    let daemon = TestDaemon::start(|_| {}).await;
    let opened = daemon.open().await.unwrap();
    let session = Some(crate::supervisor::testing::reference(&opened));
    let request =
        v1::RegisterLayersRequest { session, layers: vec![layer("a", 1, 0)], sets: Vec::new() };
    let mut stream = daemon.registry().register_layers(request).await.unwrap().into_inner();
    assert_eq!(code(stream.next().await.unwrap()), RefusalCode::SessionUnknown);
    assert_eq!(asked(&daemon, "register") + asked(&daemon, "release"), 0);
}
