//! Prepare, seal, publish, as types (contract: Plan).
//!
//! ```text
//!   prepare ──> Prepared ──seal──> Sealed ──publish──> Published
//! ```
//!
//! * `prepare`: every layer is compiled for and run on one row of scratch, or shares a table that was. A refusal names the
//!   layer, and nothing stays.
//! * `seal`: the configuration must be the one of the snapshot, and no hook may be present.
//! * `publish`: the targets that the executor looks requests up in. They hold no stream and no request buffer; a table
//!   holds no pointer either.
//!
//! Each step consumes the one before, so nothing unsealed can reach the executor.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::Arc;

use statecopy_kernels::device::{Configuration, Device};
use statecopy_kernels::plan::{self, KernelClass};
use statecopy_kernels::signature::Signature;
use statecopy_proto::{BindingId, Refusal, RefusalCode};

use crate::record::{
    LayerRecord, Progress, PublishedBinding, RegistrationRecord, SetRecord, Stage,
};

use super::compiled::{CompiledTable, Tables};
use super::scratch::Trials;
use super::table::{Bound, Regions, Target, Targets, Terms, awake};

/// Layers whose variants exist and ran once.
#[derive(Debug)]
pub(super) struct Prepared<D: Device> {
    snapshot: Configuration,
    layers: Vec<(LayerRecord, Arc<CompiledTable<D>>)>,
    sets: Vec<SetRecord>,
}

/// Layers whose launch tables cannot change any more.
#[derive(Debug)]
pub(super) struct Sealed<D: Device> {
    layers: Vec<(LayerRecord, Arc<CompiledTable<D>>)>,
    sets: Vec<SetRecord>,
}

/// Layers that are bound to memory.
#[derive(Debug)]
pub(super) struct Published<D: Device> {
    /// What the executor looks requests up in.
    pub(super) targets: Targets<D>,
    /// The layers and their tables, for a later rebind.
    pub(super) layers: Vec<(LayerRecord, Arc<CompiledTable<D>>)>,
    /// The binding sets, likewise.
    pub(super) sets: Vec<SetRecord>,
}

/// What becomes of a layer whose region is not registered.
#[derive(Debug, Clone, Copy)]
pub(super) enum Absent {
    /// The registration is refused.
    Refused,
    /// The layer sleeps.
    Asleep,
}

/// Prepares every layer of a registration, or none.
///
/// # Errors
/// HOOK_PRESENT, PREPARE_FAILED; the subject is the layer.
pub(super) fn prepare<D: Device>(
    device: &D,
    (tables, trials): (&mut Tables<D>, &mut Trials<D>),
    registration: RegistrationRecord,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared<D>, Refusal> {
    let snapshot = device.configuration();
    device.check_hooks()?;
    let total = u32::try_from(registration.layers.len()).unwrap_or(u32::MAX);
    let mut layers = Vec::with_capacity(registration.layers.len());
    for (done, layer) in (0..total).zip(registration.layers) {
        progress(Progress { stage: Stage::Preparing, layers_done: done, layers_total: total });
        let table = prepare_layer(device, (&mut *tables, &mut *trials), &snapshot, &layer)
            .map_err(|refusal| name_layer(&refusal, &layer.name))?;
        layers.push((layer, table));
    }
    progress(Progress { stage: Stage::Preparing, layers_done: total, layers_total: total });
    Ok(Prepared { snapshot, layers, sets: registration.sets })
}

fn prepare_layer<D: Device>(
    device: &D,
    (tables, trials): (&mut Tables<D>, &mut Trials<D>),
    snapshot: &Configuration,
    layer: &LayerRecord,
) -> Result<Arc<CompiledTable<D>>, Refusal> {
    let description = device.description();
    let placement = &layer.placement;
    let kind = plan::choose(&description.fused, placement.layout());
    let signature =
        Signature::new(description.uuid, placement.layout().clone(), placement.offset());
    if let Some(table) = tables.find(kind, &signature, snapshot) {
        return Ok(table);
    }
    let variants = device.compile(&KernelClass::of(kind, &signature))?;
    trials.run_every_variant(device, kind, &variants, &signature)?;
    let table = Arc::new(CompiledTable::new(kind, signature, variants, snapshot.clone()));
    tables.remember(&table);
    Ok(table)
}

impl<D: Device> Prepared<D> {
    /// Seals: compares the configuration with the snapshot and looks for hooks.
    ///
    /// # Errors
    /// CONFIGURATION_DRIFT naming what changed, HOOK_PRESENT.
    pub(super) fn seal(
        self,
        device: &D,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Sealed<D>, Refusal> {
        let total = u32::try_from(self.layers.len()).unwrap_or(u32::MAX);
        progress(Progress { stage: Stage::Sealing, layers_done: 0, layers_total: total });
        let drift = self.snapshot.drift(&device.configuration());
        if !drift.is_empty() {
            return Err(Refusal::new(
                RefusalCode::ConfigurationDrift,
                format!("The compiler configuration changed since prepare: {}", drift.join(", ")),
            )
            .about(drift.join(",")));
        }
        device.check_hooks()?;
        progress(Progress { stage: Stage::Sealing, layers_done: total, layers_total: total });
        Ok(Sealed { layers: self.layers, sets: self.sets })
    }
}

impl<D: Device> Sealed<D> {
    /// How many layers there are.
    pub(super) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Binds every layer and set to its memory.
    ///
    /// # Errors
    /// REGION_UNKNOWN, SIGNATURE_MISMATCH for a set of unequal layers, and what the device refuses to bind.
    pub(super) fn publish(
        self,
        device: &D,
        regions: &Regions<D>,
        absent: Absent,
        terms: Terms,
    ) -> Result<Published<D>, Refusal> {
        let Self { layers, sets } = self;
        let targets = match absent {
            Absent::Refused => bind_all(device, regions, &layers, &sets, terms)?,
            Absent::Asleep => bind_awake(device, regions, &layers, &sets, terms)?,
        };
        Ok(Published { targets, layers, sets })
    }
}

/// Binds layers to memory, with tables that are sealed already: what publish and rebind share.
fn bind_all<D: Device>(
    device: &D,
    regions: &Regions<D>,
    layers: &[(LayerRecord, Arc<CompiledTable<D>>)],
    sets: &[SetRecord],
    terms: Terms,
) -> Result<Targets<D>, Refusal> {
    let mut targets = Targets::<D>::with_capacity_and_hasher(
        layers.len() + sets.len(),
        BuildHasherDefault::default(),
    );
    for layer in layers {
        let target = Target::bind(device, regions, &[layer], terms)
            .map_err(|refusal| name_layer(&refusal, &layer.0.name))?;
        targets.insert(layer.0.binding, Bound::Awake(Arc::new(target)));
    }
    let by_id: HashMap<BindingId, _> =
        layers.iter().map(|layer| (layer.0.binding, layer)).collect();
    for set in sets {
        let members: Vec<_> = set.layers.iter().filter_map(|id| by_id.get(id).copied()).collect();
        if members.len() != set.layers.len() || members.is_empty() {
            return Err(unequal(set, "it names a layer of another registration"));
        }
        if members.iter().any(|layer| layer.1.hash != members[0].1.hash) {
            return Err(unequal(set, "its layers have different signatures"));
        }
        let mut target = Target::bind(device, regions, &members, terms)
            .map_err(|refusal| name_layer(&refusal, &set.name))?;
        target.is_set = true;
        targets.insert(set.binding, Bound::Awake(Arc::new(target)));
    }
    Ok(targets)
}

/// Binds what has memory; a layer whose region is gone stays asleep, and so does every set that it is in.
pub(super) fn bind_awake<D: Device>(
    device: &D,
    regions: &Regions<D>,
    layers: &[(LayerRecord, Arc<CompiledTable<D>>)],
    sets: &[SetRecord],
    terms: Terms,
) -> Result<Targets<D>, Refusal> {
    let (awake, asleep): (Vec<_>, Vec<_>) =
        layers.iter().cloned().partition(|(layer, _)| regions.contains_key(&layer.region));
    let sleeps =
        |set: &SetRecord| asleep.iter().any(|(layer, _)| set.layers.contains(&layer.binding));
    let (sleeping, waking): (Vec<_>, Vec<_>) = sets.iter().cloned().partition(sleeps);
    let mut targets = bind_all(device, regions, &awake, &waking, terms)?;
    targets.extend(asleep.iter().map(|(layer, _)| (layer.binding, Bound::Asleep)));
    targets.extend(sleeping.iter().map(|set| (set.binding, Bound::Asleep)));
    Ok(targets)
}

/// What the worker is told of its targets, in the order of their ids.
pub(super) fn published<D: Device>(targets: &Targets<D>) -> Vec<PublishedBinding> {
    let mut published: Vec<_> = awake(targets)
        .map(|(binding, target)| PublishedBinding {
            binding,
            signature: target.table.hash,
            plan: target.table.kind,
        })
        .collect();
    published.sort_by_key(|published| published.binding);
    published
}

fn unequal(set: &SetRecord, why: &str) -> Refusal {
    let sentence = format!("Binding set {} cannot be one request: {why}", set.name);
    Refusal::new(RefusalCode::SignatureMismatch, sentence).about(set.name.clone())
}

fn name_layer(refusal: &Refusal, layer: &str) -> Refusal {
    let sentence = if refusal.sentence().contains(layer) {
        refusal.sentence().to_owned()
    } else {
        format!("Layer {layer}: {}", refusal.sentence())
    };
    Refusal::new(refusal.code(), sentence).about(layer).remedied_by(refusal.remedy())
}
