//! The device that `--device` stands for on this machine. Decided once, before measuring, by a
//! worker: its parent never opens a driver.

use onelayer::{Device, DeviceError, Target};

use crate::args::Device as Asked;
use crate::library_errors::out_of_memory;
use crate::problem::{Code, Problem};
use crate::report::Gpu;

/// A device that can be used.
#[derive(Debug)]
pub(crate) struct Decided {
    /// Which one; never `auto`.
    pub(crate) device: Asked,
    /// Its description, if it is a GPU.
    pub(crate) gpu: Option<Gpu>,
    /// Its free memory, if it has its own.
    pub(crate) free_bytes: Option<u64>,
    /// Why `auto` is the host.
    pub(crate) note: Option<String>,
}

impl Decided {
    fn without_gpu(device: Asked, note: Option<String>) -> Self {
        Self { device, gpu: None, free_bytes: None, note }
    }
}

/// Opens what was asked for, and closes it again. `auto` is the first CUDA device if there is a
/// driver that shows one, else the host, with a note that says why.
///
/// # Errors
/// The device cannot be used. `auto` fails only where a device is there and does not open.
pub(crate) fn decide(asked: Asked) -> Result<Decided, Problem> {
    let ordinal = match asked {
        Asked::Host | Asked::None => return Ok(Decided::without_gpu(asked, None)),
        Asked::Cuda(ordinal) => ordinal,
        Asked::Auto => 0,
    };
    match look_at(ordinal) {
        Ok(decided) => Ok(decided),
        Err(error) if asked == Asked::Auto && error.is_unavailable() => {
            let note = format!("{}: using host memory", short(&error));
            Ok(Decided::without_gpu(Asked::Host, Some(note)))
        }
        Err(error) => Err(unusable(ordinal, &error)),
    }
}

pub(super) fn look_at(ordinal: u32) -> Result<Decided, DeviceError> {
    let device = Device::open(Target::Cuda(ordinal))?;
    let info = device.info()?;
    let memory = device.memory()?;
    let gpu = Gpu {
        index: ordinal,
        name: info.name,
        uuid: info.uuid,
        pci_bus_id: info.pci_bus_id,
        cuda_version: info.cuda_version.map(|(major, minor)| format!("{major}.{minor}")),
        memory_total_bytes: memory.map(|memory| memory.total_bytes),
    };
    Ok(Decided {
        device: Asked::Cuda(ordinal),
        gpu: Some(gpu),
        free_bytes: memory.map(|memory| memory.free_bytes),
        note: None,
    })
}

/// The error in short, for a note: no driver was asked for.
fn short(error: &DeviceError) -> String {
    match error {
        DeviceError::NoDriver { .. } => "no CUDA driver".to_owned(),
        other => other.to_string(),
    }
}

/// A device that was asked for and cannot be used.
pub(super) fn unusable(ordinal: u32, error: &DeviceError) -> Problem {
    Problem::new(Code::NoDevice, format!("cannot use --device cuda:{ordinal}: {error}"))
        .help("--device host keeps the layers in memory, --device none only reads them")
}

/// Refuses layers that do not fit what is free on the device: the same check as the load's own,
/// before anything is allocated or measured.
pub(super) fn fits(
    needed_bytes: u64,
    free_bytes: u64,
    reserve_bytes: u64,
    kept: &str,
) -> Result<(), Problem> {
    if needed_bytes.saturating_add(reserve_bytes) <= free_bytes {
        return Ok(());
    }
    let error = DeviceError::OutOfDeviceMemory { needed_bytes, free_bytes, reserve_bytes };
    Err(out_of_memory(&error).at(format!("--window {kept}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_and_none_are_themselves() {
        for asked in [Asked::Host, Asked::None] {
            let decided = decide(asked).unwrap();
            assert_eq!((decided.device, decided.gpu, decided.note), (asked, None, None));
        }
    }

    #[test]
    fn a_note_is_short_and_a_refusal_says_what_was_looked_for() {
        let error = DeviceError::NoDriver { looked_for: "a, b".to_owned(), reason: "gone".to_owned() };
        assert_eq!(short(&error), "no CUDA driver");
        let problem = unusable(3, &error);
        assert_eq!(problem.code, Code::NoDevice);
        assert!(
            problem.message.starts_with("cannot use --device cuda:3: no CUDA driver: looked for a, b (gone)")
        );
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_shortfall() {
        const GIB: u64 = 1 << 30;
        assert!(fits(GIB, 2 * GIB, GIB, "all").is_ok());
        let problem = fits(GIB + 1, 2 * GIB, GIB, "all").unwrap_err();
        assert_eq!((problem.code, problem.place.as_deref()), (Code::CannotBeMet, Some("--window all")));
        assert!(problem.help.unwrap().contains("--device-reserve 1023MiB"), "a smaller reserve would do");
        let problem = fits(3 * GIB, 2 * GIB, GIB, "2").unwrap_err();
        assert!(problem.message.contains("2 GiB short"), "{}", problem.message);
        assert!(!problem.help.unwrap().contains("--device-reserve"), "no reserve is small enough");
        assert!(fits(u64::MAX, 2 * GIB, GIB, "all").is_err());
    }
}
