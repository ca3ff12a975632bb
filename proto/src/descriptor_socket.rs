//! The records of the descriptor socket.
//!
//! The socket is SOCK_SEQPACKET: one message is one record, little-endian, and descriptors travel beside it. The
//! connection's life is the session's life: whoever closes it ends the session.
//!
//! ```text
//! byte 0   magic "scds"
//! byte 4   u16 version (1)
//! byte 6   u16 kind
//! byte 8   the kind's fields, nothing after them
//! ```
//!
//! | kind | record | fields | descriptors beside it |
//! | ---: | --- | --- | --- |
//! | 1 | [`WorkerRecord::Attach`] | token, 32 bytes | none |
//! | 2 | [`WorkerRecord::Descriptors`] | u64 tag, u32 count, u32 zero | `count` |
//! | 129 | [`DaemonRecord::Attached`] | none | [`ATTACHED_DESCRIPTORS`], or none |
//! | 130 | [`DaemonRecord::Received`] | u64 tag, u32 total, u32 zero | none |
//! | 131 | [`DaemonRecord::Refused`] | u16 code, u16 length, the sentence | none |
//! | 132 | [`DaemonRecord::DeviceProcess`] | none | one |
//! | 133 | [`DaemonRecord::SessionEnded`] | u16 length, the sentence | none |
//!
//! A worker says `Attach` first and hears `Attached` or `Refused`. Every `Descriptors` is answered by `Received` or
//! `Refused`, in order; records of one tag add up, so that a large allocation is sent in batches. After `Refused` the
//! daemon closes a connection that is not attached; an attached one goes on.
//!
//! With `Attached` come, in this order: the session memory (a sealed memfd), the executor's doorbell (an eventfd that the
//! worker rings while the executor sleeps), and a pidfd of the device process. A daemon that serves no rings sends none of
//! them: then copies go over gRPC. `DeviceProcess` comes by itself, also between a record and its answer, when another device
//! process serves the same session memory: its pidfd replaces the earlier one.
//!
//! `SessionEnded` comes by itself, last, when the daemon ends an attached session and lives on. Nothing of the session runs
//! any more then: what its ring does not say is answered never will be. A connection that is closed without it tells that the
//! daemon is gone; the device process may answer yet, until it is gone too.

use std::fmt;

use crate::{Refusal, RefusalCode};

/// The version in every record.
pub const RECORD_VERSION: u16 = 1;
/// The longest record, in bytes.
pub const RECORD_BYTES_MAX: usize = HEADER_BYTES + 4 + SENTENCE_BYTES_MAX;
/// The longest sentence of a record, in bytes; a longer one is cut.
pub const SENTENCE_BYTES_MAX: usize = 400;
/// Descriptors that one message carries at most.
pub const DESCRIPTORS_MAX: u32 = 64;
/// Descriptors that come with [`DaemonRecord::Attached`] where the daemon serves the session's ring: session memory,
/// executor's doorbell, pidfd of the device process. Where it does not, none come.
pub const ATTACHED_DESCRIPTORS: u32 = 3;
/// Descriptors that come with [`DaemonRecord::DeviceProcess`]: the pidfd.
pub const DEVICE_PROCESS_DESCRIPTORS: u32 = 1;
/// Bytes of the one-time token.
pub const TOKEN_BYTES: usize = 32;

const MAGIC: [u8; 4] = *b"scds";
const HEADER_BYTES: usize = 8;
const ATTACH: u16 = 1;
const DESCRIPTORS: u16 = 2;
const ATTACHED: u16 = 129;
const RECEIVED: u16 = 130;
const REFUSED: u16 = 131;
const DEVICE_PROCESS: u16 = 132;
const SESSION_ENDED: u16 = 133;

/// Why bytes are no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Too short, or longer than its kind.
    #[error("A record of this kind, or a part of it, has {wanted} bytes, not {given}")]
    Length {
        /// What the kind needs.
        wanted: usize,
        /// What was there.
        given: usize,
    },
    /// The first bytes are not the magic.
    #[error("The message does not begin with the magic of the descriptor socket")]
    Magic,
    /// Another version.
    #[error("The record has version {0}, where {RECORD_VERSION} is spoken")]
    Version(u16),
    /// A kind that this side does not listen to.
    #[error("{0} is no kind of record that this side listens to")]
    Kind(u16),
    /// A count of descriptors outside its range.
    #[error("A message carries 1 to {DESCRIPTORS_MAX} descriptors, not {0}")]
    Count(u32),
    /// Bytes that must be zero are not.
    #[error("Reserved bytes are not zero")]
    Reserved,
    /// A refusal's code is not in the list.
    #[error("{0} is no refusal code")]
    Code(u16),
    /// A sentence is too long or is not UTF-8.
    #[error("The sentence of a record is not UTF-8 of at most {SENTENCE_BYTES_MAX} bytes")]
    Sentence,
}

/// The one-time token that ties a connection to a session. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Token([u8; TOKEN_BYTES]);

impl Token {
    /// A token of these bytes.
    #[must_use]
    pub fn new(bytes: [u8; TOKEN_BYTES]) -> Self {
        Self(bytes)
    }

    /// Reads the token of an `OpenReply`; `None` when it has another length.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// The bytes on the wire.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; TOKEN_BYTES] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// What a worker says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerRecord {
    /// Ties this connection to the session that was given the token. The first record.
    Attach {
        /// The one-time token.
        token: Token,
    },
    /// Descriptors for a region that is registered afterwards. Records of one tag add up.
    Descriptors {
        /// The name under which the region's registration refers to them.
        tag: u64,
        /// How many come beside this record: 1 to [`DESCRIPTORS_MAX`].
        count: u32,
    },
}

/// What the daemon says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DaemonRecord {
    /// The session lives as long as this connection. Beside it the session's ring, if the daemon serves one: see
    /// [`ATTACHED_DESCRIPTORS`].
    Attached,
    /// Another device process serves the session's ring from now on. Its pidfd comes beside it. Nobody asked.
    DeviceProcess,
    /// Descriptors arrived.
    Received {
        /// Under this tag.
        tag: u64,
        /// All that arrived under it so far.
        total: u32,
    },
    /// What was asked was refused.
    Refused {
        /// The code.
        code: RefusalCode,
        /// What was wrong, cut to [`SENTENCE_BYTES_MAX`] bytes.
        sentence: String,
    },
    /// The daemon ended the session and lives on. The last record; nobody asked.
    SessionEnded {
        /// Why, cut to [`SENTENCE_BYTES_MAX`] bytes.
        sentence: String,
    },
}

impl WorkerRecord {
    /// The bytes of one message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Attach { token } => {
                let mut bytes = header(ATTACH);
                bytes.extend_from_slice(token.as_bytes());
                bytes
            }
            Self::Descriptors { tag, count } => tagged(DESCRIPTORS, *tag, *count),
        }
    }

    /// Reads one message.
    ///
    /// # Errors
    /// When the bytes are not exactly one record of a worker.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let (kind, body) = split(bytes)?;
        match kind {
            ATTACH => {
                let token = exact::<TOKEN_BYTES>(body)?;
                Ok(Self::Attach { token: Token(*token) })
            }
            DESCRIPTORS => {
                let (tag, count) = read_tagged(body)?;
                if !(1..=DESCRIPTORS_MAX).contains(&count) {
                    return Err(RecordError::Count(count));
                }
                Ok(Self::Descriptors { tag, count })
            }
            other => Err(RecordError::Kind(other)),
        }
    }
}

impl DaemonRecord {
    /// The record that carries a refusal.
    #[must_use]
    pub fn refused(refusal: &Refusal) -> Self {
        Self::Refused { code: refusal.code(), sentence: cut(refusal.sentence()).to_owned() }
    }

    /// The bytes of one message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Attached => header(ATTACHED),
            Self::DeviceProcess => header(DEVICE_PROCESS),
            Self::Received { tag, total } => tagged(RECEIVED, *tag, *total),
            Self::Refused { code, sentence } => {
                let mut bytes = header(REFUSED);
                bytes.extend_from_slice(&code.number().to_le_bytes());
                write_sentence(&mut bytes, sentence);
                bytes
            }
            Self::SessionEnded { sentence } => {
                let mut bytes = header(SESSION_ENDED);
                write_sentence(&mut bytes, sentence);
                bytes
            }
        }
    }

    /// Reads one message.
    ///
    /// # Errors
    /// When the bytes are not exactly one record of a daemon.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let (kind, body) = split(bytes)?;
        match kind {
            ATTACHED => exact::<0>(body).map(|_| Self::Attached),
            DEVICE_PROCESS => exact::<0>(body).map(|_| Self::DeviceProcess),
            RECEIVED => read_tagged(body).map(|(tag, total)| Self::Received { tag, total }),
            REFUSED => read_refused(body),
            SESSION_ENDED => read_sentence(body).map(|sentence| Self::SessionEnded { sentence }),
            other => Err(RecordError::Kind(other)),
        }
    }
}

fn header(kind: u16) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&RECORD_VERSION.to_le_bytes());
    bytes.extend_from_slice(&kind.to_le_bytes());
    bytes
}

fn tagged(kind: u16, tag: u64, number: u32) -> Vec<u8> {
    let mut bytes = header(kind);
    bytes.extend_from_slice(&tag.to_le_bytes());
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes
}

/// The kind, and what follows the header.
fn split(bytes: &[u8]) -> Result<(u16, &[u8]), RecordError> {
    let Some((header, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Err(RecordError::Length { wanted: HEADER_BYTES, given: bytes.len() });
    };
    let [m0, m1, m2, m3, v0, v1, k0, k1] = *header;
    if [m0, m1, m2, m3] != MAGIC {
        return Err(RecordError::Magic);
    }
    let version = u16::from_le_bytes([v0, v1]);
    if version != RECORD_VERSION {
        return Err(RecordError::Version(version));
    }
    Ok((u16::from_le_bytes([k0, k1]), body))
}

/// A body of exactly `N` bytes.
fn exact<const N: usize>(body: &[u8]) -> Result<&[u8; N], RecordError> {
    body.try_into().map_err(|_| RecordError::Length {
        wanted: HEADER_BYTES + N,
        given: HEADER_BYTES + body.len(),
    })
}

fn read_tagged(body: &[u8]) -> Result<(u64, u32), RecordError> {
    let [t0, t1, t2, t3, t4, t5, t6, t7, n0, n1, n2, n3, zero @ ..] = *exact::<16>(body)?;
    if zero != [0; 4] {
        return Err(RecordError::Reserved);
    }
    let tag = u64::from_le_bytes([t0, t1, t2, t3, t4, t5, t6, t7]);
    Ok((tag, u32::from_le_bytes([n0, n1, n2, n3])))
}

fn read_refused(body: &[u8]) -> Result<DaemonRecord, RecordError> {
    let Some((&code, sentence)) = body.split_first_chunk::<2>() else {
        let given = HEADER_BYTES + body.len();
        return Err(RecordError::Length { wanted: HEADER_BYTES + 4, given });
    };
    let sentence = read_sentence(sentence)?;
    let number = u16::from_le_bytes(code);
    let code = RefusalCode::try_from(number).map_err(|_| RecordError::Code(number))?;
    Ok(DaemonRecord::Refused { code, sentence })
}

/// As much of a sentence as a record carries.
fn cut(sentence: &str) -> &str {
    &sentence[..sentence.floor_char_boundary(SENTENCE_BYTES_MAX)]
}

fn write_sentence(bytes: &mut Vec<u8>, sentence: &str) {
    let sentence = cut(sentence).as_bytes();
    let length = u16::try_from(sentence.len()).unwrap_or(u16::MAX);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(sentence);
}

/// A sentence that ends its record.
fn read_sentence(body: &[u8]) -> Result<String, RecordError> {
    let Some((&length, sentence)) = body.split_first_chunk::<2>() else {
        return Err(RecordError::Length { wanted: 2, given: body.len() });
    };
    let length = usize::from(u16::from_le_bytes(length));
    if length > SENTENCE_BYTES_MAX {
        return Err(RecordError::Sentence);
    }
    if sentence.len() != length {
        return Err(RecordError::Length { wanted: 2 + length, given: body.len() });
    }
    let sentence = std::str::from_utf8(sentence).map_err(|_| RecordError::Sentence)?;
    Ok(sentence.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn worker_records() -> impl Strategy<Value = WorkerRecord> {
        prop_oneof![
            any::<[u8; TOKEN_BYTES]>()
                .prop_map(|token| WorkerRecord::Attach { token: Token::new(token) }),
            (any::<u64>(), 1..=DESCRIPTORS_MAX)
                .prop_map(|(tag, count)| WorkerRecord::Descriptors { tag, count }),
        ]
    }

    fn daemon_records() -> impl Strategy<Value = DaemonRecord> {
        prop_oneof![
            Just(DaemonRecord::Attached),
            Just(DaemonRecord::DeviceProcess),
            (any::<u64>(), any::<u32>())
                .prop_map(|(tag, total)| DaemonRecord::Received { tag, total }),
            (0..RefusalCode::ALL.len(), ".{0,150}").prop_map(|(at, sentence)| {
                DaemonRecord::refused(&Refusal::new(RefusalCode::ALL[at], sentence))
            }),
            ".{0,100}".prop_map(|sentence| DaemonRecord::SessionEnded { sentence }),
        ]
    }

    proptest! {
        #[test]
        fn every_record_is_read_back_as_it_was_written(
            worker in worker_records(), daemon in daemon_records(),
        ) {
            let bytes = worker.encode();
            prop_assert!(bytes.len() <= RECORD_BYTES_MAX);
            prop_assert_eq!(WorkerRecord::decode(&bytes), Ok(worker));
            let bytes = daemon.encode();
            prop_assert!(bytes.len() <= RECORD_BYTES_MAX);
            prop_assert_eq!(DaemonRecord::decode(&bytes), Ok(daemon));
        }

        #[test]
        fn arbitrary_bytes_are_a_record_or_a_typed_error(
            mut bytes in vec(any::<u8>(), 0..500), valid in any::<bool>(),
        ) {
            if valid && bytes.len() >= HEADER_BYTES {
                // Past the magic and the version, so that the bodies are reached.
                bytes[..6].copy_from_slice(&header(0)[..6]);
                bytes[7] = 0;
            }
            // What is accepted is exactly what would have been written.
            if let Ok(record) = WorkerRecord::decode(&bytes) {
                prop_assert_eq!(record.encode(), bytes.clone());
            }
            if let Ok(record) = DaemonRecord::decode(&bytes) {
                prop_assert_eq!(record.encode(), bytes);
            }
        }

        #[test]
        fn a_record_with_one_byte_more_or_less_is_refused(daemon in daemon_records()) {
            let mut bytes = daemon.encode();
            let last = bytes.pop();
            prop_assert!(DaemonRecord::decode(&bytes).is_err());
            bytes.extend(last);
            bytes.push(0);
            prop_assert!(DaemonRecord::decode(&bytes).is_err());
        }
    }

    #[test]
    fn each_kind_of_damage_has_its_own_error() {
        let good = WorkerRecord::Descriptors { tag: 7, count: 3 }.encode();
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            WorkerRecord::decode(&bytes)
        };
        assert_eq!(with(0, b'x'), Err(RecordError::Magic));
        assert_eq!(with(4, 2), Err(RecordError::Version(2)));
        assert_eq!(with(6, 130), Err(RecordError::Kind(130)));
        assert_eq!(with(16, 0), Err(RecordError::Count(0)));
        assert_eq!(with(16, 65), Err(RecordError::Count(65)));
        assert_eq!(with(23, 1), Err(RecordError::Reserved));
        assert_eq!(
            WorkerRecord::decode(&good[..5]),
            Err(RecordError::Length { wanted: HEADER_BYTES, given: 5 })
        );
        let refused = |code: u16, length: u16, sentence: &[u8]| {
            let mut bytes = header(REFUSED);
            bytes.extend_from_slice(&code.to_le_bytes());
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend_from_slice(sentence);
            DaemonRecord::decode(&bytes)
        };
        assert_eq!(refused(30, 0, b""), Err(RecordError::Code(30)));
        assert_eq!(refused(1, 1, &[0xff]), Err(RecordError::Sentence));
        assert_eq!(refused(1, 401, &[b'a'; 401]), Err(RecordError::Sentence));
    }

    #[test]
    fn a_long_sentence_is_cut_between_characters() {
        let refusal = Refusal::new(RefusalCode::QuotaExceeded, "ä".repeat(300));
        let DaemonRecord::Refused { sentence, .. } = DaemonRecord::refused(&refusal) else {
            panic!("another record");
        };
        assert_eq!(sentence, "ä".repeat(200));
    }

    #[test]
    fn a_token_is_not_shown() {
        assert_eq!(format!("{:?}", Token::new([0xab; TOKEN_BYTES])), "Token(..)");
    }
}
