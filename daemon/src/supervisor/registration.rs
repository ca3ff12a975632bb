//! From the wire to records: every check of a registration that needs no device.
//!
//! Whoever holds a [`RegistrationRecord`] from here knows that every layer has a valid layout inside a region of its
//! session, that no two payloads overlap, and that each set has layers of one signature.

use std::collections::{BTreeMap, BTreeSet};

use statecopy_kernels::device::AllocationId;
use statecopy_kernels::layout::{CacheLayout, LayoutError, Placement, payloads_overlap};
use statecopy_kernels::signature::{DeviceUuid, Signature};
use statecopy_proto::{BindingId, DataType, Refusal, RefusalCode, RegionId, SignatureHash, v1};

use super::sessions::{HeldRegion, Publication};
use crate::config::Limits;
use crate::record::{LayerRecord, RebindRecord, RegistrationRecord, SetRecord};

/// The longest name of a layer or set, in bytes.
const NAME_BYTES_MAX: usize = 256;

/// What a registration is checked against.
#[derive(Debug)]
pub(crate) struct Ground<'a> {
    /// The device of the session.
    pub(crate) device: DeviceUuid,
    /// The regions of the session.
    pub(crate) regions: &'a BTreeMap<RegionId, HeldRegion>,
    /// The daemon's limits.
    pub(crate) limits: &'a Limits,
}

/// A layer that passed, with what later checks compare.
struct Checked {
    record: LayerRecord,
    signature: SignatureHash,
    allocation: AllocationId,
}

impl Ground<'_> {
    /// Checks a registration. `bindings` gives a new id for each layer and set.
    ///
    /// # Errors
    /// The first refusal; it names the layer or set, the value and the limit.
    pub(crate) fn parse(
        &self,
        layers: Vec<v1::LayerSpec>,
        sets: Vec<v1::BindingSetSpec>,
        bindings: impl IntoIterator<Item = BindingId>,
    ) -> Result<RegistrationRecord, Refusal> {
        self.check_counts(&layers, &sets)?;
        let mut bindings = bindings.into_iter();
        let mut names = BTreeSet::new();
        let mut checked: Vec<Checked> = Vec::with_capacity(layers.len());
        for layer in layers {
            check_name("layer", &layer.name, &mut names)?;
            checked.push(self.layer(layer, next(&mut bindings)?)?);
        }
        check_overlap(&checked)?;
        let mut set_names = BTreeSet::new();
        let mut records = Vec::with_capacity(sets.len());
        for set in sets {
            check_name("set", &set.name, &mut set_names)?;
            records.push(bind_set(set, next(&mut bindings)?, &checked)?);
        }
        let layers = checked.into_iter().map(|checked| checked.record).collect();
        Ok(RegistrationRecord { layers, sets: records })
    }

    /// Checks a rebind against what is published.
    ///
    /// # Errors
    /// STALE_PLAN for a binding that is not published, SIGNATURE_MISMATCH for another layout, and whatever a
    /// registration is refused with.
    pub(crate) fn parse_rebind(
        &self,
        layers: Vec<v1::RebindLayer>,
        published: &Publication,
    ) -> Result<Vec<RebindRecord>, Refusal> {
        if layers.is_empty() {
            return Err(Refusal::new(RefusalCode::LayoutInvalid, "The rebind names no layer"));
        }
        let mut seen = BTreeSet::new();
        let mut moves = Vec::with_capacity(layers.len());
        for layer in layers {
            let binding = BindingId(layer.binding_id);
            let current = published.layer(binding).ok_or_else(|| {
                let sentence = format!("Binding {binding} is no published layer of this session");
                Refusal::new(RefusalCode::StalePlan, sentence).about("binding_id")
            })?;
            let name = &current.record.name;
            if !seen.insert(binding) {
                let sentence = format!("Layer {name}: the rebind names it twice");
                return Err(Refusal::new(RefusalCode::LayoutInvalid, sentence).about(name));
            }
            let region = RegionId(layer.region_id);
            let placement = self.place(name, layer.layout, region, layer.offset_bytes)?;
            let signature = self.signature(&placement);
            if signature != current.signature {
                let sentence = format!(
                    "Layer {name}: its new memory has signature {signature}, its plan was sealed for {}",
                    current.signature
                );
                return Err(Refusal::new(RefusalCode::SignatureMismatch, sentence).about(name));
            }
            moves.push(RebindRecord { binding, region, placement });
        }
        self.check_moved(&published.moved(&moves))?;
        Ok(moves)
    }

    fn check_counts(
        &self,
        layers: &[v1::LayerSpec],
        sets: &[v1::BindingSetSpec],
    ) -> Result<(), Refusal> {
        if layers.is_empty() {
            let sentence = "The registration names no layer";
            return Err(Refusal::new(RefusalCode::LayoutInvalid, sentence)
                .remedied_by("Register at least one layer, or release the layers instead."));
        }
        let max = u64::from(self.limits.layers_max);
        let setting = "limits.layers_max";
        super::sessions::within("layers", setting, layers.len() as u64, max)?;
        super::sessions::within("sets", setting, sets.len() as u64, max)
    }

    fn layer(&self, layer: v1::LayerSpec, binding: BindingId) -> Result<Checked, Refusal> {
        let name = layer.name;
        let region = RegionId(layer.region_id);
        let placement = self.place(&name, layer.layout, region, layer.offset_bytes)?;
        self.check_selected(&name, layer.max_selected)?;
        let signature = self.signature(&placement);
        if layer.signature != 0 && SignatureHash(layer.signature) != signature {
            let given = SignatureHash(layer.signature);
            let sentence = format!(
                "Layer {name}: the worker computed signature {given}, the daemon computes {signature}"
            );
            return Err(Refusal::new(RefusalCode::SignatureMismatch, sentence).about(name));
        }
        let allocation = self.region(&name, region)?.allocation;
        let record = LayerRecord {
            name,
            binding,
            region,
            placement,
            max_selected: layer.max_selected,
            check_unique: layer.check_unique,
        };
        Ok(Checked { record, signature, allocation })
    }

    fn place(
        &self,
        name: &str,
        layout: Option<v1::CacheLayout>,
        region: RegionId,
        offset: u64,
    ) -> Result<Placement, Refusal> {
        let layout = layout.ok_or_else(|| {
            let sentence = format!("Layer {name} has no layout");
            Refusal::new(RefusalCode::LayoutInvalid, sentence).about(name)
        })?;
        let number = u32::try_from(layout.dtype).unwrap_or(u32::MAX);
        let dtype = DataType::try_from(number).map_err(|unknown| {
            let sentence = format!("Layer {name}: data type {unknown}");
            Refusal::new(RefusalCode::LayoutInvalid, sentence).about(name)
        })?;
        let region = self.region(name, region)?;
        CacheLayout::parse(dtype, &layout.shape, &layout.strides)
            .and_then(|layout| layout.place(offset, region.record.bytes))
            .map_err(|error| error.to_refusal(name))
    }

    fn region(&self, name: &str, region: RegionId) -> Result<&HeldRegion, Refusal> {
        self.regions.get(&region).ok_or_else(|| {
            let sentence = format!("Layer {name}: this session has no region {region}");
            Refusal::new(RefusalCode::RegionUnknown, sentence).about(name)
        })
    }

    fn check_selected(&self, name: &str, max_selected: u64) -> Result<(), Refusal> {
        if max_selected == 0 {
            return Err(LayoutError::NothingSelectable.to_refusal(name));
        }
        let max = self.limits.selected_max;
        if max_selected > max {
            let sentence = format!(
                "Layer {name}: max_selected {max_selected} is more than limits.selected_max = {max}"
            );
            return Err(Refusal::new(RefusalCode::QuotaExceeded, sentence).about(name));
        }
        Ok(())
    }

    fn signature(&self, placement: &Placement) -> SignatureHash {
        Signature::new(self.device, placement.layout().clone(), placement.offset()).hash()
    }

    /// Checks that no two payloads overlap once layers have moved. Layers whose region was released are asleep and lie
    /// nowhere.
    fn check_moved(&self, moved: &Publication) -> Result<(), Refusal> {
        let awake = moved.layers.iter().filter_map(|layer| {
            let allocation = self.regions.get(&layer.record.region)?.allocation;
            Some(Checked { record: layer.record.clone(), signature: layer.signature, allocation })
        });
        check_overlap(&awake.collect::<Vec<_>>())
    }
}

fn next(bindings: &mut impl Iterator<Item = BindingId>) -> Result<BindingId, Refusal> {
    bindings.next().ok_or_else(|| {
        Refusal::new(RefusalCode::QuotaExceeded, "The daemon has no binding ids left")
            .remedied_by("Restart the daemon.")
    })
}

fn check_name(what: &str, name: &str, names: &mut BTreeSet<String>) -> Result<(), Refusal> {
    let refuse = |sentence: String| {
        let subject = name.get(..name.floor_char_boundary(NAME_BYTES_MAX)).unwrap_or_default();
        Err(Refusal::new(RefusalCode::LayoutInvalid, sentence)
            .about(subject)
            .remedied_by("Give every layer and every set a short name of its own."))
    };
    if name.is_empty() {
        return refuse(format!("A {what} has an empty name"));
    }
    if name.len() > NAME_BYTES_MAX {
        let given = name.len();
        return refuse(format!("A {what}'s name has {given} bytes; the most is {NAME_BYTES_MAX}"));
    }
    if !names.insert(name.to_owned()) {
        return refuse(format!("Two {what}s have the name {name}"));
    }
    Ok(())
}

/// Refuses payloads that overlap. Regions of one allocation begin at the same byte: a region is a whole memory file.
fn check_overlap(layers: &[Checked]) -> Result<(), Refusal> {
    let mut by_allocation: BTreeMap<(u64, u64), Vec<&Checked>> = BTreeMap::new();
    for layer in layers {
        let AllocationId(high, low) = layer.allocation;
        let others = by_allocation.entry((high, low)).or_default();
        let placement = &layer.record.placement;
        if let Some(other) =
            others.iter().find(|other| payloads_overlap(placement, &other.record.placement))
        {
            let (name, other) = (&layer.record.name, &other.record.name);
            let sentence = format!("The payloads of layers {other} and {name} overlap");
            return Err(Refusal::new(RefusalCode::Overlap, sentence).about(name));
        }
        others.push(layer);
    }
    Ok(())
}

fn bind_set(
    set: v1::BindingSetSpec,
    binding: BindingId,
    layers: &[Checked],
) -> Result<SetRecord, Refusal> {
    let name = set.name;
    let mut members: Vec<&Checked> = Vec::with_capacity(set.layers.len());
    for member in &set.layers {
        let layer = layers.iter().find(|layer| layer.record.name == *member).ok_or_else(|| {
            let sentence = format!("Set {name} names layer {member}, which is not registered");
            Refusal::new(RefusalCode::LayoutInvalid, sentence)
                .about(&name)
                .remedied_by("Name layers of the same registration.")
        })?;
        if members.iter().any(|other| other.record.binding == layer.record.binding) {
            let sentence = format!("Set {name} names layer {member} twice");
            return Err(Refusal::new(RefusalCode::Overlap, sentence)
                .about(&name)
                .remedied_by("Name each layer of a set once."));
        }
        members.push(layer);
    }
    let Some(first) = members.first() else {
        let sentence = format!("Set {name} names no layer");
        return Err(Refusal::new(RefusalCode::LayoutInvalid, sentence)
            .about(&name)
            .remedied_by("Name at least one layer in each set."));
    };
    if let Some(other) = members.iter().find(|layer| layer.signature != first.signature) {
        let sentence = format!(
            "Set {name}: layer {} has signature {}, layer {} has {}",
            first.record.name, first.signature, other.record.name, other.signature
        );
        return Err(Refusal::new(RefusalCode::SignatureMismatch, sentence)
            .about(&other.record.name)
            .remedied_by("Put layers of one layout and one alignment class into a set."));
    }
    let layers = members.iter().map(|layer| layer.record.binding).collect();
    Ok(SetRecord { name, binding, layers })
}

#[cfg(test)]
mod tests;
