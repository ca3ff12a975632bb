//! A published layer or binding set, ready to copy.

use std::fmt;
use std::sync::{Arc, Mutex};

use statecopy_kernels::device::Moved;
use statecopy_proto::{DataType, Direction, PlanKind, Refusal, RefusalCode, SignatureHash, v1};

use crate::client::Client;
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::link::{Binding, Link};
use crate::lock::lock;
use crate::records::{LinkNumber, RegistrationNumber};
use crate::request::Request;

/// A layer, or a binding set of layers, that is published and can be copied.
///
/// It outlives restarts of the daemon: the client registers again and the plan finds its new binding by name. It does
/// not outlive a newer registration of the same client: then its copies are STALE_PLAN.
#[derive(Clone)]
pub struct Plan {
    client: Client,
    pub(crate) record: Arc<PlanRecord>,
}

#[derive(Debug)]
pub(crate) struct PlanRecord {
    pub(crate) name: String,
    pub(crate) is_set: bool,
    pub(crate) dtype: DataType,
    pub(crate) payload_bytes: u64,
    pub(crate) layers: u64,
    pub(crate) max_selected: u64,
    pub(crate) registration: RegistrationNumber,
    /// The binding, and the link that it belongs to.
    pub(crate) bound: Mutex<(LinkNumber, Binding)>,
}

impl PlanRecord {
    /// The binding in that link.
    pub(crate) fn binding(&self, link: &Link) -> Result<Binding, Refusal> {
        let mut bound = lock(&self.bound);
        if bound.0 == link.number {
            // Also when a newer registration replaced it: the daemon says so.
            return Ok(bound.1);
        }
        let found = link.bound(|table| {
            let named = if self.is_set { &table.sets } else { &table.layers };
            (table.registration == Some(self.registration))
                .then(|| named.get(&self.name).copied())
                .flatten()
        });
        let binding = found.ok_or_else(|| {
            Refusal::new(
                RefusalCode::StalePlan,
                format!(
                    "The registration that plan {} came from was replaced or withdrawn",
                    self.name
                ),
            )
            .about(self.name.clone())
        })?;
        *bound = (link.number, binding);
        Ok(binding)
    }
}

impl Plan {
    pub(crate) fn new(client: Client, record: PlanRecord) -> Self {
        Self { client, record: Arc::new(record) }
    }

    /// `packed[s] = cache[index[s]]` where the index is valid and the flag is true, zero bytes otherwise.
    ///
    /// A future that is dropped once it was polled gives the copy up with an unknown outcome: it may run yet.
    ///
    /// # Errors
    /// A refusal, of which nothing moved; or an outcome that [`Error::leaves`] tells.
    pub async fn gather(&self, request: Request<'_>) -> Result<Moved, Error> {
        self.copy(Direction::Gather, request).await
    }

    /// `cache[index[s]] = packed[s]` where the index is valid.
    ///
    /// # Errors
    /// As [`Plan::gather`].
    pub async fn scatter(&self, request: Request<'_>) -> Result<Moved, Error> {
        self.copy(Direction::Scatter, request).await
    }

    /// A gather or a scatter.
    ///
    /// # Errors
    /// As [`Plan::gather`].
    pub async fn copy(&self, direction: Direction, request: Request<'_>) -> Result<Moved, Error> {
        self.client.copy(&self.record, direction, request).await
    }

    /// Submits a gather, to be waited for later.
    ///
    /// # Errors
    /// A refusal, of which nothing moved: OVERLOADED when the session's ring has no place before the deadline. Most refusals
    /// come with [`InFlight::wait`].
    pub async fn submit_gather(&self, request: Request<'_>) -> Result<InFlight, Error> {
        self.submit(Direction::Gather, request).await
    }

    /// Submits a scatter, to be waited for later.
    ///
    /// # Errors
    /// As [`Plan::submit_gather`].
    pub async fn submit_scatter(&self, request: Request<'_>) -> Result<InFlight, Error> {
        self.submit(Direction::Scatter, request).await
    }

    /// Submits a gather or a scatter, to be waited for later.
    ///
    /// # Errors
    /// As [`Plan::submit_gather`].
    pub async fn submit(
        &self,
        direction: Direction,
        request: Request<'_>,
    ) -> Result<InFlight, Error> {
        self.client.submit(&self.record, direction, request).await
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// The name of the layer or binding set.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// The element type of cache and packed buffer.
    #[must_use]
    pub fn dtype(&self) -> DataType {
        self.record.dtype
    }

    /// Bytes of one state of one layer.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.record.payload_bytes
    }

    /// How many layers one request copies: 1, or those of the binding set.
    #[must_use]
    pub fn layers(&self) -> u64 {
        self.record.layers
    }

    /// No request selects more rows.
    #[must_use]
    pub fn max_selected(&self) -> u64 {
        self.record.max_selected
    }

    /// Bytes of the packed buffer for that many rows. A number past 64 bits saturates, which the daemon refuses.
    #[must_use]
    pub fn packed_bytes(&self, selected: u64) -> u64 {
        self.record.packed_bytes(selected)
    }

    /// The hash of the layout signature in the session that it was last used in.
    #[must_use]
    pub fn signature(&self) -> SignatureHash {
        lock(&self.record.bound).1.signature
    }

    /// The plan kind that the daemon chose; `None` when it named none that is known here.
    #[must_use]
    pub fn kind(&self) -> Option<PlanKind> {
        match lock(&self.record.bound).1.plan {
            v1::PlanKind::Fused => Some(PlanKind::Fused),
            v1::PlanKind::ByteCopy => Some(PlanKind::ByteCopy),
            v1::PlanKind::Unspecified => None,
        }
    }
}

impl PlanRecord {
    pub(crate) fn packed_bytes(&self, selected: u64) -> u64 {
        self.payload_bytes.saturating_mul(self.layers).saturating_mul(selected)
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Plan").field(&self.record).finish()
    }
}
