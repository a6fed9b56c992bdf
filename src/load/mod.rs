//! Loading: source, ring and device together.
//!
//! [`Loader::stream`] starts reader threads and one control loop, and hands out layers in execution
//! order:
//!
//! ```text
//!             jobs (read, claim)              results
//!  control  ---------------------> readers ------------> control
//!     |  ^                         read, then start the copy if the layer has its arena
//!     |  +-- signals: the next layer is wanted, a layer was dropped, cancel
//!     +----- deliveries: layers in order, or the error that ended the load ----> LayerStream::next
//! ```
//!
//! On an asynchronous device two completion threads wait for it: one for arenas, one for copies and
//! layers. The control loop makes all decisions: which read gets a slot, when a layer gets its
//! arena, when it is complete. Blocking reads run on the reader threads only.
//!
//! [`TensorReader`] reads single tensors, or parts of them, and needs none of this.
//!
//! # Files
//! Each file uses only files above it in this list.
//!
//! | file | has |
//! |---|---|
//! | `error` | the errors of a load |
//! | `times`, `progress` | where the time goes; counters and the report |
//! | `hash` | BLAKE3 of tensors |
//! | `depth` | the search for the best number of reads in flight |
//! | `channels` | how the threads talk: signals, job queue, reader limit |
//! | `permits` | the window: how many layers may be resident |
//! | `layer_data`, `layer`, `on_device` | resident layers and their tensors |
//! | `unload` | receipts, unloading, parking |
//! | `completion` | threads that wait for an asynchronous device |
//! | `reader` | threads that read |
//! | `open_layers` | layers that are being read, and the next read |
//! | `setup` | the parts of a load and the channels of its control loop |
//! | `control` | the control loop |
//! | `stream` | the caller's end of a load |
//! | `io_choice` | how files are read by default |
//! | `builder`, `cuda_handles` | settings; a caller's own CUDA context, stream and memory |
//! | `loader` | starts a load |
//! | `tensor_reader` | reads single tensors |

#[cfg(feature = "convert")]
pub(crate) use self::hash::{PARALLEL_BYTES_MIN, hash_both, hash_each, update_hash};
#[cfg(feature = "convert")]
pub(crate) use self::io_choice::decide_io;
#[cfg(feature = "convert")]
pub(crate) use self::setup::{LoadSetup, ReadObserver};
#[cfg(feature = "convert")]
pub(crate) use self::times::Hooks;
pub(crate) use self::unload::{ParkedLayer, Parking};

pub use self::builder::{Keep, LoaderBuilder};
pub use self::error::LoadError;
pub use self::hash::TensorHash;
pub use self::layer::{LoadedLayer, LoadedTensor};
pub use self::layer_data::Holder;
pub use self::loader::Loader;
pub use self::progress::{LoadReport, Progress, QuantisationError};
pub use self::stream::{Awaited, CancelHandle, LayerStream};
pub use self::tensor_reader::TensorReader;
pub use self::times::{Binding, LayerTimes, PassReport, Waits};
pub use self::unload::{ParkTo, Receipt};

mod error;

mod times;

mod progress;

mod hash;

mod depth;

mod channels;

mod permits;

mod layer_data;

mod layer;

mod on_device;

mod unload;

mod completion;

mod reader;

mod open_layers;

mod setup;

mod control;

mod stream;

mod io_choice;

mod builder;

mod cuda_handles;

mod loader;

mod tensor_reader;

#[cfg(not(loom))]
#[cfg(test)]
mod scattered_tests;

#[cfg(not(loom))]
#[cfg(test)]
mod simulation;
