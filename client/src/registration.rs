//! What a worker registers, and what it gets.

use std::collections::HashMap;

use statecopy_kernels::layout::{AXES, CacheLayout, LayoutError};
use statecopy_proto::{DataType, v1};

use crate::error::{ArgumentError, Error};
use crate::plan::Plan;
use crate::region::{Region, RegionKey};

/// One layer's cache: `[N, H, V, K]` elements in a registered region (contract: Cache).
///
/// Nothing is checked here: the daemon checks every rule and names the layer that breaks one.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Unique within the registration, at most 256 bytes.
    pub name: String,
    /// The element type.
    pub dtype: DataType,
    /// `[N, H, V, K]`, in elements.
    pub shape: [u64; AXES],
    /// How far apart rows, heads, values and keys lie.
    pub strides: Strides,
    /// The region that the cache lies in.
    pub region: Region,
    /// Where row 0 begins, in bytes from the region's start.
    pub offset_bytes: u64,
    /// The scheduler's max_num_seqs: no request selects more rows.
    pub max_selected: u64,
    /// Debug: a scatter whose valid destinations repeat is refused with ROW_INVALID.
    pub check_unique: bool,
}

/// How far apart the elements of a cache lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strides {
    /// A dense payload, with this many elements from one row to the next.
    PageStride(u64),
    /// One stride an axis, in elements.
    Elements([u64; AXES]),
}

impl Layer {
    /// One stride an axis, in elements. A product past 64 bits saturates, which no layout allows.
    #[must_use]
    pub fn strides(&self) -> [u64; AXES] {
        match self.strides {
            Strides::Elements(strides) => strides,
            Strides::PageStride(page) => {
                let values = self.shape[2].saturating_mul(self.shape[3]);
                [page, values, self.shape[3], 1]
            }
        }
    }

    /// The layout, when it is valid.
    ///
    /// # Errors
    /// The first rule of the contract that it breaks.
    pub fn layout(&self) -> Result<CacheLayout, LayoutError> {
        CacheLayout::parse(self.dtype, &self.shape, &self.strides())
    }

    pub(crate) fn layout_message(&self) -> v1::CacheLayout {
        v1::CacheLayout {
            dtype: self.dtype.to_message().into(),
            shape: self.shape.to_vec(),
            strides: self.strides().to_vec(),
        }
    }
}

/// Layers that are published together, or not at all.
#[derive(Debug, Clone, Default)]
pub struct Registration {
    pub(crate) layers: Vec<Layer>,
    pub(crate) sets: Vec<SetRecord>,
}

#[derive(Debug, Clone)]
pub(crate) struct SetRecord {
    pub(crate) name: String,
    pub(crate) layers: Vec<String>,
}

impl Registration {
    /// A registration of nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a layer.
    #[must_use]
    pub fn layer(mut self, layer: Layer) -> Self {
        self.layers.push(layer);
        self
    }

    /// Adds a binding set: layers of one signature that are copied by one request, in the order of the packed buffer.
    #[must_use]
    pub fn set<N: Into<String>>(
        mut self,
        name: impl Into<String>,
        layers: impl IntoIterator<Item = N>,
    ) -> Self {
        let layers = layers.into_iter().map(Into::into).collect();
        self.sets.push(SetRecord { name: name.into(), layers });
        self
    }

    /// Whether a layer lies in that region.
    pub(crate) fn uses(&self, region: RegionKey) -> bool {
        self.layers.iter().any(|layer| layer.region.record.key == region)
    }
}

/// How far a registration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub stage: Stage,
    /// Layers done in this stage.
    pub layers_done: u32,
    /// Layers in all.
    pub layers_total: u32,
}

/// The stages of a registration, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Variants are compiled or loaded, and run on scratch.
    Preparing,
    /// The configuration is compared and hooks are looked for.
    Sealing,
    /// Bindings become visible.
    Publishing,
}

/// A layer that moves to other memory of the same signature.
#[derive(Debug, Clone)]
pub struct Rebind {
    /// The layer's name.
    pub layer: String,
    /// The region that holds its cache now.
    pub region: Region,
    /// Where row 0 begins now, in bytes from the region's start.
    pub offset_bytes: u64,
}

/// The plans of a registration, by the names that were registered.
#[derive(Debug, Clone)]
pub struct Bindings<P = Plan> {
    layers: Named<P>,
    sets: Named<P>,
}

#[derive(Debug, Clone)]
struct Named<P> {
    plans: Vec<(String, P)>,
    places: HashMap<String, usize>,
}

impl<P> Named<P> {
    fn new(plans: Vec<(String, P)>) -> Self {
        let places = plans.iter().enumerate().map(|(at, (name, _))| (name.clone(), at)).collect();
        Self { plans, places }
    }

    fn get(&self, name: &str) -> Option<&P> {
        self.places.get(name).map(|at| &self.plans[*at].1)
    }
}

impl<P> Bindings<P> {
    pub(crate) fn new(layers: Vec<(String, P)>, sets: Vec<(String, P)>) -> Self {
        Self { layers: Named::new(layers), sets: Named::new(sets) }
    }

    pub(crate) fn map<Q>(self, mut each: impl FnMut(P) -> Q) -> Bindings<Q> {
        let mut over = |named: Named<P>| {
            Named::new(named.plans.into_iter().map(|(name, plan)| (name, each(plan))).collect())
        };
        Bindings { layers: over(self.layers), sets: over(self.sets) }
    }

    /// The plan of a layer.
    ///
    /// # Errors
    /// When no such layer was registered.
    pub fn layer(&self, name: &str) -> Result<&P, Error> {
        self.layers
            .get(name)
            .ok_or_else(|| Error::from(ArgumentError::NoSuchLayer { name: name.to_owned() }))
    }

    /// The plan of a binding set.
    ///
    /// # Errors
    /// When no such set was registered.
    pub fn set(&self, name: &str) -> Result<&P, Error> {
        self.sets
            .get(name)
            .ok_or_else(|| Error::from(ArgumentError::NoSuchSet { name: name.to_owned() }))
    }

    /// Every layer with its plan, in the order of the registration.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = (&str, &P)> {
        self.layers.plans.iter().map(|(name, plan)| (name.as_str(), plan))
    }

    /// Every binding set with its plan, in the order of the registration.
    pub fn sets(&self) -> impl ExactSizeIterator<Item = (&str, &P)> {
        self.sets.plans.iter().map(|(name, plan)| (name.as_str(), plan))
    }
}
