//! What the contract says of gather and scatter, on device memory.

use anyhow::{Result, ensure};
use statecopy_client::{DataType, Direction, PlanKind};
use statecopy_kernels::cuda::Allocator;
use statecopy_kernels::layout::CacheLayout;
use statecopy_tests::{Indices, Random};

use crate::rig::{Inputs, MARGIN, Rig, Spec, Target};
use crate::setup::Setup;
use crate::wide::Wide;

pub(crate) fn fp32(setup: &Setup) -> Result<String> {
    plan_kind(setup, DataType::Float32, PlanKind::Fused)
}

pub(crate) fn bf16(setup: &Setup) -> Result<String> {
    plan_kind(setup, DataType::BFloat16, PlanKind::Fused)
}

pub(crate) fn fp16(setup: &Setup) -> Result<String> {
    plan_kind(setup, DataType::Float16, PlanKind::ByteCopy)
}

pub(crate) fn int8(setup: &Setup) -> Result<String> {
    plan_kind(setup, DataType::Int8, PlanKind::ByteCopy)
}

pub(crate) fn fp64(setup: &Setup) -> Result<String> {
    plan_kind(setup, DataType::Float64, PlanKind::ByteCopy)
}

/// Invalid rows of all kinds among valid ones; the first pair repeats on gather only.
pub(super) fn rows(direction: Direction, count: i64) -> Vec<i64> {
    let first = if direction == Direction::Gather { 2 } else { -1 };
    vec![2, first, -1, 0, count, count - 1, i64::MIN, 1, i64::MAX, i64::from(i32::MIN)]
}

/// [`rows`], of each width.
pub(super) fn both_widths(direction: Direction, count: i64) -> [Indices; 2] {
    let rows = rows(direction, count);
    [Indices::Int32(narrow(&rows)), Indices::Int64(rows)]
}

/// As INT32, where the extremes of INT64 are those of INT32.
pub(super) fn narrow(rows: &[i64]) -> Vec<i32> {
    rows.iter()
        .map(|row| i32::try_from(*row).unwrap_or(if *row < 0 { i32::MIN } else { i32::MAX }))
        .collect()
}

/// Both widths, both directions, with and without flags, with inputs in either place.
fn plan_kind(setup: &Setup, dtype: DataType, kind: PlanKind) -> Result<String> {
    let gpu = setup.gpu()?;
    let layout = CacheLayout::with_page_stride(dtype, [24, 3, 32, 32], 2 * 3 * 32 * 32 + 64)?;
    let mut rig = Rig::new(setup.client()?, &gpu, &Spec::of(layout, 16))?;
    rig.expect_kind(kind)?;
    let flags = [1, 1, 1, 0, 1, 255, 1, 2, 0, 1];
    let mut copies = 0;
    for direction in Direction::ALL {
        for indices in both_widths(direction, 24) {
            for inputs in Inputs::ALL {
                for flags in [None, Some(&flags[..])] {
                    copies += 1;
                    rig.compute(copies)?;
                    rig.copy(direction, Target::Layer(0), &indices, flags, inputs)?;
                }
            }
        }
    }
    Ok(format!("{copies} copies by {} plan", kind.label()))
}

/// So many rows below `rows`, each once.
pub(super) fn distinct(random: &mut Random, rows: u64, count: u64) -> Vec<i64> {
    let mut left: Vec<i64> = (0..rows.cast_signed()).collect();
    (0..count)
        .map(|_| {
            let at = usize::try_from(random.below(left.len() as u64)).unwrap_or_default();
            left.swap_remove(at)
        })
        .collect()
}

pub(crate) fn every_count(setup: &Setup) -> Result<String> {
    const COUNTS_MAX: u64 = 130;
    const ROWS: u64 = 140;
    let gpu = setup.gpu()?;
    let mut random = Random::new(7);
    let mut copies = 0;
    // Below, at and above what one block copies.
    for (at, payload) in [130, 2_048, 2_052].into_iter().enumerate() {
        let layout =
            CacheLayout::with_page_stride(DataType::Float32, [ROWS, 1, 1, payload], payload + 36)?;
        let mut rig = Rig::new(setup.client()?, &gpu, &Spec::of(layout, COUNTS_MAX))?;
        for count in 0..=COUNTS_MAX {
            for direction in Direction::ALL {
                copies += 1;
                let rows = distinct(&mut random, ROWS, count);
                let turn = usize::try_from(count)? + at;
                let indices = match (turn + usize::from(direction == Direction::Gather)) % 2 {
                    0 => Indices::Int32(narrow(&rows)),
                    _ => Indices::Int64(rows),
                };
                let inputs = Inputs::ALL[usize::from(turn.is_multiple_of(3))];
                rig.copy(direction, Target::Layer(0), &indices, None, inputs)?;
            }
        }
    }
    let plans = setup.client()?.inspect()?.devices.into_iter().flat_map(|device| device.plans);
    for plan in plans.filter(|plan| plan.plan() == statecopy_client::v1::PlanKind::Fused) {
        ensure!(plan.variants.len() == 4, "{} variants of a fused plan", plan.variants.len());
    }
    Ok(format!("0 to {COUNTS_MAX} rows in {copies} copies, four variants a plan"))
}

pub(crate) fn many_rows(setup: &Setup) -> Result<String> {
    const ROWS: u64 = 5_000;
    let gpu = setup.gpu()?;
    let layout = CacheLayout::with_page_stride(DataType::Float32, [ROWS, 1, 1, 20], 28)?;
    let mut rig = Rig::new(setup.client()?, &gpu, &Spec::of(layout, 4_096))?;
    let mut random = Random::new(8);
    let counts = [440, 441, 900, 1_000, 1_001, 2_500, 4_096];
    for count in counts {
        let rows = distinct(&mut random, ROWS, count);
        let flags: Vec<u8> = (0..count).map(|_| random.word().to_le_bytes()[0] & 3).collect();
        for direction in Direction::ALL {
            for indices in [Indices::Int32(narrow(&rows)), Indices::Int64(rows.clone())] {
                for inputs in Inputs::ALL {
                    rig.copy(direction, Target::Layer(0), &indices, Some(&flags), inputs)?;
                }
            }
        }
    }
    Ok(format!("{counts:?} rows with flags"))
}

pub(crate) fn bit_patterns(setup: &Setup) -> Result<String> {
    let gpu = setup.gpu()?;
    let words: [u32; 8] = [
        0x7fc0_0000,
        0x7f80_0001,
        0xffff_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x8000_0000,
        0x0000_0001,
        0x7fa5_a5a5,
    ];
    let row: Vec<u8> = words.iter().cycle().take(64).flat_map(|word| word.to_ne_bytes()).collect();
    let layout = CacheLayout::with_page_stride(DataType::Float32, [4, 1, 1, 64], 64)?;
    let half = CacheLayout::with_page_stride(DataType::BFloat16, [4, 1, 1, 128], 128)?;
    for layout in [layout, half] {
        let mut rig = Rig::new(setup.client()?, &gpu, &Spec::of(layout, 4))?;
        rig.cache.write(MARGIN + 256, &row)?;
        let indices = Indices::Int32(vec![1, 2]);
        rig.copy(Direction::Gather, Target::Layer(0), &indices, None, Inputs::Inline)?;
        let indices = Indices::Int32(vec![3]);
        rig.copy(Direction::Scatter, Target::Layer(0), &indices, None, Inputs::Inline)?;
    }
    Ok("NaN payloads, infinities, -0.0 and denormals".to_owned())
}

pub(crate) fn alignments(setup: &Setup) -> Result<String> {
    let gpu = setup.gpu()?;
    let kinds = [
        (DataType::Int8, 1, [1, 3, 17, 8_193]),
        (DataType::BFloat16, 2, [1, 3, 9, 4_097]),
        (DataType::Float32, 4, [1, 3, 5, 2_049]),
        (DataType::Float64, 8, [1, 3, 5, 1_025]),
    ];
    let mut layouts = 0;
    for (dtype, item, payloads) in kinds {
        for payload in payloads {
            let layout = CacheLayout::with_page_stride(dtype, [6, 1, 1, payload], payload + 1)?;
            let apart = layout.span_bytes().next_multiple_of(16) + 16;
            // A layer for each class of base address, side by side.
            let classes = (0..16 / item).map(|class| (layout.clone(), class * (apart + item)));
            let layers: Vec<_> = classes.collect();
            layouts += layers.len();
            let targets = layers.len();
            let mut rig = Rig::new(setup.client()?, &gpu, &Spec::of_layers(layers, 6))?;
            for target in (0..targets).map(Target::Layer) {
                for direction in Direction::ALL {
                    rig.compute(payload)?;
                    let indices = Indices::Int32(vec![5, -1, 0, 3]);
                    rig.copy(direction, target, &indices, None, Inputs::Inline)?;
                }
            }
        }
    }
    Ok(format!("{layouts} layouts"))
}

pub(crate) fn batch(setup: &Setup) -> Result<String> {
    const LAYERS: u64 = 69;
    let gpu = setup.gpu()?;
    let keys = setup.size(128, 4);
    let payload = 4 * 32 * keys;
    // Layers interleave in each page, as the pages of a real cache do.
    let layout = CacheLayout::with_page_stride(DataType::Float32, [10, 4, 32, keys], 70 * payload)?;
    let layers = (0..LAYERS).map(|at| (layout.clone(), at * payload * 4)).collect();
    let mut rig = Rig::new(setup.client()?, &gpu, &Spec::of_layers(layers, 8))?;
    let flags = [1, 1, 0, 1, 1, 9, 1, 1];
    for direction in Direction::ALL {
        for inputs in Inputs::ALL {
            rig.compute(3)?;
            let indices = Indices::Int32(vec![9, 0, 4, -1, 7, 2, 10, 5]);
            rig.copy(direction, Target::All, &indices, Some(&flags), inputs)?;
            rig.compute(4)?;
            let indices = Indices::Int64(vec![1, 8, -3]);
            rig.copy(direction, Target::Layer(68), &indices, None, inputs)?;
        }
    }
    Ok(format!("{LAYERS} layers of {} bytes, 8 rows", layout.payload_bytes()))
}

pub(crate) fn many_launches(setup: &Setup) -> Result<String> {
    let gpu = setup.gpu()?;
    let rows = setup.size(300, 90);
    // Rows of 0.75 MiB: what one launch may move is 64 MiB.
    let payload = 12 * 128 * 128;
    let layout =
        CacheLayout::with_page_stride(DataType::Float32, [rows, 12, 128, 128], payload + 16)?;
    let mut rig = Rig::new(setup.client()?, &gpu, &Spec::of(layout, rows))?;
    let mut random = Random::new(9);
    for direction in Direction::ALL {
        let indices = Indices::Int64(distinct(&mut random, rows, rows));
        rig.copy(direction, Target::Layer(0), &indices, None, Inputs::Inline)?;
    }
    Ok(format!("{rows} rows of 0.75 MiB"))
}

pub(crate) fn far_pages(setup: &Setup) -> Result<String> {
    let gpu = setup.gpu()?;
    let page = (4 << 30) + (2 << 20) + 4_096;
    let layout = CacheLayout::with_page_stride(DataType::Float32, [3, 2, 32, 32], page / 4)?;
    let how = Allocator::Virtual { piece_bytes: 1 << 30, shared: true };
    let mut wide = Wide::new(setup.client()?, &gpu, layout, 3, how)?;
    wide.check_rows(&[2, 0, 1])?;
    Ok(format!("pages {page} bytes apart"))
}
