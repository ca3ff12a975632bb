//! Tells the host device which compiler and which source it was built from (contract: Seal).

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs, io};

#[expect(clippy::disallowed_methods, reason = "a build script's arguments are its environment")]
fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=src/host.rs");
    println!("cargo:rerun-if-changed=src/host");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("--version").output()?.stdout;
    println!("cargo:rustc-env=STATECOPY_RUSTC={}", String::from_utf8_lossy(&version).trim());

    let mut files: Vec<PathBuf> =
        fs::read_dir("src/host")?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    files.push("src/host.rs".into());
    files.sort();
    let mut hasher = blake3::Hasher::new();
    for file in files {
        hasher.update(file.as_os_str().as_encoded_bytes());
        hasher.update(&fs::read(&file)?);
    }
    println!("cargo:rustc-env=STATECOPY_HOST_SOURCE={}", hasher.finalize().to_hex());
    Ok(())
}
