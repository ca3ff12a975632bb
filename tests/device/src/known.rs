//! Device memory whose every byte is known.

use anyhow::{Result, ensure};
use statecopy_kernels::cuda::{Allocator, CudaMemory};
use statecopy_tests::random_bytes;

use crate::setup::Gpu;

/// Bytes after which the noise begins again: a prime, so that rows never meet their own copies.
const NOISE_BYTES: u64 = 1_048_583;

/// Device memory of this process, and what must be at its start.
#[derive(Debug)]
pub(crate) struct Known {
    memory: CudaMemory,
    pub(crate) model: Vec<u8>,
}

impl Known {
    /// New memory, full of noise.
    pub(crate) fn allocate(gpu: &Gpu, bytes: u64, how: Allocator, seed: u64) -> Result<Self> {
        Self::fill(gpu.allocate(bytes, how)?, bytes, seed)
    }

    /// The first `bytes` bytes of new memory, full of noise.
    pub(crate) fn fill(memory: CudaMemory, bytes: u64, seed: u64) -> Result<Self> {
        let model = noise(seed, bytes)?;
        memory.write(0, &model)?;
        Ok(Self { memory, model })
    }

    /// Where it begins, for the device.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.model.len() as u64
    }

    /// Writes as the worker's own kernels would.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let start = usize::try_from(offset)?;
        self.model[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(self.memory.write(offset, bytes)?)
    }

    /// Compares every byte.
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        let mut found = vec![0; self.model.len()];
        self.memory.read(0, &mut found)?;
        compare(&found, &self.model, what)
    }
}

/// Compares memory, and names the first byte that differs instead of printing all.
pub(crate) fn compare(found: &[u8], expected: &[u8], what: &str) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let differs = found.iter().zip(expected).filter(|(found, expected)| found != expected).count();
    let first = found.iter().zip(expected).position(|(found, expected)| found != expected);
    let at = first.unwrap_or_else(|| found.len().min(expected.len()));
    ensure!(
        found == expected,
        "{what}: {differs} of {} bytes differ, the first at {at}: {:?} in place of {:?}",
        expected.len(),
        found.get(at),
        expected.get(at)
    );
    Ok(())
}

/// That many bytes without a pattern that a wrong copy could meet by chance.
pub(crate) fn noise(seed: u64, bytes: u64) -> Result<Vec<u8>> {
    let block = random_bytes(seed, bytes.min(NOISE_BYTES));
    let length = usize::try_from(bytes)?;
    let mut noise = Vec::with_capacity(length);
    while noise.len() < length {
        let left = length - noise.len();
        noise.extend_from_slice(&block[..block.len().min(left)]);
    }
    Ok(noise)
}
