//! STUB, replaced at integration.
use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

/// Kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceKind {
    /// Host.
    Host,
}

/// Settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSettings {
    /// kind
    pub kind: DeviceKind,
    /// threads
    pub copy_threads: Option<NonZeroUsize>,
    /// spin
    pub spin_us: u64,
    /// abort
    pub abort_after_seal: bool,
    /// allowed
    pub allowed_preloads: Vec<String>,
    /// slots
    pub slots: u32,
    /// launch bytes
    pub launch_bytes_max: u64,
    /// rows
    pub selected_max: u64,
}

/// Program.
#[derive(Debug, Clone)]
pub struct SelfProgram {
    /// Arguments.
    pub arguments: Vec<String>,
}
