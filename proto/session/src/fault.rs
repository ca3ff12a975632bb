//! A refusal as it travels through a ring: four numbers, no allocation. The sentence is made where it is read.

use statecopy_proto::{Refusal, RefusalCode};

/// Why a request was refused. `value` and `limit` mean what its subject says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The code of the closed list.
    pub code: RefusalCode,
    /// What it is about.
    pub subject: Subject,
    /// What was found.
    pub value: u64,
    /// What it is held against.
    pub limit: u64,
}

/// A number that stands for no subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no subject of a refusal")]
pub struct UnknownSubject(pub u16);

/// One line of the table: all that follows from a subject.
struct Facts {
    code: RefusalCode,
    argument: &'static str,
}

macro_rules! subjects {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $code:ident, $argument:literal;)*) => {
        /// What a refusal is about. The number stands in the session memory.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Subject {
            $($(#[$doc])* $name = $number,)*
        }

        impl Subject {
            /// Every subject, in the order of its number.
            pub const ALL: [Self; [$($number),*].len()] = [$(Self::$name),*];

            const fn facts(self) -> Facts {
                match self {
                    $(Self::$name => Facts { code: RefusalCode::$code, argument: $argument },)*
                }
            }
        }
    };
}

subjects! {
    /// Nothing in particular: the code says all. No value, no limit.
    Nothing = 0, Unavailable, "";
    /// A field of the descriptor that must hold another number; value: the field's byte offset, limit: what it holds.
    Descriptor = 1, VersionMismatch, "descriptor";
    /// Value: the session that was named.
    Session = 2, SessionUnknown, "session";
    /// Value: the binding that was named.
    Binding = 3, StalePlan, "binding";
    /// Value: the hash that the worker believes in, limit: the sealed one.
    Signature = 4, SignatureMismatch, "signature";
    /// Value: rows selected, limit: the binding's `max_selected`.
    Selected = 5, SelectedTooLarge, "selected";
    /// Value: the position in the indices, limit: the row that it names.
    Row = 6, RowInvalid, "indices";
    /// Value: bytes of the packed buffer, limit: bytes that the request needs.
    PackedBytes = 7, PackedMismatch, "packed";
    /// Value: number of the dtype that was named, limit: number of the cache's.
    PackedDtype = 8, PackedMismatch, "packed";
    /// Value: the offset, limit: the alignment in bytes.
    PackedAlignment = 9, PackedMismatch, "packed";
    /// Value: the end of the range (2^64 - 1 when past that), limit: bytes of the region.
    PackedRange = 10, OutOfRegion, "packed";
    /// Value: the region that was named.
    PackedRegion = 11, RegionUnknown, "packed";
    /// Value: the packed offset, limit: its bytes.
    PackedOverlapsCache = 12, Overlap, "packed";
    /// Value: the packed offset, limit: its bytes.
    PackedOverlapsIndices = 13, Overlap, "packed";
    /// Value: the packed offset, limit: its bytes.
    PackedOverlapsFlags = 14, Overlap, "packed";
    /// Value: the width that was named, in bytes.
    IndexWidth = 15, IndexType, "indices";
    /// Value: the number of the source.
    IndexSource = 16, IndexType, "indices";
    /// Value: the offset, limit: the alignment in bytes.
    IndexAlignment = 17, IndexType, "indices";
    /// Value: the end of the range (2^64 - 1 when past that), limit: bytes of the region or of the inline space.
    IndexRange = 18, OutOfRegion, "indices";
    /// Value: the region that was named.
    IndexRegion = 19, RegionUnknown, "indices";
    /// Value: the number of the source.
    FlagSource = 20, FlagsMismatch, "flags";
    /// Value: the offset, limit: the alignment in bytes.
    FlagAlignment = 21, FlagsMismatch, "flags";
    /// Value: the end of the range (2^64 - 1 when past that), limit: bytes of the region or of the inline space.
    FlagRange = 22, OutOfRegion, "flags";
    /// Value: the region that was named.
    FlagRegion = 23, RegionUnknown, "flags";
    /// Value: nanoseconds that the request waited, limit: nanoseconds that it might wait.
    Deadline = 24, DeadlineExceeded, "deadline";
    /// Value: how many hooks were found.
    Hook = 25, HookPresent, "device";
    /// Value: the device's own error number.
    Device = 26, DeviceLost, "device";
    /// Value: requests that wait, limit: how many may.
    Queue = 27, Overloaded, "lane";
    /// A registration runs, or nothing is published.
    Registration = 28, NotSealed, "session";
    /// Value: number of the direction.
    Direction = 29, VersionMismatch, "direction";
    /// Value: the lane, limit: how many there are.
    Lane = 30, QuotaExceeded, "lane";
    /// Value: the binding whose region was released.
    Asleep = 31, RegionUnknown, "binding";
    /// Indices or flags of a stream-ordered request that are inline.
    Inline = 32, IndexType, "indices";
    /// Value: the slot that a graph rang, limit: its pair.
    Slot = 33, StalePlan, "slot";
}

impl Subject {
    /// The code that a refusal about it has, unless its maker knows better.
    #[must_use]
    pub const fn code(self) -> RefusalCode {
        self.facts().code
    }

    /// A refusal about it, with its usual code.
    #[must_use]
    pub const fn fault(self, value: u64, limit: u64) -> Fault {
        Fault { code: self.code(), subject: self, value, limit }
    }

    /// The number in the session memory.
    #[must_use]
    pub const fn number(self) -> u16 {
        self as u16
    }
}

impl TryFrom<u16> for Subject {
    type Error = UnknownSubject;

    fn try_from(number: u16) -> Result<Self, UnknownSubject> {
        Self::ALL.get(usize::from(number)).copied().ok_or(UnknownSubject(number))
    }
}

impl Fault {
    /// A refusal with a code alone.
    #[must_use]
    pub const fn of(code: RefusalCode) -> Self {
        Self { code, subject: Subject::Nothing, value: 0, limit: 0 }
    }

    /// The refusal for people: one sentence that names the argument, the value and the limit.
    #[must_use]
    pub fn to_refusal(&self) -> Refusal {
        Refusal::new(self.code, self.sentence()).about(self.subject.facts().argument)
    }

    fn sentence(&self) -> String {
        let Self { code, subject, value, limit } = *self;
        let overlap = |what: &str| {
            format!(
                "The packed buffer, {limit} bytes at offset {value} of its region, overlaps {what}"
            )
        };
        let unaligned = |what: &str| {
            format!(
                "The {what} start at offset {value} of their region, which is no multiple of {limit}"
            )
        };
        let outside = |what: &str| {
            let end = if value == u64::MAX {
                "past every address".to_owned()
            } else {
                format!("at byte {value}")
            };
            format!("The {what} end {end}, but the memory that holds them has {limit} bytes")
        };
        let unknown = |what: &str| {
            format!("The region of the {what}, {value}, is not registered in this session")
        };
        match subject {
            Subject::Nothing => nothing(code).to_owned(),
            Subject::Descriptor => {
                format!(
                    "Byte {value} of the descriptor holds {limit}, which this version does not know"
                )
            }
            Subject::Session => format!("Session {value} is not known here"),
            Subject::Binding => format!("Binding {value} is not published in this session"),
            Subject::Signature => format!(
                "The request believes in layout signature {value:016x}, the sealed one is {limit:016x}"
            ),
            Subject::Selected => {
                format!("The request selects {value} rows, the binding's max_selected is {limit}")
            }
            Subject::Row => {
                format!("Index {value} names row {limit}, which another index names too")
            }
            Subject::PackedBytes => {
                format!("The packed buffer has {value} bytes, the request needs {limit}")
            }
            Subject::PackedDtype => {
                format!(
                    "The packed buffer has dtype {}, the cache has {}",
                    dtype(value),
                    dtype(limit)
                )
            }
            Subject::PackedAlignment => format!(
                "The packed buffer starts at offset {value} of its region, which is no multiple of {limit}"
            ),
            Subject::PackedRange => outside("bytes of the packed buffer"),
            Subject::PackedRegion => unknown("packed buffer"),
            Subject::PackedOverlapsCache => overlap("a payload of the cache"),
            Subject::PackedOverlapsIndices => overlap("the indices"),
            Subject::PackedOverlapsFlags => overlap("the flags"),
            Subject::IndexWidth => format!("The indices have {value} bytes each, not 4 or 8"),
            Subject::IndexSource => {
                format!("The indices come from source {value}, which this version does not know")
            }
            Subject::IndexAlignment => unaligned("indices"),
            Subject::IndexRange => outside("indices"),
            Subject::IndexRegion => unknown("indices"),
            Subject::FlagSource => {
                format!("The flags come from source {value}, which this version does not know")
            }
            Subject::FlagAlignment => unaligned("flags"),
            Subject::FlagRange => outside("flags"),
            Subject::FlagRegion => unknown("flags"),
            Subject::Deadline => {
                let (waited, allowed) = (milliseconds(value), milliseconds(limit));
                format!("The request waited {waited} ms for its start, and might wait {allowed} ms")
            }
            Subject::Hook => format!("{value} hooks sit on the launch path of the device process"),
            Subject::Device => format!("The device failed with its error {value}"),
            Subject::Queue => format!("{value} requests wait already, {limit} may"),
            Subject::Registration => {
                "Nothing is published in this session, or a registration is running".to_owned()
            }
            Subject::Direction => {
                format!("The request has direction {value}, which this version does not know")
            }
            Subject::Lane => format!("Lane {value} does not exist, a session has {limit}"),
            Subject::Asleep => {
                format!("The memory behind binding {value} was released; rebind its layers first")
            }
            Subject::Inline => {
                "Indices and flags of a stream-ordered copy lie in shared memory, not inline"
                    .to_owned()
            }
            Subject::Slot => {
                format!("A graph rang slot {value} of pair {limit}, which is not armed")
            }
        }
    }
}

/// The dtype's name, or its number when it has none here.
fn dtype(number: u64) -> String {
    u32::try_from(number)
        .ok()
        .and_then(|number| statecopy_proto::DataType::try_from(number).ok())
        .map_or_else(|| format!("number {number}"), |dtype| dtype.label().to_owned())
}

/// What a code alone says.
fn nothing(code: RefusalCode) -> &'static str {
    match code {
        RefusalCode::NotSealed => {
            "Nothing is published in this session, or a registration is running"
        }
        RefusalCode::StalePlan => "The binding belongs to an earlier registration",
        RefusalCode::SignatureMismatch => "The layout is not the sealed one",
        RefusalCode::LayoutInvalid => "The layout breaks a rule",
        RefusalCode::SelectedTooLarge => {
            "The request selects more rows than the binding's max_selected"
        }
        RefusalCode::IndexType => "The indices are not as they must be",
        RefusalCode::FlagsMismatch => "The flags do not fit the request",
        RefusalCode::PackedMismatch => "The packed buffer does not fit the request",
        RefusalCode::Overlap => "Memory that must be apart overlaps",
        RefusalCode::OutOfRegion => "A range reaches past its region",
        RefusalCode::RegionUnknown => "A region is not registered in this session",
        RefusalCode::HandleInvalid => "A handle is not what it should be",
        RefusalCode::HandleUnsupported => "The memory cannot be shared this way",
        RefusalCode::DeviceNotVisible => "The device is not served here",
        RefusalCode::SessionUnknown => "The session is not known here",
        RefusalCode::IncarnationMismatch => "The request is meant for another life of the daemon",
        RefusalCode::PermissionDenied => "The session may not do this",
        RefusalCode::VersionMismatch => "The two sides speak different versions",
        RefusalCode::ConfigurationDrift => "The configuration changed between prepare and seal",
        RefusalCode::HookPresent => "A hook sits on the launch path of the device process",
        RefusalCode::PrepareFailed => "A variant could not be prepared",
        RefusalCode::QuotaExceeded => "A stated limit is reached",
        RefusalCode::Overloaded => "Too many requests wait",
        RefusalCode::DeadlineExceeded => "The request did not start before its deadline",
        RefusalCode::DeviceLost => "The device failed under the copy",
        RefusalCode::Draining => "The daemon is about to end",
        RefusalCode::Unavailable => "The device process is gone",
        RefusalCode::RowInvalid => "A row failed a check that was asked for",
        RefusalCode::LeaseUnavailable => "The lease cannot be had",
    }
}

/// Nanoseconds for people.
fn milliseconds(nanoseconds: u64) -> String {
    format!("{}.{:03}", nanoseconds / 1_000_000, nanoseconds / 1_000 % 1_000)
}

#[cfg(test)]
mod tests;
