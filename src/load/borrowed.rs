//! What a caller brings to a CUDA device instead of letting the loader make its own: a context, a
//! stream, memory.
#![allow(unsafe_code, reason = "handles of the caller's are promises; each says which")]

use std::fmt;
use std::sync::Arc;

use super::LoaderBuilder;
#[cfg(feature = "cuda")]
use crate::device::cuda::{Context, CudaSession, SessionOptions, Stream};
use crate::device::{Destinations, Device, DeviceError, DeviceRegion, Target};
use crate::plan::PlannedLayer;

/// `CU_STREAM_PER_THREAD` of cuda.h: whichever thread calls, its own stream.
const CU_STREAM_PER_THREAD: u64 = 2;

/// What a caller brings.
#[derive(Clone, Default)]
pub(super) struct Borrowed {
    context: Option<u64>,
    pub(super) stream: Option<u64>,
    pub(super) destinations: Option<Arc<Destinations>>,
}

impl fmt::Debug for Borrowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Borrowed")
            .field("context", &self.context)
            .field("stream", &self.stream)
            .field("destinations", &self.destinations.is_some())
            .finish()
    }
}

impl Borrowed {
    /// The device in the caller's context, if there is one. Refuses a stream that no load can use.
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
    /// True if the caller has brought a context, a stream or memory of one device.
    #[must_use]
    pub fn is_tied_to_a_device(&self) -> bool {
        let Borrowed { context, stream, destinations } = &self.borrowed;
        context.is_some() || stream.is_some() || destinations.is_some()
    }
}

#[cfg(feature = "cuda")]
impl super::Loader {
    /// What a load shares on the device. In a window arenas are used again, up to
    /// `recycle_bytes_max` of them.
    pub(super) fn session(
        &self,
        context: &Arc<Context>,
        recycle_bytes_max: Option<u64>,
    ) -> Result<Arc<CudaSession>, DeviceError> {
        let borrowed = &self.settings.borrowed;
        let copies = borrowed.stream.map(|stream| {
            // SAFETY: a live stream of this context: the promise of `LoaderBuilder::cuda_stream`.
            unsafe { Stream::of_caller(stream, context) }
        });
        let destinations = borrowed.destinations.clone();
        CudaSession::new(context, SessionOptions { copies, destinations, recycle_bytes_max })
    }
}

/// For callers that have a CUDA context, streams or memory of their own. Handles are passed as
/// integers, so that the caller's bindings of the driver API need not be ours. Other targets ignore
/// all of this.
impl LoaderBuilder {
    /// Loads in this context (`CUcontext`) instead of the device's primary one. The number of the
    /// target is ignored.
    ///
    /// # Safety
    /// A live context of this process, which outlives the loader and everything that is loaded with
    /// it.
    pub unsafe fn cuda_context(mut self, context: u64) -> Self {
        self.borrowed.context = Some(context);
        self
    }

    /// Queues all copies in this stream (`CUstream`) instead of one of the loader's own. What the
    /// caller queues in it after it has got a layer comes after the layer's copies, by itself.
    /// The legacy default stream (0 or 1) is one, the per-thread default stream (2) is not: the
    /// loader has several threads, and [`build`](Self::build) refuses it.
    ///
    /// # Safety
    /// A live stream of the context that is used, which outlives the loader, its streams and
    /// everything that is loaded with it. It must not be capturing a graph.
    pub unsafe fn cuda_stream(mut self, stream: u64) -> Self {
        self.borrowed.stream = Some(stream);
        self
    }

    /// Puts layers into memory of the caller's: `destination` is asked for each layer, and where it
    /// gives none, the loader allocates an arena. A region holds the layer as the plan lays it
    /// out: it has at least [`PlannedLayer::arena_bytes`], starts on 256 bytes, and each tensor
    /// lies at its
    /// [`Placement::arena_offset_bytes`](crate::plan::Placement::arena_offset_bytes). Bytes between
    /// tensors are overwritten too. Such memory is not checked against what the device has
    /// free, and never freed.
    ///
    /// # Safety
    /// Every region is device memory of the context that is used. From the call that returns it
    /// until the layer is dropped, and if the load fails until its stream has ended, it stays
    /// allocated and nobody else writes to it; nobody reads it before the layer is ready. No
    /// two regions that are in use at a time overlap.
    pub unsafe fn destinations(
        mut self,
        destination: impl Fn(&PlannedLayer) -> Option<DeviceRegion> + Send + Sync + 'static,
    ) -> Self {
        self.borrowed.destinations = Some(Arc::new(destination));
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
