//! The driver and its devices.

use std::ffi::c_char;

use super::{put, put_text};
use crate::code::{Answer, Code};
use crate::config::Mode;
use crate::sim::{Class, Sim, call, lock, to_u64};

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: u32) -> u32 {
    call("cuInit", Class::Query, |sim| {
        match sim.config.init_code {
            0 if flags != 0 => return Err(Code::INVALID_VALUE),
            0 if sim.devices.is_empty() => return Err(Code::NO_DEVICE),
            0 => {}
            code => return Err(Code(code)),
        }
        if !sim.is_initialised {
            sim.is_initialised = true;
            sim.process = std::process::id();
            if sim.config.mode == Mode::Thread {
                std::thread::spawn(run_at_random);
            }
        }
        Ok(())
    })
}

/// The thread of the mode `thread`.
fn run_at_random() {
    loop {
        let pause_us = {
            let mut sim = lock();
            sim.run_some();
            sim.random.below(200)
        };
        std::thread::sleep(std::time::Duration::from_micros(to_u64(pause_us)));
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut i32) -> u32 {
    call("cuDriverGetVersion", Class::Query, |sim| {
        // SAFETY: the caller's promise.
        unsafe { put(version, sim.config.driver_version) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> u32 {
    call("cuDeviceGetCount", Class::Query, |sim| {
        let devices = i32::try_from(sim.devices.len()).map_err(|_| Code::INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe { put(count, devices) }
    })
}

impl Sim {
    /// The index of a `CUdevice`.
    pub(crate) fn device(&self, device: i32) -> Answer<usize> {
        let index = usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
        if index < self.devices.len() { Ok(index) } else { Err(Code::INVALID_DEVICE) }
    }

    pub(crate) fn device_name(&self, device: usize) -> String {
        format!("{} {device}", self.config.name)
    }

    pub(crate) fn uuid(device: usize) -> [u8; 16] {
        let mut uuid = *b"simulated-gpu\0\0\0";
        uuid[15] = u8::try_from(device).unwrap_or(u8::MAX);
        uuid
    }

    pub(crate) fn bus_id(device: usize) -> String {
        format!("0000:{:02x}:00.0", device + 1)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut i32, ordinal: i32) -> u32 {
    call("cuDeviceGet", Class::Query, |sim| {
        sim.device(ordinal)?;
        // SAFETY: the caller's promise.
        unsafe { put(device, ordinal) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut u8, len: i32, device: i32) -> u32 {
    call("cuDeviceGetName", Class::Query, |sim| {
        let text = sim.device_name(sim.device(device)?);
        // SAFETY: the caller's promise.
        unsafe { put_text(name, len, &text) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) -> u32 {
    call("cuDeviceGetUuid", Class::Query, |sim| {
        // SAFETY: the caller's promise.
        sim.device(device).and_then(|device| unsafe { put(uuid, Sim::uuid(device)) })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) -> u32 {
    call("cuDeviceGetUuid_v2", Class::Query, |sim| {
        // SAFETY: the caller's promise.
        sim.device(device).and_then(|device| unsafe { put(uuid, Sim::uuid(device)) })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(text: *mut u8, len: i32, device: i32) -> u32 {
    call("cuDeviceGetPCIBusId", Class::Query, |sim| {
        let bus_id = Sim::bus_id(sim.device(device)?);
        // SAFETY: the caller's promise.
        unsafe { put_text(text, len, &bus_id) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) -> u32 {
    call("cuDeviceTotalMem_v2", Class::Query, |sim| {
        let total = sim.devices[sim.device(device)?].total_bytes;
        let total = usize::try_from(total).map_err(|_| Code::INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe { put(bytes, total) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) -> u32 {
    call("cuDeviceGetAttribute", Class::Query, |sim| {
        let device = i32::try_from(sim.device(device)?).map_err(|_| Code::INVALID_DEVICE)?;
        // Numbers of `CUdevice_attribute`.
        let known = match attribute {
            // Threads in a block; warp; multiprocessors.
            1 => 1024,
            10 => 32,
            16 => 1,
            // Unified addressing, mapping host memory, asynchronous engines, concurrent kernels.
            15 | 19 | 31 | 40 | 41 => 1,
            // PCI bus, device, domain.
            33 => device + 1,
            34 | 50 => 0,
            // Compute capability.
            75 => 9,
            76 => 0,
            // Registering host memory.
            99 => 1,
            115 => i32::from(sim.config.has_pools),
            _ => 0,
        };
        // SAFETY: the caller's promise.
        unsafe { put(value, known) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: u32, text: *mut *const c_char) -> u32 {
    let name = Code(code).name();
    // SAFETY: the caller's promise.
    let put = unsafe { put(text, name.map_or(std::ptr::null(), |name| name.as_ptr())) };
    if put.is_err() || name.is_none() { Code::INVALID_VALUE.0 } else { 0 }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { cuGetErrorName(code, text) }
}
