//! Armed slots of captured graphs on the link.

use serde::{Deserialize, Serialize};
use statecopy_session::layout::DESCRIPTOR_WORDS;
use statecopy_session::{CopyDescriptor, PairNumber, SlotNumber};

use super::LinkError;
use crate::record::SlotRecord;

/// A [`SlotRecord`] on the link: its copy as a descriptor, whose sequence is the slot.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct SlotMessage {
    /// The graph's pair.
    pub pair: u32,
    /// The words of the descriptor.
    pub descriptor: [u64; DESCRIPTOR_WORDS],
}

impl From<&SlotRecord> for SlotMessage {
    fn from(record: &SlotRecord) -> Self {
        let SlotRecord { pair, slot, request, patience_ns } = record;
        let descriptor = CopyDescriptor::encode_ordered(slot.sequence(), request, *patience_ns);
        Self { pair: pair.get(), descriptor: descriptor.to_words() }
    }
}

impl TryFrom<SlotMessage> for SlotRecord {
    type Error = LinkError;

    fn try_from(message: SlotMessage) -> Result<Self, LinkError> {
        let descriptor = CopyDescriptor::from_words(message.descriptor);
        let none = LinkError::OutOfTurn("a slot that no graph has");
        let (Some(pair), Some(slot), Ok(request)) = (
            PairNumber::of_graph(message.pair),
            SlotNumber::new(descriptor.sequence),
            descriptor.parse_ordered(),
        ) else {
            return Err(none);
        };
        Ok(Self { pair, slot, request, patience_ns: descriptor.deadline_ns })
    }
}
