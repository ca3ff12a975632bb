//! The command line of the daemon, for the binary `statecopyd` and for the `statecopy` command that starts itself again.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use statecopy_descriptors::raise_descriptor_limit;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::config::{self, ConfigError, Flags, Loaded, SelfProgram};
use crate::device_process::{self, DeviceProcessError};
use crate::supervisor::{self, Outcome, RuntimeDirectoryError, SupervisorError, logging};

/// Threads of the supervisor: it serves control, never data.
const SUPERVISOR_THREADS: usize = 2;
/// Signals that wait to be looked at: a third one means no more than a second.
const SIGNALS_HELD: usize = 2;

/// How the command ended. The numbers are those of sysexits.h where it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Exit {
    /// Drained, or printed.
    Done = 0,
    /// Ended before everything that was accepted was finished.
    Cut = 1,
    /// A device does not serve, or no longer.
    Unavailable = 69,
    /// A server ended by itself.
    Software = 70,
    /// The system refused something.
    System = 71,
    /// The runtime directory cannot be used.
    RuntimeDirectory = 73,
    /// Another daemon serves this runtime directory.
    AlreadyRunning = 75,
    /// The configuration is refused.
    Config = 78,
}

/// Owns the state copies of linear-attention layers for the workers of this machine.
///
/// Workers open a session over gRPC on a Unix socket, share their caches by descriptor, and ask for gathers and scatters.
/// Settings come from defaults, then /etc/statecopy/statecopyd.toml (or --config), then variables STATECOPY_* (a field of a
/// table by two underscores: STATECOPY_LIMITS__LAYERS_MAX; a list by commas), then flags; `statecopyd config` prints the result.
#[derive(Debug, Parser)]
#[command(name = "statecopyd", version, after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  statecopyd serve                                  serve the host device for this user
  statecopyd serve --device cuda:0 --device cuda:1  serve two GPUs, each by a process of its own
  statecopyd serve --runtime-dir /tmp/sc --http-address off
  STATECOPY_LIMITS__LAYERS_MAX=69 statecopyd config print what would be in force, with a comment a setting

SIGTERM or SIGINT drains: accepted copies are finished, then it ends. A second one ends it at once.

Exit codes: 0 drained; 1 ended before all was finished, by a second signal or
at the end of the grace; 2 usage; 69 a device does not serve; 70 a server ended by itself;
71 the system refused; 73 the runtime directory cannot be used; 75 another daemon serves it; 78 configuration";

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve until told to end by SIGTERM, SIGINT or the Drain call
    Serve {
        #[command(flatten)]
        flags: Flags,
    },
    /// Print the effective configuration: TOML with a comment a setting, which --config reads again
    Config {
        #[command(flatten)]
        flags: Flags,
        /// Print one JSON object instead
        #[arg(long)]
        json: bool,
    },
    /// Become a device process; only the supervisor starts it
    #[command(hide = true)]
    DeviceProcess,
}

/// Runs the command. `program` are the arguments with which this executable becomes a device process.
pub fn run(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    program: SelfProgram,
) -> ExitCode {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version go to standard output and are no error.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
        }
    };
    let exit = match arguments.command {
        Command::Serve { flags } => serve(&flags, program),
        Command::Config { flags, json } => print_config(&flags, json),
        Command::DeviceProcess => become_device_process(),
    };
    ExitCode::from(exit as u8)
}

#[expect(
    clippy::disallowed_methods,
    reason = "the settings' own variables, read once at the start"
)]
fn load(flags: &Flags) -> Result<Loaded, ConfigError> {
    config::load(flags, config::texts(std::env::vars_os())?)
}

fn print_config(flags: &Flags, json: bool) -> Exit {
    let Loaded { settings, ignored, .. } = match load(flags) {
        Ok(loaded) => loaded,
        Err(error) => return complain(&error, Exit::Config),
    };
    for variable in ignored {
        let text = format!("statecopyd: warning: {variable}\n");
        let _ = io::stderr().write_all(text.as_bytes());
    }
    let text = if json {
        config::to_json(&settings).map(|text| text + "\n").map_err(io::Error::other)
    } else {
        Ok(config::to_toml(&settings))
    };
    match text.and_then(|text| io::stdout().write_all(text.as_bytes())) {
        Ok(()) => Exit::Done,
        // Whoever read it has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Done,
        Err(error) => complain(&error, Exit::System),
    }
}

fn serve(flags: &Flags, program: SelfProgram) -> Exit {
    let loaded = match load(flags) {
        Ok(loaded) => loaded,
        Err(error) => return complain(&error, Exit::Config),
    };
    if let Err(error) = logging::start(&loaded.settings.log) {
        return complain(&error, Exit::System);
    }
    end_on_panic();
    for ignored in &loaded.ignored {
        let (variable, meant) = (&ignored.variable, ignored.meant.as_deref());
        tracing::warn!(variable, meant, "the variable is no setting and is ignored");
    }
    match raise_descriptor_limit() {
        Ok(limit) => tracing::debug!(soft = limit.soft, hard = limit.hard, "open files"),
        Err(error) => tracing::warn!(%error, "the limit of open files cannot be raised"),
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(SUPERVISOR_THREADS)
        .thread_name("supervisor")
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return complain(&error, Exit::System),
    };
    let outcome = runtime.block_on(async {
        let (_forwarder, signals) = watch_signals()
            .map_err(|source| SupervisorError::System { action: "watch signals", source })?;
        supervisor::run(loaded.settings, program, signals).await
    });
    // Nothing is waited for any more: what had to be finished is finished.
    runtime.shutdown_background();
    match outcome {
        Ok(Outcome::Drained) => Exit::Done,
        Ok(Outcome::Unfinished | Outcome::Cut) => Exit::Cut,
        Err(error) => complain(&error, exit_of(&error)),
    }
}

fn become_device_process() -> Exit {
    match device_process::run() {
        Ok(()) => Exit::Done,
        // The supervisor was told, and says it: once is enough.
        Err(DeviceProcessError::Refused(_)) => Exit::Unavailable,
        Err(error) => complain(&error, Exit::Unavailable),
    }
}

fn exit_of(error: &SupervisorError) -> Exit {
    match error {
        SupervisorError::Config(_) | SupervisorError::SameDevice { .. } => Exit::Config,
        SupervisorError::RuntimeDirectory(RuntimeDirectoryError::AlreadyRunning { .. }) => {
            Exit::AlreadyRunning
        }
        SupervisorError::RuntimeDirectory(_) => Exit::RuntimeDirectory,
        SupervisorError::Device { .. } | SupervisorError::DeviceFailed => Exit::Unavailable,
        SupervisorError::Http { .. } | SupervisorError::System { .. } => Exit::System,
        SupervisorError::Server { .. } => Exit::Software,
    }
}

/// Says on standard error why the command ends, with every cause.
fn complain(error: &dyn std::error::Error, exit: Exit) -> Exit {
    let mut text = format!("statecopyd: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text.push('\n');
    // Where standard error is gone there is nobody to tell.
    let _ = io::stderr().write_all(text.as_bytes());
    exit
}

/// A panic ends the daemon, in every build: nothing stays half-dead.
fn end_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        before(panic);
        std::process::abort();
    }));
}

/// Passes SIGTERM and SIGINT on.
fn watch_signals() -> io::Result<(AbortOnDropHandle<()>, mpsc::Receiver<&'static str>)> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (sender, receiver) = mpsc::channel(SIGNALS_HELD);
    let forward = async move {
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if sender.send(name).await.is_err() {
                return;
            }
        }
    };
    Ok((AbortOnDropHandle::new(tokio::spawn(forward)), receiver))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_its_help_names_every_exit_code() {
        Arguments::command().debug_assert();
        let help = Arguments::command().render_long_help().to_string();
        for exit in [
            Exit::Done,
            Exit::Cut,
            Exit::Unavailable,
            Exit::Software,
            Exit::System,
            Exit::RuntimeDirectory,
            Exit::AlreadyRunning,
            Exit::Config,
        ] {
            assert!(help.contains(&format!("{} ", exit as u8)), "{exit:?}");
        }
    }

    #[test]
    fn every_flag_states_the_default_of_its_setting() {
        let mut command = Arguments::command();
        command.build();
        let defaults = config::Settings::default();
        for name in ["serve", "config"] {
            let flags = command.find_subcommand(name).unwrap();
            let help = |id: &str| {
                let flag = flags.get_arguments().find(|flag| flag.get_id() == id).unwrap();
                flag.get_help().unwrap().to_string()
            };
            let of_the_command = ["help", "version", "json"];
            let ids = flags.get_arguments().map(|flag| flag.get_id().as_str());
            for id in ids.filter(|id| !of_the_command.contains(id)) {
                assert_eq!(help(id).matches("[default: ").count(), 1, "{id}: {}", help(id));
            }
            for (id, default) in [
                ("config", "/etc/statecopy/statecopyd.toml, where it is there"),
                (
                    "runtime_dir",
                    "$XDG_RUNTIME_DIR/statecopy, or /run/statecopy where that is not set",
                ),
                ("devices", "host"),
                ("http_address", &defaults.http_address),
                ("allow_uids", "none"),
                ("drain_grace_ms", &defaults.drain_grace_ms.to_string()),
                ("copy_threads", "as many as the process may use"),
                ("spin_us", &defaults.spin_us.to_string()),
                ("busy_poll", "false"),
                ("executor_cpu", "any"),
                ("abort_after_seal", "false"),
                ("log_format", defaults.log.format.label()),
                ("log_level", &defaults.log.level),
            ] {
                assert!(help(id).ends_with(&format!("[default: {default}]")), "{}", help(id));
            }
        }
    }

    #[test]
    fn flags_of_serve_and_config_are_the_same() {
        let arguments = |command| {
            let line =
                ["statecopyd", command, "--device", "host", "--allow-uid", "7", "--spin-us=3"];
            Arguments::try_parse_from(line).unwrap().command
        };
        let Command::Serve { flags } = arguments("serve") else { panic!("another command") };
        assert_eq!((flags.allow_uids, flags.spin_us), (vec![7], Some(3)));
        let Command::Config { flags, json } = arguments("config") else {
            panic!("another command")
        };
        assert_eq!((flags.allow_uids, flags.spin_us, json), (vec![7], Some(3), false));
    }
}
