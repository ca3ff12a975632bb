//! Request traces in the Mooncake format: one JSON object a line.
//!
//! ```json
//! {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 2353, 2354]}
//! ```
//!
//! `timestamp` is in milliseconds, lengths are in tokens, and `hash_ids` names the prompt's prefix in blocks of 512
//! tokens: equal ids at equal places mean an equal prefix. Other fields are ignored.

use serde::Deserialize;

use crate::workload::random::{GOLDEN, mix};

/// Tokens of one prefix block.
pub(crate) const BLOCK_TOKENS: u64 = 512;

/// The longest prompt and the longest answer, in tokens.
const TOKENS_MAX: u64 = 1 << 24;

/// The latest arrival: 285,000 years, so that microseconds of it and of what comes after can be counted.
const TIMESTAMP_MAX: u64 = 1 << 53;
/// The longest line, in bytes: a prompt of [`TOKENS_MAX`] tokens with ids of 20 digits.
pub(crate) const LINE_BYTES_MAX: u64 = 1 << 20;

/// Names a prefix of whole blocks: equal keys mean equal blocks from the prompt's first on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ChainKey(u64);

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TraceRequest {
    /// When it arrives.
    pub(crate) arrival_ms: u64,
    /// Tokens of its prompt, at least 1.
    pub(crate) input_tokens: u64,
    /// Tokens of its answer.
    pub(crate) output_tokens: u64,
    /// The key of the prefix that ends with each whole block.
    pub(crate) chain: Vec<ChainKey>,
}

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LineError {
    #[error("it is not the JSON object of a request")]
    NotObject,
    /// The reader's own line number is always 1 and would only mislead.
    #[error("it is not the JSON object of a request: {what}, column {column}")]
    Json { what: String, column: usize },
    #[error("{field} is {given}; the limit is {limit}")]
    TooLarge { field: &'static str, given: u64, limit: u64 },
    #[error("input_length is 0; a prompt has at least one token")]
    NoPrompt,
    #[error(
        "hash_ids has {given} blocks, but a prompt of {tokens} tokens has {wanted} of 512 tokens"
    )]
    Blocks { given: usize, tokens: u64, wanted: u64 },
    #[error("it is not UTF-8 text")]
    NotText,
    #[error("it is longer than {LINE_BYTES_MAX} bytes")]
    LineTooLong,
}

impl From<serde_json::Error> for LineError {
    fn from(error: serde_json::Error) -> Self {
        let (line, column, text) = (error.line(), error.column(), error.to_string());
        let place = format!(" at line {line} column {column}");
        let what = text.strip_suffix(&place).unwrap_or(&text).to_owned();
        Self::Json { what, column }
    }
}

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

impl TraceRequest {
    /// Reads one line.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn parse(line: &[u8]) -> Result<Self, LineError> {
        let text = std::str::from_utf8(line).map_err(|_| LineError::NotText)?;
        // The fields of an array would be read in their order.
        if !text.trim_start().starts_with('{') {
            return Err(LineError::NotObject);
        }
        let line: Line = serde_json::from_str(text)?;
        for (field, given, limit) in [
            ("timestamp", line.timestamp, TIMESTAMP_MAX),
            ("input_length", line.input_length, TOKENS_MAX),
            ("output_length", line.output_length, TOKENS_MAX),
        ] {
            if given > limit {
                return Err(LineError::TooLarge { field, given, limit });
            }
        }
        if line.input_length == 0 {
            return Err(LineError::NoPrompt);
        }
        // The last block may be partial; some traces leave it out.
        let whole = line.input_length / BLOCK_TOKENS;
        let wanted = line.input_length.div_ceil(BLOCK_TOKENS);
        let given = line.hash_ids.len();
        if !(whole..=wanted).contains(&(given as u64)) {
            return Err(LineError::Blocks { given, tokens: line.input_length, wanted });
        }
        let whole_ids = line.hash_ids.iter().take(usize::try_from(whole).unwrap_or(usize::MAX));
        Ok(Self {
            arrival_ms: line.timestamp,
            input_tokens: line.input_length,
            output_tokens: line.output_length,
            chain: chain(whole_ids.copied()),
        })
    }
}

fn chain(ids: impl Iterator<Item = u64>) -> Vec<ChainKey> {
    ids.scan(0_u64, |key, id| {
        *key = mix(key.wrapping_add(GOLDEN) ^ mix(id.wrapping_add(GOLDEN)));
        Some(ChainKey(*key))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        r#"{"timestamp": 3, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 9]}"#;

    fn error(line: &str) -> String {
        TraceRequest::parse(line.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_line_is_read_and_its_last_partial_block_is_no_prefix() {
        let request = TraceRequest::parse(GOOD.as_bytes()).unwrap();
        assert_eq!(request.arrival_ms, 3);
        assert_eq!(request.input_tokens, 1100);
        assert_eq!(request.output_tokens, 7);
        assert_eq!(request.chain.len(), 2);
    }

    #[test]
    fn keys_are_equal_exactly_for_equal_prefixes() {
        let keys = |ids: &[u64]| chain(ids.iter().copied());
        let [short, long, other] = [keys(&[1, 2]), keys(&[1, 2, 3]), keys(&[2, 2, 3])];
        assert_eq!(long[..2], short[..]);
        assert_ne!(other[1], long[1]);
        assert_ne!(other[2], long[2]);
        assert_ne!(keys(&[1, 2]), keys(&[2, 1]));
        assert_ne!(keys(&[0])[0], keys(&[0, 0])[1]);
    }

    #[test]
    fn a_broken_line_says_what_is_wrong_with_it() {
        assert!(error("{").contains("not the JSON object"));
        assert!(error("[1]").contains("not the JSON object"));
        assert!(error("[3, 1100, 7, [5, 6, 9]]").contains("not the JSON object"));
        assert!(error("{]").ends_with("column 2") && !error("{]").contains("line"));
        assert!(error(&GOOD.replace("timestamp", "time")).contains("timestamp"));
        assert!(error(&GOOD.replace(": 3", ": -3")).contains("-3"));
        for late in ["9007199254740993", "18446744073709551615"] {
            let late = error(&GOOD.replace(": 3", &format!(": {late}")));
            assert!(late.contains("timestamp is") && late.contains("limit"), "{late}");
        }
        assert!(TraceRequest::parse(GOOD.replace(": 3", ": 9007199254740992").as_bytes()).is_ok());
        assert!(error(&GOOD.replace("1100", "0")).contains("input_length is 0"));
        assert!(error(&GOOD.replace("1100", "1e3")).contains("1000"));
        assert!(error(&GOOD.replace("1100", "99999999999")).contains("the limit is 16777216"));
        let blocks = error(&GOOD.replace("1100", "2100"));
        assert!(blocks.contains("has 3 blocks") && blocks.contains("has 5 of 512"), "{blocks}");
        assert!(error(&GOOD.replace("1100", "700")).contains("has 3 blocks"));
        assert!(matches!(TraceRequest::parse(b"\xff").unwrap_err(), LineError::NotText));
    }
}
