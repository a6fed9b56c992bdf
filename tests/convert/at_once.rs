//! Conversions that were prepared while another one wrote into the same target, and conversions
//! that replace another one. Each reads the state of the target again once it has the lock. The
//! files of a conversion that is replaced are removed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use onelayer::convert::{Conversion, ConvertError, ConvertEvent, Grouping, Part, Verification};
use onelayer_testing::{small_decoder, write_sharded};

fn source() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(3, 1000));
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    folder
}

/// The names of everything in a target.
fn names(target: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(target).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[track_caller]
fn assert_right(target: &Path, source: &Path) {
    let found = Verification::new().run(target, Some(source), &mut |_| {}).unwrap();
    assert_eq!(found.differences, []);
}

#[test]
fn what_another_run_has_made_since_is_kept() {
    let source = source();
    let target = source.path().join("target");
    let prepare = || Conversion::new().prepare(source.path(), &target).unwrap();
    let (first, second, third) = (prepare(), prepare(), prepare());
    let files = u64::try_from(first.files().len()).unwrap();
    assert_eq!(first.run().unwrap().files_written, files);
    let before = names(&target);
    for report in [second.run().unwrap(), third.finish().unwrap()] {
        assert_eq!((report.files_written, report.files_kept, report.is_complete), (0, files, true));
        assert_eq!(names(&target), before, "nothing is left behind");
    }
    assert_right(&target, source.path());
}

#[test]
fn a_part_that_another_run_has_made_since_is_kept() {
    let source = source();
    let target = source.path().join("target");
    let part = |number| Conversion::new().part(Part::new(number, 2).unwrap());
    let prepare = |number| part(number).prepare(source.path(), &target).unwrap();
    let (first, again) = (prepare(1), prepare(1));
    let written = first.run().unwrap().files_written;
    let report = again.run().unwrap();
    assert_eq!((report.files_written, report.files_kept), (0, written));
    prepare(2).run().unwrap();
    assert!(Conversion::new().prepare(source.path(), &target).unwrap().finish().unwrap().is_complete);
    assert_right(&target, source.path());
}

#[test]
fn a_part_replaces_an_old_conversion_beside_one_that_has_begun_to() {
    let source = source();
    let target = source.path().join("target");
    let merged = Conversion::new().grouping(Grouping::Merged).max_shard_bytes(5000);
    merged.prepare(source.path(), &target).unwrap().run().unwrap();
    let part = |number| Conversion::new().overwrite(true).part(Part::new(number, 2).unwrap());
    let second = Mutex::new(Some(part(2).prepare(source.path(), &target).unwrap()));
    let outcome = Arc::new(Mutex::new(None));
    let told = Arc::clone(&outcome);
    let first = part(1).observe(move |event| {
        if let ConvertEvent::FilePublished { .. } = event
            && let Some(second) = second.lock().unwrap().take()
        {
            *told.lock().unwrap() = Some(second.run());
        }
    });
    first.prepare(source.path(), &target).unwrap().run().unwrap();
    let second = outcome.lock().unwrap().take().unwrap().unwrap();
    assert!(second.files_written > 0);
    Conversion::new().prepare(source.path(), &target).unwrap().finish().unwrap();
    assert_right(&target, source.path());
}

/// Files, index and side files of the old conversion are removed, if the new one does not replace
/// them.
#[test]
fn nothing_of_a_conversion_that_is_replaced_stays() {
    let source = source();
    let target = source.path().join("target");
    let settings = |is_merged| {
        let grouping = if is_merged { Grouping::Merged } else { Grouping::PerLayer };
        Conversion::new().overwrite(true).grouping(grouping)
    };
    for is_merged in [false, true, false] {
        let own = source.path().join("tokenizer.json");
        if is_merged {
            fs::write(&own, "{}").unwrap();
        }
        settings(is_merged).prepare(source.path(), &target).unwrap().run().unwrap();
        let fresh = source.path().join("fresh");
        settings(is_merged).prepare(source.path(), &fresh).unwrap().run().unwrap();
        assert_eq!(names(&target), names(&fresh), "merged: {is_merged}");
        assert_right(&target, source.path());
        fs::remove_dir_all(fresh).unwrap();
        if is_merged {
            fs::remove_file(own).unwrap();
        }
    }
}

/// A file that no conversion made is not removed, and a note names it.
#[test]
fn weights_that_no_conversion_made_are_left_alone_and_named() {
    let source = source();
    let target = source.path().join("target");
    fs::create_dir(&target).unwrap();
    fs::write(target.join("precious.safetensors"), "precious").unwrap();
    let refused = Conversion::new().prepare(source.path(), &target).unwrap_err();
    assert!(refused.to_string().contains("precious.safetensors"), "{refused}");
    let report = Conversion::new().overwrite(true).prepare(source.path(), &target).unwrap().run().unwrap();
    assert_eq!(fs::read(target.join("precious.safetensors")).unwrap(), b"precious");
    assert!(report.notes.iter().any(|note| note.contains("precious.safetensors")), "{:?}", report.notes);
}

/// An index may lie elsewhere than its files: its directory is of the source too.
#[test]
fn the_directory_of_an_index_is_no_target() {
    let source = source();
    let elsewhere = source.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    write_sharded(&elsewhere, &small_decoder(3, 1000));
    let index = source.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    fs::write(&index, text.replace("\"model-0", "\"elsewhere/model-0")).unwrap();
    for target in [source.path(), &elsewhere] {
        let refused = Conversion::new().overwrite(true).prepare(&index, target).unwrap_err();
        assert!(matches!(refused, ConvertError::SameDirectory { .. }), "{}: {refused}", target.display());
    }
}
