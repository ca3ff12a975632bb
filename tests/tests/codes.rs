//! The closed list of refusals: where each code comes from.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::descriptor_socket::{DaemonRecord, TOKEN_BYTES, Token, WorkerRecord};
use statecopy_proto::v1::{CopyReply, CopyRequest, HandleKind, OpenRequest, RegisterRegionRequest};
use statecopy_proto::{DataType, Direction, PROTOCOL_NEWEST, Refusal, RefusalCode};
use statecopy_tests::{
    Daemon, DaemonOptions, Indices, Rig, Session, Shared, layer_spec, refusal, send_signal, until,
};
use tonic::Status;

/// How a code comes about.
enum Source {
    /// By this.
    From(fn() -> Refusal),
    /// In the test file whose text this is.
    Elsewhere(&'static str),
    /// On no host today: why.
    Reserved(&'static str),
}

/// The source of each code. No wildcard: a new code needs its line.
fn source(code: RefusalCode) -> Source {
    match code {
        RefusalCode::StalePlan
        | RefusalCode::SignatureMismatch
        | RefusalCode::SelectedTooLarge
        | RefusalCode::IndexType
        | RefusalCode::FlagsMismatch
        | RefusalCode::PackedMismatch
        | RefusalCode::Overlap
        | RefusalCode::OutOfRegion
        | RefusalCode::RegionUnknown
        | RefusalCode::SessionUnknown
        | RefusalCode::IncarnationMismatch => Source::Elsewhere(include_str!("refusals.rs")),
        RefusalCode::NotSealed => Source::From(not_sealed),
        RefusalCode::LayoutInvalid => Source::From(layout_invalid),
        RefusalCode::HandleInvalid => Source::From(handle_invalid),
        RefusalCode::HandleUnsupported => Source::From(handle_unsupported),
        RefusalCode::DeviceNotVisible => Source::From(device_not_visible),
        RefusalCode::PermissionDenied => Source::From(permission_denied),
        RefusalCode::VersionMismatch => Source::From(version_mismatch),
        RefusalCode::QuotaExceeded => Source::From(quota_exceeded),
        RefusalCode::Overloaded => Source::From(overloaded),
        RefusalCode::DeadlineExceeded => Source::From(deadline_exceeded),
        RefusalCode::Draining => Source::From(draining),
        RefusalCode::RowInvalid => Source::From(row_invalid),
        RefusalCode::HookPresent => Source::Elsewhere(include_str!("regions.rs")),
        RefusalCode::DeviceLost => Source::Elsewhere(include_str!("recovery.rs")),
        RefusalCode::Unavailable => Source::Elsewhere(include_str!("client.rs")),
        RefusalCode::ConfigurationDrift => {
            Source::Reserved("nobody outside changes a device process between prepare and seal")
        }
        RefusalCode::PrepareFailed => Source::Reserved("the host compiles nothing that can fail"),
        RefusalCode::LeaseUnavailable => Source::Reserved("there are no leases yet"),
    }
}

#[test]
fn every_code_of_the_closed_list_has_a_source_or_a_reason_to_have_none() {
    for code in RefusalCode::ALL {
        match source(code) {
            Source::From(produce) => {
                let refusal = produce();
                assert_eq!(refusal.code(), code, "{refusal}");
                assert!(!refusal.sentence().is_empty() && !refusal.remedy().is_empty());
            }
            Source::Elsewhere(text) => {
                assert!(text.contains(&format!("RefusalCode::{code:?}")), "{code} is not there");
            }
            Source::Reserved(why) => assert!(!why.is_empty()),
        }
    }
}

fn layout() -> CacheLayout {
    CacheLayout::with_page_stride(DataType::Float32, [6, 2, 4, 16], 200).unwrap()
}

fn open(daemon: &Daemon) -> (Session, Shared, u64) {
    let mut session = Session::open(daemon.wire());
    let memory = Shared::new(vec![0; 1 << 16]);
    let region = session.share(&memory);
    (session, memory, region)
}

fn rig(daemon: &Daemon) -> (Rig, CopyRequest) {
    let rig = Rig::new(daemon.wire(), &[(layout(), 0)], 4);
    let request = rig.request(0, &Indices::Int32(vec![1]), None);
    (rig, request)
}

fn not_sealed() -> Refusal {
    let daemon = Daemon::start();
    let (session, _memory, region_id) = open(&daemon);
    let (_other, mut request) = rig(&daemon);
    request.session = session.reference();
    request.packed.as_mut().unwrap().region_id = region_id;
    session.copy(Direction::Gather, request).unwrap_err()
}

fn layout_invalid() -> Refusal {
    let daemon = Daemon::start();
    let (session, _memory, region) = open(&daemon);
    let mut layer = layer_spec(0, &layout().place(0, 1 << 16).unwrap(), region, 4);
    layer.max_selected = 0;
    session.register_layers(vec![layer], Vec::new()).unwrap_err()
}

fn handle_invalid() -> Refusal {
    let daemon = Daemon::start();
    let session = Session::open(daemon.wire());
    session.register_region(session.region_request(999, 4096)).unwrap_err()
}

fn handle_unsupported() -> Refusal {
    let daemon = Daemon::start();
    let session = Session::open(daemon.wire());
    let kind = HandleKind::CudaIpc.into();
    let request = session.region_request(1, 4096);
    let request = RegisterRegionRequest { kind, descriptors: None, ..request };
    session.register_region(request).unwrap_err()
}

fn device_not_visible() -> Refusal {
    let daemon = Daemon::start();
    let uuid = "00000000-0000-4000-8000-000000000000".to_owned();
    let request = OpenRequest { protocol_version: PROTOCOL_NEWEST, device_uuid: uuid, ..asking() };
    let refusal = Session::open_as(daemon.wire(), request).unwrap_err();
    let visible = daemon.inspect().devices[0].device.clone().unwrap().uuid;
    assert!(refusal.sentence().contains(&visible), "lists what is visible: {refusal}");
    refusal
}

fn asking() -> OpenRequest {
    OpenRequest { protocol_version: PROTOCOL_NEWEST, ..OpenRequest::default() }
}

fn permission_denied() -> Refusal {
    let daemon = Daemon::start();
    let session = Session::open(daemon.wire());
    let connection = Session::dial(session.opened.descriptor_socket.as_ref());
    let token = Token::new([7; TOKEN_BYTES]);
    let answer = Session::exchange(&connection, &WorkerRecord::Attach { token }.encode(), &[]);
    let Some(DaemonRecord::Refused { code, sentence }) = answer else { panic!("{answer:?}") };
    Refusal::new(code, sentence)
}

fn version_mismatch() -> Refusal {
    let daemon = Daemon::start();
    let request = OpenRequest { protocol_version: PROTOCOL_NEWEST + 1, ..asking() };
    Session::open_as(daemon.wire(), request).unwrap_err()
}

fn quota_exceeded() -> Refusal {
    let daemon = DaemonOptions::default().setting("limits.sessions_max", "2").start();
    let one = Session::open(daemon.wire());
    let _other = Session::open(daemon.wire());
    let refusal = Session::open_as(daemon.wire(), asking()).unwrap_err();
    assert!(refusal.sentence().contains("limits.sessions_max"), "names the limit: {refusal}");
    // What is given back can be had again.
    drop(one);
    until("there is room again", || Session::open_as(daemon.wire(), asking()).is_ok());
    refusal
}

/// Submits a copy in a thread of its own, and waits until the daemon holds it.
fn in_flight(daemon: &Daemon, request: CopyRequest) -> JoinHandle<Result<CopyReply, Status>> {
    let wire = daemon.connect();
    let copy = thread::spawn(move || wire.ask(wire.copies().gather(request)));
    until("the copy is pending", || daemon.metric("statecopy_requests_pending") == 1.0);
    copy
}

fn overloaded() -> Refusal {
    let daemon = DaemonOptions::default().setting("limits.requests_pending_max", "1").start();
    let (rig, request) = rig(&daemon);
    let device = daemon.device_process();
    send_signal(device, Signal::STOP).unwrap();
    let first = in_flight(&daemon, request.clone());
    let refused = rig.session.copy(Direction::Gather, request.clone());
    send_signal(device, Signal::CONT).unwrap();
    first.join().unwrap().unwrap();
    rig.session.copy(Direction::Gather, request).unwrap();
    refused.unwrap_err()
}

fn deadline_exceeded() -> Refusal {
    let daemon = Daemon::start();
    let (mut rig, mut request) = rig(&daemon);
    let device = daemon.device_process();
    send_signal(device, Signal::STOP).unwrap();
    request.deadline_ms = 50;
    let late = Instant::now() + Duration::from_millis(200);
    let copy = in_flight(&daemon, request);
    until("the deadline is over", || Instant::now() > late);
    send_signal(device, Signal::CONT).unwrap();
    let refused = copy.join().unwrap().unwrap_err();
    rig.check("after a deadline");
    rig.copy(Direction::Gather, 0, &Indices::Int32(vec![1]), None).unwrap();
    refusal(&refused)
}

fn draining() -> Refusal {
    let mut daemon = Daemon::start();
    let (rig, request) = rig(&daemon);
    let device = daemon.device_process();
    send_signal(device, Signal::STOP).unwrap();
    let first = in_flight(&daemon, request.clone());
    daemon.signal(Signal::TERM);
    until("it drains", || daemon.inspect().draining);
    let refused = rig.session.copy(Direction::Gather, request);
    let opened = Session::open_as(daemon.wire(), asking()).unwrap_err();
    assert_eq!(opened.code(), RefusalCode::Draining, "{opened}");
    send_signal(device, Signal::CONT).unwrap();
    first.join().unwrap().unwrap();
    assert!(daemon.wait().success());
    refused.unwrap_err()
}

fn row_invalid() -> Refusal {
    let daemon = Daemon::start();
    let (mut rig, _) = rig(&daemon);
    let mut layer = rig.specs(4);
    layer[0].check_unique = true;
    let published = rig.session.register_layers(layer, Vec::new()).unwrap();
    rig.layers[0].published = published.bindings[0].clone();
    let refused = rig.copy(Direction::Scatter, 0, &Indices::Int64(vec![2, -1, 2]), None);
    // Invalid rows may repeat, and so may the rows of a gather.
    rig.copy(Direction::Scatter, 0, &Indices::Int64(vec![-1, 2, -1, 9]), None).unwrap();
    rig.copy(Direction::Gather, 0, &Indices::Int64(vec![2, 2]), None).unwrap();
    refused.unwrap_err()
}
