//! Messages of the control wire, made from what the supervisor knows.

use std::sync::Arc;

use statecopy_kernels::device::{DeviceDescription, Moved};
use statecopy_kernels::findings::Finding;
use statecopy_kernels::layout::CacheLayout;
use statecopy_proto::{Incarnation, v1};

use super::control::Control;
use super::device::{DeviceHandle, DeviceState};
use super::sessions::{EndReason, HeldRegion, Publication, PublishedLayer};
use crate::config::Limits;
use crate::counters::Counter;
use crate::record::{PlanInspection, Progress, Stage};

pub(crate) fn device_description(device: &DeviceDescription) -> v1::DeviceDescription {
    v1::DeviceDescription {
        kind: device.kind.to_owned(),
        uuid: device.uuid.to_string(),
        name: device.name.clone(),
        family: device.family.clone().unwrap_or_default(),
        fused: device.fused.iter().map(|dtype| dtype.to_message().into()).collect(),
    }
}

pub(crate) fn limits(limits: &Limits) -> v1::Limits {
    v1::Limits {
        regions_max: limits.regions_max,
        layers_max: limits.layers_max,
        descriptors_pending_max: limits.descriptors_pending_max,
        selected_max: limits.selected_max,
        region_bytes_max: limits.region_bytes_max,
        pieces_max: limits.pieces_max,
        graph_slots_max: limits.graph_slots_max,
    }
}

pub(crate) fn layout(layout: &CacheLayout) -> v1::CacheLayout {
    v1::CacheLayout {
        dtype: layout.dtype().to_message().into(),
        shape: layout.shape().to_vec(),
        strides: layout.strides().to_vec(),
    }
}

pub(crate) fn region_status(region: &HeldRegion) -> v1::RegionStatus {
    v1::RegionStatus {
        region_id: region.record.id.0,
        kind: region.record.kind.to_message().into(),
        size_bytes: region.record.bytes,
        pieces: u32::try_from(region.record.pieces.len()).unwrap_or(u32::MAX),
    }
}

pub(crate) fn layer_status(layer: &PublishedLayer) -> v1::LayerStatus {
    v1::LayerStatus {
        name: layer.record.name.clone(),
        binding_id: layer.record.binding.0,
        signature: layer.signature.0,
        plan: layer.plan.to_message().into(),
        region_id: layer.record.region.0,
        offset_bytes: layer.record.placement.offset(),
        max_selected: layer.record.max_selected,
    }
}

pub(crate) fn progress(incarnation: Incarnation, progress: Progress) -> v1::RegisterLayersEvent {
    use v1::registration_progress::Stage as WireStage;
    let stage = match progress.stage {
        Stage::Preparing => WireStage::Preparing,
        Stage::Sealing => WireStage::Sealing,
        Stage::Publishing => WireStage::Publishing,
    };
    let progress = v1::RegistrationProgress {
        stage: stage.into(),
        layers_done: progress.layers_done,
        layers_total: progress.layers_total,
    };
    v1::RegisterLayersEvent {
        incarnation: incarnation.to_vec(),
        event: Some(v1::register_layers_event::Event::Progress(progress)),
    }
}

pub(crate) fn published(incarnation: Incarnation, all: &Publication) -> v1::RegisterLayersEvent {
    let bindings = all.layers.iter().map(|layer| v1::Binding {
        name: layer.record.name.clone(),
        binding_id: layer.record.binding.0,
        signature: layer.signature.0,
        plan: layer.plan.to_message().into(),
    });
    let sets = all.sets.iter().map(|set| v1::BindingSet {
        name: set.record.name.clone(),
        binding_id: set.record.binding.0,
        signature: set.signature.0,
        layers: u32::try_from(set.record.layers.len()).unwrap_or(u32::MAX),
    });
    let published = v1::Published { bindings: bindings.collect(), sets: sets.collect() };
    v1::RegisterLayersEvent {
        incarnation: incarnation.to_vec(),
        event: Some(v1::register_layers_event::Event::Published(published)),
    }
}

pub(crate) fn copy_reply(incarnation: Incarnation, moved: Moved) -> v1::CopyReply {
    v1::CopyReply {
        incarnation: incarnation.to_vec(),
        rows_copied: moved.copied,
        rows_masked: moved.masked,
    }
}

pub(crate) fn draining(incarnation: Incarnation, grace_ms: u32) -> v1::Event {
    let event = v1::event::Event::Draining(v1::Draining { grace_ms });
    v1::Event { incarnation: incarnation.to_vec(), event: Some(event) }
}

pub(crate) fn device_restarted(incarnation: Incarnation, state: &DeviceState) -> v1::Event {
    let event = v1::event::Event::DeviceRestarted(v1::DeviceRestarted {
        device_process_pid: state.pid,
        restarts: state.restarts,
    });
    v1::Event { incarnation: incarnation.to_vec(), event: Some(event) }
}

pub(crate) fn session_ended(incarnation: Incarnation, reason: &EndReason) -> v1::Event {
    let reason = reason.sentence();
    let event = v1::event::Event::SessionEnded(v1::SessionEnded { reason });
    v1::Event { incarnation: incarnation.to_vec(), event: Some(event) }
}

pub(crate) fn device_status(device: &DeviceHandle, plans: &[PlanInspection]) -> v1::DeviceStatus {
    let state = device.state().borrow().clone();
    let counters = Counter::all().map(|counter| v1::Counter {
        name: counter.name().to_owned(),
        label: counter.label().map_or_else(String::new, |(_, value)| value.to_owned()),
        value: device.counters().get(counter),
    });
    v1::DeviceStatus {
        device: Some(device_description(device.description())),
        device_process_pid: state.pid,
        ready: state.ready,
        restarts: state.restarts,
        plans: plans.iter().map(plan_status).collect(),
        counters: counters.collect(),
        footprint: Some(v1::DeviceFootprint {
            context_bytes: state.footprint.context,
            tables_bytes: state.footprint.tables,
            words_bytes: state.footprint.words,
        }),
    }
}

/// What was found of the host and of each device, the worst first.
pub(crate) fn findings(control: &Control) -> Vec<v1::Finding> {
    let host = control.findings.iter().map(|found| (String::new(), found.clone()));
    let devices = control.devices.iter().flat_map(|device| {
        let uuid = device.description().uuid.to_string();
        let found = Arc::clone(&device.state().borrow().found);
        found.findings.iter().map(|found| (uuid.clone(), found.clone())).collect::<Vec<_>>()
    });
    let mut all: Vec<_> = host.chain(devices).collect();
    all.sort_by_key(|(_, finding)| finding.severity);
    let message = |(device_uuid, found): (String, Finding)| v1::Finding {
        severity: found.severity.label().to_owned(),
        check: found.check.to_owned(),
        device_uuid,
        evidence: found.evidence,
        meaning: found.meaning,
        remedy: found.remedy,
    };
    all.into_iter().map(message).collect()
}

fn plan_status(plan: &PlanInspection) -> v1::PlanStatus {
    let variants = plan
        .variants
        .iter()
        .map(|(name, launches)| v1::VariantStatus { name: name.clone(), launches: *launches });
    v1::PlanStatus {
        plan: plan.plan.to_message().into(),
        signature: plan.signature.0,
        layout: Some(layout(&plan.layout)),
        base_mod_16: plan.base_mod_16.into(),
        state: plan.state.label().to_owned(),
        variants: variants.collect(),
        bindings: plan.bindings,
    }
}
