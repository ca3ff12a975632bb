use proptest::prelude::*;
use statecopy_proto::RefusalCode;

use super::*;
use crate::ring::SubmitterRing;

fn any_region() -> impl Strategy<Value = (RegionId, u64)> {
    (any::<u64>(), any::<u64>()).prop_map(|(region, offset)| (RegionId(region), offset))
}

fn any_request() -> impl Strategy<Value = CopyRequest> {
    let indices = (
        prop_oneof![Just(IndexWidth::Int32), Just(IndexWidth::Int64)],
        prop_oneof![
            Just(IndexSource::Inline),
            any_region().prop_map(|(region, offset)| IndexSource::Shared { region, offset }),
        ],
    );
    let flags = prop_oneof![
        Just(FlagSource::None),
        Just(FlagSource::Inline),
        any_region().prop_map(|(region, offset)| FlagSource::Shared { region, offset }),
    ];
    let direction = prop_oneof![Just(Direction::Gather), Just(Direction::Scatter)];
    let numbers = any::<[u64; 8]>();
    (direction, indices, flags, numbers, any::<[u32; 2]>(), any_region()).prop_map(
        |(direction, (width, source), flags, numbers, [lane, dtype], (region, offset))| {
            let [session, binding, signature, selected, bytes, deadline, submitted_at, _] = numbers;
            CopyRequest {
                session: SessionId(session),
                binding: BindingId(binding),
                signature: SignatureHash(signature),
                direction,
                selected,
                packed: Packed { region, offset, bytes, dtype },
                indices: Indices { width, source },
                flags,
                lane: Lane(lane),
                deadline: MonotonicNs(deadline),
                submitted_at: MonotonicNs(submitted_at),
            }
        },
    )
}

/// The first sequence of a ring: nobody else makes one.
fn first_sequence() -> Sequence {
    let parameters = crate::Parameters::new(1, 0).unwrap();
    let identity = crate::Identity {
        incarnation: statecopy_proto::Incarnation::new([0; 16]),
        session: SessionId(0),
    };
    let (_, memory) = crate::SessionMemory::create(parameters, identity).unwrap();
    SubmitterRing::new(memory.words()).next().unwrap().0
}

fn valid() -> CopyDescriptor {
    let request = CopyRequest {
        session: SessionId(1),
        binding: BindingId(2),
        signature: SignatureHash(3),
        direction: Direction::Scatter,
        selected: 4,
        packed: Packed { region: RegionId(5), offset: 16, bytes: 64, dtype: 1 },
        indices: Indices {
            width: IndexWidth::Int64,
            source: IndexSource::Shared { region: RegionId(6), offset: 32 },
        },
        flags: FlagSource::Shared { region: RegionId(7), offset: 48 },
        lane: Lane(8),
        deadline: MonotonicNs(9),
        submitted_at: MonotonicNs(10),
    };
    CopyDescriptor::encode(first_sequence(), &request)
}

proptest! {
    #[test]
    fn a_request_survives_the_ring(request in any_request()) {
        let descriptor = CopyDescriptor::encode(first_sequence(), &request);
        prop_assert_eq!(CopyDescriptor::from_words(descriptor.to_words()), descriptor);
        prop_assert_eq!(descriptor.parse(), Ok(request));
    }

    #[test]
    fn any_bytes_parse_or_are_refused_with_a_sentence(bytes in any::<[[u8; 32]; 4]>()) {
        let descriptor = CopyDescriptor::read_from_bytes(bytes.as_flattened()).unwrap();
        match descriptor.parse() {
            // Nothing is lost of what was understood.
            Ok(request) => prop_assert_eq!(
                CopyDescriptor::encode(first_sequence(), &request).parse(), Ok(request)
            ),
            Err(fault) => prop_assert!(!fault.to_refusal().sentence().is_empty()),
        }
    }

    #[test]
    fn bytes_with_small_enums_parse_or_are_refused(
        bytes in any::<[[u8; 32]; 4]>(), small in prop::array::uniform5(0_u8..10)
    ) {
        let mut descriptor = CopyDescriptor::read_from_bytes(bytes.as_flattened()).unwrap();
        let [direction, index_source, index_width, flag_source, completion] = small;
        descriptor.reserved = [0; 3];
        (descriptor.direction, descriptor.index_source) = (direction, index_source);
        (descriptor.index_width, descriptor.flag_source) = (index_width, flag_source);
        descriptor.completion = completion;
        let known = (1..=2).contains(&direction)
            && (1..=2).contains(&index_source)
            && [4, 8].contains(&index_width)
            && flag_source <= 2
            && completion == 1;
        prop_assert_eq!(descriptor.parse().is_ok(), known);
    }

    #[test]
    fn inline_ranges_stay_in_the_slot_and_apart_or_are_refused(
        mut request in any_request(), small in prop::option::of(0_u64..5000), pages in 0_u32..5
    ) {
        if let Some(selected) = small {
            request.selected = selected;
        }
        let limit = u64::from(pages * 4096);
        match request.inline_ranges(pages * 4096) {
            Ok(InlineRanges { indices, flags }) => {
                prop_assert_eq!(indices.is_some(), request.indices.source == IndexSource::Inline);
                prop_assert_eq!(flags.is_some(), request.flags == FlagSource::Inline);
                let indices = indices.unwrap_or(0..0);
                prop_assert!(indices.end <= limit);
                if let Some(flags) = flags {
                    prop_assert!(flags.start >= indices.end && flags.start % 16 == 0);
                    prop_assert!(flags.end <= limit);
                    prop_assert_eq!(flags.end - flags.start, request.selected);
                }
            }
            Err(fault) => {
                prop_assert!(fault.value > limit && fault.limit == limit);
                prop_assert_eq!(fault.code, RefusalCode::OutOfRegion);
            }
        }
    }
}

#[test]
fn each_unknown_number_is_refused_by_its_own_name() {
    assert!(valid().parse().is_ok());
    let refused = |change: fn(&mut CopyDescriptor)| {
        let mut descriptor = valid();
        change(&mut descriptor);
        descriptor.parse().unwrap_err()
    };
    let direction = refused(|descriptor| descriptor.direction = 3);
    assert_eq!(direction, Subject::Direction.fault(3, 0));
    let width = refused(|descriptor| descriptor.index_width = 2);
    assert_eq!(width, Subject::IndexWidth.fault(2, 0));
    let indices = refused(|descriptor| descriptor.index_source = 0);
    assert_eq!(indices, Subject::IndexSource.fault(0, 0));
    let flags = refused(|descriptor| descriptor.flag_source = 3);
    assert_eq!(flags, Subject::FlagSource.fault(3, 0));
    let completion = refused(|descriptor| descriptor.completion = 2);
    assert_eq!(completion, Subject::Descriptor.fault(124, 2));
    let reserved = refused(|descriptor| descriptor.reserved[2] = 9);
    assert_eq!(reserved, Subject::Descriptor.fault(127, 9));
}

#[test]
fn a_count_that_overflows_is_refused_and_not_wrapped() {
    let mut request = valid().parse().unwrap();
    request.selected = u64::MAX / 8 + 1;
    request.indices.source = IndexSource::Inline;
    assert_eq!(request.inline_ranges(4096), Err(Subject::IndexRange.fault(u64::MAX, 4096)));
    request.indices.source = IndexSource::Shared { region: RegionId(6), offset: 0 };
    request.selected = u64::MAX;
    request.flags = FlagSource::Inline;
    assert_eq!(request.inline_ranges(4096), Err(Subject::FlagRange.fault(u64::MAX, 4096)));
}
