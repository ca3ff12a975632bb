//! What statecopy does on a real GPU: one command, one verdict a case.
//!
//! **What it is.** A native worker that brings device memory of every kind, shares it with a real `statecopyd`, has rows copied, and
//! compares every byte with the reference. Each case is a process of its own, so that a fault, a hang or an abort of one is that
//! case's verdict and no other's. It runs over the stub driver too, but for what needs a device.
//!
//! **What it is not.** It measures nothing: times in its lines are what a case waited.
//!
//! **Invariant.** Whatever becomes of a case, nothing that it started outlives it.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "verdicts are lines")]

mod cases;
mod daemon;
mod graphs;
mod known;
mod lanes;
mod patience;
mod rig;
mod setup;
mod suite;
mod watch;
mod wide;
mod worker;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};

use crate::cases::CASES;
use crate::setup::Setup;
use crate::worker::State;

/// Runs every case on one GPU, through a daemon of its own.
#[derive(Debug, Parser)]
#[command(name = "statecopy-device-suite", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the cases; the exit code is 0 only when all hold
    Run(RunOptions),
    /// Print the names of all cases
    List,
    /// Run one case in this process; only the suite starts it
    #[command(hide = true)]
    Case { name: String, setup: String },
    /// Say whether processes share the device through MPS; only the suite starts it
    #[command(hide = true)]
    SharedByMps { device: String, driver_library: PathBuf },
    /// Be a worker that is killed; only a case starts it
    #[command(hide = true)]
    Worker { state: State, setup: String },
}

/// What the suite runs with.
#[derive(Debug, Args)]
struct RunOptions {
    /// The daemon's program
    #[arg(long, value_name = "FILE")]
    statecopyd: PathBuf,
    /// The store of compiled kernels; without one the daemon compiles, and needs NVRTC
    #[arg(long, value_name = "DIR")]
    kernels: Option<PathBuf>,
    /// Where logs and verdicts.json are written
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// The device: its ordinal, or its UUID
    #[arg(long, default_value = "0")]
    device: String,
    /// The CUDA driver: a name that the loader searches for, or a path
    #[arg(long, value_name = "FILE", default_value = "libcuda.so.1")]
    driver_library: PathBuf,
    /// The processes are to share the device through MPS: fail where they do not
    #[arg(long)]
    mps: bool,
    /// No device is behind the driver: skip what needs one, and keep sizes small
    #[arg(long)]
    stub: bool,
    /// The commit that was built, for verdicts.json
    #[arg(long)]
    commit: Option<String>,
    /// Run only the cases whose names contain one of these
    cases: Vec<String>,
}

fn main() -> ExitCode {
    match obey(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn obey(command: Command) -> Result<ExitCode> {
    match command {
        Command::Run(options) => suite::run(&options),
        Command::List => {
            for case in CASES {
                println!("{}", case.name);
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Case { name, setup } => {
            let case = CASES.iter().find(|case| case.name == name);
            let case = case.with_context(|| format!("{name} is no case"))?;
            let setup: Setup = serde_json::from_str(&setup)?;
            println!("{}", (case.run)(&setup)?);
            Ok(ExitCode::SUCCESS)
        }
        Command::SharedByMps { device, driver_library } => {
            println!("{}", suite::is_shared_by_mps(&device, &driver_library)?);
            Ok(ExitCode::SUCCESS)
        }
        Command::Worker { state, setup } => {
            worker::run(&serde_json::from_str(&setup)?, state)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
