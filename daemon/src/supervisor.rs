//! The supervisor: owns what must not die, and never touches a device.

pub mod device;
pub mod keeper;
