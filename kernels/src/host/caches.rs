//! Bound layers: where row 0 of each lies.

use std::sync::Arc;

use statecopy_proto::{Refusal, RefusalCode};

use super::memory::HostRegion;
use super::rows::address;
use crate::device::Region as _;
use crate::layout::{CacheLayout, Placement};
use crate::signature::ALIGNMENT_BYTES;

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
        let mismatch = |sentence: String| Refusal::new(RefusalCode::SignatureMismatch, sentence);
        let Some((_, first)) = layers.first() else {
            return Err(mismatch("A binding set has at least one layer, this one has none".into()));
        };
        for (at, (region, placement)) in layers.iter().enumerate() {
            let alignments = [first, placement].map(|placed| placed.offset() % ALIGNMENT_BYTES);
            if placement.layout() != first.layout() || alignments[0] != alignments[1] {
                return Err(mismatch(format!(
                    "Layer {at} of the binding set has another layout or base address mod 16 than layer 0"
                )));
            }
            if placement.end() > region.bytes() {
                return Err(Refusal::new(
                    RefusalCode::OutOfRegion,
                    format!(
                        "Layer {at} of the binding set ends at byte {} of a region of {} bytes",
                        placement.end(),
                        region.bytes()
                    ),
                ));
            }
        }
        let layers = layers
            .iter()
            .map(|(region, placement)| Layer {
                region: Arc::clone(region),
                offset: address(placement.offset()),
            })
            .collect();
        Ok(Self { layout: first.layout().clone(), layers })
    }

    pub(super) fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    pub(super) fn layers(&self) -> &[Layer] {
        &self.layers
    }
}
