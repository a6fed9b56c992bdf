//! Hostile PyTorch files: each is refused with the expected error, or read right; in time, and with
//! a message that names the file. Nothing is executed: there is nothing that could.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use onelayer::checkpoint::{Checkpoint, CheckpointError};

use super::torch_corpus::{Case, DATA, Verdict, cases};

/// Checks one case. Returns what is wrong.
fn check(case: &Case, path: &std::path::Path) -> Result<(), String> {
    let start = Instant::now();
    let opened = Checkpoint::open(path);
    let time = start.elapsed();
    if time > Duration::from_secs(1) {
        return Err(format!("took {time:?}"));
    }
    match (&case.verdict, opened) {
        (Verdict::Refused(kind, text), Err(error)) => {
            let (found, message) = (kind_of(&error), error.to_string());
            let is_right = found == *kind
                && message.contains(text)
                && error.path() == Some(path)
                && error.is_invalid()
                && !message.contains('\n')
                && message.len() < 1000
                && (*kind != "InvalidFile" || message.contains("at byte "));
            if is_right { Ok(()) } else { Err(format!("expected {kind} with `{text}`: {found}: {message}")) }
        }
        (Verdict::Read(names), Ok(checkpoint)) => {
            let found: BTreeSet<&str> = checkpoint.tensors().map(|tensor| tensor.name).collect();
            if found != names.iter().copied().collect() {
                return Err(format!("expected {names:?}, found {found:?}"));
            }
            let file = std::fs::File::open(path).unwrap();
            for tensor in checkpoint.tensors() {
                let mut bytes = vec![0; usize::try_from(tensor.extent.len_bytes()).unwrap()];
                file.read_exact_at(&mut bytes, tensor.extent.start()).unwrap();
                if bytes != DATA {
                    return Err(format!("{}: found {bytes:?}", tensor.name));
                }
            }
            Ok(())
        }
        (expected, Ok(checkpoint)) => {
            let found: Vec<&str> = checkpoint.tensors().map(|tensor| tensor.name).collect();
            Err(format!("expected {expected:?}, read {found:?}"))
        }
        (expected, Err(error)) => Err(format!("expected {expected:?}, found {error}")),
    }
}

fn kind_of(error: &CheckpointError) -> String {
    let text = format!("{error:?}");
    text.split([' ', '{']).next().unwrap_or_default().to_owned()
}

#[test]
fn hostile_files_are_refused_or_read_right() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.pt");
    let (mut names, mut wrong, mut refused) = (BTreeSet::new(), vec![], 0);
    for case in cases() {
        assert!(names.insert(case.name.clone()), "{} twice", case.name);
        refused += usize::from(matches!(case.verdict, Verdict::Refused(..)));
        std::fs::write(&path, &case.bytes).unwrap();
        if let Err(why) = check(&case, &path) {
            wrong.push(format!("{}: {why}", case.name));
        }
    }
    println!("{} files, {refused} of them refused", names.len());
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(refused >= 300, "{refused}");
    assert!(!std::path::Path::new("/tmp/onelayer-was-here").exists());
}
