//! Leaks that are planted in a load, one for each kind of memory: measured as the program measures,
//! all of them are found.
//!
//! What a process holds is nobody else's doing only if nothing else runs in it, so each scenario is
//! a test that is ignored, and that another one runs in a process of its own, on the simulated CUDA
//! driver.
#![allow(
    clippy::unwrap_used,
    unsafe_code,
    clippy::print_stdout,
    reason = "a leak is planted with system calls; a scenario tells what it measured"
)]

use std::fs::File;
use std::io::Write as _;
use std::mem::forget;
use std::path::Path;

use clap::Parser as _;

use super::*;
use crate::args::{Cli, Command};
use crate::config::{Budgets, LoadConfig};
use crate::leak::{slopes_of, stated};
use crate::report::{KindSlope, SlopeVerdict};

use onelayer_testing::cuda_sim::SimRun;

const MIB: usize = 1 << 20;
/// Cycles to warm up, and cycles in all: a leak is found within 30.
const WARMUP: u64 = 3;
const COUNT: u32 = 30;

/// Four tensors of a MiB.
fn write_model(folder: &Path) {
    let entry = |layer: usize| {
        let (start, end) = (layer * MIB, (layer + 1) * MIB);
        format!(
            "\"model.layers.{layer}.mlp.weight\":{{\"dtype\":\"U8\",\"shape\":[{MIB}],\"data_offsets\":[{start},{end}]}}"
        )
    };
    let header = format!("{{{}}}", (0..4).map(entry).collect::<Vec<_>>().join(","));
    let mut file = File::create(folder.join("model.safetensors")).unwrap();
    file.write_all(&u64::try_from(header.len()).unwrap().to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let bytes: Vec<u8> = (0..4 * MIB).map(|index| u8::try_from(index % 251).unwrap()).collect();
    file.write_all(&bytes).unwrap();
}

fn load_of(folder: &Path, device: &str) -> CycleLoad {
    let words = ["loadcheck", "run", folder.to_str().unwrap(), "--device", device, "--budget", "8MiB"];
    let Command::Run(args) = Cli::try_parse_from(words).unwrap().command else {
        panic!("`run` was asked for")
    };
    let (load, problems) = LoadConfig::new(&args.load, folder.to_owned());
    assert!(problems.is_empty());
    let budgets = Budgets { host_bytes: 8 << 20, device_bytes: None, device_reserve_bytes: 0 };
    CycleLoad { load, budgets, promised_bytes: 28 << 20, tensor_bytes: 4 << 20 }
}

/// The slopes of cycles that call `plant` once each.
fn slopes(device: &str, mut plant: impl FnMut(&LoadedLayer, &CycleLoad)) -> Vec<KindSlope> {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path());
    let loads = [load_of(folder.path(), device)];
    let cancel = AtomicBool::new(false);
    let mut cycles = Cycles::begin(&loads, &cancel).unwrap();
    let mut points = Vec::new();
    let ended = cycles.run(COUNT, &mut |point| points.push(point), &mut |layer| {
        if layer.index() == 0 {
            plant(layer, &loads[0]);
        }
        touch(layer)
    });
    assert!(ended.is_ok());
    let finished = cycles.finish(ended).unwrap();
    assert!(finished.problem.is_none());
    let slopes = slopes_of(&points, WARMUP, &stated(&[]).unwrap());
    for slope in &slopes {
        let (low, high) = (slope.low_bytes_per_cycle, slope.high_bytes_per_cycle);
        println!("{device} {} {:?} {low:?} {high:?} {:?}", slope.kind, slope.bytes_per_cycle, slope.verdict);
    }
    slopes
}

/// The kinds that grow.
fn leaks(slopes: &[KindSlope]) -> Vec<&str> {
    let leaks = slopes.iter().filter(|slope| slope.verdict == SlopeVerdict::Leak);
    leaks.map(|slope| slope.kind.as_str()).collect()
}

fn of<'a>(slopes: &'a [KindSlope], kind: &str) -> &'a KindSlope {
    slopes.iter().find(|slope| slope.kind == kind).unwrap()
}

/// A slope of a MiB a cycle, as far as pages go.
#[track_caller]
fn assert_a_mib(slope: &KindSlope) {
    let mib = crate::numbers::to_f64(1 << 20);
    assert!((slope.bytes_per_cycle.unwrap() / mib - 1.0).abs() < 0.05, "{slope:?}");
}

fn alone(scenario: &str) {
    let outcome = SimRun::again(module_path!(), scenario).run();
    outcome.assert_success();
    assert!(outcome.stdout.contains("1 passed"), "{}", outcome.stdout);
}

#[test]
fn nothing_grows_where_nothing_is_planted() {
    alone("scenario_clean_host");
    alone("scenario_clean_device");
}

#[test]
fn a_leak_of_host_memory_is_found() {
    alone("scenario_host");
}

#[test]
fn a_leak_of_mapped_file_pages_is_found() {
    alone("scenario_file");
}

#[test]
fn a_leak_of_page_locked_memory_is_found() {
    alone("scenario_pinned");
}

#[test]
fn a_leak_of_device_memory_is_found() {
    alone("scenario_device");
}

#[test]
#[ignore = "scenario"]
fn scenario_clean_host() {
    let found = slopes("host", |_, _| {});
    assert_eq!(leaks(&found), [""; 0], "{found:?}");
    assert_eq!(of(&found, "live").points_bytes, vec![0; 27]);
}

#[test]
#[ignore = "scenario"]
fn scenario_clean_device() {
    let found = slopes("cuda:0", |_, _| {});
    assert_eq!(leaks(&found), [""; 0], "{found:?}");
    let vram = of(&found, "vram");
    assert!(vram.points_bytes.iter().all(|bytes| Some(*bytes) == vram.floor_bytes), "{vram:?}");
}

#[test]
#[ignore = "scenario"]
fn scenario_host() {
    let found = slopes("host", |_, _| forget(vec![1_u8; MIB]));
    assert_eq!(leaks(&found), ["host", "rss"], "{found:?}");
    assert_a_mib(of(&found, "host"));
}

#[test]
#[ignore = "scenario"]
fn scenario_file() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(64 << 20).unwrap();
    let mut offset = 0;
    let found = slopes("host", |_, _| {
        // SAFETY: nobody writes to the file, which has no name.
        let map = unsafe { memmap2::MmapOptions::new().offset(offset).len(MIB).map(&file) }.unwrap();
        assert_eq!(map.iter().step_by(4096).map(|byte| u64::from(*byte)).sum::<u64>(), 0);
        offset += 1 << 20;
        forget(map);
    });
    assert_eq!(leaks(&found), ["rss", "file"], "{found:?}");
    assert_a_mib(of(&found, "file"));
}

#[test]
#[ignore = "scenario"]
fn scenario_pinned() {
    let mut is_refused = false;
    let found = slopes("host", |_, _| {
        let bytes = vec![1_u8; MIB].leak();
        // SAFETY: the range is the vector's, which stays.
        is_refused |= unsafe { libc::mlock(bytes.as_ptr().cast(), bytes.len()) } != 0;
    });
    if is_refused {
        onelayer_testing::skipped("so much memory cannot be locked here");
        return;
    }
    assert_eq!(leaks(&found), ["host", "rss", "pinned"], "{found:?}");
    assert_a_mib(of(&found, "pinned"));
}

/// A tensor that is never dropped keeps its layer.
#[test]
#[ignore = "scenario"]
fn scenario_device() {
    let found = slopes("cuda:0", |layer, _| forget(layer.tensors().next().unwrap()));
    assert_eq!(leaks(&found), ["vram", "live"], "{found:?}");
    assert!(of(&found, "vram").bytes_per_cycle >= Some(crate::numbers::to_f64(1 << 20)));
}
