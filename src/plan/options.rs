//! The options of a load: one plain struct that the loader, a conversion and the bindings fill, and
//! that the plan takes.

use std::fmt;
use std::time::Duration;

use super::io::IoMode;
use super::quantise::{Quantisation, QuantiseChoice};
use crate::units::{HumanBytes, KIB, MIB};
use onelayer_system::FloatType;

/// The options of a load that are plain values. [`LoadOptions::default`] has the defaults; change
/// the fields that differ.
///
/// [`LoaderBuilder`](crate::LoaderBuilder) has a method for each of them and adds what is no plain
/// value: closures, hooks, a caller's CUDA context. Its methods explain the options in full.
///
/// # Example
/// ```
/// use onelayer::plan::LoadOptions;
/// use onelayer::{FloatType, Loader, Target, Window};
///
/// # fn main() -> Result<(), onelayer::LoadError> {
/// let mut options = LoadOptions::default();
/// options.host_budget_bytes = 16 << 20;
/// options.window = Window::Layers(1);
/// options.dtype = Some(FloatType::Bf16);
/// let loader = Loader::builder(Target::Host).options(options).build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Most host memory that the load may hold beside resident layers, in bytes. 64 MiB by
    /// default, enough for every disk and link that was measured.
    pub host_budget_bytes: u64,
    /// Most memory that resident layers may take on the device, in bytes. `None`, the default, sets
    /// no limit.
    pub device_budget_bytes: Option<u64>,
    /// Device memory that must stay free, in bytes. 64 MiB by default, what a driver needs for
    /// its own bookkeeping. The plan ignores it; the loader checks it before it allocates.
    pub device_reserve_bytes: u64,
    /// Layers resident at once. Two by default.
    pub window: Window,
    /// Layers read ahead of the one that the caller works on. Two by default. The plan ignores it.
    pub prefetch_layers: u32,
    /// How often the layers are streamed. Once by default.
    pub passes: Passes,
    /// The order in which reads are issued. By layers by default. [`ReadOrder::Files`] needs a
    /// window of all layers, one pass, and no hashing on the way; otherwise reads are issued by
    /// layers.
    pub order: ReadOrder,
    /// How files are read. [`IoMode::Auto`] by default.
    pub io: IoMode,
    /// Reads in flight. `None`, the default, is what the machine can use. A small budget may get
    /// fewer.
    pub readers: Option<u32>,
    /// The type that wider floats are narrowed to. `None`, the default, narrows nothing.
    pub dtype: Option<FloatType>,
    /// The form that weights of layers are quantised to. `None`, the default, quantises nothing.
    /// Other tensors follow [`Self::dtype`].
    pub quantise: Option<Quantisation>,
    /// Which tensors are quantised. By default the weights of layers, without routers of experts.
    pub quantise_choice: Option<QuantiseChoice>,
    /// Holes of up to this many bytes are read through: between two wanted tensors, or inside the
    /// wanted part of one. 64 KiB by default, what a disk moves in the time of one more request.
    pub hole_bytes_max: u64,
    /// Hash every tensor on the way if the target keeps no bytes: 32 bytes of the budget for each.
    /// Off by default.
    pub hash: bool,
    /// When the caller gets a layer. When it is complete, by default. The plan ignores it.
    pub hand_out: HandOut,
    /// How long a stream waits while the caller itself holds all that may be resident. 30 s by
    /// default. The plan ignores it.
    pub stall_timeout: Duration,
}

impl LoadOptions {
    /// The same options for one pass over all layers, which all stay resident.
    #[must_use]
    pub(crate) fn keeping_everything(self) -> Self {
        Self { window: Window::All, order: ReadOrder::Files, passes: Passes::default(), ..self }
    }
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            host_budget_bytes: 64 * MIB,
            device_budget_bytes: None,
            device_reserve_bytes: 64 * MIB,
            window: Window::Layers(2),
            prefetch_layers: 2,
            passes: Passes::default(),
            order: ReadOrder::Layers,
            io: IoMode::Auto,
            readers: None,
            dtype: None,
            quantise: None,
            quantise_choice: None,
            hole_bytes_max: 64 * KIB,
            hash: false,
            hand_out: HandOut::default(),
            stall_timeout: Duration::from_secs(30),
        }
    }
}

/// How many layers are resident at once: being filled, ready, and held by the
/// caller. Kept layers do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Window {
    /// All of them.
    All,
    /// At most so many; zero counts as one.
    Layers(u32),
    /// As many as fit into so many bytes. Each single layer has to fit.
    Bytes(u64),
}

impl Window {
    /// The most layers that the window holds of `layers`: at least one, at most all. A window of
    /// bytes may hold all of them.
    #[must_use]
    pub fn over(self, layers: usize) -> usize {
        match self {
            Self::All | Self::Bytes(_) => layers.max(1),
            Self::Layers(count) => usize::try_from(count).unwrap_or(usize::MAX).clamp(1, layers.max(1)),
        }
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Layers(count) => write!(f, "{count}"),
            Self::Bytes(bytes) => write!(f, "{}", HumanBytes(*bytes)),
        }
    }
}

/// How often a stream goes over all its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Passes {
    /// This many times; zero counts as one.
    Times(u64),
    /// Until the stream is dropped or fails.
    Endless,
}

impl Passes {
    /// The number of passes; `None` if endless.
    #[must_use]
    pub fn count(self) -> Option<u64> {
        match self {
            Self::Times(count) => Some(count.max(1)),
            Self::Endless => None,
        }
    }

    /// True if every layer is handed out once.
    #[must_use]
    pub fn is_one(self) -> bool {
        self.count() == Some(1)
    }
}

impl Default for Passes {
    fn default() -> Self {
        Self::Times(1)
    }
}

impl fmt::Display for Passes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count() {
            Some(count) => write!(f, "{count}"),
            None => f.write_str("endless"),
        }
    }
}

/// The order in which reads are issued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReadOrder {
    /// One layer after the other, in execution order; within a layer in file order.
    #[default]
    Layers,
    /// In file order across layers: for loads that keep everything. Layers complete in any
    /// order.
    Files,
}

impl fmt::Display for ReadOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Layers => "layers",
            Self::Files => "files",
        })
    }
}

/// When the caller gets a layer.
///
/// # Example
/// An engine with its own stream lets the device do all the waiting:
/// ```no_run
/// use onelayer::{After, Checkpoint, HandOut, Loader, Target};
///
/// # fn run(stream: u64) -> Result<(), Box<dyn std::error::Error>> {
/// let checkpoint = Checkpoint::open("gemma-7b")?;
/// let loader = Loader::builder(Target::Cuda(0)).hand_out(HandOut::AtOnce).build()?;
/// for layer in loader.stream(&checkpoint)? {
///     let layer = layer?;
///     // SAFETY: `stream` is a live stream of the device's primary context.
///     unsafe { layer.let_wait(stream) }?;
///     for tensor in layer.tensors() {
///         // Launch kernels in `stream` that read here.
///         println!("{} at {:#x}", tensor.name(), tensor.device_pointer().expect("it is on a device"));
///     }
///     // SAFETY: as above, and nothing but what was queued in `stream` uses the layer.
///     unsafe { layer.release_after(After::Stream(stream)) }?;
/// } // dropped: its memory goes to the next layer once the kernels are over
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HandOut {
    /// When every byte is in its place.
    #[default]
    WhenComplete,
    /// As soon as all its copies are queued. For callers that order by streams: let them wait for
    /// [`LoadedLayer::ready_event`](crate::LoadedLayer::ready_event). A copy that fails after that
    /// is the stream's next error, and an error of
    /// [`LoadedLayer::wait_ready`](crate::LoadedLayer::wait_ready).
    AtOnce,
}
