//! Gives the driver the name that a driver has, so that `dlopen("libcuda.so.1")` finds it once it is loaded by path.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
