//! A caller's own CUDA context, stream and memory, used instead of the loader's.
#![allow(unsafe_code, reason = "handles of the caller's are promises; each says which")]

use std::sync::Arc;

use super::builder::{CudaHandles, LoaderBuilder};
#[cfg(feature = "cuda")]
use crate::device::cuda::{Context, CudaSession, SessionOptions, Stream};
use crate::device::{Device, DeviceError, DeviceRegion, Target};
use crate::plan::PlannedLayer;

/// `CU_STREAM_PER_THREAD` of cuda.h: the stream of the calling thread.
const CU_STREAM_PER_THREAD: u64 = 2;

impl CudaHandles {
    /// The device in the caller's context, if there is one. Refuses the per-thread stream.
    pub(super) fn device(&self, target: Target) -> Result<Option<Device>, DeviceError> {
        match (self.context, target) {
            (_, Target::Cuda(_)) if self.stream == Some(CU_STREAM_PER_THREAD) => {
                Err(DeviceError::PerThreadStream)
            }
            (None, _) | (_, Target::Host | Target::None) => Ok(None),
            #[cfg(feature = "cuda")]
            (Some(context), Target::Cuda(ordinal)) => {
                // SAFETY: a live context of this process: the promise of
                // `LoaderBuilder::cuda_context`.
                let context = unsafe { Context::of_caller(context) }?;
                Ok(Some(Device::in_context(ordinal, context)))
            }
            #[cfg(not(feature = "cuda"))]
            (Some(_), Target::Cuda(_)) => Err(DeviceError::NotBuilt),
        }
    }
}
impl LoaderBuilder {
    /// True if the caller has set a context, a stream or memory of one device.
    #[must_use]
    pub fn is_tied_to_a_device(&self) -> bool {
        let CudaHandles { context, stream, destinations } = &self.cuda;
        context.is_some() || stream.is_some() || destinations.is_some()
    }
}

#[cfg(feature = "cuda")]
impl CudaHandles {
    /// The CUDA session of a load. Arenas are reused up to `recycle_bytes_max`, if there is a
    /// window.
    pub(super) fn session(
        &self,
        context: &Arc<Context>,
        recycle_bytes_max: Option<u64>,
    ) -> Result<Arc<CudaSession>, DeviceError> {
        let copies = self.stream.map(|stream| {
            // SAFETY: a live stream of this context: the promise of `LoaderBuilder::cuda_stream`.
            unsafe { Stream::of_caller(stream, context) }
        });
        let destinations = self.destinations.clone();
        CudaSession::new(context, SessionOptions { copies, destinations, recycle_bytes_max })
    }
}

/// For callers with their own CUDA context, streams or memory. Handles are integers, so that any
/// bindings of the driver API can be used. Other targets ignore these settings.
impl LoaderBuilder {
    /// Loads in this context (`CUcontext`) instead of the device's primary one. The number of the
    /// target is ignored.
    ///
    /// # Safety
    /// A live context of this process, which outlives the loader and everything that is loaded with
    /// it.
    pub unsafe fn cuda_context(mut self, context: u64) -> Self {
        self.cuda.context = Some(context);
        self
    }

    /// Queues all copies in this stream (`CUstream`) instead of one of the loader's own. Work that
    /// the caller queues in it after it got a layer runs after the layer's copies. The legacy
    /// default stream (0 or 1) is allowed. The per-thread default stream (2) is not, because the
    /// loader has several threads: [`build`](Self::build) refuses it.
    ///
    /// # Safety
    /// A live stream of the context that is used, which outlives the loader, its streams and
    /// everything that is loaded with it. It must not be capturing a graph.
    pub unsafe fn cuda_stream(mut self, stream: u64) -> Self {
        self.cuda.stream = Some(stream);
        self
    }

    /// Puts layers into memory of the caller: `destination` is called for each layer, and if it
    /// returns `None`, the loader allocates an arena. A region has at least
    /// [`PlannedLayer::arena_bytes`] and starts on a multiple of 256 bytes. Each tensor lies at its
    /// [`Placement::arena_offset_bytes`](crate::plan::Placement::arena_offset_bytes), and bytes
    /// between tensors are overwritten too. Such memory is not checked against the free memory of
    /// the device, and never freed.
    ///
    /// # Safety
    /// Every region is device memory of the context that is used. From the call that returns it
    /// until the layer is dropped, and if the load fails until its stream has ended, it stays
    /// allocated, nothing else writes to it, and nothing reads it before the layer is ready. No
    /// two regions that are in use at a time overlap.
    pub unsafe fn destinations(
        mut self,
        destination: impl Fn(&PlannedLayer) -> Option<DeviceRegion> + Send + Sync + 'static,
    ) -> Self {
        self.cuda.destinations = Some(Arc::new(destination));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{LoadError, Loader};

    #[test]
    fn a_stream_of_each_thread_is_refused() {
        let with_stream = |target| {
            // SAFETY: nothing is loaded with it.
            unsafe { Loader::builder(target).cuda_stream(CU_STREAM_PER_THREAD) }.build()
        };
        let refused = with_stream(Target::Cuda(0)).unwrap_err();
        assert!(matches!(refused, LoadError::Device(DeviceError::PerThreadStream)), "{refused}");
        assert!(with_stream(Target::Host).is_ok(), "other targets ignore it");
    }
}
