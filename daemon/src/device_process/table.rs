//! What the executor looks requests up in: immutable tables that the preparing thread makes and takes back.

use std::sync::Arc;

use statecopy_kernels::device::{AllocationId, Device, Region};
use statecopy_kernels::layout::{CacheLayout, Placement};
use statecopy_proto::{BindingId, Refusal, RefusalCode, RegionId};

use crate::record::LayerRecord;

use super::compiled::CompiledTable;
use super::ids::ById;

/// Regions of one session.
pub(super) type Regions<D> = ById<RegionId, Arc<<D as Device>::Region>>;

/// One layer, or the layers of one set, bound to memory under a sealed table.
#[derive(Debug)]
pub(super) struct Target<D: Device> {
    pub(super) table: Arc<CompiledTable<D>>,
    pub(super) caches: D::Caches,
    /// Where each layer lies, in the order of the packed buffer.
    pub(super) placements: Vec<(RegionId, AllocationId, Placement)>,
    pub(super) max_selected: u64,
    pub(super) check_unique: bool,
    pub(super) is_set: bool,
    /// Rows of one launch: bounded, so that other sessions' copies come in between.
    pub(super) rows_per_launch: u64,
    /// The executor's count of hook sightings when this was sealed.
    pub(super) hook_epoch: u64,
}

/// What binding needs to know beside the layers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    /// The executor's count of hook sightings.
    pub(super) hook_epoch: u64,
    /// The most payload bytes of one launch.
    pub(super) launch_bytes_max: u64,
}

/// A binding of a session.
#[derive(Debug)]
pub(super) enum Bound<D: Device> {
    /// Bound to memory.
    Awake(Arc<Target<D>>),
    /// Its region was released; a rebind wakes it without preparing again.
    Asleep,
}

impl<D: Device> Clone for Bound<D> {
    fn clone(&self) -> Self {
        match self {
            Self::Awake(target) => Self::Awake(Arc::clone(target)),
            Self::Asleep => Self::Asleep,
        }
    }
}

/// The bindings of one session, by id.
pub(super) type Targets<D> = ById<BindingId, Bound<D>>;

/// What the executor knows of one session.
#[derive(Debug)]
pub(super) struct SessionTable<D: Device> {
    pub(super) regions: Regions<D>,
    /// `None`: nothing is published, or a registration runs.
    pub(super) targets: Option<Arc<Targets<D>>>,
}

impl<D: Device> SessionTable<D> {
    /// The most rows that a request of this session may select.
    pub(super) fn selected_max(&self) -> usize {
        self.targets.as_deref().map_or(0, selected_max)
    }
}

/// The most rows that a request of these targets may select.
pub(super) fn selected_max<D: Device>(targets: &Targets<D>) -> usize {
    let most = awake(targets).map(|(_, target)| target.max_selected).max().unwrap_or(0);
    usize::try_from(most).unwrap_or(usize::MAX)
}

impl<D: Device> Target<D> {
    /// Binds layers of one signature.
    pub(super) fn bind(
        device: &D,
        regions: &Regions<D>,
        layers: &[&(LayerRecord, Arc<CompiledTable<D>>)],
        terms: Terms,
    ) -> Result<Self, Refusal> {
        let mut bases = Vec::with_capacity(layers.len());
        let mut placements = Vec::with_capacity(layers.len());
        for (layer, _) in layers {
            let region = regions.get(&layer.region).ok_or_else(|| unknown(layer))?;
            placements.push((layer.region, region.allocation(), layer.placement.clone()));
            bases.push((Arc::clone(region), layer.placement.clone()));
        }
        let payload_bytes =
            layers.first().map_or(1, |(layer, _)| layer.placement.layout().payload_bytes());
        let table = layers.first().map(|(_, table)| Arc::clone(table)).ok_or_else(nothing)?;
        Ok(Self {
            table,
            caches: device.bind(&bases)?,
            placements,
            max_selected: layers.iter().map(|(layer, _)| layer.max_selected).min().unwrap_or(0),
            check_unique: layers.iter().any(|(layer, _)| layer.check_unique),
            is_set: false,
            rows_per_launch: (terms.launch_bytes_max / payload_bytes)
                .clamp(1, device.rows_per_launch_max()),
            hook_epoch: terms.hook_epoch,
        })
    }

    /// Layers that one request copies.
    pub(super) fn layers(&self) -> u64 {
        self.placements.len() as u64
    }

    /// The layout that all of them share.
    pub(super) fn layout(&self) -> &CacheLayout {
        self.table.signature.layout()
    }

    /// Whether a layer lies in that region.
    pub(super) fn lies_in(&self, region: RegionId) -> bool {
        self.placements.iter().any(|(id, ..)| *id == region)
    }
}

/// The targets that are bound to memory.
pub(super) fn awake<D: Device>(
    targets: &Targets<D>,
) -> impl Iterator<Item = (BindingId, &Target<D>)> {
    targets.iter().filter_map(|(binding, bound)| match bound {
        Bound::Awake(target) => Some((*binding, &**target)),
        Bound::Asleep => None,
    })
}

fn unknown(layer: &LayerRecord) -> Refusal {
    let sentence =
        format!("Layer {} lies in region {}, which is not registered", layer.name, layer.region);
    Refusal::new(RefusalCode::RegionUnknown, sentence).about(layer.name.clone())
}

fn nothing() -> Refusal {
    Refusal::new(RefusalCode::SignatureMismatch, "A binding set needs at least one layer")
}
