//! Loads into device memory that an engine has allocated, with copies queued in the engine's own
//! stream.
//!
//! `cargo run --release -p onelayer --example own_destinations -- PATH`
//!
//! The engine here is the crate `cudarc`, of whichever version it likes: the loader takes handles
//! and addresses as integers.
#![allow(unsafe_code, reason = "the engine promises what its handles are; each block says which")]
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use onelayer::{Checkpoint, DeviceRegion, LayerId, Loader, LoaderBuilder, Target};

/// The engine: its stream, and a piece of memory for each layer.
struct Engine {
    stream: Arc<CudaStream>,
    memory: HashMap<LayerId, CudaSlice<u8>>,
}

impl Engine {
    /// Allocates what the plan says each layer needs.
    fn new(settings: &LoaderBuilder, checkpoint: &Checkpoint) -> Result<Self, Box<dyn Error>> {
        // The device's primary context, which the loader uses too.
        let stream = CudaContext::new(0)?.new_stream()?;
        let mut memory = HashMap::new();
        for layer in settings.plan(checkpoint)?.layers() {
            let piece = stream.alloc_zeros::<u8>(usize::try_from(layer.arena_bytes)?)?;
            memory.insert(layer.id.clone(), piece);
        }
        stream.synchronize()?; // the memory is there before anybody else writes to it
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
    // SAFETY: a live stream of the device's primary context, which `engine` keeps until the model is
    // gone; it captures no graph.
    let settings = unsafe { settings.cuda_stream(raw_stream) };
    // SAFETY: device memory of that context, a piece for each layer, which `engine` keeps until the
    // model is gone, and which nobody else uses until then.
    let settings = unsafe { settings.destinations(move |layer| regions.get(&layer.id).copied()) };
    let model = settings.build()?.load(&checkpoint)?;

    // What the engine queues in its stream comes after the copies, by itself.
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
