//! What a person and a script see of one reply.

use super::*;

fn reply() -> v1::InspectReply {
    let layout = v1::CacheLayout {
        dtype: v1::DataType::Float32.into(),
        shape: vec![24, 12, 128, 128],
        strides: vec![5_308_416, 16_384, 128, 1],
    };
    let plan = v1::PlanStatus {
        plan: v1::PlanKind::Fused.into(),
        signature: 0xab,
        layout: Some(layout),
        base_mod_16: 0,
        state: "published".into(),
        variants: vec![v1::VariantStatus { name: "gather/int32".into(), launches: 1_234 }],
        bindings: 4,
    };
    let counter =
        |name: &str, value| v1::Counter { name: name.into(), label: "gather".into(), value };
    let device = v1::DeviceStatus {
        device: Some(v1::DeviceDescription { kind: "host".into(), ..Default::default() }),
        ready: true,
        footprint: Some(v1::DeviceFootprint {
            context_bytes: 512 << 20,
            tables_bytes: 8 << 20,
            words_bytes: 0,
        }),
        plans: vec![plan],
        counters: vec![counter("statecopy_copies_total", 5), counter("statecopy_quiet_total", 0)],
        ..Default::default()
    };
    let layer = v1::LayerStatus {
        name: "layers.0".into(),
        signature: 0xab,
        plan: v1::PlanKind::Fused.into(),
        ..Default::default()
    };
    let region = v1::RegionStatus {
        region_id: 7,
        kind: v1::HandleKind::CudaVmm.into(),
        size_bytes: 1 << 30,
        pieces: 52,
    };
    let session = v1::SessionStatus {
        session_id: 3,
        label: "rank 0".into(),
        state: "published".into(),
        regions: vec![region],
        layers: vec![layer],
        ..Default::default()
    };
    v1::InspectReply {
        incarnation: vec![0x0f, 0xa0],
        version: "0.1.0".into(),
        ready: true,
        devices: vec![device],
        sessions: vec![session],
        findings: vec![v1::Finding {
            severity: "note".into(),
            check: "sharing".into(),
            evidence: "Time slices\x1b".into(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

#[test]
fn the_tables_show_sessions_regions_layers_plans_and_counters() {
    let text = text(&reply());
    for shown in [
        "ready, up 0 s, pid 0, incarnation 0fa0",
        "00000000000000ab  fused  published  float32 24x12x128x128 every 5,308,416",
        "gather/int32 (1,234)",
        "rank 0",
        "cuda_vmm  1.00 GiB      52",
        "Takes for itself: context 512.00 MiB, tables 8.00 MiB, words 0 B",
        "layers.0",
        "note      sharing",
        r"Time slices\u{1b}",
        "statecopy_copies_total",
    ] {
        assert!(text.contains(shown), "{shown} is missing in:\n{text}");
    }
    assert!(!text.contains("statecopy_quiet_total"));
    assert!(!text.contains("metrics and health"));
}

#[test]
fn labels_and_names_of_layers_cannot_steer_the_terminal() {
    let mut reply = reply();
    reply.sessions[0].label = "a\x1b[2J\nSessions".into();
    reply.sessions[0].layers[0].name = "b\u{9b}1m\r".into();
    let text = text(&reply);
    assert!(text.contains(r"a\u{1b}[2J\u{a}Sessions"), "{text}");
    assert!(text.contains(r"b\u{9b}1m\u{d}"), "{text}");
    assert!(!text.chars().any(|shown| shown.is_control() && shown != '\n'), "{text:?}");
}

#[test]
fn an_idle_daemon_has_no_empty_tables() {
    let idle = v1::InspectReply::default();
    let text = text(&idle);
    assert!(!text.contains("Sessions") && !text.contains("Layers"), "{text}");
    assert!(text.contains("not ready"));
}

#[test]
fn the_json_has_names_in_place_of_numbers() {
    let status = serde_json::to_value(status::Status::from(&reply())).unwrap();
    assert_eq!(status["incarnation"], "0fa0");
    let plan = &status["devices"][0]["plans"][0];
    assert_eq!(plan["plan"], "fused");
    assert_eq!(plan["signature"], "00000000000000ab");
    assert_eq!(plan["dtype"], "float32");
    assert_eq!(plan["variants"][0]["launches"], 1_234);
    assert_eq!(status["devices"][0]["counters"][1]["value"], 0);
    assert_eq!(status["findings"][0]["check"], "sharing");
    let session = &status["sessions"][0];
    assert_eq!(session["regions"][0]["kind"], "cuda_vmm");
    assert_eq!(session["regions"][0]["pieces"], 52);
    assert_eq!(status["devices"][0]["footprint"]["tables_bytes"], 8 << 20);
    assert_eq!(session["layers"][0]["signature"], plan["signature"]);
}
