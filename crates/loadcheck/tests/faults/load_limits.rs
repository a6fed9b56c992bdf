//! Loads where there is little of something: descriptors, locked memory, address space, memory of a
//! control group; and loads from places that are not like others: file systems in memory, in
//! layers, read-only, and files of any age. With every source.
//!
//! What a machine does not allow is skipped, aloud.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on panics, and says what it counted"
)]

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

use crate::load_support::{End, SOURCES, World};
use crate::support::group::group_or_skip;
use crate::support::{
    in_own_mounts, json, loadcheck, program_for_all_users, run_command, stderr, wrapped, write_sparse,
};
use onelayer::units::MIB;
use onelayer_testing::TestTensor;
use onelayer_testing::skipped;

/// Runs a load under a limit of the shell.
fn under(limit: &str, command: &Command) -> Output {
    let script = format!("ulimit {limit} || exit 99; exec \"$@\"");
    let output = run_command(&wrapped(["sh", "-c", &script, "sh"], command));
    assert_ne!(output.status.code(), Some(99), "{}", stderr(&output));
    output
}

#[track_caller]
fn assert_delivered(world: &World, output: &Output, what: &str) {
    assert_eq!(world.judge(output), Ok(End::Delivered), "{what}: {}", stderr(output));
}

#[test]
fn few_descriptors_are_enough_for_hundreds_of_files() {
    let tensor = |layer: u64| TestTensor::random(format!("model.layers.{layer}.weight"), 4097, layer);
    let shards: Vec<_> = (0..300).map(|layer| vec![tensor(layer)]).collect();
    let world = World::of(&shards);
    let place = world.place("few");
    for io in SOURCES {
        assert_delivered(&world, &under("-n 64", &world.load(io, &place)), io);
    }
}

/// As somebody who may not lock memory: who may is not limited.
#[test]
fn without_memory_that_may_be_locked_it_loads() {
    let world = World::new();
    let place = world.place("unlocked");
    for folder in [world.model.parent().unwrap(), &world.model, &place] {
        fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
    }
    let program = program_for_all_users(&place);
    for kib in [0, 64] {
        for io in SOURCES {
            let script = format!("ulimit -l {kib}; shift; exec \"$0\" \"$@\"");
            let words = ["sh", "-c", &script, program.to_str().unwrap()];
            let mut command = wrapped(words, &world.load(io, &place));
            if rustix::process::getuid().is_root() {
                command.uid(65534).gid(65534);
            }
            let output = command.output().unwrap();
            assert_delivered(&world, &output, &format!("{io}, {kib} KiB"));
            println!("{io}, {kib} KiB: {}", json(&output)["notes"]);
        }
    }
}

/// Too little is told, by whichever process notices; enough is enough. Where the program cannot
/// even say its version in a MiB less, the system's loader and the runtime end it before it can
/// tell.
#[test]
fn too_little_address_space_is_told() {
    let world = World::new();
    let place = world.place("narrow");
    let mut counts = BTreeMap::new();
    for mebibytes in (28..64).step_by(2).chain([100, 200]) {
        let mut version = loadcheck(&place);
        version.arg("--version");
        if !under(&format!("-v {}", (mebibytes - 1) << 10), &version).status.success() {
            continue;
        }
        for io in SOURCES {
            let limit = format!("-v {}", mebibytes << 10);
            let output = under(&limit, &world.load(io, &place));
            let end =
                world.judge(&output).unwrap_or_else(|problem| panic!("{io}, {mebibytes} MiB: {problem}"));
            *counts.entry(end).or_insert(0) += 1;
            assert!(end != End::Killed, "{io}, {mebibytes} MiB: {}", stderr(&output));
        }
    }
    println!("limits of address space: {counts:?}");
    assert!(counts[&End::Delivered] > 10 && counts[&End::Told] > 3, "{counts:?}");
}

/// A group that holds the ring and 64 MiB, and a checkpoint of ten times that: what has been read
/// does not add up.
#[test]
fn a_checkpoint_of_ten_times_the_limit_goes_through_a_control_group() {
    let directory = tempfile::tempdir().unwrap();
    let limit_bytes = (8 + 64) * MIB;
    write_sparse(&directory.path().join("large.safetensors"), 10 * limit_bytes);
    for io in SOURCES {
        let Some(group) = group_or_skip(Some(limit_bytes)) else { return };
        let mut command = loadcheck(directory.path());
        command.args(["run", "large.safetensors", "--device", "none", "--budget", "8MiB", "--io", io]);
        command.args(["--json", "-q"]);
        group.enter_on_spawn(&mut command).unwrap();
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{io}: {}", stderr(&output));
        let memory = group.memory();
        assert_eq!(memory.oom_kill_count.value().unwrap_or(0), 0, "{io}");
        println!("{io}: {} at most", memory.peak_bytes.value().map_or(0, |bytes| bytes / MIB));
    }
}

/// Mounts something at `$1`, as `script` says, with `$2` as the checkpoint, and loads what lies in
/// `at` below it.
fn load_mounted(world: &World, what: &str, script: &str, at: &str) {
    let mounted = world.path("mounted");
    fs::create_dir_all(&mounted).unwrap();
    let place = world.place("beside");
    let script =
        format!("{script} || exit 99; shift; exec \"$@\"").replace("$2", world.model.to_str().unwrap());
    for io in SOURCES {
        let command = World::load_of(mounted.join(at), io, &place);
        let Some(output) = in_own_mounts(what, &script, &mounted, &command) else { return };
        if output.status.code() == Some(99) {
            skipped(format_args!("{what}: it cannot be mounted here: {}", stderr(&output)));
            return;
        }
        assert_delivered(world, &output, &format!("{what}, {io}"));
        println!("{what}, {io}: {}", json(&output)["notes"]);
    }
}

#[test]
fn file_systems_in_memory_and_in_layers_are_read() {
    let world = World::new();
    load_mounted(&world, "tmpfs", "mount -t tmpfs none \"$1\" && cp -r $2/. \"$1\"", "");
    load_mounted(&world, "ramfs", "mount -t ramfs none \"$1\" && cp -r $2/. \"$1\"", "");
    let layers = "mount -t tmpfs none \"$1\" && mkdir \"$1\"/empty \"$1\"/merged && \
                  mount -t overlay none -o lowerdir=\"$1\"/empty:$2 \"$1\"/merged";
    load_mounted(&world, "overlayfs", layers, "merged");
    // The file that is written to lies in the upper layer from then on.
    let upper = "mount -t tmpfs none \"$1\" && mkdir \"$1\"/up \"$1\"/work \"$1\"/merged && \
                 mount -t overlay none -o userxattr,lowerdir=$2,upperdir=\"$1\"/up,workdir=\"$1\"/work \"$1\"/merged \
                 && touch \"$1\"/merged/model-00001-of-00002.safetensors";
    load_mounted(&world, "overlayfs with an upper layer", upper, "merged");
}

/// Neither the checkpoint nor the folder that the program runs in can be written.
#[test]
fn places_that_are_read_only_are_enough() {
    let world = World::new();
    let place = world.path("");
    for io in SOURCES {
        let command = World::load_of(&world.model, io, &place);
        let script = "mount --bind \"$1\" \"$1\" && mount -o remount,ro,bind \"$1\" && cd \"$1\" && \
                      ! touch tried 2> /dev/null || exit 99; shift; exec \"$@\"";
        let Some(output) = in_own_mounts("a read-only file system", script, &place, &command) else { return };
        assert_delivered(&world, &output, io);
    }
}

fn set_time(path: &Path, time: SystemTime) {
    OpenOptions::new().write(true).open(path).unwrap().set_modified(time).unwrap();
}

/// Before 1970, at the end of 64-bit nanoseconds, where file systems end, and in the future.
#[test]
fn files_of_any_age_are_read() {
    let world = World::new();
    let place = world.place("aged");
    let epoch = SystemTime::UNIX_EPOCH;
    let times = [
        epoch,
        epoch - Duration::from_secs(1),
        epoch - Duration::from_secs(1 << 31),
        epoch + Duration::from_nanos(u64::MAX / 2),
        epoch + Duration::from_secs(9_223_372_037),
        epoch + Duration::from_secs(15_032_385_535),
        SystemTime::now() + Duration::from_secs(86_400),
    ];
    for (number, time) in times.into_iter().enumerate() {
        for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
            set_time(&world.model.join(shard), time);
        }
        let io = SOURCES[number % SOURCES.len()];
        let output = world.load(io, &place).output().unwrap();
        assert_delivered(&world, &output, &format!("{time:?}, {io}"));
    }
}
