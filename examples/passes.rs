//! An engine that holds two layers at a time and goes through all of them for every token: `cargo
//! run -p onelayer --example passes -- DIR`.
//!
//! Embedding, norm and head stay; the first layers of a token are read while the last ones of the
//! token before are used.
#![allow(clippy::print_stdout, reason = "an example prints")]

use onelayer::{Binding, Checkpoint, Keep, Loader, Passes, Target, Window};

const TOKENS: u64 = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1);
    let path = path.as_deref().unwrap_or(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama"));
    let loader = Loader::builder(Target::Host)
        .window(Window::Layers(2))
        .keep(Keep::OutsideStacks)
        .passes(Passes::Times(TOKENS))
        .on_pass(|pass| println!("token {}: {:?}, {} bytes read", pass.pass, pass.elapsed, pass.read_bytes))
        .build()?;
    let mut stream = loader.stream(&Checkpoint::open(path)?)?;
    for term in stream.plan().memory().resident_terms() {
        println!("{}: {} bytes", term.kind, term.bytes);
    }
    for layer in &mut stream {
        let layer = layer?;
        // An engine computes here.
        let bytes: u64 = layer.tensors().map(|tensor| tensor.len_bytes()).sum();
        println!("  {} ({bytes} bytes)", layer.id());
    }
    let report = stream.report();
    for binding in Binding::ALL {
        println!("waited for {binding}: {:?} of {:?}", report.waits.of(binding), report.elapsed);
    }
    Ok(())
}
