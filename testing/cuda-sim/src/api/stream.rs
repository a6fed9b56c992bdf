//! Streams.

use super::put;
use crate::code::{Answer, Code};
use crate::sim::{Class, Sim, call, waiting_call};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// Creates a stream and writes its handle.
///
/// # Safety
/// The promise of [`put`].
unsafe fn create(sim: &mut Sim, stream: *mut usize, flags: u32, priority: i32) -> Answer {
    let context = sim.current()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let made = sim.new_stream(context, flags & NON_BLOCKING == 0, false);
    if let Some(state) = sim.streams.get_mut(&made) {
        state.priority = priority;
    }
    // SAFETY: the caller's promise.
    unsafe { put(stream, made) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut usize, flags: u32) -> u32 {
    // SAFETY: the caller's promise.
    call("cuStreamCreate", Class::Work, |sim| unsafe { create(sim, stream, flags, 0) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: i32) -> u32 {
    // SAFETY: the caller's promise.
    call("cuStreamCreateWithPriority", Class::Work, |sim| unsafe { create(sim, stream, flags, priority) })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: usize) -> u32 {
    call("cuStreamDestroy_v2", Class::Release, |sim| sim.destroy_stream(stream))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetCtx(stream: usize, context: *mut usize) -> u32 {
    call("cuStreamGetCtx", Class::Work, |sim| {
        let stream = sim.stream(stream)?;
        // SAFETY: the caller's promise.
        unsafe { put(context, sim.streams[&stream].context) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetPriority(stream: usize, priority: *mut i32) -> u32 {
    call("cuStreamGetPriority", Class::Work, |sim| {
        let stream = sim.stream(stream)?;
        // SAFETY: the caller's promise.
        unsafe { put(priority, sim.streams[&stream].priority) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: usize) -> u32 {
    waiting_call("cuStreamSynchronize", |sim| {
        sim.current()?;
        sim.synchronize_stream(stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: usize) -> u32 {
    call("cuStreamQuery", Class::Work, |sim| {
        sim.current()?;
        sim.query_stream(stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, flags: u32) -> u32 {
    call("cuStreamWaitEvent", Class::Work, |sim| {
        sim.current()?;
        // The flag 1 is for external events of graphs.
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        sim.let_stream_wait(stream, event)
    })
}
