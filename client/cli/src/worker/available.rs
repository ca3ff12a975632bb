//! Whether the machine has the memory that workers will touch: better asked before than found out by the OOM killer.

use std::fs;

use crate::failure::Failure;
use crate::terminal::bytes;

/// Refuses work that needs more memory than there is.
///
/// # Errors
/// A usage failure that names both sizes.
pub(crate) fn check(needed: u64) -> Result<(), Failure> {
    // Where the kernel does not say, the work is tried.
    let said = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match available(&said) {
        Some(there) if needed > there => Err(Failure::usage(
            format!("This needs {} of memory; {} are available", bytes(needed), bytes(there)),
            "Ask for fewer rows, layers, workers or selected rows, or for a smaller preset.",
        )),
        _ => Ok(()),
    }
}

fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::EXIT_USAGE;

    #[test]
    fn the_kernels_answer_is_read_and_anything_else_is_no_answer() {
        let said = "MemTotal:       24639844 kB\nMemAvailable:   23000000 kB\n";
        assert_eq!(available(said), Some(23_000_000 * 1024));
        assert_eq!(available("MemTotal: 1 kB\n"), None);
        assert_eq!(available("MemAvailable: much\n"), None);
    }

    #[test]
    fn more_than_any_machine_has_is_a_usage_failure_that_names_both_sizes() {
        let failure = check(u64::MAX).unwrap_err();
        assert_eq!(failure.exit, EXIT_USAGE);
        assert!(failure.sentence.contains("16777215.99 TiB"), "{failure}");
        assert_eq!(check(0), Ok(()));
    }
}
