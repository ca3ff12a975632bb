//! The host under the conformance suite, and what only the host can show.

use std::num::NonZeroUsize;
use std::sync::Arc;

use statecopy_descriptors::SealedMemory;

use super::*;
use crate::conformance::DeviceUnderTest;

/// The host, opened in one of its ways.
struct HostUnderTest(HostDevice);

impl HostUnderTest {
    fn open(row_copies: RowCopies, copy_threads: usize) -> Self {
        let mut options = HostOptions::new(Arc::new(ServingGuard::new(true)));
        options.row_copies = row_copies;
        options.copy_threads = NonZeroUsize::new(copy_threads).unwrap();
        Self(HostDevice::open(options).unwrap())
    }
}

impl DeviceUnderTest for HostUnderTest {
    type Device = HostDevice;

    fn device(&self) -> &HostDevice {
        &self.0
    }

    fn allocate(&self, bytes: u64) -> Arc<HostRegion> {
        let memory = SealedMemory::create("test", bytes).unwrap();
        let descriptor = memory.try_clone_fd().unwrap();
        Arc::new(self.0.import(RegionOffer::Memfd { descriptor, bytes }).unwrap())
    }

    fn write(&self, region: &HostRegion, offset: u64, bytes: &[u8]) {
        region.mapping().write(offset, bytes).unwrap();
    }

    fn read(&self, region: &HostRegion, offset: u64, into: &mut [u8]) {
        region.mapping().read(offset, into).unwrap();
    }
}

mod native {
    crate::conformance_tests! { super::HostUnderTest::open(super::RowCopies::Native, 1) }
}

mod native_two_threads {
    crate::conformance_tests! { super::HostUnderTest::open(super::RowCopies::Native, 2) }
}

mod portable {
    crate::conformance_tests! { super::HostUnderTest::open(super::RowCopies::Portable, 1) }
}

mod portable_two_threads {
    crate::conformance_tests! { super::HostUnderTest::open(super::RowCopies::Portable, 2) }
}
