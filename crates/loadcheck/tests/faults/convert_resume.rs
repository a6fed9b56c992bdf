//! Interrupted conversions whose source, target or journal changed before the next run. Right files
//! are kept, damaged files are written again or refused, and another conversion is refused.
//!
//! strace interrupts at a known call, so the files that are published by then are known too.
#![allow(clippy::print_stdout, reason = "a test says what it counted")]
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use crate::convert_support;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::convert_support::{INDEX, MANIFEST, World, differences, is_published, run, tree};
use crate::support::strace::{self, start_and_stop};
use crate::support::{assert_code, json, loadcheck, stderr};
use onelayer_testing::random_bytes;

/// The call that publishes a file.
const PUBLISH: &str = "renameat2";
const JOURNAL: &str = ".onelayer-convert/part-1-of-1.journal";

/// A world, and a target in which three files are published and the fourth is whole but has no
/// final name. `None` if there is no strace.
fn interrupted() -> Option<(World, PathBuf)> {
    if !strace::is_there() {
        return None;
    }
    let world = World::new(&[]);
    let target = world.path("unfinished");
    strace::kill_at(&world.convert(&target), PUBLISH, 1 + PUBLISHED);
    let (wrong, published) = world.assess(&target);
    assert_eq!((wrong, u32::try_from(published)), (Vec::new(), Ok(PUBLISHED)));
    Some((world, target))
}

/// Files that an interrupted conversion published.
const PUBLISHED: u32 = 3;

/// Stops the conversion right after its `nth` file is published.
fn stopped(world: &World, command: &Command, nth: u32) -> (Child, u32) {
    start_and_stop(command, PUBLISH, nth, &world.path("strace.log"))
}

fn published(target: &Path) -> Vec<String> {
    tree(target).into_keys().filter(|name| is_published(name)).collect()
}

#[track_caller]
fn assert_refused(output: &Output, code: &str) {
    let text = stderr(output);
    assert!(text.contains(&format!("error[{code}")) && !text.contains("panicked"), "no {code}: {text}");
}

/// Every change ends in the right files, or in an error that leaves right files alone; `--force`
/// always ends in the right files.
#[track_caller]
fn assert_completes_or_refuses(world: &World, target: &Path, what: &str) -> bool {
    let output = run(&world.convert(target));
    let completed = output.status.success();
    if completed {
        assert_eq!(differences(&tree(target), &world.golden), [""; 0], "{what}");
    } else {
        assert_refused(&output, "LC0");
        assert!(!target.join(MANIFEST).exists(), "{what}");
        let mut command = world.convert(target);
        command.arg("--force");
        assert_code(&run(&command), 0);
        assert_eq!(differences(&tree(target), &world.golden), [""; 0], "{what}, --force");
    }
    completed
}

#[test]
fn what_is_published_is_kept_and_not_touched() {
    let Some((world, target)) = interrupted() else { return };
    let identity = |name: &String| {
        let found = fs::metadata(target.join(name)).unwrap();
        (found.ino(), found.mtime_nsec(), found.ctime_nsec())
    };
    let before: Vec<_> = published(&target).iter().map(identity).collect();
    assert_eq!(u32::try_from(before.len()), Ok(PUBLISHED));
    let output = run(&world.convert(&target));
    assert_code(&output, 0);
    let kept = json(&output)["convert"]["result"]["files_kept"].as_u64().unwrap();
    // The fourth had all its bytes: it is published without being written again.
    assert_eq!(kept, u64::from(PUBLISHED) + 1);
    let after: Vec<_> = published(&target).iter().take(before.len()).map(identity).collect();
    assert_eq!(before, after);
    assert_eq!(differences(&tree(&target), &world.golden), [""; 0]);
}

/// A complete target is checked and not changed.
#[test]
fn a_second_run_changes_nothing() {
    let world = World::new(&[]);
    let target = world.path("golden");
    let states = || -> Vec<_> {
        let state = |name: &String| {
            let found = fs::metadata(target.join(name)).unwrap();
            (found.ino(), found.mtime(), found.mtime_nsec())
        };
        tree(&target).keys().map(state).collect()
    };
    let before = states();
    for _ in 0..2 {
        let output = run(&world.convert(&target));
        assert_code(&output, 0);
        let result = &json(&output)["convert"]["result"];
        assert_eq!(
            (result["files_written"].as_u64(), result["complete"].as_bool()),
            (Some(0), Some(true)),
            "{result}"
        );
        assert_eq!(states(), before);
        assert_eq!(differences(&tree(&target), &world.golden), [""; 0]);
    }
}

#[test]
fn another_source_is_refused() {
    let Some((world, target)) = interrupted() else { return };
    let shard = fs::read_dir(&world.source).unwrap().flatten().map(|entry| entry.path());
    let shard =
        shard.into_iter().find(|path| path.extension().is_some_and(|end| end == "safetensors")).unwrap();
    let file = fs::File::options().write(true).open(&shard).unwrap();
    let end = file.metadata().unwrap().len();
    file.write_all_at(b"another end", end - 11).unwrap();
    drop(file);
    let before = tree(&target);
    let output = run(&world.convert(&target));
    assert_refused(&output, "LC0210");
    assert_eq!(tree(&target), before, "nothing is changed");
    let mut forced = world.convert(&target);
    forced.arg("--force");
    assert_code(&run(&forced), 0);
    let fresh = world.path("fresh");
    assert_code(&run(&world.convert(&fresh)), 0);
    assert_eq!(differences(&tree(&target), &tree(&fresh)), [""; 0]);
    assert_ne!(tree(&target), world.golden);
}

#[test]
fn other_options_are_refused() {
    let Some((world, target)) = interrupted() else { return };
    for complete in [false, true] {
        if complete {
            assert_code(&run(&world.convert(&target)), 0);
        }
        let before = tree(&target);
        let others = [
            &["--max-shard-size", "20kB"][..],
            &["--merge"],
            &["--select", "layers"],
            &["--exclude", "lm_head"],
            &["--sha256"],
            &["--part", "1/2"],
        ];
        // Every part of a complete target is complete.
        for flags in &others[..others.len() - usize::from(complete)] {
            let mut command = world.convert(&target);
            command.args(*flags);
            let output = run(&command);
            assert!(!output.status.success(), "{flags:?} are accepted, complete {complete}");
            assert_refused(&output, "LC0210");
            assert_eq!(tree(&target), before, "{flags:?}: nothing is changed");
        }
    }
    let smaller = ["--max-shard-size", "20kB"];
    let mut command = world.convert(&target);
    assert_code(&run(command.args(smaller).arg("--force")), 0);
    let other = world.path("other");
    assert_code(&run(world.convert(&other).args(smaller)), 0);
    assert_eq!(differences(&tree(&target), &tree(&other)), [""; 0]);
}

/// Options that do not decide about the bytes may change between runs.
#[test]
fn other_threads_and_budgets_go_on() {
    let Some((world, target)) = interrupted() else { return };
    let mut command = loadcheck(world.directory.path());
    command.arg("convert").arg(&world.source).arg(&target);
    command.args([
        "--json",
        "-q",
        "--jobs",
        "3",
        "--budget",
        "32MiB",
        "--io",
        "buffered",
        "--no-kernel-copy",
        "--verify",
    ]);
    let output = run(&command);
    assert_code(&output, 0);
    assert!(json(&output)["convert"]["result"]["files_kept"].as_u64().unwrap() >= 3);
    assert_eq!(differences(&tree(&target), &world.golden), [""; 0]);
}

#[test]
fn a_damaged_journal_costs_work_and_never_a_wrong_file() {
    let Some((world, first)) = interrupted() else { return };
    let whole = fs::read(first.join(JOURNAL)).unwrap();
    let copy = |number: usize| {
        let target = world.path(&format!("copy-{number}"));
        let copied = Command::new("cp").arg("-a").arg(&first).arg(&target).status().unwrap();
        assert!(copied.success());
        target
    };
    let mut damages: Vec<(String, Vec<u8>)> = vec![
        ("empty".into(), Vec::new()),
        ("garbage".into(), random_bytes(5000, 1)),
        ("garbage behind it".into(), [whole.clone(), random_bytes(500, 2)].concat()),
        ("zeros, as after a power cut".into(), vec![0; whole.len()]),
        ("twice".into(), [whole.clone(), whole.clone()].concat()),
        ("lines in reverse".into(), reversed_lines(&whole)),
    ];
    for part in 1..12 {
        let at = whole.len() * part / 12;
        damages.push((format!("cut at {at}"), whole[..at].to_vec()));
        let mut flipped = whole.clone();
        flipped[at] ^= 0x20;
        damages.push((format!("a bit at {at}"), flipped));
        let mut zeros = whole.clone();
        zeros[at..].fill(0);
        damages.push((format!("zeros from {at}"), zeros));
    }
    let mut completed = 0;
    for (number, (what, bytes)) in damages.iter().enumerate() {
        let target = copy(number);
        fs::write(target.join(JOURNAL), bytes).unwrap();
        completed += u32::from(assert_completes_or_refuses(&world, &target, what));
        fs::remove_dir_all(&target).unwrap();
    }
    let target = copy(damages.len());
    fs::remove_file(target.join(JOURNAL)).unwrap();
    assert_completes_or_refuses(&world, &target, "no journal");
    println!("{completed} of {} damaged journals were gone on from", damages.len());
    assert!(completed >= 10, "{completed}");
}

fn reversed_lines(text: &[u8]) -> Vec<u8> {
    let mut lines: Vec<_> = text.split_inclusive(|byte| *byte == b'\n').collect();
    lines.reverse();
    lines.concat()
}

/// A journal cannot make it write or remove files elsewhere.
#[test]
fn a_journal_that_names_other_files_leads_nowhere() {
    let Some((world, target)) = interrupted() else { return };
    let victim = world.path("victim.safetensors");
    fs::write(&victim, "precious").unwrap();
    fs::write(target.join("mine.safetensors"), "mine").unwrap();
    let journal = target.join(JOURNAL);
    for name in ["../victim.safetensors", victim.to_str().unwrap(), "mine.safetensors", "", ".", ".."] {
        // With a right hash, which anybody can make.
        for line in [
            format!("written\t{{\"name\":{name:?},\"bytes\":8,\"blake3\":\"00\"}}\t{{\"name\":{name:?}}}"),
            format!("published\t{{\"name\":{name:?},\"modified_ns\":1}}"),
        ] {
            let hash = blake3::hash(line.as_bytes()).to_hex();
            let mut file = fs::File::options().append(true).open(&journal).unwrap();
            writeln!(file, "{line}\t{}", &hash[..16]).unwrap();
        }
    }
    let output = run(&world.convert(&target));
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert_eq!(fs::read(target.join("mine.safetensors")).unwrap(), b"mine");
    fs::remove_file(target.join("mine.safetensors")).unwrap();
    if output.status.success() {
        assert_eq!(differences(&tree(&target), &world.golden), [""; 0]);
    } else {
        assert_refused(&output, "LC0");
        assert_completes_or_refuses(&world, &target, "without the file that is not ours");
    }
}

#[test]
fn a_damaged_unfinished_file_is_never_published() {
    let Some((world, first)) = interrupted() else { return };
    let partial = tree(&first).into_keys().find(|name| name.ends_with(".partial")).unwrap();
    let whole = fs::read(first.join(&partial)).unwrap();
    let mut flipped = whole.clone();
    let last = flipped.len() - 1;
    flipped[last] ^= 1;
    for (what, bytes) in [
        ("garbage", random_bytes(whole.len(), 5)),
        ("a bit", flipped),
        ("cut", whole[..whole.len() - 1].to_vec()),
        ("empty", Vec::new()),
        ("longer", [whole.clone(), vec![1]].concat()),
    ] {
        let target = world.path("copy");
        assert!(Command::new("cp").arg("-a").arg(&first).arg(&target).status().unwrap().success());
        fs::write(target.join(&partial), bytes).unwrap();
        assert_code(&run(&world.convert(&target)), 0);
        assert_eq!(differences(&tree(&target), &world.golden), [""; 0], "{what}");
        fs::remove_dir_all(&target).unwrap();
    }
}

/// Files of an unfinished and of a finished conversion are changed, cut or removed. The next run of
/// a finished one only notices files that are missing or have another length; `verify` checks the
/// bytes.
#[test]
fn damaged_files_are_not_taken_for_right_ones() {
    let Some((world, unfinished)) = interrupted() else { return };
    let name = published(&unfinished)[1].clone();
    for (first, names, is_finished) in [
        (unfinished, vec![name.as_str()], false),
        (world.path("golden"), vec![name.as_str(), INDEX, "config.json", MANIFEST], true),
    ] {
        for name in names {
            for what in ["a bit", "cut", "longer", "removed"] {
                let target = world.path("copy");
                assert!(Command::new("cp").arg("-a").arg(&first).arg(&target).status().unwrap().success());
                let path = target.join(name);
                let mut bytes = fs::read(&path).unwrap();
                match what {
                    "a bit" => bytes[20] ^= 1,
                    "cut" => bytes.truncate(bytes.len() / 2),
                    _ => bytes.push(b'x'),
                }
                fs::write(&path, bytes).unwrap();
                if what == "removed" {
                    fs::remove_file(&path).unwrap();
                }
                let output = run(&world.convert(&target));
                let is_gone = what == "removed" && (is_published(name) || name == INDEX);
                assert!(
                    !(is_gone && output.status.success() && !target.join(name).exists()),
                    "{name} stays away"
                );
                if output.status.success() {
                    let wrong = differences(&tree(&target), &world.golden);
                    let is_seen = wrong.is_empty() || is_finished && verify(&world, &target) == Some(5);
                    assert!(is_seen, "{name}: {what}: {wrong:?}");
                } else {
                    assert_refused(&output, "LC0");
                    let mut command = world.convert(&target);
                    command.arg("--force");
                    assert_code(&run(&command), 0);
                    assert_eq!(
                        differences(&tree(&target), &world.golden),
                        [""; 0],
                        "{name}: {what}, --force"
                    );
                }
                fs::remove_dir_all(&target).unwrap();
            }
        }
    }
}

fn verify(world: &World, target: &Path) -> Option<i32> {
    let mut command = loadcheck(world.directory.path());
    run(command.arg("verify").arg(target).arg("-q")).status.code()
}

#[test]
fn a_second_converter_is_told_who_is_at_work() {
    if !strace::is_there() {
        return;
    }
    let world = World::new(&[]);
    let target = world.path("target");
    let (strace, process) = stopped(&world, &world.convert(&target), 2);
    let before = tree(&target);
    for flags in [&[][..], &["--force"]] {
        let mut second = world.convert(&target);
        second.args(flags);
        let output = run(&second);
        assert_refused(&output, "LC0212");
        assert!(stderr(&output).contains(&process.to_string()), "{}", stderr(&output));
        assert_eq!(tree(&target), before, "{flags:?}");
    }
    go_on(process);
    let output = strace.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(differences(&tree(&target), &world.golden), [""; 0]);
}

fn go_on(process: u32) {
    assert!(Command::new("kill").args(["-CONT", &process.to_string()]).status().unwrap().success());
}

/// One target must not have bytes from before and after a change of the source.
#[test]
fn a_source_that_changes_during_a_conversion_is_noticed() {
    if !strace::is_there() {
        return;
    }
    let world = World::new(&[]);
    // When the first file is published, more is left to read than the ring holds.
    let source = world.path("large");
    convert_support::write_source(&source, 2, 40 << 20);
    let shard = source.join("model-00002-of-00002.safetensors");
    let whole = fs::read(&shard).unwrap();
    for what in ["rewritten in place", "cut", "replaced"] {
        fs::write(&shard, &whole).unwrap();
        let target = world.path("target");
        let mut command = loadcheck(world.directory.path());
        command.arg("convert").arg(&source).arg(&target).args(["--budget", "8MiB", "--jobs", "1", "-q"]);
        let (strace, process) = stopped(&world, &command, 1);
        match what {
            "rewritten in place" => {
                let file = fs::File::options().write(true).open(&shard).unwrap();
                file.write_all_at(b"another end", whole.len() as u64 - 11).unwrap();
            }
            "cut" => fs::File::options().write(true).open(&shard).unwrap().set_len(1 << 20).unwrap(),
            _ => {
                let other = source.join("other");
                fs::write(&other, random_bytes(whole.len(), 3)).unwrap();
                fs::rename(other, &shard).unwrap();
            }
        }
        go_on(process);
        let output = strace.wait_with_output().unwrap();
        if what == "replaced" && output.status.success() {
            // The old file was open, and was read to its end.
            let golden = world.path("golden-large");
            fs::write(&shard, &whole).unwrap();
            assert_code(&run(loadcheck(world.directory.path()).arg("convert").arg(&source).arg(&golden)), 0);
            let (mut found, mut expected) = (tree(&target), tree(&golden));
            assert!(found.remove(MANIFEST).is_some() && expected.remove(MANIFEST).is_some());
            assert_eq!(differences(&found, &expected), [""; 0]);
        } else {
            assert!(!output.status.success(), "{what}");
            assert_refused(&output, "LC0");
            assert!(stderr(&output).contains("model-00002"), "{what}: {}", stderr(&output));
            let found = tree(&target);
            let ends = [MANIFEST, INDEX, "model-00005-of-00005.safetensors"];
            assert!(!ends.iter().any(|name| found.contains_key(*name)), "{what}: {:?}", found.keys());
        }
        fs::remove_dir_all(&target).unwrap();
    }
}

#[test]
fn an_interrupt_ends_it_in_order_and_the_next_run_goes_on() {
    if !strace::is_there() {
        return;
    }
    let mut world = World::new(&[]);
    // Too much is left to do for the conversion to end before the signal.
    world.source = world.path("large");
    convert_support::write_source(&world.source, 2, 40 << 20);
    let golden = world.path("golden-large");
    assert_code(&run(&world.convert(&golden)), 0);
    world.golden = tree(&golden);
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let target = world.path("target");
        let (strace, process) = stopped(&world, &world.convert(&target), 1);
        let sent = Command::new("kill").args([&format!("-{signal}"), &process.to_string()]).status().unwrap();
        assert!(sent.success());
        go_on(process);
        assert_code(&strace.wait_with_output().unwrap(), code);
        let (wrong, published) = world.assess(&target);
        assert_eq!(wrong, [""; 0]);
        let left = tree(&target).into_keys().find(|name| name.ends_with(".partial"));
        assert_eq!(left, None, "what is unfinished takes no room");
        assert_eq!(world.resume(&target, published), [""; 0]);
        fs::remove_dir_all(&target).unwrap();
    }
}

/// Like an array of jobs: all parts at once, one of them killed and run again, then the finish.
#[test]
fn parts_may_run_at_once_and_again_and_finish_together() {
    let world = World::new(&[]);
    let target = world.path("target");
    let part = |number: u32| {
        let mut command = world.convert(&target);
        command.args(["--part", &format!("{number}/3")]);
        command
    };
    let finish = || {
        let mut command = world.convert(&target);
        command.arg("--finish");
        run(&command)
    };
    if strace::is_there() {
        let (mut strace, process) = stopped(&world, &part(1), 1);
        assert_refused(&run(&part(1)), "LC0212");
        assert!(Command::new("kill").args(["-KILL", &process.to_string()]).status().unwrap().success());
        strace.wait().unwrap();
    }
    for early in [2, 3] {
        assert_code(&run(&part(early)), 0);
        assert_refused(&finish(), "LC0511");
        assert!(!target.join(INDEX).exists() && !target.join(MANIFEST).exists());
    }
    let children: Vec<_> =
        (1..=3).map(|number| part(number).stdout(Stdio::null()).spawn().unwrap()).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    assert_code(&finish(), 0);
    let (mut found, mut expected) = (tree(&target), world.golden.clone());
    assert!(found.remove(MANIFEST).is_some() && expected.remove(MANIFEST).is_some());
    assert_eq!(differences(&found, &expected), [""; 0]);
    assert_code(&finish(), 0);
}

/// However much it removed before the kill, it still knows the files of the old conversion.
#[test]
fn a_replacement_that_is_killed_at_the_start_leaves_nothing_of_the_old_conversion() {
    if !strace::is_there() {
        return;
    }
    let world = World::new(&[]);
    let merge = |name: &str| {
        let mut command = world.convert(&world.path(name));
        command.args(["--merge", "--force"]);
        command
    };
    assert_code(&run(&merge("fresh")), 0);
    let expected = tree(&world.path("fresh"));
    assert!(!expected.contains_key(INDEX));
    // Two calls for each file of the old conversion: its unfinished name, and its own.
    for nth in (1..2 * u32::try_from(world.files()).unwrap()).step_by(2) {
        let target = world.path("target");
        let copied = Command::new("cp").arg("-a").arg(world.path("golden")).arg(&target).status().unwrap();
        assert!(copied.success());
        strace::kill_at(&merge("target"), "unlinkat", nth);
        assert!(!target.join("model.safetensors").exists(), "it was killed too late to see anything");
        assert_code(&run(&merge("target")), 0);
        assert_eq!(differences(&tree(&target), &expected), [""; 0], "killed at removal {nth}");
        fs::remove_dir_all(&target).unwrap();
    }
}
