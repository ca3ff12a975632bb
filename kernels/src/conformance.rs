//! The contract as tests, written once for every device.
//!
//! Each public function of the modules here is a sentence of the contract and panics where the device breaks it. A
//! device says how it is opened and how its memory is filled and read ([`DeviceUnderTest`]); [`crate::conformance_tests`] then makes a
//! test of every sentence. Whatever a sentence is about, [`check`] compares every byte of the cache's region and of the packed
//! one with the [reference](mod@crate::reference), so that gaps, neighbours and margins are canaries everywhere.

pub mod batches;
pub mod both;
pub mod gather;
pub mod plans;
pub mod random;
pub mod scatter;

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use statecopy_proto::{DataType, Direction, IndexWidth, PlanKind};

use crate::device::{
    Device, DeviceFault, Flags, Indices, Launch, Launcher as _, Moved, Slice, Ticket,
};
use crate::layout::{CacheLayout, Placement};
use crate::plan::{self, KernelClass};
use crate::reference;
use crate::signature::Signature;

/// A device, and how a test reaches its memory.
pub trait DeviceUnderTest: Sync {
    /// The device.
    type Device: Device;

    /// The opened device.
    fn device(&self) -> &Self::Device;

    /// Memory as a worker shares it, imported: at least that many bytes, which hold anything. Pages that nobody touches cost
    /// nothing.
    fn allocate(&self, bytes: u64) -> Arc<RegionOf<Self>>;

    /// Fills memory.
    fn write(&self, region: &RegionOf<Self>, offset: u64, bytes: &[u8]);

    /// Reads memory.
    fn read(&self, region: &RegionOf<Self>, offset: u64, into: &mut [u8]);
}

/// The regions of a device under test.
pub type RegionOf<T> = <<T as DeviceUnderTest>::Device as Device>::Region;

/// Where indices and flags of a case lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    /// In private memory, as they come with a request.
    Inline,
    /// In a shared region.
    Shared,
}

/// One request, and the caches that it is about.
#[derive(Debug, Clone)]
pub struct Case {
    /// The layout of every layer.
    pub layout: CacheLayout,
    /// Where each layer begins, in bytes from the start of the one region that holds all.
    pub offsets: Vec<u64>,
    /// How wide the indices are. Values that do not fit are a mistake of the test.
    pub width: IndexWidth,
    /// One a selected row.
    pub indices: Vec<i64>,
    /// One a selected row, or none.
    pub flags: Option<Vec<u8>>,
    /// Where indices and flags lie.
    pub inputs: Inputs,
    /// The most rows that one launch moves.
    pub rows_per_launch: u64,
}

impl Case {
    /// One layer at the region's start, INT32 indices, no flags, inline, one launch.
    #[must_use]
    pub fn new(layout: CacheLayout, indices: &[i64]) -> Self {
        Self {
            layout,
            offsets: vec![0],
            width: IndexWidth::Int32,
            indices: indices.to_vec(),
            flags: None,
            inputs: Inputs::Inline,
            rows_per_launch: u64::MAX,
        }
    }

    /// One layer at another place.
    #[must_use]
    pub fn at(mut self, offset: u64) -> Self {
        self.offsets = vec![offset];
        self
    }

    /// With these flags.
    #[must_use]
    pub fn flagged(mut self, flags: &[u8]) -> Self {
        self.flags = Some(flags.to_vec());
        self
    }

    /// With indices of that width.
    #[must_use]
    pub fn wide(mut self, width: IndexWidth) -> Self {
        self.width = width;
        self
    }

    /// With the indices that are valid more than once made invalid, as a scatter's caller promises.
    #[must_use]
    pub fn with_unique_rows(mut self) -> Self {
        let mut seen = Vec::new();
        for index in &mut self.indices {
            if seen.contains(index) {
                *index = -1;
            }
            seen.push(*index);
        }
        self
    }

    fn selected(&self) -> u64 {
        self.indices.len() as u64
    }

    fn packed_bytes(&self) -> u64 {
        self.offsets.len() as u64 * self.selected() * self.layout.payload_bytes()
    }

    fn region_bytes(&self) -> u64 {
        let last = self.offsets.iter().max().copied().unwrap_or(0);
        last + self.layout.span_bytes() + MARGIN
    }
}

/// Bytes behind the last payload and around packed that must keep what they hold.
const MARGIN: u64 = 96;
/// Where packed begins in its region: a multiple of 16 and of no more, so that no test relies on more.
const PACKED_AT: u64 = 16 * 5;
/// How long a launch may take before a test gives up on it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a case in one direction, by the plan that the device chooses and by a byte copy, and compares every byte of both
/// regions and the count of rows with the reference.
///
/// # Panics
/// When anything differs.
pub fn check<T: DeviceUnderTest>(device: &T, direction: Direction, case: &Case) {
    let chosen = plan::choose(&device.device().description().fused, &case.layout);
    check_by(device, chosen, direction, case);
    if chosen != PlanKind::ByteCopy {
        check_by(device, PlanKind::ByteCopy, direction, case);
    }
}

/// Runs a case both ways, a scatter only of rows that are unique.
///
/// # Panics
/// When anything differs.
pub fn check_both_ways<T: DeviceUnderTest>(device: &T, case: &Case) {
    check(device, Direction::Gather, case);
    check(device, Direction::Scatter, &case.clone().with_unique_rows());
}

fn check_by<T: DeviceUnderTest>(device: &T, kind: PlanKind, direction: Direction, case: &Case) {
    let bench = Bench::new(device, kind, case);
    let mut cache = noise(case.region_bytes(), 1);
    let mut packed = noise(bench.packed.bytes_total, 2);
    device.write(&bench.cache, 0, &cache);
    device.write(&bench.packed.region, 0, &packed);

    let moved = bench.run(direction, case);

    let inner = bench.packed.inner();
    let expected = match direction {
        Direction::Gather => reference::gather(
            &cache,
            &bench.layers,
            &case.indices,
            case.flags.as_deref(),
            &mut packed[inner],
        ),
        Direction::Scatter => {
            reference::scatter(&mut cache, &bench.layers, &case.indices, &packed[inner])
        }
    };
    let what = || format!("{} by {} of {case:?}", direction.label(), kind.label());
    assert_eq!(moved, expected, "{}", what());
    let after = bench.contents(&bench.cache, case.region_bytes());
    assert_bytes(&after, &cache, || format!("The cache after {}", what()));
    let after = bench.packed_bytes();
    assert_bytes(&after, &packed, || format!("Packed after {}", what()));
}

/// Polls a launch until it answers.
pub(crate) fn outcome<D: Device>(launcher: &mut D::Launcher, ticket: Ticket) -> Moved {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(moved) = launcher.poll(ticket).expect("the device works") {
            return moved;
        }
        assert!(Instant::now() < deadline, "The launch did not end");
    }
}

/// Everything that a case needs on the device.
pub(crate) struct Bench<'a, T: DeviceUnderTest> {
    device: &'a T,
    kind: PlanKind,
    pub(crate) cache: Arc<RegionOf<T>>,
    pub(crate) layers: Vec<Placement>,
    caches: <T::Device as Device>::Caches,
    variants: <T::Device as Device>::Variants,
    pub(crate) packed: Packed<T>,
    inputs: Arc<RegionOf<T>>,
}

/// The packed buffer, with a margin on both sides.
pub(crate) struct Packed<T: DeviceUnderTest> {
    pub(crate) region: Arc<RegionOf<T>>,
    bytes: u64,
    bytes_total: u64,
}

impl<T: DeviceUnderTest> Packed<T> {
    pub(crate) fn inner(&self) -> Range<usize> {
        small(PACKED_AT)..small(PACKED_AT + self.bytes)
    }
}

impl<'a, T: DeviceUnderTest> Bench<'a, T> {
    pub(crate) fn new(device: &'a T, kind: PlanKind, case: &Case) -> Self {
        let region_bytes = case.region_bytes();
        let cache = device.allocate(region_bytes);
        let layers: Vec<Placement> = case
            .offsets
            .iter()
            .map(|offset| case.layout.place(*offset, region_bytes).expect("the case fits"))
            .collect();
        let bound: Vec<_> =
            layers.iter().map(|layer| (Arc::clone(&cache), layer.clone())).collect();
        let caches = device.device().bind(&bound).expect("the layers are of one signature");
        let uuid = device.device().description().uuid;
        let signature = Signature::new(uuid, case.layout.clone(), case.offsets[0]);
        let variants = device.device().compile(&KernelClass::of(kind, &signature));
        let bytes_total = PACKED_AT + case.packed_bytes() + MARGIN;
        let packed = Packed {
            region: device.allocate(bytes_total),
            bytes: case.packed_bytes(),
            bytes_total,
        };
        Self {
            device,
            kind,
            cache,
            layers,
            caches,
            variants: variants.expect("the class compiles"),
            packed,
            inputs: device.allocate(FLAGS_AT + flags_room(case.selected())),
        }
    }

    /// Runs the case, in as many launches as it asks for, as many in flight at once as there is room for.
    pub(crate) fn run(&self, direction: Direction, case: &Case) -> Moved {
        let mut launcher = self.device.device().launcher().expect("the device launches");
        assert!(!launcher.hooked(), "no foreign hook in a test");
        let rows = self.layers.len() as u64 * case.selected();
        let rows_per_launch = case.rows_per_launch.min(self.device.device().rows_per_launch_max());
        let mut under_way = VecDeque::new();
        let mut moved = Moved::default();
        let mut add = |more: Moved| {
            moved.copied += more.copied;
            moved.masked += more.masked;
        };
        let mut start = 0_u64;
        loop {
            if !launcher.has_room() {
                let oldest = under_way.pop_front().expect("a launcher without launches has room");
                add(outcome::<T::Device>(&mut launcher, oldest));
            }
            let part = start..rows.min(start.saturating_add(rows_per_launch));
            start = part.end;
            under_way.push_back(self.launch(&mut launcher, direction, case, part));
            if start == rows {
                break;
            }
        }
        for ticket in under_way {
            add(outcome::<T::Device>(&mut launcher, ticket));
        }
        moved
    }

    pub(crate) fn launch(
        &self,
        launcher: &mut <T::Device as Device>::Launcher,
        direction: Direction,
        case: &Case,
        part: Range<u64>,
    ) -> Ticket {
        self.launch_by(direction, case, part, |launch| launcher.launch(launch))
    }

    /// Makes a launch, to be started in some way.
    pub(crate) fn launch_by(
        &self,
        direction: Direction,
        case: &Case,
        part: Range<u64>,
        start: impl FnOnce(&Launch<'_, T::Device>) -> Result<Ticket, DeviceFault>,
    ) -> Ticket {
        let narrow: Vec<i32> = match case.width {
            IndexWidth::Int32 => {
                case.indices.iter().map(|it| (*it).try_into().expect("it is an INT32")).collect()
            }
            IndexWidth::Int64 => Vec::new(),
        };
        let shared = case.inputs == Inputs::Shared;
        if shared {
            self.share_inputs(case, &narrow);
        }
        let index_bytes = case.selected() * case.width.bytes();
        let slice = |at, bytes| Slice::new(&self.inputs, at, bytes).expect("the inputs fit");
        let indices = match case.width {
            width if shared => Indices::Shared(width, slice(0, index_bytes)),
            IndexWidth::Int32 => Indices::Int32(&narrow),
            IndexWidth::Int64 => Indices::Int64(&case.indices),
        };
        let flags = match &case.flags {
            None => Flags::None,
            Some(_) if shared => Flags::Shared(slice(FLAGS_AT, case.selected())),
            Some(flags) => Flags::Inline(flags),
        };
        let packed = Slice::new(&self.packed.region, PACKED_AT, self.packed.bytes);
        let launch = Launch {
            kind: self.kind,
            variants: &self.variants,
            caches: &self.caches,
            direction,
            selected: case.selected(),
            indices,
            flags,
            packed: packed.expect("packed fits"),
            part,
        };
        start(&launch).expect("the device works")
    }

    fn share_inputs(&self, case: &Case, narrow: &[i32]) {
        let bytes: Vec<u8> = match case.width {
            IndexWidth::Int32 => narrow.iter().flat_map(|it| it.to_ne_bytes()).collect(),
            IndexWidth::Int64 => case.indices.iter().flat_map(|it| it.to_ne_bytes()).collect(),
        };
        assert!(bytes.len() as u64 <= FLAGS_AT, "the indices fit");
        self.device.write(&self.inputs, 0, &bytes);
        self.device.write(&self.inputs, FLAGS_AT, case.flags.as_deref().unwrap_or_default());
    }

    /// Packed, with its margins.
    pub(crate) fn packed_bytes(&self) -> Vec<u8> {
        self.contents(&self.packed.region, self.packed.bytes_total)
    }

    /// Where shared indices lie, to change them under a launch.
    pub(crate) fn inputs(&self) -> &RegionOf<T> {
        &self.inputs
    }

    /// The first bytes of a region.
    pub(crate) fn contents(&self, region: &RegionOf<T>, bytes: u64) -> Vec<u8> {
        let mut bytes = vec![0; small(bytes)];
        self.device.read(region, 0, &mut bytes);
        bytes
    }
}

/// Where shared flags lie, behind the indices.
const FLAGS_AT: u64 = 1 << 16;

fn flags_room(selected: u64) -> u64 {
    selected.next_multiple_of(16).max(16)
}

/// A cache of `rows` rows of `payload` elements each.
///
/// # Panics
/// When that is no valid layout.
#[must_use]
pub fn cache(dtype: DataType, rows: u64, payload: u64, page_stride: u64) -> CacheLayout {
    CacheLayout::with_page_stride(dtype, [rows, 1, 1, payload], page_stride)
        .expect("the test's layout is valid")
}

/// Bytes without a pattern that a wrong copy could meet by chance, the same on every run.
#[must_use]
pub fn noise(bytes: u64, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut noise = vec![0; small(bytes)];
    for chunk in noise.chunks_mut(size_of::<u64>()) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    noise
}

/// Compares memory, and names the first byte that differs instead of printing all.
///
/// # Panics
/// When they differ.
pub fn assert_bytes<M: fmt::Display>(actual: &[u8], expected: &[u8], what: impl Fn() -> M) {
    if actual == expected {
        return;
    }
    let at = actual.iter().zip(expected).position(|(actual, expected)| actual != expected);
    panic!(
        "{}: byte {at:?} is {:?}, not {:?}",
        what(),
        at.map(|at| actual[at]),
        at.map(|at| expected[at])
    );
}

/// A size that a test holds in memory.
fn small(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a test's memory is addressable")
}

/// Makes a test of every sentence for the device that the expression opens.
#[macro_export]
macro_rules! conformance_tests {
    ($open:expr) => {
        $crate::conformance_tests! { $open;
            gather::gather_copies_every_valid_row_when_there_are_no_flags
            gather::gather_clears_the_rows_of_invalid_indices
            gather::gather_clears_rows_whose_flag_is_zero_and_takes_any_other_for_true
            gather::gather_writes_packed_whole_and_nothing_beside_it
            gather::gather_takes_the_same_row_many_times
            scatter::scatter_writes_valid_rows_and_skips_the_others
            scatter::scatter_ignores_flags
            scatter::scatter_with_no_valid_row_writes_nothing
            both::row_zero_is_a_row_like_any_other
            both::the_gap_between_payload_and_page_stride_keeps_its_bytes
            both::every_bit_pattern_survives
            both::every_data_type_is_copied
            both::every_base_alignment_and_odd_payload_is_exact
            both::the_extremes_of_both_index_types_are_merely_invalid
            both::an_index_is_never_cut_to_fewer_bits
            both::every_selected_count_from_zero_past_a_hundred_is_exact
            both::payloads_below_at_and_above_a_block_are_exact
            both::large_requests_are_exact
            both::indices_and_flags_may_lie_in_shared_memory
            both::a_shared_index_that_changes_is_one_row_or_another
            both::pages_more_than_4_gib_apart_are_reached_by_int32_indices
            both::rows_past_2_to_the_31_bytes_are_reached
            batches::a_batch_moves_the_same_rows_of_every_layer
            batches::interleaved_layers_of_one_page_keep_apart
            batches::bounded_launches_move_what_one_launch_moves
            plans::one_row_scratch_runs_every_variant
            plans::a_table_serves_every_cache_of_its_class
            plans::a_launch_of_nothing_moves_nothing
            plans::layers_of_two_signatures_are_no_binding_set
            plans::a_layer_past_its_region_is_not_bound
            plans::regions_of_one_memory_have_one_allocation
            plans::the_configuration_stays_the_same
            random::random_requests_agree_with_the_reference
        }
    };
    ($open:expr; $($module:ident::$sentence:ident)*) => {
        $(
            #[test]
            fn $sentence() {
                $crate::conformance::$module::$sentence(&$open);
            }
        )*
    };
}
