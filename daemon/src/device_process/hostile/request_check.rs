//! One request, parsed and held against its sealed plan as often as a bench likes.

use std::sync::Arc;

use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::host::{HostDevice, HostOptions};
use statecopy_proto::SessionId;
use statecopy_session::{CopyDescriptor, Fault, MonotonicNs};

use super::tenant::Tenant;
use crate::device_process::checks::check;

/// Where shared indices and flags lie, behind the largest packed buffer.
const INDICES_AT: u64 = 2560;
const FLAGS_AT: u64 = 2816;

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Both layers of a binding set, not one layer.
    pub set: bool,
    /// Rows.
    pub selected: u64,
    /// Indices and flags come from a region; otherwise inline, with flags.
    pub shared: bool,
}

/// A session on a host device with published layers.
pub struct RequestCheck {
    tenant: Tenant,
    _device: HostDevice,
}

impl std::fmt::Debug for RequestCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestCheck").finish_non_exhaustive()
    }
}

impl Default for RequestCheck {
    fn default() -> Self {
        Self::new()
    }
}

impl RequestCheck {
    /// Opens the host device and publishes.
    ///
    /// # Panics
    /// When the machine gives no memory, or the layouts are refused.
    #[must_use]
    pub fn new() -> Self {
        let options = HostOptions::new(Arc::new(ServingGuard::new(false)));
        let device = HostDevice::open(options).expect("a host device");
        Self { tenant: Tenant::new(&device, SessionId(1), 1), _device: device }
    }

    /// A gather that keeps the rules.
    ///
    /// # Panics
    /// Never: the bindings are published.
    #[must_use]
    pub fn request(&self, shape: Shape) -> CopyDescriptor {
        let target = &self.tenant.targets[if shape.set { 4 } else { 0 }];
        let [_, other] = self.tenant.regions();
        let of_shared = |number: u64| if shape.shared { number } else { 0 };
        let source = if shape.shared { 2 } else { 1 };
        CopyDescriptor {
            sequence: 1,
            binding: target.binding.0,
            signature: target.signature.0,
            selected: shape.selected,
            packed_region: other.0,
            packed_offset: 0,
            packed_bytes: target.packed_bytes(shape.selected),
            packed_dtype: target.dtype().number(),
            direction: 1,
            index_source: source,
            index_width: 4,
            flag_source: source,
            deadline_ns: u64::MAX,
            index_region: of_shared(other.0),
            index_offset: of_shared(INDICES_AT),
            flag_region: of_shared(other.0),
            flag_offset: of_shared(FLAGS_AT),
            session: 1,
            submitted_at_ns: 0,
            lane: 0,
            completion: 1,
            reserved: [0; 3],
        }
    }

    /// Parses a request and holds it against its plan, as the executor does before it accepts.
    ///
    /// # Errors
    /// The first rule that it breaks.
    pub fn check(&self, descriptor: &CopyDescriptor) -> Result<(), Fault> {
        let request = descriptor.parse()?;
        check(Some(&self.tenant.table), &request, 0, MonotonicNs(1)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use statecopy_proto::RefusalCode;

    use super::*;

    #[test]
    fn what_the_bench_checks_is_allowed_and_a_stale_signature_is_not() {
        let checks = RequestCheck::new();
        for (set, shared) in [(false, false), (false, true), (true, false), (true, true)] {
            for selected in [0, 1, 12] {
                let descriptor = checks.request(Shape { set, selected, shared });
                assert_eq!(checks.check(&descriptor), Ok(()));
                let stale = CopyDescriptor { signature: descriptor.signature + 1, ..descriptor };
                let fault = checks.check(&stale).unwrap_err();
                assert_eq!(fault.code, RefusalCode::SignatureMismatch);
            }
        }
    }
}
