//! Files of the hub's cache: a large one is a link to `blobs/`, and named there by the SHA-256 of
//! its bytes. That is a hash to check it by where there is no manifest.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use onelayer_system::units::to_u64;
use sha2::{Digest as _, Sha256};

use crate::report::{Difference, Verification};

/// Bytes that are read at once.
const BLOCK_BYTES: usize = 1 << 20;

/// Compares the files in `folder` with the hashes in their names.
pub(crate) fn verify(folder: &Path) -> Verification {
    let mut report = Verification::default();
    for (path, expected) in hashed_files(folder) {
        match hash(&path) {
            Ok((found, bytes)) => {
                report.files += 1;
                report.bytes += bytes;
                if found != expected {
                    let what = format!("its SHA-256 is {found}, and its name in the cache says {expected}");
                    report.differences.push(difference(&path, what));
                }
            }
            Err(error) => report.differences.push(difference(&path, format!("cannot be read: {error}"))),
        }
    }
    report
}

fn difference(path: &Path, what: String) -> Difference {
    let place = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Difference { place, what }
}

/// The links in a folder to blobs that are named by a SHA-256, sorted.
fn hashed_files(folder: &Path) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let hashed = entries.filter_map(|entry| {
        let target = fs::read_link(entry.path()).ok()?;
        let name = target.file_name()?.to_str()?.to_owned();
        let is_hash = name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_hash.then(|| (entry.path(), name))
    });
    let mut files: Vec<_> = hashed.collect();
    files.sort();
    files
}

/// The SHA-256 of a file in hexadecimal digits, and its length.
fn hash(path: &Path) -> io::Result<(String, u64)> {
    let (mut file, mut block) = (File::open(path)?, vec![0; BLOCK_BYTES]);
    let (mut hasher, mut bytes) = (Sha256::new(), 0);
    loop {
        match file.read(&mut block)? {
            0 => break,
            len => {
                hasher.update(&block[..len]);
                bytes += to_u64(len);
            }
        }
    }
    Ok((hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect(), bytes))
}
