//! Conversions on new file systems. Where blocks can be shared, the kernel shares them, and the
//! files are the same as elsewhere.
//!
//! Needs root, loop devices and mkfs. Prints each file system that cannot be made. Mounts are made
//! in their own namespace.
#![allow(clippy::print_stdout, reason = "a test says what it counted")]
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use crate::support as cli_support;

use std::fs;
use std::process::{Command, Output};

use crate::convert_support::{MANIFEST, Tree, World, differences, run, tree, wrapped};
use crate::support::{loadcheck, stderr, stdout};
use onelayer_testing::skipped;

/// xfs needs 300 MiB. The file is sparse.
const DISK_BYTES: u64 = 320 << 20;

/// The output of a conversion inside a mounted file system, and its files.
struct Done {
    report: serde_json::Value,
    found: Tree,
}

/// True if a file system of that kind can be made and mounted here; prints if not.
fn can_mount(kind: &str) -> bool {
    let is_known = fs::read_to_string("/proc/filesystems")
        .unwrap()
        .lines()
        .any(|line| line.ends_with(&format!("\t{kind}")));
    let runs = |program: &str, flag: &str| Command::new(program).arg(flag).output().is_ok();
    let root =
        Command::new("unshare").args(["-m", "true"]).output().is_ok_and(|output| output.status.success());
    if !is_known || !runs(&format!("mkfs.{kind}"), "-V") || !root {
        skipped(format_args!("{kind}: it takes root, mkfs.{kind} and a kernel with it"));
        return false;
    }
    true
}

/// Mounts a new file system at `place` of `world` and runs `script` there. `$1` is the place, and
/// the other arguments are `command`.
fn on_new_disk(world: &World, kind: &str, script: &str, command: &Command) -> Output {
    let (image, place) = (world.path(&format!("{kind}.image")), world.path("place"));
    fs::create_dir_all(&place).unwrap();
    fs::File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
    let mount = format!(
        "mkfs.{kind} -q {image} > /dev/null && mount -o loop {image} \"$1\" || exit 99; {script}",
        image = image.display()
    );
    let output = run(&wrapped(["unshare", "-m", "sh", "-c", &mount, "sh", place.to_str().unwrap()], command));
    assert_ne!(output.status.code(), Some(99), "{}", stderr(&output));
    fs::remove_file(image).unwrap();
    output
}

/// Converts a copy of the source, on one new file system with its target.
fn convert_on(world: &World, kind: &str, flags: &[&str]) -> Done {
    let (place, out) = (world.path("place"), world.path("out"));
    let mut command = loadcheck(world.directory.path());
    command.arg("convert").arg(place.join("source")).arg(place.join("target"));
    command.args(["--budget", "8MiB", "--json", "-q", "--verify"]).args(flags);
    let script = format!(
        "cp -a {source} \"$1\"/source && sync || exit 99; place=$1; shift; \"$@\" || exit $?; \
         cp -a \"$place\"/target {out}",
        source = world.source.display(),
        out = out.display()
    );
    let output = on_new_disk(world, kind, &script, &command);
    assert!(output.status.success(), "{kind} {flags:?}: {}", stderr(&output));
    let found = tree(&out);
    fs::remove_dir_all(out).unwrap();
    Done { report: serde_json::from_str(&stdout(&output)).unwrap(), found }
}

/// The manifest has the path of the source, which is another one.
fn without_manifest(tree: &Tree) -> Tree {
    tree.iter()
        .filter(|(name, _)| *name != MANIFEST)
        .map(|(name, bytes)| (name.clone(), bytes.clone()))
        .collect()
}

#[test]
fn blocks_are_shared_where_they_can_be_and_bytes_are_the_same_everywhere() {
    // The data of converted files starts on a block: nearly all blocks can be shared.
    let mut world = World::new(&[]);
    world.source = world.path("golden");
    for kind in ["ext4", "xfs", "btrfs"] {
        if !can_mount(kind) {
            continue;
        }
        for (flags, may_share) in [(&[][..], true), (&["--no-kernel-copy"], false)] {
            let done = convert_on(&world, kind, flags);
            let expected = without_manifest(&world.golden);
            assert_eq!(differences(&without_manifest(&done.found), &expected), [""; 0], "{kind} {flags:?}");
            let result = &done.report["convert"]["result"];
            let (shared, written) =
                (result["cloned_bytes"].as_u64().unwrap(), result["written_bytes"].as_u64().unwrap());
            println!("{kind} {flags:?}: {shared} of {written} bytes are shared, {result}");
            if may_share && kind != "ext4" {
                assert!(shared > written / 2, "{kind}: {shared} of {written}");
            } else {
                assert_eq!(shared, 0, "{kind} {flags:?}");
            }
        }
    }
}

/// A conversion that is killed with shared blocks in an unfinished file, and goes on.
#[test]
fn a_killed_conversion_that_shares_blocks_goes_on() {
    let mut world = World::new(&[]);
    world.source = world.path("golden");
    if !cli_support::strace::is_there() {
        return;
    }
    for kind in ["xfs", "btrfs"] {
        if !can_mount(kind) {
            continue;
        }
        let (place, out) = (world.path("place"), world.path("out"));
        let mut command = loadcheck(world.directory.path());
        command.arg("convert").arg(place.join("source")).arg(place.join("target"));
        command.args(["--budget", "8MiB", "--json", "-q", "--jobs", "1"]);
        // Killed at each call that shares blocks and at each sync after it, with one target: each
        // run goes on.
        let script = format!(
            "cp -a {source} \"$1\"/source && sync || exit 99; place=$1; shift; \
             for kill in ioctl:1 ioctl:2 fsync:2 renameat2:2 fsync:5 renameat2:1 ioctl:1 ioctl:2; do \
               strace -f -qq -o /dev/null -e trace=ioctl,fsync,renameat2 -P \"$place\"/target \
                 -e inject=${{kill%:*}}:signal=SIGKILL:when=${{kill#*:}} -- \"$@\" > /dev/null 2>&1; \
             done; \"$@\" || exit $?; cp -a \"$place\"/target {out}",
            source = world.source.display(),
            out = out.display()
        );
        let output = on_new_disk(&world, kind, &script, &command);
        assert!(output.status.success(), "{kind}: {}", stderr(&output));
        let found = without_manifest(&tree(&out));
        assert_eq!(differences(&found, &without_manifest(&world.golden)), [""; 0], "{kind}");
        fs::remove_dir_all(&out).unwrap();
    }
}
