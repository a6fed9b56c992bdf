//! Contexts.

use super::put;
use crate::code::Code;
use crate::sim::{Class, call, waiting_call};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) -> u32 {
    call("cuDevicePrimaryCtxRetain", Class::Work, |sim| {
        let retained = sim.retain_primary(sim.device(device)?)?;
        // SAFETY: the caller's promise.
        unsafe { put(context, retained) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> u32 {
    call("cuDevicePrimaryCtxRelease_v2", Class::Release, |sim| sim.release_primary(sim.device(device)?))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, is_active: *mut i32) -> u32 {
    call("cuDevicePrimaryCtxGetState", Class::Query, |sim| {
        let active = sim.devices[sim.device(device)?].primary.is_some();
        // SAFETY: the caller's promise.
        unsafe { put(flags, 0) }?;
        // SAFETY: the caller's promise.
        unsafe { put(is_active, i32::from(active)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxCreate_v2(context: *mut usize, _flags: u32, device: i32) -> u32 {
    call("cuCtxCreate_v2", Class::Work, |sim| {
        let made = sim.new_context(sim.device(device)?, false)?;
        sim.push_context(made)?;
        // SAFETY: the caller's promise.
        unsafe { put(context, made) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxDestroy_v2(context: usize) -> u32 {
    call("cuCtxDestroy_v2", Class::Release, |sim| {
        if sim.contexts.get(&context).is_none_or(|context| context.is_primary) {
            sim.unknown_handle("context", context);
            return Err(Code::INVALID_CONTEXT);
        }
        if sim.current_or_none() == Some(context) {
            sim.pop_context()?;
        }
        sim.end_context(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: usize) -> u32 {
    call("cuCtxPushCurrent_v2", Class::Enter, |sim| sim.push_context(context))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut usize) -> u32 {
    call("cuCtxPopCurrent_v2", Class::Release, |sim| {
        let popped = sim.pop_context()?;
        // SAFETY: the caller's promise; null is allowed here.
        if context.is_null() { Ok(()) } else { unsafe { put(context, popped) } }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> u32 {
    call("cuCtxGetCurrent", Class::Query, |sim| {
        // SAFETY: the caller's promise.
        unsafe { put(context, sim.current_or_none().unwrap_or(0)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: usize) -> u32 {
    call("cuCtxSetCurrent", Class::Enter, |sim| sim.set_context(context))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetFlags(_flags: u32) -> u32 {
    call("cuCtxSetFlags", Class::Work, |sim| sim.current().map(drop))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetDevice(device: *mut i32) -> u32 {
    call("cuCtxGetDevice", Class::Work, |sim| {
        let context = sim.current()?;
        let index = i32::try_from(sim.device_of(context)).map_err(|_| Code::INVALID_DEVICE)?;
        // SAFETY: the caller's promise.
        unsafe { put(device, index) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> u32 {
    waiting_call("cuCtxSynchronize", |sim| {
        let context = sim.current()?;
        sim.synchronize_context(context)
    })
}
