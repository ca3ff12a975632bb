//! A worker process that does as it is told, and that can be killed at any point.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::Signal;

use crate::daemon::{binary, send_signal};

/// A running worker. Dropping it kills it.
#[derive(Debug)]
pub struct WorkerProcess {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl WorkerProcess {
    /// Starts a worker that will talk to the daemon behind a control socket.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn start(control_socket: &Path) -> Self {
        Self::start_in(control_socket, [])
    }

    /// The same with variables of the environment.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn start_in(
        control_socket: &Path,
        environment: impl IntoIterator<Item = (&'static str, OsString)>,
    ) -> Self {
        let mut child = Command::new(binary("statecopy-tests", "statecopy-test-worker"))
            .arg(control_socket)
            .envs(environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the worker starts");
        let orders = child.stdin.take().expect("a pipe");
        let answers = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, orders, answers }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives an order, and does not wait.
    ///
    /// # Panics
    /// When it is gone.
    pub fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").expect("the worker lives");
    }

    /// Waits for the answer of the oldest order.
    ///
    /// # Panics
    /// When it ended instead.
    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("an answer");
        assert!(line.ends_with('\n'), "the worker ended");
        line.trim_end().to_owned()
    }

    /// Gives an order, and waits for its answer.
    ///
    /// # Panics
    /// When it ended instead.
    pub fn say(&mut self, order: &str) -> String {
        self.order(order);
        self.answer()
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// When it is gone.
    pub fn signal(&self, signal: Signal) {
        send_signal(self.pid(), signal).expect("the worker lives");
    }

    /// Kills it, and leaves a zombie until it is dropped.
    ///
    /// # Panics
    /// When it is gone.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
