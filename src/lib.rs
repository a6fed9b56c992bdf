//! Streams model checkpoints (safetensors, PyTorch, GGUF) layer by layer inside a host-memory
//! budget that the caller chooses.
//!
//! Loading a model commonly peaks at a multiple of what stays resident. Here every byte passes
//! through one small ring of staging slots, so that the peak is a number you set: it depends
//! neither on the model nor on a layer nor on a single tensor. Layers come out one after the other,
//! each in memory of its own that is given back when it is dropped.
//!
//! # Example
//!
//! ```
//! use onelayer::{Checkpoint, Loader, Target, Window};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
//! let checkpoint = Checkpoint::open(path)?; // headers only
//! let loader = Loader::builder(Target::Host).host_budget(8 << 20).window(Window::Layers(2)).build()?;
//!
//! println!("{}", loader.plan(&checkpoint)?); // every term of the peak, before a byte is read
//!
//! // At most two layers are resident; the next ones are read while you work.
//! for layer in loader.stream(&checkpoint)? {
//!     let layer = layer?;
//!     for tensor in layer.tensors() {
//!         let bytes = tensor.as_bytes().expect("the host can read what lies on the host");
//!         println!("{} {} {:?}: {} bytes", tensor.name(), tensor.dtype(), tensor.shape(), bytes.len());
//!     }
//! } // dropped: its memory is free for the next layer
//!
//! // Or everything at once, and back again.
//! let mut model = loader.load(&checkpoint)?;
//! assert!(model.tensor("model.layers.0.mlp.up_proj.weight").is_ok());
//! let receipt = model.unload_all();
//! assert!(receipt.is_complete(), "{receipt}");
//! # Ok(())
//! # }
//! ```
//!
//! # What is guaranteed
//!
//! - *Growth of resident memory ≤ host budget + 16 MiB*, from before [`Checkpoint::open`] to the
//!   end of the load, beside the layers that the caller keeps on the host. Anonymous, file-mapped
//!   and pinned pages count alike. A budget that cannot work is refused before a tensor byte is
//!   read, with the smallest one that would.
//! - *What is dropped is given back* to the system: when the layer is dropped after
//!   [`Loader::load`], at the end of a stream at the latest.
//! - *Every byte is right or there is an error.* Headers are checked strictly; a file that is
//!   truncated, rewritten or replaced meanwhile is a typed error with every [`IoMode`]: no signal,
//!   no zeros.
//! - Errors, panics of the loader's threads and cancellation end the threads and free everything. A
//!   caller that holds on to too many layers gets an error, not a hang.
//!
//! # What is not
//!
//! - The 16 MiB are for what no budget counts: thread stacks (of at most 16 more threads if tensors
//!   are hashed) and the allocator's slack. The page cache is the kernel's; [`IoMode::Auto`] and
//!   [`IoMode::Direct`] leave it as it was where the system lets them: [`IoDecision::cache_effect`]
//!   says.
//! - A program that changes a file through a shared writable mapping, or within one tick of the
//!   file system's clock, can escape detection: see [`source`].
//! - Linux only, 64-bit. A `fork` in the middle of a load gets neither ring nor layers.
//!
//! # The stages
//!
//! Data goes down this list; a stage uses only the stages above it.
//!
//! | module | does |
//! |---|---|
//! | [`units`], [`budget`] | byte ranges, alignment; the budget and its reservations |
//! | [`checkpoint`] | files on disk → a checked description: tensors, dtypes, shapes, extents |
//! | [`slices`] | parts of tensors: a range for each dimension → runs of bytes |
//! | [`layers`] | tensor names and shapes → layers in execution order |
//! | [`live`] | what is allocated: every arena, ring and scratch, with what is in it |
//! | [`ranks`] | what one of several ranks gets: a part of each tensor, or whole ones of its own |
//! | [`plan`] | checkpoint + layers + limits → reads and copies, every term of the peak |
//! | [`source`] | file bytes → a buffer: mapped windows, `pread`, direct I/O, or what suits each |
//! | `staging` | the ring: N slots of S bytes; the slot is the permit |
//! | [`device`] | where layers live: allocate, copy from a slot, free |
//! | [`load`] | the control loop that sees source, ring and device together |
//! | [`model`] | what is resident: layers, tensors, unload, receipts |
//! | `convert` | the same reads, written to files of one layer each (feature `convert`) |
//!
//! The library never prints, exits, or reads the environment. Beside it stand `onelayer-probe`
//! (what the system says was used), `onelayer-fit` (what fits where, and loads onto several
//! devices) and the program `loadcheck`.

pub use onelayer_system::units;

mod footprint;

pub mod budget;

pub mod checkpoint;

pub mod slices;

pub mod layers;

pub mod live;

pub mod ranks;

pub mod plan;

pub mod source;

mod staging;

pub mod device;

pub mod load;

pub mod model;

#[cfg(feature = "convert")]
pub mod convert;

/// For `benches/ring.rs` alone: no part of the interface.
#[cfg(not(loom))]
#[doc(hidden)]
pub mod for_benches {
    pub use crate::staging::for_benches::{Slots, Taken};
}

pub use self::checkpoint::{
    BlockType, Checkpoint, CheckpointError, DType, FileFormat, OpenOptions, TensorEntry, TensorNames,
};
pub use self::layers::{LayerId, LayerMap, Layers};
pub use self::plan::{
    FloatType, HandOut, IoDecision, IoMode, LoadOptions, LoadPlan, Passes, PlanError, Quantisation,
    ReadOrder, Window,
};
pub use self::ranks::{Rank, RankPart, Share, Split, SplitError, SplitRules};
pub use self::slices::SliceError;
pub use self::source::SourceError;
pub use self::staging::{Pinning, RingMode, StagingError, decode_blocks, dequantise};
// In the order of the flow, as above.
pub use self::device::{After, CudaCode, Device, DeviceError, DeviceRegion, SpareMemory, Target};
pub use self::load::{
    Awaited, Binding, CancelHandle, Holder, Keep, LayerStream, LayerTimes, LoadError, LoadReport,
    LoadedLayer, LoadedTensor, Loader, LoaderBuilder, ParkTo, PassReport, Progress, QuantisationError,
    Receipt, TensorHash, TensorReader, Waits,
};
pub use self::model::{Model, Part, Scope};

/// The code of README and manual, compiled as documentation tests.
#[cfg(doctest)]
mod manual {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../docs/rust.md")]
    mod rust {}
    #[cfg(feature = "convert")]
    #[doc = include_str!("../docs/convert.md")]
    mod convert {}
}
