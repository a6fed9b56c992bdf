//! Gives the shared library the name by which programs find it: that of its major version.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libonelayer.so.0");
}
