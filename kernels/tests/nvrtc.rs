//! The real compiler on a machine without a GPU. `STATECOPY_NVRTC` names the directory of `libnvrtc.so`; without it there is
//! nothing to test here, and each test says so.

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;

use statecopy_kernels::cuda::class::CudaClass;
use statecopy_kernels::cuda::compile::{Arch, CompileError, Compiler};
use statecopy_kernels::cuda::store::{Artifacts, Origin, Store, StoreError};
use statecopy_kernels::plan::Variant;

const CHIPS: [Arch; 3] =
    [Arch::of_capability(8, 0), Arch::of_capability(9, 0), Arch::of_capability(10, 0)];

#[expect(clippy::disallowed_methods, reason = "what the runner of the tests has installed")]
#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
fn directory() -> Option<PathBuf> {
    let directory = std::env::var_os("STATECOPY_NVRTC").map(PathBuf::from);
    if directory.is_none() {
        eprintln!("skipped: STATECOPY_NVRTC names no directory with libnvrtc.so");
    }
    directory
}

fn compiler() -> Option<Compiler> {
    // Once a directory is named, a compiler that cannot be opened is a failure.
    directory().map(|directory| Compiler::open(Some(&directory)).expect("NVRTC is asked for"))
}

fn class() -> CudaClass {
    CudaClass::named("fused-item4-vector16-even").expect("a class")
}

fn entry_point(variant: Variant) -> String {
    variant.label().replace('/', "_")
}

fn holds(code: &[u8], name: &str) -> bool {
    code.windows(name.len()).any(|window| window == name.as_bytes())
}

#[test]
fn a_filled_store_needs_no_compiler() {
    let Some(compiler) = compiler() else { return };
    let directory = tempfile::tempdir().unwrap();
    let store = Store::create(directory.path()).unwrap();
    let artifacts = Artifacts::new(Vec::new(), Some(store.clone()), Ok(compiler));
    let compiled = artifacts.obtain(CHIPS[1], class()).unwrap();
    let Origin::Compiled(Some(path)) = compiled.origin else { panic!("{:?}", compiled.origin) };
    assert_eq!(compiled.problems.len(), 0);
    let stored = artifacts.obtain(CHIPS[1], class()).unwrap();
    assert_eq!(stored.origin, Origin::Stored(path.clone()));
    assert_eq!(stored.code, compiled.code);

    let nowhere = Compiler::open(Some(&directory.path().join("nothing")));
    let without = Artifacts::new(vec![store], None, nowhere);
    let found = without.obtain(CHIPS[1], class()).unwrap();
    assert_eq!((found.origin, found.code), (Origin::Stored(path), compiled.code));
}

#[test]
fn a_broken_artifact_is_compiled_anew() {
    let Some(compiler) = compiler() else { return };
    let directory = tempfile::tempdir().unwrap();
    let store = Store::create(directory.path()).unwrap();
    let artifacts = Artifacts::new(Vec::new(), Some(store.clone()), Ok(compiler));
    let Origin::Compiled(Some(path)) = artifacts.obtain(CHIPS[0], class()).unwrap().origin else {
        panic!("the store was empty");
    };
    fs::write(&path, b"not an artifact").unwrap();
    let again = artifacts.obtain(CHIPS[0], class()).unwrap();
    assert_eq!(again.origin, Origin::Compiled(Some(path.clone())));
    assert!(matches!(again.problems.as_slice(), [StoreError::Broken { .. }]), "{again:?}");
    assert_eq!(artifacts.obtain(CHIPS[0], class()).unwrap().origin, Origin::Stored(path));
}

#[test]
fn a_chip_that_the_compiler_does_not_know_is_named_with_those_it_knows() {
    let Some(compiler) = compiler() else { return };
    let error = compiler.compile(Arch::of_capability(2, 0), class()).unwrap_err();
    assert!(matches!(error, CompileError::Arch { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("does not compile for sm_20") && text.contains("sm_90"), "{text}");
}

mod slow {
    use super::*;

    #[test]
    fn every_class_compiles_for_every_chip() {
        let Some(compiler) = compiler() else { return };
        let work: Mutex<Vec<(Arch, CudaClass)>> = Mutex::new(
            CHIPS
                .into_iter()
                .flat_map(|chip| CudaClass::all().into_iter().map(move |class| (chip, class)))
                .collect(),
        );
        let next = || work.lock().unwrap().pop();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while let Some((chip, class)) = next() {
                        let code = compiler.compile(chip, class).unwrap();
                        assert!(code.starts_with(b"\x7fELF"), "{chip} {}", class.name());
                        for variant in class.variants() {
                            let name = entry_point(*variant);
                            assert!(holds(&code, &name), "{chip} {}: no {name}", class.name());
                        }
                    }
                });
            }
        });
    }
}
