//! The daemon's own binary. Everything is in the library, so that the `statecopy` command can be the daemon too.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use statecopyd::config::SelfProgram;

fn main() -> ExitCode {
    let program = SelfProgram { arguments: vec!["device-process".to_owned()] };
    statecopyd::cli::run(std::env::args_os(), program)
}
