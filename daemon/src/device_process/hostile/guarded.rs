//! A region between pages that end the process when they are touched.
//!
//! A guard is a mapping of an empty file: every access to it is a bus error. That needs no right and no unsafe code. The
//! kernel puts mappings next to each other from the top of the address space down, once the holes above are full, so a
//! guard, the region and another guard lie side by side after a few tries.

use std::fs::File;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, memfd_create};
use statecopy_descriptors::SealedMemory;
use statecopy_kernels::host::{HostDevice, HostRegion};

/// Guards on each side, each as large as the region: mappings of one size go to the same hole, one below the other.
const GUARDS: usize = 16;
const ATTEMPTS: usize = 256;

/// A region as the device process holds it, the same memory as its worker has it, and the guards.
#[derive(Debug)]
pub(super) struct Guarded {
    pub(super) region: Arc<HostRegion>,
    pub(super) worker: File,
    _guards: Vec<MmapRaw>,
}

impl Guarded {
    /// # Panics
    /// When the kernel gives no memory, or does not put it in a row.
    pub(super) fn new(device: &HostDevice, bytes: u64) -> Self {
        let empty = memfd_create("statecopy-guard", MemfdFlags::CLOEXEC).expect("an empty file");
        let memory = SealedMemory::create("statecopy-region", bytes).expect("sealed memory");
        let guard = || {
            let len = usize::try_from(bytes).expect("a few pages");
            MmapOptions::new().len(len).map_raw(&empty).expect("a guard")
        };
        // What does not lie in a row is kept until the end: it fills the holes.
        let mut apart = Vec::new();
        for _ in 0..ATTEMPTS {
            let mut guards: Vec<MmapRaw> = (0..GUARDS).map(|_| guard()).collect();
            let descriptor = memory.try_clone_fd().expect("a descriptor");
            let region = device.adopt(descriptor, bytes).expect("a region");
            guards.extend((0..GUARDS).map(|_| guard()));
            if in_a_row(&guards, &region) {
                let worker = File::from(memory.try_clone_fd().expect("a descriptor"));
                return Self { region: Arc::new(region), worker, _guards: guards };
            }
            apart.push((guards, region));
        }
        panic!("{ATTEMPTS} times, a region did not lie between its guards");
    }
}

/// Whether all lie side by side from the top down, the region in the middle.
fn in_a_row(guards: &[MmapRaw], region: &HostRegion) -> bool {
    let (above, below) = guards.split_at(GUARDS);
    let middle = region.mapping().base().addr();
    let address = |guard: &MmapRaw| guard.as_ptr().addr();
    let all: Vec<usize> =
        above.iter().map(address).chain([middle]).chain(below.iter().map(address)).collect();
    all.windows(2).all(|pair| pair[1] + region.mapping().len() == pair[0])
}
