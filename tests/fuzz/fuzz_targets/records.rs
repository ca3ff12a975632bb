//! Records of the descriptor socket, of both sides.
#![no_main]

use libfuzzer_sys::fuzz_target;
use statecopy_proto::descriptor_socket::{
    DESCRIPTORS_MAX, DaemonRecord, RECORD_BYTES_MAX, WorkerRecord,
};

fuzz_target!(|bytes: &[u8]| {
    // What is accepted is exactly what would have been written.
    if let Ok(record) = WorkerRecord::decode(bytes) {
        assert_eq!(record.encode(), bytes);
        assert!(bytes.len() <= RECORD_BYTES_MAX);
        if let WorkerRecord::Descriptors { count, .. } = record {
            assert!((1..=DESCRIPTORS_MAX).contains(&count));
        }
    }
    if let Ok(record) = DaemonRecord::decode(bytes) {
        assert_eq!(record.encode(), bytes);
        assert!(bytes.len() <= RECORD_BYTES_MAX);
    }
});
