//! An overlay file system caches pages in the lower file, and `cachestat` on it always returns 0.
//!
//! Containers run on overlays, so every warm file there would count as cold. Mounting an overlay
//! needs privileges; without them the test says that it skipped.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use onelayer_probe::{ResidencyMethod, drop_cache, file_system_of, residency};
use onelayer_testing::skipped;

/// An overlay over an empty and a filled directory, unmounted on drop.
struct Overlay {
    root: tempfile::TempDir,
}

impl Overlay {
    fn mount(lower_file: &[u8]) -> Option<Self> {
        let root = tempfile::tempdir().unwrap();
        for name in ["lower", "upper", "work", "merged"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        let lower = std::fs::File::create(root.path().join("lower/file")).unwrap();
        (&lower).write_all(lower_file).unwrap();
        // An overlay does not pass a flush on to its lower layer, whose files are normally never
        // written.
        lower.sync_all().unwrap();
        let at = |name: &str| root.path().join(name).display().to_string();
        let options = format!("lowerdir={},upperdir={},workdir={}", at("lower"), at("upper"), at("work"));
        let mounted = Command::new("mount")
            .args(["-t", "overlay", "overlay", "-o", &options, &at("merged")])
            .stderr(Stdio::null())
            .status();
        mounted.is_ok_and(|status| status.success()).then_some(Self { root })
    }

    fn file(&self) -> PathBuf {
        self.root.path().join("merged/file")
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        let merged: &Path = &self.root.path().join("merged");
        let _ = Command::new("umount").arg(merged).status();
    }
}

#[test]
fn pages_below_an_overlay_are_seen_and_dropped() {
    let Some(overlay) = Overlay::mount(&vec![5; 2 << 20]) else {
        skipped("an overlay cannot be mounted here");
        return;
    };
    let path = overlay.file();
    assert_eq!(file_system_of(&path).unwrap().name(), Some("overlayfs"));
    let warm = || {
        assert_eq!(std::fs::read(&path).unwrap().len(), 2 << 20);
        let warm = residency(&path).value().unwrap();
        (warm.resident_bytes, warm.method)
    };
    // A machine short of memory takes pages back at any time.
    assert!((0..20).any(|_| warm() == (2 << 20, ResidencyMethod::Mincore)), "{:?}", warm());
    assert_eq!(drop_cache(&path).unwrap().is_cold(), Some(true));
}
