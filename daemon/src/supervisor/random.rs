//! Random bytes of the system.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// Fills the whole buffer. It never waits: what is asked for is short, and a daemon starts after the machine.
///
/// # Errors
/// What the system says.
pub(crate) fn fill(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::NONBLOCK)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_fillings_differ() {
        let (mut one, mut other) = ([0; 32], [0; 32]);
        fill(&mut one).unwrap();
        fill(&mut other).unwrap();
        assert_ne!(one, other);
    }
}
