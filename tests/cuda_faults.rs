//! Every call of the driver fails once, in loads that are otherwise like any other.
//!
//! Whatever fails, a load either ends with an error or every byte is right; nothing is left behind, nobody hangs, nothing
//! panics. Each run is a process of its own that finds the simulated driver; the tests that say `scenario` are what runs
//! there, and do nothing by themselves.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

mod common;
#[path = "common/cuda_sim.rs"]
mod cuda_sim;

use common::{TestTensor, small_decoder, write_sharded};
use onelayer::load::{LoadError, LoadedLayer};
use onelayer::{Checkpoint, HandOut, Loader, Target, Window};

/// What one load ended with: how many tensors could be read back, all of them right.
fn check(layer: &LoadedLayer, tensors: &[TestTensor]) -> Result<usize, LoadError> {
    let mut read = 0;
    for tensor in layer.tensors() {
        let expected = &tensors.iter().find(|expected| expected.name == tensor.name()).unwrap().bytes;
        let mut found = vec![0; expected.len()];
        tensor.read(0, &mut found)?;
        assert!(found == *expected, "{} is wrong", tensor.name());
        read += 1;
    }
    Ok(read)
}

fn load_all(checkpoint: &Checkpoint, tensors: &[TestTensor]) -> Result<usize, LoadError> {
    let loader = Loader::builder(Target::Cuda(0)).host_budget(5 << 20).readers(2).build()?;
    let name = loader.device().info()?.name;
    assert!(name.contains("simulated"), "{name}");
    let mut model = loader.load(checkpoint)?;
    let mut read = 0;
    for layer in model.layers() {
        read += check(layer, tensors)?;
    }
    model.unload_all();
    Ok(read)
}

fn stream_all(checkpoint: &Checkpoint, tensors: &[TestTensor]) -> Result<usize, LoadError> {
    let builder = Loader::builder(Target::Cuda(0)).host_budget(5 << 20).readers(2);
    let loader = builder.window(Window::Layers(2)).hand_out(HandOut::AtOnce).build()?;
    let name = loader.device().info()?.name;
    assert!(name.contains("simulated"), "{name}");
    let mut read = 0;
    for layer in loader.stream(checkpoint)? {
        let layer = layer?;
        // Somebody may use it from now on.
        let _ = layer.tensors().next().and_then(|tensor| tensor.device_pointer());
        layer.is_ready()?;
        layer.wait_ready()?;
        read += check(&layer, tensors)?;
    }
    Ok(read)
}

#[test]
#[ignore = "scenario"]
fn scenario() {
    let folder = tempfile::tempdir().unwrap();
    let shards = small_decoder(2, 150_000);
    write_sharded(folder.path(), &shards);
    let tensors = shards.concat();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let outcome = match std::env::var("ONELAYER_WAY").unwrap().as_str() {
        "load" => load_all(&checkpoint, &tensors),
        "stream" => stream_all(&checkpoint, &tensors),
        way => panic!("no way {way}"),
    };
    match outcome {
        Ok(read) => {
            assert_eq!(read, tensors.len());
            println!("outcome: complete");
        }
        Err(error) => println!("outcome: error: {error}"),
    }
}
