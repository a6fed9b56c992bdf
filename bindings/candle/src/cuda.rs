//! Arenas on a CUDA device: allocated by candle, filled by the loader in candle's stream.
//!
//! ```text
//! plan -> a flat tensor for each layer -> the loader copies into it, in candle's stream -> views of it, by name
//! ```
//!
//! Allocations, copies and later kernels are all queued in the single stream of candle's device, so
//! they run in order.
#![allow(
    unsafe_code,
    reason = "the loader uses candle's context, stream and memory, which stay alive; each block says why"
)]

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice};
use candle_core::{DType, Device, Error, Result, Shape, Storage, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use onelayer::checkpoint::TensorId;
use onelayer::plan::{PlannedLayer, ReadOrder};
use onelayer::{Checkpoint, DeviceRegion, LayerId, LoadPlan, Loader, LoaderBuilder, Target, Window};

use crate::arenas;
use crate::backend::{CheckpointBackend, check_shape};
use crate::error::AdapterError;

/// Serves tensors already on a CUDA device, as views of arenas owned by candle. Tensors that cannot
/// be in an arena (types without arithmetic, U16, other devices) are read on request, like in
/// [`CheckpointBackend`].
///
/// An arena is freed when the last tensor of its layer and this backend are dropped.
#[derive(Clone)]
pub struct ArenaBackend {
    checkpoint: Checkpoint,
    device: CudaDevice,
    tensors: Arc<HashMap<TensorId, Tensor>>,
    others: CheckpointBackend,
}

impl std::fmt::Debug for ArenaBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArenaBackend")
            .field("device", &self.device)
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

impl ArenaBackend {
    /// Loads the whole checkpoint to candle's device. If `dtype` is BF16, F16 or F32, wider floats
    /// are cast to it on the host while loading; other casts run on the device on request.
    /// `host_budget_bytes` limits the host memory of the load, like [`LoaderBuilder::host_budget`].
    ///
    /// # Errors
    /// [`AdapterError`] if `device` is not a CUDA device, or if the load fails; candle's error if
    /// the device is out of memory.
    pub fn load(
        checkpoint: &Checkpoint,
        dtype: DType,
        device: &Device,
        host_budget_bytes: u64,
    ) -> Result<Self> {
        let Device::Cuda(cuda) = device else {
            let found = format!("{:?}", device.location());
            return Err(AdapterError::NotCuda { found }.into());
        };
        let mut tensors = HashMap::new();
        let everything =
            settings(cuda, dtype, host_budget_bytes).plan(checkpoint).map_err(AdapterError::from)?;
        for (stored, ids) in arenas::by_type(checkpoint, &everything) {
            let settings =
                settings(cuda, dtype, host_budget_bytes).select(move |entry| ids.contains(&entry.id));
            tensors.extend(load_type(checkpoint, stored, device, cuda, settings)?);
        }
        let others = CheckpointBackend::new(checkpoint)?;
        let (checkpoint, device, tensors) = (checkpoint.clone(), cuda.clone(), Arc::new(tensors));
        Ok(Self { checkpoint, device, tensors, others })
    }

    /// A `VarBuilder` with this backend, for tensors of `dtype` on the device of the load.
    #[must_use]
    pub fn into_var_builder(self, dtype: DType) -> VarBuilder<'static> {
        let device = Device::Cuda(self.device.clone());
        VarBuilder::from_backend(Box::new(self), dtype, device)
    }

    /// The tensor with this name, if it is in an arena on that device.
    fn resident(&self, name: &str, device: &Device) -> Option<&Tensor> {
        let tensor = self.tensors.get(&self.checkpoint.find(name)?.id)?;
        tensor.device().same_device(device).then_some(tensor)
    }
}

impl SimpleBackend for ArenaBackend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        match self.resident(name, device) {
            Some(tensor) => {
                check_shape(name, shape, tensor.shape())?;
                tensor.to_dtype(dtype)
            }
            None => self.others.get(shape, name, init, dtype, device),
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.resident(name, device) {
            Some(tensor) => tensor.to_dtype(dtype),
            None => self.others.get_unchecked(name, dtype, device),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.others.contains_tensor(name)
    }
}

/// Settings of a load that keeps all layers, in candle's context and stream.
fn settings(device: &CudaDevice, dtype: DType, host_budget_bytes: u64) -> LoaderBuilder {
    let stream = device.cuda_stream();
    let context = stream.context();
    let ordinal = u32::try_from(context.ordinal()).expect("a driver counts devices in 31 bits");
    let mut settings = Loader::builder(Target::Cuda(ordinal))
        .host_budget(host_budget_bytes)
        .window(Window::All)
        .read_order(ReadOrder::Files);
    if let Some(narrow) = arenas::narrowing(dtype) {
        settings = settings.dtype(narrow);
    }
    // SAFETY: `load_type` keeps the device and its context alive until the load is complete.
    let settings = unsafe { settings.cuda_context(address(context.cu_ctx())) };
    // SAFETY: the same for the stream; nothing captures it, since `load_type` waits for it.
    unsafe { settings.cuda_stream(address(stream.cu_stream())) }
}

/// A driver handle as a number, for the loader.
fn address<T>(handle: *mut T) -> u64 {
    u64::try_from(handle.expose_provenance()).expect("an address has 64 bits")
}

/// Loads the tensors selected by `settings`, all delivered as `stored`.
fn load_type(
    checkpoint: &Checkpoint,
    stored: DType,
    device: &Device,
    cuda: &CudaDevice,
    settings: LoaderBuilder,
) -> Result<Vec<(TensorId, Tensor)>> {
    let plan = settings.plan(checkpoint).map_err(AdapterError::from)?;
    let arenas = allocate(&plan, stored, device)?;
    let regions = regions(&arenas, &cuda.cuda_stream())?;
    // A cloned tensor shares ownership of the memory.
    let owners = arenas.clone();
    let destination = move |layer: &PlannedLayer| {
        assert!(owners.contains_key(&layer.id), "the plan is the one that was allocated for");
        regions.get(&layer.id).copied()
    };
    // SAFETY: each region is a whole allocation of this context for one layer. The closure owns
    // their tensors, so they stay allocated while the loader may write; no other view exists before
    // it is done.
    let settings = unsafe { settings.destinations(destination) };
    let loader = settings.build().map_err(AdapterError::from)?;
    let mut stream = loader.stream(checkpoint).map_err(AdapterError::from)?;
    for layer in &mut stream {
        // The layer is complete; dropping it frees nothing, since candle owns the memory.
        drop(layer.map_err(AdapterError::from)?);
    }
    let plan = stream.plan();
    let views = plan.layers().iter().map(|layer| arenas::views(checkpoint, plan, layer, &arenas[&layer.id]));
    Ok(views.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// A flat tensor for each layer, of the size of its arena.
fn allocate(plan: &LoadPlan, stored: DType, device: &Device) -> Result<HashMap<LayerId, Tensor>> {
    let allocate = |layer: &PlannedLayer| {
        let Some(count) = arenas::arena_elements(layer, stored) else {
            return Err(Error::msg(format!("layer {} is larger than this machine can address", layer.id)));
        };
        Ok((layer.id.clone(), Tensor::zeros(count, stored, device)?))
    };
    plan.layers().iter().map(allocate).collect()
}

/// The device address of each one.
fn regions(
    arenas: &HashMap<LayerId, Tensor>,
    stream: &Arc<CudaStream>,
) -> Result<HashMap<LayerId, DeviceRegion>> {
    let region = |(layer, arena): (&LayerId, &Tensor)| Ok((layer.clone(), region(arena, stream)?));
    arenas.iter().map(region).collect()
}

fn region(arena: &Tensor, stream: &Arc<CudaStream>) -> Result<DeviceRegion> {
    let (storage, layout) = arena.storage_and_layout();
    debug_assert_eq!(layout.start_offset(), 0);
    let Storage::Cuda(storage) = &*storage else {
        return Err(Error::msg("an arena that is not on the CUDA device"));
    };
    match &storage.slice {
        CudaStorageSlice::U8(slice) => region_of(slice, stream),
        CudaStorageSlice::U32(slice) => region_of(slice, stream),
        CudaStorageSlice::I16(slice) => region_of(slice, stream),
        CudaStorageSlice::I32(slice) => region_of(slice, stream),
        CudaStorageSlice::I64(slice) => region_of(slice, stream),
        CudaStorageSlice::BF16(slice) => region_of(slice, stream),
        CudaStorageSlice::F16(slice) => region_of(slice, stream),
        CudaStorageSlice::F32(slice) => region_of(slice, stream),
        CudaStorageSlice::F64(slice) => region_of(slice, stream),
        CudaStorageSlice::F8E4M3(slice) => region_of(slice, stream),
        _ => Err(Error::UnsupportedDTypeForOp(arena.dtype(), "arena").bt()),
    }
}

fn region_of<T>(slice: &CudaSlice<T>, stream: &Arc<CudaStream>) -> Result<DeviceRegion> {
    let len_bytes = u64::try_from(slice.num_bytes()).map_err(Error::msg)?;
    // The guard of the address synchronises streams; here there is only one.
    let (address, _guard) = slice.device_ptr(stream);
    Ok(DeviceRegion { address, len_bytes })
}
