//! The machine that a run took place on, and what the kernel tells of processes.

use std::collections::BTreeMap;
use std::fs;
use std::iter;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use statecopy_kernels::device::Device;
use statecopy_kernels::signature::DeviceUuid;

use crate::failure::Failure;

/// How long a thread may take to fall asleep.
const ASLEEP_MAX: Duration = Duration::from_secs(5);
/// Between two looks at a thread.
const POLL: Duration = Duration::from_micros(50);

/// What the samples depend on beside the program.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Machine {
    /// The processor's own name.
    pub(super) cpu_model: String,
    /// CPUs that this process may use.
    pub(super) cpus: usize,
    /// The kernel's release.
    pub(super) kernel: String,
    /// The frequency governor of CPU 0; `None` where the kernel tells none, as in most virtual machines.
    pub(super) governor: Option<String>,
    /// Memory, in KiB.
    pub(super) memory_kib: Option<u64>,
    /// Transparent huge pages of anonymous memory, as the kernel prints the setting.
    pub(super) transparent_hugepage: Option<String>,
    /// Tasks that wanted to run in the last minute before the run: more than one is somebody else's noise.
    pub(super) load_average_before: Option<f64>,
    /// The same at the end of the run.
    pub(super) load_average_after: Option<f64>,
}

impl Machine {
    /// Looks at this machine.
    pub(super) fn look() -> anyhow::Result<Self> {
        let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = processors.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == "model name").then(|| value.trim().to_owned())
        });
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Ok(Self {
            cpu_model: model.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cpus: cpus_allowed()?.len(),
            kernel: text("/proc/sys/kernel/osrelease").context("The kernel's release")?,
            governor: text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            memory_kib: kib(&memory, "MemTotal"),
            transparent_hugepage: text("/sys/kernel/mm/transparent_hugepage/enabled"),
            load_average_before: load_average(),
            load_average_after: None,
        })
    }
}

/// What copies.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct DeviceFacts {
    /// `host` or `cuda`.
    pub(super) kind: String,
    /// The name that a person reads.
    pub(super) name: String,
    /// What the kernels depend on: driver, compiler, source.
    pub(super) configuration: BTreeMap<String, String>,
    /// What nvidia-smi says of it before the run and after it, clocks above all.
    pub(super) nvidia_smi: Vec<BTreeMap<String, String>>,
}

impl DeviceFacts {
    /// Of a device that this process has open.
    pub(super) fn of<D: Device>(device: &D) -> Self {
        let description = device.description();
        let mut facts = Self {
            kind: description.kind.to_owned(),
            name: description.name.clone(),
            configuration: device.configuration().entries.into_iter().collect(),
            nvidia_smi: Vec::new(),
        };
        facts.look(&description.uuid);
        facts
    }

    /// Asks nvidia-smi about a GPU, where there is one.
    pub(super) fn look(&mut self, uuid: &DeviceUuid) {
        if self.kind == "cuda" {
            self.nvidia_smi.extend(nvidia_smi(uuid));
        }
    }
}

/// Fields of nvidia-smi.
const SMI_FIELDS: [&str; 9] = [
    "driver_version",
    "pstate",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "temperature.gpu",
    "power.draw",
    "compute_mode",
];

fn nvidia_smi(uuid: &DeviceUuid) -> Option<BTreeMap<String, String>> {
    let digits = format!("{:032x}", u128::from_be_bytes(uuid.0));
    let groups = [0..8, 8..12, 12..16, 16..20, 20..32].map(|group| &digits[group]);
    let asked = Command::new("nvidia-smi")
        .arg(format!("--query-gpu={}", SMI_FIELDS.join(",")))
        .args(["--format=csv,noheader", "--id"])
        .arg(format!("GPU-{}", groups.join("-")))
        .stdin(Stdio::null())
        .output();
    let answer = asked.ok().filter(|answer| answer.status.success())?;
    let line = String::from_utf8_lossy(&answer.stdout);
    let values = line.trim().split(',').map(|value| value.trim().to_owned());
    Some(SMI_FIELDS.map(str::to_owned).into_iter().zip(values).collect())
}

/// Tasks that wanted to run in the last minute.
pub(super) fn load_average() -> Option<f64> {
    text("/proc/loadavg")?.split(' ').next()?.parse().ok()
}

/// Two different CPUs: the worker's and the executor's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CpuPair {
    /// The worker's, and that of every path in process.
    pub(super) worker: usize,
    /// The executor's, and that of the ping-pong's other side.
    pub(super) executor: usize,
}

impl CpuPair {
    /// The first two that this process may use, of different cores where it can be.
    ///
    /// # Errors
    /// When there are fewer.
    pub(super) fn choose() -> anyhow::Result<Self> {
        match *cpus_allowed()? {
            [worker, second, ref others @ ..] => {
                let core = core_of(worker);
                let elsewhere = |cpu: &usize| core.is_none() || core_of(*cpu) != core;
                let mut candidates = iter::once(&second).chain(others);
                let executor = candidates.find(|cpu| elsewhere(cpu)).copied().unwrap_or(second);
                Ok(Self { worker, executor })
            }
            _ => Err(Failure::usage(
                "This process may use one CPU only; the benchmark needs two: one for the worker, one for the executor",
                "Widen the affinity (taskset) or the CPU quota, or use a machine with two CPUs.",
            )
            .into()),
        }
    }
}

/// The CPUs of the same core, as the kernel lists them.
fn core_of(cpu: usize) -> Option<String> {
    text(&format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
}

/// Keeps the calling thread on one CPU.
pub(super) fn pin_to(cpu: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("Staying on CPU {cpu}"))
}

/// The calling thread stays on one CPU until this is dropped.
#[derive(Debug)]
pub(super) struct Pinned {
    before: CpuSet,
}

impl Pinned {
    /// Moves it there.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn to(cpu: usize) -> anyhow::Result<Self> {
        let before = sched_getaffinity(None).context("The CPUs of this thread")?;
        pin_to(cpu)?;
        Ok(Self { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // It was allowed there before.
        let _moved = sched_setaffinity(None, &self.before);
    }
}

fn cpus_allowed() -> anyhow::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("The CPUs of this process")?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect())
}

/// Private memory of a process, in KiB.
pub(super) fn rss_anon_kib(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| path.clone())?;
    kib(&status, "RssAnon").with_context(|| format!("{path} has no RssAnon"))
}

/// CPU time of all threads of a process.
pub(super) fn cpu_time(pid: u32) -> anyhow::Result<Duration> {
    let mut nanoseconds = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).context("Threads of a process")? {
        let path = task?.path().join("schedstat");
        // A thread may end meanwhile.
        let Ok(line) = fs::read_to_string(&path) else { continue };
        let first = line.split(' ').next().and_then(|field| field.parse::<u64>().ok());
        nanoseconds += first.with_context(|| format!("{} is not understood", path.display()))?;
    }
    Ok(Duration::from_nanos(nanoseconds))
}

/// One thread of another process.
#[derive(Debug, Clone)]
pub(super) struct Thread {
    stat: String,
}

impl Thread {
    /// The first thread of a process.
    pub(super) fn main_of(pid: u32) -> Self {
        Self { stat: format!("/proc/{pid}/task/{pid}/stat") }
    }

    /// The thread of that name.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn named(pid: u32, name: &str) -> anyhow::Result<Self> {
        for task in fs::read_dir(format!("/proc/{pid}/task")).context("Threads of a process")? {
            let directory = task?.path();
            let comm = fs::read_to_string(directory.join("comm")).unwrap_or_default();
            if comm.trim_end() == name {
                return Ok(Self { stat: directory.join("stat").display().to_string() });
            }
        }
        bail!("Process {pid} has no thread called {name}")
    }

    /// Waits until it sleeps.
    ///
    /// # Errors
    /// When it does not in time, or has ended.
    pub(super) fn wait_until_asleep(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + ASLEEP_MAX;
        loop {
            let stat = fs::read_to_string(&self.stat).with_context(|| self.stat.clone())?;
            if state(&stat) == Some('S') {
                return Ok(());
            }
            if Instant::now() >= deadline {
                bail!("A thread does not fall asleep within {} s", ASLEEP_MAX.as_secs());
            }
            thread::sleep(POLL);
        }
    }
}

/// The letter behind the name, which may hold anything but a newline.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

fn kib(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name == key).then(|| value.trim().strip_suffix(" kB")?.trim().parse().ok())?
    })
}

fn text(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_knows_its_private_memory_and_its_cpu_time() {
        let pid = std::process::id();
        assert!(rss_anon_kib(pid).unwrap() > 0);
        let before = cpu_time(pid).unwrap();
        let mut value = 1_u64;
        for step in 0..5_000_000_u64 {
            value = std::hint::black_box(value.wrapping_mul(3) ^ step);
        }
        // The kernel accounts a running thread's time at the latest when it is scheduled again.
        let deadline = Instant::now() + Duration::from_secs(10);
        while cpu_time(pid).unwrap() <= before {
            assert!(Instant::now() < deadline, "no CPU time was seen");
            thread::yield_now();
        }
    }

    #[test]
    fn the_state_is_the_letter_behind_a_name_of_any_form() {
        assert_eq!(state("12 (a) b) S 1 2"), Some('S'));
        assert_eq!(state("12 (executor) R 1 2"), Some('R'));
        assert_eq!(state("nonsense"), None);
    }

    #[test]
    fn sizes_are_read_by_their_whole_name() {
        let status = "VmRSS:\t  9 kB\nRssAnon:\t    1234 kB\nThreads:\t3\n";
        assert_eq!(kib(status, "RssAnon"), Some(1234));
        assert_eq!(kib(status, "Rss"), None);
        assert_eq!(kib(status, "Threads"), None);
    }

    #[test]
    fn a_sleeping_thread_of_this_process_is_found_by_its_name() {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let sleeper = thread::Builder::new()
            .name("bench-sleeper".to_owned())
            .spawn(move || ended.recv().is_err())
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        // A thread names itself after it was started.
        let found = loop {
            match Thread::named(std::process::id(), "bench-sleeper") {
                Ok(found) => break found,
                Err(error) => assert!(Instant::now() < deadline, "{error:?}"),
            }
        };
        found.wait_until_asleep().unwrap();
        drop(end);
        assert!(sleeper.join().unwrap());
        assert!(Thread::named(std::process::id(), "no such thread").is_err());
    }
}
