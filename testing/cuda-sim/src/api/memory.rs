//! Device memory and pinned host memory.
//!
//! Memory of `cuMemHostAlloc` is mapped by this library and filled with `0x5A`.

use super::put;
use crate::code::Code;
use crate::sim::{Class, call, to_u64};

/// The fill byte of new pinned memory.
const POISON: i32 = 0x5A;

fn size(bytes: u64) -> Result<usize, Code> {
    usize::try_from(bytes).map_err(|_| Code::INVALID_VALUE)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    call("cuMemGetInfo_v2", Class::Work, |sim| {
        let context = sim.current()?;
        let device = &sim.devices[sim.device_of(context)];
        // SAFETY: the caller's promise.
        unsafe { put(free, size(device.free_bytes())?) }?;
        // SAFETY: the caller's promise.
        unsafe { put(total, size(device.total_bytes)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, len: usize) -> u32 {
    call("cuMemAlloc_v2", Class::Work, |sim| {
        let allocated = sim.allocate_plain(to_u64(len))?;
        // SAFETY: the caller's promise.
        unsafe { put(address, allocated) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    call("cuMemFree_v2", Class::Release, |sim| {
        sim.current_for_release()?;
        if address == 0 { Ok(()) } else { sim.free_now(address) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(start: usize, len: usize, _flags: u32) -> u32 {
    call("cuMemHostRegister_v2", Class::Work, |sim| sim.pin(start, len, false))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(start: usize) -> u32 {
    call("cuMemHostUnregister", Class::Release, |sim| {
        sim.current_for_release()?;
        sim.unpin(start, false)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(start: *mut usize, len: usize, _flags: u32) -> u32 {
    call("cuMemHostAlloc", Class::Work, |sim| {
        sim.current()?;
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping, which touches no other memory.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(Code::OUT_OF_MEMORY);
        }
        let address = mapped.expose_provenance();
        if let Err(code) = sim.pin(address, len, true) {
            // SAFETY: mapped above and not yet handed out.
            unsafe { libc::munmap(mapped, len) };
            return Err(code);
        }
        // SAFETY: mapped above with that length.
        unsafe { libc::memset(mapped, POISON, len) };
        // SAFETY: the caller's promise.
        unsafe { put(start, address) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(start: usize) -> u32 {
    call("cuMemFreeHost", Class::Release, |sim| {
        sim.current_for_release()?;
        let len = sim.pinned.get(&start).map(|pinned| pinned.len_bytes);
        sim.unpin(start, true)?;
        let len = len.ok_or(Code::INVALID_VALUE)?;
        // SAFETY: mapped by `cuMemHostAlloc` with that length, and no longer used by the caller.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(start), len) };
        Ok(())
    })
}
