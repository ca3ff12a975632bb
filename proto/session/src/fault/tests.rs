use super::*;

/// Two numbers that no sentence contains by chance.
const VALUE: u64 = 7_654_321;
const LIMIT: u64 = 1_234_567;

/// Whether the sentence about a subject tells the value and the limit.
fn tells(subject: Subject) -> (bool, bool) {
    match subject {
        Subject::Nothing | Subject::Registration | Subject::Inline => (false, false),
        Subject::Session
        | Subject::Binding
        | Subject::PackedRegion
        | Subject::IndexWidth
        | Subject::IndexSource
        | Subject::IndexRegion
        | Subject::FlagSource
        | Subject::FlagRegion
        | Subject::Hook
        | Subject::Device
        | Subject::Direction
        | Subject::Asleep => (true, false),
        Subject::Descriptor
        | Subject::Signature
        | Subject::Selected
        | Subject::Row
        | Subject::PackedBytes
        | Subject::PackedDtype
        | Subject::PackedAlignment
        | Subject::PackedRange
        | Subject::PackedOverlapsCache
        | Subject::PackedOverlapsIndices
        | Subject::PackedOverlapsFlags
        | Subject::IndexAlignment
        | Subject::IndexRange
        | Subject::FlagAlignment
        | Subject::FlagRange
        | Subject::Deadline
        | Subject::Queue
        | Subject::Lane
        | Subject::Slot => (true, true),
    }
}

#[test]
fn every_refusal_is_one_sentence_with_its_argument_value_and_limit() {
    for subject in Subject::ALL {
        let refusal = subject.fault(VALUE, LIMIT).to_refusal();
        let sentence = refusal.sentence();
        let (value, limit) = match subject {
            Subject::Signature => (format!("{VALUE:016x}"), format!("{LIMIT:016x}")),
            Subject::Deadline => (milliseconds(VALUE), milliseconds(LIMIT)),
            _ => (VALUE.to_string(), LIMIT.to_string()),
        };
        assert_eq!(
            (sentence.contains(&value), sentence.contains(&limit)),
            tells(subject),
            "{subject:?}: {sentence}"
        );
        assert!(sentence.starts_with(|first: char| !first.is_lowercase()), "{sentence}");
        assert!(!sentence.ends_with('.'), "{sentence}");
        assert_eq!(refusal.code(), subject.code());
        assert_eq!(refusal.subject().is_empty(), subject == Subject::Nothing);
    }
}

#[test]
fn no_two_subjects_and_no_two_codes_say_the_same() {
    let mut sentences: Vec<String> = Subject::ALL
        .iter()
        .filter(|subject| **subject != Subject::Nothing)
        .map(|subject| subject.fault(VALUE, LIMIT).sentence())
        .collect();
    let codes = RefusalCode::ALL.iter().filter(|code| **code != RefusalCode::NotSealed);
    sentences.extend(codes.map(|code| Fault::of(*code).sentence()));
    let count = sentences.len();
    sentences.sort();
    sentences.dedup();
    assert_eq!(sentences.len(), count);
}

#[test]
fn a_subject_is_known_by_its_number_and_no_other_number_is() {
    for (number, subject) in (0..).zip(Subject::ALL) {
        assert_eq!(subject.number(), number);
        assert_eq!(Subject::try_from(number), Ok(subject));
    }
    for number in u16::try_from(Subject::ALL.len()).unwrap()..=u16::MAX {
        assert_eq!(Subject::try_from(number), Err(UnknownSubject(number)));
    }
}

#[test]
fn dtypes_have_their_names_and_ranges_past_every_address_are_told() {
    let dtypes = Subject::PackedDtype.fault(1, 999).to_refusal();
    assert_eq!(dtypes.sentence(), "The packed buffer has dtype float32, the cache has number 999");
    let range = Subject::IndexRange.fault(u64::MAX, 4096).to_refusal();
    assert_eq!(
        range.sentence(),
        "The indices end past every address, but the memory that holds them has 4096 bytes"
    );
}
