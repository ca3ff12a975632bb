//! Shared memory together with what its bytes should be.

use std::os::fd::{AsFd, BorrowedFd};

use statecopy_descriptors::{Mapping, SealedMemory};

/// A sealed memory file, mapped, beside a model of its bytes.
#[derive(Debug)]
pub struct Shared {
    memory: SealedMemory,
    mapping: Mapping,
    /// What the bytes should be.
    pub model: Vec<u8>,
}

impl Shared {
    /// Memory of these bytes.
    ///
    /// # Panics
    /// When the kernel gives none.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        let size = u64::try_from(bytes.len()).expect("a size fits 64 bits");
        let memory = SealedMemory::create("statecopy-test", size).expect("sealed memory");
        let mapping = memory.map().expect("a mapping");
        mapping.write(0, &bytes).expect("it is as long as the memory");
        Self { memory, mapping, model: bytes }
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// The descriptor.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Writes bytes as the worker does, into memory and model.
    ///
    /// # Panics
    /// When they do not lie inside.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.mapping.write(offset, bytes).expect("inside the memory");
        let at = usize::try_from(offset).expect("an address");
        self.model[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Compares every byte with the model.
    ///
    /// # Panics
    /// At the first byte that differs.
    pub fn check(&self, what: &str) {
        let mut now = vec![0; self.model.len()];
        self.mapping.read(0, &mut now).expect("it is as long as the memory");
        if let Some(at) = now.iter().zip(&self.model).position(|(now, model)| now != model) {
            panic!("{what}: byte {at} is {}, not {}", now[at], self.model[at]);
        }
    }
}
