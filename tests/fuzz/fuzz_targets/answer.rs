//! The answer to one request, as a worker reads it, and the sentence that is made of a refusal.
#![no_main]

use libfuzzer_sys::fuzz_target;
use statecopy_session::Answer;

fuzz_target!(|words: [u64; 4]| {
    let Ok(answer) = Answer::from_words(words) else { return };
    match answer.result {
        // Every word of it stands for something.
        Ok(_) => assert_eq!(answer.to_words(), words),
        Err(fault) => {
            assert_eq!(answer.to_words(), words);
            let refusal = fault.to_refusal();
            assert_eq!(refusal.code(), fault.code);
            assert!(!refusal.sentence().is_empty());
        }
    }
});
