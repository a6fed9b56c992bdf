//! The CUDA driver as an engine uses it beside the loader: a handful of calls, loaded at run time,
//! sharing nothing with the library under test.
#![allow(
    dead_code,
    unreachable_pub,
    unsafe_code,
    reason = "a foreign library; each test file uses its own part"
)]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "C signatures as in cuda.h; handles come from the driver itself"
)]

use std::ffi::c_void;

use libloading::Library;

/// The driver, with the primary context of a device current on this thread.
pub struct Engine {
    library: Library,
    pub context: u64,
    device: i32,
}

type Code = u32;

macro_rules! call {
    ($engine:expr, $name:literal, ($($kind:ty),*), $($argument:expr),*) => {{
        let function = unsafe {
            $engine.library.get::<unsafe extern "C" fn($($kind),*) -> Code>(concat!($name, "\0").as_bytes())
        };
        let code = unsafe { (function.unwrap())($($argument),*) };
        assert_eq!(code, 0, "{} answers {code}", $name);
    }};
}

impl Engine {
    /// Retains the primary context of a device and makes it current.
    pub fn new(ordinal: i32) -> Self {
        let library = unsafe { Library::new("libcuda.so.1") }.expect("the simulated driver");
        let mut engine = Self { library, context: 0, device: 0 };
        call!(engine, "cuInit", (u32), 0);
        let mut device = 0;
        call!(engine, "cuDeviceGet", (*mut i32, i32), &mut device, ordinal);
        engine.device = device;
        let mut context = 0;
        call!(engine, "cuDevicePrimaryCtxRetain", (*mut u64, i32), &mut context, device);
        engine.context = context;
        engine.enter();
        engine
    }

    /// Makes the context current on this thread.
    pub fn enter(&self) {
        call!(self, "cuCtxSetCurrent", (u64), self.context);
    }

    pub fn stream(&self) -> u64 {
        let mut stream = 0;
        call!(self, "cuStreamCreate", (*mut u64, u32), &mut stream, 1);
        stream
    }

    pub fn destroy_stream(&self, stream: u64) {
        call!(self, "cuStreamDestroy_v2", (u64), stream);
    }

    pub fn synchronize(&self, stream: u64) {
        call!(self, "cuStreamSynchronize", (u64), stream);
    }

    pub fn wait_event(&self, stream: u64, event: u64) {
        call!(self, "cuStreamWaitEvent", (u64, u64, u32), stream, event, 0);
    }

    pub fn record(&self, stream: u64) -> u64 {
        let mut event = 0;
        call!(self, "cuEventCreate", (*mut u64, u32), &mut event, 2);
        call!(self, "cuEventRecord", (u64, u64), event, stream);
        event
    }

    pub fn destroy_event(&self, event: u64) {
        call!(self, "cuEventDestroy_v2", (u64), event);
    }

    pub fn allocate(&self, len: usize) -> u64 {
        let mut address = 0;
        call!(self, "cuMemAlloc_v2", (*mut u64, usize), &mut address, len);
        address
    }

    pub fn free(&self, address: u64) {
        call!(self, "cuMemFree_v2", (u64), address);
    }

    /// A kernel that reads one place and writes another, queued in a stream.
    pub fn kernel(&self, source: u64, target: u64, len: usize, stream: u64) {
        call!(self, "cuMemcpyDtoDAsync_v2", (u64, u64, usize, u64), target, source, len, stream);
    }

    /// Bytes of the device, once everything in the stream is over.
    pub fn read(&self, address: u64, len: usize, stream: u64) -> Vec<u8> {
        let mut bytes = vec![0_u8; len];
        let target: *mut c_void = bytes.as_mut_ptr().cast();
        call!(self, "cuMemcpyDtoHAsync_v2", (*mut c_void, u64, usize, u64), target, address, len, stream);
        self.synchronize(stream);
        bytes
    }

    pub fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        call!(self, "cuMemGetInfo_v2", (*mut usize, *mut usize), &mut free, &mut total);
        free
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        call!(self, "cuCtxSetCurrent", (u64), 0);
        call!(self, "cuDevicePrimaryCtxRelease_v2", (i32), self.device);
    }
}
