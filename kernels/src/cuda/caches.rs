//! Bound layers: where row 0 of each lies on the device.

use std::sync::Arc;

use statecopy_proto::{Refusal, RefusalCode};

use super::arena::{Arena, Table, TableError};
use super::memory::CudaRegion;
use crate::device::one_signature;
use crate::layout::{CacheLayout, Placement};

/// The layers of one binding or binding set. Holds their regions mapped.
#[derive(Debug)]
pub struct CudaCaches {
    layout: CacheLayout,
    layers: u64,
    base: Base,
    _regions: Box<[Arc<CudaRegion>]>,
}

/// Where kernels find the addresses.
#[derive(Debug)]
enum Base {
    /// The one layer's travels with the launch.
    One(u64),
    /// Those of many lie in a table on the device.
    Many(Table),
}

impl CudaCaches {
    pub(super) fn bind(
        arena: &Arc<Arena>,
        layers: &[(Arc<CudaRegion>, Placement)],
    ) -> Result<Self, Refusal> {
        let layout = one_signature(layers)?.clone();
        let addresses: Vec<u64> =
            layers.iter().map(|(region, at)| region.address() + at.offset()).collect();
        let base = match addresses[..] {
            [one] => Base::One(one),
            _ => Base::Many(arena.table(&addresses).map_err(refused)?),
        };
        let regions = layers.iter().map(|(region, _)| Arc::clone(region)).collect();
        Ok(Self { layout, layers: layers.len() as u64, base, _regions: regions })
    }

    pub(super) fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    pub(super) fn layers(&self) -> u64 {
        self.layers
    }

    /// The address of the table, or 0; and that of row 0 of the one layer, or 0.
    pub(super) fn addresses(&self) -> (u64, u64) {
        match &self.base {
            Base::One(address) => (0, *address),
            Base::Many(table) => (table.address(), 0),
        }
    }
}

fn refused(error: TableError) -> Refusal {
    match error {
        TableError::Full { .. } => Refusal::new(RefusalCode::QuotaExceeded, error.to_string())
            .remedied_by("Release binding sets that are no longer used."),
        TableError::Driver(error) => {
            error.refusal(RefusalCode::PrepareFailed, "A table of base addresses was not written")
        }
    }
}
