//! The status as JSON: the words of the wire, with names in place of numbers and signatures in hexadecimal.

use serde::Serialize;
use statecopy_proto::v1;

/// What a daemon serves, to be serialised: what `statecopy status --json` prints.
#[derive(Debug, Serialize)]
pub struct Status {
    incarnation: String,
    version: String,
    uptime_ms: u64,
    supervisor_pid: u32,
    ready: bool,
    draining: bool,
    http_address: String,
    devices: Vec<Device>,
    sessions: Vec<Session>,
    findings: Vec<Finding>,
}

#[derive(Debug, Serialize)]
struct Finding {
    severity: String,
    check: String,
    device_uuid: String,
    evidence: String,
    meaning: String,
    remedy: String,
}

#[derive(Debug, Serialize)]
struct Device {
    kind: String,
    uuid: String,
    name: String,
    family: String,
    fused: Vec<String>,
    device_process_pid: u32,
    ready: bool,
    restarts: u64,
    footprint: Footprint,
    plans: Vec<Plan>,
    counters: Vec<Counter>,
}

#[derive(Debug, Serialize)]
struct Footprint {
    context_bytes: u64,
    tables_bytes: u64,
    words_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Plan {
    plan: String,
    signature: String,
    dtype: String,
    shape: Vec<u64>,
    strides: Vec<u64>,
    base_mod_16: u32,
    state: String,
    bindings: u32,
    variants: Vec<Variant>,
}

#[derive(Debug, Serialize)]
struct Variant {
    name: String,
    launches: u64,
}

#[derive(Debug, Serialize)]
struct Counter {
    name: String,
    label: String,
    value: u64,
}

#[derive(Debug, Serialize)]
struct Session {
    session_id: u64,
    label: String,
    protocol_version: u32,
    worker_pid: u32,
    worker_uid: u32,
    device_uuid: String,
    state: String,
    copies: u64,
    refusals: u64,
    regions: Vec<Region>,
    layers: Vec<Layer>,
}

#[derive(Debug, Serialize)]
struct Region {
    region_id: u64,
    kind: String,
    size_bytes: u64,
    pieces: u32,
}

#[derive(Debug, Serialize)]
struct Layer {
    name: String,
    binding_id: u64,
    signature: String,
    plan: String,
    region_id: u64,
    offset_bytes: u64,
    max_selected: u64,
}

/// Bytes as hexadecimal digits.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name of a plan kind.
pub fn plan_kind(number: i32) -> String {
    v1::PlanKind::try_from(number).unwrap_or_default().as_str_name().to_lowercase()
}

/// The name of a handle kind.
pub fn handle_kind(number: i32) -> String {
    v1::HandleKind::try_from(number).unwrap_or_default().as_str_name().to_lowercase()
}

/// The name of a data type.
pub fn data_type(number: i32) -> String {
    v1::DataType::try_from(number).unwrap_or_default().as_str_name().to_lowercase()
}

impl From<&v1::InspectReply> for Status {
    fn from(reply: &v1::InspectReply) -> Self {
        Self {
            incarnation: hexadecimal(&reply.incarnation),
            version: reply.version.clone(),
            uptime_ms: reply.uptime_ms,
            supervisor_pid: reply.supervisor_pid,
            ready: reply.ready,
            draining: reply.draining,
            http_address: reply.http_address.clone(),
            devices: reply.devices.iter().map(Device::from).collect(),
            sessions: reply.sessions.iter().map(Session::from).collect(),
            findings: reply.findings.iter().map(Finding::from).collect(),
        }
    }
}

impl From<&v1::Finding> for Finding {
    fn from(found: &v1::Finding) -> Self {
        let v1::Finding { severity, check, device_uuid, evidence, meaning, remedy } = found.clone();
        Self { severity, check, device_uuid, evidence, meaning, remedy }
    }
}

impl From<&v1::DeviceStatus> for Device {
    fn from(status: &v1::DeviceStatus) -> Self {
        let device = status.device.clone().unwrap_or_default();
        let counter = |counter: &v1::Counter| Counter {
            name: counter.name.clone(),
            label: counter.label.clone(),
            value: counter.value,
        };
        Self {
            fused: device.fused.iter().map(|dtype| data_type(*dtype)).collect(),
            kind: device.kind,
            uuid: device.uuid,
            name: device.name,
            family: device.family,
            device_process_pid: status.device_process_pid,
            ready: status.ready,
            restarts: status.restarts,
            footprint: Footprint::from(&status.footprint.unwrap_or_default()),
            plans: status.plans.iter().map(Plan::from).collect(),
            counters: status.counters.iter().map(counter).collect(),
        }
    }
}

impl From<&v1::DeviceFootprint> for Footprint {
    fn from(footprint: &v1::DeviceFootprint) -> Self {
        Self {
            context_bytes: footprint.context_bytes,
            tables_bytes: footprint.tables_bytes,
            words_bytes: footprint.words_bytes,
        }
    }
}

impl From<&v1::PlanStatus> for Plan {
    fn from(plan: &v1::PlanStatus) -> Self {
        let layout = plan.layout.clone().unwrap_or_default();
        let variant = |variant: &v1::VariantStatus| Variant {
            name: variant.name.clone(),
            launches: variant.launches,
        };
        Self {
            plan: plan_kind(plan.plan),
            signature: format!("{:016x}", plan.signature),
            dtype: data_type(layout.dtype),
            shape: layout.shape,
            strides: layout.strides,
            base_mod_16: plan.base_mod_16,
            state: plan.state.clone(),
            bindings: plan.bindings,
            variants: plan.variants.iter().map(variant).collect(),
        }
    }
}

impl From<&v1::SessionStatus> for Session {
    fn from(session: &v1::SessionStatus) -> Self {
        let region = |region: &v1::RegionStatus| Region {
            region_id: region.region_id,
            kind: handle_kind(region.kind),
            size_bytes: region.size_bytes,
            pieces: region.pieces,
        };
        Self {
            session_id: session.session_id,
            label: session.label.clone(),
            protocol_version: session.protocol_version,
            worker_pid: session.worker_pid,
            worker_uid: session.worker_uid,
            device_uuid: session.device_uuid.clone(),
            state: session.state.clone(),
            copies: session.copies,
            refusals: session.refusals,
            regions: session.regions.iter().map(region).collect(),
            layers: session.layers.iter().map(Layer::from).collect(),
        }
    }
}

impl From<&v1::LayerStatus> for Layer {
    fn from(layer: &v1::LayerStatus) -> Self {
        Self {
            name: layer.name.clone(),
            binding_id: layer.binding_id,
            signature: format!("{:016x}", layer.signature),
            plan: plan_kind(layer.plan),
            region_id: layer.region_id,
            offset_bytes: layer.offset_bytes,
            max_selected: layer.max_selected,
        }
    }
}
