//! Where layers lie in regions, and what lies around them.

use std::ops::Range;

use statecopy_kernels::layout::{CacheLayout, LayoutError};

use super::preset::Preset;

/// Layers of one preset, spread over as many regions as they need.
#[derive(Debug, Clone)]
pub(crate) struct Arrangement {
    /// The layout of every layer.
    pub(crate) layout: CacheLayout,
    /// The regions.
    pub(crate) regions: Vec<RegionPlan>,
}

/// One region: pages in which layers lie side by side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RegionPlan {
    /// Its size.
    pub(crate) bytes: u64,
    /// Where row 0 of each of its layers begins.
    pub(crate) offsets: Vec<u64>,
}

/// What lies around the payloads of a region, in bytes from its start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Surroundings {
    /// The rest of each memory page that a payload touches.
    pub(crate) canaries: Vec<Range<u64>>,
    /// Whole memory pages that no payload touches.
    pub(crate) gaps: Vec<Range<u64>>,
}

impl Arrangement {
    /// Spreads `layers` layers of `rows` rows each over regions.
    ///
    /// # Errors
    /// When so many rows cannot be addressed.
    pub(crate) fn new(preset: Preset, layers: usize, rows: u64) -> Result<Self, LayoutError> {
        let layout = preset.layout(rows)?;
        let bytes = preset
            .page_bytes()
            .checked_mul(rows)
            .ok_or(LayoutError::Overflow { what: "The region in bytes" })?;
        let per_page = preset.shape().layers_per_page;
        let regions = (0..layers)
            .step_by(per_page)
            .map(|first| {
                let here = (layers - first).min(per_page) as u64;
                RegionPlan { bytes, offsets: (0..here).map(|at| preset.offset_bytes(at)).collect() }
            })
            .collect();
        Ok(Self { layout, regions })
    }

    /// Every layer's region (its place in [`Arrangement::regions`]) and offset, in the order of the layers.
    pub(crate) fn layers(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let regions = self.regions.iter().enumerate();
        regions.flat_map(|(region, plan)| plan.offsets.iter().map(move |offset| (region, *offset)))
    }

    /// Where a row's payload lies, for the layer that begins at `offset`.
    pub(crate) fn payload(&self, offset: u64, row: u64) -> Range<u64> {
        let start = offset + row * self.layout.page_stride_bytes();
        start..start + self.layout.payload_bytes()
    }

    /// What lies around the payloads of a region, where a memory page has `page` bytes.
    pub(crate) fn surroundings(&self, region: &RegionPlan, page: u64) -> Surroundings {
        let mut payloads: Vec<Range<u64>> = (0..self.layout.rows())
            .flat_map(|row| region.offsets.iter().map(move |offset| self.payload(*offset, row)))
            .collect();
        payloads.sort_unstable_by_key(|payload| payload.start);
        let mut around = Surroundings::default();
        let mut end = 0;
        for payload in payloads {
            around.between(end..payload.start, page);
            end = payload.end;
        }
        around.between(end..region.bytes, page);
        around
    }
}

impl Surroundings {
    /// Files the bytes between two payloads (or a payload and the region's border).
    fn between(&mut self, bytes: Range<u64>, page: u64) {
        // The region's start is on a page; the end of its last page may lie past it.
        let first_whole = bytes.start.next_multiple_of(page);
        let last_whole = bytes.end / page * page;
        if first_whole >= last_whole {
            push(&mut self.canaries, bytes);
            return;
        }
        push(&mut self.canaries, bytes.start..first_whole);
        push(&mut self.gaps, first_whole..last_whole);
        push(&mut self.canaries, last_whole..bytes.end);
    }
}

fn push(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    if !range.is_empty() {
        ranges.push(range);
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn kimi_k3_layers_lie_side_by_side_until_the_page_is_full() {
        let arrangement = Arrangement::new(Preset::KimiK3Tp8, 27, 4).unwrap();
        let layers: Vec<_> = arrangement.layers().collect();
        assert_eq!(layers.len(), 27);
        assert_eq!(arrangement.regions.len(), 2);
        assert_eq!(layers[0], (0, 1_572_864));
        assert_eq!(layers[24], (0, 1_572_864 + 24 * 786_432));
        assert_eq!(layers[25], (1, 1_572_864));
    }

    #[test]
    fn tiny_rows_share_memory_pages_with_canaries_and_leave_whole_pages_untouched() {
        let arrangement = Arrangement::new(Preset::Tiny, 2, 8).unwrap();
        let around = arrangement.surroundings(&arrangement.regions[0], 4096);
        assert!(around.canaries.len() >= 8, "{around:?}");
        assert_eq!(around.gaps.len(), 8);
    }

    fn arrangements() -> impl Strategy<Value = (Arrangement, u64)> {
        let presets = prop::sample::select(Preset::value_variants());
        (presets, 1_usize..6, 1_u64..6, prop::sample::select(vec![4096, 16_384, 65_536])).prop_map(
            |(preset, layers, rows, page)| (Arrangement::new(preset, layers, rows).unwrap(), page),
        )
    }

    proptest! {
        #[test]
        fn payloads_canaries_and_gaps_cover_a_region_exactly_once((arrangement, page) in arrangements()) {
            for region in &arrangement.regions {
                let around = arrangement.surroundings(region, page);
                let payloads = (0..arrangement.layout.rows()).flat_map(|row| {
                    region.offsets.iter().map(move |offset| (offset, row))
                });
                let mut all: Vec<Range<u64>> =
                    payloads.map(|(offset, row)| arrangement.payload(*offset, row)).collect();
                for gap in &around.gaps {
                    prop_assert!(gap.start.is_multiple_of(page) && gap.end.is_multiple_of(page));
                }
                all.extend(around.canaries);
                all.extend(around.gaps);
                all.sort_unstable_by_key(|range| range.start);
                let mut end = 0;
                for range in all {
                    prop_assert_eq!(range.start, end);
                    end = range.end;
                }
                prop_assert_eq!(end, region.bytes);
            }
        }
    }
}
