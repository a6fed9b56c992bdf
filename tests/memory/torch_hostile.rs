//! Hostile PyTorch files in bounded memory: in proportion to the file, and below four times the
//! limit on headers whatever the file is.

use std::sync::atomic::Ordering;

use crate::allocator::{LIVE, PEAK};
use crate::torch_corpus::cases;
use onelayer::checkpoint::OpenOptions;

const MIB: usize = 1 << 20;
/// A pickle may describe a container in one byte, which takes 24 bytes and up to twice as much
/// while its list grows. Lists that hold each other are written out to a few MiB of names.
const BYTES_PER_BYTE: usize = 100;
const LIMIT_BYTES: u64 = 64 << 10;

/// The peak of memory while a file is opened.
fn peak_of(options: &OpenOptions, path: &std::path::Path) -> usize {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let opened = options.open(path);
    let peak = PEAK.load(Ordering::Relaxed).saturating_sub(before);
    drop(opened);
    peak
}

#[test]
fn hostile_files_take_bounded_memory() {
    if onelayer_testing::in_own_process(module_path!(), "hostile_files_take_bounded_memory") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.pt");
    let (mut highest, mut limited) = (0, 0);
    for case in cases() {
        std::fs::write(&path, &case.bytes).unwrap();
        let peak = peak_of(&OpenOptions::new(), &path);
        assert!(peak <= BYTES_PER_BYTE * case.bytes.len() + 8 * MIB, "{}: {peak} bytes", case.name);
        highest = highest.max(peak);
        let peak = peak_of(&OpenOptions::new().header_bytes_max(LIMIT_BYTES), &path);
        let allowed = 4 * usize::try_from(LIMIT_BYTES).unwrap() + MIB / 2;
        assert!(peak <= allowed, "{}: {peak} bytes with a limit of {LIMIT_BYTES}", case.name);
        limited = limited.max(peak);
    }
    println!("at most {highest} bytes, with a limit of {LIMIT_BYTES} at most {limited}");
}
