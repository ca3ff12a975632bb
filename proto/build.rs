//! Compiles the `.proto` files without a system protoc, and keeps the descriptor set for reflection.

use std::path::PathBuf;
use std::{env, fs, io};

use prost::Message as _;

#[expect(clippy::disallowed_methods, reason = "a build script's arguments are its environment")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=statecopy");
    let descriptors = protox::compile(["statecopy/v1/control.proto"], ["."])?;
    let out = env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("OUT_DIR is not set"))?;
    fs::write(PathBuf::from(out).join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
