//! Writes `include/onelayer.h` from the sources: `cargo run -p onelayer-capi --example header`.
//! With `--check` it writes nothing, and fails if the header is out of date.
#![allow(clippy::print_stdout, reason = "reports its result")]

use std::path::Path;
use std::{env, fs};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = package.join("include/onelayer.h");
    let mut written = Vec::new();
    cbindgen::generate(package)?.write(&mut written);
    if !env::args().any(|word| word == "--check") {
        fs::write(&path, written)?;
        println!("wrote {}", path.display());
        return Ok(());
    }
    if fs::read(&path)? != written {
        return Err(format!(
            "{} is out of date; write it with `cargo run -p onelayer-capi --example header`",
            path.display()
        )
        .into());
    }
    println!("{} is up to date", path.display());
    Ok(())
}
