//! The machine: kernel, memory, CPU; and the kind of a file system.

use std::fs::{self, File};
use std::path::Path;

use serde::Serialize;

use super::measured::UnavailableList;
use super::procfs::{self, Procfs};
use super::{Measured, Reason};
use onelayer_system::file_system::FileSystem;

/// The machine, as reports describe it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Host {
    /// Such as `6.18.44`.
    pub kernel: Measured<Box<str>>,
    /// All memory managed by the kernel.
    pub ram_bytes: Measured<u64>,
    /// The kernel's estimate of memory usable without swapping. Ignores container limits.
    pub ram_available_bytes: Measured<u64>,
    /// The processor's model name; not every architecture has one.
    pub cpu_model: Measured<Box<str>>,
    /// Threads that can run at once, by CPU affinity and quota.
    pub cpu_count: Measured<usize>,
    /// Size of a small page.
    pub page_bytes: u64,
}

impl Host {
    /// Reads all fields from `procfs`.
    #[must_use]
    pub fn read(procfs: &Procfs) -> Self {
        let read = |path: &str, name: &'static str| {
            fs::read_to_string(procfs.root().join(path)).map_err(|error| Reason::unreadable(name, &error))
        };
        let meminfo = read("meminfo", "/proc/meminfo");
        let cpus = procfs.myself().cpu_group().ok().and_then(|group| group.parallelism());
        let cpus = cpus.or_else(|| std::thread::available_parallelism().ok());
        Self {
            kernel: read("sys/kernel/osrelease", "/proc/sys/kernel/osrelease")
                .map(|text| text.trim().into())
                .into(),
            ram_bytes: meminfo_bytes(&meminfo, "MemTotal"),
            ram_available_bytes: meminfo_bytes(&meminfo, "MemAvailable"),
            cpu_model: read("cpuinfo", "/proc/cpuinfo").and_then(|text| cpu_model(&text)).into(),
            cpu_count: cpus
                .map(std::num::NonZeroUsize::get)
                .ok_or(Reason::NotHere("the CPUs of this process cannot be counted"))
                .into(),
            page_bytes: onelayer_system::units::to_u64(rustix::param::page_size()),
        }
    }

    /// The missing fields, for a report's list.
    #[must_use]
    pub fn unavailable(&self) -> Vec<super::Unavailable> {
        let mut list = UnavailableList::default();
        list.note("host.", "kernel", &self.kernel);
        list.note("host.", "ram_bytes", &self.ram_bytes);
        list.note("host.", "ram_available_bytes", &self.ram_available_bytes);
        list.note("host.", "cpu_model", &self.cpu_model);
        list.note("host.", "cpu_count", &self.cpu_count);
        list.into_vec()
    }
}

fn meminfo_bytes(text: &Result<String, Reason>, field: &'static str) -> Measured<u64> {
    const FILE: &str = "/proc/meminfo";
    let text = match text {
        Ok(text) => text,
        Err(reason) => return Measured::Unavailable(*reason),
    };
    procfs::keyed_lines(text.as_bytes())
        .find(|(key, _)| *key == field.as_bytes())
        .ok_or(Reason::FieldMissing { file: FILE, field })
        .and_then(|(_, value)| procfs::kib_field(value).ok_or(Reason::Malformed { file: FILE, field }))
        .into()
}

/// `model name` on x86, `Processor` or `cpu model` on some others.
fn cpu_model(text: &str) -> Result<Box<str>, Reason> {
    ["model name", "Processor", "cpu model", "cpu"]
        .iter()
        .find_map(|wanted| {
            let pairs = text.lines().filter_map(|line| line.split_once(':'));
            pairs.map(|(key, value)| (key.trim(), value.trim())).find(|(key, _)| key == wanted)
        })
        .map(|(_, value)| value.into())
        .ok_or(Reason::FieldMissing { file: "/proc/cpuinfo", field: "model name" })
}

/// The file system that holds `path`.
///
/// # Errors
/// The reason it is unknown.
pub fn file_system_of(path: &Path) -> Result<FileSystem, Reason> {
    rustix::fs::statfs(path)
        .map(|statfs| FileSystem::from_raw(statfs.f_type))
        .map_err(|errno| Reason::unreadable("the path", &errno.into()))
}

/// The file system that holds an open file.
///
/// # Errors
/// The reason it is unknown.
pub fn file_system_of_file(file: &File) -> Result<FileSystem, Reason> {
    FileSystem::holding(file).map_err(|error| Reason::unreadable("the file", &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_known() {
        let host = Host::read(&Procfs::default());
        assert!(host.ram_bytes.value().unwrap() > 64 << 20);
        assert!(host.kernel.clone().value().unwrap().contains('.'));
        assert!(host.cpu_count.value().unwrap() >= 1);
        let missing = Host::read(&Procfs::at("/nonexistent"));
        assert!(missing.ram_bytes.value().is_none() && missing.kernel.value().is_none());
    }

    #[test]
    fn cpu_names_of_several_architectures() {
        assert_eq!(&*cpu_model("processor\t: 0\nmodel name\t: A: B CPU\n").unwrap(), "A: B CPU");
        assert_eq!(
            &*cpu_model("processor : 0\ncpu : POWER9, altivec supported\n").unwrap(),
            "POWER9, altivec supported"
        );
        assert!(cpu_model("processor : 0\nBogoMIPS : 50\n").is_err());
    }

    #[test]
    fn the_file_system_of_a_path_is_found() {
        assert_eq!(file_system_of(Path::new("/proc")).unwrap().to_string(), "proc");
        assert!(file_system_of(Path::new("/nonexistent")).is_err());
    }
}
