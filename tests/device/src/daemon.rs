//! The daemon under test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use statecopy_client::Address;
use statecopy_client::blocking::Admin;
use statecopy_client::v1::{DeviceStatus, InspectReply};

use crate::patience::eventually;
use crate::setup::Setup;

/// A running `statecopyd`. Dropped, it is ended, and its device process with it.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    socket: PathBuf,
}

impl Daemon {
    /// Starts it with everything of its own in that folder, and waits until it is ready. `http_address` is where it shows
    /// itself, or "off".
    pub(crate) fn start(
        setup: &Setup,
        folder: &Path,
        log: &Path,
        http_address: &str,
    ) -> Result<Self> {
        let (runtime, config) = (folder.join("run"), folder.join("statecopyd.toml"));
        let mut text = format!(
            "runtime_dir = {runtime:?}\nhttp_address = {http_address:?}\ndevices = [{:?}]\nartifact_store = {:?}\n",
            device_name(&setup.device),
            folder.join("kernels"),
        );
        if let Some(kernels) = &setup.kernels {
            text.push_str(&format!("artifact_stores = [{kernels:?}]\n"));
        }
        text.push_str(&format!("[cuda]\ndriver_library = {:?}\n", setup.driver));
        if let Some(compiler) = &setup.compiler {
            text.push_str(&format!("nvrtc_directory = {compiler:?}\n"));
        }
        text.push_str("[debug]\nabort_after_seal = true\n");
        fs::write(&config, text)?;
        let log = File::options().create(true).append(true).open(log)?;
        let child = Command::new(&setup.statecopyd)
            .arg("serve")
            .arg("--config")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("{} does not start", setup.statecopyd.display()))?;
        let mut daemon = Self { child, socket: runtime.join("statecopyd.sock") };
        daemon.wait_until_ready()?;
        Ok(daemon)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        eventually("the daemon is ready", || {
            if let Some(status) = self.child.try_wait()? {
                bail!("the daemon ended with {status}; its log says why");
            }
            Ok(self.inspect().is_ok_and(|reply| reply.ready).then_some(()))
        })
    }

    /// Its control socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// What it shows of itself.
    pub(crate) fn inspect(&self) -> Result<InspectReply> {
        let admin = Admin::connect(Address::of_socket(&self.socket)?, Duration::from_secs(5))?;
        Ok(admin.inspect()?)
    }

    /// What it shows of its device.
    pub(crate) fn device(&self) -> Result<DeviceStatus> {
        self.inspect()?.devices.into_iter().next().context("a device")
    }

    /// Stops the device process: it lives, and does nothing. Nothing that it gave the device before runs any more.
    pub(crate) fn stop_device_process(&self) -> Result<u32> {
        let pid = self.device()?.device_process_pid;
        signal(pid, Signal::STOP)?;
        Ok(pid)
    }

    /// Kills the device process, and waits until another one serves.
    pub(crate) fn kill_device_process(&self) -> Result<()> {
        let old = self.device()?.device_process_pid;
        kill(old)?;
        self.wait_for_another_than(old)
    }

    /// Waits until a device process other than this one serves.
    pub(crate) fn wait_for_another_than(&self, old: u32) -> Result<()> {
        eventually("another device process serves", || {
            let now = self.device()?;
            Ok((now.device_process_pid != old && now.ready).then_some(()))
        })
    }

    /// Kills the supervisor, with which its device process ends.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Whether it still runs.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if !self.runs() {
            return;
        }
        let device = self.device().map_or(0, |device| device.device_process_pid);
        // The device process ends with its supervisor.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ended = eventually("the device process ends", || {
            Ok((device == 0 || !statecopy_tests::runs(device)).then_some(()))
        });
    }
}

/// As the daemon's configuration names it.
fn device_name(device: &str) -> String {
    format!("cuda:{device}")
}

/// Ends a process at once.
pub(crate) fn kill(pid: u32) -> Result<()> {
    signal(pid, Signal::KILL)
}

fn signal(pid: u32, signal: Signal) -> Result<()> {
    let raw = i32::try_from(pid)?;
    let pid = Pid::from_raw(raw).context("a process id is not 0")?;
    kill_process(pid, signal).with_context(|| format!("process {raw}"))
}
