//! The CUDA driver, queried by a worker, and NVML.

use std::path::PathBuf;

use onelayer_probe::{GpuMemory, NvmlError};

use crate::args::{Device, LoadArgs};
use crate::config::LoadConfig;
use crate::numbers::bytes;
use crate::report::{Check, Gpu};
use crate::signals::Interrupts;
use crate::worker::{Stop, ask_to_prepare};

/// The first CUDA device, or why there is none.
pub(crate) type Driver = Result<Gpu, String>;

/// Queries the driver in a worker.
pub(super) fn ask(interrupts: &Interrupts) -> Result<Driver, i32> {
    let args = LoadArgs { device: Device::Cuda(0), ..LoadArgs::looking_at("".into()) };
    let (mut load, _) = LoadConfig::new(&args, PathBuf::new());
    let preparation = ask_to_prepare(&mut load, false, None, interrupts);
    if let Some(gpus) = preparation.gpus {
        return Ok(gpus.into_iter().next().ok_or_else(|| "the driver shows no device".to_owned()));
    }
    let problems = match preparation.checked {
        Err(Stop::Signal(signal)) => return Err(signal),
        Err(Stop::Problems(problems)) => problems,
        Ok(_) => Vec::new(),
    };
    let message = problems.into_iter().next().map(|problem| problem.message).unwrap_or_default();
    let message = message.strip_prefix("cannot use --device cuda:0: ").unwrap_or(&message);
    Ok(Err(message.to_owned()))
}

/// The driver.
pub(super) fn cuda(driver: &Driver) -> Check {
    match driver {
        Ok(gpu) => {
            let version = gpu.cuda_version.as_deref().unwrap_or("unknown");
            Check::ok("cuda", format!("{} ({}), CUDA {version}", gpu.name, bytes(gpu.memory_total_bytes)))
        }
        Err(reason) => {
            Check::missing("cuda", reason.clone(), "layers go to host memory (--device auto comes to host)")
                .fix("install NVIDIA's driver; docker run --gpus all, with the NVIDIA container toolkit")
        }
    }
}

/// NVML.
pub(super) fn nvml(driver: &Driver) -> Check {
    let gpu = driver.as_ref().ok();
    let uuid = gpu.and_then(|gpu| gpu.uuid.as_deref());
    let place = gpu.and_then(|gpu| gpu.pci_bus_id.as_deref());
    let total_bytes = gpu.and_then(|gpu| gpu.memory_total_bytes).unwrap_or(0);
    let used = GpuMemory::open(uuid, place, total_bytes).and_then(|memory| memory.used_bytes());
    judge_nvml(&used, gpu.is_some())
}

fn judge_nvml(used: &Result<u64, NvmlError>, has_gpu: bool) -> Check {
    const CHECK: &str = "nvml";
    match used {
        Ok(used) => Check::ok(CHECK, format!("{} of the device in use", bytes(Some(*used)))),
        // Without a device there is nothing to count.
        Err(NvmlError::NoSuchDevice { .. }) if !has_gpu => Check::ok(CHECK, "found; there is no CUDA device to count"),
        Err(error @ (NvmlError::Missing { .. } | NvmlError::NotBuilt)) if !has_gpu => {
            Check::missing(CHECK, error.to_string(), "nothing, without a CUDA device")
        }
        Err(error) => Check::missing(
            CHECK,
            error.to_string(),
            "device memory is counted by the CUDA driver, for all processes on the device together",
        )
        .fix("docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility; on a machine: install libnvidia-ml"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::State;

    #[test]
    fn drivers() {
        let gpu = Gpu {
            index: 0,
            name: "Some GPU".to_owned(),
            uuid: None,
            pci_bus_id: None,
            cuda_version: Some("12.8".to_owned()),
            memory_total_bytes: Some(8 << 30),
        };
        assert_eq!(cuda(&Ok(gpu)).found, "Some GPU (8 GiB), CUDA 12.8");
        let check = cuda(&Err("no CUDA driver".to_owned()));
        assert!(check.state == State::Missing && check.fix.is_some());
    }

    #[test]
    fn nvml_matters_where_there_is_a_device() {
        let missing = || Err(NvmlError::Missing { looked_for: "libnvidia-ml.so.1".to_owned() });
        assert_eq!(judge_nvml(&missing(), false).fix, None);
        assert!(judge_nvml(&missing(), true).fix.is_some());
        let unknown = Err(NvmlError::NoSuchDevice { device: "none".to_owned() });
        assert_eq!(
            (judge_nvml(&unknown, false).state, judge_nvml(&unknown, true).state),
            (State::Ok, State::Missing)
        );
        assert_eq!(judge_nvml(&Ok(5), true).state, State::Ok);
    }
}
