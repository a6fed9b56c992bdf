//! Loads into device memory allocated by an engine, with copies queued in the engine's stream.
//!
//! `cargo run --release -p onelayer --example own_destinations -- PATH`
//!
//! The engine here uses the crate `cudarc`. Its version may differ from the loader's, which takes
//! handles and addresses as integers.
#![allow(unsafe_code, reason = "passes handles of the engine; each block says why they are valid")]
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use onelayer::{Checkpoint, DeviceRegion, LayerId, Loader, LoaderBuilder, Target};

/// The engine: its stream, and a memory region for each layer.
struct Engine {
    stream: Arc<CudaStream>,
    memory: HashMap<LayerId, CudaSlice<u8>>,
}

impl Engine {
    /// Allocates the memory that the plan needs for each layer.
    fn new(settings: &LoaderBuilder, checkpoint: &Checkpoint) -> Result<Self, Box<dyn Error>> {
        // The device's primary context, which the loader uses too.
        let stream = CudaContext::new(0)?.new_stream()?;
        let mut memory = HashMap::new();
        for layer in settings.plan(checkpoint)?.layers() {
            let piece = stream.alloc_zeros::<u8>(usize::try_from(layer.arena_bytes)?)?;
            memory.insert(layer.id.clone(), piece);
        }
        stream.synchronize()?; // the memory exists before the loader writes to it
        Ok(Self { stream, memory })
    }

    /// The regions, as integers.
    fn regions(&self) -> HashMap<LayerId, DeviceRegion> {
        let region = |piece: &CudaSlice<u8>| {
            let (address, _guard) = piece.device_ptr(&self.stream);
            DeviceRegion { address, len_bytes: u64::try_from(piece.len()).unwrap_or(u64::MAX) }
        };
        self.memory.iter().map(|(id, piece)| (id.clone(), region(piece))).collect()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("say which checkpoint")?;
    let checkpoint = Checkpoint::open(path)?;
    let settings = Loader::builder(Target::Cuda(0)).host_budget(8 << 20);
    let engine = Engine::new(&settings, &checkpoint)?;
    let regions = engine.regions();

    let raw_stream = u64::try_from(engine.stream.cu_stream().addr())?;
    // SAFETY: a live stream of the device's primary context, kept by `engine` until the model is
    // dropped; it captures no graph.
    let settings = unsafe { settings.cuda_stream(raw_stream) };
    // SAFETY: device memory of that context, one region per layer, kept by `engine` until the model
    // is dropped, and not used otherwise until then.
    let settings = unsafe { settings.destinations(move |layer| regions.get(&layer.id).copied()) };
    let model = settings.build()?.load(&checkpoint)?;

    // Work that the engine queues in its stream runs after the copies.
    for layer in model.layers() {
        let piece = &engine.memory[layer.id()];
        let bytes = engine.stream.clone_dtoh(piece)?;
        engine.stream.synchronize()?;
        let start = layer.device_region().ok_or("it is on a device")?.address;
        for tensor in layer.tensors() {
            let from = usize::try_from(tensor.device_pointer().ok_or("it is on a device")? - start)?;
            let len = usize::try_from(tensor.len_bytes())?;
            let mut expected = vec![0; len];
            tensor.read(0, &mut expected)?;
            assert!(bytes[from..from + len] == expected, "{} lies in the engine's memory", tensor.name());
        }
        println!(
            "{}: {} tensors in {} bytes of the engine's",
            layer.id(),
            layer.tensors().len(),
            piece.len()
        );
    }
    drop(model); // before the memory it lies in
    drop(engine);
    Ok(())
}
