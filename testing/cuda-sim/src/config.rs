//! Settings from environment variables that start with `CUDA_SIM_`. An unknown or invalid one ends
//! the process: a test that sets it must not pass by accident.

use crate::faults::{self, Fault};

/// When queued work runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Only when something waits for it, and only the needed work.
    Lazy,
    /// At random moments, on a thread.
    Thread,
    /// At once.
    Eager,
}

/// The calls that still succeed in a lost context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    /// Entering, leaving and freeing succeed.
    Work,
    /// Leaving and freeing succeed.
    Calls,
    /// Nothing succeeds, but frees are still done.
    All,
}

#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) mode: Mode,
    pub(crate) seed: u64,
    pub(crate) device_count: usize,
    /// For each device; the last value applies to the rest.
    pub(crate) memory_bytes: Vec<u64>,
    /// Used by other processes on each device.
    pub(crate) other_bytes: u64,
    /// Memory of a context.
    pub(crate) context_bytes: u64,
    /// Maximum pinned memory.
    pub(crate) pinned_bytes_max: u64,
    pub(crate) driver_version: i32,
    pub(crate) name: String,
    pub(crate) has_pools: bool,
    /// Copies from and to pageable memory run late too.
    pub(crate) is_pageable_late: bool,
    pub(crate) faults: Vec<Fault>,
    pub(crate) lost: Lost,
    /// Codes that are fatal on hardware lose the context, as there.
    pub(crate) is_fatal_sticky: bool,
    /// The result of `cuInit`.
    pub(crate) init_code: u32,
    pub(crate) has_nvml: bool,
    /// Maximum delay of a waiting thread.
    pub(crate) delay_us: u64,
    pub(crate) report_path: Option<String>,
    pub(crate) log_path: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: Mode::Lazy,
            seed: 1,
            device_count: 1,
            memory_bytes: vec![4 << 30],
            other_bytes: 0,
            context_bytes: 16 << 20,
            pinned_bytes_max: u64::MAX,
            driver_version: 12_080,
            name: String::from("simulated CUDA device"),
            has_pools: true,
            is_pageable_late: false,
            faults: Vec::new(),
            lost: Lost::Calls,
            is_fatal_sticky: true,
            init_code: 0,
            has_nvml: true,
            delay_us: 200,
            report_path: None,
            log_path: None,
        }
    }
}

impl Config {
    /// The settings of this process, then those of the text: lines of `NAME=value` without the
    /// prefix.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let mut config = Self::default();
        for (name, value) in std::env::vars_os() {
            let Some(name) = name.to_str().and_then(|name| name.strip_prefix("CUDA_SIM_")) else { continue };
            let value = value.to_str().ok_or_else(|| format!("CUDA_SIM_{name} is not text"))?;
            config.set(name, value)?;
        }
        for line in text.lines().filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once('=').ok_or_else(|| format!("no '=' in {line}"))?;
            config.set(name, value)?;
        }
        if config.memory_bytes.is_empty() || !config.name.contains("simulated") {
            return Err(String::from("a device needs memory, and a name that says \"simulated\""));
        }
        Ok(config)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let wrong = || format!("CUDA_SIM_{name}={value} is invalid");
        let number = || value.parse::<u64>().map_err(|_| wrong());
        let flag = || match value {
            "0" => Ok(false),
            "1" => Ok(true),
            _ => Err(wrong()),
        };
        match name {
            "MODE" => {
                self.mode = match value {
                    "lazy" => Mode::Lazy,
                    "thread" => Mode::Thread,
                    "eager" => Mode::Eager,
                    _ => return Err(wrong()),
                }
            }
            "SEED" => self.seed = number()?,
            "DEVICES" => self.device_count = number()?.try_into().map_err(|_| wrong())?,
            "MEM" => {
                let sizes: Option<Vec<u64>> = value.split(',').map(bytes).collect();
                self.memory_bytes = sizes.ok_or_else(wrong)?;
            }
            "OTHER" => self.other_bytes = bytes(value).ok_or_else(wrong)?,
            "CONTEXT" => self.context_bytes = bytes(value).ok_or_else(wrong)?,
            "PINNED" => self.pinned_bytes_max = bytes(value).ok_or_else(wrong)?,
            "DRIVER_VERSION" => self.driver_version = value.parse().map_err(|_| wrong())?,
            "NAME" => self.name = value.to_owned(),
            "POOLS" => self.has_pools = flag()?,
            "PAGEABLE" => {
                self.is_pageable_late = match value {
                    "late" => true,
                    "staged" => false,
                    _ => return Err(wrong()),
                }
            }
            "FAIL" => self.faults = faults::parse(value)?,
            "LOST" => {
                self.lost = match value {
                    "work" => Lost::Work,
                    "calls" => Lost::Calls,
                    "all" => Lost::All,
                    _ => return Err(wrong()),
                }
            }
            "FATAL" => self.is_fatal_sticky = flag()?,
            "INIT" => self.init_code = value.parse().map_err(|_| wrong())?,
            "NVML" => self.has_nvml = flag()?,
            "DELAY_US" => self.delay_us = number()?,
            "REPORT" => self.report_path = Some(value.to_owned()),
            "LOG" => self.log_path = Some(value.to_owned()),
            _ => return Err(format!("there is no setting CUDA_SIM_{name}")),
        }
        Ok(())
    }
}

/// A count of bytes: a number, with `K`, `M` or `G` for the binary units.
fn bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}
