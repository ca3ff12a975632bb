//! Which machine this is, and what of it may be used.

use std::fs;
use std::num::NonZeroUsize;
use std::thread;

use statecopy_proto::{Refusal, RefusalCode};

use crate::signature::DeviceUuid;

/// Where the machine's name is looked for, the best one first.
///
/// The boot id comes first because it is the kernel's: every container of the machine reads the same one, while each image
/// may bring a machine id of its own. A reboot ends every session, so nothing outlives it.
const IDENTITIES: [&str; 2] = ["/proc/sys/kernel/random/boot_id", "/etc/machine-id"];

/// The UUID of the host device: the same for every process of this machine until it is started again.
///
/// # Errors
/// DEVICE_NOT_VISIBLE when the machine tells no identity.
pub fn host_uuid() -> Result<DeviceUuid, Refusal> {
    let identity = IDENTITIES
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .map(|text| text.trim().to_owned())
        .find(|text| !text.is_empty())
        .ok_or_else(|| {
            let [first, second] = IDENTITIES;
            Refusal::new(
                RefusalCode::DeviceNotVisible,
                format!(
                    "The host device has no identity: neither {first} nor {second} can be read"
                ),
            )
        })?;
    let mut uuid = [0; 16];
    let digest = blake3::derive_key("statecopy host device identity 1", identity.as_bytes());
    uuid.copy_from_slice(&digest[..16]);
    Ok(DeviceUuid(uuid))
}

/// How many CPUs this process may use: by its affinity, and by the quota of its control group. At least 1.
#[must_use]
pub fn cpus_allowed() -> NonZeroUsize {
    thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

/// The processor's name, for people.
pub(super) fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("model name"))
        .and_then(|rest| rest.split_once(':'))
        .map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}
