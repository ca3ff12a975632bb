//! Which memories are opened, and what of them is believed.

use std::os::fd::OwnedFd;

use super::*;

/// A sealed memory with these bytes at its start.
fn forged(bytes: u64, header: &[u8]) -> OwnedFd {
    let sealed = SealedMemory::create("forged", bytes).unwrap();
    sealed.map().unwrap().write(0, header).unwrap();
    sealed.try_clone_fd().unwrap()
}

#[test]
fn only_the_daemons_own_layout_is_opened() {
    let parameters = parameters(4, 4096);
    let bytes = parameters.total_bytes();
    let header = Header::new(parameters, identity(), MonotonicNs(5));
    let open = |bytes, header: Header| SessionMemory::open(forged(bytes, header.as_bytes()));
    let opened = open(bytes, header).unwrap();
    assert_eq!((opened.parameters(), opened.identity()), (parameters, identity()));
    assert_eq!(opened.made_at(), MonotonicNs(5));

    let small = SessionMemory::open(forged(64, &[0; 64]));
    assert!(matches!(small, Err(SessionMemoryError::TooSmall { bytes: 64 })));
    let other = open(bytes, Header { magic: *b"whatever", ..header });
    assert!(matches!(other, Err(SessionMemoryError::Magic)));
    let newer = open(bytes, Header { abi_version: ABI_VERSION + 1, ..header });
    assert!(matches!(newer, Err(SessionMemoryError::AbiVersion { found: 4 })));
    let slots = open(bytes, Header { slots: 5, ..header });
    let wrong = LayoutError::Slots(5);
    assert!(matches!(slots, Err(SessionMemoryError::Parameters(error)) if error == wrong));
    let contradictions = [
        Header { slots: 8, ..header },
        Header { total_bytes: bytes + 1, ..header },
        Header { inline_offset: 0, ..header },
        Header { descriptor_bytes: 256, ..header },
    ];
    for header in contradictions {
        assert!(matches!(open(bytes, header), Err(SessionMemoryError::Header { .. })));
    }
    assert!(matches!(open(bytes + 4096, header), Err(SessionMemoryError::Header { .. })));
}

#[test]
fn the_daemon_believes_its_own_record_and_not_the_header() {
    let Ends { sealed, peer, .. } = ends(parameters(4, 4096));
    peer.mapping().fill(0, 4096, 0xff).unwrap();
    let fd = || sealed.try_clone_fd().unwrap();
    assert!(SessionMemory::attach(fd(), parameters(4, 4096), identity()).is_ok());
    let larger = SessionMemory::attach(fd(), parameters(8, 4096), identity());
    let differs = MemoryError::SizeDiffers {
        announced: parameters(8, 4096).total_bytes(),
        actual: parameters(4, 4096).total_bytes(),
    };
    assert_eq!(larger.unwrap_err().to_string(), differs.to_string());
}

#[test]
fn a_memory_with_lanes_is_opened_as_it_was_made_or_not_at_all() {
    let with_lanes = parameters(4, 4096).with_lanes(8).unwrap();
    let (sealed, made) = SessionMemory::create(with_lanes, identity()).unwrap();
    let opened = || SessionMemory::open(sealed.try_clone_fd().unwrap());
    assert_eq!(opened().unwrap().parameters(), with_lanes);
    let honest = LaneHeader::new(with_lanes);
    let contradictions = [
        LaneHeader { lane_slots: 16, ..honest },
        LaneHeader { pairs: 64, ..honest },
        LaneHeader { pairs_offset: 0, ..honest },
        LaneHeader { lane_reserved: [0, 0, 1], ..honest },
    ];
    for header in contradictions {
        made.mapping().write(HEADER_BYTES.into(), header.as_bytes()).unwrap();
        assert!(matches!(opened(), Err(SessionMemoryError::Header { .. })), "{header:?}");
    }
    let none = LaneHeader { lane_slots: 3, ..honest };
    made.mapping().write(HEADER_BYTES.into(), none.as_bytes()).unwrap();
    assert!(matches!(opened(), Err(SessionMemoryError::Parameters(LayoutError::LaneSlots(3)))));
}
