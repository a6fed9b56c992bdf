//! Device memory from the loader's own stream-ordered pool: a plain free would stall the whole
//! device.
//!
//! It is not the device's default pool, so trimming it takes nothing from others. Without pools on
//! the device, memory is allocated and freed plainly.
#![allow(unsafe_code, reason = "calls the driver; each block says why its arguments are valid")]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Event, Stream, call, code_of, retry_once};
use crate::device::idle::IdleMemory;
use crate::device::{CudaCode, DeviceError, Freed};
use crate::live::{Entry, MemoryKind, MemoryUse};
use crate::units::to_usize;

/// The pool of device memory.
#[derive(Debug)]
pub(super) struct DevicePool {
    /// `None` where the device has no pools.
    raw: Option<RawPool>,
    /// Allocations are ordered in the stream of copies ...
    copies: Arc<Stream>,
    /// ... and frees in a stream that waits for the readers of the memory.
    frees: Stream,
}

#[derive(Debug)]
struct RawPool(sys::CUmemoryPool);

// SAFETY: the driver's functions on pools may be called from any thread, at the same time too.
unsafe impl Send for RawPool {}
// SAFETY: as above; the field never changes.
unsafe impl Sync for RawPool {}

/// `CUmemPoolProps` of cuda.h, 88 bytes in every version of the driver API since 11.2. Declared by
/// hand: the bindings name its fields differently from version to version.
#[repr(C)]
struct PoolProperties {
    allocation_type: u32,
    handle_types: u32,
    location_type: u32,
    location_id: i32,
    security_attributes: *mut c_void,
    reserved: [u8; 64],
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`: memory that stays on its device.
const ALLOCATION_TYPE_PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_TYPE_DEVICE: u32 = 1;

impl DevicePool {
    pub(super) fn new(copies: &Arc<Stream>) -> Result<Self, DeviceError> {
        let context = copies.context();
        let frees = Stream::new(context)?;
        let mut pool = Self { raw: None, copies: Arc::clone(copies), frees };
        if context.has_pools()? {
            let properties = PoolProperties {
                allocation_type: ALLOCATION_TYPE_PINNED,
                handle_types: 0,
                location_type: LOCATION_TYPE_DEVICE,
                location_id: context.device(),
                security_attributes: std::ptr::null_mut(),
                reserved: [0; 64],
            };
            let _entered = context.enter()?;
            let mut raw = std::ptr::null_mut();
            // SAFETY: the properties have the layout of the driver API; the call reads them and writes one
            // handle.
            let answer = unsafe { sys::cuMemPoolCreate(&raw mut raw, (&raw const properties).cast()) };
            call("cuMemPoolCreate", answer)?;
            pool.raw = Some(RawPool(raw));
        }
        Ok(pool)
    }

    /// Allocates memory for work queued in the stream of copies from now on.
    pub(super) fn allocate(self: &Arc<Self>, len_bytes: u64) -> Result<DeviceMemory, DeviceError> {
        let mut allocated = self.try_allocate(len_bytes);
        if allocated == Err(CudaCode::OUT_OF_MEMORY) {
            // Freed memory may not be back yet.
            self.give_back();
            allocated = self.try_allocate(len_bytes);
        }
        match allocated {
            Ok(address) => Ok(DeviceMemory {
                address,
                len_bytes,
                idle_from: None,
                is_freed: false,
                live: Entry::new(self.memory_kind(), MemoryUse::Filling, len_bytes),
                pool: Arc::clone(self),
            }),
            Err(CudaCode::OUT_OF_MEMORY) => {
                let free_bytes = self.copies.context().memory().map_or(0, |memory| memory.free_bytes);
                Err(DeviceError::DeviceAllocation { bytes: len_bytes, free_bytes })
            }
            Err(code) => {
                let call = if self.raw.is_some() { "cuMemAllocFromPoolAsync" } else { "cuMemAlloc_v2" };
                Err(DeviceError::Cuda { call, code })
            }
        }
    }

    fn memory_kind(&self) -> MemoryKind {
        let ordinal = u32::try_from(self.copies.context().device());
        MemoryKind::Cuda(ordinal.expect("the driver counts its devices from zero"))
    }

    fn try_allocate(&self, len_bytes: u64) -> Result<u64, CudaCode> {
        let entered = self.copies.context().enter();
        let _entered = entered.map_err(|error| error.cuda_code().unwrap_or(CudaCode::NOT_READY))?;
        let mut address: sys::CUdeviceptr = 0;
        let len = to_usize(len_bytes);
        code_of(match &self.raw {
            // SAFETY: pool and stream are alive and of this context; the call writes one address.
            Some(pool) => unsafe {
                sys::cuMemAllocFromPoolAsync(&raw mut address, len, pool.0, self.copies.raw())
            },
            // SAFETY: a context is current; the call writes one address.
            None => unsafe { sys::cuMemAlloc_v2(&raw mut address, len) },
        })?;
        Ok(address)
    }

    /// The stream of frees. Frees wait for everything that is queued in it.
    pub(super) fn frees(&self) -> &Stream {
        &self.frees
    }

    /// Waits for the frees and returns the pool's unused memory to the device. False if either was
    /// refused; such memory goes with the pool.
    pub(super) fn give_back(&self) -> bool {
        let is_waited = self.frees.synchronize().is_ok();
        let Some(pool) = &self.raw else { return is_waited };
        let Ok(_entered) = self.copies.context().enter() else { return false };
        // SAFETY: the pool is alive; memory in use stays.
        let is_trimmed = retry_once(|| unsafe { sys::cuMemPoolTrimTo(pool.0, 0) });
        is_waited && is_trimmed
    }

    /// Bytes that the pool has taken from the device, used or not. `None` without a pool, or
    /// without an answer.
    pub(super) fn reserved_bytes(&self) -> Option<u64> {
        let pool = self.raw.as_ref()?;
        let _entered = self.copies.context().enter().ok()?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        let mut bytes = 0_u64;
        // SAFETY: the pool is alive; the call writes 64 bits for this attribute (driver API,
        // `CUmemPool_attribute`).
        let answer =
            unsafe { sys::cuMemPoolGetAttribute(pool.0, attribute, (&raw mut bytes).cast::<c_void>()) };
        code_of(answer).ok().map(|()| bytes)
    }
}

impl Drop for DevicePool {
    fn drop(&mut self) {
        let Some(pool) = &self.raw else { return };
        // SAFETY: not used after this. Memory whose free is still queued keeps it alive inside the driver
        // (driver API, `cuMemPoolDestroy`).
        self.copies.context().give_back(|| unsafe { sys::cuMemPoolDestroy(pool.0) });
    }
}

/// Device memory. Dropping it frees it in the stream of frees, which the owner must have made wait
/// for all users of the memory.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    address: u64,
    len_bytes: u64,
    /// While idle: the event to wait for before reuse.
    idle_from: Option<Event>,
    is_freed: bool,
    /// Its entry in the list of allocations.
    live: Entry,
    pool: Arc<DevicePool>,
}

impl DeviceMemory {
    /// Its address in the device's context.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Marks it idle: the next user waits for everything queued in the stream of frees so far.
    pub(super) fn mark_idle(&mut self) -> Result<(), DeviceError> {
        self.idle_from = Some(self.pool.frees.mark()?);
        self.live.note(MemoryUse::Idle, None);
        Ok(())
    }

    /// An event behind everything queued in the stream of frees.
    pub(super) fn mark_frees(&self) -> Result<Event, DeviceError> {
        self.pool.frees.mark()
    }

    /// Waits for the stream of frees. False if that was refused.
    pub(super) fn drain_frees(&self) -> bool {
        self.pool.frees.drain()
    }

    /// Waits for the stream of copies. False if that was refused.
    pub(super) fn drain_copies(&self) -> bool {
        self.pool.copies.drain()
    }

    /// Its length.
    pub(super) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Makes idle memory usable for work queued in the stream of copies from now on.
    pub(super) fn reuse(&mut self) -> Result<(), DeviceError> {
        self.live.note(MemoryUse::Filling, None);
        match self.idle_from.take() {
            Some(event) => self.pool.copies.wait_for(&event),
            None => Ok(()),
        }
    }

    /// Its entry in the list of allocations.
    pub(super) fn live(&self) -> &Entry {
        &self.live
    }

    /// Orders the free behind everything queued in the stream of copies so far.
    pub(super) fn free_after_copies(&self) -> Result<(), DeviceError> {
        self.pool.frees.wait_for(&self.pool.copies.mark()?)
    }

    /// Frees it as dropping does, and reports the result.
    pub(super) fn free(mut self) -> Freed {
        self.release()
    }

    fn release(&mut self) -> Freed {
        if std::mem::replace(&mut self.is_freed, true) {
            return Freed::Unconfirmed;
        }
        let context = self.pool.copies.context();
        let _entered = context.enter().or_else(|_| context.enter());
        let freed = match &self.pool.raw {
            // SAFETY: allocated from this pool and not used after this; the owner has ordered the
            // free behind all uses.
            Some(_) => code_of(unsafe { sys::cuMemFreeAsync(self.address, self.pool.frees.raw()) }),
            None => Err(CudaCode::NOT_READY),
        };
        match freed {
            Ok(()) => Freed::ToPool,
            Err(code) if code.is_fatal() => Freed::Unconfirmed,
            Err(_) => self.free_plainly(),
        }
    }

    /// Frees it plainly after all its users are done: if the ordered free was refused, or there are
    /// no pools.
    fn free_plainly(&self) -> Freed {
        if !self.pool.frees.drain() {
            // It may still be in use: it is never freed, and its pool stays.
            std::mem::forget(Arc::clone(&self.pool));
            return Freed::Unconfirmed;
        }
        // SAFETY: allocated here, not used after this, and everything that used it is over; this function
        // frees memory of pools too (driver API, `cuMemFree`).
        let is_freed = retry_once(|| unsafe { sys::cuMemFree_v2(self.address) });
        match (is_freed, &self.pool.raw) {
            (false, _) => Freed::Unconfirmed,
            (true, Some(_)) => Freed::ToPool,
            (true, None) => Freed::Returned,
        }
    }
}

impl IdleMemory for DeviceMemory {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// All its bytes are taken from the device, used or not, so a larger one would exceed what the
    /// plan counts.
    fn fits(&self, len_bytes: u64) -> bool {
        self.len_bytes == len_bytes
    }

    fn is_outgrown_by(&self, _len_bytes: u64) -> bool {
        false
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.release();
    }
}
