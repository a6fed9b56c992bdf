//! Stream-ordered pools.

use std::ffi::c_void;

use super::put;
use crate::code::{Answer, Code};
use crate::sim::{Class, Sim, call, to_u64};

/// The start of `CUmemPoolProps`; the rest is reserved or for other systems.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolProperties {
    allocation_type: u32,
    handle_types: u32,
    location_type: u32,
    location_id: i32,
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED` and `CU_MEM_LOCATION_TYPE_DEVICE`, the only supported ones.
const PINNED: u32 = 1;
const ON_DEVICE: u32 = 1;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolCreate(pool: *mut usize, properties: *const PoolProperties) -> u32 {
    call("cuMemPoolCreate", Class::Work, |sim| {
        if !sim.config.has_pools {
            return Err(Code::NOT_SUPPORTED);
        }
        if properties.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller's promise; not null.
        let properties = unsafe { properties.read() };
        if properties.allocation_type != PINNED || properties.location_type != ON_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        let device = sim.device(properties.location_id)?;
        let made = sim.new_pool(device, false);
        // SAFETY: the caller's promise.
        unsafe { put(pool, made) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolDestroy(pool: usize) -> u32 {
    call("cuMemPoolDestroy", Class::Release, |sim| sim.destroy_pool(pool))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolTrimTo(pool: usize, keep: usize) -> u32 {
    call("cuMemPoolTrimTo", Class::Work, |sim| {
        sim.pool(pool)?;
        sim.shrink_pool(pool, to_u64(keep));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: i32) -> u32 {
    call("cuDeviceGetDefaultMemPool", Class::Query, |sim| {
        let device = sim.device(device)?;
        // SAFETY: the caller's promise.
        unsafe { put(pool, sim.devices[device].default_pool) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetMemPool(pool: *mut usize, device: i32) -> u32 {
    call("cuDeviceGetMemPool", Class::Query, |sim| {
        let device = sim.device(device)?;
        // SAFETY: the caller's promise.
        unsafe { put(pool, sim.devices[device].current_pool) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceSetMemPool(device: i32, pool: usize) -> u32 {
    call("cuDeviceSetMemPool", Class::Work, |sim| {
        let device = sim.device(device)?;
        sim.pool(pool)?;
        sim.devices[device].current_pool = pool;
        Ok(())
    })
}

/// A `CUmemPool_attribute`, by its number in cuda.h.
enum Attribute {
    /// 1 to 3: an `int`.
    Reuse(usize),
    ReleaseThreshold,
    Reserved,
    ReservedHigh,
    Used,
    UsedHigh,
}

impl Attribute {
    fn of(number: u32) -> Answer<Self> {
        Ok(match number {
            1 => Self::Reuse(0),
            2 => Self::Reuse(1),
            3 => Self::Reuse(2),
            4 => Self::ReleaseThreshold,
            5 => Self::Reserved,
            6 => Self::ReservedHigh,
            7 => Self::Used,
            8 => Self::UsedHigh,
            _ => return Err(Code::INVALID_VALUE),
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolGetAttribute(pool: usize, attribute: u32, value: *mut c_void) -> u32 {
    call("cuMemPoolGetAttribute", Class::Work, |sim| {
        let state = sim.pool(pool)?;
        let number = match Attribute::of(attribute)? {
            Attribute::Reuse(index) => {
                // SAFETY: the caller's promise: these attributes are an `int`.
                return unsafe { put(value.cast::<u32>(), state.reuse[index]) };
            }
            Attribute::ReleaseThreshold => state.threshold_bytes,
            Attribute::Reserved => state.reserved.now,
            Attribute::ReservedHigh => state.reserved.most,
            Attribute::Used => state.used.now,
            Attribute::UsedHigh => state.used.most,
        };
        // SAFETY: the caller's promise: these attributes are a `cuuint64_t`.
        unsafe { put(value.cast::<u64>(), number) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolSetAttribute(pool: usize, attribute: u32, value: *const c_void) -> u32 {
    call("cuMemPoolSetAttribute", Class::Work, |sim| {
        let state = sim.pool(pool)?;
        if value.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let attribute = Attribute::of(attribute)?;
        if let Attribute::Reuse(index) = attribute {
            // SAFETY: the caller's promise: these attributes are an `int`.
            state.reuse[index] = unsafe { value.cast::<u32>().read() };
            return Ok(());
        }
        // SAFETY: the caller's promise: these attributes are a `cuuint64_t`.
        let number = unsafe { value.cast::<u64>().read() };
        match attribute {
            Attribute::ReleaseThreshold => state.threshold_bytes = number,
            // High-water marks can only be reset.
            Attribute::ReservedHigh if number == 0 => state.reserved.most = state.reserved.now,
            Attribute::UsedHigh if number == 0 => state.used.most = state.used.now,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    })
}

/// Allocates and writes the address.
///
/// # Safety
/// The promise of [`put`].
unsafe fn allocate(sim: &mut Sim, address: *mut u64, len: usize, pool: usize, stream: usize) -> Answer {
    let allocated = sim.allocate_from_pool(to_u64(len), pool, stream)?;
    // SAFETY: the caller's promise.
    unsafe { put(address, allocated) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocFromPoolAsync(
    address: *mut u64,
    len: usize,
    pool: usize,
    stream: usize,
) -> u32 {
    call("cuMemAllocFromPoolAsync", Class::Work, |sim| {
        // SAFETY: the caller's promise.
        unsafe { allocate(sim, address, len, pool, stream) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(address: *mut u64, len: usize, stream: usize) -> u32 {
    call("cuMemAllocAsync", Class::Work, |sim| {
        let context = sim.current()?;
        let pool = sim.devices[sim.device_of(context)].current_pool;
        // SAFETY: the caller's promise.
        unsafe { allocate(sim, address, len, pool, stream) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, stream: usize) -> u32 {
    call("cuMemFreeAsync", Class::Release, |sim| {
        sim.current_for_release()?;
        sim.free_async(address, stream)
    })
}
