//! Checks what can be measured and used on this machine. Everything is tried. Probing is separate
//! from judging, so that judgements about other machines can be tested.
//!
//! | file | tries |
//! |---|---|
//! | `groups` | a control group of our own, with a limit; swap |
//! | `bounds` | resource limits, overcommit, CPUs, shared memory, the kernel's age |
//! | `files` | direct I/O and the page cache, on a file |
//! | `ring` | a ring of io_uring, and a buffer registered with it |
//! | `pages` | a huge page, asked for and touched |
//! | `counters` | what a process is told about its own memory |
//! | `gpu` | the CUDA driver and NVML |

mod bounds;
mod counters;
mod files;
mod gpu;
mod groups;
mod pages;
mod ring;

use std::path::Path;

use crate::report::{Check, Gpu};
use crate::signals::Interrupts;

pub(crate) use self::gpu::Driver;

/// Runs every check. `path` is where checkpoints are.
pub(crate) fn examine(path: &Path, driver: &Driver) -> Vec<Check> {
    let mut checks = vec![bounds::kernel(), groups::cgroup(), groups::swap(), bounds::cpu()];
    checks.extend([bounds::memlock(), bounds::address_space(), bounds::overcommit(), bounds::shm()]);
    checks.extend(files::files(path));
    checks.extend([ring::io_uring(), pages::huge_pages()]);
    checks.extend(counters::counters());
    checks.extend([gpu::cuda(driver), gpu::nvml(driver)]);
    checks
}

/// Queries a worker for the first CUDA device: this process never opens a driver.
///
/// # Errors
/// The signal that came meanwhile.
pub(crate) fn ask_driver(interrupts: &Interrupts) -> Result<Driver, i32> {
    gpu::ask(interrupts)
}

/// The device that the driver reported.
pub(crate) fn gpu_of(driver: &Driver) -> Option<Gpu> {
    driver.as_ref().ok().cloned()
}
