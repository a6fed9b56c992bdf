//! What a load shall do: the options of the header, checked, as settings of a loader.
#![allow(unsafe_code, reason = "reads structures of the caller's; each block says what it relies on")]

use std::ffi::{OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr;
use std::time::Duration;

use onelayer::checkpoint::HubCache;
use onelayer::{
    Checkpoint, HandOut, IoMode, LoadOptions, Loader, LoaderBuilder, Rank, SplitRules, Target, Window,
};

use crate::failure::{Failure, guarded};
use crate::foreign::{name, optional_text};
use crate::sized::{self, SizedStruct};
use crate::status::Status;

/// Device type: bytes are read and dropped, to measure how fast they come. Others are DLPack's:
/// kDLCPU, kDLCUDA.
pub const OL_DEVICE_NONE: i32 = 0;
/// Device type: host memory.
pub const OL_DEVICE_CPU: i32 = 1;
/// Device type: memory of a CUDA device.
pub const OL_DEVICE_CUDA: i32 = 2;

/// Reads files as the page cache, the file system and the size of each suggest.
pub const OL_IO_AUTO: i32 = 0;
/// Reads through the page cache.
pub const OL_IO_BUFFERED: i32 = 1;
/// Reads past the page cache.
pub const OL_IO_DIRECT: i32 = 2;
/// The same, by io_uring.
pub const OL_IO_URING: i32 = 3;
/// Reads out of mapped windows.
pub const OL_IO_MMAP: i32 = 4;

/// Layers come when every byte is in its place.
pub const OL_HAND_OUT_WHEN_COMPLETE: i32 = 0;
/// Layers come as soon as their copies to the device are queued: see ol_layer_let_wait().
pub const OL_HAND_OUT_AT_ONCE: i32 = 1;

/// Of several ranks, each loads its part of every tensor, for tensor parallelism: as engines divide
/// common architectures, and tensors that no rule knows whole.
pub const OL_RANKS_SPLIT: i32 = 0;
/// Of several ranks, each loads whole tensors that no other one loads, to hand them on: each byte
/// is read once in all. Where there are more ranks than tensors, those without one have nothing to
/// load, which is OL_EINVAL.
pub const OL_RANKS_SHARE: i32 = 1;

/// A window of all layers.
pub const OL_WINDOW_ALL: u32 = u32::MAX;

/// What a load shall do. ol_options_init() sets the defaults. Wherever options are asked for, null
/// means the defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// sizeof(ol_options), as ol_options_init() sets it.
    pub struct_size: usize,
    /// Most host memory that one load may hold beside resident layers, in bytes. 64 MiB by default.
    pub host_budget_bytes: u64,
    /// Most memory that resident layers may take on the device, in bytes; 0, the default, is no
    /// bound.
    pub device_budget_bytes: u64,
    /// How long ol_next_layer() waits while the program itself holds all that may be resident, in
    /// milliseconds. 30 000 by default.
    pub stall_timeout_ms: u64,
    /// The context (CUcontext) to load in; 0, the default, is the device's primary one. It outlives
    /// everything loaded in it.
    pub cuda_context: u64,
    /// The stream (CUstream) that copies are queued in; 0, the default, is one of the loader's own;
    /// 1 is the legacy default stream. It outlives everything that is loaded with it, and
    /// captures no graph.
    pub cuda_stream: u64,
    /// Directory of a Hugging Face cache in which ol_open() looks for what is no path but a name,
    /// as in "org/name". Null, the default, is none. Nothing is fetched.
    pub hub_cache: *const c_char,
    /// Which revision of it; null, the default, is "main".
    pub revision: *const c_char,
    /// OL_DEVICE_CPU by default, OL_DEVICE_CUDA, or OL_DEVICE_NONE.
    pub device_type: i32,
    /// The number of the device among those of its type. 0 by default.
    pub device_id: i32,
    /// Layers resident at once: being filled, ready, and held by the program. 2 by default;
    /// OL_WINDOW_ALL is all.
    pub window_layers: u32,
    /// Layers read ahead of the one that the program works on. 2 by default.
    pub prefetch_layers: u32,
    /// Reads in flight; 0, the default, is what the machine can use.
    pub readers: u32,
    /// One of OL_IO_...; OL_IO_AUTO by default.
    pub io_mode: i32,
    /// One of OL_HAND_OUT_...; OL_HAND_OUT_WHEN_COMPLETE by default.
    pub hand_out: i32,
    /// Which rank this is of ranks, from 0 on. 0 by default.
    pub rank: u32,
    /// How many ranks load the checkpoint, each for itself. 1 by default.
    pub ranks: u32,
    /// One of OL_RANKS_...: what a rank loads. OL_RANKS_SPLIT by default.
    pub ranks_mode: i32,
}

// SAFETY: `repr(C)`, the size comes first, and the rest are integers and pointers that are not
// followed unchecked.
unsafe impl SizedStruct for Options {
    const NAME: &'static str = "ol_options";
    const BYTES_LEAST: usize = 104;
}

impl Default for Options {
    fn default() -> Self {
        let library = LoadOptions::default();
        Self {
            struct_size: size_of::<Self>(),
            host_budget_bytes: library.host_budget_bytes,
            device_budget_bytes: 0,
            stall_timeout_ms: u64::try_from(library.stall_timeout.as_millis()).unwrap_or(u64::MAX),
            cuda_context: 0,
            cuda_stream: 0,
            hub_cache: ptr::null(),
            revision: ptr::null(),
            device_type: OL_DEVICE_CPU,
            device_id: 0,
            window_layers: 2,
            prefetch_layers: library.prefetch_layers,
            readers: 0,
            io_mode: OL_IO_AUTO,
            hand_out: OL_HAND_OUT_WHEN_COMPLETE,
            rank: 0,
            ranks: 1,
            ranks_mode: OL_RANKS_SPLIT,
        }
    }
}

/// Sets the defaults. struct_size is sizeof(ol_options).
///
/// OL_EINVAL if options is null, or if struct_size is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_options_init(options: *mut Options, struct_size: usize) -> Status {
    guarded(|| {
        // SAFETY: as many bytes as the caller says (`crate`).
        unsafe { sized::initialise(options, struct_size, &Options::default()) }?;
        Ok(Status::OL_OK)
    })
}

impl Options {
    /// The caller's options, or the defaults for null.
    ///
    /// # Safety
    /// Null, or options as [`crate`] promises.
    pub(crate) unsafe fn read(options: *const Self) -> Result<Self, Failure> {
        if options.is_null() {
            return Ok(Self::default());
        }
        // SAFETY: the caller's promise.
        unsafe { sized::read(options, Self::default()) }
    }

    /// The options as the library has them.
    fn load_options(&self) -> Result<LoadOptions, Failure> {
        let mut options = LoadOptions::default();
        options.host_budget_bytes = self.host_budget_bytes;
        options.device_budget_bytes = Some(self.device_budget_bytes).filter(|&bytes| bytes > 0);
        options.stall_timeout = Duration::from_millis(self.stall_timeout_ms);
        options.prefetch_layers = self.prefetch_layers;
        options.window = match self.window_layers {
            OL_WINDOW_ALL => Window::All,
            layers => Window::Layers(layers),
        };
        options.io = self.io_mode()?;
        options.readers = Some(self.readers).filter(|&readers| readers > 0);
        options.hand_out = self.hand_out()?;
        Ok(options)
    }

    /// A loader's settings.
    pub(crate) fn builder(&self) -> Result<LoaderBuilder, Failure> {
        let mut builder = Loader::builder(self.target()?).options(self.load_options()?);
        if self.cuda_context != 0 {
            // SAFETY: a live context that outlives what is loaded in it: the header's condition.
            builder = unsafe { builder.cuda_context(self.cuda_context) };
        }
        if self.cuda_stream != 0 {
            // SAFETY: a live stream that outlives what is loaded with it: the header's condition.
            builder = unsafe { builder.cuda_stream(self.cuda_stream) };
        }
        self.of_rank(builder)
    }

    /// Settings for one of several ranks, if there are several.
    fn of_rank(&self, builder: LoaderBuilder) -> Result<LoaderBuilder, Failure> {
        let Some(rank) = Rank::new(self.rank, self.ranks) else {
            return Err(Failure::invalid(format!("there is no rank {} of {}", self.rank, self.ranks)));
        };
        match self.ranks_mode {
            OL_RANKS_SPLIT | OL_RANKS_SHARE if self.ranks == 1 => Ok(builder),
            OL_RANKS_SPLIT => Ok(builder.shard(rank, SplitRules::common())),
            OL_RANKS_SHARE => Ok(builder.share(rank)),
            other => Err(Failure::invalid(format!("{other} is no ranks_mode"))),
        }
    }

    /// Opens a path, or a name if there is a cache to look for it.
    ///
    /// # Safety
    /// The options' texts are texts, as [`crate`] promises.
    pub(crate) unsafe fn open(&self, source: &OsStr) -> Result<Checkpoint, Failure> {
        // SAFETY: the caller's promise.
        let cache = unsafe { optional_text(self.hub_cache) };
        let path = PathBuf::from(source);
        let Some(cache) = cache.filter(|_| !path.exists()) else {
            return Ok(Checkpoint::open(path)?);
        };
        // SAFETY: the caller's promise.
        let revision = unsafe { optional_text(self.revision) };
        let mut repository = source.to_string_lossy().into_owned();
        if let Some(revision) = revision {
            repository = format!("{repository}@{}", name(revision, "the revision")?);
        }
        let folder = HubCache::new(OsStr::from_bytes(cache.to_bytes())).resolve(&repository)?;
        Ok(Checkpoint::open(folder)?)
    }

    fn target(&self) -> Result<Target, Failure> {
        match (self.device_type, u32::try_from(self.device_id)) {
            (OL_DEVICE_NONE, Ok(0)) => Ok(Target::None),
            (OL_DEVICE_CPU, Ok(0)) => Ok(Target::Host),
            (OL_DEVICE_CUDA, Ok(ordinal)) => Ok(Target::Cuda(ordinal)),
            _ => Err(Failure::invalid(format!(
                "there is no device of type {} with the number {}",
                self.device_type, self.device_id
            ))),
        }
    }

    fn io_mode(&self) -> Result<IoMode, Failure> {
        match self.io_mode {
            OL_IO_AUTO => Ok(IoMode::Auto),
            OL_IO_BUFFERED => Ok(IoMode::Buffered),
            OL_IO_DIRECT => Ok(IoMode::Direct),
            OL_IO_URING => Ok(IoMode::Uring),
            OL_IO_MMAP => Ok(IoMode::Mmap),
            other => Err(Failure::invalid(format!("{other} is no io_mode"))),
        }
    }

    fn hand_out(&self) -> Result<HandOut, Failure> {
        match self.hand_out {
            OL_HAND_OUT_WHEN_COMPLETE => Ok(HandOut::WhenComplete),
            OL_HAND_OUT_AT_ONCE => Ok(HandOut::AtOnce),
            other => Err(Failure::invalid(format!("{other} is no hand_out"))),
        }
    }
}
