//! Events.

use super::put;
use crate::code::Code;
use crate::sim::{Class, call, waiting_call};

/// `CU_EVENT_DISABLE_TIMING`, and the mask of all flags: blocking, no timing, between processes.
const DISABLE_TIMING: u32 = 2;
const ALL_FLAGS: u32 = 7;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut usize, flags: u32) -> u32 {
    call("cuEventCreate", Class::Work, |sim| {
        let context = sim.current()?;
        if flags & !ALL_FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let made = sim.new_event(context, flags & DISABLE_TIMING == 0);
        // SAFETY: the caller's promise.
        unsafe { put(event, made) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: usize) -> u32 {
    call("cuEventDestroy_v2", Class::Release, |sim| {
        sim.event(event)?;
        sim.events.remove(&event);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: usize, stream: usize) -> u32 {
    call("cuEventRecord", Class::Work, |sim| {
        sim.current()?;
        sim.record_event(event, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: usize) -> u32 {
    call("cuEventQuery", Class::Work, |sim| {
        sim.current()?;
        sim.query_event(event)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: usize) -> u32 {
    waiting_call("cuEventSynchronize", |sim| {
        sim.current()?;
        sim.synchronize_event(event)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) -> u32 {
    call("cuEventElapsedTime", Class::Work, |sim| {
        let elapsed = sim.elapsed(start, end)?;
        // SAFETY: the caller's promise.
        unsafe { put(milliseconds, elapsed) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: usize, end: usize) -> u32 {
    call("cuEventElapsedTime_v2", Class::Work, |sim| {
        let elapsed = sim.elapsed(start, end)?;
        // SAFETY: the caller's promise.
        unsafe { put(milliseconds, elapsed) }
    })
}
