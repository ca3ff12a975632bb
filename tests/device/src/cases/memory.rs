//! Memory of every allocator: shared as it can be, mapped once, given back.

use std::process;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Resource, getrlimit, setrlimit};
use statecopy_client::blocking::Client;
use statecopy_client::v1::{HandleKind, SessionStatus};
use statecopy_client::{DataType, RefusalCode};
use statecopy_kernels::cuda::Allocator;
use statecopy_kernels::layout::CacheLayout;
use statecopy_tests::Footprint;

use crate::known::Known;
use crate::patience::eventually;
use crate::rig::{Rig, Spec};
use crate::setup::Setup;
use crate::wide::Wide;

/// What the daemon shows of a client's session.
fn shown(client: &Client) -> Result<SessionStatus> {
    let id = client.session().context("a session")?.id;
    let sessions = client.inspect()?.sessions;
    let session = sessions.into_iter().find(|session| session.session_id == id.0);
    session.context("the session is shown")
}

/// Layers of rows of 24 KiB, side by side.
fn layers(count: u64) -> Result<Vec<(CacheLayout, u64)>> {
    let layout = CacheLayout::with_page_stride(DataType::Float32, [5, 6, 32, 32], 6 * 1024 + 16)?;
    let apart = layout.span_bytes().next_multiple_of(512) + 512;
    Ok((0..count).map(|at| (layout.clone(), at * apart)).collect())
}

pub(crate) fn small_allocations(setup: &Setup) -> Result<String> {
    let gpu = setup.gpu()?;
    // The driver cuts small allocations out of larger blocks: each must still be shared for itself.
    let _before = gpu.allocate_exactly(4_096, Allocator::Default)?;
    let layout = CacheLayout::with_page_stride(DataType::Float32, [5, 1, 2, 64], 160)?;
    let spec = Spec { exactly: true, ..Spec::of(layout, 4) };
    let mut rig = Rig::new(setup.client()?, &gpu, &spec)?;
    rig.serves(1)?;
    Ok(format!("{} bytes of caches", rig.cache.bytes()))
}

pub(crate) fn one_mapping(setup: &Setup) -> Result<String> {
    let gpu = setup.gpu()?;
    let mut rig = Rig::new(setup.client()?, &gpu, &Spec::of_layers(layers(64)?, 4))?;
    rig.serves(1)?;
    let SessionStatus { regions: shown, layers, .. } = shown(&rig.client)?;
    ensure!(shown.len() == 3, "caches, packed and inputs are {} regions: {shown:?}", shown.len());
    let region = layers.first().context("a layer")?.region_id;
    ensure!(layers.iter().all(|layer| layer.region_id == region), "{layers:?}");
    ensure!(shown.iter().all(|region| region.kind() == HandleKind::CudaIpc), "{shown:?}");
    Ok(format!("one region behind {} layers", layers.len()))
}

pub(crate) fn large_pieces(setup: &Setup) -> Result<String> {
    pieces(setup, 20 << 20)
}

pub(crate) fn small_pieces(setup: &Setup) -> Result<String> {
    pieces(setup, 2 << 20)
}

/// Layers over several pieces, as tensors of PyTorch's expandable segments are.
fn pieces(setup: &Setup, piece_bytes: u64) -> Result<String> {
    let gpu = setup.gpu()?;
    let values = 128;
    let payload = 12 * values * 128;
    let layout =
        CacheLayout::with_page_stride(DataType::Float32, [16, 12, values, 128], 2 * payload + 16)?;
    let layers = vec![(layout.clone(), 0), (layout, payload * 4)];
    let how = Allocator::Virtual { piece_bytes, shared: true };
    let spec = Spec::of_layers(layers, 8).allocated(how);
    let mut rig = Rig::new(setup.client()?, &gpu, &spec)?;
    rig.serves(1)?;
    rig.serves(2)?;
    let shown = shown(&rig.client)?.regions;
    ensure!(shown.iter().all(|region| region.kind() == HandleKind::CudaVmm), "{shown:?}");
    let pieces = shown.iter().map(|region| region.pieces).max().unwrap_or_default();
    let expected = rig.cache.bytes().div_ceil(piece_bytes);
    ensure!(u64::from(pieces) == expected, "{pieces} pieces, not {expected}");
    Ok(format!("{pieces} pieces"))
}

pub(crate) fn many_pieces(setup: &Setup) -> Result<String> {
    let soft = 1_024;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, rustix::process::Rlimit { current: Some(soft), ..limit })?;
    let gpu = setup.gpu()?;
    let daemon = setup.own_daemon("pieces")?;
    let pieces = setup.size(3_000_u64, 1_200);
    // Rows of 3 MiB lie over two or three pieces each.
    let page = (3 << 18) + 128;
    let rows = pieces * (2 << 20) / (4 * page);
    let layout = CacheLayout::with_page_stride(DataType::Float32, [rows, 3, 512, 512], page)?;
    let how = Allocator::Virtual { piece_bytes: 2 << 20, shared: true };
    let client = setup.client_of(daemon.socket())?;
    let device = daemon.device()?.device_process_pid;
    let before = [process::id(), device].map(Footprint::of);
    let last = i32::try_from(rows - 1)?;
    let mut wide = Wide::new(client, &gpu, layout, 4, how)?;
    wide.check_rows(&[0, last, last / 2, 1])?;
    let after = [process::id(), device].map(Footprint::of);
    let kept = [0, 1].map(|at| after[at].descriptors.saturating_sub(before[at].descriptors));
    // The driver itself may open some for each thread or context, but none for each piece.
    ensure!(
        kept.iter().all(|kept| *kept < 100),
        "client and device process keep {kept:?} descriptors"
    );
    let shown = shown(wide.client())?.regions;
    let most = shown.iter().map(|region| u64::from(region.pieces)).max().unwrap_or_default();
    ensure!(most + 2 >= pieces, "{most} pieces");
    Ok(format!(
        "{most} pieces at a soft limit of {soft}; client and device process keep {kept:?} descriptors"
    ))
}

/// Registers memory that cannot be, and gives code and sentence.
fn refused(setup: &Setup, how: Allocator) -> Result<String> {
    let gpu = setup.gpu()?;
    let memory = gpu.allocate(4 << 20, how)?;
    let Err(error) = setup.client()?.register_device_memory(memory.address(), memory.bytes())
    else {
        bail!("the memory was registered");
    };
    ensure!(error.code() == Some(RefusalCode::HandleUnsupported), "{error}");
    ensure!(!error.remedy().is_empty(), "no remedy: {error}");
    Ok(error.to_string())
}

pub(crate) fn pool(setup: &Setup) -> Result<String> {
    refused(setup, Allocator::Pool)
}

pub(crate) fn hidden(setup: &Setup) -> Result<String> {
    refused(setup, Allocator::Virtual { piece_bytes: 0, shared: false })
}

pub(crate) fn sleep(setup: &Setup) -> Result<String> {
    let gpu = setup.gpu()?;
    let mut seen = Vec::new();
    for how in [Allocator::Default, Allocator::Virtual { piece_bytes: 20 << 20, shared: true }] {
        let mut rig =
            Rig::new(setup.client()?, &gpu, &Spec::of_layers(layers(64)?, 4).allocated(how))?;
        rig.serves(1)?;
        let compiled = |client: &Client| {
            let device = client.inspect()?.devices.into_iter().next().context("a device")?;
            let counters = device.counters.into_iter();
            let entries = counters.filter(|counter| counter.label == "compiler");
            anyhow::Ok(entries.map(|counter| counter.value).sum::<u64>())
        };
        let before = compiled(&rig.client)?;
        let (bytes, awake) = (rig.cache.bytes(), gpu.free_bytes()?);
        rig.release_caches()?;
        // A spare byte in the place of the memory, which goes.
        let spare = Known::allocate(&gpu, 1, Allocator::Default, 6)?;
        drop(std::mem::replace(&mut rig.cache, spare));
        let freed = eventually("the memory is free", || {
            let freed = gpu.free_bytes()?.saturating_sub(awake);
            Ok((freed + (4 << 20) >= bytes).then_some(freed))
        })?;
        let cache = Known::allocate(&gpu, bytes, how, 7)?;
        rig.bind_again(cache)?;
        rig.serves(2)?;
        let after = compiled(&rig.client)?;
        ensure!(after == before, "the compiler was entered {} times", after - before);
        seen.push(format!("{freed} of {bytes} bytes"));
    }
    Ok(format!("freed {}", seen.join(" and ")))
}
