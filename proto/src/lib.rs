//! The wire of statecopy: gRPC messages, identifiers, protocol versions, and the closed list of refusals.
//!
//! It holds no policy and does no IO. Its invariant: whatever one side can say to the other is declared here or in
//! the session memory (`statecopy-session`), and nowhere else.
#![forbid(unsafe_code)]

mod copy;
pub mod descriptor_socket;
mod id;
mod refusal;
mod version;

pub use copy::{
    DataType, Direction, HANDLE_BYTES, HandleKind, IndexWidth, PlanKind, UnknownDataType,
};
pub use id::{BindingId, Incarnation, IncarnationError, Lane, RegionId, SessionId, SignatureHash};
pub use refusal::{Leaves, Refusal, RefusalCode, UnknownCode};
pub use version::{PROTOCOL_NEWEST, PROTOCOL_OLDEST, ProtocolVersion};

/// Version 1 of the control wire, generated from `statecopy/v1/control.proto`.
#[allow(
    missing_docs,
    clippy::all,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    unused_qualifications,
    unreachable_pub,
    reason = "generated code; the .proto file is documented"
)]
pub mod v1 {
    tonic::include_proto!("statecopy.v1");
}

/// The compiled `.proto` files, for gRPC reflection.
pub const DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The longest gRPC message that either side sends or accepts, in bytes.
///
/// 100 layers with 4,096 inline INT64 indices and flags each are at most 4.5 MiB; gRPC's own default of 4 MiB broke
/// registrations of large models elsewhere.
pub const MESSAGE_BYTES_MAX: usize = 32 << 20;
