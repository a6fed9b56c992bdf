#![allow(unsafe_code, reason = "calls the CUDA driver; each block says why it may")]
//! The few functions of the CUDA driver API that `device_limits` needs, looked up at run time.
//!
//! It shares no code with the library's device module, so that the two can be compared. Signatures
//! and constants are those of the CUDA Driver API reference manual. All calls come from one thread.

use std::error::Error as _;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::time::{Duration, Instant};

use libloading::Library;

use crate::plain::HugeBuffer;

const LIBRARY_NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// `CU_MEMHOSTREGISTER_PORTABLE`
const PORTABLE: c_uint = 1;
/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: c_uint = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`
const ALLOCATION_PINNED: c_uint = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
const LOCATION_DEVICE: c_uint = 1;
/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`
const RELEASE_THRESHOLD: c_uint = 4;
/// Attributes of a device that explain its figures, by their number in `CUdevice_attribute`.
const ATTRIBUTES: [(&str, c_uint); 4] = [
    ("async_engine_count", 40),
    ("pageable_memory_access", 88),
    ("read_only_host_register_supported", 113),
    ("memory_pools_supported", 115),
];

/// The reason why the driver is unusable, or its error code.
#[derive(Debug)]
pub(crate) enum DriverError {
    Missing(String),
    NoSymbol(&'static str),
    NoDevice { ordinal: u32, devices: c_int },
    Code { function: &'static str, code: u32 },
    Memory(std::io::Error),
}

impl fmt::Display for DriverError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(reason) => {
                write!(out, "no CUDA driver (looked for {}): {reason}", LIBRARY_NAMES.join(", "))
            }
            Self::NoSymbol(name) => write!(out, "the CUDA driver has no function {name}"),
            Self::NoDevice { ordinal, devices } => {
                write!(out, "no device {ordinal}: the driver has {devices}")
            }
            Self::Code { function, code } => write!(out, "{function}: CUDA error {code}"),
            Self::Memory(error) => write!(out, "host memory: {error}"),
        }
    }
}

impl From<std::io::Error> for DriverError {
    fn from(error: std::io::Error) -> Self {
        Self::Memory(error)
    }
}

/// The result of a call.
pub(crate) type Answer<T> = Result<T, DriverError>;
type Handle = *mut c_void;

/// `CUmemPoolProps` (88 bytes).
#[repr(C)]
struct PoolProperties {
    allocation_type: c_uint,
    handle_types: c_uint,
    location_type: c_uint,
    location_id: c_int,
    security_attributes: *mut c_void,
    max_size: usize,
    usage: u16,
    reserved: [u8; 54],
}

/// Declares the table of functions, its lookup, and a method for each that turns its code into a
/// result.
macro_rules! functions {
    ($($name:ident = $symbol:literal ( $($argument:ident : $kind:ty),* );)*) => {
        struct Functions { $($name: unsafe extern "C" fn($($kind),*) -> u32,)* }

        impl Functions {
            fn find(library: &Library) -> Answer<Self> {
                Ok(Self { $($name: {
                    // SAFETY: the type is the function's C signature by the driver's manual.
                    let found = unsafe { library.get::<unsafe extern "C" fn($($kind),*) -> u32>($symbol.as_bytes()) };
                    *found.map_err(|_| DriverError::NoSymbol($symbol))?
                },)* })
            }

            $(
                /// # Safety
                /// What the driver's manual asks for: pointers that may be written, handles that
                /// are alive.
                unsafe fn $name(&self, $($argument: $kind),*) -> Answer<()> {
                    // SAFETY: the caller's promise.
                    match unsafe { (self.$name)($($argument),*) } {
                        0 => Ok(()),
                        code => Err(DriverError::Code { function: $symbol, code }),
                    }
                }
            )*
        }
    };
}

functions! {
    init = "cuInit"(flags: c_uint);
    driver_version = "cuDriverGetVersion"(version: *mut c_int);
    device_count = "cuDeviceGetCount"(count: *mut c_int);
    device_get = "cuDeviceGet"(device: *mut c_int, ordinal: c_int);
    device_name = "cuDeviceGetName"(name: *mut c_char, len: c_int, device: c_int);
    device_uuid = "cuDeviceGetUuid_v2"(uuid: *mut u8, device: c_int);
    device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_uint, device: c_int);
    context_retain = "cuDevicePrimaryCtxRetain"(context: *mut Handle, device: c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2"(device: c_int);
    context_push = "cuCtxPushCurrent_v2"(context: Handle);
    context_pop = "cuCtxPopCurrent_v2"(context: *mut Handle);
    context_wait = "cuCtxSynchronize"();
    memory_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    allocate = "cuMemAlloc_v2"(address: *mut u64, bytes: usize);
    free = "cuMemFree_v2"(address: u64);
    register = "cuMemHostRegister_v2"(memory: *mut c_void, bytes: usize, flags: c_uint);
    unregister = "cuMemHostUnregister"(memory: *mut c_void);
    to_device = "cuMemcpyHtoDAsync_v2"(target: u64, source: *const c_void, bytes: usize, stream: Handle);
    to_host = "cuMemcpyDtoHAsync_v2"(target: *mut c_void, source: u64, bytes: usize, stream: Handle);
    stream_create = "cuStreamCreate"(stream: *mut Handle, flags: c_uint);
    stream_destroy = "cuStreamDestroy_v2"(stream: Handle);
    stream_wait = "cuStreamSynchronize"(stream: Handle);
    pool_create = "cuMemPoolCreate"(pool: *mut Handle, properties: *const PoolProperties);
    pool_destroy = "cuMemPoolDestroy"(pool: Handle);
    pool_set = "cuMemPoolSetAttribute"(pool: Handle, attribute: c_uint, value: *mut c_void);
    pool_trim = "cuMemPoolTrimTo"(pool: Handle, keep: usize);
    pool_allocate = "cuMemAllocFromPoolAsync"(address: *mut u64, bytes: usize, pool: Handle, stream: Handle);
    pool_free = "cuMemFreeAsync"(address: u64, stream: Handle);
}

/// One device with its primary context current on this thread, until dropped.
pub(crate) struct Gpu {
    driver: Functions,
    device: c_int,
    /// Time to initialise the driver and create the context.
    pub(crate) init_time: Duration,
    pub(crate) context_time: Duration,
}

/// The description of driver and device.
pub(crate) struct Identity {
    pub(crate) name: String,
    pub(crate) uuid: String,
    /// 1000 x major + 10 x minor of the newest supported CUDA version.
    pub(crate) cuda_version: c_int,
    /// Name and value; `None` if the driver does not know the attribute.
    pub(crate) attributes: Vec<(&'static str, Option<c_int>)>,
}

impl Gpu {
    /// Opens the device with this number.
    pub(crate) fn open(ordinal: u32) -> Answer<Self> {
        let library = library()?;
        let driver = Functions::find(&library)?;
        // An initialised driver has threads, so it stays loaded for the life of the process.
        std::mem::forget(library);
        let start = Instant::now();
        // SAFETY: the only flags that exist are zero.
        unsafe { driver.init(0) }?;
        let init_time = start.elapsed();
        let (mut devices, mut device) = (0, 0);
        // SAFETY: writes one int to a variable that is alive.
        unsafe { driver.device_count(&raw mut devices) }?;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        if number >= devices {
            return Err(DriverError::NoDevice { ordinal, devices });
        }
        // SAFETY: writes one int to a variable that is alive.
        unsafe { driver.device_get(&raw mut device, number) }?;
        let start = Instant::now();
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle to a variable that is alive.
        unsafe { driver.context_retain(&raw mut context, device) }?;
        let gpu = Self { driver, device, init_time, context_time: start.elapsed() };
        // SAFETY: the context was retained and is released only when `gpu` is dropped.
        unsafe { gpu.driver.context_push(context) }?;
        Ok(gpu)
    }

    /// Describes the device.
    pub(crate) fn identity(&self) -> Answer<Identity> {
        let mut name = [0u8; 128];
        let mut uuid = [0u8; 16];
        let mut cuda_version = 0;
        // SAFETY: writes at most 128 bytes, the length of the array, with a zero at the end.
        unsafe { self.driver.device_name(name.as_mut_ptr().cast(), 128, self.device) }?;
        // SAFETY: a `CUuuid` is 16 bytes, the length of the array.
        unsafe { self.driver.device_uuid(uuid.as_mut_ptr(), self.device) }?;
        // SAFETY: writes one int to a variable that is alive.
        unsafe { self.driver.driver_version(&raw mut cuda_version) }?;
        let attributes = ATTRIBUTES.map(|(name, number)| {
            let mut value = 0;
            // SAFETY: writes one int to a variable that is alive; an unknown number is an error,
            // not a write.
            let known = unsafe { self.driver.device_attribute(&raw mut value, number, self.device) };
            (name, known.is_ok().then_some(value))
        });
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Ok(Identity {
            name: String::from_utf8_lossy(&name[..end]).into_owned(),
            uuid: uuid_text(&uuid),
            cuda_version,
            attributes: attributes.to_vec(),
        })
    }

    /// Free and total bytes of the device, all processes counted.
    pub(crate) fn memory(&self) -> Answer<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes to variables that are alive.
        unsafe { self.driver.memory_info(&raw mut free, &raw mut total) }?;
        Ok((free, total))
    }

    /// A stream that does not wait for the default one.
    pub(crate) fn stream(&self) -> Answer<Stream<'_>> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle to a variable that is alive.
        unsafe { self.driver.stream_create(&raw mut handle, NON_BLOCKING) }?;
        Ok(Stream { gpu: self, handle })
    }

    /// Device memory from `cuMemAlloc`.
    pub(crate) fn allocate(&self, bytes: usize) -> Answer<Block<'_>> {
        let mut address = 0;
        // SAFETY: writes one address to a variable that is alive.
        unsafe { self.driver.allocate(&raw mut address, bytes) }?;
        Ok(Block { gpu: self, address, bytes })
    }

    /// Page-locks memory and registers it with the device.
    pub(crate) fn register(&self, buffer: HugeBuffer) -> Answer<HostMemory<'_>> {
        let mut memory = HostMemory::pageable(self, buffer);
        // SAFETY: the range is a mapping of this process that lives until `HostMemory` is dropped,
        // which unregisters it first.
        unsafe { self.driver.register(memory.start.cast(), memory.bytes, PORTABLE) }?;
        memory.registered = true;
        Ok(memory)
    }

    /// A memory pool that keeps freed memory.
    pub(crate) fn pool(&self) -> Answer<Pool<'_>> {
        let properties = PoolProperties {
            allocation_type: ALLOCATION_PINNED,
            handle_types: 0,
            location_type: LOCATION_DEVICE,
            location_id: self.device,
            security_attributes: std::ptr::null_mut(),
            max_size: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: reads the properties and writes one handle; both are alive.
        unsafe { self.driver.pool_create(&raw mut handle, &raw const properties) }?;
        let pool = Pool { gpu: self, handle };
        let mut keep = u64::MAX;
        // SAFETY: the pool is alive, and this attribute is read as one u64.
        unsafe { self.driver.pool_set(handle, RELEASE_THRESHOLD, (&raw mut keep).cast()) }?;
        Ok(pool)
    }

    fn wait(&self) {
        // SAFETY: takes nothing. An error here was, or will be, seen by the call that caused it.
        let _ = unsafe { self.driver.context_wait() };
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle; what was pushed by `open` is popped once.
        let _ = unsafe { self.driver.context_pop(&raw mut context) };
        // SAFETY: was retained once by `open`; everything that lives in the context borrows from
        // this value.
        let _ = unsafe { self.driver.context_release(self.device) };
    }
}

fn library() -> Answer<Library> {
    let mut reasons = Vec::new();
    for name in LIBRARY_NAMES {
        // SAFETY: loading runs the library's initialisers: it is the driver that the system's
        // linker finds.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => {
                reasons.push(error.source().map_or_else(|| error.to_string(), ToString::to_string));
            }
        }
    }
    reasons.dedup();
    Err(DriverError::Missing(reasons.join("; ")))
}

fn uuid_text(bytes: &[u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// Device memory, freed when dropped.
pub(crate) struct Block<'gpu> {
    gpu: &'gpu Gpu,
    address: u64,
    bytes: usize,
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        self.gpu.wait();
        // SAFETY: allocated once, freed once, and no copy is under way any more.
        let _ = unsafe { self.gpu.driver.free(self.address) };
    }
}

/// Host memory for copies, registered or pageable. Nothing else accesses it meanwhile: it lends no
/// slice.
pub(crate) struct HostMemory<'gpu> {
    gpu: &'gpu Gpu,
    start: *mut u8,
    bytes: usize,
    registered: bool,
    /// The mapping that `start` points into.
    buffer: Option<HugeBuffer>,
}

impl<'gpu> HostMemory<'gpu> {
    /// Memory that the driver must stage.
    pub(crate) fn pageable(gpu: &'gpu Gpu, mut buffer: HugeBuffer) -> Self {
        let bytes = buffer.bytes();
        let (start, bytes) = (bytes.as_mut_ptr(), bytes.len());
        Self { gpu, start, bytes, registered: false, buffer: Some(buffer) }
    }

    /// Unregisters and frees the memory.
    pub(crate) fn into_buffer(mut self) -> Option<HugeBuffer> {
        self.release();
        self.buffer.take()
    }

    fn release(&mut self) {
        self.gpu.wait();
        if std::mem::take(&mut self.registered) {
            // SAFETY: was registered at this address, and no copy is under way any more.
            let _ = unsafe { self.gpu.driver.unregister(self.start.cast()) };
        }
    }
}

impl Drop for HostMemory<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

/// A queue of copies. They may outlive it; blocks and host memory wait for them when dropped.
pub(crate) struct Stream<'gpu> {
    gpu: &'gpu Gpu,
    handle: Handle,
}

impl Stream<'_> {
    /// Queues a copy to the device of `bytes` at both offsets.
    ///
    /// # Panics
    /// Where a range does not fit.
    pub(crate) fn to_device(
        &self,
        target: (&Block<'_>, usize),
        source: (&HostMemory<'_>, usize),
        bytes: usize,
    ) -> Answer<()> {
        let (address, memory) = ranges(target, source, bytes);
        // SAFETY: both ranges lie inside what their owners hold, and the owners wait for all copies
        // before they give it back.
        unsafe { self.gpu.driver.to_device(address, memory.cast(), bytes, self.handle) }
    }

    /// Queues a copy to the host of `bytes` at both offsets.
    ///
    /// # Panics
    /// Where a range does not fit.
    pub(crate) fn to_host(
        &self,
        target: (&HostMemory<'_>, usize),
        source: (&Block<'_>, usize),
        bytes: usize,
    ) -> Answer<()> {
        let (address, memory) = ranges(source, target, bytes);
        // SAFETY: as above; nothing else accesses the host memory meanwhile, since it lends no
        // slice.
        unsafe { self.gpu.driver.to_host(memory.cast(), address, bytes, self.handle) }
    }

    /// Waits for everything queued.
    pub(crate) fn wait(&self) -> Answer<()> {
        // SAFETY: the stream is alive.
        unsafe { self.gpu.driver.stream_wait(self.handle) }
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { self.gpu.driver.stream_destroy(self.handle) };
    }
}

fn ranges(block: (&Block<'_>, usize), memory: (&HostMemory<'_>, usize), bytes: usize) -> (u64, *mut u8) {
    let (block, block_offset) = block;
    let (memory, memory_offset) = memory;
    assert!(block_offset + bytes <= block.bytes, "the copy fits the device memory");
    assert!(memory_offset + bytes <= memory.bytes, "the copy fits the host memory");
    let offset = u64::try_from(block_offset).expect("64-bit addresses");
    // SAFETY: the offset lies inside the mapping, as was just asserted.
    (block.address + offset, unsafe { memory.start.add(memory_offset) })
}

/// Device memory of a pool. Only allocation and free are timed; nothing can be copied to it.
pub(crate) struct PoolBlock {
    address: u64,
}

/// A stream-ordered pool, destroyed when dropped.
pub(crate) struct Pool<'gpu> {
    gpu: &'gpu Gpu,
    handle: Handle,
}

impl Pool<'_> {
    /// Allocates bytes in stream order; free them with [`Self::free`].
    pub(crate) fn allocate(&self, bytes: usize, stream: &Stream<'_>) -> Answer<PoolBlock> {
        let mut address = 0;
        // SAFETY: writes one address; pool and stream are alive.
        unsafe { self.gpu.driver.pool_allocate(&raw mut address, bytes, self.handle, stream.handle) }?;
        Ok(PoolBlock { address })
    }

    /// Frees memory to the pool.
    pub(crate) fn free(&self, block: PoolBlock, stream: &Stream<'_>) -> Answer<()> {
        // SAFETY: the stream is alive; the address came from a pool and is freed once, since the
        // block is taken by value; no copy ever used it.
        unsafe { self.gpu.driver.pool_free(block.address, stream.handle) }
    }

    /// Returns all free memory to the device.
    pub(crate) fn trim(&self) -> Answer<()> {
        // SAFETY: the pool is alive.
        unsafe { self.gpu.driver.pool_trim(self.handle, 0) }
    }
}

impl Drop for Pool<'_> {
    fn drop(&mut self) {
        self.gpu.wait();
        // SAFETY: created once, destroyed once.
        let _ = unsafe { self.gpu.driver.pool_destroy(self.handle) };
    }
}
