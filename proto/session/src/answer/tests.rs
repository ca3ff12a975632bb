use proptest::prelude::*;

use super::*;

fn any_answer() -> impl Strategy<Value = Answer> {
    let moved = any::<[u64; 2]>()
        .prop_map(|[rows_copied, rows_masked]| Ok(Moved { rows_copied, rows_masked }));
    let refused = (
        prop::sample::select(RefusalCode::ALL.to_vec()),
        prop::sample::select(Subject::ALL.to_vec()),
        any::<[u64; 2]>(),
    )
        .prop_map(|(code, subject, [value, limit])| Err(Fault { code, subject, value, limit }));
    (prop_oneof![moved, refused], any::<u64>())
        .prop_map(|(result, executor_ns)| Answer { result, executor_ns })
}

proptest! {
    #[test]
    fn an_answer_survives_the_completion_slot(answer in any_answer()) {
        prop_assert_eq!(Answer::from_words(answer.to_words()), Ok(answer));
    }

    #[test]
    fn any_words_are_one_answer_or_a_typed_error(words in any::<[u64; ANSWER_WORDS]>(), small in 0_u64..4) {
        for outcome in [words[0], words[0] & 0x0000_003f_003f_0000 | small] {
            let words = [outcome, words[1], words[2], words[3]];
            if let Ok(answer) = Answer::from_words(words) {
                prop_assert_eq!(answer.to_words(), words);
            }
        }
    }
}

#[test]
fn each_unknown_number_is_told_by_its_own_name() {
    let with = |outcome| Answer::from_words([outcome, 1, 2, 3]);
    assert_eq!(with(0), Err(AnswerError::Outcome(0)));
    assert_eq!(with(3), Err(AnswerError::Outcome(3)));
    assert_eq!(with(MOVED | 1 << 16), Err(AnswerError::Outcome(MOVED | 1 << 16)));
    assert_eq!(
        with(REFUSED | 1 << 16 | 1 << 48),
        Err(AnswerError::Outcome(REFUSED | 1 << 16 | 1 << 48))
    );
    assert_eq!(with(REFUSED), Err(AnswerError::Code(0)));
    assert_eq!(with(REFUSED | 1 << 16 | 999 << 32), Err(AnswerError::Subject(999)));
}
