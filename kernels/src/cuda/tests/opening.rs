//! Devices: found, described, refused.

use std::path::PathBuf;

use statecopy_stub_cuda::{Act, CUresult, Fault, Function, StubDevice};

use super::*;
use crate::signature::DeviceUuid;

fn device(uuid: u8, name: &str) -> StubDevice {
    StubDevice { uuid: [uuid; 16], name: name.to_owned(), ..StubDevice::default() }
}

fn refused(stub: &Stub, selector: CudaSelector) -> Refusal {
    CudaDevice::open(options(stub, selector)).map(|_| ()).unwrap_err().into()
}

#[test]
fn a_device_is_found_by_ordinal_and_by_uuid() {
    let slice = StubDevice { parent: Some([1; 16]), ..device(3, "a slice") };
    let stub = Stub::create_with(&[device(1, "one"), device(2, "two"), slice]).unwrap();
    let _entered = stub.enter();
    for (ordinal, uuid, name) in [(0, 1, "one"), (1, 2, "two"), (2, 3, "a slice")] {
        let uuid = DeviceUuid([uuid; 16]);
        for selector in [CudaSelector::Ordinal(ordinal), CudaSelector::Uuid(uuid)] {
            let opened = CudaDevice::open(options(&stub, selector)).unwrap();
            let description = opened.description();
            assert_eq!((description.uuid, description.name.as_str()), (uuid, name));
            assert_eq!(description.kind, "cuda");
        }
    }
}

#[test]
fn a_device_that_is_not_visible_is_refused_with_those_that_are() {
    let stub = Stub::create_with(&[device(1, "one"), device(2, "two")]).unwrap();
    let _entered = stub.enter();
    for selector in [CudaSelector::Ordinal(2), CudaSelector::Uuid(DeviceUuid([9; 16]))] {
        let refusal = refused(&stub, selector);
        assert_eq!(refusal.code(), RefusalCode::DeviceNotVisible);
        for part in [
            selector.to_string().as_str(),
            "cuda:0 (one, 01010101-0101-0101-0101-010101010101)",
            "cuda:1 (two, 02020202-0202-0202-0202-020202020202)",
        ] {
            assert!(refusal.sentence().contains(part), "{part} in {refusal}");
        }
    }
    let none = Stub::create_with(&[]).unwrap();
    drop(_entered);
    let _entered = none.enter();
    let refusal = refused(&none, CudaSelector::Ordinal(0));
    assert_eq!(refusal.code(), RefusalCode::DeviceNotVisible);
    assert!(refusal.sentence().contains("none"), "{refusal}");
}

#[test]
fn a_missing_driver_is_named_with_what_to_install() {
    let stub = Stub::create().unwrap();
    for (library, named) in [
        ("/nowhere/libcuda.so.1", "/nowhere/libcuda.so.1"),
        // A library that is no driver.
        ("libc.so.6", "no function cuInit"),
    ] {
        let mut options = options(&stub, CudaSelector::Ordinal(0));
        options.driver_library = PathBuf::from(library);
        let refusal = Refusal::from(CudaDevice::open(options).map(|_| ()).unwrap_err());
        assert_eq!(refusal.code(), RefusalCode::DeviceNotVisible);
        assert!(refusal.sentence().contains(named), "{refusal}");
        assert!(refusal.remedy().contains("driver"), "{refusal}");
        let exporter = CudaExporter::open(Path::new(library)).map(|_| ()).unwrap_err();
        assert!(exporter.to_string().contains(named), "{exporter}");
    }
}

#[test]
fn a_device_without_memory_is_refused_with_what_was_asked_and_what_is_free() {
    let memory = 3 << 20;
    let stub = Stub::create_with(&[StubDevice { memory, ..device(1, "small") }]).unwrap();
    let _entered = stub.enter();
    let refusal = refused(&stub, CudaSelector::Ordinal(0));
    for part in ["small", "8388608 bytes were asked for", &format!("of {memory} are free")] {
        assert!(refusal.sentence().contains(part), "{part} in {refusal}");
    }
    let held = stub.process(process::id()).unwrap().held();
    assert_eq!(held, [], "a start that failed holds nothing");
}

#[test]
fn a_device_without_memory_for_a_context_is_refused_by_that_word() {
    let stub = Stub::create().unwrap();
    let _entered = stub.enter();
    let full = Fault::next(Act::Answer(CUresult::OUT_OF_MEMORY));
    stub.arm(Function::cuDevicePrimaryCtxRetain, full);
    let refusal = refused(&stub, CudaSelector::Ordinal(0));
    assert!(refusal.sentence().contains("no memory left for a context"), "{refusal}");
    assert!(refusal.remedy().contains("leave it more memory"), "{refusal}");
}

#[test]
fn an_mps_server_that_takes_no_client_is_told_apart() {
    let stub = Stub::create().unwrap();
    let _entered = stub.enter();
    for function in [Function::cuInit, Function::cuDevicePrimaryCtxRetain] {
        stub.arm(function, Fault::next(Act::Answer(CUresult(807))));
        let error = CudaDevice::open(options(&stub, CudaSelector::Ordinal(0))).map(|_| ());
        let error = error.unwrap_err();
        assert!(error.driver_error().is_some_and(DriverError::is_mps_not_ready), "{error}");
        assert!(Refusal::from(error).remedy().contains("MPS"));
    }
    CudaDevice::open(options(&stub, CudaSelector::Ordinal(0))).unwrap();
}

#[test]
fn fused_plans_are_for_compute_capability_8_and_up() {
    for (capability, family, fuses) in
        [((7, 5), "sm_75", false), ((8, 0), "sm_80", true), ((10, 0), "sm_100", true)]
    {
        let stub =
            Stub::create_with(&[StubDevice { capability, ..StubDevice::default() }]).unwrap();
        let bed = Bed::over(stub);
        let description = bed.device.description();
        assert_eq!(description.family.as_deref(), Some(family));
        let fused = [DataType::Float32, DataType::BFloat16];
        assert_eq!(description.fused, if fuses { &fused[..] } else { &[] });
    }
}
