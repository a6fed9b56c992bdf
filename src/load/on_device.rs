//! Layers and tensors as a device sees them: addresses, readiness, and when their memory may be
//! freed.
#![allow(unsafe_code, reason = "handles of the caller's are promises; each says which")]

use std::ptr::NonNull;

use super::error::LoadError;
use super::layer::{LoadedLayer, LoadedTensor};
use crate::device::{After, DeviceRegion, Target};
use crate::units::{to_u64, to_usize};

impl LoadedLayer {
    /// The whole memory of the layer, on a device that has addresses.
    /// [`LoadedTensor::device_pointer`] points into it.
    #[must_use]
    pub fn device_region(&self) -> Option<DeviceRegion> {
        let address = self.data.resident().device_address()?;
        Some(DeviceRegion { address, len_bytes: self.data.resident().len_bytes() })
    }

    /// True if every byte is in its place; always so unless layers are handed out
    /// [at once](crate::HandOut::AtOnce).
    ///
    /// # Errors
    /// [`LoadError::Device`] if a copy has failed.
    pub fn is_ready(&self) -> Result<bool, LoadError> {
        Ok(self.data.resident().is_ready()?)
    }

    /// Waits until every byte is in its place.
    ///
    /// # Errors
    /// [`LoadError::Device`] if a copy has failed.
    pub fn wait_ready(&self) -> Result<(), LoadError> {
        Ok(self.data.resident().wait_ready()?)
    }

    /// The event (`CUevent`) that is over when every byte is in its place, on a device that has
    /// events. It lives as long as the layer. The caller lets each stream that uses the layer wait
    /// for it.
    #[must_use]
    pub fn ready_event(&self) -> Option<u64> {
        self.data.resident().ready_event()
    }

    /// Lets what is queued in a stream from now on (`CUstream`) wait until the layer is ready.
    /// Returns at once. The per-thread default stream (2) is that of the calling thread, here
    /// and in [`Self::release_after`].
    ///
    /// # Errors
    /// [`LoadError::Device`] if the driver refuses.
    ///
    /// # Safety
    /// A live stream of the context that was loaded in. On targets without streams nothing happens.
    pub unsafe fn let_wait(&self, stream: u64) -> Result<(), LoadError> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.data.resident().let_wait(stream) }?)
    }

    /// Frees or reuses the memory only after an event, or after the work that is queued in a stream
    /// so far. May be called several times. Returns at once, and dropping the layer does not wait:
    /// the device frees the memory in its own order. Without this, dropping a layer whose address
    /// was asked for waits for all work that is queued in its context.
    ///
    /// # Errors
    /// [`LoadError::Device`] if the driver refuses. Then dropping the layer waits.
    ///
    /// # Safety
    /// A live event or stream of the context that was loaded in. All work that still uses the layer
    /// is queued and is over by then. On targets without streams nothing happens.
    pub unsafe fn release_after(&self, after: After) -> Result<(), LoadError> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.data.resident().release_after(after) }?)
    }
}

impl LoadedTensor {
    /// Where the tensor lies. In a context of the caller's, that context's device.
    #[must_use]
    pub fn target(&self) -> Target {
        self.data.resident().target()
    }

    /// Waits until every byte of its layer is in its place, as [`LoadedLayer::wait_ready`].
    ///
    /// # Errors
    /// [`LoadError::Device`] if a copy has failed.
    pub fn wait_ready(&self) -> Result<(), LoadError> {
        Ok(self.data.resident().wait_ready()?)
    }

    /// Lets what is queued in a stream from now on wait until its layer is ready, as
    /// [`LoadedLayer::let_wait`].
    ///
    /// # Errors
    /// [`LoadError::Device`] if the driver refuses.
    ///
    /// # Safety
    /// That of [`LoadedLayer::let_wait`].
    pub unsafe fn let_wait(&self, stream: u64) -> Result<(), LoadError> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.data.resident().let_wait(stream) }?)
    }

    /// Where the tensor starts in host memory, for code that is not written in Rust. `None` where
    /// the host cannot read it, and for a tensor without bytes. A multiple of 256, valid for
    /// [`Self::len_bytes`] until the last owner of the layer is gone. The loader does not write to
    /// it. While you write through it, no [`Self::as_bytes`] of this tensor may be in use.
    #[must_use]
    pub fn host_pointer(&self) -> Option<NonNull<u8>> {
        let place = self.placement();
        let start = self.data.resident().host_address().filter(|_| place.len_bytes() > 0)?;
        // SAFETY: a plan puts every tensor inside the arena of its layer.
        Some(unsafe { start.add(to_usize(place.arena_offset_bytes)) })
    }

    /// Where the tensor starts in the device's address space (`CUdeviceptr`), a multiple of 256;
    /// `None` on targets that have no such space. Valid in the context that was loaded in,
    /// which unless the caller brought another one is the device's primary one, until the layer
    /// is dropped. Memory of a stream-ordered pool cannot be shared with other processes
    /// (`cuIpcGetMemHandle`). A tensor without bytes has an address that nothing is at.
    #[must_use]
    pub fn device_pointer(&self) -> Option<u64> {
        let start = self.data.resident().device_address()?;
        Some(start + self.placement().arena_offset_bytes)
    }

    /// Copies bytes of the tensor to the host, from `offset_bytes` on, as many as `target` takes.
    /// Waits until the layer is ready. False on [`Target::None`](crate::device::Target::None),
    /// which has none.
    ///
    /// # Errors
    /// [`LoadError::Device`] if the driver refuses.
    ///
    /// # Panics
    /// If the tensor has no such bytes.
    pub fn read(&self, offset_bytes: u64, target: &mut [u8]) -> Result<bool, LoadError> {
        let place = self.placement();
        let end = offset_bytes.checked_add(to_u64(target.len()));
        assert!(
            end.is_some_and(|end| end <= place.len_bytes()),
            "a read beyond the end of {:?}",
            self.name()
        );
        if target.is_empty() {
            return Ok(self.data.resident().is_somewhere());
        }
        Ok(self.data.resident().read(place.arena_offset_bytes + offset_bytes, target)?)
    }
}
