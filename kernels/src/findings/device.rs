//! What the child's tale means for one GPU.

use super::driver::Circumstances;
use super::text::{bytes, grouped};
use super::told::{Event, Mode, Probed, SeenDevice};
use super::{CONNECTIONS, Finding, Severity};

/// Memory beside the tables that code and the scratch of a registration want; less is a warning.
const ROOM_BYTES: u64 = 256 << 20;
/// Where the figures below come from.
const MEASURED: &str = "measured on one H200 with driver 580 and states of 0.75 MiB, not here";

/// What a stream-ordered copy of one state takes through MPS, with its kernels around it, in nanoseconds.
const ORDERED_BY_MPS_NS: u64 = 23_700;
/// The same where processes take turns.
const ORDERED_BY_TURNS_NS: u64 = 295_000;

/// Whether processes share a device at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// Through MPS, as the driver says or everything else shows.
    Mps,
    /// One after the other.
    TimeSlices,
    /// What is seen does not agree.
    Unclear,
}

/// What is known of the machine of one device, as metrics have it. Words are `none` and figures 0 where there is no GPU, and
/// `unknown` where nobody tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// `mps`, `time_slices`, `exclusive`: one process alone may use the device.
    pub sharing: &'static str,
    /// `default`, `exclusive`, `prohibited`.
    pub compute_mode: &'static str,
    /// `off`, `divided`, `slice`.
    pub mig: &'static str,
    /// The CUDA version that the driver speaks.
    pub driver: String,
    /// The driver's release.
    pub driver_release: String,
    /// The compiler's version.
    pub nvrtc: String,
    /// Free beside the context when it was made, in bytes.
    pub memory_free: u64,
    /// Hardware connections of the device process's context.
    pub connections: u32,
    /// Whether memory operations of streams were tried, and work.
    pub stream_operations: bool,
    /// What a stream-ordered copy of one state of 0.75 MiB is expected to take, by what was measured on one H200.
    pub ordered_copy_ns: u64,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            sharing: "none",
            compute_mode: "none",
            mig: "none",
            driver: "none".to_owned(),
            driver_release: "none".to_owned(),
            nvrtc: "none".to_owned(),
            memory_free: 0,
            connections: 0,
            stream_operations: false,
            ordered_copy_ns: 0,
        }
    }
}

impl Machine {
    /// Of what a device process told of its one device.
    #[must_use]
    pub fn of(probed: &Probed, circumstances: &Circumstances) -> Self {
        let mut machine = Self {
            connections: circumstances.daemon_connections.parse().unwrap_or(0),
            ..Self::default()
        };
        for event in &probed.events {
            match event {
                Event::Driver { version } => machine.driver = version_text(*version),
                Event::Compiler { version } => machine.nvrtc.clone_from(version),
                Event::Device { device } => machine.describe(device, circumstances),
                Event::Context { free, .. } => machine.memory_free = *free,
                Event::Streams { error, .. } => machine.stream_operations = error.is_none(),
                Event::Begins { .. }
                | Event::NoCompiler { .. }
                | Event::Refused { .. }
                | Event::NoContext { .. } => {}
            }
        }
        machine
    }

    fn describe(&mut self, device: &SeenDevice, circumstances: &Circumstances) {
        let (sharing, _) = sharing(device, circumstances);
        let outside = device.outside.as_ref();
        let unknown = || "unknown".to_owned();
        self.sharing = match (sharing, device.compute_mode) {
            (Sharing::Mps, _) => "mps",
            (Sharing::TimeSlices | Sharing::Unclear, Mode::Exclusive) => "exclusive",
            (Sharing::TimeSlices, _) => "time_slices",
            (Sharing::Unclear, _) => "unknown",
        };
        self.compute_mode = match device.compute_mode {
            Mode::Shared => "default",
            Mode::Exclusive => "exclusive",
            Mode::Prohibited => "prohibited",
            Mode::Unknown => "unknown",
        };
        self.mig = match outside.map(|outside| (outside.is_slice, outside.is_divided)) {
            Some((true, _)) => "slice",
            Some((false, Some(true))) => "divided",
            Some((false, Some(false))) => "off",
            Some((false, None)) | None => "unknown",
        };
        self.driver_release =
            outside.and_then(|outside| outside.driver_release.clone()).unwrap_or_else(unknown);
        self.ordered_copy_ns = match sharing {
            Sharing::Mps => ORDERED_BY_MPS_NS,
            Sharing::TimeSlices | Sharing::Unclear => ORDERED_BY_TURNS_NS,
        };
    }
}

/// Nanoseconds as microseconds with a tenth where there is one.
fn micros(ns: u64) -> String {
    match ns % 1_000 / 100 {
        0 => (ns / 1_000).to_string(),
        tenths => format!("{}.{tenths}", ns / 1_000),
    }
}

/// The CUDA version as people write it.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1_000, version % 1_000 / 10)
}

/// Every finding about a device.
pub(super) fn judge(
    device: &SeenDevice,
    events: &[Event],
    circumstances: &Circumstances,
) -> Vec<Finding> {
    let (sharing, evidence) = sharing(device, circumstances);
    let compiles = events.iter().any(|event| matches!(event, Event::Compiler { .. }));
    let mut findings =
        vec![identity(device, compiles, circumstances), compute_mode(device, sharing)];
    findings.extend(mig(device));
    findings.push(share(sharing, &evidence));
    findings.push(connections(sharing, circumstances));
    let mut streams_work = None;
    for event in events {
        match event {
            Event::Context { ordinal, context, free, total } if *ordinal == device.ordinal => {
                findings.push(memory(*context, *free, *total, circumstances));
            }
            Event::NoContext { ordinal, refused } if *ordinal == device.ordinal => {
                let meaning = "A daemon that serves this device does not start: it ends with 69.";
                let finding = Finding::new(Severity::Problem, "context", &refused.sentence);
                findings.push(finding.means(meaning).remedied_by(&refused.remedy));
            }
            Event::Streams { ordinal, error } if *ordinal == device.ordinal => {
                streams_work = Some(error.is_none());
                findings.push(streams(error.as_deref()));
            }
            _ => {}
        }
    }
    findings.extend(streams_work.map(|work| costs(sharing, work)));
    findings.into_iter().map(|finding| finding.of_device(device.ordinal)).collect()
}

fn identity(device: &SeenDevice, compiles: bool, circumstances: &Circumstances) -> Finding {
    let (major, minor) = device.capability;
    let chip = format!("sm_{major}{minor}");
    let evidence = format!("{}, {}, compute capability {major}.{minor}", device.name, device.uuid);
    if !device.unified_addressing {
        return Finding::new(Severity::Problem, "device", evidence)
            .means("It has no unified addressing: statecopyd does not serve it.")
            .remedied_by("Use a device and a driver that have it.");
    }
    let stored = circumstances.chips.contains(&chip);
    // Without any kernels the finding about NVRTC says it.
    if !stored && !compiles && !circumstances.chips.is_empty() {
        return Finding::new(Severity::Problem, "device", evidence)
            .means(format!("No store holds kernels for {chip}, and there is no compiler: the daemon does not serve it."))
            .remedied_by(format!("Fill a store (statecopy kernels build --arch {chip} --all), or install NVRTC."));
    }
    if !device.fuses {
        return Finding::new(Severity::Warning, "device", evidence)
            .means("Below 8.0 no Fused plans are made: every layer is served by ByteCopy.")
            .remedied_by("Nothing, where ByteCopy will do; otherwise use an A100 or newer.");
    }
    let kernels = match stored {
        true => "a store holds kernels for it",
        false => "no store holds kernels for it, so they must be compiled",
    };
    Finding::new(Severity::Ok, "device", evidence)
        .means(format!("Fused is served for FP32 and BF16; {kernels}."))
}

fn mig(device: &SeenDevice) -> Option<Finding> {
    let outside = device.outside.as_ref()?;
    if outside.is_slice {
        let meaning = "Worker and daemon must be given the same slice: memory of another one cannot be shared with it.";
        return Some(Finding::new(Severity::Note, "mig", "It is a MIG slice").means(meaning));
    }
    let divided = outside.is_divided?;
    Some(if divided {
        Finding::new(Severity::Warning, "mig", "MIG is on, and this is the whole device")
            .means("Copies run on a slice, and none is named here.")
            .remedied_by("Name the slice by its UUID (nvidia-smi -L) with --device.")
    } else {
        Finding::new(Severity::Ok, "mig", "MIG is off")
    })
}

fn compute_mode(device: &SeenDevice, sharing: Sharing) -> Finding {
    let remedy = "Set it to the default: nvidia-smi -c DEFAULT (needs root).";
    let finding = |severity, evidence: &str| Finding::new(severity, "compute_mode", evidence);
    match (device.compute_mode, sharing) {
        (Mode::Shared, _) => finding(Severity::Ok, "default: any process may use the device"),
        (Mode::Exclusive, Sharing::Mps) => {
            finding(Severity::Ok, "exclusive, and the MPS server is who has it")
        }
        (Mode::Exclusive, Sharing::TimeSlices | Sharing::Unclear) => {
            finding(Severity::Problem, "exclusive: one process may use the device")
                .means("Only one of worker and daemon gets a context; the other fails to start.")
                .remedied_by(format!("{remedy} Or start MPS, whose server then is that process."))
        }
        (Mode::Prohibited, _) => {
            finding(Severity::Problem, "prohibited: no process may use the device")
                .means("Neither worker nor daemon gets a context.")
                .remedied_by(remedy)
        }
        (Mode::Unknown, _) => {
            finding(Severity::Note, "The driver does not say who may use the device")
                .means("Where the mode is exclusive, only one of worker and daemon gets a context.")
                .remedied_by("Let `nvidia-smi -q -d COMPUTE` tell.")
        }
    }
}

/// How the device is shared, and what says so.
fn sharing(device: &SeenDevice, circumstances: &Circumstances) -> (Sharing, String) {
    let clients = device.outside.as_ref().and_then(|outside| outside.mps_clients);
    let seen = clients.is_some_and(|count| count > 0) || circumstances.mps.control_owner.is_some();
    let driver = match device.shared_by_mps {
        Some(true) => "the driver says that contexts share the device through MPS",
        Some(false) => "the driver says that contexts do not share the device through MPS",
        None => "the driver is too old to say (before CUDA 12.2)",
    };
    let clients = match clients {
        Some(count) => format!("the management library counts {count} MPS clients"),
        None => "the management library does not say".to_owned(),
    };
    let sharing = match (device.shared_by_mps, seen) {
        (Some(true), _) => Sharing::Mps,
        (Some(false) | None, false) => Sharing::TimeSlices,
        (Some(false) | None, true) => Sharing::Unclear,
    };
    (sharing, format!("{driver}; {clients}; {}", circumstances.mps.evidence()))
}

fn share(sharing: Sharing, evidence: &str) -> Finding {
    match sharing {
        Sharing::Mps => Finding::new(Severity::Note, "sharing", format!("MPS: {evidence}"))
            .means(
                "Kernels of worker and daemon run at once. A fault of one client ends the contexts of all; the daemon's device \
                 process starts again once every old client has ended.",
            ),
        Sharing::TimeSlices => Finding::new(Severity::Note, "sharing", format!("Time slices: {evidence}"))
            .means(
                "Kernels of two processes never run at once; a switch between them takes about 0.28 ms. A fault of a worker does \
                 not hurt the daemon.",
            ),
        Sharing::Unclear => Finding::new(Severity::Warning, "sharing", format!("Unclear: {evidence}"))
            .means("Something of MPS is there, and the driver does not confirm that it is used.")
            .remedied_by(
                "Give worker and daemon the same CUDA_MPS_PIPE_DIRECTORY and user, or remove what an ended MPS has left there.",
            ),
    }
}

fn connections(sharing: Sharing, circumstances: &Circumstances) -> Finding {
    let daemon = circumstances.daemon_connections;
    let usual = if sharing == Sharing::Mps { "2, as under MPS" } else { "8" };
    let meaning = format!(
        "Hardware connections of a context: statecopyd has {daemon} in its device process, a worker of this environment what is \
         named here. Each stream that waits for a copy holds one of the worker's."
    );
    let finding =
        |severity, evidence| Finding::new(severity, "connections", evidence).means(&meaning);
    let name = CONNECTIONS;
    match &circumstances.connections {
        None => finding(Severity::Ok, format!("{name} is not set: {usual}")),
        Some(text) => match text.parse::<u32>() {
            Ok(count @ 8..=32) => finding(Severity::Ok, format!("{name}={count}")),
            Ok(count @ 1..8) => finding(Severity::Warning, format!("{name}={count}")).remedied_by(
                "Leave it unset, or set 32, unless the worker's own framework asks for this number; with it use few lanes.",
            ),
            Ok(_) | Err(_) => finding(Severity::Warning, format!("{name}={text} is no number from 1 to 32"))
                .remedied_by("Leave it unset, or set 32."),
        },
    }
}

fn memory(context: Option<u64>, free: u64, total: u64, circumstances: &Circumstances) -> Finding {
    let own = crate::cuda::own_memory(circumstances.selected_max);
    let tables = own.map_or(u64::MAX, |own| own.tables);
    let context = match context {
        Some(taken) => format!("the context, which takes {}", bytes(taken)),
        None => "a context, whose size the management library does not tell (about half a GiB)"
            .to_owned(),
    };
    let evidence = format!("{} of {} are free beside {context}", bytes(free), bytes(total));
    let needs = format!(
        "A daemon needs such a context and {} for tables ({} bytes), then code and the scratch of each registration",
        bytes(tables),
        grouped(tables)
    );
    let remedy = "Start the daemon before the workers, or leave it more memory (vLLM: a lower gpu_memory_utilization).";
    let (severity, meaning) = match free {
        free if free < tables => (Severity::Problem, format!("{needs}: it does not start.")),
        free if free - tables < ROOM_BYTES => {
            (Severity::Warning, format!("{needs}: it starts, and a registration may be refused."))
        }
        _ => return Finding::new(Severity::Ok, "memory", evidence).means(needs + "."),
    };
    Finding::new(severity, "memory", evidence).means(meaning).remedied_by(remedy)
}

fn streams(error: Option<&str>) -> Finding {
    match error {
        None => Finding::new(
            Severity::Ok,
            "stream_operations",
            "a stream wrote a 64-bit word of registered host memory, and waited for another",
        ),
        Some(error) => Finding::new(Severity::Problem, "stream_operations", error)
            .means(
                "The daemon's streams say by such a write that a copy is done, and a worker's stream waits for one: no copy on this \
                 device would ever be answered in time.",
            )
            .remedied_by("Use a newer driver, and let `nvidia-smi` show that the device is well."),
    }
}

fn costs(sharing: Sharing, streams_work: bool) -> Finding {
    let host = "A host-completed copy costs what a launch in the worker's own process costs: 11.2 us for one state, 37.7 us for 64";
    let finding = |severity, evidence: &str| {
        Finding::new(severity, "copies", format!("{evidence}; {MEASURED}"))
    };
    if !streams_work {
        return finding(Severity::Note, "Copies are not to be expected here")
            .means("See stream_operations.");
    }
    match sharing {
        Sharing::Mps => finding(Severity::Ok, &format!("{host}; a stream-ordered one with its kernels around it {} and 53.7 us", micros(ORDERED_BY_MPS_NS))),
        Sharing::TimeSlices | Sharing::Unclear => finding(
            Severity::Warning,
            &format!(
                "{host}. Without MPS a stream-ordered copy takes about {} and 322 us, and more than 1,000 us while the worker's \
                 kernels fill the device", micros(ORDERED_BY_TURNS_NS)
            ),
        )
        .means("Every stream-ordered copy waits for two switches of the device between processes, whatever its size.")
        .remedied_by(
            "Start MPS for worker and daemon under one user, or copy all layers in one request, so that a step pays once.",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::mps::Mps;
    use crate::findings::told::SeenOutside;

    fn circumstances() -> Circumstances {
        let mps =
            Mps { directory: "/pipes".into(), control_owner: None, servers: vec![], own_uid: 7 };
        Circumstances {
            mps,
            gpu_wanted: true,
            chips: vec!["sm_90".to_owned()],
            searched: String::new(),
            selected_max: 64,
            connections: None,
            daemon_connections: "32",
        }
    }

    fn device(outside: Option<SeenOutside>) -> SeenDevice {
        SeenDevice {
            ordinal: 0,
            name: "GPU".to_owned(),
            uuid: String::new(),
            capability: (9, 0),
            fuses: true,
            unified_addressing: true,
            compute_mode: Mode::Shared,
            shared_by_mps: Some(false),
            outside,
        }
    }

    fn outside() -> SeenOutside {
        SeenOutside {
            driver_release: None,
            is_slice: false,
            is_divided: Some(false),
            mps_clients: Some(0),
        }
    }

    fn severity(device: &SeenDevice, check: &str) -> Option<Severity> {
        let findings = judge(device, &[], &circumstances());
        findings.iter().find(|finding| finding.check == check).map(|finding| finding.severity)
    }

    #[test]
    fn a_divided_device_is_a_warning_and_its_slice_is_not() {
        let of = |outside| severity(&device(outside), "mig");
        assert_eq!(of(None), None, "nobody tells");
        assert_eq!(of(Some(outside())), Some(Severity::Ok));
        assert_eq!(
            of(Some(SeenOutside { is_divided: Some(true), ..outside() })),
            Some(Severity::Warning)
        );
        assert_eq!(of(Some(SeenOutside { is_slice: true, ..outside() })), Some(Severity::Note));
    }

    #[test]
    fn clients_of_mps_that_the_driver_does_not_confirm_leave_it_unclear() {
        let clients = SeenOutside { mps_clients: Some(3), ..outside() };
        let (shared, evidence) = sharing(&device(Some(clients)), &circumstances());
        assert_eq!(shared, Sharing::Unclear);
        assert!(evidence.contains("counts 3 MPS clients"), "{evidence}");
        let old = SeenDevice { shared_by_mps: None, ..device(Some(outside())) };
        let (shared, evidence) = sharing(&old, &circumstances());
        assert_eq!(shared, Sharing::TimeSlices);
        assert!(evidence.contains("too old to say"), "{evidence}");
    }

    #[test]
    fn a_mode_in_which_nobody_gets_a_context_is_a_problem() {
        let of =
            |compute_mode| severity(&SeenDevice { compute_mode, ..device(None) }, "compute_mode");
        assert_eq!(of(Mode::Prohibited), Some(Severity::Problem));
        assert_eq!(of(Mode::Exclusive), Some(Severity::Problem));
        assert_eq!(of(Mode::Unknown), Some(Severity::Note));
        assert_eq!(of(Mode::Shared), Some(Severity::Ok));
    }

    #[test]
    fn a_device_without_unified_addressing_is_not_served() {
        let lacking = SeenDevice { unified_addressing: false, ..device(None) };
        assert_eq!(severity(&lacking, "device"), Some(Severity::Problem));
    }
}
