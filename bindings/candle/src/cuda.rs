//! Arenas on a CUDA device: allocated by candle, filled by the loader in candle's own stream.
//!
//! ```text
//! plan -> a flat tensor for each layer -> the loader copies into it, in candle's stream -> views of it, by name
//! ```
//!
//! Every allocation, copy and later kernel is queued in the one stream that candle's device has, so that none overtakes
//! another.
#![allow(
    unsafe_code,
    reason = "the loader is lent candle's context, stream and memory; each promise is kept by what is kept alive"
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

/// Serves tensors that are on a CUDA device already, as parts of arenas that candle owns. What cannot lie in one (types without
/// arithmetic, U16, other devices) is read when it is asked for, as [`CheckpointBackend`] does.
///
/// An arena is given back when the last tensor of its layer is dropped, and this backend.
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
    /// Loads the whole checkpoint onto candle's device. Wider floats are narrowed to `dtype` on the host, on the way, if that is
    /// BF16, F16 or F32; any other cast is made on the device when a tensor is asked for. `host_budget_bytes` bounds the host
    /// memory of the load, as [`LoaderBuilder::host_budget`] does.
    ///
    /// # Errors
    /// [`AdapterError`] if `device` is no CUDA device, or if the load fails; candle's own error if its device has no room.
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

    /// A `VarBuilder` with this backend, whose tensors are elements of `dtype` on the device that was loaded to.
    #[must_use]
    pub fn into_var_builder(self, dtype: DType) -> VarBuilder<'static> {
        let device = Device::Cuda(self.device.clone());
        VarBuilder::from_backend(Box::new(self), dtype, device)
    }

    /// The tensor of that name if it lies in an arena on that device.
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

/// Settings of a load that keeps everything, in candle's context and stream.
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
    // SAFETY: `load_type` keeps the device, and with it its context, alive until everything that was loaded is ready.
    let settings = unsafe { settings.cuda_context(address(context.cu_ctx())) };
    // SAFETY: as above, the stream; nothing captures it, since `load_type` waits for it.
    unsafe { settings.cuda_stream(address(stream.cu_stream())) }
}

/// A handle of the driver's as the number that the loader takes.
fn address<T>(handle: *mut T) -> u64 {
    u64::try_from(handle.expose_provenance()).expect("an address has 64 bits")
}

/// Loads what `settings` select, all of which arrives as `stored`.
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
    // Cloning a tensor clones who owns its memory.
    let owners = arenas.clone();
    let destination = move |layer: &PlannedLayer| {
        assert!(owners.contains_key(&layer.id), "the plan is the one that was allocated for");
        regions.get(&layer.id).copied()
    };
    // SAFETY: each region is a whole allocation of this context that no other layer has. The closure owns the tensors that own
    // them, so they stay allocated as long as the loader may write; nobody else has a view of them before it is done.
    let settings = unsafe { settings.destinations(destination) };
    let loader = settings.build().map_err(AdapterError::from)?;
    let mut stream = loader.stream(checkpoint).map_err(AdapterError::from)?;
    for layer in &mut stream {
        // Complete when it is handed out; dropping it frees nothing, since the memory is candle's.
        drop(layer.map_err(AdapterError::from)?);
    }
    let plan = stream.plan();
    let views = plan.layers().iter().map(|layer| arenas::views(checkpoint, plan, layer, &arenas[&layer.id]));
    Ok(views.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// A flat tensor for each layer, as large as its arena.
fn allocate(plan: &LoadPlan, stored: DType, device: &Device) -> Result<HashMap<LayerId, Tensor>> {
    let allocate = |layer: &PlannedLayer| {
        let Some(count) = arenas::arena_elements(layer, stored) else {
            return Err(Error::msg(format!("layer {} is larger than this machine can address", layer.id)));
        };
        Ok((layer.id.clone(), Tensor::zeros(count, stored, device)?))
    };
    plan.layers().iter().map(allocate).collect()
}

/// Where each of them lies.
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
    // The guard that comes with the address orders streams among each other; here there is only one.
    let (address, _guard) = slice.device_ptr(stream);
    Ok(DeviceRegion { address, len_bytes })
}
