//! Cache layouts and where they lie (contract: Cache).
//!
//! A [`CacheLayout`] can only be had by [`CacheLayout::parse`], a [`Placement`] only by [`CacheLayout::place`]: whoever
//! holds one knows that every rule of the contract holds. All arithmetic is checked 64-bit.

mod overlap;

use std::num::NonZeroU64;

use statecopy_proto::{DataType, Refusal, RefusalCode};

pub use overlap::{payloads_overlap, payloads_touch};

/// The axes of a cache: rows, heads, values, keys.
pub const AXES: usize = 4;
const AXIS_NAMES: [&str; AXES] = ["N", "H", "V", "K"];

/// A valid cache layout: `[N,H,V,K]` with a dense payload and pages that do not overlap.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CacheLayout {
    dtype: DataType,
    shape: [u64; AXES],
    strides: [u64; AXES],
    payload_bytes: u64,
    page_stride_bytes: u64,
    span_bytes: u64,
}

/// Which rule a layout breaks. Sizes and strides are in elements, the rest in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Shape or strides do not have four axes.
    #[error("A cache has 4 axes [N,H,V,K]; {what} has {given}")]
    Axes {
        /// `shape` or `strides`.
        what: &'static str,
        /// How many there were.
        given: usize,
    },
    /// An axis has size 0.
    #[error("Axis {axis} of the shape is 0; every axis is at least 1")]
    EmptyAxis {
        /// The axis.
        axis: &'static str,
    },
    /// The payload `[H,V,K]` is not dense.
    #[error(
        "The payload is not dense: axis {axis} has stride {stride}, where {expected} is the product of the axes after it"
    )]
    NotDense {
        /// The axis.
        axis: &'static str,
        /// Its stride.
        stride: u64,
        /// The only stride that a dense payload allows.
        expected: u64,
    },
    /// Pages overlap.
    #[error("Pages overlap: stride(0) is {stride}, the payload has {payload} elements")]
    PagesOverlap {
        /// The page stride.
        stride: u64,
        /// The payload.
        payload: u64,
    },
    /// A product does not fit 64 bits.
    #[error("{what} does not fit 64 bits")]
    Overflow {
        /// Which product.
        what: &'static str,
    },
    /// The base is no multiple of the item size.
    #[error(
        "The base lies at byte {offset} of its region, which is no multiple of the item size {item}"
    )]
    BaseMisaligned {
        /// Where the base lies.
        offset: u64,
        /// Bytes of one element.
        item: u64,
    },
    /// The span reaches past the region.
    #[error("The cache spans bytes {offset} to {end} of a region of {region} bytes")]
    OutsideRegion {
        /// Where the base lies.
        offset: u64,
        /// One past the last byte of the last payload.
        end: u64,
        /// Bytes of the region.
        region: u64,
    },
    /// `max_selected` is 0.
    #[error("max_selected is 0; it is the scheduler's max_num_seqs and at least 1")]
    NothingSelectable,
}

impl LayoutError {
    /// The refusal for the layer of that name.
    #[must_use]
    pub fn to_refusal(self, layer: &str) -> Refusal {
        Refusal::new(RefusalCode::LayoutInvalid, format!("Layer {layer}: {self}")).about(layer)
    }
}

impl CacheLayout {
    /// Checks a layout as it came from a worker. `shape` and `strides` are in elements.
    ///
    /// # Errors
    /// The first rule of the contract that it breaks.
    pub fn parse(dtype: DataType, shape: &[u64], strides: &[u64]) -> Result<Self, LayoutError> {
        let shape = four("shape", shape)?;
        let strides = four("strides", strides)?;
        if let Some(at) = shape.iter().position(|size| *size == 0) {
            return Err(LayoutError::EmptyAxis { axis: AXIS_NAMES[at] });
        }
        let payload = dense_payload(&shape, &strides)?;
        if strides[0] < payload {
            return Err(LayoutError::PagesOverlap { stride: strides[0], payload });
        }
        let item = dtype.item_bytes();
        let payload_bytes = payload
            .checked_mul(item)
            .ok_or(LayoutError::Overflow { what: "The payload in bytes" })?;
        let page_stride_bytes = strides[0]
            .checked_mul(item)
            .ok_or(LayoutError::Overflow { what: "The page stride in bytes" })?;
        let span_bytes = (shape[0] - 1)
            .checked_mul(page_stride_bytes)
            .and_then(|last| last.checked_add(payload_bytes))
            .ok_or(LayoutError::Overflow { what: "The span of the cache in bytes" })?;
        Ok(Self { dtype, shape, strides, payload_bytes, page_stride_bytes, span_bytes })
    }

    /// A contiguous-payload layout with the given page stride in elements: the usual case, spelled short.
    ///
    /// # Errors
    /// As [`CacheLayout::parse`].
    pub fn with_page_stride(
        dtype: DataType,
        shape: [u64; AXES],
        page_stride: u64,
    ) -> Result<Self, LayoutError> {
        let overflow = LayoutError::Overflow { what: "The payload" };
        let values = shape[2].checked_mul(shape[3]).ok_or(overflow)?;
        Self::parse(dtype, &shape, &[page_stride, values, shape[3], 1])
    }

    /// Puts the layout at a byte offset of a region.
    ///
    /// # Errors
    /// When the base is misaligned or the span reaches past the region.
    pub fn place(&self, offset: u64, region_bytes: u64) -> Result<Placement, LayoutError> {
        let item = self.dtype.item_bytes();
        if !offset.is_multiple_of(item) {
            return Err(LayoutError::BaseMisaligned { offset, item });
        }
        let end = offset
            .checked_add(self.span_bytes)
            .ok_or(LayoutError::Overflow { what: "The end of the cache" })?;
        if end > region_bytes {
            return Err(LayoutError::OutsideRegion { offset, end, region: region_bytes });
        }
        Ok(Placement { layout: self.clone(), offset })
    }

    /// Checks `max_selected`, the most rows that one request may select.
    ///
    /// # Errors
    /// When it is 0.
    pub fn check_max_selected(max_selected: u64) -> Result<NonZeroU64, LayoutError> {
        NonZeroU64::new(max_selected).ok_or(LayoutError::NothingSelectable)
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// `[N,H,V,K]`, in elements.
    #[must_use]
    pub fn shape(&self) -> &[u64; AXES] {
        &self.shape
    }

    /// One stride an axis, in elements.
    #[must_use]
    pub fn strides(&self) -> &[u64; AXES] {
        &self.strides
    }

    /// `N`: rows that can be selected.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.shape[0]
    }

    /// Bytes of one state: `H * V * K` elements.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Bytes from one row to the next.
    #[must_use]
    pub fn page_stride_bytes(&self) -> u64 {
        self.page_stride_bytes
    }

    /// Bytes from the first byte of row 0 to one past the last byte of the last payload.
    #[must_use]
    pub fn span_bytes(&self) -> u64 {
        self.span_bytes
    }
}

/// A layout at a place in a region that holds it whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    layout: CacheLayout,
    offset: u64,
}

impl Placement {
    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Where row 0 begins, in bytes from the region's start.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// One past the last payload byte, in bytes from the region's start.
    #[must_use]
    pub fn end(&self) -> u64 {
        // `place` checked the sum.
        self.offset + self.layout.span_bytes
    }
}

fn four(what: &'static str, values: &[u64]) -> Result<[u64; AXES], LayoutError> {
    values.try_into().map_err(|_| LayoutError::Axes { what, given: values.len() })
}

/// The payload in elements, when every inner axis from the last one back is dense.
fn dense_payload(shape: &[u64; AXES], strides: &[u64; AXES]) -> Result<u64, LayoutError> {
    let mut product = 1_u64;
    for axis in (1..AXES).rev() {
        if shape[axis] != 1 && strides[axis] != product {
            return Err(LayoutError::NotDense {
                axis: AXIS_NAMES[axis],
                stride: strides[axis],
                expected: product,
            });
        }
        product = product
            .checked_mul(shape[axis])
            .ok_or(LayoutError::Overflow { what: "The payload" })?;
    }
    Ok(product)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: [u64; AXES] = [3, 2, 4, 5];
    const STRIDES: [u64; AXES] = [152, 20, 5, 1];

    fn refused(shape: &[u64], strides: &[u64]) -> (LayoutError, String) {
        let error = CacheLayout::parse(DataType::Float32, shape, strides).unwrap_err();
        (error, error.to_string())
    }

    #[test]
    fn a_valid_layout_says_its_sizes_in_bytes() {
        let layout = CacheLayout::parse(DataType::BFloat16, &SHAPE, &STRIDES).unwrap();
        assert_eq!(layout.dtype(), DataType::BFloat16);
        assert_eq!((layout.shape(), layout.strides()), (&SHAPE, &STRIDES));
        assert_eq!(layout.rows(), 3);
        assert_eq!(layout.payload_bytes(), 80);
        assert_eq!(layout.page_stride_bytes(), 304);
        assert_eq!(layout.span_bytes(), 2 * 304 + 80);
        let placement = layout.place(6, 1000).unwrap();
        assert_eq!((placement.offset(), placement.end()), (6, 6 + 688));
        assert_eq!(placement.layout(), &layout);
        assert_eq!(CacheLayout::with_page_stride(DataType::BFloat16, SHAPE, 152), Ok(layout));
    }

    #[test]
    fn the_stride_of_an_inner_axis_of_size_one_is_free() {
        for stride in [0, 1, 7, u64::MAX] {
            let strides = [200, stride, 5, 1];
            assert!(CacheLayout::parse(DataType::Float32, &[3, 1, 4, 5], &strides).is_ok());
        }
        assert!(CacheLayout::parse(DataType::Float32, &[3, 1, 1, 1], &[1, 9, 9, 9]).is_ok());
    }

    #[test]
    fn a_cache_has_four_axes() {
        let (error, message) = refused(&[3, 2, 4], &STRIDES);
        assert_eq!(error, LayoutError::Axes { what: "shape", given: 3 });
        assert_eq!(message, "A cache has 4 axes [N,H,V,K]; shape has 3");
        let (error, message) = refused(&SHAPE, &[152, 20, 5, 1, 1]);
        assert_eq!(error, LayoutError::Axes { what: "strides", given: 5 });
        assert_eq!(message, "A cache has 4 axes [N,H,V,K]; strides has 5");
    }

    #[test]
    fn an_axis_of_size_zero_is_named() {
        for (axis, name) in AXIS_NAMES.into_iter().enumerate() {
            let mut shape = SHAPE;
            shape[axis] = 0;
            let (error, message) = refused(&shape, &STRIDES);
            assert_eq!(error, LayoutError::EmptyAxis { axis: name });
            assert_eq!(message, format!("Axis {name} of the shape is 0; every axis is at least 1"));
        }
    }

    #[test]
    fn a_payload_with_holes_or_another_order_is_not_dense() {
        for (axis, stride, expected) in [(1, 21, 20), (2, 1, 5), (3, 2, 1), (3, 0, 1)] {
            let mut strides = STRIDES;
            strides[axis] = stride;
            let (error, message) = refused(&SHAPE, &strides);
            let axis = AXIS_NAMES[axis];
            assert_eq!(error, LayoutError::NotDense { axis, stride, expected });
            assert_eq!(
                message,
                format!(
                    "The payload is not dense: axis {axis} has stride {stride}, where {expected} \
                     is the product of the axes after it"
                )
            );
        }
    }

    #[test]
    fn pages_may_touch_but_not_overlap() {
        for stride in [0, 1, 39] {
            let (error, message) = refused(&SHAPE, &[stride, 20, 5, 1]);
            assert_eq!(error, LayoutError::PagesOverlap { stride, payload: 40 });
            assert_eq!(
                message,
                format!("Pages overlap: stride(0) is {stride}, the payload has 40 elements")
            );
        }
        assert!(CacheLayout::parse(DataType::Float32, &SHAPE, &[40, 20, 5, 1]).is_ok());
        // One row has no next page, but the rule is the same.
        let (error, _) = refused(&[1, 2, 4, 5], &[39, 20, 5, 1]);
        assert_eq!(error, LayoutError::PagesOverlap { stride: 39, payload: 40 });
    }

    #[test]
    fn a_product_past_64_bits_is_refused() {
        let overflow = |shape: [u64; AXES], strides: [u64; AXES]| refused(&shape, &strides).1;
        assert_eq!(
            overflow([1, 1 << 32, 1 << 31, 2], [u64::MAX, 1 << 32, 2, 1]),
            "The payload does not fit 64 bits"
        );
        assert_eq!(
            overflow([1, 1, 1, 1 << 62], [1 << 62, 1, 1, 1]),
            "The payload in bytes does not fit 64 bits"
        );
        assert_eq!(
            overflow([1, 1, 1, 4], [1 << 62, 1, 1, 1]),
            "The page stride in bytes does not fit 64 bits"
        );
        for (rows, stride) in [(5, 1 << 60), (1 << 61, 4), (u64::MAX, 4)] {
            assert_eq!(
                overflow([rows, 1, 1, 4], [stride, 1, 1, 1]),
                "The span of the cache in bytes does not fit 64 bits"
            );
        }
        assert_eq!(
            CacheLayout::with_page_stride(DataType::Int8, [1, 1, 1 << 32, 1 << 32], 9),
            Err(LayoutError::Overflow { what: "The payload" })
        );
        let widest = CacheLayout::with_page_stride(DataType::Float32, [4, 1, 1, 4], 1 << 60);
        assert_eq!(widest.unwrap().span_bytes(), (3 << 62) + 16);
    }

    #[test]
    fn the_whole_span_lies_inside_the_region() {
        let layout = CacheLayout::parse(DataType::Float32, &SHAPE, &STRIDES).unwrap();
        let span = layout.span_bytes();
        assert_eq!(layout.place(64, span + 64).unwrap().end(), span + 64);
        let error = layout.place(64, span + 63).unwrap_err();
        let (offset, end, region) = (64, span + 64, span + 63);
        assert_eq!(error, LayoutError::OutsideRegion { offset, end, region });
        assert_eq!(
            error.to_string(),
            format!("The cache spans bytes 64 to {end} of a region of {region} bytes")
        );
        let error = layout.place(u64::MAX - 3, u64::MAX).unwrap_err();
        assert_eq!(error.to_string(), "The end of the cache does not fit 64 bits");
    }

    #[test]
    fn the_base_is_a_multiple_of_the_item_size() {
        for dtype in DataType::ALL {
            let layout = CacheLayout::parse(dtype, &SHAPE, &STRIDES).unwrap();
            let item = dtype.item_bytes();
            for offset in 0..32 {
                let placed = layout.place(offset, 1 << 20);
                if offset % item == 0 {
                    assert!(placed.is_ok(), "{dtype} at {offset}");
                } else {
                    let error = placed.unwrap_err();
                    assert_eq!(error, LayoutError::BaseMisaligned { offset, item });
                    assert_eq!(
                        error.to_string(),
                        format!(
                            "The base lies at byte {offset} of its region, which is no multiple \
                             of the item size {item}"
                        )
                    );
                }
            }
        }
    }

    #[test]
    fn max_selected_is_positive() {
        assert_eq!(CacheLayout::check_max_selected(1).map(NonZeroU64::get), Ok(1));
        assert_eq!(CacheLayout::check_max_selected(u64::MAX).map(NonZeroU64::get), Ok(u64::MAX));
        let error = CacheLayout::check_max_selected(0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "max_selected is 0; it is the scheduler's max_num_seqs and at least 1"
        );
    }

    #[test]
    fn a_refusal_names_the_layer() {
        let (error, message) = refused(&[0, 2, 4, 5], &STRIDES);
        let refusal = error.to_refusal("model.layers.3");
        assert_eq!(refusal.code(), RefusalCode::LayoutInvalid);
        assert_eq!(refusal.subject(), "model.layers.3");
        assert_eq!(refusal.sentence(), format!("Layer model.layers.3: {message}"));
    }
}
