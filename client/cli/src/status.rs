//! `statecopy status`: what a daemon serves, as tables or as JSON.

use std::process::ExitCode;

use statecopy_client::blocking::Admin;
use statecopy_client::{status, v1};

use crate::cli::StatusOptions;
use crate::terminal::{self, Table, bytes, grouped};

/// Prints the status.
///
/// # Errors
/// When the daemon does not answer in time.
pub(crate) fn run(options: &StatusOptions) -> anyhow::Result<ExitCode> {
    let admin = Admin::connect(options.ask.address()?, options.ask.timeout())?;
    let reply = admin.inspect()?;
    if options.json {
        terminal::print_json(&status::Status::from(&reply))?;
    } else {
        terminal::print(&text(&reply))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn text(reply: &v1::InspectReply) -> String {
    let state = match (reply.draining, reply.ready) {
        (true, _) => "draining",
        (false, true) => "ready",
        (false, false) => "not ready",
    };
    let mut text = format!(
        "statecopyd {}, {state}, up {} s, pid {}, incarnation {}\n",
        reply.version,
        reply.uptime_ms / 1_000,
        reply.supervisor_pid,
        status::hexadecimal(&reply.incarnation)
    );
    if !reply.http_address.is_empty() {
        text.push_str(&format!("metrics and health at http://{}\n", reply.http_address));
    }
    for device in &reply.devices {
        text.push_str(&device_text(device));
    }
    section(&mut text, "Findings of the start", &findings(reply));
    section(&mut text, "Sessions", &sessions(reply));
    section(&mut text, "Regions", &regions(reply));
    section(&mut text, "Layers", &layers(reply));
    text
}

fn section(text: &mut String, title: &str, table: &Table) {
    if !table.is_empty() {
        text.push_str(&format!("\n{title}\n{}", table.render()));
    }
}

fn device_text(status: &v1::DeviceStatus) -> String {
    let device = status.device.clone().unwrap_or_default();
    let ready = if status.ready { "ready" } else { "not ready" };
    let mut text = format!(
        "\nDevice {} ({}), {ready}, device process {}, {} restarts\n",
        device.kind, device.name, status.device_process_pid, status.restarts
    );
    let footprint = status.footprint.unwrap_or_default();
    let parts = [
        ("context", footprint.context_bytes),
        ("tables", footprint.tables_bytes),
        ("words", footprint.words_bytes),
    ];
    // The host device takes nothing for itself.
    if parts.iter().any(|(_, size)| *size > 0) {
        let parts = parts.map(|(part, size)| format!("{part} {}", bytes(size)));
        text.push_str(&format!("Takes for itself: {}\n", parts.join(", ")));
    }
    section(&mut text, "Plans", &plans(&status.plans));
    let mut counters = Table::new(["COUNTER", "OF", "VALUE"]);
    for counter in status.counters.iter().filter(|counter| counter.value > 0) {
        counters.row([counter.name.clone(), counter.label.clone(), grouped(counter.value)]);
    }
    section(&mut text, "Counters that are not 0", &counters);
    text
}

fn findings(reply: &v1::InspectReply) -> Table {
    let mut table = Table::new(["SEVERITY", "CHECK", "DEVICE", "EVIDENCE"]);
    for found in &reply.findings {
        let v1::Finding { severity, check, device_uuid, evidence, .. } = found.clone();
        table.row([severity, check, device_uuid, evidence]);
    }
    table
}

fn plans(plans: &[v1::PlanStatus]) -> Table {
    let mut table =
        Table::new(["SIGNATURE", "PLAN", "STATE", "CACHE", "BINDINGS", "VARIANTS (LAUNCHES)"]);
    for plan in plans {
        let variants = plan.variants.iter();
        let variants: Vec<String> = variants
            .map(|variant| format!("{} ({})", variant.name, grouped(variant.launches)))
            .collect();
        table.row([
            format!("{:016x}", plan.signature),
            status::plan_kind(plan.plan),
            plan.state.clone(),
            layout(plan.layout.as_ref()),
            grouped(plan.bindings.into()),
            variants.join(", "),
        ]);
    }
    table
}

fn layout(layout: Option<&v1::CacheLayout>) -> String {
    let Some(layout) = layout else { return String::new() };
    let axes = |values: &[u64]| values.iter().map(u64::to_string).collect::<Vec<_>>().join("x");
    let stride = layout.strides.first().copied().unwrap_or(0);
    format!("{} {} every {}", status::data_type(layout.dtype), axes(&layout.shape), grouped(stride))
}

fn sessions(reply: &v1::InspectReply) -> Table {
    let mut table = Table::new([
        "SESSION", "LABEL", "WORKER", "UID", "STATE", "VERSION", "REGIONS", "LAYERS", "COPIES",
        "REFUSALS",
    ]);
    for session in &reply.sessions {
        table.row([
            session.session_id.to_string(),
            session.label.clone(),
            session.worker_pid.to_string(),
            session.worker_uid.to_string(),
            session.state.clone(),
            session.protocol_version.to_string(),
            grouped(session.regions.len() as u64),
            grouped(session.layers.len() as u64),
            grouped(session.copies),
            grouped(session.refusals),
        ]);
    }
    table
}

fn regions(reply: &v1::InspectReply) -> Table {
    let mut table = Table::new(["SESSION", "REGION", "KIND", "SIZE", "PIECES"]);
    for session in &reply.sessions {
        for region in &session.regions {
            table.row([
                session.session_id.to_string(),
                region.region_id.to_string(),
                status::handle_kind(region.kind),
                bytes(region.size_bytes),
                grouped(region.pieces.into()),
            ]);
        }
    }
    table
}

fn layers(reply: &v1::InspectReply) -> Table {
    let mut table = Table::new([
        "SESSION",
        "LAYER",
        "BINDING",
        "SIGNATURE",
        "PLAN",
        "REGION",
        "OFFSET",
        "MAX SELECTED",
    ]);
    for session in &reply.sessions {
        for layer in &session.layers {
            table.row([
                session.session_id.to_string(),
                layer.name.clone(),
                layer.binding_id.to_string(),
                format!("{:016x}", layer.signature),
                status::plan_kind(layer.plan),
                layer.region_id.to_string(),
                grouped(layer.offset_bytes),
                grouped(layer.max_selected),
            ]);
        }
    }
    table
}

#[cfg(test)]
mod tests;
