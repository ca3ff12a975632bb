//! Plan kinds and what a device compiles for one (contract: Plan).

use statecopy_proto::{DataType, Direction, IndexWidth, PlanKind};

use crate::layout::CacheLayout;
use crate::signature::Signature;

/// Chooses the plan kind by device capability and layout. Automatic; no setting overrides it.
///
/// `fused` are the types for which the device declares the capability; it is empty for a device of unknown family.
#[must_use]
pub fn choose(fused: &[DataType], layout: &CacheLayout) -> PlanKind {
    match layout.dtype() {
        dtype @ (DataType::Float32 | DataType::BFloat16) if fused.contains(&dtype) => {
            PlanKind::Fused
        }
        _ => PlanKind::ByteCopy,
    }
}

/// One compiled variant of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// One of the four of a fused plan.
    Fused(Direction, IndexWidth),
    /// The one of a byte-copy plan: direction, index width and flags are launch arguments.
    ByteCopy,
}

impl Variant {
    /// Every variant there is, in the order of [`Variant::ordinal`].
    pub const ALL: [Self; 5] = [
        Self::Fused(Direction::Gather, IndexWidth::Int32),
        Self::Fused(Direction::Gather, IndexWidth::Int64),
        Self::Fused(Direction::Scatter, IndexWidth::Int32),
        Self::Fused(Direction::Scatter, IndexWidth::Int64),
        Self::ByteCopy,
    ];

    /// The variants that a plan of that kind prepares: exactly four, or exactly one.
    #[must_use]
    pub fn of(kind: PlanKind) -> &'static [Self] {
        match kind {
            PlanKind::Fused => &Self::ALL[..4],
            PlanKind::ByteCopy => &Self::ALL[4..],
        }
    }

    /// The variant that serves a request.
    #[must_use]
    pub fn serving(kind: PlanKind, direction: Direction, width: IndexWidth) -> Self {
        match kind {
            PlanKind::Fused => Self::Fused(direction, width),
            PlanKind::ByteCopy => Self::ByteCopy,
        }
    }

    /// Its place among [`Variant::ALL`], for counters.
    #[must_use]
    pub fn ordinal(self) -> usize {
        match self {
            Self::Fused(Direction::Gather, IndexWidth::Int32) => 0,
            Self::Fused(Direction::Gather, IndexWidth::Int64) => 1,
            Self::Fused(Direction::Scatter, IndexWidth::Int32) => 2,
            Self::Fused(Direction::Scatter, IndexWidth::Int64) => 3,
            Self::ByteCopy => 4,
        }
    }

    /// The name in metrics and in `statecopy status`.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Fused(Direction::Gather, IndexWidth::Int32) => "gather/int32",
            Self::Fused(Direction::Gather, IndexWidth::Int64) => "gather/int64",
            Self::Fused(Direction::Scatter, IndexWidth::Int32) => "scatter/int32",
            Self::Fused(Direction::Scatter, IndexWidth::Int64) => "scatter/int64",
            Self::ByteCopy => "byte_copy",
        }
    }
}

/// What a device compiles: everything that may specialise a kernel, and nothing else. Rows, page stride, base address
/// and `max_selected` are launch arguments.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KernelClass {
    /// The plan kind.
    pub kind: PlanKind,
    /// The element type.
    pub dtype: DataType,
    /// Bytes of one state.
    pub payload_bytes: u64,
    /// The base address mod 16.
    pub base_mod_16: u8,
}

impl KernelClass {
    /// The class that serves a signature.
    #[must_use]
    pub fn of(kind: PlanKind, signature: &Signature) -> Self {
        Self {
            kind,
            dtype: signature.layout().dtype(),
            payload_bytes: signature.layout().payload_bytes(),
            base_mod_16: signature.base_mod_16(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signature::DeviceUuid;

    fn layout(dtype: DataType) -> CacheLayout {
        CacheLayout::with_page_stride(dtype, [2, 1, 1, 4], 8).unwrap()
    }

    #[test]
    fn only_the_two_fused_types_are_fused_and_only_where_the_device_declares_them() {
        for dtype in DataType::ALL {
            let fusible = matches!(dtype, DataType::Float32 | DataType::BFloat16);
            let expected = if fusible { PlanKind::Fused } else { PlanKind::ByteCopy };
            assert_eq!(choose(&DataType::ALL, &layout(dtype)), expected, "{dtype}");
            // A device of unknown family declares none.
            assert_eq!(choose(&[], &layout(dtype)), PlanKind::ByteCopy, "{dtype}");
        }
        let only_float32 = [DataType::Float32];
        assert_eq!(choose(&only_float32, &layout(DataType::BFloat16)), PlanKind::ByteCopy);
    }

    #[test]
    fn a_plan_prepares_exactly_what_serves_its_requests() {
        for (kind, count) in [(PlanKind::Fused, 4), (PlanKind::ByteCopy, 1)] {
            let mut serving: Vec<Variant> = Direction::ALL
                .iter()
                .flat_map(|direction| IndexWidth::ALL.map(|width| (*direction, width)))
                .map(|(direction, width)| Variant::serving(kind, direction, width))
                .collect();
            serving.dedup();
            assert_eq!(serving, Variant::of(kind));
            assert_eq!(serving.len(), count);
        }
        for (at, variant) in Variant::ALL.into_iter().enumerate() {
            assert_eq!(variant.ordinal(), at);
        }
    }

    #[test]
    fn rows_page_stride_and_allocation_are_no_part_of_a_kernel_class() {
        let class = |rows, page_stride, offset| {
            let layout =
                CacheLayout::with_page_stride(DataType::Float32, [rows, 1, 1, 4], page_stride);
            let signature = Signature::new(DeviceUuid([1; 16]), layout.unwrap(), offset);
            KernelClass::of(PlanKind::Fused, &signature)
        };
        assert_eq!(class(2, 8, 4), class(9, 100, 4 + 4096));
        assert_ne!(class(2, 8, 4), class(2, 8, 8));
    }
}
