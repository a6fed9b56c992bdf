//! The journals: one for each part, with the files that earlier runs wrote. Their folder is removed
//! when the target is complete.
//!
//! ```text
//! TARGET/.onelayer-convert/part-1-of-8.journal      locked (flock) by the process of the part
//!
//! begun      {fingerprint, process}        hash      the conversion, and its process
//! written    {name, bytes, hash}  {entry}  hash      all bytes are under the unfinished name
//! published  {name, modified}              hash      the file is durable and has its final name
//! ```
//!
//! Fields are separated by tabs, which JSON never holds. Each line ends in a hash of itself: a line
//! that a crash cut off counts as not written. The entry is that of the manifest, on one line.
//! Lines are read and written in pieces, since a file may have a hundred thousand tensors.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::hash::{HashingWriter, hex};
use super::target_directory::{Found, TargetDirectory};
use super::{ConvertError, Part};
use crate::checkpoint::relative_name;
use crate::units::{ByteRange, to_u64};

/// The folder of the journals, in the target.
pub(super) const WORK_FOLDER: &str = ".onelayer-convert";

/// Bytes at the start of a line that are kept. All fields but the entry fit in.
const PREFIX_BYTES_MAX: usize = 64 << 10;
/// Hexadecimal digits of the hash at the end of a line.
const HASH_DIGITS: usize = 16;
/// Bytes of the last field, with the tab before it.
const HASH_FIELD_BYTES: usize = 1 + HASH_DIGITS;

#[derive(Serialize, Deserialize)]
struct Begun {
    fingerprint: String,
    process: String,
}

#[derive(Serialize, Deserialize)]
struct Written {
    name: String,
    bytes: u64,
    blake3: String,
}

#[derive(Serialize, Deserialize)]
struct Published {
    name: String,
    modified_ns: i128,
}

/// The record of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// The path of the journal below the target.
    journal: String,
    /// The bytes of the entry in the journal.
    entry: ByteRange,
    pub(super) bytes: u64,
    /// BLAKE3 of the whole file, in hexadecimal digits.
    pub(super) blake3: String,
    /// Its last modification in nanoseconds since 1970, if it has its final name.
    pub(super) published_ns: Option<i128>,
}

/// The contents of all journals.
#[derive(Clone, Debug, Default)]
pub(super) struct Records {
    files: BTreeMap<String, Record>,
    /// The conversion of every run.
    fingerprints: Vec<String>,
    /// The number of parts, from the name of each journal.
    part_counts: Vec<u32>,
    /// The process of the last run.
    process: Option<String>,
}

impl Records {
    /// Reads all journals of a target.
    pub(super) fn read(target: &TargetDirectory) -> Result<Self, ConvertError> {
        let mut records = Self::default();
        for (path, part) in journals(target)? {
            records.part_counts.push(part.of());
            let file = target.open_file(&path)?;
            records.read_journal(&path, file).map_err(|source| read_error(target, &path, source))?;
        }
        Ok(records)
    }

    /// The record of a file.
    pub(super) fn find(&self, name: &str) -> Option<&Record> {
        self.files.get(name)
    }

    /// The names of all files that were written or published.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// True if no journal has a line that can be read.
    pub(super) fn is_empty(&self) -> bool {
        self.fingerprints.is_empty()
    }

    /// The number of parts of the conversion, if there is a journal.
    pub(super) fn part_count(&self) -> Option<u32> {
        self.part_counts.first().copied()
    }

    /// Says why these are the journals of another conversion, if they are. Without `parts`, any
    /// number of parts will do.
    pub(super) fn differ_from(&self, fingerprint: &str, parts: Option<u32>) -> Option<String> {
        if self.fingerprints.iter().any(|found| found != fingerprint) {
            return Some("an unfinished conversion of another source, or with other options".to_owned());
        }
        let parts = parts.or(self.part_count())?;
        let other = self.part_counts.iter().find(|&&count| count != parts)?;
        Some(format!("a conversion in {other} parts; this one is in {parts}"))
    }

    fn read_journal(&mut self, path: &str, file: File) -> io::Result<()> {
        let mut reader = BufReader::with_capacity(64 << 10, file);
        let mut offset_bytes = 0;
        while let Some(line) = Line::read(&mut reader, &mut offset_bytes)? {
            self.take(path, line);
        }
        Ok(())
    }

    /// Adds a line. One that cannot be understood is damage, and is passed over.
    fn take(&mut self, journal: &str, line: Line) {
        match (line.kind.as_slice(), line.entry) {
            (b"begun", None) => {
                let Ok(Begun { fingerprint, process }) = serde_json::from_slice(&line.head) else { return };
                self.fingerprints.push(fingerprint);
                self.process = Some(process);
            }
            (b"written", Some(entry)) => {
                let Ok(Written { name, bytes, blake3 }) = serde_json::from_slice(&line.head) else { return };
                // Anybody can make a line with a right hash: it must not lead out of the target.
                if !is_file_of_tensors(&name) {
                    return;
                }
                let journal = journal.to_owned();
                self.files.insert(name, Record { journal, entry, bytes, blake3, published_ns: None });
            }
            (b"published", None) => {
                let Ok(Published { name, modified_ns }) = serde_json::from_slice(&line.head) else { return };
                if let Some(record) = self.files.get_mut(&name) {
                    record.published_ns = Some(modified_ns);
                }
            }
            _ => {}
        }
    }
}

impl Record {
    /// The entry of the manifest: JSON on one line.
    ///
    /// # Errors
    /// [`ConvertError::Read`].
    pub(super) fn entry(&self, target: &TargetDirectory) -> Result<impl Read + use<>, ConvertError> {
        let mut file = target.open_file(&self.journal)?;
        let sought = file.seek(SeekFrom::Start(self.entry.start()));
        sought.map_err(|source| read_error(target, &self.journal, source))?;
        Ok(BufReader::with_capacity(64 << 10, file.take(self.entry.len_bytes())))
    }
}

/// One line whose hash is right.
struct Line {
    kind: Vec<u8>,
    head: Vec<u8>,
    entry: Option<ByteRange>,
}

impl Line {
    /// The next line that is whole; damaged lines are skipped. `None` at the end.
    fn read(reader: &mut impl BufRead, offset_bytes: &mut u64) -> io::Result<Option<Self>> {
        loop {
            let mut raw = RawLine { start_bytes: *offset_bytes, ..RawLine::default() };
            if !raw.read(reader)? {
                return Ok(None);
            }
            *offset_bytes += raw.len_bytes + 1;
            if let Some(line) = raw.into_line() {
                return Ok(Some(line));
            }
        }
    }
}

/// A line while it is read.
#[derive(Default)]
struct RawLine {
    /// The offset of the line in the journal.
    start_bytes: u64,
    /// The length of the line, without its end.
    len_bytes: u64,
    /// The first bytes of the line.
    prefix: Vec<u8>,
    /// The last bytes of the line, which may be its hash.
    suffix: Vec<u8>,
    /// Of all bytes before the suffix.
    hasher: blake3::Hasher,
}

impl RawLine {
    /// Reads up to the end of the line. False at the end of the journal: a line without an end does
    /// not count.
    fn read(&mut self, reader: &mut impl BufRead) -> io::Result<bool> {
        loop {
            let buffer = reader.fill_buf()?;
            if buffer.is_empty() {
                return Ok(false);
            }
            let end = buffer.iter().position(|&byte| byte == b'\n');
            let taken = end.unwrap_or(buffer.len());
            self.extend(&buffer[..taken]);
            reader.consume(taken + usize::from(end.is_some()));
            if end.is_some() {
                return Ok(true);
            }
        }
    }

    fn extend(&mut self, bytes: &[u8]) {
        self.len_bytes += to_u64(bytes.len());
        let kept = bytes.len().min(PREFIX_BYTES_MAX - self.prefix.len());
        self.prefix.extend_from_slice(&bytes[..kept]);
        self.suffix.extend_from_slice(bytes);
        let hashed = self.suffix.len().saturating_sub(HASH_FIELD_BYTES);
        self.hasher.update(&self.suffix[..hashed]);
        self.suffix.drain(..hashed);
    }

    /// The fields of the line; `None` if its hash is wrong.
    fn into_line(mut self) -> Option<Line> {
        let hash = self.hasher.finalize().to_hex();
        if self.suffix.strip_prefix(b"\t")? != &hash.as_bytes()[..HASH_DIGITS] {
            return None;
        }
        let end_bytes = self.len_bytes - to_u64(HASH_FIELD_BYTES);
        self.prefix.truncate(usize::try_from(end_bytes).unwrap_or(usize::MAX));
        let mut fields = self.prefix.splitn(3, |&byte| byte == b'\t');
        let (kind, head) = (fields.next()?.to_vec(), fields.next()?.to_vec());
        let entry = match fields.next() {
            Some(_) => {
                let before_bytes = to_u64(kind.len() + head.len() + 2);
                Some(ByteRange::new(self.start_bytes + before_bytes, self.start_bytes + end_bytes)?)
            }
            None => None,
        };
        Some(Line { kind, head, entry })
    }
}

/// The journal of one part: locked, and open for appending.
#[derive(Debug)]
pub(super) struct Journal {
    target: TargetDirectory,
    path: String,
    file: File,
}

impl Journal {
    /// Locks the journal of a part, and adds the line that begins a run.
    ///
    /// # Errors
    /// [`ConvertError::Locked`] if another process has it. [`ConvertError::OtherConversion`] if the
    /// target has journals of another conversion.
    pub(super) fn begin(
        target: &TargetDirectory,
        part: Part,
        fingerprint: &str,
    ) -> Result<Self, ConvertError> {
        let path = journal_path(part);
        let file = lock(target, &path)?;
        let mut journal = Self { target: target.clone(), path, file };
        let is_new = journal.len_bytes()? == 0;
        journal.check_alone(part, fingerprint, is_new)?;
        journal.end_torn_line()?;
        let process = format!("{} on {}", std::process::id(), host_name());
        journal.append("begun", &Begun { fingerprint: fingerprint.to_owned(), process })?;
        journal.sync()?;
        target.sync_folder_of(&journal.path)?;
        // Another conversion may have begun at the same moment: the later of the two checks sees
        // both.
        journal.check_alone(part, fingerprint, is_new)?;
        Ok(journal)
    }

    /// Refuses to run beside another conversion. A new journal is removed then.
    fn check_alone(&self, part: Part, fingerprint: &str, is_new: bool) -> Result<(), ConvertError> {
        let Some(what) = Records::read(&self.target)?.differ_from(fingerprint, Some(part.of())) else {
            return Ok(());
        };
        if is_new {
            self.target.remove(&self.path)?;
        }
        Err(ConvertError::OtherConversion { path: self.target.path().to_owned(), what })
    }

    fn len_bytes(&self) -> Result<u64, ConvertError> {
        let metadata = self.file.metadata().map_err(|source| self.failed("stat the journal", source))?;
        Ok(metadata.len())
    }

    /// Adds the line that all bytes of a file are under its unfinished name. `entry` writes the
    /// entry of the manifest.
    pub(super) fn written(
        &mut self,
        name: &str,
        bytes: u64,
        blake3: &str,
        entry: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), ConvertError> {
        let head = Written { name: name.to_owned(), bytes, blake3: blake3.to_owned() };
        self.append_with("written", &head, Some(entry))?;
        // Durable before the file gets its final name: a file without a record counts as another
        // program's.
        self.sync()
    }

    /// Adds the line that a file is durable and has its final name.
    pub(super) fn published(&mut self, name: &str, modified_ns: i128) -> Result<(), ConvertError> {
        // Not synced: if a power cut loses the line, the file is hashed again.
        self.append("published", &Published { name: name.to_owned(), modified_ns })
    }

    fn append(&mut self, kind: &str, head: &impl Serialize) -> Result<(), ConvertError> {
        self.append_with(kind, head, None::<fn(&mut dyn Write) -> io::Result<()>>)
    }

    fn append_with(
        &mut self,
        kind: &str,
        head: &impl Serialize,
        entry: Option<impl FnOnce(&mut dyn Write) -> io::Result<()>>,
    ) -> Result<(), ConvertError> {
        let write = || -> io::Result<()> {
            let mut out = HashingWriter::new(BufWriter::with_capacity(64 << 10, &self.file), false);
            write!(out, "{kind}\t")?;
            serde_json::to_writer(&mut out, head)?;
            if let Some(entry) = entry {
                out.write_all(b"\t")?;
                entry(&mut out)?;
            }
            let hash = hex(&out.digest.take().blake3);
            writeln!(out.out, "\t{}", &hash[..HASH_DIGITS])?;
            out.out.flush()
        };
        write().map_err(|source| self.failed("write to the journal", source))
    }

    fn sync(&self) -> Result<(), ConvertError> {
        self.file.sync_data().map_err(|source| self.failed("sync the journal", source))
    }

    /// Ends a line that a crash cut off, so that the next line is not taken for its rest.
    fn end_torn_line(&mut self) -> Result<(), ConvertError> {
        let mend = || -> io::Result<()> {
            let mut file = &self.file;
            if file.metadata()?.len() == 0 {
                return Ok(());
            }
            file.seek(SeekFrom::End(-1))?;
            let mut last = [0];
            file.read_exact(&mut last)?;
            if last != *b"\n" { file.write_all(b"\n") } else { Ok(()) }
        };
        mend().map_err(|source| self.failed("mend the journal", source))
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> ConvertError {
        ConvertError::Write { path: self.target.path_of(&self.path), operation, source }
    }
}

/// Locks every journal, so that no part is converted while the files that are returned are open.
///
/// # Errors
/// [`ConvertError::Locked`] if a part is being converted.
pub(super) fn lock_all(target: &TargetDirectory) -> Result<Vec<File>, ConvertError> {
    journals(target)?.iter().map(|(path, _)| lock(target, path)).collect()
}

/// Removes the journals and their folder. `locks` are those of [`lock_all`], or empty.
pub(super) fn remove_all(target: &TargetDirectory, locks: Vec<File>) -> Result<(), ConvertError> {
    for name in target.names_in(WORK_FOLDER)? {
        target.remove(&format!("{WORK_FOLDER}/{name}"))?;
    }
    // On network file systems, an open file that is removed stays in its folder under another name
    // until it is closed.
    drop(locks);
    target.remove_folder(WORK_FOLDER)
}

/// Paths of all journals below the target, and their parts.
fn journals(target: &TargetDirectory) -> Result<Vec<(String, Part)>, ConvertError> {
    match target.find(WORK_FOLDER)? {
        None => return Ok(Vec::new()),
        Some(Found::Directory) => {}
        Some(found) => {
            return Err(ConvertError::Exists { path: target.path_of(WORK_FOLDER), found: found.name() });
        }
    }
    let part_of = |name: &str| {
        let (number, of) = name.strip_prefix("part-")?.strip_suffix(".journal")?.split_once("-of-")?;
        Part::new(number.parse().ok()?, of.parse().ok()?)
    };
    let names = target.names_in(WORK_FOLDER)?;
    Ok(names.iter().filter_map(|name| Some((format!("{WORK_FOLDER}/{name}"), part_of(name)?))).collect())
}

/// True for a name that a conversion may give to a file of tensors. Anybody can make a line with a
/// right hash, and files that are listed may be replaced and removed: others must not be.
pub(super) fn is_file_of_tensors(name: &str) -> bool {
    /// Longest part of a path, in bytes.
    const PART_BYTES_MAX: usize = 255;
    let is_short = name.split('/').all(|part| part.len() <= PART_BYTES_MAX);
    is_short && name.ends_with(".safetensors") && relative_name(name) == Ok(name)
}

fn journal_path(part: Part) -> String {
    format!("{WORK_FOLDER}/part-{}-of-{}.journal", part.number(), part.of())
}

fn lock(target: &TargetDirectory, path: &str) -> Result<File, ConvertError> {
    let file = target.open_appending(path)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        // The conversion ended between the opening and the locking, and removed the journal: a lock
        // on it would keep no process out.
        Ok(()) if rustix::fs::fstat(&file).is_ok_and(|stat| stat.st_nlink == 0) => {
            let process = "that has just ended; run the command again".to_owned();
            Err(ConvertError::Locked { path: target.path().to_owned(), process })
        }
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut records = Records::default();
            let read = target.open_file(path).map(|file| records.read_journal(path, file));
            let process = records.process.filter(|_| matches!(read, Ok(Ok(()))));
            let process = process.unwrap_or_else(|| "that is unknown".to_owned());
            Err(ConvertError::Locked { path: target.path().to_owned(), process })
        }
        // Without locks, other processes cannot be noticed.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOLCK | rustix::io::Errno::NOSYS) => Ok(file),
        Err(error) => {
            Err(ConvertError::Write { path: target.path_of(path), operation: "lock", source: error.into() })
        }
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn read_error(target: &TargetDirectory, path: &str, source: io::Error) -> ConvertError {
    ConvertError::Read { path: target.path_of(path), operation: "read the journal", source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> (tempfile::TempDir, TargetDirectory) {
        let folder = tempfile::tempdir().unwrap();
        let target = TargetDirectory::open(folder.path()).unwrap().unwrap();
        (folder, target)
    }

    fn entry(text: &'static str) -> impl FnOnce(&mut dyn Write) -> io::Result<()> {
        move |out| out.write_all(text.as_bytes())
    }

    #[test]
    fn what_was_written_is_read() {
        let (_folder, target) = target();
        let part = Part::new(2, 3).unwrap();
        let mut journal = Journal::begin(&target, part, "abc").unwrap();
        journal.written("a b\t\u{e9}.safetensors", 7, "00", entry("{\"x\":1}")).unwrap();
        journal.written("b.safetensors", 8, "11", entry("{}")).unwrap();
        journal.published("b.safetensors", -5).unwrap();
        let records = Records::read(&target).unwrap();
        assert_eq!([Some(3), None].map(|parts| records.differ_from("abc", parts)), [None, None]);
        assert!(records.differ_from("abd", None).is_some() && records.differ_from("abc", Some(2)).is_some());
        let first = records.find("a b\t\u{e9}.safetensors").unwrap();
        assert_eq!((first.bytes, first.blake3.as_str(), first.published_ns), (7, "00", None));
        let mut copy = Vec::new();
        first.entry(&target).unwrap().read_to_end(&mut copy).unwrap();
        assert_eq!(copy, b"{\"x\":1}");
        assert_eq!(records.find("b.safetensors").unwrap().published_ns, Some(-5));
    }

    /// Names become paths that may be removed.
    #[test]
    fn names_that_lead_out_of_the_target_are_not_taken() {
        let (_folder, target) = target();
        let mut journal = Journal::begin(&target, Part::new(1, 1).unwrap(), "abc").unwrap();
        let wrong = [
            "../up.safetensors",
            "a/../b.safetensors",
            "/root.safetensors",
            "./here.safetensors",
            "..",
            "",
            "a.json",
        ];
        for name in wrong.into_iter().chain(["below/here.safetensors"]) {
            journal.written(name, 1, "00", entry("{}")).unwrap();
        }
        assert_eq!(Records::read(&target).unwrap().names().collect::<Vec<_>>(), ["below/here.safetensors"]);
    }

    #[test]
    fn one_process_at_a_time() {
        let (_folder, target) = target();
        let part = Part::new(1, 1).unwrap();
        let journal = Journal::begin(&target, part, "abc").unwrap();
        let refused = Journal::begin(&target, part, "abc").unwrap_err();
        let own = std::process::id().to_string();
        assert!(
            matches!(&refused, ConvertError::Locked { process, .. } if process.contains(&own)),
            "{refused}"
        );
        assert!(lock_all(&target).is_err());
        drop(journal);
        lock_all(&target).unwrap();
        Journal::begin(&target, part, "abc").unwrap();
    }

    #[test]
    fn one_conversion_at_a_time() {
        let (_folder, target) = target();
        let part = |number, of| Part::new(number, of).unwrap();
        Journal::begin(&target, part(1, 3), "abc").unwrap();
        for (part, fingerprint) in [(part(1, 1), "abc"), (part(1, 3), "abd"), (part(2, 3), "abd")] {
            let refused = Journal::begin(&target, part, fingerprint).unwrap_err();
            assert!(matches!(refused, ConvertError::OtherConversion { .. }), "{refused}");
        }
        // None of them has left anything.
        Journal::begin(&target, part(3, 3), "abc").unwrap();
    }

    /// A journal that is cut off anywhere keeps the lines before the cut, and takes more lines.
    #[test]
    fn a_torn_journal_loses_only_what_was_torn() {
        let (folder, target) = target();
        let part = Part::new(1, 1).unwrap();
        let mut journal = Journal::begin(&target, part, "abc").unwrap();
        journal.written("a.safetensors", 1, "00", entry("{}")).unwrap();
        let path = folder.path().join(WORK_FOLDER).join("part-1-of-1.journal");
        let before = std::fs::read(&path).unwrap().len();
        journal.written("b.safetensors", 2, "11", entry("{\"long\":\"entry\"}")).unwrap();
        drop(journal);
        let whole = std::fs::read(&path).unwrap();
        for end in 0..whole.len() {
            std::fs::write(&path, &whole[..end]).unwrap();
            let records = Records::read(&target).unwrap();
            assert_eq!(records.find("a.safetensors").is_some(), end >= before, "{end}");
            assert!(records.find("b.safetensors").is_none(), "{end}");
            let mut journal = Journal::begin(&target, part, "abc").unwrap();
            let is_torn = end > 0 && whole[end - 1] != b'\n';
            assert_eq!(std::fs::read(&path).unwrap()[end] == b'\n', is_torn, "{end}: lines are ended once");
            journal.written("c.safetensors", 3, "22", entry("{}")).unwrap();
            assert!(Records::read(&target).unwrap().find("c.safetensors").is_some(), "{end}");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, &damaged).unwrap();
            let records = Records::read(&target).unwrap();
            for (name, bytes) in [("a.safetensors", 1), ("b.safetensors", 2)] {
                assert!(records.find(name).is_none_or(|record| record.bytes == bytes), "{at}");
            }
        }
    }
}
