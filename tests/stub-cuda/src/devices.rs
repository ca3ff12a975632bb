//! The devices that a process sees: a text, parsed.

use std::fmt::Write as _;

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StubDevice {
    /// Its identity: what `cuDeviceGetUuid_v2` says.
    pub uuid: [u8; 16],
    /// The whole device that a MIG slice is part of: what `cuDeviceGetUuid` says.
    pub parent: Option<[u8; 16]>,
    /// The name that a person reads.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Bytes of memory.
    pub memory: u64,
}

impl Default for StubDevice {
    fn default() -> Self {
        Self {
            uuid: *b"statecopy-stub-0",
            parent: None,
            name: "Stub H200".into(),
            capability: (9, 0),
            memory: 64 << 30,
        }
    }
}

impl StubDevice {
    /// The text of several devices, in the order of their ordinals, as `STATECOPY_STUB_CUDA_DEVICES` wants it:
    /// `uuid=<32 hex digits>,parent=<32 hex digits>,name=<text>,capability=9.0,memory=<bytes>` each, divided by `;`.
    #[must_use]
    pub fn describe(devices: &[Self]) -> String {
        let each = devices.iter().map(|device| {
            let (major, minor) = device.capability;
            let parent =
                device.parent.map_or(String::new(), |uuid| format!("parent={},", hex(uuid)));
            let (uuid, name, memory) = (hex(device.uuid), &device.name, device.memory);
            format!("uuid={uuid},{parent}name={name},capability={major}.{minor},memory={memory}")
        });
        each.collect::<Vec<_>>().join(";")
    }

    /// Reads such a text; what an entry leaves out is as in [`StubDevice::default`]. `None` when it is none.
    #[must_use]
    pub fn parse(text: &str) -> Option<Vec<Self>> {
        text.split(';').map(str::trim).filter(|entry| !entry.is_empty()).map(Self::one).collect()
    }

    fn one(entry: &str) -> Option<Self> {
        let mut device = Self::default();
        for field in entry.split(',') {
            let (name, value) = field.split_once('=')?;
            match (name.trim(), value.trim()) {
                ("uuid", value) => device.uuid = unhex(value)?,
                ("parent", value) => device.parent = Some(unhex(value)?),
                ("name", value) => device.name = value.to_owned(),
                ("capability", value) => {
                    let (major, minor) = value.split_once('.')?;
                    device.capability = (major.parse().ok()?, minor.parse().ok()?);
                }
                ("memory", value) => device.memory = value.parse().ok()?,
                _ => return None,
            }
        }
        Some(device)
    }
}

/// 32 hexadecimal digits.
pub(crate) fn hex(uuid: [u8; 16]) -> String {
    uuid.iter().fold(String::new(), |mut text, byte| {
        let written = write!(text, "{byte:02x}");
        debug_assert!(written.is_ok(), "a string takes every text");
        text
    })
}

fn unhex(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|each| *each != '-').collect();
    let value = u128::from_str_radix(&digits, 16).ok()?;
    (digits.len() == 32).then_some(value.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_read_as_it_was_written() {
        let slice = StubDevice {
            uuid: [3; 16],
            parent: Some([1; 16]),
            name: "Stub MIG 1g.18gb".into(),
            capability: (8, 0),
            memory: 1 << 20,
        };
        let devices = [StubDevice::default(), slice];
        assert_eq!(StubDevice::parse(&StubDevice::describe(&devices)).unwrap(), devices);
    }

    #[test]
    fn what_is_left_out_is_the_default_and_what_is_unknown_is_refused() {
        let only_memory = StubDevice { memory: 5, ..StubDevice::default() };
        assert_eq!(StubDevice::parse("memory=5").unwrap(), [only_memory]);
        assert_eq!(StubDevice::parse("").unwrap(), []);
        for text in ["memory", "memory=many", "colour=green", "uuid=00", "capability=9"] {
            assert_eq!(StubDevice::parse(text), None, "{text}");
        }
    }
}
