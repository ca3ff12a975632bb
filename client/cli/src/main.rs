//! `statecopy`: the command line of the state copy daemon.
//!
//! `demo` and `replay` show the whole path with a daemon of their own, `bench` measures it, `status` and `ping` ask a running
//! one; `doctor` looks at the machine; `kernels` compiles ahead of time what a daemon on a GPU needs. The program also is that daemon and its device process: it starts itself again.
#![forbid(unsafe_code)]

mod ask;
mod bench;
mod cli;
mod demo;
mod doctor;
mod failure;
mod kernels;
mod replay;
mod spawn;
mod status;
mod terminal;
mod worker;
mod workload;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Demo(options) => demo::run(&options),
        Command::Replay(options) => replay::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Status(options) => status::run(&options),
        Command::Ping(options) => ask::ping(&options),
        Command::Kernels(options) => kernels::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::DoctorProbe(options) => return doctor::probe::run(&options),
        Command::DemoWorker(options) => return demo::worker::run(&options),
        Command::BenchPeer(options) => return bench::peer::be_peer(&options),
        Command::Daemon(options) => return spawn::be_daemon(options),
    };
    match done {
        Ok(exit) => exit,
        Err(error) => failure::report(&error),
    }
}
