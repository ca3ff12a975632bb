//! What a session has published, as the supervisor remembers it.

use statecopy_proto::{BindingId, PlanKind, SignatureHash};

use crate::record::{LayerRecord, PublishedBinding, RebindRecord, RegistrationRecord, SetRecord};

/// One published layer.
#[derive(Debug, Clone)]
pub(crate) struct PublishedLayer {
    /// What was registered, at its place now.
    pub(crate) record: LayerRecord,
    /// The hash that requests carry.
    pub(crate) signature: SignatureHash,
    /// The plan kind.
    pub(crate) plan: PlanKind,
}

/// One published set.
#[derive(Debug, Clone)]
pub(crate) struct PublishedSet {
    /// What was registered.
    pub(crate) record: SetRecord,
    /// The hash that requests carry.
    pub(crate) signature: SignatureHash,
}

/// Everything that one session has published.
#[derive(Debug, Clone, Default)]
pub(crate) struct Publication {
    /// The layers, in the order of the registration.
    pub(crate) layers: Vec<PublishedLayer>,
    /// The sets, in the order of the registration.
    pub(crate) sets: Vec<PublishedSet>,
}

impl Publication {
    /// Joins what was registered with what the device process answered. `None` when the answer lacks a binding.
    pub(crate) fn join(
        registration: RegistrationRecord,
        published: &[PublishedBinding],
    ) -> Option<Self> {
        let find = |binding: BindingId| published.iter().find(|answer| answer.binding == binding);
        let layers = registration.layers.into_iter().map(|record| {
            find(record.binding).map(|answer| PublishedLayer {
                signature: answer.signature,
                plan: answer.plan,
                record,
            })
        });
        let layers = layers.collect::<Option<Vec<_>>>()?;
        let sets = registration.sets.into_iter().map(|record| {
            find(record.binding).map(|answer| PublishedSet { signature: answer.signature, record })
        });
        Some(Self { layers, sets: sets.collect::<Option<Vec<_>>>()? })
    }

    /// A layer of that binding.
    pub(crate) fn layer(&self, binding: BindingId) -> Option<&PublishedLayer> {
        self.layers.iter().find(|layer| layer.record.binding == binding)
    }

    /// The same with layers moved.
    pub(crate) fn moved(&self, moves: &[RebindRecord]) -> Self {
        let mut moved = self.clone();
        for layer in &mut moved.layers {
            if let Some(to) = moves.iter().find(|to| to.binding == layer.record.binding) {
                layer.record.region = to.region;
                layer.record.placement = to.placement.clone();
            }
        }
        moved
    }
}
