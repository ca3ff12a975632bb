//! Which memory is adopted, and that what is adopted cannot change its size.
#![expect(clippy::unwrap_used, reason = "a test panics when its set-up fails")]

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create, open,
};
use rustix::io::{Errno, FdFlags, fcntl_getfd};
use rustix::param::page_size;
use statecopy_descriptors::{MemoryError, OutOfMapping, SealedMemory};

const BYTES: u64 = 8192;

/// A memory file as a worker would make it, with these seals.
fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("test", flags).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn sealed() -> OwnedFd {
    memfd(BYTES, SealFlags::SHRINK | SealFlags::GROW)
}

#[test]
fn created_memory_is_sealed_for_good_and_closed_on_exec() {
    let memory = SealedMemory::create("test", BYTES).unwrap();
    assert_eq!(memory.bytes(), BYTES);
    let seals = fcntl_get_seals(&memory).unwrap();
    assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
    assert!(fcntl_getfd(&memory).unwrap().contains(FdFlags::CLOEXEC));
    assert_eq!(ftruncate(&memory, 0), Err(Errno::PERM));
    assert_eq!(ftruncate(&memory, 2 * BYTES), Err(Errno::PERM));
    assert_eq!(fcntl_add_seals(&memory, SealFlags::WRITE), Err(Errno::PERM));
    assert!(matches!(SealedMemory::create("test", 0), Err(MemoryError::Empty)));
    let large = SealedMemory::create("test", u64::MAX);
    assert!(matches!(large, Err(MemoryError::TooLarge { bytes: u64::MAX })));
}

#[test]
fn a_workers_sealed_memory_is_adopted_and_cannot_shrink_later() {
    let fd = sealed();
    let worker = fd.try_clone().unwrap();
    let memory = SealedMemory::adopt(fd, BYTES).unwrap();
    let mapping = memory.map().unwrap();
    assert_eq!(ftruncate(&worker, 0), Err(Errno::PERM));
    assert_eq!(ftruncate(&worker, 1), Err(Errno::PERM));
    mapping.write(BYTES - 1, &[7]).unwrap();
    let mut byte = [0];
    mapping.read(BYTES - 1, &mut byte).unwrap();
    assert_eq!(byte, [7]);
}

#[test]
fn other_seals_do_not_matter() {
    let fd = sealed();
    fcntl_add_seals(&fd, SealFlags::SEAL).unwrap();
    assert!(SealedMemory::adopt(fd, BYTES).is_ok());
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
    // NOEXEC_SEAL needs Linux 6.3.
    if let Ok(fd) = memfd_create("test", flags) {
        ftruncate(&fd, BYTES).unwrap();
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        assert!(fcntl_get_seals(&fd).unwrap().contains(SealFlags::EXEC));
        assert!(SealedMemory::adopt(fd, BYTES).is_ok());
    }
}

#[test]
fn a_missing_seal_is_refused_by_its_name() {
    let missing = |seals| match SealedMemory::adopt(memfd(BYTES, seals), BYTES) {
        Err(MemoryError::SealsMissing { missing }) => missing.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(missing(SealFlags::GROW), "F_SEAL_SHRINK");
    assert_eq!(missing(SealFlags::SHRINK), "F_SEAL_GROW");
    assert_eq!(missing(SealFlags::empty()), "F_SEAL_SHRINK and F_SEAL_GROW");
    assert_eq!(missing(SealFlags::SEAL), "F_SEAL_SHRINK and F_SEAL_GROW");
    // Made without MFD_ALLOW_SEALING, it can never have them.
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, BYTES).unwrap();
    let unsealable = SealedMemory::adopt(fd, BYTES);
    assert!(matches!(unsealable, Err(MemoryError::SealsMissing { .. })));
}

#[test]
fn a_seal_against_writing_is_refused_by_its_name() {
    for (seal, name) in
        [(SealFlags::WRITE, "F_SEAL_WRITE"), (SealFlags::FUTURE_WRITE, "F_SEAL_FUTURE_WRITE")]
    {
        let fd = memfd(BYTES, SealFlags::SHRINK | SealFlags::GROW | seal);
        match SealedMemory::adopt(fd, BYTES) {
            Err(MemoryError::SealedAgainstWriting { present }) => {
                assert_eq!(present.to_string(), name);
            }
            other => panic!("{other:?}"),
        }
    }
    // Added between adoption and mapping, it is an error of the mapping and nothing worse.
    let fd = sealed();
    let worker = fd.try_clone().unwrap();
    let memory = SealedMemory::adopt(fd, BYTES).unwrap();
    fcntl_add_seals(&worker, SealFlags::FUTURE_WRITE).unwrap();
    assert!(matches!(memory.map(), Err(MemoryError::Kernel { action: "map", .. })));
}

#[test]
fn what_is_no_memory_file_is_refused() {
    let file = tempfile::tempfile_in(".").unwrap();
    file.set_len(BYTES).unwrap();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let device = File::options().read(true).write(true).open("/dev/zero").unwrap();
    let path = open("/dev/zero", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    for fd in [file.into(), pipe, device.into(), path] {
        let refused = SealedMemory::adopt(fd, BYTES);
        assert!(matches!(refused, Err(MemoryError::NotMemoryFile)), "{refused:?}");
    }
}

#[test]
fn a_descriptor_that_is_not_open_for_writing_is_refused() {
    use std::os::fd::AsRawFd;
    let fd = sealed();
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let read_only = File::open(path).unwrap();
    let refused = SealedMemory::adopt(read_only.into(), BYTES);
    assert!(matches!(refused, Err(MemoryError::NotWritable)), "{refused:?}");
}

#[test]
fn another_size_than_announced_is_refused_naming_both() {
    for announced in [1, BYTES - 1, BYTES + 1, 2 * BYTES, 1 << 40] {
        match SealedMemory::adopt(sealed(), announced) {
            Err(MemoryError::SizeDiffers { announced: said, actual }) => {
                assert_eq!((said, actual), (announced, BYTES));
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(SealedMemory::adopt(sealed(), 0), Err(MemoryError::Empty)));
    let large = SealedMemory::adopt(sealed(), u64::MAX);
    assert!(matches!(large, Err(MemoryError::TooLarge { .. })));
}

/// A peer can punch a huge page out of a sealed file, and where none is left to replace it the next access is SIGBUS.
#[test]
fn huge_pages_are_refused_naming_their_size() {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let Ok(fd) = memfd_create("test", flags) else {
        println!("skipped: the kernel has no huge page files of 2 MiB");
        return;
    };
    let bytes = 2 << 20;
    ftruncate(&fd, bytes).unwrap();
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let refused = SealedMemory::adopt(fd, bytes);
    let named = matches!(refused, Err(MemoryError::HugePages { page_bytes: 0x20_0000 }));
    assert!(named, "{refused:?}");
}

#[test]
fn descriptors_of_one_memory_have_one_allocation_id() {
    let one = SealedMemory::create("test", BYTES).unwrap();
    let again = SealedMemory::adopt(one.try_clone_fd().unwrap(), BYTES).unwrap();
    let other = SealedMemory::create("test", BYTES).unwrap();
    assert_eq!(one.allocation(), again.allocation());
    assert_ne!(one.allocation(), other.allocation());
}

/// Bytes that are allocated for a memory file.
fn allocated(memory: &SealedMemory) -> u64 {
    u64::try_from(fstat(memory).unwrap().st_blocks).unwrap() * 512
}

#[test]
fn only_what_was_touched_is_data() {
    let page = u64::try_from(page_size()).unwrap();
    let memory = SealedMemory::create("test", 64 * page).unwrap();
    assert_eq!(memory.data_ranges().unwrap(), []);
    let mapping = memory.map().unwrap();
    assert_eq!(memory.data_ranges().unwrap(), [], "mapping touches nothing");
    mapping.write(5 * page + 8, &[1]).unwrap();
    mapping.write(7 * page - 1, &[1, 1]).unwrap();
    mapping.fill(63 * page, page, 3).unwrap();
    let ranges = [5 * page..8 * page, 63 * page..64 * page];
    assert_eq!(memory.data_ranges().unwrap(), ranges);
}

#[test]
fn populated_memory_is_paid_for_and_keeps_what_was_written() {
    let page = u64::try_from(page_size()).unwrap();
    let memory = SealedMemory::create("test", 64 * page).unwrap();
    let mapping = memory.map().unwrap();
    mapping.write(5 * page + 8, &[1]).unwrap();
    assert_eq!(allocated(&memory), page);
    memory.populate(4 * page, 4 * page).unwrap();
    memory.populate(20 * page, 0).unwrap();
    assert_eq!(allocated(&memory), 4 * page);
    let mut byte = [0];
    mapping.read(5 * page + 8, &mut byte).unwrap();
    assert_eq!(byte, [1]);
    let touched = memory.data_ranges().unwrap();
    assert_eq!(touched, std::slice::from_ref(&(5 * page..6 * page)), "nothing else was touched");
    for (offset, len) in [(64 * page, 1), (0, 64 * page + 1), (u64::MAX, 2)] {
        let refused = memory.populate(offset, len);
        assert!(matches!(refused, Err(MemoryError::OutOfRange { .. })));
    }
}

#[test]
fn every_offset_and_length_reads_back_what_was_written() {
    let memory = SealedMemory::create("test", 64).unwrap();
    let mapping = memory.map().unwrap();
    for offset in 0..20 {
        for len in 0..40 {
            mapping.fill(0, 64, 0xaa).unwrap();
            let bytes: Vec<u8> = (1..=len).collect();
            mapping.write(offset, &bytes).unwrap();
            let mut whole = [0; 64];
            mapping.read(0, &mut whole).unwrap();
            let (start, count) = (usize::try_from(offset).unwrap(), usize::from(len));
            let (before, rest) = whole.split_at(start);
            let (written, after) = rest.split_at(count);
            assert_eq!(written, bytes);
            assert!(before.iter().chain(after).all(|byte| *byte == 0xaa), "a neighbour changed");
            let mut back = vec![0; count];
            mapping.read(offset, &mut back).unwrap();
            assert_eq!(back, bytes);
            mapping.fill(offset, len.into(), 0x55).unwrap();
            mapping.read(0, &mut whole).unwrap();
            let filled = whole.iter().filter(|byte| **byte == 0x55).count();
            assert_eq!(filled, count);
        }
    }
}

#[test]
fn nothing_is_reached_outside_a_mapping() {
    let memory = SealedMemory::create("test", 64).unwrap();
    let mapping = memory.map().unwrap();
    for (offset, len) in [(64, 1), (63, 2), (0, 65), (u64::MAX, 1), (u64::MAX - 1, 64)] {
        let outside = OutOfMapping::Range { offset, len, bytes: 64 };
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        assert_eq!(mapping.read(offset, &mut bytes), Err(outside));
        assert_eq!(mapping.write(offset, &bytes), Err(outside));
        assert_eq!(mapping.fill(offset, len, 1), Err(outside));
    }
    let huge = OutOfMapping::Range { offset: 8, len: u64::MAX, bytes: 64 };
    assert_eq!(mapping.fill(8, u64::MAX, 1), Err(huge));
    assert!(mapping.read_words(8, &mut [0; 8]).is_err());
    assert!(mapping.write_words(64, &[0]).is_err());
    assert!(mapping.atomic_u64(64).is_err() && mapping.atomic_u64(57).is_err());
    assert!(mapping.atomic_u32(64).is_err() && mapping.atomic_u32(61).is_err());
    let mut whole = [1; 64];
    mapping.read(0, &mut whole).unwrap();
    assert_eq!(whole, [0; 64], "a refused access wrote nothing");
}

#[test]
fn words_are_aligned_and_seen_by_every_mapping() {
    use std::sync::atomic::Ordering;
    let memory = SealedMemory::create("test", 64).unwrap();
    let (one, other) = (memory.map().unwrap(), memory.map().unwrap());
    one.atomic_u64(8).unwrap().store(0x0102_0304_0506_0708, Ordering::Release);
    assert_eq!(other.atomic_u64(8).unwrap().load(Ordering::Acquire), 0x0102_0304_0506_0708);
    one.atomic_u32(60).unwrap().store(9, Ordering::Release);
    assert_eq!(other.atomic_u32(60).unwrap().load(Ordering::Acquire), 9);
    one.write_words(16, &[1, 2, 3]).unwrap();
    let mut words = [0; 3];
    other.read_words(16, &mut words).unwrap();
    assert_eq!(words, [1, 2, 3]);
    let unaligned = |offset, bytes| OutOfMapping::Unaligned { offset, bytes };
    assert_eq!(one.atomic_u64(4).unwrap_err(), unaligned(4, 8));
    assert_eq!(one.atomic_u32(6).unwrap_err(), unaligned(6, 4));
    assert_eq!(one.read_words(12, &mut words), Err(unaligned(12, 8)));
    assert_eq!(one.write_words(1, &words), Err(unaligned(1, 8)));
}
