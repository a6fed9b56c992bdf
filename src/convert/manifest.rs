//! The manifest of a target: its types, and how it is written.
//!
//! The text is JSON that a person can read and compare: keys in a fixed order, a line for each
//! tensor. The entry of each file is first written to the journal, on one line, and copied to the
//! manifest at the end. A manifest is not a finished journal: it is one JSON document that other
//! programs read, so only the entries and the code that writes and reads them are shared.
//!
//! Manifests are written piece by piece, since those of large models should not be in memory.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

/// The name of the manifest in the target.
pub const MANIFEST_NAME: &str = "onelayer.manifest.json";

/// The schema of the manifests that this version writes and reads.
pub(super) const MANIFEST_SCHEMA: &str = "onelayer-manifest/1";

/// The files of a conversion, their source, and the hash of each part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// `onelayer-manifest/1`.
    pub schema: String,
    /// Name and version of the program that wrote it.
    pub tool: String,
    /// A hash of the source's identity and of everything that decides about the files. Tells
    /// conversions apart.
    pub fingerprint: String,
    /// The source of the conversion.
    pub source: ManifestSource,
    /// The options, as a person gave them.
    pub options: Vec<String>,
    /// Tensors that are left out because another one has the same bytes.
    pub aliases: Vec<Alias>,
    /// Names of tensors that were not selected.
    pub left_out: Vec<String>,
    /// The files of tensors, in execution order.
    pub files: Vec<ManifestFile>,
    /// Everything else in the target but the manifest itself: configuration, tokenizer, index.
    pub side_files: Vec<SideFileRecord>,
}

/// The source of a conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ManifestSource {
    /// Its path as it was given.
    pub path: String,
    /// The files of tensors.
    pub files: Vec<SourceFile>,
}

/// One file of the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SourceFile {
    /// Its path below the source; its name alone if it lies elsewhere.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Last modification, nanoseconds since 1970.
    pub modified_ns: i128,
    /// BLAKE3 of its header: the 8 bytes of the length and the text.
    pub header_blake3: String,
}

/// A tensor that is left out because another one has the same bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Alias {
    /// The name of the tensor that is left out.
    pub name: String,
    /// The name of the tensor that is kept.
    pub same_as: String,
}

/// One file of tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ManifestFile {
    /// Its path below the target.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// BLAKE3 of the whole file, 64 hexadecimal digits.
    pub blake3: String,
    /// SHA-256 of the whole file, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The layers that it holds, or holds a part of.
    pub layers: Vec<String>,
    /// Its tensors, in file order.
    pub tensors: Vec<ManifestTensor>,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ManifestTensor {
    /// Its name, as its file spells it.
    pub name: String,
    /// Its type.
    pub dtype: String,
    /// Its type in the source, if it was cast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cast_from: Option<String>,
    /// The form that its weight was quantised to, if it was. Values and scales both have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantised: Option<String>,
    /// Elements per dimension.
    pub shape: Vec<u64>,
    /// Its length in bytes.
    pub bytes: u64,
    /// BLAKE3 of its bytes.
    pub blake3: String,
    /// SHA-256 of its bytes, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// One file that holds no tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SideFileRecord {
    /// Its path below the target.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// BLAKE3 of it.
    pub blake3: String,
    /// SHA-256 of it, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// The part of a manifest before its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ManifestHead {
    pub(super) tool: String,
    pub(super) fingerprint: String,
    pub(super) source: ManifestSource,
    pub(super) options: Vec<String>,
    pub(super) aliases: Vec<Alias>,
    pub(super) left_out: Vec<String>,
}

/// A part of the files in a manifest, in its order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// A file. Its list of tensors is empty: they follow.
    File(ManifestFile),
    /// The next tensor of the last file.
    Tensor(ManifestTensor),
}

/// Writes the entry of a file on one line, without white space. The tensors of `file` are those of
/// the iterator.
///
/// # Errors
/// Those of `out`.
pub(super) fn write_file_entry(
    out: &mut dyn Write,
    file: &ManifestFile,
    tensors: impl Iterator<Item = ManifestTensor>,
) -> io::Result<()> {
    write_file_start(&mut *out, file)?;
    for (index, tensor) in tensors.enumerate() {
        out.write_all(if index == 0 { b"" } else { b"," })?;
        serde_json::to_writer(&mut *out, &tensor)?;
    }
    out.write_all(FILE_END)
}

/// The end of the entry of a file: of the list of its tensors, and of the entry.
const FILE_END: &[u8] = b"]}";

/// Writes the entry of a file up to its first tensor.
fn write_file_start(mut out: impl Write, file: &ManifestFile) -> io::Result<()> {
    assert!(file.tensors.is_empty(), "tensors are written one by one");
    let text = serde_json::to_vec(file)?;
    out.write_all(text.strip_suffix(FILE_END).expect("the tensors are the last part of an entry"))
}

/// Writes a manifest. It is complete after [`Self::finish`].
#[derive(Debug)]
pub(super) struct ManifestWriter<W> {
    out: W,
    has_files: bool,
    /// True if the last file has tensors.
    has_tensors: bool,
}

impl<W: Write> ManifestWriter<W> {
    /// Starts a manifest.
    ///
    /// # Errors
    /// Those of `out`.
    pub(super) fn new(mut out: W, head: &ManifestHead) -> io::Result<Self> {
        write!(out, "{{\n  \"schema\": \"{MANIFEST_SCHEMA}\",\n  \"tool\": ")?;
        serde_json::to_writer(&mut out, &head.tool)?;
        out.write_all(b",\n  \"fingerprint\": ")?;
        serde_json::to_writer(&mut out, &head.fingerprint)?;
        out.write_all(b",\n  \"source\": {\n    \"path\": ")?;
        serde_json::to_writer(&mut out, &head.source.path)?;
        out.write_all(b",\n    \"files\": ")?;
        write_lines(&mut out, "\n      ", "\n    ", &head.source.files)?;
        out.write_all(b"\n  },\n  \"options\": ")?;
        serde_json::to_writer(&mut out, &head.options)?;
        out.write_all(b",\n  \"aliases\": ")?;
        write_lines(&mut out, "\n    ", "\n  ", &head.aliases)?;
        out.write_all(b",\n  \"left_out\": ")?;
        write_lines(&mut out, "\n    ", "\n  ", &head.left_out)?;
        out.write_all(b",\n  \"files\": [")?;
        Ok(Self { out, has_files: false, has_tensors: false })
    }

    /// Adds the next file, or the next tensor of the last file.
    ///
    /// # Errors
    /// Those of the output.
    pub(super) fn entry(&mut self, entry: &Entry) -> io::Result<()> {
        match entry {
            Entry::File(file) => {
                self.end_file()?;
                self.out.write_all(if self.has_files { b",\n    " } else { b"\n    " })?;
                (self.has_files, self.has_tensors) = (true, false);
                write_file_start(&mut self.out, file)
            }
            Entry::Tensor(tensor) => {
                self.out.write_all(if self.has_tensors { b",\n      " } else { b"\n      " })?;
                self.has_tensors = true;
                Ok(serde_json::to_writer(&mut self.out, tensor)?)
            }
        }
    }

    /// Ends the manifest, and returns the output, which is not flushed.
    ///
    /// # Errors
    /// Those of the output.
    pub(super) fn finish(mut self, side_files: &[SideFileRecord]) -> io::Result<W> {
        self.end_file()?;
        self.out.write_all(if self.has_files { b"\n  ]" } else { b"]" })?;
        self.out.write_all(b",\n  \"side_files\": ")?;
        write_lines(&mut self.out, "\n    ", "\n  ", side_files)?;
        self.out.write_all(b"\n}\n")?;
        Ok(self.out)
    }

    fn end_file(&mut self) -> io::Result<()> {
        if !self.has_files {
            return Ok(());
        }
        self.out.write_all(if self.has_tensors { b"\n    " } else { b"" })?;
        self.out.write_all(FILE_END)
    }
}

/// Writes an array with a line for each element.
fn write_lines<T: Serialize>(
    mut out: impl Write,
    before: &str,
    after: &str,
    elements: &[T],
) -> io::Result<()> {
    out.write_all(b"[")?;
    for (index, element) in elements.iter().enumerate() {
        out.write_all(if index == 0 { b"" } else { b"," })?;
        out.write_all(before.as_bytes())?;
        serde_json::to_writer(&mut out, element)?;
    }
    out.write_all(if elements.is_empty() { b"" } else { after.as_bytes() })?;
    out.write_all(b"]")
}
