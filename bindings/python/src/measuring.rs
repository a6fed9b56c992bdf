//! Measures memory of running code, for `measure`, `leak` and the pytest plug-in: host memory from
//! the kernel, device memory from NVML.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use onelayer::{Device, Target};
use onelayer_probe::{
    GpuMemory, Level, Measured, Procfs, Sampler, SamplerOptions, SlopeLimit, Summary, slope,
};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Sampling interval of a device; a sample costs more than one of the host.
const DEVICE_INTERVAL: Duration = Duration::from_millis(10);

/// Measures from its creation to `finish`.
#[pyclass(frozen, module = "onelayer._native")]
pub(crate) struct MemoryMeter {
    parts: Mutex<Option<Parts>>,
}

struct Parts {
    host: Result<Sampler, String>,
    device: Option<Result<DeviceMeter, String>>,
}

/// Peak growth in bytes, or the reason why it is unknown.
type Growth = (Option<u64>, Option<String>);

#[pymethods]
impl MemoryMeter {
    /// Starts measuring the host, and a device if a number is given.
    #[new]
    #[pyo3(signature = (device=None))]
    fn start(py: Python<'_>, device: Option<u32>) -> Self {
        let parts = py.detach(|| {
            // The device first, so that its context does not count as growth.
            let device = device.map(DeviceMeter::start);
            let host = Sampler::start(&SamplerOptions::default()).map_err(|error| error.to_string());
            Parts { host, device }
        });
        Self { parts: Mutex::new(Some(parts)) }
    }

    /// Growth of unreclaimable host memory, of resident memory, and of device memory.
    fn finish(&self, py: Python<'_>) -> PyResult<(Growth, Growth, Growth)> {
        let (host, device) = self.end(py)?;
        let (unreclaimable, resident) = match &host {
            Ok(summary) => (told(summary.host_growth_bytes()), told(summary.rss_growth_bytes())),
            Err(reason) => ((None, Some(reason.clone())), (None, Some(reason.clone()))),
        };
        Ok((unreclaimable, resident, device))
    }

    /// All that was measured of the host, as JSON, and the growth of device memory.
    fn finish_summary(&self, py: Python<'_>) -> PyResult<(String, Growth)> {
        let (host, device) = self.end(py)?;
        let text =
            host.and_then(|summary| serde_json::to_string(&summary).map_err(|error| error.to_string()));
        Ok((text.map_err(PyRuntimeError::new_err)?, device))
    }
}

impl MemoryMeter {
    fn end(&self, py: Python<'_>) -> PyResult<(Result<Summary, String>, Growth)> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Parts { host, device } = parts.ok_or_else(|| PyValueError::new_err("measured already"))?;
        py.detach(|| {
            let host = match host.map(Sampler::finish) {
                Ok(Ok(summary)) => Ok(summary),
                Ok(Err(error)) => return Err(PyRuntimeError::new_err(error.to_string())),
                Err(reason) => Err(reason),
            };
            let device = match device {
                None => (None, Some("no device was requested".to_owned())),
                Some(Err(reason)) => (None, Some(reason)),
                Some(Ok(meter)) => meter.finish(),
            };
            Ok((host, device))
        })
    }
}

/// Unreclaimable and resident memory of this process now, in bytes, or the reasons why not.
#[pyfunction]
pub(crate) fn held_memory(py: Python<'_>) -> (Growth, Growth) {
    let memory = py.detach(|| Procfs::default().myself().memory());
    (told(memory.host_bytes), told(memory.rss_bytes))
}

/// Bytes a cycle, both ends of the confidence, spread, and `within`, `around` or `above` the limit.
type SlopeParts = (f64, Option<f64>, Option<f64>, f64, Option<&'static str>);

/// The slope of pairs of a cycle and the bytes after it. `None` for fewer than two.
#[pyfunction]
pub(crate) fn slope_of(py: Python<'_>, points: Vec<(u64, u64)>, max_bytes: u64) -> Option<SlopeParts> {
    let levels: Vec<Level> = points.into_iter().map(|(cycle, bytes)| Level { cycle, bytes }).collect();
    let found = py.detach(|| slope(&levels))?;
    let limit = found.against(max_bytes).map(|limit| match limit {
        SlopeLimit::Within => "within",
        SlopeLimit::Around => "around",
        SlopeLimit::Above => "above",
    });
    Some((found.value, found.low, found.high, found.spread, limit))
}

fn told(measured: Measured<u64>) -> Growth {
    match measured {
        Measured::Value(bytes) => (Some(bytes), None),
        Measured::Unavailable(reason) => (None, Some(reason.to_string())),
    }
}

/// A thread that samples the used memory of a device, by all processes.
struct DeviceMeter {
    stop: Arc<AtomicBool>,
    /// `None` once it was joined.
    thread: Option<JoinHandle<Result<u64, String>>>,
}

impl DeviceMeter {
    fn start(ordinal: u32) -> Result<Self, String> {
        let device = Device::open(Target::Cuda(ordinal)).map_err(|error| error.to_string())?;
        let info = device.info().map_err(|error| error.to_string())?;
        let total_bytes = match device.memory().map_err(|error| error.to_string())? {
            Some(memory) => memory.total_bytes,
            None => return Err("the device has no memory of its own".to_owned()),
        };
        let gpu = GpuMemory::open(info.uuid.as_deref(), info.pci_bus_id.as_deref(), total_bytes)
            .map_err(|error| error.to_string())?;
        let before_bytes = gpu.used_bytes().map_err(|error| error.to_string())?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let watch = move || {
            // The context lives while the device is sampled.
            let _device = device;
            let mut most_bytes = before_bytes;
            loop {
                let is_last = stopped.load(Ordering::Acquire);
                most_bytes = most_bytes.max(gpu.used_bytes().map_err(|error| error.to_string())?);
                if is_last {
                    return Ok(most_bytes - before_bytes);
                }
                thread::park_timeout(DEVICE_INTERVAL);
            }
        };
        let thread = thread::Builder::new().name("onelayer-vram".to_owned()).spawn(watch);
        Ok(Self { stop, thread: Some(thread.map_err(|error| error.to_string())?) })
    }

    fn finish(mut self) -> Growth {
        match self.end() {
            Some(Ok(Ok(bytes))) => (Some(bytes), None),
            Some(Ok(Err(reason))) => (None, Some(reason)),
            _ => (None, Some("the thread that sampled the device panicked".to_owned())),
        }
    }

    fn end(&mut self) -> Option<thread::Result<Result<u64, String>>> {
        let thread = self.thread.take()?;
        self.stop.store(true, Ordering::Release);
        thread.thread().unpark();
        Some(thread.join())
    }
}

impl Drop for DeviceMeter {
    fn drop(&mut self) {
        // The result is no longer needed.
        let _ = self.end();
    }
}
