//! The one parameter of every kernel.
//!
//! [`Arguments`] is the same structure here, in `state_copy.cu` and in whatever stands in for the driver in tests. The
//! compiler proves it at each compilation: [`layout_assertions`] is part of the source that it is given.
//!
//! A launch moves the rows `first_row .. first_row + row_count` of the `L * selected` rows of a request. Row `r` is row
//! `r % selected` of the selection, in layer `r / selected`. The grid is [`grid`]: one block a chunk of a row in x, one row in
//! y, [`THREADS`] threads a block.

use std::mem::{offset_of, size_of};

use statecopy_proto::Direction;

/// Threads of a block.
pub const THREADS: u32 = 128;
/// Bytes of a row that one block moves: two 16-byte words a thread.
pub const CHUNK_BYTES: u64 = 4_096;
/// Rows of one launch: what the y axis of a grid holds (65,535), rounded down.
pub const ROWS_PER_LAUNCH_MAX: u64 = 32_768;
/// Bytes of [`Arguments`]: 256 indices of 4 bytes, each with a flag, travel with a launch. A kernel parameter may have 4,096, but all
/// of it is copied for each launch, 0.4 us a KiB (H200). What is larger goes through device memory, 2.4 us a launch.
pub const ARGUMENTS_BYTES: usize = 1_376;
/// Bytes of the address of indices, in the place of indices that travel with the launch.
pub const INDICES_ADDRESS_BYTES: usize = 8;
/// Bytes for indices and flags that travel with the launch.
pub const INLINE_BYTES_MAX: usize = ARGUMENTS_BYTES - 88;

/// [`Arguments::direction`] of a gather.
pub const DIRECTION_GATHER: u32 = 0;
/// [`Arguments::direction`] of a scatter.
pub const DIRECTION_SCATTER: u32 = 1;
/// [`Arguments::shape`]: several layers, whose addresses stand in the table `bases`.
pub const SHAPE_BATCH: u32 = 1;
/// [`Arguments::shape`]: the indices are the first bytes of `inline_bytes`.
pub const SHAPE_INDICES_INLINE: u32 = 2;
/// [`Arguments::shape`]: flags begin at `inline_flags_at` of `inline_bytes`.
pub const SHAPE_FLAGS_INLINE: u32 = 4;
/// [`Arguments::shape`]: flags begin at the address `flags`.
pub const SHAPE_FLAGS_ADDRESS: u32 = 8;
/// [`Arguments::shape`]: `row_states` are asked for.
pub const SHAPE_ROW_STATES: u32 = 16;

macro_rules! arguments {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {
        /// The kernel parameter. Addresses are those of the device; host memory that the driver pinned has one too.
        #[repr(C, align(16))]
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Arguments {
            $($(#[$doc])* pub $name: $type,)*
        }

        /// Name, offset and size of every field, for whoever fills the parameter in another language.
        pub const FIELDS: &[(&str, usize, usize)] =
            &[$((stringify!($name), offset_of!(Arguments, $name), size_of::<$type>()),)*];
    };
}

arguments! {
    /// Bits of [`SHAPE_BATCH`] and its like: what of the rest is looked at. It and the fields up to the first 8 bytes of
    /// `inline_bytes` lie in one line of the constants that a block fetches before it does anything: each further line
    /// costs a small copy about 0.1 us.
    shape: u32,
    /// The first of the `L * selected` rows that this launch moves.
    first_row: u32,
    /// Address of row 0 of the one layer.
    base: u64,
    /// Address of the packed buffer `[L, selected, payload]`, whole: of row 0, whatever `first_row` is.
    packed: u64,
    /// Bytes from one row of a cache to the next.
    page_stride: u64,
    /// Rows of a cache: an index is valid in `0..rows`.
    rows: u64,
    /// The indices that travel with the launch, or the address of `selected` indices ([`Arguments::set_indices_address`]);
    /// behind either, the flags that travel with it.
    inline_bytes: [u8; INLINE_BYTES_MAX],
    /// Bytes of one state. Where a payload is a whole number of chunks, the kernel takes it from the grid.
    payload: u64,
    /// Address of the table of row-0 addresses, one a layer.
    bases: u64,
    /// Address of `selected` flags. A scatter ignores flags.
    flags: u64,
    /// Address of one byte a row of this launch: 1 copied, 0 masked. Who has the indices and flags knows as much without it.
    row_states: u64,
    /// Selected rows of each layer; at least 1.
    selected: u32,
    /// Where flags begin in `inline_bytes`; at [`INDICES_ADDRESS_BYTES`] or later.
    inline_flags_at: u32,
    /// [`DIRECTION_GATHER`] or [`DIRECTION_SCATTER`]. Only `byte_copy` reads it.
    direction: u32,
    /// Bytes of an index: 4 or 8. Only `byte_copy` reads it.
    index_width: u32,
}

const _: () = assert!(size_of::<Arguments>() == ARGUMENTS_BYTES);
// Indices of 8 bytes, or the address of indices.
const _: () = assert!(offset_of!(Arguments, inline_bytes).is_multiple_of(8));

impl Arguments {
    /// All zero. A launcher makes one and fills in every field of it for each launch.
    #[must_use]
    pub const fn zeroed() -> Self {
        Self {
            shape: 0,
            first_row: 0,
            base: 0,
            packed: 0,
            page_stride: 0,
            rows: 0,
            inline_bytes: [0; INLINE_BYTES_MAX],
            payload: 0,
            bases: 0,
            flags: 0,
            row_states: 0,
            selected: 0,
            inline_flags_at: 0,
            direction: DIRECTION_GATHER,
            index_width: 4,
        }
    }

    /// Whether another launch is the same one, of indices and flags that lie in memory, and whose rows nobody asks after.
    #[must_use]
    pub fn is_same_by_address(&self, other: &Self) -> bool {
        const ELSEWHERE: u32 = SHAPE_INDICES_INLINE | SHAPE_FLAGS_INLINE | SHAPE_ROW_STATES;
        let told = |it: &Self| {
            (
                [it.base, it.packed, it.page_stride, it.rows, it.payload, it.bases, it.flags],
                [it.shape, it.first_row, it.selected, it.direction, it.index_width],
                it.indices_address(),
            )
        };
        self.shape & ELSEWHERE == 0 && told(self) == told(other)
    }

    /// Where the indices lie that do not travel with the launch.
    pub fn set_indices_address(&mut self, address: u64) {
        self.inline_bytes[..INDICES_ADDRESS_BYTES].copy_from_slice(&address.to_le_bytes());
    }

    /// What [`Arguments::set_indices_address`] has set.
    #[must_use]
    pub fn indices_address(&self) -> u64 {
        let mut address = [0; INDICES_ADDRESS_BYTES];
        address.copy_from_slice(&self.inline_bytes[..INDICES_ADDRESS_BYTES]);
        u64::from_le_bytes(address)
    }
}

/// The value of [`Arguments::direction`].
#[must_use]
pub const fn direction_number(direction: Direction) -> u32 {
    match direction {
        Direction::Gather => DIRECTION_GATHER,
        Direction::Scatter => DIRECTION_SCATTER,
    }
}

/// Blocks in x (chunks of a row) and in y (rows). `None` when there is no such grid: no rows, too many, or a payload of
/// 16 TiB.
#[must_use]
pub fn grid(payload: u64, row_count: u64) -> Option<[u32; 2]> {
    let chunks = u32::try_from(payload.div_ceil(CHUNK_BYTES)).ok()?;
    let rows = u32::try_from(row_count).ok()?;
    let fits = (1..=i32::MAX.cast_unsigned()).contains(&chunks)
        && (1..=ROWS_PER_LAUNCH_MAX).contains(&row_count);
    fits.then_some([chunks, rows])
}

/// C++ that does not compile unless its `Arguments` has this layout. `__INTADDR__` is the compiler's own word behind
/// `offsetof`: NVRTC has no header that would define that.
#[must_use]
pub fn layout_assertions() -> String {
    let mut text = format!(
        "\nstatic_assert(sizeof(Arguments) == {ARGUMENTS_BYTES} && alignof(Arguments) == {}, \"size\");\n",
        align_of::<Arguments>()
    );
    for (name, offset, size) in FIELDS {
        text.push_str(&format!(
            "static_assert(__INTADDR__(&((Arguments*)0)->{name}) == {offset} && \
             sizeof(Arguments::{name}) == {size}, \"{name}\");\n"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_follow_each_other_without_holes() {
        let mut at = 0;
        for (name, offset, size) in FIELDS {
            assert_eq!(*offset, at, "{name}");
            at += size;
        }
        assert_eq!(at, ARGUMENTS_BYTES);
        assert_eq!(layout_assertions().lines().count(), FIELDS.len() + 2);
    }

    #[test]
    fn what_a_small_launch_reads_lies_in_one_line_of_constants() {
        // Parameters begin 16 bytes into a line of 64 (sm_90).
        assert!(offset_of!(Arguments, inline_bytes) + INDICES_ADDRESS_BYTES <= 48);
        let mut arguments = Arguments::zeroed();
        arguments.set_indices_address(0x1234_5678_9abc_def0);
        assert_eq!(arguments.indices_address(), 0x1234_5678_9abc_def0);
    }

    #[test]
    fn launches_are_the_same_where_no_field_that_is_read_differs() {
        let one = Arguments { shape: SHAPE_FLAGS_ADDRESS, ..Arguments::zeroed() };
        assert!(one.is_same_by_address(&one));
        let changes: [fn(&mut Arguments); 13] = [
            |it| it.shape = 0,
            |it| it.first_row = 1,
            |it| it.base = 1,
            |it| it.packed = 1,
            |it| it.page_stride = 1,
            |it| it.rows = 1,
            |it| it.set_indices_address(1),
            |it| it.payload = 1,
            |it| it.bases = 1,
            |it| it.flags = 1,
            |it| it.selected = 1,
            |it| it.direction = DIRECTION_SCATTER,
            |it| it.index_width = 8,
        ];
        for (number, change) in changes.iter().enumerate() {
            let mut other = one.clone();
            change(&mut other);
            assert!(!one.is_same_by_address(&other), "field {number}");
        }
        let mut other = one.clone();
        other.inline_bytes[INDICES_ADDRESS_BYTES..].fill(1);
        assert!(one.is_same_by_address(&other), "what is left of another launch is not read");
        for shape in [SHAPE_INDICES_INLINE, SHAPE_FLAGS_INLINE, SHAPE_ROW_STATES] {
            let inline = Arguments { shape, ..one.clone() };
            assert!(!inline.is_same_by_address(&inline), "its values are not compared");
        }
    }

    #[test]
    fn a_grid_covers_every_byte_of_every_row() {
        assert_eq!(grid(1, 1), Some([1, 1]));
        assert_eq!(grid(CHUNK_BYTES, 2), Some([1, 2]));
        assert_eq!(grid(CHUNK_BYTES + 1, ROWS_PER_LAUNCH_MAX), Some([2, 32_768]));
        assert_eq!(grid(786_432, 64), Some([192, 64]));
        assert_eq!(grid(786_432, ROWS_PER_LAUNCH_MAX + 1), None);
        assert_eq!(grid(786_432, 0), None);
        assert_eq!(grid(0, 1), None);
        assert_eq!(grid(u64::MAX, 1), None);
        let widest = CHUNK_BYTES * u64::from(i32::MAX.unsigned_abs());
        assert_eq!(grid(widest, 1), Some([i32::MAX.unsigned_abs(), 1]));
        assert_eq!(grid(widest + 1, 1), None);
    }
}
