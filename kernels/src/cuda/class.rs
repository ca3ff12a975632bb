//! Which kernels there are: the classes that `state_copy.cu` is specialised for.
//!
//! Of a [`KernelClass`] only four things change the code: plan kind, item size, the widest vector that divides payload and
//! base, and whether a payload is a whole number of chunks. That makes [`COUNT`] classes in all, so that a store can hold every
//! one of them. The element type itself is no part: bits are copied, never computed.

use statecopy_proto::PlanKind;

use super::arguments::CHUNK_BYTES;
use crate::plan::{KernelClass, Variant};

/// Bytes of the widest load and store.
const VECTOR_BYTES_MAX: u64 = 16;

/// How many classes there are.
pub const COUNT: usize = 42;

/// One class of kernels: its variants are compiled together and kept in one artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CudaClass {
    kind: PlanKind,
    item_bytes: u64,
    vector_bytes: u64,
    even: bool,
}

impl CudaClass {
    /// The class that serves a kernel class.
    #[must_use]
    pub fn of(class: &KernelClass) -> Self {
        // The lowest set bit of all of them is the widest power of two that divides each.
        let sizes = class.payload_bytes | u64::from(class.base_mod_16) | VECTOR_BYTES_MAX;
        Self {
            kind: class.kind,
            item_bytes: class.dtype.item_bytes(),
            vector_bytes: 1 << sizes.trailing_zeros(),
            even: class.payload_bytes.is_multiple_of(CHUNK_BYTES),
        }
    }

    /// Every class there is, in the order of their names.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let items = |kind| match kind {
            // The two types that may be fused: FP32 and BF16.
            PlanKind::Fused => [2, 4].iter(),
            PlanKind::ByteCopy => [1, 2, 4, 8].iter(),
        };
        let mut classes = Vec::new();
        for kind in [PlanKind::ByteCopy, PlanKind::Fused] {
            for item_bytes in items(kind).copied() {
                for vector_bytes in [1, 2, 4, 8, 16].into_iter().filter(|it| *it >= item_bytes) {
                    for even in [true, false] {
                        classes.push(Self { kind, item_bytes, vector_bytes, even });
                    }
                }
            }
        }
        classes
    }

    /// The name in a store, as in `fused-item4-vector16-even`.
    #[must_use]
    pub fn name(self) -> String {
        let kind = match self.kind {
            PlanKind::Fused => "fused",
            PlanKind::ByteCopy => "byte-copy",
        };
        let chunks = if self.even { "even" } else { "ragged" };
        format!("{kind}-item{}-vector{}-{chunks}", self.item_bytes, self.vector_bytes)
    }

    /// The class of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|class| class.name() == name)
    }

    /// The plan kind.
    #[must_use]
    pub fn kind(self) -> PlanKind {
        self.kind
    }

    /// Its variants: four of a fused plan, one of a byte copy.
    #[must_use]
    pub fn variants(self) -> &'static [Variant] {
        Variant::of(self.kind)
    }

    /// The macros that make `state_copy.cu` this class.
    #[must_use]
    pub fn macros(self) -> [(&'static str, u64); 4] {
        [
            ("FUSED", u64::from(self.kind == PlanKind::Fused)),
            ("ITEM_BYTES", self.item_bytes),
            ("VECTOR_BYTES", self.vector_bytes),
            ("EVEN", u64::from(self.even)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use statecopy_proto::DataType;

    use super::*;

    #[test]
    fn there_are_exactly_so_many_classes_and_each_has_a_name_of_its_own() {
        let all = CudaClass::all();
        let names: BTreeSet<String> = all.iter().map(|class| class.name()).collect();
        assert_eq!((all.len(), names.len()), (COUNT, COUNT));
        for class in all {
            assert_eq!(CudaClass::named(&class.name()), Some(class));
        }
        assert_eq!(CudaClass::named("fused-item8-vector16-even"), None);
    }

    #[test]
    fn kimi_k3_gets_whole_vectors_and_whole_chunks() {
        let class = |base_mod_16| KernelClass {
            kind: PlanKind::Fused,
            dtype: DataType::Float32,
            payload_bytes: 12 * 128 * 128 * 4,
            base_mod_16,
        };
        assert_eq!(CudaClass::of(&class(0)).name(), "fused-item4-vector16-even");
        assert_eq!(CudaClass::of(&class(4)).name(), "fused-item4-vector4-even");
        assert_eq!(CudaClass::of(&class(8)).name(), "fused-item4-vector8-even");
    }

    proptest! {
        #[test]
        fn every_kernel_class_has_a_class_whose_vector_divides_all_that_it_meets(
            dtype in proptest::sample::select(DataType::ALL.to_vec()),
            elements in 1_u64..40_000,
            base in 0_u8..16,
        ) {
            let item = dtype.item_bytes();
            let base_mod_16 = base / u8::try_from(item).unwrap() * u8::try_from(item).unwrap();
            let fusible = matches!(dtype, DataType::Float32 | DataType::BFloat16);
            let kinds = [PlanKind::ByteCopy, PlanKind::Fused];
            for kind in kinds.into_iter().take(if fusible { 2 } else { 1 }) {
                let payload_bytes = elements * item;
                let class = CudaClass::of(&KernelClass { kind, dtype, payload_bytes, base_mod_16 });
                prop_assert!(CudaClass::all().contains(&class), "{class:?}");
                let vector = class.vector_bytes;
                prop_assert!(payload_bytes.is_multiple_of(vector));
                prop_assert!(u64::from(base_mod_16).is_multiple_of(vector));
                let wider = vector * 2;
                prop_assert!(
                    wider > VECTOR_BYTES_MAX
                        || !payload_bytes.is_multiple_of(wider)
                        || !u64::from(base_mod_16).is_multiple_of(wider)
                );
                prop_assert_eq!(class.even, payload_bytes % CHUNK_BYTES == 0);
            }
        }
    }
}
