//! Cache layouts of real models, and a tiny one.

use clap::ValueEnum;
use statecopy_kernels::layout::{CacheLayout, LayoutError};
use statecopy_proto::DataType;

/// A cache layout by name. All values that are no bytes are elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preset {
    /// Kimi K3 at tensor parallelism 8: 12x128x128 FP32 in pages of 27 states, several layers side by side in a page
    KimiK3Tp8,
    /// Kimi Linear 48B at tensor parallelism 8: 4x128x128 FP32 behind the convolution's state, one layer a page
    KimiLinear,
    /// 24,576-byte states, two layers in a page of three states and 32 elements
    Tiny,
}

/// What a preset stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// `[H,V,K]`.
    pub(crate) state: [u64; 3],
    /// From one row of a layer to the next, in elements.
    pub(crate) page_stride: u64,
    /// Where the first layer's state begins in a page, in elements.
    pub(crate) offset: u64,
    /// How many layers lie side by side in a page. They may fill less of it than there is room.
    pub(crate) layers_per_page: usize,
    /// Rows of a cache unless the user says otherwise.
    pub(crate) rows: u64,
    /// Rows that one request selects at most, unless the user says otherwise.
    pub(crate) selected_max: u64,
}

/// Bytes of one element: every preset is FP32, in which such models keep their states.
const ITEM_BYTES: u64 = 4;

impl Preset {
    /// What it stands for.
    pub(crate) const fn shape(self) -> Shape {
        match self {
            // A page is 27 states. The first two places hold what is not ours; layers fill the rest.
            Self::KimiK3Tp8 => Shape {
                state: [12, 128, 128],
                page_stride: 5_308_416,
                offset: 393_216,
                layers_per_page: 25,
                rows: 24,
                selected_max: 8,
            },
            // The model has 32 heads of 128x128 and a convolution over 4 tokens. A page holds the convolution's state
            // (3 tokens x 1,536 BF16 channels, 9,216 bytes) and then the state, padded to the page of a latent
            // attention layer: 240 tokens x 576 BF16 values, 276,480 bytes.
            Self::KimiLinear => Shape {
                state: [4, 128, 128],
                page_stride: 69_120,
                offset: 2_304,
                layers_per_page: 1,
                rows: 64,
                selected_max: 16,
            },
            // The third state of each page is a gap, and the 32 elements shift every row against memory pages.
            Self::Tiny => Shape {
                state: [2, 48, 64],
                page_stride: 3 * 6_144 + 32,
                offset: 16,
                layers_per_page: 2,
                rows: 128,
                selected_max: 32,
            },
        }
    }

    /// The name on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::KimiK3Tp8 => "kimi-k3-tp8",
            Self::KimiLinear => "kimi-linear",
            Self::Tiny => "tiny",
        }
    }

    /// The layout of one layer's cache of so many rows.
    ///
    /// # Errors
    /// When so many rows cannot be addressed.
    pub(crate) fn layout(self, rows: u64) -> Result<CacheLayout, LayoutError> {
        let shape = self.shape();
        let [heads, values, keys] = shape.state;
        CacheLayout::with_page_stride(
            DataType::Float32,
            [rows, heads, values, keys],
            shape.page_stride,
        )
    }

    /// Bytes from one row of a layer to the next.
    pub(crate) const fn page_bytes(self) -> u64 {
        self.shape().page_stride * ITEM_BYTES
    }

    /// Bytes of one state.
    pub(crate) const fn state_bytes(self) -> u64 {
        let [heads, values, keys] = self.shape().state;
        heads * values * keys * ITEM_BYTES
    }

    /// Where the layer at a place of the page begins in it, in bytes.
    pub(crate) const fn offset_bytes(self, place: u64) -> u64 {
        self.shape().offset * ITEM_BYTES + place * self.state_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_a_valid_layout_whose_layers_fit_side_by_side_in_a_page() {
        for preset in Preset::value_variants() {
            let layout = preset.layout(preset.shape().rows).unwrap();
            assert_eq!(layout.page_stride_bytes(), preset.page_bytes());
            assert_eq!(layout.payload_bytes(), preset.state_bytes());
            let last = preset.offset_bytes(preset.shape().layers_per_page as u64 - 1);
            assert!(last + layout.payload_bytes() <= preset.page_bytes(), "{preset:?}");
            assert!(preset.shape().selected_max <= preset.shape().rows);
        }
    }

    #[test]
    fn names_are_the_ones_of_the_command_line() {
        for preset in Preset::value_variants() {
            let value = preset.to_possible_value().unwrap();
            assert_eq!(value.get_name(), preset.name());
        }
    }

    #[test]
    fn kimi_k3_is_the_published_layout() {
        let layout = Preset::KimiK3Tp8.layout(24).unwrap();
        assert_eq!(layout.payload_bytes(), 786_432);
        assert_eq!(layout.page_stride_bytes(), 27 * 786_432);
        assert_eq!(Preset::KimiK3Tp8.offset_bytes(0), 393_216 * 4);
        assert_eq!(Preset::KimiK3Tp8.offset_bytes(25), 27 * 786_432);
    }
}
