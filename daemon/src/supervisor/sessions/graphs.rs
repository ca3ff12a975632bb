//! Which slots of captured graphs a session has armed.

use statecopy_proto::{Refusal, RefusalCode, SessionId};
use statecopy_session::{PairNumber, SlotNumber};

use super::{Sessions, within};

impl Sessions {
    /// Whether a slot may be armed.
    ///
    /// # Errors
    /// QUOTA_EXCEEDED when it is armed, and at `limits.graph_slots_max`.
    pub(crate) fn check_slot(
        &self,
        id: SessionId,
        pair: PairNumber,
        slot: SlotNumber,
    ) -> Result<(), Refusal> {
        let max = self.limits.graph_slots_max;
        self.with(id, |session| {
            if session.graphs.get(&pair).is_some_and(|slots| slots.contains(&slot)) {
                let (pair, slot) = (pair.get(), slot.get());
                let sentence = format!("Slot {slot} of pair {pair} is armed: a slot is one copy");
                return Err(Refusal::new(RefusalCode::QuotaExceeded, sentence)
                    .about("slot")
                    .remedied_by("Arm the next slot, or disarm the pair first."));
            }
            let wanted = session.armed_slots() + 1;
            within("armed slots of graphs", "limits.graph_slots_max", wanted, max.into())
        })
    }

    /// A slot is armed.
    pub(crate) fn add_slot(
        &self,
        id: SessionId,
        pair: PairNumber,
        slot: SlotNumber,
    ) -> Result<(), Refusal> {
        self.with(id, |session| {
            session.graphs.entry(pair).or_default().insert(slot);
            Ok(())
        })
    }

    /// The slots of a pair are disarmed.
    pub(crate) fn remove_slots(&self, id: SessionId, pair: PairNumber) -> Result<(), Refusal> {
        self.with(id, |session| {
            session.graphs.remove(&pair);
            Ok(())
        })
    }
}
