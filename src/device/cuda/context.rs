//! The context of a device: the device's primary context, which PyTorch, candle and the runtime API
//! use too, so that pointers are valid in all of them; or the caller's context.
//!
//! A context is entered for each group of calls and left afterwards, so the caller's thread keeps
//! its own context.
#![allow(unsafe_code, reason = "calls the driver; each block says why its arguments are valid")]

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Driver, call, driver, handle_of_caller, is_over, retry_once};
use crate::device::{DeviceError, DeviceMemoryInfo};
use crate::units::to_u64;

/// A context of a device, retained while this lives.
#[derive(Debug)]
pub(crate) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    owner: Owner,
    driver: Driver,
}

/// The owner of the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The device: its primary context, of which this holds a reference.
    Device,
    /// The caller, who keeps it alive.
    Caller,
}

// SAFETY: a context may be made current on any thread, and on several at once (driver API, "Context
// Management").
unsafe impl Send for Context {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of a device.
    ///
    /// # Errors
    /// [`DeviceError`] if there is no usable driver or no such device, or if the context cannot be
    /// made.
    pub(crate) fn primary(ordinal: u32) -> Result<Arc<Self>, DeviceError> {
        let driver = driver()?;
        let absent = DeviceError::NoSuchDevice { ordinal, devices: driver.devices };
        let Some(index) = c_int::try_from(ordinal).ok().filter(|_| ordinal < driver.devices) else {
            return Err(absent);
        };
        let mut device: sys::CUdevice = 0;
        // SAFETY: the driver is initialised; the call writes one handle.
        call("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, index) })?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `device` came from the driver; the call writes one handle.
        call("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device) })?;
        Ok(Arc::new(Self { raw, device, owner: Owner::Device, driver }))
    }

    /// The caller's context.
    ///
    /// # Errors
    /// [`DeviceError`] if there is no usable driver, or if it does not know the context.
    ///
    /// # Safety
    /// `raw` is a `CUcontext` of this process that lives for as long as the value returned and
    /// everything made with it.
    pub(crate) unsafe fn of_caller(raw: u64) -> Result<Arc<Self>, DeviceError> {
        let driver = driver()?;
        let mut context = Self { raw: handle_of_caller(raw), device: 0, owner: Owner::Caller, driver };
        let entered = context.enter()?;
        let mut device: sys::CUdevice = 0;
        // SAFETY: a context is current; the call writes one handle.
        call("cuCtxGetDevice", unsafe { sys::cuCtxGetDevice(&raw mut device) })?;
        drop(entered);
        context.device = device;
        Ok(Arc::new(context))
    }

    /// Makes the context current on this thread until the returned value is dropped, which restores
    /// the one before.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, DeviceError> {
        // SAFETY: the context is alive: retained, or promised by the caller.
        call("cuCtxPushCurrent_v2", unsafe { sys::cuCtxPushCurrent_v2(self.raw) })?;
        Ok(Entered { _context: self, _not_send: PhantomData })
    }

    /// Frees something in this context, for destructors; see [`retry_once`]. False if it was
    /// refused twice.
    pub(super) fn give_back(&self, give_back: impl FnMut() -> sys::CUresult) -> bool {
        // Tried even without the context: the thing to be freed knows its context.
        let _entered = self.enter().or_else(|_| self.enter());
        retry_once(give_back)
    }

    /// Waits for everything queued in the context, by any user.
    pub(crate) fn synchronize(&self) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        // SAFETY: takes nothing; a context is current.
        call("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Waits until nothing queued in the context is in flight, as
    /// [`Stream::drain`](super::Stream::drain). False if the driver refuses to wait.
    pub(crate) fn drain(&self) -> bool {
        is_over(&self.synchronize()) || is_over(&self.synchronize())
    }

    /// Memory of the device, used by any process, as its driver reports.
    pub(crate) fn memory(&self) -> Result<DeviceMemoryInfo, DeviceError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: the call writes two sizes; a context is current.
        call("cuMemGetInfo_v2", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(DeviceMemoryInfo { free_bytes: to_u64(free), total_bytes: to_u64(total) })
    }

    /// The driver.
    pub(crate) fn driver(&self) -> Driver {
        self.driver
    }

    /// The device's name.
    pub(crate) fn name(&self) -> Result<String, DeviceError> {
        let mut buffer = [c_char::default(); 256];
        let len = c_int::try_from(buffer.len()).expect("a small number");
        // SAFETY: the call writes at most `len` bytes, with the terminating zero.
        let answer = unsafe { sys::cuDeviceGetName(buffer.as_mut_ptr(), len, self.device) };
        call("cuDeviceGetName", answer)?;
        Ok(text(&buffer))
    }

    /// The device's address on the PCI bus, `domain:bus:device.function`.
    pub(crate) fn pci_bus_id(&self) -> Result<String, DeviceError> {
        let mut buffer = [c_char::default(); 64];
        let len = c_int::try_from(buffer.len()).expect("a small number");
        // SAFETY: the call writes at most `len` bytes, with the terminating zero.
        let answer = unsafe { sys::cuDeviceGetPCIBusId(buffer.as_mut_ptr(), len, self.device) };
        call("cuDeviceGetPCIBusId", answer)?;
        Ok(text(&buffer))
    }

    /// The device's UUID as other tools print it: `GPU-` and five groups of hexadecimal digits.
    pub(crate) fn uuid(&self) -> Result<String, DeviceError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the call writes 16 bytes.
        call("cuDeviceGetUuid_v2", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, self.device) })?;
        // C's `char` is signed on some machines and unsigned on others.
        let hex: Vec<String> =
            uuid.bytes.iter().map(|byte| format!("{:02x}", byte.to_ne_bytes()[0])).collect();
        let group = |range: std::ops::Range<usize>| hex[range].concat();
        Ok(format!("GPU-{}-{}-{}-{}-{}", group(0..4), group(4..6), group(6..8), group(8..10), group(10..16)))
    }

    /// True if the device has stream-ordered memory pools.
    pub(crate) fn has_pools(&self) -> Result<bool, DeviceError> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        let mut value: c_int = 0;
        // SAFETY: the call writes one int.
        let answer = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.device) };
        call("cuDeviceGetAttribute", answer)?;
        Ok(value != 0)
    }

    /// The device's number, which the driver calls its handle.
    pub(super) fn device(&self) -> sys::CUdevice {
        self.device
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.owner == Owner::Device {
            // SAFETY: gives back the reference that `primary` took; everything made in the context holds an
            // `Arc` of it.
            retry_once(|| unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) });
        }
    }
}

/// A context that is current on this thread.
#[derive(Debug)]
pub(crate) struct Entered<'a> {
    _context: &'a Context,
    /// The current context belongs to a thread.
    _not_send: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: the call writes one handle; what `enter` pushed is on top, since values like this one
        // nest.
        retry_once(|| unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) });
    }
}

/// A text written by the driver.
fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|&byte| u8::from_ne_bytes(byte.to_ne_bytes())).collect();
    let text = CStr::from_bytes_until_nul(&bytes).map_or(&bytes[..], CStr::to_bytes);
    String::from_utf8_lossy(text).into_owned()
}
