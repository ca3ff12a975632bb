//! What a daemon needs of its device before it serves, and what it says when that is not there.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use statecopy_client::DataType;
use statecopy_kernels::cuda::Allocator;
use statecopy_kernels::layout::CacheLayout;

use crate::rig::{Rig, Spec};
use crate::setup::Setup;

fn spec() -> Result<Spec> {
    let layout = CacheLayout::with_page_stride(DataType::Float32, [5, 4, 32, 32], 8 * 1_024)?;
    Ok(Spec::of(layout, 4))
}

pub(crate) fn footprint(setup: &Setup) -> Result<String> {
    let device = setup.own_daemon("footprint")?.device()?;
    let footprint = device.footprint.context("a footprint")?;
    ensure!(footprint.tables_bytes > 0 && footprint.words_bytes > 0, "{footprint:?}");
    // Only a device has a context that takes memory.
    ensure!(setup.small || footprint.context_bytes > 0, "{footprint:?}");
    Ok(format!(
        "context {} MiB, tables {} MiB, words {} MiB",
        footprint.context_bytes >> 20,
        footprint.tables_bytes >> 20,
        footprint.words_bytes >> 20
    ))
}

pub(crate) fn no_kernels(setup: &Setup) -> Result<String> {
    const NAME: &str = "no-kernels";
    let compiler = Some(Path::new("/nonexistent").to_owned());
    let nothing = Setup { kernels: None, compiler, ..setup.clone() };
    let family = setup.client()?.session().context("a session")?.device.family;
    ensure!(nothing.own_daemon(NAME).is_err(), "the daemon is ready without kernels");
    last_line(setup, NAME, &family)
}

pub(crate) fn no_memory(setup: &Setup) -> Result<String> {
    const NAME: &str = "no-memory";
    let gpu = setup.gpu()?;
    // Makes the context of this process before free memory is looked at.
    let first = gpu.allocate(1, Allocator::Default)?;
    let how = Allocator::Virtual { piece_bytes: 1 << 30, shared: false };
    // A context on a device takes more than what is left. With MPS, and by a driver that has no device, it takes next to nothing,
    // and what is left is too little for the tables.
    let left = if setup.mps || setup.small { 4 << 20 } else { 128 << 20 };
    // What the driver keeps for itself differs from device to device: as much as it gives.
    let lefts = [left, 2 * left, 3 * left, 4 * left];
    let free = gpu.free_bytes()?;
    let all = lefts.iter().find_map(|left| gpu.allocate(free.saturating_sub(*left), how).ok());
    let all =
        all.with_context(|| format!("{free} bytes are free, and most of them are not to be had"))?;
    let started = setup.own_daemon(NAME);
    ensure!(started.is_err(), "the daemon is ready without memory");
    drop((all, first));
    let line = last_line(setup, NAME, "memory")?;
    let daemon = setup.own_daemon(NAME)?;
    Rig::new(setup.client_of(daemon.socket())?, &gpu, &spec()?)?.serves(1)?;
    Ok(line)
}

/// The last line of a daemon's log that says a word.
fn last_line(setup: &Setup, name: &str, word: &str) -> Result<String> {
    let said = fs::read_to_string(setup.daemon_log(name))?;
    let line = said.lines().rfind(|line| line.contains(word));
    Ok(line.with_context(|| format!("{word} is not named: {said}"))?.to_owned())
}
