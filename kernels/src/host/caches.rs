//! Bound layers: where row 0 of each lies.

use std::sync::Arc;

use statecopy_proto::Refusal;

use super::memory::HostRegion;
use super::rows::address;
use crate::device::one_signature;
use crate::layout::{CacheLayout, Placement};

/// The layers of one binding or binding set. Holds their regions mapped.
#[derive(Debug)]
pub struct HostCaches {
    layout: CacheLayout,
    layers: Box<[Layer]>,
}

/// One layer. Its placement was checked against its region.
#[derive(Debug)]
pub(super) struct Layer {
    region: Arc<HostRegion>,
    offset: usize,
}

impl Layer {
    /// The first byte of row 0.
    pub(super) fn start(&self) -> *mut u8 {
        self.region.mapping().base().wrapping_add(self.offset)
    }
}

impl HostCaches {
    pub(super) fn bind(layers: &[(Arc<HostRegion>, Placement)]) -> Result<Self, Refusal> {
        let layout = one_signature(layers)?.clone();
        let layers = layers
            .iter()
            .map(|(region, placement)| Layer {
                region: Arc::clone(region),
                offset: address(placement.offset()),
            })
            .collect();
        Ok(Self { layout, layers })
    }

    pub(super) fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    pub(super) fn layers(&self) -> &[Layer] {
        &self.layers
    }
}
