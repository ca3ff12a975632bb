//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, Subcommand};
use statecopy_client::{ADDRESS_VARIABLE, Address, ConnectOptions, Error};
use statecopy_kernels::cuda::CudaSelector;
use statecopy_kernels::cuda::compile::Arch;
use statecopy_kernels::host::host_uuid;
use statecopyd::config::DeviceName;

use crate::failure::Failure;
use crate::replay::scheduler::CHUNK_ALIGNMENT;
use crate::workload::preset::Preset;

/// Copies recurrent states between caches and packed buffers, through a daemon.
///
/// A worker shares its state caches with statecopyd, which gathers the initial states of selected sequences into a packed
/// buffer and scatters the final states back. `statecopy demo` shows all of it on this machine: no accelerator, no root,
/// no set-up.
#[derive(Debug, Parser)]
#[command(
    name = "statecopy",
    version,
    after_help = "Exit codes: 0 all right; 1 what was verified is not what it must be (copied bytes, stored kernels); \
                  2 wrong usage or input; 3 something else failed; 4 doctor found a problem; 20 to 48: the daemon refused, or the device layer in this \
                  program, one code for each refusal (docs/exit-codes.md lists them)."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a daemon and workers, copy states in a real cache layout, and verify every byte
    Demo(DemoOptions),
    /// Replay a request trace as a continuous-batching server would, and verify every copy
    Replay(ReplayOptions),
    /// Measure what a copy costs through the daemon beside the same copy in one process, and report on it
    Bench(BenchOptions),
    /// Show sessions, regions, layers, plans and counters of a daemon
    Status(StatusOptions),
    /// Ask a daemon for a sign of life; the exit code is 0 only when it answers
    Ping(PingOptions),
    /// Compile the kernels of GPUs ahead of time, and look at what is compiled
    Kernels(KernelsOptions),
    /// Look whether this machine can serve, before anything is deployed
    ///
    /// Looks at driver, compiler, GPUs, MPS, memory, limits and the daemon's address, and says of each what was found, what it
    /// means for statecopy and what to do: problems first, then warnings and notes. Nothing is changed, and no daemon is needed.
    /// Run it as the user, in the container and with the environment that daemon and workers will have: that is what it judges.
    ///
    /// The driver is tried in a child process, which is killed where a call does not return: doctor itself never hangs.
    Doctor(DoctorOptions),
    #[command(hide = true)]
    DoctorProbe(DoctorProbeOptions),
    #[command(hide = true)]
    DemoWorker(WorkerOptions),
    #[command(hide = true)]
    BenchPeer(BenchPeerOptions),
    #[command(hide = true)]
    Daemon(DaemonOptions),
}

/// Which daemon to ask.
#[derive(Debug, Args)]
pub(crate) struct AskOptions {
    /// The daemon: unix:///path, a socket's path (ending in .sock), or its runtime directory. Without it: $STATECOPY_ADDR, then
    /// $XDG_RUNTIME_DIR/statecopy, then /run/statecopy
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) address: Option<Address>,
    /// How long to wait for the answer, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2_000)]
    pub(crate) timeout_ms: u32,
}

impl AskOptions {
    /// How long to wait.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.into())
    }

    /// The daemon named, or the one that the environment names.
    ///
    /// # Errors
    /// When the environment holds no address.
    pub(crate) fn address(&self) -> anyhow::Result<Address> {
        match &self.address {
            Some(address) => Ok(address.clone()),
            None => Ok(Address::from_env().map_err(|error| {
                Failure::usage(format!("{ADDRESS_VARIABLE}: {error}"), Error::from(error).remedy())
            })?),
        }
    }
}

/// `statecopy ping`.
#[derive(Debug, Args)]
pub(crate) struct PingOptions {
    #[command(flatten)]
    pub(crate) ask: AskOptions,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `statecopy status`.
#[derive(Debug, Args)]
pub(crate) struct StatusOptions {
    #[command(flatten)]
    pub(crate) ask: AskOptions,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// What a cache looks like and which daemon copies.
#[derive(Debug, Args)]
pub(crate) struct CacheOptions {
    /// Use this daemon instead of starting one: unix:///path, a socket's path (ending in .sock), or its runtime directory
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) address: Option<Address>,
    /// The device that copies, where the daemon serves several. Only host copies the memory in which these caches lie; `statecopy
    /// bench` copies on GPUs
    #[arg(long, default_value_t = DeviceName::Host)]
    pub(crate) device: DeviceName,
    /// Seed of every random choice
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

impl CacheOptions {
    /// The UUID of the device that copies.
    ///
    /// # Errors
    /// When the device does not copy host memory, or this machine does not tell its UUID.
    pub(crate) fn device_uuid(&self) -> anyhow::Result<String> {
        match self.device {
            DeviceName::Host => Ok(host_uuid().map_err(Error::from)?.to_string()),
            DeviceName::Cuda(_) => Err(Failure::usage(
                format!("{} does not copy host memory, in which these caches lie", self.device),
                "Use --device host, or copy on a GPU with `statecopy bench --device`.",
            )
            .into()),
        }
    }
}

/// `statecopy demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoOptions {
    #[command(flatten)]
    pub(crate) common: CacheOptions,
    /// The cache layout
    #[arg(long, value_enum, default_value_t = Preset::KimiK3Tp8)]
    pub(crate) preset: Preset,
    /// Layers of each worker
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) layers: u32,
    /// Rows of each layer's cache [default: the preset's]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rows: Option<u32>,
    /// Rows that one step selects at most [default: the preset's]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    pub(crate) selected: Option<u32>,
    /// Prefill steps of each worker
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) steps: u64,
    /// Worker processes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) workers: u32,
    /// Flip one byte of the first worker's cache behind its back: the demonstration must find it and exit with 1
    #[arg(long)]
    pub(crate) inject_fault: bool,
}

/// One worker of the demonstration.
#[derive(Debug, Args)]
pub(crate) struct WorkerOptions {
    #[arg(long)]
    pub(crate) address: Address,
    #[arg(long)]
    pub(crate) device_uuid: String,
    #[arg(long, value_enum)]
    pub(crate) preset: Preset,
    #[arg(long)]
    pub(crate) number: u32,
    #[arg(long)]
    pub(crate) layers: u32,
    #[arg(long)]
    pub(crate) rows: u64,
    #[arg(long)]
    pub(crate) selected: u64,
    #[arg(long)]
    pub(crate) steps: u64,
    #[arg(long)]
    pub(crate) seed: u64,
    #[arg(long)]
    pub(crate) inject_fault: bool,
}

/// `statecopy replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayOptions {
    /// The trace: one JSON object a line with timestamp (ms), input_length, output_length (tokens) and hash_ids (one for
    /// each 512-token block of the prompt; equal ids mean an equal prefix)
    #[arg(value_name = "TRACE.jsonl")]
    pub(crate) trace: PathBuf,
    #[command(flatten)]
    pub(crate) common: CacheOptions,
    /// The cache layout
    #[arg(long, value_enum, default_value_t = Preset::Tiny)]
    pub(crate) preset: Preset,
    /// Read only so many requests of the trace
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(crate) requests: Option<usize>,
    /// Layers that keep a state
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) layers: u32,
    /// Sequences that run at once
    #[arg(long, default_value_t = 128)]
    pub(crate) max_num_seqs: u32,
    /// Prompt tokens that one step computes, of all sequences together; at least 64
    #[arg(long, default_value_t = 2_048, value_parser = clap::value_parser!(u64).range(CHUNK_ALIGNMENT..))]
    pub(crate) chunk_tokens: u64,
    /// Rows of each layer's cache: running sequences and stored prefixes share them [default: 2 x max-num-seqs + 128]
    #[arg(long)]
    pub(crate) rows: Option<u32>,
    /// Ask for each layer by itself instead of for all layers in one request
    #[arg(long)]
    pub(crate) per_layer: bool,
    /// Only schedule: print what would be copied, and copy nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// `statecopy bench`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct BenchOptions {
    #[command(subcommand)]
    pub(crate) command: Option<BenchCommand>,
    #[command(flatten)]
    pub(crate) run: Option<BenchRunOptions>,
}

/// What to do with finished runs.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Print the tables of finished runs, and draw each one's distributions beside its file
    Report(BenchReportOptions),
}

/// A run.
#[derive(Debug, Args)]
pub(crate) struct BenchRunOptions {
    /// Where the record goes: one JSON file, which must not exist
    #[arg(long, value_name = "FILE", required = true)]
    pub(crate) output: PathBuf,
    /// Seed of orders, rows and bytes; each seed has a process and a file of its own
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// How often every path of every case is measured
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub(crate) trials: u64,
    /// Who makes the same copies in another way, a program and its arguments, for a GPU: as in
    /// 'python3 tests/device/triton_rival.py'
    #[arg(long, value_name = "COMMAND")]
    pub(crate) rival: Option<String>,
    /// The device to measure: host, `cuda:<ordinal>` or `cuda:<UUID>`. Drivers, compiler and stores of kernels are those of the
    /// daemon's settings (STATECOPY_ARTIFACT_STORE, STATECOPY_CUDA__NVRTC_DIRECTORY and their like)
    #[arg(long, default_value_t = DeviceName::Host)]
    pub(crate) device: DeviceName,
    /// Only cases whose name holds one of these parts, as in kimi-k3-tp8,24576/s1/
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    pub(crate) cases: Vec<String>,
    /// Rows of each layer's cache, where the usual ones are too many for the device: then calls find rows in its cache
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) cache_rows: Option<u64>,
    /// Let every CPU copy on both sides and pin nobody; without it one thread copies on each side
    #[arg(long)]
    pub(crate) all_cores: bool,
    /// Use this daemon (unix:///path, a socket's path, or its runtime directory) instead of starting one; its memory and idle time are not looked at
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) address: Option<Address>,
    /// The commit that this program was built from, for the record
    #[arg(long, value_name = "HASH")]
    pub(crate) commit: Option<String>,
    /// Sessions over which growth of memory is measured
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = RangedU64ValueParser::<usize>::new().range(2..=2_000))]
    pub(crate) sessions: usize,
    /// How long the CPU time of a daemon that nobody asks anything of is looked at, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    pub(crate) idle_ms: u64,
}

/// `statecopy bench report`.
#[derive(Debug, Args)]
pub(crate) struct BenchReportOptions {
    /// Records of runs; each is reported by itself, and its plot is FILE with the ending .svg
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
}

/// `statecopy kernels`.
///
/// A daemon on a GPU compiles its kernels when a worker registers the first layer of their class, and keeps them in a store on
/// disk. With a store that was filled before, it compiles nothing and needs no compiler: fill one when an image is built, on any
/// machine, with or without a GPU.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  statecopy kernels build --arch sm_90,sm_100 --all --store /opt/statecopy/kernels
                                            every kernel there is, for Hopper and Blackwell
  statecopy kernels build --arch sm_90 --preset kimi-k3-tp8
                                            only what a model needs, in the store of this user
  statecopy kernels list                    what is there
  statecopy kernels verify                  exit code 1 when a file is damaged, 2 when there is none

`build` needs NVRTC, NVIDIA's run-time compiler: `pip install nvidia-cuda-nvrtc` puts it into
site-packages/nvidia/*/lib (name that with --nvrtc), a CUDA toolkit has it too.")]
pub(crate) struct KernelsOptions {
    #[command(subcommand)]
    pub(crate) command: KernelsCommand,
}

/// What to do with compiled kernels.
#[derive(Debug, Subcommand)]
pub(crate) enum KernelsCommand {
    /// Compile kernels into a store; what is there already is left alone
    Build(KernelsBuildOptions),
    /// Show what a store holds
    List(KernelsStoreOptions),
    /// Check every file of a store; the exit code is 1 when one is damaged, and 2 when there is none or the store cannot be
    /// read
    Verify(KernelsStoreOptions),
}

/// `statecopy kernels build`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("which").required(true).multiple(true).args(["preset", "all"]))]
pub(crate) struct KernelsBuildOptions {
    /// The chips, with commas between them: sm_ and the compute capability, as in sm_80 (A100), sm_90 (H100, H200) or sm_100
    /// (B200)
    #[arg(long, value_name = "ARCH", value_delimiter = ',', required = true)]
    pub(crate) arch: Vec<Arch>,
    /// The kernels that layers of these cache layouts need
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) preset: Vec<Preset>,
    /// Every kernel there is: any layout, any type
    #[arg(long)]
    pub(crate) all: bool,
    /// Compile again what is there already
    #[arg(long)]
    pub(crate) force: bool,
    /// The directory of libnvrtc.so; without it the system's loader looks (LD_LIBRARY_PATH, then the usual places)
    #[arg(long, value_name = "DIR")]
    pub(crate) nvrtc: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) store: KernelsStoreOptions,
}

/// Which store of compiled kernels.
#[derive(Debug, Args)]
pub(crate) struct KernelsStoreOptions {
    /// The store, a directory [default: $XDG_CACHE_HOME/statecopy/kernels, else ~/.cache/statecopy/kernels, and without HOME
    /// /var/cache/statecopy/kernels]
    #[arg(long, value_name = "DIR")]
    pub(crate) store: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `statecopy doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  statecopy doctor                    the host and every GPU; a machine without a driver is no problem
  statecopy doctor --device cuda:0    what a daemon for this GPU needs; a missing driver is a problem
  statecopy doctor --device host      the host alone
  statecopy doctor --json             the same findings for a script: severity, check, device, evidence, meaning, remedy

Exit code 0: no finding is a problem. 4: at least one is. docs/doctor.md explains every check.")]
pub(crate) struct DoctorOptions {
    /// Look at this device: host, `cuda:<ordinal>` or `cuda:<UUID>` [default: the host and every GPU]
    #[arg(long)]
    pub(crate) device: Option<DeviceName>,
    /// How long one step of the driver may take before it counts as hanging, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..=600_000))]
    pub(crate) driver_timeout_ms: u32,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) ask: AskOptions,
}

/// The child that tries the driver.
#[derive(Debug, Args)]
pub(crate) struct DoctorProbeOptions {
    #[arg(long)]
    pub(crate) driver_library: PathBuf,
    #[arg(long)]
    pub(crate) nvrtc_directory: Option<PathBuf>,
    /// Ordinal or UUID.
    #[arg(long)]
    pub(crate) device: Option<CudaSelector>,
}

/// The other side of the benchmark's ping-pong.
#[derive(Debug, Args)]
pub(crate) struct BenchPeerOptions {
    #[arg(long)]
    pub(crate) cpu: usize,
}

/// The daemon that a command starts for itself, and its device process.
#[derive(Debug, Args)]
pub(crate) struct DaemonOptions {
    /// The command's temporary directory: the daemon ends with the command, and removes it if the command cannot
    #[arg(long)]
    pub(crate) directory: Option<PathBuf>,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<OsString>,
}

/// How a worker of this command connects. What is verified or measured is one life of a daemon: nobody waits for the next.
pub(crate) fn connect_options(label: String, device: Option<String>) -> ConnectOptions {
    ConnectOptions { label, device, reconnect_for: Duration::ZERO, ..ConnectOptions::default() }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_explains_its_exit_codes() {
        Cli::command().debug_assert();
        let help = Cli::command().render_long_help().to_string();
        for code in [
            "0 all right",
            "1 what was verified",
            "2 wrong usage",
            "3 something else",
            "4 doctor",
            "20 to 48",
        ] {
            assert!(help.contains(code), "{code} is missing in:\n{help}");
        }
        assert!(!help.contains("demo-worker"), "{help}");
        assert!(!help.contains("bench-peer"), "{help}");
        assert!(!help.contains("doctor-probe"), "{help}");
    }
}
