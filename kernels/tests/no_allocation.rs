//! The request path allocates nothing, whatever the request and the device.
//!
//! The stub driver is a library with an allocator of its own: what is counted is ours.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::num::NonZeroUsize;
use std::path::Path;
#[expect(clippy::disallowed_types, reason = "a test's own counter, far from shared memory")]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use statecopy_kernels::cuda::class::CudaClass;
use statecopy_kernels::cuda::compile::{Arch, Compiler, source_hash};
use statecopy_kernels::cuda::store::{ArtifactKey, Artifacts, Store};
use statecopy_kernels::cuda::{CudaDevice, CudaOptions, CudaSelector};
use statecopy_kernels::device::{Device, Flags, Indices, Launch, Launcher as _, Region, Slice};
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::host::{HostDevice, HostOptions};
use statecopy_kernels::layout::CacheLayout;
use statecopy_kernels::plan::{self, KernelClass};
use statecopy_kernels::signature::Signature;
use statecopy_proto::{DataType, Direction, IndexWidth};
use statecopy_stub_cuda::Stub;

/// Counts the allocations of every thread but the process's first, on which the test harness does its own work.
struct Counting;

#[expect(clippy::disallowed_types, reason = "a test's own counter, far from shared memory")]
static COUNTS: AtomicBool = AtomicBool::new(false);
#[expect(clippy::disallowed_types, reason = "a test's own counter, far from shared memory")]
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

fn count() {
    if COUNTS.load(Ordering::SeqCst) && rustix::thread::gettid() != rustix::process::getpid() {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's own promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's own promise.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's own promise.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time: the counter counts every thread.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn the_host_allocates_nothing_for_any_request() {
    in_a_thread(|| {
        let mut options = HostOptions::new(Arc::new(ServingGuard::new(true)));
        options.copy_threads = NonZeroUsize::new(2).unwrap();
        launch_all(&HostDevice::open(options).unwrap(), wait_until_helpers_sleep);
    });
}

#[test]
fn cuda_allocates_nothing_for_any_request() {
    in_a_thread(|| {
        let stub = Stub::create().unwrap();
        let _entered = stub.enter();
        let guard = Arc::new(ServingGuard::new(true));
        let artifacts = Arc::new(artifacts(&stub));
        let mut options = CudaOptions::new(CudaSelector::Ordinal(0), artifacts, 1000, guard);
        options.driver_library = stub.library();
        launch_all(&CudaDevice::open(options).unwrap(), || ());
    });
}

/// A store with code of every class for the stub's device, and no compiler.
fn artifacts(stub: &Stub) -> Artifacts {
    let store = Store::create(stub.directory().join("kernels")).unwrap();
    for class in CudaClass::all() {
        let arch = Arch::of_capability(9, 0);
        let (source, compiler) = (source_hash(), "nvrtc-0.0".to_owned());
        store.save(&ArtifactKey { arch, class, source, compiler }, b"\x7fELF").unwrap();
    }
    Artifacts::new(vec![store], None, Compiler::open(Some(Path::new("/nowhere"))))
}

fn in_a_thread(test: fn()) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    thread::Builder::new().name("launching".into()).spawn(test).unwrap().join().unwrap();
}

/// `settle` waits for what a new launcher still does by itself.
fn launch_all<D: Device>(device: &D, settle: fn()) {
    // Tiny rows; many rows that two threads share; few and large ones, shared and around the cache; and a fallback each.
    for (dtype, payload, selected) in [
        (DataType::Float32, 5, 100),
        (DataType::Int8, 5, 1000),
        (DataType::BFloat16, 12_288, 200),
        (DataType::Float32, 2_500_000, 3),
        (DataType::Float64, 1_250_000, 3),
    ] {
        every_request(device, dtype, payload, selected, settle);
    }
}

fn every_request<D: Device>(
    device: &D,
    dtype: DataType,
    payload: u64,
    selected: usize,
    settle: fn(),
) {
    let layout =
        CacheLayout::with_page_stride(dtype, [selected as u64, 1, 1, payload], payload).unwrap();
    let kind = plan::choose(&device.description().fused, &layout);
    let signature = Signature::new(device.description().uuid, layout.clone(), 0);
    let variants = device.compile(&KernelClass::of(kind, &signature)).unwrap();
    let cache = Arc::new(device.scratch(layout.span_bytes()).unwrap());
    let placement = layout.place(0, cache.bytes()).unwrap();
    let caches = device.bind(&[(cache, placement)]).unwrap();
    let packed = Arc::new(device.scratch(layout.payload_bytes() * selected as u64).unwrap());
    let inputs = Arc::new(device.scratch(8 * selected as u64).unwrap());
    let narrow: Vec<i32> = (0..i32::try_from(selected).unwrap()).map(|s| s - 1).collect();
    let wide: Vec<i64> = narrow.iter().map(|index| (*index).into()).collect();
    let flags = vec![1; selected];
    let mut launcher = device.launcher().unwrap();
    settle();

    COUNTS.store(true, Ordering::SeqCst);
    for direction in Direction::ALL {
        for flagged in 0..3 {
            for indices in [
                Indices::Int32(&narrow),
                Indices::Int64(&wide),
                shared_indices(IndexWidth::Int32, &inputs, selected),
                shared_indices(IndexWidth::Int64, &inputs, selected),
            ] {
                let launch = Launch {
                    kind,
                    variants: &variants,
                    caches: &caches,
                    direction,
                    selected: selected as u64,
                    indices,
                    flags: match flagged {
                        0 => Flags::None,
                        1 => Flags::Inline(&flags),
                        _ => shared_flags(&inputs, selected),
                    },
                    packed: Slice::new(&packed, 0, packed.bytes()).unwrap(),
                    part: 0..selected as u64,
                };
                assert!(!launcher.hooked());
                let ticket = launcher.launch(&launch).unwrap();
                let deadline = Instant::now() + Duration::from_secs(60);
                let moved = loop {
                    if let Some(moved) = launcher.poll(ticket).unwrap() {
                        break moved;
                    }
                    assert!(Instant::now() < deadline, "The launch does not end");
                };
                assert_eq!(moved.copied + moved.masked, selected as u64);
            }
        }
    }
    COUNTS.store(false, Ordering::SeqCst);
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst), 0, "{dtype} {payload} {selected}");
}

fn shared_indices<R: Region>(
    width: IndexWidth,
    inputs: &Arc<R>,
    selected: usize,
) -> Indices<'_, R> {
    let bytes = width.bytes() * selected as u64;
    Indices::Shared(width, Slice::new(inputs, 0, bytes).unwrap())
}

fn shared_flags<R: Region>(inputs: &Arc<R>, selected: usize) -> Flags<'_, R> {
    Flags::Shared(Slice::new(inputs, 0, selected as u64).unwrap())
}

/// Starting a thread allocates; what counts is what follows. Where there is one CPU there is no helper.
fn wait_until_helpers_sleep() {
    if statecopy_kernels::host::cpus_allowed().get() == 1 {
        return;
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    let sleeps = |stat: String| stat.contains("(copy-1) S");
    while !fs::read_dir("/proc/self/task").unwrap().any(|task| {
        let stat = task.unwrap().path().join("stat");
        fs::read_to_string(stat).is_ok_and(sleeps)
    }) {
        assert!(Instant::now() < deadline, "The helper does not sleep");
        thread::yield_now();
    }
}
