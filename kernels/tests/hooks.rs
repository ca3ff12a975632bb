//! Foreign hooks, as the host meets them: a callback on the launch path, and libraries that the environment injects.
//!
//! Apart from the other tests, because the callback is the whole process's.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::{env, fs};

use statecopy_kernels::device::{
    Device as _, Flags, Indices, Launch, Launcher as _, Region as _, Slice,
};
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::hooks;
use statecopy_kernels::host::{HostDevice, HostOptions};
use statecopy_kernels::layout::CacheLayout;
use statecopy_kernels::plan::{KernelClass, Variant};
use statecopy_kernels::signature::Signature;
use statecopy_proto::{DataType, Direction, IndexWidth, PlanKind, RefusalCode};

/// One test at a time: the callback is the process's, and so is what injected libraries are looked for.
static ALONE: Mutex<()> = Mutex::new(());
static CALLED: Mutex<Vec<Variant>> = Mutex::new(Vec::new());

fn host(allowed: &[&str]) -> HostDevice {
    let mut options = HostOptions::new(Arc::new(ServingGuard::new(true)));
    options.allowed_preloads = allowed.iter().map(|name| (*name).to_owned()).collect();
    HostDevice::open(options).unwrap()
}

#[test]
fn a_launch_callback_is_a_hook_until_it_is_removed() {
    let _alone = ALONE.lock().unwrap();
    let device = host(&[]);
    let mut launcher = device.launcher().unwrap();
    assert!(!launcher.hooked());
    hooks::install_launch_hook(|variant| CALLED.lock().unwrap().push(variant));
    assert!(launcher.hooked());
    let refusal = device.check_hooks().unwrap_err();
    assert_eq!(refusal.code(), RefusalCode::HookPresent);
    assert!(refusal.sentence().contains("callback"), "{refusal}");

    let layout = CacheLayout::with_page_stride(DataType::Float32, [1, 1, 1, 4], 4).unwrap();
    let region = Arc::new(device.scratch(32).unwrap());
    let signature = Signature::new(device.description().uuid, layout.clone(), 0);
    let variants = device.compile(&KernelClass::of(PlanKind::Fused, &signature)).unwrap();
    let placement = layout.place(0, region.bytes()).unwrap();
    let caches = device.bind(&[(Arc::clone(&region), placement)]).unwrap();
    let mut run = || {
        let launch = Launch {
            kind: PlanKind::Fused,
            variants: &variants,
            caches: &caches,
            direction: Direction::Scatter,
            selected: 1,
            indices: Indices::Int64(&[0]),
            flags: Flags::None,
            packed: Slice::new(&region, 16, 16).unwrap(),
            part: 0..1,
        };
        let ticket = launcher.launch(&launch).unwrap();
        assert!(launcher.poll(ticket).unwrap().is_some());
    };
    run();
    hooks::remove_launch_hook();
    run();
    assert!(!launcher.hooked());
    let expected = [Variant::Fused(Direction::Scatter, IndexWidth::Int64)];
    assert_eq!(*CALLED.lock().unwrap(), expected);
}

#[test]
fn a_process_without_injected_libraries_has_no_hook() {
    let _alone = ALONE.lock().unwrap();
    host(&[]).check_hooks().unwrap();
}

#[test]
fn an_allowed_library_is_no_hook() {
    let _alone = ALONE.lock().unwrap();
    host(&[file_name(&mapped_library())]).check_hooks().unwrap();
}

#[test]
fn an_injected_library_is_a_hook_unless_it_is_allowed() {
    let library = mapped_library();
    for variable in ["LD_PRELOAD", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"] {
        let run = |test| run_with(variable, &library, test);
        let refused = run("a_process_without_injected_libraries_has_no_hook");
        let text = String::from_utf8_lossy(&refused.stdout).into_owned()
            + &String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success(), "{text}");
        let sentence = format!("The library {library} was injected by {variable}");
        assert!(text.contains(&sentence), "{text}");
        assert!(run("an_allowed_library_is_no_hook").status.success());
    }
}

/// Runs one test of this file in a process of its own, with a variable set.
fn run_with(variable: &str, value: &str, test: &str) -> Output {
    let myself = env::current_exe().unwrap();
    Command::new(myself).args(["--exact", test]).env(variable, value).output().unwrap()
}

/// A library that every process of this program maps, so that naming it injects nothing new.
fn mapped_library() -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let libraries = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    libraries.filter(|path| path.contains("libc.so")).map(str::to_owned).next().unwrap()
}

fn file_name(path: &str) -> &str {
    Path::new(path).file_name().unwrap().to_str().unwrap()
}
