//! The request path of the host allocates nothing, whatever the request.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::num::NonZeroUsize;
use std::sync::Arc;
#[expect(clippy::disallowed_types, reason = "a test's own counter, far from shared memory")]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use statecopy_kernels::device::{
    Device as _, Flags, Indices, Launch, Launcher as _, Moved, Region as _, Slice,
};
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::host::{HostDevice, HostOptions, HostRegion};
use statecopy_kernels::layout::CacheLayout;
use statecopy_kernels::plan::{self, KernelClass};
use statecopy_kernels::signature::Signature;
use statecopy_proto::{DataType, Direction, IndexWidth};

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

#[test]
fn launch_and_poll_allocate_nothing_for_any_request() {
    thread::Builder::new().name("launching".into()).spawn(launch_all).unwrap().join().unwrap();
}

fn launch_all() {
    let mut options = HostOptions::new(Arc::new(ServingGuard::new(true)));
    options.copy_threads = NonZeroUsize::new(2).unwrap();
    let device = HostDevice::open(options).unwrap();
    // Tiny rows; many rows that two threads share; few and large ones, shared and around the cache; and a fallback each.
    for (dtype, payload, selected) in [
        (DataType::Float32, 5, 100),
        (DataType::Int8, 5, 100),
        (DataType::BFloat16, 12_288, 200),
        (DataType::Float32, 2_500_000, 3),
        (DataType::Float64, 1_250_000, 3),
    ] {
        every_request(&device, dtype, payload, selected);
    }
}

fn every_request(device: &HostDevice, dtype: DataType, payload: u64, selected: usize) {
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
    wait_until_helpers_sleep();

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
                let moved: Option<Moved> = launcher.poll(ticket).unwrap();
                assert!(moved.is_some_and(|it| it.copied + it.masked == selected as u64));
            }
        }
    }
    COUNTS.store(false, Ordering::SeqCst);
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst), 0, "{dtype} {payload} {selected}");
}

fn shared_indices(
    width: IndexWidth,
    inputs: &Arc<HostRegion>,
    selected: usize,
) -> Indices<'_, HostRegion> {
    let bytes = width.bytes() * selected as u64;
    Indices::Shared(width, Slice::new(inputs, 0, bytes).unwrap())
}

fn shared_flags(inputs: &Arc<HostRegion>, selected: usize) -> Flags<'_, HostRegion> {
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
