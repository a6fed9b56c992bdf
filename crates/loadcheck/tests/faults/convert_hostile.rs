//! Hostile targets: names that files, links, pipes, folders or other conversions have already, and
//! systems with too little room, too few open files, or no right to write.
//!
//! Tests that need a mount make one where user namespaces are allowed, and print a line where not.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use crate::convert_support;
use crate::support as cli_support;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Output};

use crate::convert_support::{INDEX, MANIFEST, Tree, World, differences, run, tree, wrapped};
use crate::support::{assert_code, in_own_mounts, stderr};
use onelayer_testing::TestTensor;

/// Things that may have a name already.
const PLANTS: [&str; 6] =
    ["a file", "a link to a file", "a link to nothing", "a link to a folder", "a pipe", "a folder"];

/// Makes one of these things at a path. `victims` is a folder with `file` and `folder/`, which must
/// not change.
fn plant(what: &str, path: &Path, victims: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    match what {
        "a file" => fs::write(path, "somebody else's").unwrap(),
        "a link to a file" => symlink(victims.join("file"), path).unwrap(),
        "a link to nothing" => symlink(victims.join("nothing"), path).unwrap(),
        "a link to a folder" => symlink(victims.join("folder"), path).unwrap(),
        "a pipe" => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
        _ => fs::create_dir(path).unwrap(),
    }
}

/// The folder that links lead to.
fn victims(world: &World) -> (std::path::PathBuf, Tree) {
    let folder = world.path("victims");
    fs::create_dir_all(folder.join("folder")).unwrap();
    fs::write(folder.join("file"), "precious").unwrap();
    let before = tree(&folder);
    (folder, before)
}

fn first_file(world: &World) -> String {
    world.golden.keys().find(|name| name.ends_with(".safetensors")).unwrap().clone()
}

fn last_file(world: &World) -> String {
    world.golden.keys().rfind(|name| name.ends_with(".safetensors")).unwrap().clone()
}

fn force(command: Command) -> Command {
    let mut command = command;
    command.arg("--force");
    command
}

/// The message has the code, and names the file.
#[track_caller]
fn assert_refused(output: &Output, code: &str, named: &str) {
    let text = stderr(output);
    assert!(output.status.code().is_some_and(|code| code != 0), "{}: {text}", output.status);
    assert!(
        text.contains(&format!("error[{code}]")) && text.contains(named),
        "no {code}, or no {named}: {text}"
    );
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn a_name_that_is_taken_is_refused_before_anything_is_written() {
    let world = World::new(&[]);
    let (victims, before) = victims(&world);
    for name in [&first_file(&world), &last_file(&world), INDEX, MANIFEST, "config.json"] {
        for what in PLANTS {
            let target = world.path("target");
            plant(what, &target.join(name), &victims);
            let planted = tree(&target);
            let output = run(&world.convert(&target));
            assert_refused(&output, "LC0210", name);
            assert_eq!(tree(&target), planted, "{what} as {name}: nothing is written");
            assert_eq!(tree(&victims), before, "{what} as {name}");
            fs::remove_dir_all(&target).unwrap();
        }
    }
}

#[test]
fn force_replaces_what_is_in_the_way_and_follows_no_link() {
    let world = World::new(&[]);
    let (victims, before) = victims(&world);
    for name in [&first_file(&world), &last_file(&world), INDEX, MANIFEST, "config.json"] {
        for what in PLANTS {
            let target = world.path("target");
            plant(what, &target.join(name), &victims);
            let output = run(&force(world.convert(&target)));
            if what == "a folder" {
                assert_refused(&output, "LC0210", name);
            } else {
                assert_code(&output, 0);
                assert_eq!(differences(&tree(&target), &world.golden), [""; 0], "{what} as {name}");
            }
            assert_eq!(tree(&victims), before, "{what} as {name}");
            fs::remove_dir_all(&target).unwrap();
        }
    }
}

/// Temporary names of a conversion. Another user with write access to the target can plant them,
/// and gains nothing.
#[test]
fn planted_names_of_unfinished_files_lead_nowhere() {
    let world = World::new(&[]);
    let (victims, before) = victims(&world);
    let partial = format!(".{}.partial", first_file(&world));
    let journal = ".onelayer-convert/part-1-of-1.journal";
    for name in [&partial, ".config.json.partial", ".onelayer-convert", journal] {
        for what in PLANTS {
            let target = world.path("target");
            plant(what, &target.join(name), &victims);
            let output = run(&world.convert(&target));
            assert_eq!(tree(&victims), before, "{what} as {name}");
            let (wrong, _) = world.assess(&target);
            assert_eq!(wrong, [""; 0], "{what} as {name}");
            if output.status.success() {
                assert_eq!(differences(&tree(&target), &world.golden), [""; 0], "{what} as {name}");
            } else {
                let text = stderr(&output);
                assert!(text.contains("error[LC0") && text.contains("target"), "{what} as {name}: {text}");
            }
            fs::remove_dir_all(&target).unwrap();
        }
    }
}

/// A pipeline whose component folder exists as a link.
#[test]
fn a_folder_of_a_component_that_is_a_link_is_refused() {
    let world = World::new(&[]);
    let (victims, before) = victims(&world);
    let source = world.path("pipeline");
    for (number, component) in (0..).zip(["unet", "vae"]) {
        fs::create_dir_all(source.join(component)).unwrap();
        let tensors = [
            TestTensor::random("down.0.weight", 5000, number),
            TestTensor::random("x.weight", 70, 9 + number),
        ];
        let path = source.join(component).join("diffusion_pytorch_model.safetensors");
        onelayer_testing::write_file(&path, &tensors, 0);
        fs::write(source.join(component).join("config.json"), "{}").unwrap();
    }
    let index = r#"{"_class_name": "P", "unet": ["diffusers", "U"], "vae": ["diffusers", "V"]}"#;
    fs::write(source.join("model_index.json"), index).unwrap();
    for what in PLANTS {
        for flags in [&[][..], &["--force"]] {
            let target = world.path("target");
            plant(what, &target.join("vae"), &victims);
            let mut command = cli_support::loadcheck(world.directory.path());
            command.arg("convert").arg(&source).arg(&target).arg("-q").args(flags);
            let output = run(&command);
            if what == "a folder" {
                assert_code(&output, 0);
                assert!(
                    target.join("vae/config.json").is_file() && target.join("unet/config.json").is_file()
                );
            } else {
                assert_refused(&output, "LC0210", "vae");
            }
            assert_eq!(tree(&victims), before, "{what}");
            fs::remove_dir_all(&target).unwrap();
        }
    }
}

#[test]
fn source_and_target_may_not_be_one_directory_however_it_is_named() {
    let world = World::new(&[]);
    let before = tree(&world.source);
    let link = world.path("link");
    symlink(&world.source, &link).unwrap();
    let shard = fs::read_dir(&world.source).unwrap().flatten().map(|entry| entry.path());
    let shard =
        shard.into_iter().find(|path| path.extension().is_some_and(|end| end == "safetensors")).unwrap();
    let index = world.source.join(INDEX);
    let dotted = world.source.join("../source/.");
    for (source, target) in [
        (&world.source, &world.source),
        (&world.source, &link),
        (&link, &world.source),
        (&world.source, &dotted),
        (&shard, &world.source),
        (&index, &world.source),
    ] {
        for flags in [&[][..], &["--force"]] {
            let mut command = cli_support::loadcheck(world.directory.path());
            command.arg("convert").arg(source).arg(target).arg("-q").args(flags);
            assert_refused(&run(&command), "LC0210", "source");
            assert_eq!(tree(&world.source), before, "{} to {}", source.display(), target.display());
        }
    }
}

#[test]
fn a_target_inside_the_source_is_refused() {
    let world = World::new(&[]);
    fs::create_dir(world.source.join("there")).unwrap();
    let link = world.path("elsewhere");
    symlink(world.source.join("there"), &link).unwrap();
    let before = tree(&world.source);
    for target in ["layers", "there", "there/layers", "a/b/c"].map(|name| world.source.join(name)) {
        assert_refused(&run(&world.convert(&target)), "LC0210", "inside the source");
        assert_eq!(tree(&world.source), before, "{}", target.display());
    }
    assert_refused(&run(&world.convert(&link.join("layers"))), "LC0210", "inside the source");
    assert_eq!(tree(&world.source), before);
}

/// A source inside the target is only read.
#[test]
fn a_source_inside_the_target_stays_as_it_is() {
    let world = World::new(&[]);
    let before = tree(&world.source);
    let target = world.path("whole");
    fs::create_dir(&target).unwrap();
    let inside = target.join("source");
    fs::rename(&world.source, &inside).unwrap();
    let mut command = cli_support::loadcheck(world.directory.path());
    command.arg("convert").arg(&inside).arg(&target).arg("-q");
    let output = run(&command);
    assert_eq!(tree(&inside), before);
    if output.status.success() {
        fs::remove_dir_all(&inside).unwrap();
        let mut expected = world.golden.clone();
        let mut found = tree(&target);
        // It has the path of the source, which is another one.
        assert!(expected.remove(MANIFEST).is_some() && found.remove(MANIFEST).is_some());
        assert_eq!(differences(&found, &expected), [""; 0]);
    }
}

/// `--force` does not replace or remove the source, by whatever path it is reached.
#[test]
fn a_source_that_lies_in_the_target_under_a_name_of_its_own_is_refused() {
    let world = World::new(&[]);
    let whole = world.path("whole");
    let merge = |source: &Path, target: &Path, flags: &[&str]| {
        let mut command = cli_support::loadcheck(world.directory.path());
        command.arg("convert").arg(source).arg(target).args(["-q", "--force"]).args(flags);
        run(&command)
    };
    assert_code(&merge(&world.source, &whole, &["--merge"]), 0);
    let made = tree(&whole);
    // The merged file is reached by a link, and would be replaced; or removed as a file of another
    // conversion.
    let links = world.path("links");
    fs::create_dir(&links).unwrap();
    symlink(whole.join("model.safetensors"), links.join("model.safetensors")).unwrap();
    for flags in [&["--merge", "--sha256"][..], &[]] {
        assert_refused(&merge(&links, &whole, flags), "LC0210", "model.safetensors");
        assert_eq!(tree(&whole), made, "{flags:?}");
    }
    // The source is a component of the pipeline in the target.
    let pipeline = world.path("pipeline");
    for component in ["unet", "vae"] {
        copy_files(&whole, &pipeline.join(component), &["model.safetensors", "config.json"]);
    }
    fs::write(pipeline.join("model_index.json"), r#"{"unet": ["a", "b"], "vae": ["a", "b"]}"#).unwrap();
    let target = world.path("target");
    assert_code(&merge(&pipeline, &target, &[]), 0);
    let made = tree(&target);
    assert_refused(&merge(&target.join("unet"), &target, &[]), "LC0210", "target/unet/");
    assert_eq!(tree(&target), made);
    // A component that is a link into the target.
    let linked = world.path("linked");
    fs::create_dir(&linked).unwrap();
    copy_files(&pipeline, &linked, &["model_index.json"]);
    symlink(pipeline.join("vae"), linked.join("vae")).unwrap();
    let target = world.path("second");
    copy_files(&whole, &target.join("unet"), &["model.safetensors"]);
    symlink(target.join("unet"), linked.join("unet")).unwrap();
    let made = tree(&target);
    assert_refused(&merge(&linked, &target, &["--merge"]), "LC0210", "unet/model.safetensors");
    assert_eq!(tree(&target), made);
    // An index whose shards lie elsewhere.
    let index = format!(r#"{{"weight_map": {{"{}": "unet/model.safetensors"}}}}"#, "x");
    fs::write(target.join(INDEX), index).unwrap();
    let made = tree(&target);
    let output = merge(&target.join(INDEX), &target, &[]);
    assert!(!output.status.success());
    assert_eq!(tree(&target), made);
}

fn copy_files(from: &Path, to: &Path, names: &[&str]) {
    fs::create_dir_all(to).unwrap();
    for name in names {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

/// A journal of another conversion does not make it remove other files, even if its hashes are
/// right.
#[test]
fn force_removes_nothing_elsewhere_because_a_journal_names_it() {
    let world = World::new(&[]);
    let victim = world.path("victim.safetensors");
    fs::write(&victim, "precious").unwrap();
    let source = world.source.file_name().unwrap().to_str().unwrap().to_owned();
    let long = format!("{}.safetensors", "x".repeat(300));
    let own = format!("../{source}/model.safetensors");
    for name in [
        "../victim.safetensors",
        victim.to_str().unwrap(),
        "mine/../../victim.safetensors",
        "",
        ".",
        "..",
        "mine/..",
        "mine/",
        "mine.txt",
        "nul\\u0000.safetensors",
        &long,
        &own,
        ".onelayer-convert",
    ] {
        let target = world.path("target");
        fs::create_dir_all(target.join(".onelayer-convert")).unwrap();
        fs::create_dir(target.join("mine")).unwrap();
        fs::write(target.join("mine.txt"), "mine").unwrap();
        let mut journal = String::new();
        for line in [
            "begun\t{\"fingerprint\":\"abc\",\"process\":\"x\"}".to_owned(),
            format!("written\t{{\"name\":\"{name}\",\"bytes\":8,\"blake3\":\"00\"}}\t{{}}"),
        ] {
            let hash = blake3::hash(line.as_bytes()).to_hex();
            journal.push_str(&format!("{line}\t{}\n", &hash[..16]));
        }
        fs::write(target.join(".onelayer-convert/part-1-of-1.journal"), journal).unwrap();
        assert_refused(&run(&world.convert(&target)), "LC0210", "another source");
        assert_code(&run(&force(world.convert(&target))), 0);
        assert_eq!(fs::read(&victim).unwrap(), b"precious", "{name}");
        assert_eq!(fs::read(target.join("mine.txt")).unwrap(), b"mine", "{name}");
        fs::remove_file(target.join("mine.txt")).unwrap();
        fs::remove_dir(target.join("mine")).unwrap();
        assert_eq!(differences(&tree(&target), &world.golden), [""; 0], "{name}");
        fs::remove_dir_all(&target).unwrap();
    }
}

#[test]
fn what_is_not_ours_in_the_target_stays() {
    let world = World::new(&[]);
    let target = world.path("target");
    fs::create_dir_all(target.join("notes")).unwrap();
    fs::write(target.join("notes/mine.txt"), "mine").unwrap();
    fs::write(target.join("README.md"), "mine too").unwrap();
    let mut expected = tree(&target);
    for flags in [&[][..], &["--force"]] {
        let mut command = world.convert(&target);
        command.args(flags);
        assert_code(&run(&command), 0);
        expected.extend(world.golden.clone());
        assert_eq!(differences(&tree(&target), &expected), [""; 0]);
    }
}

#[test]
fn modes_are_those_that_the_umask_leaves() {
    let world = World::new(&[]);
    for (umask, file, folder) in [("022", 0o644, 0o755), ("077", 0o600, 0o700), ("002", 0o664, 0o775)] {
        let target = world.path("a/b");
        let script = format!("umask {umask}; exec \"$@\"");
        assert_code(&run(&wrapped(["sh", "-c", &script, "sh"], &world.convert(&target))), 0);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for entry in fs::read_dir(&target).unwrap() {
            let path = entry.unwrap().path();
            assert_eq!(mode(&path), file, "{} with umask {umask}", path.display());
        }
        assert_eq!((mode(&target), mode(target.parent().unwrap())), (folder, folder), "umask {umask}");
        fs::remove_dir_all(world.path("a")).unwrap();
    }
}

/// Three hundred shards, three hundred files to write, and 64 descriptors.
#[test]
fn few_descriptors_are_enough_for_many_files() {
    let world = World::new(&[]);
    let source = world.path("many");
    fs::create_dir(&source).unwrap();
    let tensor = |layer: u64, part: &str| {
        TestTensor::random(format!("model.layers.{layer}.{part}.weight"), 1001, layer)
    };
    let layers = (0..300).map(|layer| (layer * 7) % 300);
    let shards: Vec<_> = layers.map(|layer| vec![tensor(layer, "mlp"), tensor(layer, "norm")]).collect();
    onelayer_testing::write_sharded(&source, &shards);
    let target = world.path("target");
    let mut command = cli_support::loadcheck(world.directory.path());
    command.arg("convert").arg(&source).arg(&target).args(["-q", "--verify"]);
    assert_code(&run(&wrapped(["sh", "-c", "ulimit -n 64; exec \"$@\"", "sh"], &command)), 0);
    assert_eq!(tree(&target).keys().filter(|name| convert_support::is_published(name)).count(), 300);
}

/// A limit on the length of files, with its signal ignored or not: an error, and no wrong file with
/// a final name.
#[test]
fn a_file_that_may_not_grow_is_told_and_leaves_nothing_wrong() {
    let world = World::new(&[]);
    for script in ["ulimit -f 2000; trap '' XFSZ; exec \"$@\"", "ulimit -c 0; ulimit -f 2000; exec \"$@\""] {
        let target = world.path("target");
        let output = run(&wrapped(["sh", "-c", script, "sh"], &world.convert(&target)));
        assert_refused(&output, "LC0509", "model-00001");
        let (wrong, published) = world.assess(&target);
        assert_eq!(wrong, [""; 0]);
        assert_eq!(world.resume(&target, published), [""; 0]);
        fs::remove_dir_all(&target).unwrap();
    }
}

/// The same directory, mounted in a second place.
#[test]
fn a_source_that_is_bound_elsewhere_is_still_the_source() {
    let world = World::new(&[]);
    let before = tree(&world.source);
    let place = world.path("place");
    fs::create_dir_all(&place).unwrap();
    let script = format!("mount --bind {} \"$1\" && shift && exec \"$@\"", world.source.display());
    for flags in [&[][..], &["--force"]] {
        let mut command = world.convert(&place);
        command.args(flags);
        let Some(output) = in_own_mounts("a bound directory", &script, &place, &command) else { return };
        assert_refused(&output, "LC0210", "place");
        assert!(stderr(&output).contains("directory of the source"), "{}", stderr(&output));
        assert_eq!(tree(&world.source), before);
    }
}

#[test]
fn a_target_that_cannot_be_written_is_told_at_once() {
    let world = World::new(&[]);
    let place = world.path("place");
    fs::create_dir_all(place.join("there")).unwrap();
    let script = "mount --bind \"$1\" \"$1\" && mount -o remount,ro,bind \"$1\" && shift && exec \"$@\"";
    for name in ["there", "not-yet"] {
        let command = world.convert(&place.join(name));
        let Some(output) = in_own_mounts("a read-only file system", script, &place, &command) else { return };
        assert_refused(&output, "LC0509", name);
        assert!(stderr(&output).contains("ead-only"), "{}", stderr(&output));
    }
    assert_eq!(tree(&place).len(), 1);
}

#[test]
fn too_little_room_is_told_before_anything_is_written() {
    let world = World::new(&[]);
    let (place, out) = (world.path("place"), world.path("out"));
    fs::create_dir_all(&place).unwrap();
    fs::create_dir_all(&out).unwrap();
    let script = format!(
        "mount -t tmpfs -o size=1m tmpfs \"$1\" || exit 99; place=$1; shift; \"$@\"; code=$?; \
         cp -a \"$place\" {}; exit $code",
        out.display()
    );
    let command = world.convert(&place.join("target"));
    let Some(output) = in_own_mounts("a small file system", &script, &place, &command) else { return };
    assert_refused(&output, "LC0211", "target");
    assert!(stderr(&output).contains("short"), "{}", stderr(&output));
    assert_eq!(tree(&out), Tree::from([("place/".into(), Vec::new())]));
}

/// The check of the free space cannot foresee that the file system runs out of inodes. Tried at
/// each number of inodes.
#[test]
fn room_that_ends_on_the_way_is_told_and_the_next_run_goes_on() {
    let world = World::new(&[]);
    let (place, out) = (world.path("place"), world.path("out"));
    fs::create_dir_all(&place).unwrap();
    for (refused, inodes) in (2..20).enumerate() {
        fs::create_dir_all(&out).unwrap();
        // The second run has room, and goes on where the first one stopped.
        let script = format!(
            "mount -t tmpfs -o size=16m,nr_inodes={inodes} tmpfs \"$1\" || exit 99; place=$1; shift; \"$@\" > /dev/null; code=$?; \
             cp -a \"$place\" {out}/first; mount -o remount,nr_inodes=100 \"$place\" || exit 99; \"$@\" > /dev/null || exit 98; \
             cp -a \"$place\" {out}/second; exit $code",
            out = out.display()
        );
        let command = world.convert(&place.join("target"));
        let Some(output) = in_own_mounts("a full file system", &script, &place, &command) else { return };
        assert!(!matches!(output.status.code(), Some(98 | 99)), "{inodes}: {}", stderr(&output));
        if output.status.success() {
            assert!(refused > 5, "it was full {refused} times");
            return;
        }
        assert_refused(&output, "LC0509", "target");
        assert!(stderr(&output).contains("No space"), "{}", stderr(&output));
        assert_eq!(world.assess(&out.join("first/target")).0, [""; 0], "{inodes}");
        assert_eq!(differences(&tree(&out.join("second/target")), &world.golden), [""; 0], "{inodes}");
        fs::remove_dir_all(&out).unwrap();
    }
    panic!("it never had enough");
}
