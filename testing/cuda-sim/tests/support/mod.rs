//! A separate simulated driver for each test: a copy of the library under another name has separate
//! state.
#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test file uses its own part")]
#![allow(unsafe_code, reason = "opens the library and calls it with the signatures that it exports")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(non_snake_case, reason = "the names are the driver's")]

use std::ffi::{CString, c_void};

use libloading::Library;

pub use onelayer_testing::cuda_sim::{self, SimReport, SimRun};

/// An initialised driver with one device, whose primary context is current on the creating thread.
#[derive(Debug)]
pub struct Driver {
    library: Library,
    pub context: usize,
}

macro_rules! functions {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {
        impl Driver {
            $(pub fn $name(&self, $($argument: $kind),*) -> u32 {
                type Function = unsafe extern "C" fn($($kind),*) -> u32;
                // SAFETY: the library exports this name with this signature.
                let found = unsafe { self.library.get::<Function>(stringify!($name).as_bytes()) };
                let function = found.unwrap();
                // SAFETY: tests pass addresses of live variables, or ones that the driver must
                // refuse.
                unsafe { function($($argument),*) }
            })*
        }
    };
}

functions! {
    cuInit(flags: u32);
    cuDeviceGetCount(count: *mut i32);
    cuDeviceGetName(name: *mut u8, len: i32, device: i32);
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32);
    cuDeviceGetPCIBusId(text: *mut u8, len: i32, device: i32);
    cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32);
    cuDevicePrimaryCtxRetain(context: *mut usize, device: i32);
    cuDevicePrimaryCtxRelease_v2(device: i32);
    cuCtxCreate_v2(context: *mut usize, flags: u32, device: i32);
    cuCtxDestroy_v2(context: usize);
    cuCtxPushCurrent_v2(context: usize);
    cuCtxPopCurrent_v2(context: *mut usize);
    cuCtxSetCurrent(context: usize);
    cuCtxGetCurrent(context: *mut usize);
    cuCtxGetDevice(device: *mut i32);
    cuCtxSynchronize();
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAlloc_v2(address: *mut u64, len: usize);
    cuMemFree_v2(address: u64);
    cuMemHostRegister_v2(start: usize, len: usize, flags: u32);
    cuMemHostUnregister(start: usize);
    cuMemHostAlloc(start: *mut usize, len: usize, flags: u32);
    cuMemFreeHost(start: usize);
    cuMemPoolCreate(pool: *mut usize, properties: *const [u32; 22]);
    cuMemPoolDestroy(pool: usize);
    cuMemPoolTrimTo(pool: usize, keep: usize);
    cuMemPoolGetAttribute(pool: usize, attribute: u32, value: *mut c_void);
    cuMemPoolSetAttribute(pool: usize, attribute: u32, value: *const c_void);
    cuMemAllocFromPoolAsync(address: *mut u64, len: usize, pool: usize, stream: usize);
    cuMemAllocAsync(address: *mut u64, len: usize, stream: usize);
    cuMemFreeAsync(address: u64, stream: usize);
    cuMemcpyHtoDAsync_v2(target: u64, source: usize, len: usize, stream: usize);
    cuMemcpyDtoHAsync_v2(target: usize, source: u64, len: usize, stream: usize);
    cuMemcpyDtoDAsync_v2(target: u64, source: u64, len: usize, stream: usize);
    cuMemsetD8Async(target: u64, value: u8, len: usize, stream: usize);
    cuStreamCreate(stream: *mut usize, flags: u32);
    cuStreamDestroy_v2(stream: usize);
    cuStreamGetCtx(stream: usize, context: *mut usize);
    cuStreamSynchronize(stream: usize);
    cuStreamQuery(stream: usize);
    cuStreamWaitEvent(stream: usize, event: usize, flags: u32);
    cuEventCreate(event: *mut usize, flags: u32);
    cuEventDestroy_v2(event: usize);
    cuEventRecord(event: usize, stream: usize);
    cuEventQuery(event: usize);
    cuEventSynchronize(event: usize);
    nvmlInit_v2();
    nvmlShutdown();
    nvmlDeviceGetCount_v2(count: *mut u32);
    nvmlDeviceGetHandleByIndex_v2(index: u32, handle: *mut usize);
    nvmlDeviceGetHandleByUUID(uuid: *const i8, handle: *mut usize);
    nvmlDeviceGetHandleByPciBusId_v2(bus_id: *const i8, handle: *mut usize);
    nvmlDeviceGetName(handle: usize, text: *mut u8, len: u32);
    nvmlDeviceGetUUID(handle: usize, text: *mut u8, len: u32);
    nvmlDeviceGetMemoryInfo(handle: usize, memory: *mut [u64; 3]);
    nvmlDeviceGetComputeRunningProcesses_v3(handle: usize, count: *mut u32, infos: *mut [u64; 3]);
}

impl Driver {
    /// An uninitialised driver with settings, lines of `NAME=value`.
    pub fn raw(settings: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("driver.so");
        std::fs::copy(cuda_sim::built_library(), &path).unwrap();
        // SAFETY: the library's initialisers do nothing.
        let library = unsafe { Library::new(&path) }.unwrap();
        let driver = Self { library, context: 0 };
        let settings = CString::new(settings).unwrap();
        type Configure = unsafe extern "C" fn(*const std::ffi::c_char) -> u32;
        // SAFETY: the library exports this name with this signature.
        let found = unsafe { driver.library.get::<Configure>(b"cuda_sim_configure") };
        let configure = found.unwrap();
        // SAFETY: a C string.
        assert_eq!(unsafe { configure(settings.as_ptr()) }, 0);
        driver
    }

    /// An initialised driver with settings. Waits are not delayed, so tests are fast.
    pub fn new(settings: &str) -> Self {
        let mut driver = Self::raw(&format!("DELAY_US=0\n{settings}"));
        assert_eq!(driver.cuInit(0), 0);
        driver.context = made(|context| driver.cuDevicePrimaryCtxRetain(context, 0));
        assert_eq!(driver.cuCtxPushCurrent_v2(driver.context), 0);
        driver
    }

    /// The report so far.
    pub fn report(&self) -> SimReport {
        type Report = unsafe extern "C" fn(*mut u8, u64) -> u64;
        // SAFETY: the library exports this name with this signature.
        let found = unsafe { self.library.get::<Report>(b"cuda_sim_report") };
        let report = found.unwrap();
        let mut text = vec![0; 1 << 16];
        // SAFETY: the buffer has that length.
        let len = unsafe { report(text.as_mut_ptr(), 1 << 16) };
        text.truncate(usize::try_from(len).unwrap());
        SimReport::parse(std::str::from_utf8(&text).unwrap())
    }

    /// The kinds of misuse so far.
    pub fn kinds(&self) -> Vec<String> {
        self.report().violations().into_iter().map(|violation| violation.kind).collect()
    }

    /// A non-blocking stream.
    pub fn stream(&self) -> usize {
        made(|stream| self.cuStreamCreate(stream, 1))
    }

    pub fn event(&self) -> usize {
        made(|event| self.cuEventCreate(event, 3))
    }

    pub fn pool(&self) -> usize {
        let mut properties = [0; 22];
        properties[0] = 1;
        properties[2] = 1;
        made(|pool| self.cuMemPoolCreate(pool, &raw const properties))
    }

    pub fn plain(&self, len: usize) -> u64 {
        made(|address| self.cuMemAlloc_v2(address, len))
    }

    pub fn pooled(&self, len: usize, pool: usize, stream: usize) -> u64 {
        made(|address| self.cuMemAllocFromPoolAsync(address, len, pool, stream))
    }

    pub fn pool_number(&self, pool: usize, attribute: u32) -> u64 {
        made(|value: *mut u64| self.cuMemPoolGetAttribute(pool, attribute, value.cast()))
    }

    pub fn free_bytes(&self) -> usize {
        let mut total = 0;
        made(|free| self.cuMemGetInfo_v2(free, &raw mut total))
    }

    /// The bytes on the device after all queued work.
    pub fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        assert_eq!(self.cuCtxSynchronize(), 0);
        let stream = self.stream();
        let mut bytes = vec![0; len];
        assert_eq!(self.cuMemcpyDtoHAsync_v2(at(&mut bytes), address, len, stream), 0);
        assert_eq!(self.cuStreamSynchronize(stream), 0);
        assert_eq!(self.cuStreamDestroy_v2(stream), 0);
        bytes
    }

    pub fn pin(&self, bytes: &mut [u8]) -> usize {
        let start = at(bytes);
        assert_eq!(self.cuMemHostRegister_v2(start, bytes.len(), 1), 0);
        start
    }
}

/// The value written by a successful call.
#[track_caller]
pub fn made<T: Default>(call: impl FnOnce(*mut T) -> u32) -> T {
    let mut value = T::default();
    assert_eq!(call(&raw mut value), 0);
    value
}

/// An address for a driver, whose accesses the compiler does not see.
pub fn at(bytes: &mut [u8]) -> usize {
    bytes.as_mut_ptr().expose_provenance()
}

/// Writes memory with a volatile store, so that the compiler keeps it.
pub fn overwrite(start: usize, value: u8, len: usize) {
    for index in 0..len {
        let byte = std::ptr::with_exposed_provenance_mut::<u8>(start + index);
        // SAFETY: the tests pass live memory of their own.
        unsafe { byte.write_volatile(value) };
    }
}
