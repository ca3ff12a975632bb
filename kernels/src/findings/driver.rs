//! What the child's tale means, as far as it is about the driver as a whole.

use super::device;
use super::mps::Mps;
use super::told::{Ending, Event, OPENING_COMPILER, Probed, Refused, SeenDevice};
use super::{Finding, Severity};

/// What findings about GPUs are made from, beside the child's tale.
#[derive(Debug)]
pub struct Circumstances {
    /// What is there of MPS.
    pub mps: Mps,
    /// Whether a GPU was asked for: without one a machine without a driver is no problem.
    pub gpu_wanted: bool,
    /// Chips that the stores hold kernels for, as in `sm_90`.
    pub chips: Vec<String>,
    /// Where NVRTC is looked for.
    pub searched: String,
    /// The largest `max_selected` of a layer, by the daemon's settings.
    pub selected_max: u64,
    /// `CUDA_DEVICE_MAX_CONNECTIONS` of this environment, which a worker started in it has too.
    pub connections: Option<String>,
    /// The same as the daemon sets it.
    pub daemon_connections: &'static str,
}

/// Every finding about driver, compiler and GPUs.
#[must_use]
pub fn judge(probed: &Probed, circumstances: &Circumstances) -> Vec<Finding> {
    let mut findings = Vec::new();
    let devices = || {
        probed.events.iter().filter_map(|event| match event {
            Event::Device { device } => Some(device),
            _ => None,
        })
    };
    findings.extend(silence(probed, &circumstances.mps));
    for event in &probed.events {
        match event {
            Event::Driver { version } => findings.push(started(*version, devices().next())),
            Event::Refused { refused } => findings.push(refusal(refused, probed, circumstances)),
            Event::Compiler { version } => {
                let meaning = "The daemon compiles what no store of kernels has.";
                let evidence = format!("{version}, {}", circumstances.searched);
                findings.push(Finding::new(Severity::Ok, "nvrtc", evidence).means(meaning));
            }
            Event::NoCompiler { reason } => {
                let severity = match devices().next() {
                    Some(_) => Severity::Problem,
                    None => missing(circumstances),
                };
                findings.push(no_compiler(reason, severity, circumstances));
            }
            Event::Begins { .. }
            | Event::Device { .. }
            | Event::Context { .. }
            | Event::NoContext { .. }
            | Event::Streams { .. } => {}
        }
    }
    findings.extend(nothing_seen(probed, circumstances));
    findings.extend(devices().flat_map(|each| device::judge(each, &probed.events, circumstances)));
    findings
}

/// What is no problem on a machine that need not have a GPU.
fn missing(circumstances: &Circumstances) -> Severity {
    if circumstances.gpu_wanted { Severity::Problem } else { Severity::Note }
}

/// A child that did not come to the end of its tale.
fn silence(probed: &Probed, mps: &Mps) -> Option<Finding> {
    let step = probed.events.iter().rev().find_map(|event| match event {
        Event::Begins { step } => Some(step.as_str()),
        _ => None,
    });
    let step = step.unwrap_or("starting");
    let hangs =
        "A daemon or a worker that is started like this hangs in the same place, without an error.";
    let (evidence, meaning, remedy) = match &probed.ending {
        Ending::Lives => return None,
        Ending::Ended(status) if status.success() => return None,
        Ending::Ended(status) => (
            format!("The process that tried the driver ended with {status} while {step}"),
            "A daemon or a worker that is started like this ends in the same place.",
            KERNEL_LOG,
        ),
        Ending::Killed(silent) if step == OPENING_COMPILER => (
            format!(
                "Nothing came back within {silent:?} while {step}; the process that tried was killed"
            ),
            hangs,
            "Install NVRTC again, or name another directory (cuda.nvrtc_directory).",
        ),
        Ending::Killed(silent) => (
            format!(
                "Nothing came back within {silent:?} while {step}; the process that tried was killed. {}",
                cause(mps)
            ),
            hangs,
            if is_there(mps) { OTHER_USER } else { KERNEL_LOG },
        ),
        Ending::Stuck(silent) => (
            format!(
                "Nothing came back within {silent:?} while {step}, and the process that tried cannot even be killed"
            ),
            hangs,
            KERNEL_LOG,
        ),
    };
    let finding = Finding::new(Severity::Problem, "driver_answers", evidence);
    Some(finding.means(meaning).remedied_by(remedy))
}

/// What to do about a device that is not well.
const KERNEL_LOG: &str = "Look at the kernel's log (dmesg, Xid) and at `nvidia-smi`. A GPU that does not answer is reset, or the \
                          machine restarted.";
/// What to do about an MPS server of another user.
const OTHER_USER: &str = "Run daemon and workers as the MPS server's user, or start MPS with -multiuser-server, or end the server \
                          (echo quit | nvidia-cuda-mps-control) once nobody uses it.";

fn is_there(mps: &Mps) -> bool {
    mps.foreign_server().is_some() || mps.control_owner.is_some()
}

/// Why a call of the driver does not return, as far as the machine shows.
fn cause(mps: &Mps) -> String {
    let (own, evidence) = (mps.own_uid, mps.evidence());
    let rule = "a client of another user than the MPS server's waits for ever";
    match mps.foreign_server() {
        Some(server) => format!(
            "The cause, unless MPS was started with -multiuser-server: {server}, this is user {own}, and {rule}"
        ),
        None if is_there(mps) => format!(
            "The likely cause: MPS is there ({evidence}), this is user {own}, and {rule}. Its server may run in another container"
        ),
        None => format!("MPS is not to be seen ({evidence}): the GPU or its driver hangs"),
    }
}

fn started(version: i32, seen: Option<&SeenDevice>) -> Finding {
    if version == 0 {
        return Finding::new(Severity::Ok, "driver", "it loads, and says that there is no device");
    }
    let release = seen.and_then(|seen| seen.outside.as_ref()?.driver_release.as_ref()).map_or_else(
        || "its release is unknown without libnvidia-ml".to_owned(),
        |it| format!("release {it}"),
    );
    let evidence = format!("CUDA {}, {release}", device::version_text(version));
    Finding::new(Severity::Ok, "driver", evidence).means("The driver starts.")
}

fn has_started(probed: &Probed) -> bool {
    probed.events.iter().any(|event| matches!(event, Event::Driver { .. }))
}

fn refusal(refused: &Refused, probed: &Probed, circumstances: &Circumstances) -> Finding {
    // A driver that is there and refuses is broken, whoever wants a GPU.
    let severity = if refused.no_driver { missing(circumstances) } else { Severity::Problem };
    let meaning = match severity {
        Severity::Note => "A daemon of this machine serves its memory (--device host) and no GPU.",
        Severity::Problem | Severity::Warning | Severity::Ok => "No daemon can serve a GPU here.",
    };
    let check = if has_started(probed) { "devices" } else { "driver" };
    let finding = Finding::new(severity, check, &refused.sentence);
    finding.means(meaning).remedied_by(&refused.remedy)
}

fn no_compiler(reason: &str, severity: Severity, circumstances: &Circumstances) -> Finding {
    let (chips, searched) = (&circumstances.chips, &circumstances.searched);
    if chips.is_empty() {
        return Finding::new(severity, "nvrtc", format!("{reason} ({searched})"))
            .means("No store holds kernels, and there is no compiler: nothing could be launched on a GPU.")
            .remedied_by(
                "Install NVRTC 11.7 or newer (pip install nvidia-cuda-nvrtc) and name its directory as cuda.nvrtc_directory, or \
                 fill a store (statecopy kernels build).",
            );
    }
    let evidence =
        format!("{reason} ({searched}); the stores hold kernels for {}", chips.join(", "));
    Finding::new(Severity::Note, "nvrtc", evidence)
        .means("With a filled store no compiler is needed. A class of layers that it lacks is PREPARE_FAILED.")
}

/// A driver that works and has no device.
fn nothing_seen(probed: &Probed, circumstances: &Circumstances) -> Option<Finding> {
    let whole = match &probed.ending {
        Ending::Lives => true,
        Ending::Ended(status) => status.success(),
        Ending::Killed(_) | Ending::Stuck(_) => false,
    };
    let told = |event: &Event| matches!(event, Event::Device { .. } | Event::Refused { .. });
    if !whole || !has_started(probed) || probed.events.iter().any(told) {
        return None;
    }
    let finding = Finding::new(missing(circumstances), "devices", "The driver sees no device");
    Some(finding.means("No GPU can be served from here.").remedied_by(
        "Give this process a device: the container's devices, and CUDA_VISIBLE_DEVICES, which is not to be empty.",
    ))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::findings::mps::Server;

    fn hung(step: &str, mps: &Mps) -> Finding {
        let events = vec![Event::Begins { step: step.to_owned() }];
        let ending = Ending::Killed(Duration::from_secs(20));
        silence(&Probed { events, ending }, mps).unwrap()
    }

    #[test]
    fn a_driver_that_hangs_is_told_with_the_mps_server_of_another_user() {
        let server = Server { pid: 4_242, uid: 0 };
        let mut mps = Mps {
            directory: "/pipes".into(),
            control_owner: Some(0),
            servers: vec![server],
            own_uid: 1_000,
        };
        let found = hung("starting the driver (cuInit)", &mps);
        assert_eq!(found.severity, Severity::Problem);
        for part in [
            "within 20s while starting the driver (cuInit)",
            "process 4242 of user 0",
            "this is user 1000",
        ] {
            assert!(found.evidence.contains(part), "{part} in {found:?}");
        }
        assert!(found.remedy.contains("-multiuser-server"), "{found:?}");
        assert!(!hung(OPENING_COMPILER, &mps).evidence.contains("MPS"));

        mps.servers.clear();
        assert!(hung("x", &mps).evidence.contains("The likely cause"));
        mps.control_owner = None;
        let found = hung("x", &mps);
        assert!(found.evidence.contains("MPS is not to be seen"), "{found:?}");
        assert!(found.remedy.contains("Xid"), "{found:?}");
    }
}
