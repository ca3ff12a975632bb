//! The closed list of refusals (contract: Refusals): one enum for gRPC, rings, Python and metric labels alike.

use std::fmt;

use prost::Message as _;
use tonic::{Code, Status};

use crate::v1;

/// What a refusal leaves behind (contract: Refusals).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaves {
    /// No byte moved.
    NothingMoved,
    /// It comes with a completion: a gathered row is cleared, a scattered row keeps its old bytes.
    PerRow,
    /// The rows named are undefined until written whole again.
    Unknown,
}

/// One line of the table: everything that follows from a code, in one place.
struct Facts {
    label: &'static str,
    grpc: Code,
    exit: u8,
    leaves: Leaves,
    remedy: &'static str,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $label:literal, $grpc:ident, $exit:literal, $leaves:ident,
       $remedy:literal;)*) => {
        /// A code of the closed list. The number also stands in the session memory.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum RefusalCode {
            $($(#[$doc])* $name = $number,)*
        }

        impl RefusalCode {
            /// Every code, in the order of its number.
            pub const ALL: [Self; [$($number),*].len()] = [$(Self::$name),*];

            const fn facts(self) -> Facts {
                match self {
                    $(Self::$name => Facts {
                        label: $label,
                        grpc: Code::$grpc,
                        exit: $exit,
                        leaves: Leaves::$leaves,
                        remedy: $remedy,
                    },)*
                }
            }
        }
    };
}

codes! {
    /// The session has nothing published, or a registration is running.
    NotSealed = 1, "NOT_SEALED", FailedPrecondition, 20, NothingMoved,
        "Register the layers and wait until they are published before the first copy.";
    /// The binding belongs to an earlier registration.
    StalePlan = 2, "STALE_PLAN", FailedPrecondition, 21, NothingMoved,
        "Use the bindings of the newest registration of this session.";
    /// The worker believes in another layout than the sealed one.
    SignatureMismatch = 3, "SIGNATURE_MISMATCH", FailedPrecondition, 22, NothingMoved,
        "Register the layers again with the layout that the cache has now.";
    /// The cache layout breaks a rule of the contract (Cache).
    LayoutInvalid = 4, "LAYOUT_INVALID", InvalidArgument, 23, NothingMoved,
        "Correct the value named here; docs/contract.md, \"Cache\", lists the rules.";
    /// More rows than the binding's `max_selected`.
    SelectedTooLarge = 5, "SELECTED_TOO_LARGE", InvalidArgument, 24, NothingMoved,
        "Select fewer rows, or register the layers with a larger max_selected.";
    /// Indices are neither INT32 nor INT64, or are misplaced.
    IndexType = 6, "INDEX_TYPE", InvalidArgument, 25, NothingMoved,
        "Pass contiguous, 16-byte aligned INT32 or INT64 indices, one for each selected row.";
    /// Flags do not fit the request.
    FlagsMismatch = 7, "FLAGS_MISMATCH", InvalidArgument, 26, NothingMoved,
        "Pass one byte of flag for each selected row, contiguous and 16-byte aligned, or none at all.";
    /// The packed buffer does not fit the request.
    PackedMismatch = 8, "PACKED_MISMATCH", InvalidArgument, 27, NothingMoved,
        "Pass a contiguous, 16-byte aligned buffer of [selected, H, V, K] in the cache's dtype.";
    /// Memory that must be disjoint is not, or is still in use.
    Overlap = 9, "OVERLAP", InvalidArgument, 28, NothingMoved,
        "Use memory that no cache payload, index or flag of the request touches.";
    /// A range reaches past its region.
    OutOfRegion = 10, "OUT_OF_REGION", InvalidArgument, 29, NothingMoved,
        "Keep offset and size inside the registered region, or register a larger one.";
    /// No such region in this session.
    RegionUnknown = 11, "REGION_UNKNOWN", NotFound, 30, NothingMoved,
        "Register the region in this session first, and use the id that it was given.";
    /// A handle or descriptor is not what it should be.
    HandleInvalid = 12, "HANDLE_INVALID", InvalidArgument, 31, NothingMoved,
        "Send the handle of live memory of the announced kind, size and count; a memfd needs F_SEAL_SHRINK and F_SEAL_GROW.";
    /// The memory cannot be shared that way, or not at all.
    HandleUnsupported = 13, "HANDLE_UNSUPPORTED", Unimplemented, 32, NothingMoved,
        "Share the memory in a way that this device supports, as the sentence says.";
    /// The daemon does not serve that device.
    DeviceNotVisible = 14, "DEVICE_NOT_VISIBLE", NotFound, 33, NothingMoved,
        "Connect to the daemon that serves this device, or start it with --device.";
    /// No such session.
    SessionUnknown = 15, "SESSION_UNKNOWN", NotFound, 34, NothingMoved,
        "Open a session and register again.";
    /// The request is meant for another life of the daemon.
    IncarnationMismatch = 16, "INCARNATION_MISMATCH", Aborted, 35, NothingMoved,
        "The daemon was restarted: open a session and register again.";
    /// The peer may not do this.
    PermissionDenied = 17, "PERMISSION_DENIED", PermissionDenied, 36, NothingMoved,
        "Run the worker as a user that the daemon allows (allow_uids), and use only what its own session owns.";
    /// The two sides speak different protocol versions.
    VersionMismatch = 18, "VERSION_MISMATCH", FailedPrecondition, 37, NothingMoved,
        "Install a client and a daemon whose versions meet.";
    /// The compiler configuration changed between prepare and seal.
    ConfigurationDrift = 19, "CONFIGURATION_DRIFT", FailedPrecondition, 38, NothingMoved,
        "Leave compiler, driver libraries and environment alone while the daemon runs; restart it and register again.";
    /// A foreign hook sits on the launch path.
    HookPresent = 20, "HOOK_PRESENT", FailedPrecondition, 39, NothingMoved,
        "Remove the injected library or callback from the device process, then register again.";
    /// A variant could not be compiled, loaded or run on scratch.
    PrepareFailed = 21, "PREPARE_FAILED", Internal, 40, NothingMoved,
        "Read the device's own message here; see `statecopy status` and the daemon's log.";
    /// A stated limit was reached.
    QuotaExceeded = 22, "QUOTA_EXCEEDED", ResourceExhausted, 41, NothingMoved,
        "Give back what is no longer needed, or raise the limit named here in the daemon's configuration.";
    /// The daemon has too much to do now.
    Overloaded = 23, "OVERLOADED", ResourceExhausted, 42, NothingMoved,
        "Wait for earlier requests of this lane, then try again.";
    /// The request did not start in time and never will.
    DeadlineExceeded = 24, "DEADLINE_EXCEEDED", DeadlineExceeded, 43, NothingMoved,
        "Try again, with a longer deadline if the daemon is busy.";
    /// The device failed under the copy.
    DeviceLost = 25, "DEVICE_LOST", DataLoss, 44, Unknown,
        "Treat the rows named as undefined until written whole again; the daemon starts the device process again by itself.";
    /// The daemon is about to end.
    Draining = 26, "DRAINING", Unavailable, 45, NothingMoved,
        "Wait for the next daemon, then open a session and register again.";
    /// The daemon or its device process is gone.
    Unavailable = 27, "UNAVAILABLE", Unavailable, 46, Unknown,
        "Hold the buffers until the device process is known dead, then register with the next daemon.";
    /// A row failed an opt-in check.
    RowInvalid = 28, "ROW_INVALID", FailedPrecondition, 47, PerRow,
        "Look at the rows named: a repeated destination, or a row that a guard rejects.";
    /// A lease was lost or cannot be had.
    LeaseUnavailable = 29, "LEASE_UNAVAILABLE", FailedPrecondition, 48, NothingMoved,
        "Ask for the lease again once its holder has let go.";
}

/// A number that stands for no code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no refusal code")]
pub struct UnknownCode(pub u16);

impl RefusalCode {
    /// The name in the contract, which is also the metric label.
    #[must_use]
    pub const fn label(self) -> &'static str {
        self.facts().label
    }

    /// The gRPC status of a failed call.
    #[must_use]
    pub const fn grpc(self) -> Code {
        self.facts().grpc
    }

    /// The exit code of a command that ends with this refusal.
    #[must_use]
    pub const fn exit_code(self) -> u8 {
        self.facts().exit
    }

    /// What it leaves behind.
    #[must_use]
    pub const fn leaves(self) -> Leaves {
        self.facts().leaves
    }

    /// What to do about it.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        self.facts().remedy
    }

    /// The number in messages and in the session memory.
    #[must_use]
    pub const fn number(self) -> u16 {
        self as u16
    }
}

impl TryFrom<u16> for RefusalCode {
    type Error = UnknownCode;

    fn try_from(number: u16) -> Result<Self, UnknownCode> {
        usize::from(number)
            .checked_sub(1)
            .and_then(|at| Self::ALL.get(at).copied())
            .ok_or(UnknownCode(number))
    }
}

impl fmt::Display for RefusalCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// Why something was refused: a code, a sentence, the remedy, and what it is about.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {sentence}. {remedy}")]
pub struct Refusal {
    code: RefusalCode,
    sentence: String,
    remedy: String,
    subject: String,
}

impl Refusal {
    /// A refusal with the code's own remedy. The sentence has no full stop.
    pub fn new(code: RefusalCode, sentence: impl Into<String>) -> Self {
        Self {
            code,
            sentence: sentence.into(),
            remedy: code.remedy().to_owned(),
            subject: String::new(),
        }
    }

    /// Names what it is about: a layer, a region, an argument.
    #[must_use]
    pub fn about(mut self, subject: impl Into<String>) -> Self {
        self.subject = subject.into();
        self
    }

    /// Replaces the remedy by a more exact one.
    #[must_use]
    pub fn remedied_by(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }

    /// The code.
    #[must_use]
    pub fn code(&self) -> RefusalCode {
        self.code
    }

    /// What was wrong, with value and limit.
    #[must_use]
    pub fn sentence(&self) -> &str {
        &self.sentence
    }

    /// What to do about it.
    #[must_use]
    pub fn remedy(&self) -> &str {
        &self.remedy
    }

    /// What it is about, or an empty string.
    #[must_use]
    pub fn subject(&self) -> &str {
        &self.subject
    }

    /// The message on the wire.
    #[must_use]
    pub fn to_message(&self) -> v1::Refusal {
        v1::Refusal {
            code: i32::from(self.code.number()),
            sentence: self.sentence.clone(),
            remedy: self.remedy.clone(),
            subject: self.subject.clone(),
        }
    }

    /// Reads the message on the wire.
    ///
    /// # Errors
    /// When its code is not in the list: the other side is newer.
    pub fn from_message(message: v1::Refusal) -> Result<Self, UnknownCode> {
        let number = u16::try_from(message.code).unwrap_or(0);
        Ok(Self {
            code: RefusalCode::try_from(number)?,
            sentence: message.sentence,
            remedy: message.remedy,
            subject: message.subject,
        })
    }

    /// The gRPC status of a failed call: code and sentence for any client, the whole refusal in the details.
    #[must_use]
    pub fn to_status(&self) -> Status {
        let detail = prost_types::Any {
            type_url: TYPE_URL.to_owned(),
            value: self.to_message().encode_to_vec(),
        };
        let rpc = RpcStatus {
            code: self.code.grpc() as i32,
            message: self.sentence.clone(),
            details: vec![detail],
        };
        let text = format!("{}: {}. {}", self.code, self.sentence, self.remedy);
        Status::with_details(self.code.grpc(), text, rpc.encode_to_vec().into())
    }

    /// The refusal inside a gRPC status, if the daemon put one there.
    #[must_use]
    pub fn from_status(status: &Status) -> Option<Self> {
        let rpc = RpcStatus::decode(status.details()).ok()?;
        let detail = rpc.details.into_iter().find(|detail| detail.type_url == TYPE_URL)?;
        Self::from_message(v1::Refusal::decode(detail.value.as_slice()).ok()?).ok()
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        refusal.to_status()
    }
}

const TYPE_URL: &str = "type.googleapis.com/statecopy.v1.Refusal";

/// `google.rpc.Status`, as gRPC clients expect it in `grpc-status-details-bin`.
#[derive(Clone, PartialEq, prost::Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_the_one_on_the_wire() {
        for code in RefusalCode::ALL {
            let wire = v1::RefusalCode::try_from(i32::from(code.number())).unwrap();
            assert_eq!(wire.as_str_name(), code.label());
            assert_eq!(RefusalCode::try_from(code.number()), Ok(code));
        }
        let after = u16::try_from(RefusalCode::ALL.len()).unwrap() + 1;
        assert!(v1::RefusalCode::try_from(i32::from(after)).is_err());
        assert_eq!(RefusalCode::try_from(after), Err(UnknownCode(after)));
        assert_eq!(RefusalCode::try_from(0), Err(UnknownCode(0)));
    }

    #[test]
    fn exit_codes_are_distinct_and_remedies_are_sentences() {
        let mut exits: Vec<u8> = RefusalCode::ALL.iter().map(|code| code.exit_code()).collect();
        exits.sort_unstable();
        exits.dedup();
        assert_eq!(exits.len(), RefusalCode::ALL.len());
        for code in RefusalCode::ALL {
            assert!(code.remedy().ends_with('.'), "{code}");
        }
    }

    #[test]
    fn only_the_codes_that_the_contract_names_leave_something_behind() {
        for code in RefusalCode::ALL {
            let expected = match code {
                RefusalCode::RowInvalid => Leaves::PerRow,
                RefusalCode::DeviceLost | RefusalCode::Unavailable => Leaves::Unknown,
                _ => Leaves::NothingMoved,
            };
            assert_eq!(code.leaves(), expected, "{code}");
        }
    }

    #[test]
    fn a_refusal_survives_a_grpc_status() {
        for code in RefusalCode::ALL {
            let refusal =
                Refusal::new(code, "Layer a has 3 rows, not 4").about("a").remedied_by("Do it.");
            let status = refusal.to_status();
            assert_eq!(status.code(), code.grpc());
            assert_eq!(Refusal::from_status(&status), Some(refusal));
        }
        assert_eq!(Refusal::from_status(&Status::internal("no details")), None);
    }
}
