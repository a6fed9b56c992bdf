//! A part of NVML, with the numbers of the simulated driver. It sees only this process.
#![allow(unsafe_code, reason = "exports C functions and writes to their callers' addresses")]
#![allow(non_snake_case, reason = "the names are NVML's")]

use std::ffi::{CStr, c_char};

use crate::api::{put, put_text};
use crate::sim::{Sim, lock};

/// `nvmlReturn_t`.
const UNINITIALIZED: u32 = 1;
const INVALID_ARGUMENT: u32 = 2;
const NOT_FOUND: u32 = 6;
const INSUFFICIENT_SIZE: u32 = 7;
const DRIVER_NOT_LOADED: u32 = 9;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t` of the functions `_v3`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process {
    pid: u32,
    used_bytes: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// `nvmlPciInfo_t` of the function `_v3`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pci {
    bus_id_short: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    device_id: u32,
    subsystem_id: u32,
    bus_id: [u8; 32],
}

fn with(body: impl FnOnce(&mut Sim) -> Result<(), u32>) -> u32 {
    let mut sim = lock();
    if sim.nvml_references == 0 {
        return UNINITIALIZED;
    }
    body(&mut sim).err().unwrap_or(0)
}

/// Handles are indices plus one.
fn with_device(handle: usize, body: impl FnOnce(&mut Sim, usize) -> Result<(), u32>) -> u32 {
    with(|sim| match handle.checked_sub(1) {
        Some(index) if index < sim.devices.len() => body(sim, index),
        _ => Err(INVALID_ARGUMENT),
    })
}

/// Writes a result.
///
/// # Safety
/// As [`put`].
unsafe fn give<T>(target: *mut T, value: T) -> Result<(), u32> {
    // SAFETY: the caller's promise.
    unsafe { put(target, value) }.map_err(|_| INVALID_ARGUMENT)
}

/// Writes a whole string, or nothing.
///
/// # Safety
/// As [`put_text`].
unsafe fn give_text(target: *mut u8, len: u32, text: &str) -> Result<(), u32> {
    let len = i32::try_from(len).map_err(|_| INVALID_ARGUMENT)?;
    if usize::try_from(len).is_ok_and(|len| len <= text.len()) {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the caller's promise.
    unsafe { put_text(target, len, text) }.map_err(|_| INVALID_ARGUMENT)
}

fn uuid_text(device: usize) -> String {
    let hex: Vec<String> = Sim::uuid(device).iter().map(|byte| format!("{byte:02x}")).collect();
    let group = |range: std::ops::Range<usize>| hex[range].concat();
    format!("GPU-{}-{}-{}-{}-{}", group(0..4), group(4..6), group(6..8), group(8..10), group(10..16))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> u32 {
    let mut sim = lock();
    if !sim.config.has_nvml {
        return DRIVER_NOT_LOADED;
    }
    sim.nvml_references += 1;
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: u32) -> u32 {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> u32 {
    with(|sim| {
        sim.nvml_references -= 1;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: u32) -> *const c_char {
    let text = match code {
        0 => c"success",
        UNINITIALIZED => c"uninitialized",
        INVALID_ARGUMENT => c"invalid argument",
        NOT_FOUND => c"not found",
        INSUFFICIENT_SIZE => c"insufficient size",
        DRIVER_NOT_LOADED => c"driver not loaded",
        _ => c"unknown error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(text: *mut u8, len: u32) -> u32 {
    // SAFETY: the caller's promise.
    with(|sim| unsafe { give_text(text, len, &format!("{}.00 simulated", sim.config.driver_version / 10)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut i32) -> u32 {
    // SAFETY: the caller's promise.
    with(|sim| unsafe { give(version, sim.config.driver_version) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut i32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { nvmlSystemGetCudaDriverVersion(version) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut u32) -> u32 {
    with(|sim| {
        let devices = u32::try_from(sim.devices.len()).unwrap_or(u32::MAX);
        // SAFETY: the caller's promise.
        unsafe { give(count, devices) }
    })
}

/// Finds a device by a string and writes its handle.
///
/// # Safety
/// `wanted` is a C string; `handle` as [`put`].
unsafe fn find(wanted: *const c_char, handle: *mut usize, text_of: fn(usize) -> String) -> u32 {
    with(|sim| {
        if wanted.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller's promise; not null.
        let wanted = unsafe { CStr::from_ptr(wanted) }.to_string_lossy().to_lowercase();
        let same = |&device: &usize| wanted.ends_with(&text_of(device).to_lowercase());
        let found = (0..sim.devices.len()).find(same).ok_or(NOT_FOUND)?;
        // SAFETY: the caller's promise.
        unsafe { give(handle, found + 1) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: u32, handle: *mut usize) -> u32 {
    with(|sim| {
        let index = usize::try_from(index).map_err(|_| INVALID_ARGUMENT)?;
        if index >= sim.devices.len() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller's promise.
        unsafe { give(handle, index + 1) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, handle: *mut usize) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { find(uuid, handle, uuid_text) }
}

/// Accepts `0000:01:00.0` and the longer `00000000:01:00.0`.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: *const c_char, handle: *mut usize) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { find(bus_id, handle, Sim::bus_id) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetIndex(handle: usize, index: *mut u32) -> u32 {
    with_device(handle, |_, device| {
        // SAFETY: the caller's promise.
        unsafe { give(index, u32::try_from(device).unwrap_or(u32::MAX)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(handle: usize, text: *mut u8, len: u32) -> u32 {
    // SAFETY: the caller's promise.
    with_device(handle, |sim, device| unsafe { give_text(text, len, &sim.device_name(device)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(handle: usize, text: *mut u8, len: u32) -> u32 {
    // SAFETY: the caller's promise.
    with_device(handle, |_, device| unsafe { give_text(text, len, &uuid_text(device)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(handle: usize, pci: *mut Pci) -> u32 {
    with_device(handle, |_, device| {
        let mut info = Pci {
            bus_id_short: [0; 16],
            domain: 0,
            bus: u32::try_from(device + 1).unwrap_or(0),
            device: 0,
            device_id: 0,
            subsystem_id: 0,
            bus_id: [0; 32],
        };
        let short = Sim::bus_id(device);
        info.bus_id_short[..short.len()].copy_from_slice(short.as_bytes());
        let long = format!("0000{short}");
        info.bus_id[..long.len()].copy_from_slice(long.as_bytes());
        // SAFETY: the caller's promise.
        unsafe { give(pci, info) }
    })
}

fn used_bytes(sim: &Sim, device: usize) -> u64 {
    sim.devices[device].total_bytes - sim.devices[device].free_bytes()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo(handle: usize, memory: *mut Memory) -> u32 {
    with_device(handle, |sim, device| {
        let state = &sim.devices[device];
        let (total, free, used) = (state.total_bytes, state.free_bytes(), used_bytes(sim, device));
        // SAFETY: the caller's promise.
        unsafe { give(memory, Memory { total, free, used }) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(handle: usize, memory: *mut Memory2) -> u32 {
    with_device(handle, |sim, device| {
        if memory.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and the caller has set the version, which comes first (NVML: struct
        // versions).
        let version = unsafe { memory.cast::<u32>().read() };
        let state = &sim.devices[device];
        let (total, free, used) = (state.total_bytes, state.free_bytes(), used_bytes(sim, device));
        // SAFETY: the caller's promise.
        unsafe { give(memory, Memory2 { version, total, reserved: 0, free, used }) }
    })
}

/// Writes this process if it has a context there. Returns "insufficient size" and the count if the
/// buffer is too small.
///
/// # Safety
/// `count` is readable and writable; `processes` is writable for `count` entries.
unsafe fn processes(handle: usize, count: *mut u32, processes: *mut Process) -> u32 {
    with_device(handle, |sim, device| {
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let has_context = sim.contexts.values().any(|context| context.device == device);
        // SAFETY: not null; the caller's promise.
        let room = unsafe { count.read() };
        // SAFETY: the caller's promise.
        unsafe { give(count, u32::from(has_context)) }?;
        if !has_context {
            return Ok(());
        }
        if room == 0 || processes.is_null() {
            return Err(INSUFFICIENT_SIZE);
        }
        let used_bytes = sim.devices[device].taken_bytes;
        let own = Process {
            pid: std::process::id(),
            used_bytes,
            gpu_instance: u32::MAX,
            compute_instance: u32::MAX,
        };
        // SAFETY: there is room for one.
        unsafe { give(processes, own) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    handle: usize,
    count: *mut u32,
    infos: *mut Process,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { processes(handle, count, infos) }
}

/// No process uses graphics.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    handle: usize,
    count: *mut u32,
    _infos: *mut Process,
) -> u32 {
    // SAFETY: the caller's promise.
    with_device(handle, |_, _| unsafe { give(count, 0) })
}
