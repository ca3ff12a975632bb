//! Physical memory, and the addresses that it is mapped to.

use std::fs::File;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use statecopy_stub_cuda::{CUresult, GRANULARITY_BYTES, Knob, Stub, StubDevice};

use crate::calls::{Driver, out};
use crate::until;

const PIECE: usize = 2 << 20;
const _: () = assert!(PIECE as u64 == GRANULARITY_BYTES);
const POSIX: u32 = 1;
const FABRIC: u32 = 8;

/// So many pieces, each exportable as a descriptor, mapped side by side to be read and written.
fn pieces(driver: &Driver, count: usize) -> u64 {
    let at = driver.reserve(count * PIECE).unwrap();
    for place in 0..count {
        let handle = driver.create(PIECE, POSIX).unwrap();
        driver.cuMemMap(at + (place * PIECE) as u64, PIECE, 0, handle, 0).unwrap();
        driver.cuMemRelease(handle).unwrap();
    }
    driver.allow(at, count * PIECE, 3).unwrap();
    at
}

/// A descriptor that the driver gave, to be closed.
fn owned(descriptor: i32) -> OwnedFd {
    // SAFETY: the driver gave the descriptor to its caller.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

#[test]
fn pieces_side_by_side_are_one_range_to_copy_and_many_to_export() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let at = pieces(&driver, 3);
    let second = at + PIECE as u64;
    driver.cuMemsetD8_v2(at, 5, 3 * PIECE).unwrap();
    assert_eq!(driver.read(second - 1, 2), Ok(vec![5, 5]));
    assert_eq!(driver.attribute(19, second + 7), Ok(second));
    assert_eq!(driver.attribute(18, second + 7), Ok(PIECE as u64));
    assert_eq!(driver.attribute(14, second + 7), Ok(u64::from(POSIX)));
    assert_eq!(driver.attribute(10, second + 7), Ok(0_u32));
    assert_eq!(driver.export(at), Err(CUresult::INVALID_VALUE));
}

#[test]
fn an_exported_piece_is_imported_with_what_it_holds() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let at = pieces(&driver, 2);
    driver.cuMemsetD8_v2(at + PIECE as u64, 9, PIECE).unwrap();
    let handle = out(|to| driver.cuMemRetainAllocationHandle(to, at + PIECE as u64 + 5)).unwrap();
    let descriptor = owned(driver.export_descriptor(handle).unwrap());
    driver.cuMemRelease(handle).unwrap();
    let import = driver.import_descriptor(descriptor.as_raw_fd()).unwrap();
    drop(descriptor);
    let copy = driver.reserve(PIECE).unwrap();
    driver.cuMemMap(copy, PIECE, 0, import, 0).unwrap();
    driver.cuMemRelease(import).unwrap();
    driver.allow(copy, PIECE, 1).unwrap();
    assert_eq!(driver.read(copy, 4), Ok(vec![9; 4]));
    assert_eq!(driver.cuMemsetD8_v2(copy, 0, 1), Err(CUresult::INVALID_VALUE), "to be read only");
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let invalid = Err(CUresult::INVALID_VALUE);
    assert_eq!(driver.create(PIECE + 1, POSIX), invalid);
    assert_eq!(driver.reserve(PIECE - 4096), invalid);
    let handle = driver.create(PIECE, POSIX).unwrap();
    let at = driver.reserve(2 * PIECE).unwrap();
    assert_eq!(driver.cuMemMap(at, 2 * PIECE, 0, handle, 0), Err(CUresult::NOT_SUPPORTED));
    assert_eq!(driver.cuMemMap(at + 4096, PIECE, 0, handle, 0), Err(CUresult::INVALID_VALUE));
    driver.cuMemMap(at, PIECE, 0, handle, 0).unwrap();
    assert_eq!(driver.cuMemMap(at, PIECE, 0, handle, 0), Err(CUresult::INVALID_VALUE), "taken");
    assert_eq!(driver.read(at, 1), Err(CUresult::INVALID_VALUE), "nobody may touch it yet");
    assert_eq!(driver.allow(at, 2 * PIECE, 3), Err(CUresult::INVALID_VALUE), "half of it is empty");
    assert_eq!(driver.cuMemAddressFree(at, 2 * PIECE), Err(CUresult::INVALID_VALUE), "in use");
    assert_eq!(driver.cuMemUnmap(at, 2 * PIECE), Err(CUresult::INVALID_VALUE));
    driver.cuMemUnmap(at, PIECE).unwrap();
    driver.cuMemAddressFree(at, 2 * PIECE).unwrap();
    driver.cuMemRelease(handle).unwrap();
    assert_eq!(driver.cuMemRelease(handle), Err(CUresult::INVALID_VALUE));
    driver.close();
    assert_eq!(stub.process(std::process::id()).unwrap().held(), []);
}

#[test]
fn only_what_was_created_for_it_is_exported_and_only_that_is_imported() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    let private = driver.create(PIECE, 0).unwrap();
    assert_eq!(driver.export_descriptor(private), Err(CUresult::INVALID_VALUE));
    let other = File::open("/dev/null").unwrap();
    assert_eq!(driver.import_descriptor(other.as_raw_fd()), Err(CUresult::UNKNOWN));
    assert_eq!(driver.import_descriptor(-1), Err(CUresult::INVALID_VALUE));
    assert_eq!(driver.create(PIECE, FABRIC), Err(CUresult::NOT_PERMITTED));
}

#[test]
fn fabric_handles_work_once_they_are_turned_on() {
    let stub = Stub::create().unwrap();
    let driver = Driver::open(&stub);
    stub.set(Knob::Fabric, true);
    let handle = driver.create(PIECE, FABRIC).unwrap();
    let mut named = [0_u8; 64];
    driver.cuMemExportToShareableHandle(named.as_mut_ptr().cast(), handle, FABRIC, 0).unwrap();
    let import = |mut named: [u8; 64]| {
        out(|to| driver.cuMemImportFromShareableHandle(to, named.as_mut_ptr().cast(), FABRIC))
    };
    let imported = import(named).unwrap();
    driver.cuMemRelease(handle).unwrap();
    driver.cuMemRelease(imported).unwrap();
    until("nobody has the memory", || match import(named) {
        Ok(handle) => driver.cuMemRelease(handle).is_err(),
        Err(error) => error == CUresult::INVALID_VALUE,
    });
    stub.set(Knob::Fabric, false);
    assert_eq!(import(named), Err(CUresult::NOT_PERMITTED));
}

#[test]
fn a_descriptor_alone_keeps_memory_in_use() {
    let stub = Stub::create().unwrap();
    let device = StubDevice::default();
    let driver = Driver::open(&stub);
    let handle = driver.create(PIECE, POSIX).unwrap();
    let descriptor = owned(driver.export_descriptor(handle).unwrap());
    driver.cuMemRelease(handle).unwrap();
    driver.close();
    assert_eq!(stub.used_bytes(&device).unwrap(), GRANULARITY_BYTES);
    drop(descriptor);
    until("nobody uses the memory", || stub.used_bytes(&device).unwrap() == 0);
}
