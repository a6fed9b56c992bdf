//! Files that reports are written to: nothing is overwritten without `--force`, weights never, and
//! a file appears complete or not at all.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use onelayer_synth::belongs_to_checkpoint;
use rustix::fs::{Access, access};

use super::BLOCK_BYTES;
use crate::problem::{Code, Problem};

/// The reason why `path` may not be written, if there is one.
pub(super) fn refusal(path: &Path, force: bool) -> Option<Problem> {
    let refused = |message: &str| Problem::new(Code::OutputRefused, message).at(path.display().to_string());
    let exists = || refused("the output file exists").help("--force overwrites it");
    if let Some(problem) = weights_refusal(path) {
        return Some(problem);
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let checked = match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Some(refused("the output is a directory")),
        Ok(metadata) if metadata.is_file() && !force => return Some(exists()),
        Ok(metadata) if metadata.is_file() => access(parent, Access::WRITE_OK | Access::EXEC_OK),
        // A pipe or a device.
        Ok(_) => access(path, Access::WRITE_OK),
        Err(_) if !parent.is_dir() => {
            return Some(refused("the directory of the output file does not exist"));
        }
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Some(refused(&format!("the output cannot be looked up: {error}")));
        }
        // A symbolic link without a target.
        Err(_) if path.is_symlink() && !force => return Some(exists()),
        Err(_) => access(parent, Access::WRITE_OK | Access::EXEC_OK),
    };
    let errno = checked.err()?;
    Some(refused(&format!("the output cannot be written: {}", io::Error::from(errno))))
}

/// Weights are never overwritten, not even with `--force`.
fn weights_refusal(path: &Path) -> Option<Problem> {
    let name = path.file_name()?.to_string_lossy();
    let message = "the name is that of a file of weights, which no output replaces";
    belongs_to_checkpoint(&name)
        .then(|| Problem::new(Code::OutputRefused, message).at(path.display().to_string()))
        .map(|problem| problem.help("choose another name"))
}

/// Writes a file as a whole: beside its target first, then renamed. Pipes and devices are written
/// to directly.
pub(super) fn to_file(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    force: bool,
) -> Result<(), Problem> {
    let failed = |error: io::Error| {
        Problem::new(Code::CannotWrite, format!("cannot write the file: {error}"))
            .at(path.display().to_string())
    };
    if let Some(problem) = weights_refusal(path) {
        return Err(problem);
    }
    if fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        let opened = OpenOptions::new().write(true).open(path);
        return opened.and_then(|file| fill(&file, write)).map_err(failed);
    }
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let part = tempfile::Builder::new()
        .prefix(".loadcheck-")
        .suffix(".part")
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)
        .and_then(|part| fill(part.as_file(), write).map(|()| part))
        .map_err(failed)?;
    let moved = if force { part.persist(path) } else { part.persist_noclobber(path) };
    moved.map(drop).map_err(|error| failed(error.error))
}

fn fill(file: &File, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(BLOCK_BYTES, file);
    write(&mut file)?;
    file.flush()
}

/// Adds to the job summary of GitHub Actions, if `GITHUB_STEP_SUMMARY` names its file.
pub(super) fn to_job_summary(markdown: &str) -> Result<(), Problem> {
    let Some(path) = std::env::var_os("GITHUB_STEP_SUMMARY").filter(|path| !path.is_empty()) else {
        return Ok(());
    };
    let written = OpenOptions::new()
        .append(true)
        .create(true)
        .open(&path)
        .and_then(|mut file| file.write_all(markdown.as_bytes()));
    written.map_err(|error| {
        Problem::new(Code::CannotWrite, format!("cannot write the job summary: {error}"))
            .at(path.to_string_lossy().into_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_never_overwritten_by_accident() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report.json");
        assert!(refusal(&path, false).is_none());
        to_file(&path, |to| to.write_all(b"one"), false).unwrap();
        assert!(refusal(&path, false).is_some() && refusal(&path, true).is_none());
        assert_eq!(to_file(&path, |to| to.write_all(b"two"), false).unwrap_err().code, Code::CannotWrite);
        assert_eq!(fs::read_to_string(&path).unwrap(), "one");
        to_file(&path, |to| to.write_all(b"three"), true).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "three");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no partial file stays");
        assert!(refusal(directory.path(), true).is_some());
        assert!(refusal(&directory.path().join("no/such"), true).is_some());
        assert!(refusal(&directory.path().join("x".repeat(256)), true).is_some(), "no file system takes it");
        let longest = directory.path().join("x".repeat(255));
        assert!(refusal(&longest, false).is_none());
        to_file(&longest, |to| to.write_all(b"long"), false).unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        assert!(refusal(&link, false).is_some() && refusal(&link, true).is_none());
        assert!(to_file(Path::new("/dev/null"), |to| to.write_all(b"text"), false).is_ok());
    }
}
