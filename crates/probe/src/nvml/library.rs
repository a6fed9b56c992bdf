//! Loads NVML at run time and calls the seven functions that are needed.
//!
//! By hand, not with `nvml-wrapper`: that adds 12 crates and 25 to 30 s of CPU time to a release
//! build (measured with version 0.12.1), and it allocates in every sample.
#![allow(unsafe_code, reason = "loads a foreign library and calls it; each block says why it may")]

use std::ffi::{CStr, CString, c_char, c_uint, c_ulonglong, c_void};

use libloading::Library;

use super::NvmlError;

/// File names of the library; the driver installs the first one.
const LIBRARY_NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// `NVML_SUCCESS`.
const SUCCESS: u32 = 0;
/// `NVML_ERROR_INSUFFICIENT_SIZE`: the list is longer than the buffer.
const INSUFFICIENT_SIZE: u32 = 7;
/// `NVML_VALUE_NOT_AVAILABLE`, instead of the memory of a process.
const NOT_AVAILABLE: u64 = u64::MAX;
/// The initial process-id namespace of the kernel (`PROC_PID_INIT_INO`, Linux
/// `include/linux/proc_ns.h`).
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";
/// Initial length of the process buffer.
const PROCESS_COUNT_START: usize = 64;

/// `nvmlDevice_t`: valid until NVML is shut down.
type Handle = *mut c_void;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlProcessInfo_t`, as versions 2 and 3 of the call fill it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Process {
    pid: c_uint,
    used_gpu_memory: c_ulonglong,
    gpu_instance_id: c_uint,
    compute_instance_id: c_uint,
}

/// The used functions of NVML.
#[derive(Clone, Copy, Debug)]
struct Functions {
    init: unsafe extern "C" fn() -> u32,
    shutdown: unsafe extern "C" fn() -> u32,
    error_string: unsafe extern "C" fn(u32) -> *const c_char,
    by_uuid: unsafe extern "C" fn(*const c_char, *mut Handle) -> u32,
    by_pci_bus_id: unsafe extern "C" fn(*const c_char, *mut Handle) -> u32,
    memory: unsafe extern "C" fn(Handle, *mut Memory) -> u32,
    processes: unsafe extern "C" fn(Handle, *mut c_uint, *mut Process) -> u32,
}

/// Initialised NVML; shut down when dropped.
#[derive(Debug)]
struct Session {
    functions: Functions,
    /// Keeps the functions loaded. `None` in tests.
    _library: Option<Library>,
}

/// A device in NVML.
#[derive(Debug)]
pub(super) struct Device {
    session: Session,
    handle: Handle,
    processes: Vec<Process>,
    /// True if our process ids are the host's.
    has_host_pids: bool,
}

// SAFETY: "all NVML calls are thread-safe" (NVML API Reference Guide, "NVML API Reference"), and a
// handle is a name.
unsafe impl Send for Device {}

impl Session {
    fn open() -> Result<Self, NvmlError> {
        for name in LIBRARY_NAMES {
            // SAFETY: loading runs the library's initialisers. It is part of the GPU driver, found
            // on the linker's search path.
            if let Ok(library) = unsafe { Library::new(name) } {
                let functions = functions(name, &library)?;
                return Self::start(functions, Some(library));
            }
        }
        Err(NvmlError::Missing { looked_for: LIBRARY_NAMES.join(", ") })
    }

    fn start(functions: Functions, library: Option<Library>) -> Result<Self, NvmlError> {
        // SAFETY: takes no arguments. NVML counts the calls, so other users in this process are
        // unaffected.
        let code = unsafe { (functions.init)() };
        check(&functions, "nvmlInit_v2", code)?;
        Ok(Self { functions, _library: library })
    }

    fn find(
        &self,
        uuid: Option<&str>,
        pci_bus_id: Option<&str>,
        total_bytes: u64,
    ) -> Result<Handle, NvmlError> {
        // The CUDA driver writes the UUID of a MIG instance with `GPU-`, NVML with `MIG-`.
        let names = uuid.into_iter().flat_map(|uuid| {
            let part = uuid.strip_prefix("GPU-").map(|digits| format!("MIG-{digits}"));
            [Some(uuid.to_owned()), part].into_iter().flatten()
        });
        for name in names {
            if let Some(handle) = self.handle(self.functions.by_uuid, &name) {
                return Ok(handle);
            }
        }
        let at_place = pci_bus_id.and_then(|place| self.handle(self.functions.by_pci_bus_id, place));
        let is_that = |handle: &Handle| {
            // CUDA and NVML differ slightly, since each reserves some memory; a MIG instance has at
            // most half.
            let there = memory(&self.functions, *handle).map_or(0, |memory| memory.total);
            there / 4 * 3 <= total_bytes && total_bytes / 4 * 3 <= there
        };
        at_place.filter(is_that).ok_or_else(|| {
            let names: Vec<&str> = uuid.into_iter().chain(pci_bus_id).collect();
            NvmlError::NoSuchDevice { device: names.join(" at ") }
        })
    }

    fn handle(
        &self,
        look_up: unsafe extern "C" fn(*const c_char, *mut Handle) -> u32,
        name: &str,
    ) -> Option<Handle> {
        let name = CString::new(name).ok()?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: a NUL-terminated string and room for one handle; NVML is initialised.
        let code = unsafe { look_up(name.as_ptr(), &raw mut handle) };
        (code == SUCCESS).then_some(handle)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: undoes one `nvmlInit_v2`; no handle is used after it.
        let _ = unsafe { (self.functions.shutdown)() };
    }
}

impl Device {
    pub(super) fn open(
        uuid: Option<&str>,
        pci_bus_id: Option<&str>,
        total_bytes: u64,
    ) -> Result<Self, NvmlError> {
        let has_host_pids = std::fs::read_link("/proc/self/ns/pid")
            .is_ok_and(|link| link.as_os_str() == INITIAL_PID_NAMESPACE);
        Self::new(Session::open()?, uuid, pci_bus_id, total_bytes, has_host_pids)
    }

    fn new(
        session: Session,
        uuid: Option<&str>,
        pci_bus_id: Option<&str>,
        total_bytes: u64,
        has_host_pids: bool,
    ) -> Result<Self, NvmlError> {
        let handle = session.find(uuid, pci_bus_id, total_bytes)?;
        Ok(Self { session, handle, processes: vec![Process::default(); PROCESS_COUNT_START], has_host_pids })
    }

    pub(super) fn used_bytes(&self) -> Result<u64, NvmlError> {
        memory(&self.session.functions, self.handle).map(|memory| memory.used)
    }

    pub(super) fn of_process(&mut self, pid: u32) -> Result<u64, NvmlError> {
        let unknown = |reason| NvmlError::NoSuchProcess { pid, reason };
        if !self.has_host_pids {
            return Err(unknown("NVML uses the host's process ids, and this process is in a container"));
        }
        let listed = self.list()?;
        let found = listed.iter().filter(|process| process.pid == pid);
        let held = found.map(|process| process.used_gpu_memory).reduce(u64::saturating_add);
        match held {
            None => Err(unknown("it does not list the process")),
            Some(NOT_AVAILABLE) => Err(unknown("it lists the process without its memory")),
            Some(bytes) => Ok(bytes),
        }
    }

    fn list(&mut self) -> Result<&[Process], NvmlError> {
        loop {
            let room = self.processes.len();
            let mut count = c_uint::try_from(room).unwrap_or(c_uint::MAX);
            // SAFETY: the buffer has room for `count` processes; the call replaces `count` by the
            // real number.
            let code = unsafe {
                (self.session.functions.processes)(self.handle, &raw mut count, self.processes.as_mut_ptr())
            };
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            // Twice the number: more processes may start meanwhile.
            if code == INSUFFICIENT_SIZE && count > room && room < 1 << 16 {
                self.processes.resize(count.saturating_mul(2).min(1 << 16), Process::default());
                continue;
            }
            check(&self.session.functions, "nvmlDeviceGetComputeRunningProcesses", code)?;
            return Ok(&self.processes[..count.min(room)]);
        }
    }
}

fn memory(functions: &Functions, handle: Handle) -> Result<Memory, NvmlError> {
    let mut memory = Memory::default();
    // SAFETY: a valid handle and room for one structure.
    let code = unsafe { (functions.memory)(handle, &raw mut memory) };
    check(functions, "nvmlDeviceGetMemoryInfo", code)?;
    Ok(memory)
}

fn check(functions: &Functions, call: &'static str, code: u32) -> Result<(), NvmlError> {
    if code == SUCCESS {
        return Ok(());
    }
    // SAFETY: accepts any number at any time.
    let text = unsafe { (functions.error_string)(code) };
    let reason = if text.is_null() {
        "unknown".to_owned()
    } else {
        // SAFETY: a NUL-terminated string of the library, never freed.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(NvmlError::Failed { call, code, reason })
}

fn functions(name: &'static str, library: &Library) -> Result<Functions, NvmlError> {
    fn symbol<F: Copy>(name: &'static str, library: &Library, symbol: &'static str) -> Result<F, NvmlError> {
        // SAFETY: each name below is an NVML function, and its field has the C signature of that
        // function.
        let found = unsafe { library.get::<F>(symbol.as_bytes()) };
        found.map(|found| *found).map_err(|_| NvmlError::Incomplete { library: name, symbol })
    }
    Ok(Functions {
        init: symbol(name, library, "nvmlInit_v2")?,
        shutdown: symbol(name, library, "nvmlShutdown")?,
        error_string: symbol(name, library, "nvmlErrorString")?,
        by_uuid: symbol(name, library, "nvmlDeviceGetHandleByUUID")?,
        by_pci_bus_id: symbol(name, library, "nvmlDeviceGetHandleByPciBusId_v2")?,
        memory: symbol(name, library, "nvmlDeviceGetMemoryInfo")?,
        // Both fill the same structure; the third came with driver 510.
        processes: symbol(name, library, "nvmlDeviceGetComputeRunningProcesses_v3")
            .or_else(|_| symbol(name, library, "nvmlDeviceGetComputeRunningProcesses_v2"))?,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Initialisations minus shutdowns of the fake library. One test uses it.
    static OPEN: AtomicU32 = AtomicU32::new(0);
    const GIB: u64 = 1 << 30;
    /// More than the initial buffer holds.
    const LISTED: u32 = 100;

    unsafe extern "C" fn init() -> u32 {
        OPEN.fetch_add(1, Ordering::Relaxed);
        SUCCESS
    }
    unsafe extern "C" fn shutdown() -> u32 {
        OPEN.fetch_sub(1, Ordering::Relaxed);
        SUCCESS
    }
    unsafe extern "C" fn error_string(_: u32) -> *const c_char {
        c"Not Found".as_ptr()
    }
    unsafe fn one_name(name: *const c_char, known: &CStr, handle: *mut Handle) -> u32 {
        // SAFETY: the callers pass a NUL-terminated string.
        if unsafe { CStr::from_ptr(name) } != known {
            return 6;
        }
        // SAFETY: the callers pass room for a handle.
        unsafe { *handle = std::ptr::without_provenance_mut(7) };
        SUCCESS
    }
    unsafe extern "C" fn by_uuid(name: *const c_char, handle: *mut Handle) -> u32 {
        // SAFETY: as the caller says.
        unsafe { one_name(name, c"MIG-12", handle) }
    }
    unsafe extern "C" fn by_pci_bus_id(name: *const c_char, handle: *mut Handle) -> u32 {
        // SAFETY: as the caller says.
        unsafe { one_name(name, c"0000:3b:00.0", handle) }
    }
    unsafe extern "C" fn fake_memory(handle: Handle, memory: *mut Memory) -> u32 {
        assert_eq!(handle.addr(), 7, "the handle that was looked up");
        // SAFETY: the caller passes room for a structure.
        unsafe { *memory = Memory { total: 80 * GIB, free: 77 * GIB, used: 3 * GIB } };
        SUCCESS
    }
    unsafe extern "C" fn fake_processes(_: Handle, count: *mut c_uint, room: *mut Process) -> u32 {
        // SAFETY: the caller passes a number.
        let there = unsafe { *count };
        // SAFETY: as above.
        unsafe { *count = LISTED };
        if there < LISTED {
            return INSUFFICIENT_SIZE;
        }
        for number in 0..LISTED {
            let process = Process {
                pid: 1000 + number,
                used_gpu_memory: if number == 50 { NOT_AVAILABLE } else { u64::from(number) },
                ..Process::default()
            };
            // SAFETY: there is room for so many.
            let place = unsafe { room.add(usize::try_from(number).unwrap()) };
            // SAFETY: as above.
            unsafe { place.write(process) };
        }
        SUCCESS
    }

    fn device(uuid: &str, place: &str, total_bytes: u64, in_container: bool) -> Result<Device, NvmlError> {
        let functions = Functions {
            init,
            shutdown,
            error_string,
            by_uuid,
            by_pci_bus_id,
            memory: fake_memory,
            processes: fake_processes,
        };
        let session = Session::start(functions, None)?;
        Device::new(session, Some(uuid), Some(place), total_bytes, !in_container)
    }

    #[test]
    fn a_device_is_found_and_asked() {
        // A MIG instance by UUID, whatever is at its address; a whole GPU by address, if it is as
        // large.
        assert!(device("GPU-12", "0000:00:00.0", 10 * GIB, false).is_ok());
        assert!(device("GPU-34", "0000:3b:00.0", 79 * GIB, false).is_ok());
        let error = device("GPU-34", "0000:3b:00.0", 40 * GIB, false).unwrap_err();
        assert_eq!(error.to_string(), "NVML knows no device GPU-34 at 0000:3b:00.0");
        assert!(device("GPU-34", "0000:00:00.0", 79 * GIB, false).is_err());

        let mut whole = device("GPU-34", "0000:3b:00.0", 80 * GIB, false).unwrap();
        assert_eq!(whole.used_bytes(), Ok(3 * GIB));
        assert_eq!(whole.of_process(1099), Ok(99), "beyond the initial buffer");
        let refused = |error: Result<u64, NvmlError>| error.unwrap_err().to_string();
        assert!(refused(whole.of_process(5)).contains("does not list the process"));
        assert!(refused(whole.of_process(1050)).contains("without its memory"));
        let mut contained = device("GPU-34", "0000:3b:00.0", 80 * GIB, true).unwrap();
        assert!(refused(contained.of_process(1099)).contains("container"), "the id means another process");
        drop((whole, contained));
        assert_eq!(OPEN.load(Ordering::Relaxed), 0, "everything was shut down");

        let failed = check(&device("GPU-12", "", 0, true).unwrap().session.functions, "call", 6);
        assert_eq!(failed.unwrap_err().to_string(), "call failed: Not Found (6)");
    }

    /// The layout is the C one: 4 bytes of padding after the number.
    #[test]
    fn structures_are_as_large_as_in_c() {
        assert_eq!(size_of::<Memory>(), 24);
        assert_eq!((size_of::<Process>(), std::mem::offset_of!(Process, used_gpu_memory)), (24, 8));
    }
}
