//! A session with caches whose every byte is known.

use statecopy_kernels::layout::{CacheLayout, Placement};
use statecopy_kernels::reference;
use statecopy_proto::v1::copy_request::{Flags, Indices as WireIndices};
use statecopy_proto::v1::{
    self, BindingSetSpec, CopyReply, CopyRequest, Int32Indices, Int64Indices, LayerSpec,
    RegionSlice,
};
use statecopy_proto::{Direction, Refusal};

use crate::random::random_bytes;
use crate::session::{Published, Session};
use crate::shared::Shared;
use crate::wire::Wire;

/// Bytes before and behind what a test uses of a region: nothing may ever change them.
const MARGIN: u64 = 64;

/// Indices of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Indices {
    /// Four bytes each.
    Int32(Vec<i32>),
    /// Eight bytes each.
    Int64(Vec<i64>),
}

impl Indices {
    /// How many.
    #[must_use]
    pub fn selected(&self) -> usize {
        match self {
            Self::Int32(values) => values.len(),
            Self::Int64(values) => values.len(),
        }
    }

    /// Their values.
    #[must_use]
    pub fn widened(&self) -> Vec<i64> {
        match self {
            Self::Int32(values) => values.iter().copied().map(i64::from).collect(),
            Self::Int64(values) => values.clone(),
        }
    }

    /// As a request carries them.
    #[must_use]
    pub fn to_wire(&self) -> WireIndices {
        match self {
            Self::Int32(values) => WireIndices::Int32(Int32Indices { values: values.clone() }),
            Self::Int64(values) => WireIndices::Int64(Int64Indices { values: values.clone() }),
        }
    }
}

/// One published layer.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Its name.
    pub name: String,
    /// Its layout and place.
    pub placement: Placement,
    /// What the daemon published.
    pub published: v1::Binding,
}

/// A session with layers in one region and a packed buffer in another.
#[derive(Debug)]
pub struct Rig {
    /// The session.
    pub session: Session,
    /// The memory of the caches.
    pub cache: Shared,
    /// Its region.
    pub cache_region: u64,
    /// The memory of the packed buffer.
    pub packed: Shared,
    /// Its region.
    pub packed_region: u64,
    /// The layers, as registered.
    pub layers: Vec<Layer>,
    /// The one set of all layers; none when they have several signatures.
    pub set: Option<v1::BindingSet>,
}

impl Rig {
    /// Where the packed buffer begins in its region.
    pub const PACKED_OFFSET: u64 = MARGIN;

    /// Registers layers at their offsets, in a region that ends a margin behind the last, and a packed buffer for
    /// `max_selected` rows of all layers. Equal signatures also get a set, named `all`.
    ///
    /// # Panics
    /// When anything is refused.
    #[must_use]
    pub fn new(wire: &Wire, layers: &[(CacheLayout, u64)], max_selected: u64) -> Self {
        let end = layers.iter().map(|(layout, offset)| offset + layout.span_bytes()).max();
        let bytes = end.expect("at least one layer") + MARGIN;
        let row: u64 = layers.iter().map(|(layout, _)| layout.payload_bytes()).sum();
        let mut session = Session::open(wire);
        let cache = Shared::new(random_bytes(1, bytes));
        let packed = Shared::new(random_bytes(2, row * max_selected + 2 * MARGIN));
        let cache_region = session.share(&cache);
        let packed_region = session.share(&packed);
        let placements: Vec<Placement> = layers
            .iter()
            .map(|(layout, offset)| layout.place(*offset, bytes).expect("it fits"))
            .collect();
        let specs: Vec<LayerSpec> = placements
            .iter()
            .enumerate()
            .map(|(at, placement)| layer_spec(at, placement, cache_region, max_selected))
            .collect();
        let first = &layers[0];
        let equal =
            layers.iter().all(|(layout, offset)| *layout == first.0 && offset % 16 == first.1 % 16);
        let names = specs.iter().map(|spec| spec.name.clone()).collect();
        let sets = equal.then(|| BindingSetSpec { name: "all".to_owned(), layers: names });
        let published = session
            .register_layers(specs, sets.into_iter().collect())
            .unwrap_or_else(|refusal| panic!("{refusal}"));
        let layers = published_layers(placements, &published);
        let set = published.sets.into_iter().next();
        Self { session, cache, cache_region, packed, packed_region, layers, set }
    }

    /// The layers as they were asked for.
    #[must_use]
    pub fn specs(&self, max_selected: u64) -> Vec<LayerSpec> {
        let spec = |(at, layer): (usize, &Layer)| {
            layer_spec(at, &layer.placement, self.cache_region, max_selected)
        };
        self.layers.iter().enumerate().map(spec).collect()
    }

    /// A proper request of one layer. Its packed buffer begins at [`Rig::PACKED_OFFSET`].
    #[must_use]
    pub fn request(&self, layer: usize, indices: &Indices, flags: Option<&[u8]>) -> CopyRequest {
        let layer = &self.layers[layer];
        let (binding, signature) = (layer.published.binding_id, layer.published.signature);
        self.request_for((binding, signature), 1, &layer.placement, indices, flags)
    }

    /// A proper request of the set of all layers.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn set_request(&self, indices: &Indices, flags: Option<&[u8]>) -> CopyRequest {
        let set = self.set.as_ref().expect("layers of one signature");
        let placement = &self.layers[0].placement;
        let binding = (set.binding_id, set.signature);
        self.request_for(binding, self.layers.len() as u64, placement, indices, flags)
    }

    fn request_for(
        &self,
        (binding_id, signature): (u64, u64),
        layers: u64,
        placement: &Placement,
        indices: &Indices,
        flags: Option<&[u8]>,
    ) -> CopyRequest {
        let selected = indices.selected() as u64;
        CopyRequest {
            session: self.session.reference(),
            binding_id,
            signature,
            selected,
            indices: Some(indices.to_wire()),
            flags: flags.map(|flags| Flags::InlineFlags(flags.to_vec())),
            packed: Some(RegionSlice {
                region_id: self.packed_region,
                offset_bytes: Self::PACKED_OFFSET,
            }),
            packed_dtype: placement.layout().dtype().to_message().into(),
            packed_bytes: layers * selected * placement.layout().payload_bytes(),
            deadline_ms: 0,
            lane: 0,
        }
    }

    /// Copies rows of one layer, and compares every byte of both regions and both counts with the reference.
    ///
    /// # Errors
    /// When it was refused; then no byte moved.
    pub fn copy(
        &mut self,
        direction: Direction,
        layer: usize,
        indices: &Indices,
        flags: Option<&[u8]>,
    ) -> Result<CopyReply, Refusal> {
        let request = self.request(layer, indices, flags);
        self.copy_and_compare(direction, layer..layer + 1, request, indices, flags)
    }

    /// Copies rows of all layers at once, and compares as [`Rig::copy`] does.
    ///
    /// # Errors
    /// When it was refused; then no byte moved.
    pub fn copy_all(
        &mut self,
        direction: Direction,
        indices: &Indices,
        flags: Option<&[u8]>,
    ) -> Result<CopyReply, Refusal> {
        let request = self.set_request(indices, flags);
        self.copy_and_compare(direction, 0..self.layers.len(), request, indices, flags)
    }

    fn copy_and_compare(
        &mut self,
        direction: Direction,
        layers: std::ops::Range<usize>,
        request: CopyRequest,
        indices: &Indices,
        flags: Option<&[u8]>,
    ) -> Result<CopyReply, Refusal> {
        let answer = self.session.copy(direction, request);
        if let Ok(reply) = &answer {
            let (copied, masked) = self.expect(direction, layers, indices, flags);
            assert_eq!((reply.rows_copied, reply.rows_masked), (copied, masked), "{reply:?}");
        }
        self.check(&format!("after a {}: {answer:?}", direction.label()));
        answer
    }

    /// Applies a copy to the models only, by the reference. Gives rows copied and masked.
    pub fn expect(
        &mut self,
        direction: Direction,
        layers: std::ops::Range<usize>,
        indices: &Indices,
        flags: Option<&[u8]>,
    ) -> (u64, u64) {
        let placements: Vec<Placement> =
            self.layers[layers].iter().map(|layer| layer.placement.clone()).collect();
        let rows: u64 = placements.iter().map(|at| at.layout().payload_bytes()).sum();
        let bytes = rows * indices.selected() as u64;
        let start = usize::try_from(Self::PACKED_OFFSET).expect("an address");
        let end = start + usize::try_from(bytes).expect("an address");
        let packed = &mut self.packed.model[start..end];
        let indices = indices.widened();
        let moved = match direction {
            Direction::Gather => {
                reference::gather(&self.cache.model, &placements, &indices, flags, packed)
            }
            Direction::Scatter => {
                reference::scatter(&mut self.cache.model, &placements, &indices, packed)
            }
        };
        (moved.copied, moved.masked)
    }

    /// Compares every byte of both regions with what it should be.
    ///
    /// # Panics
    /// When one differs.
    pub fn check(&self, what: &str) {
        self.cache.check(&format!("the caches {what}"));
        self.packed.check(&format!("the packed buffer {what}"));
    }

    /// Writes new random bytes over the packed buffer, as a worker's kernel would.
    pub fn compute(&mut self, seed: u64) {
        let bytes = self.packed.bytes() - 2 * MARGIN;
        self.packed.write(Self::PACKED_OFFSET, &random_bytes(seed, bytes));
    }
}

/// A proper layer of a registration, named by its number.
#[must_use]
pub fn layer_spec(
    at: usize,
    placement: &Placement,
    region_id: u64,
    max_selected: u64,
) -> LayerSpec {
    LayerSpec {
        name: format!("model.layers.{at}.linear_attn"),
        layout: Some(wire_layout(placement.layout())),
        region_id,
        offset_bytes: placement.offset(),
        max_selected,
        signature: 0,
        check_unique: false,
    }
}

/// A layout as a request carries it.
#[must_use]
pub fn wire_layout(layout: &CacheLayout) -> v1::CacheLayout {
    v1::CacheLayout {
        dtype: layout.dtype().to_message().into(),
        shape: layout.shape().to_vec(),
        strides: layout.strides().to_vec(),
    }
}

fn published_layers(placements: Vec<Placement>, published: &Published) -> Vec<Layer> {
    assert_eq!(placements.len(), published.bindings.len());
    placements
        .into_iter()
        .zip(&published.bindings)
        .map(|(placement, binding)| Layer {
            name: binding.name.clone(),
            placement,
            published: binding.clone(),
        })
        .collect()
}
