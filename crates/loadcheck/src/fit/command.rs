//! A command under a limit: its whole process tree in a control group.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use onelayer_probe::{ChildGroup, TreeOptions, TreeSampler, drop_cache, residency};

use super::trial::{End, Ran};
use crate::args::CacheArg;
use crate::exec::{Child, Ended};
use crate::numbers::to_f64;
use crate::problem::{Code, Problem};
use crate::signals::{Interrupts, name_of};

/// Enough to keep a disk busy.
const BLOCK_BYTES: usize = 4 << 20;
/// How deep the weights of a pipeline lie, and then some.
const FOLDERS_DEEP_MAX: u32 = 4;

/// Runs `words` once in `group`. What the command prints goes to stderr.
pub(crate) fn run(
    words: &[OsString],
    group: &ChildGroup,
    interrupts: &Interrupts,
    cached_share: Option<f64>,
) -> Ran {
    let mut child = match Child::start(words, None, true, false, Some(group)) {
        Ok(child) => child,
        Err(problem) => {
            return Ran { end: End::Failed(problem), seconds: None, peak_host_bytes: None, cached_share };
        }
    };
    let options = TreeOptions {
        adopt_orphans: true,
        group: Some(group.directory().to_owned()),
        ..TreeOptions::default()
    };
    // Without it, the peak is not known, and the search goes on without.
    let sampler = TreeSampler::start(child.pid(), &options).ok();
    let event = child.wait(interrupts);
    let seconds = child.elapsed().as_secs_f64();
    let summary = sampler.and_then(|sampler| sampler.finish().ok());
    let ended = child.end(event, interrupts);
    let peak_host_bytes = summary.and_then(|summary| summary.host.value().map(|peak| peak.bytes));
    Ran { end: end_of(&ended), seconds: Some(seconds), peak_host_bytes, cached_share }
}

/// The end that a command came to.
fn end_of(ended: &Ended) -> End {
    let failed = |message: String| Problem::new(Code::ChildFailed, message);
    match ended {
        Ended { interrupted: Some(signal), .. } => End::Interrupted(*signal),
        Ended { signal: Some(signal), .. } => {
            let problem = failed(format!("the command was killed by {}", name_of(*signal)));
            if *signal == signal_hook::consts::SIGKILL { End::Killed(problem) } else { End::Failed(problem) }
        }
        Ended { exit_code: Some(0), .. } => End::Completed,
        // A shell reports a killed child like this.
        Ended { exit_code: Some(137), .. } => {
            End::Killed(failed("the command ended with exit code 137".to_owned()))
        }
        Ended { exit_code, .. } => {
            let code = exit_code.map_or_else(|| "unknown".to_owned(), |code| code.to_string());
            End::Failed(failed(format!("the command ended with exit code {code}")))
        }
    }
}

/// Makes the files of a source that may be no checkpoint cold or warm; returns the share of their
/// pages that is cached afterwards, or `None` where the kernel does not tell.
///
/// # Errors
/// [`Code::SourceUnreadable`] if a file cannot be opened or read.
pub(crate) fn bring_about(source: &Path, state: CacheArg) -> Result<Option<f64>, Problem> {
    if state == CacheArg::Asis {
        return Ok(None);
    }
    let unreadable = |path: &Path, error: &dyn std::fmt::Display| {
        Problem::new(Code::SourceUnreadable, error.to_string()).at(path.display().to_string())
    };
    let files = files_of(source).map_err(|error| unreadable(source, &error))?;
    for path in &files {
        if state == CacheArg::Cold {
            drop_cache(path).map_err(|error| unreadable(path, &error))?;
        } else {
            read_through(path).map_err(|error| unreadable(path, &error))?;
        }
    }
    let (mut cached_bytes, mut file_bytes) = (0_u64, 0_u64);
    for path in &files {
        let Some(found) = residency(path).value() else { return Ok(None) };
        cached_bytes = cached_bytes.saturating_add(found.resident_bytes);
        file_bytes = file_bytes.saturating_add(found.file_bytes);
    }
    Ok(Some(if file_bytes == 0 { 0.0 } else { to_f64(cached_bytes) / to_f64(file_bytes) }))
}

/// The file, or the files of the directory. Of an index, those beside it.
fn files_of(source: &Path) -> std::io::Result<Vec<PathBuf>> {
    let is_index = source.extension().is_some_and(|extension| extension == "json");
    let directory = if is_index { source.parent().unwrap_or(source) } else { source };
    // Of a bare file name, the parent is empty.
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    if !directory.is_dir() {
        return Ok(vec![source.to_owned()]);
    }
    let mut files = Vec::new();
    add_files(directory, FOLDERS_DEEP_MAX, &mut files)?;
    Ok(files)
}

/// The files of a folder and of the folders in it, as a pipeline has them.
fn add_files(directory: &Path, deep: u32, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        // Links lead to the files of a cache; those to folders may lead back here.
        if path.is_file() {
            files.push(path);
        } else if deep > 0 && entry.file_type()?.is_dir() {
            add_files(&path, deep - 1, files)?;
        }
    }
    Ok(())
}

fn read_through(path: &Path) -> std::io::Result<()> {
    use std::io::Read as _;
    let mut file = fs::File::open(path)?;
    let mut block = vec![0; BLOCK_BYTES];
    while file.read(&mut block)? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_commands() {
        let ended = |exit_code, signal| Ended { exit_code, signal, ..Ended::default() };
        assert_eq!(end_of(&ended(Some(0), None)), End::Completed);
        assert!(matches!(end_of(&ended(Some(1), None)), End::Failed(_)));
        assert!(matches!(end_of(&ended(Some(137), None)), End::Killed(_)));
        assert!(matches!(end_of(&ended(None, Some(9))), End::Killed(_)));
        assert!(matches!(end_of(&ended(None, Some(11))), End::Failed(_)));
    }

    #[test]
    fn every_file_beside_an_index_counts() {
        let place = tempfile::tempdir().unwrap();
        for name in ["a.safetensors", "b.bin", "model.safetensors.index.json"] {
            fs::write(place.path().join(name), [1; 5000]).unwrap();
        }
        fs::create_dir(place.path().join("unet")).unwrap();
        fs::write(place.path().join("unet/weights.safetensors"), [1; 5000]).unwrap();
        std::os::unix::fs::symlink(".", place.path().join("unet/back")).unwrap();
        assert_eq!(files_of(place.path()).unwrap().len(), 4, "those of a pipeline's parts too");
        assert_eq!(files_of(&place.path().join("model.safetensors.index.json")).unwrap().len(), 4);
        assert_eq!(files_of(&place.path().join("b.bin")).unwrap().len(), 1);
        let share = bring_about(place.path(), CacheArg::Warm).unwrap();
        assert!(share.is_none_or(|share| share > 0.99), "{share:?}");
        assert!(bring_about(&place.path().join("gone"), CacheArg::Cold).is_err());
    }
}
