//! Side files: the files beside the weights, such as configuration, tokenizer, code and chat
//! template. They are listed when a conversion is prepared, and copied before its index is written.
//!
//! Every regular file is a side file, but for weights, hidden files, and files that a conversion
//! made. Folders are searched a few levels deep, so that the parts of a pipeline keep their
//! configurations; folders of weights only are not made again. Symbolic links to files are
//! followed, since hub caches consist of them. Links to folders are not, since they may lead
//! anywhere. Pipes and devices are never opened: they could block.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::Metadata;
use std::io::Write;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::hash::{Digest, hex};
use super::read_file::read_file;
use super::{ConvertError, MANIFEST_NAME, SideFileRecord};
use crate::checkpoint::{Checkpoint, FileKind, relative_name};
use crate::units::to_u64;
use onelayer_system::folder::names_in;

/// Depth of the folders below the source that are searched.
const DEPTH_MAX: usize = 8;
/// Most side files of one source: more are no model, and their list would not be small.
pub(super) const FILES_MAX: usize = 10_000;
/// Most names in a note.
const NAMED_MAX: usize = 4;

/// The end of names of safetensors files.
const TENSORS: &str = ".safetensors";
/// Ends of names of weights in other formats.
const OTHER_FORMATS: [&str; 14] = [
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".npz",
    ".onnx",
    ".onnx_data",
    ".onnx.data",
    ".pb",
    ".tflite",
    ".ot",
];

/// One file to be copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SideFile {
    /// Its path below the source, and below the target.
    pub(super) name: String,
    /// Its path.
    pub(super) path: PathBuf,
    /// Its length in bytes: when it was listed, or of `contents`.
    pub(super) bytes: u64,
    /// Written instead of a copy, if the conversion changes the file.
    pub(super) contents: Option<String>,
}

/// The files beside the weights of a source.
#[derive(Debug, Default)]
pub(super) struct SideFiles {
    /// Sorted by name.
    pub(super) files: Vec<SideFile>,
    /// Notes about files that are not copied.
    pub(super) notes: Vec<String>,
    /// Indices of weights, sorted. They are not copied: a conversion writes its own.
    pub(super) indices: Vec<String>,
    /// Files of tensors that are in no index, or were not chosen.
    pub(super) other_tensors: NameSample,
}

impl SideFiles {
    /// Lists the side files of `checkpoint`, which was opened at `source`: those in that directory,
    /// or in the directory of that index. A single file of tensors has none. A target inside the
    /// source is left out.
    ///
    /// # Errors
    /// [`ConvertError::Read`] for a folder that cannot be listed,
    /// [`ConvertError::TooManySideFiles`].
    pub(super) fn list(
        source: &Path,
        target: Option<&Path>,
        checkpoint: &Checkpoint,
    ) -> Result<Self, ConvertError> {
        let Some(root) = directory_of(source) else { return Ok(Self::default()) };
        let mut search = Search {
            root: &root,
            target: target.and_then(inode_of),
            converted: checkpoint.shards().iter().map(|shard| shard.path.as_path()).collect(),
            found: Self::default(),
            other_formats: NameSample::default(),
            not_regular: NameSample::default(),
            bad_names: NameSample::default(),
            conversions: NameSample::default(),
        };
        search.folder("", 0)?;
        let Search { mut found, other_formats, not_regular, bad_names, conversions, .. } = search;
        found.files.sort_by(|left, right| left.name.cmp(&right.name));
        found.indices.sort();
        let notes = [
            found.other_tensors.note("not copied, since they hold tensors that are not converted"),
            other_formats.note("not copied, since they hold weights in other formats"),
            not_regular.note("not copied, since they are not regular files"),
            bad_names.note("not copied, since a manifest cannot have their names"),
            conversions.note("not copied, since other conversions made them"),
        ];
        found.notes = notes.into_iter().flatten().collect();
        Ok(found)
    }

    /// Bytes of all side files.
    pub(super) fn total_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }
}

/// The directory of the side files of `source`; `None` for a file of tensors.
pub(super) fn directory_of(source: &Path) -> Option<PathBuf> {
    if source.is_dir() {
        return Some(source.to_owned());
    }
    let name = source.file_name()?.to_string_lossy();
    name.ends_with(".json").then(|| source.parent().unwrap_or(Path::new("")).to_owned())
}

/// Device and inode of an existing file or folder. They are the same for every path to it.
pub(super) fn inode_of(path: &Path) -> Option<(u64, u64)> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let metadata = path.metadata().ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// The first few of many names, and how many there are.
#[derive(Debug, Default)]
pub(super) struct NameSample {
    names: BTreeSet<String>,
    count: usize,
}

impl NameSample {
    fn add(&mut self, name: String) {
        self.count += 1;
        self.names.insert(name);
        if self.names.len() > NAMED_MAX {
            self.names.pop_last();
        }
    }

    fn note(&self, why: &str) -> Option<String> {
        Some(format!("{why}: {}", self.text()?))
    }

    /// The first names, and how many more there are; `None` if there are none.
    pub(super) fn text(&self) -> Option<String> {
        let more = match self.count - self.names.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        (self.count > 0).then(|| format!("{}{more}", names.join(", ")))
    }
}

/// The state of a search.
struct Search<'a> {
    root: &'a Path,
    /// Device and inode of the target, if it is there.
    target: Option<(u64, u64)>,
    converted: BTreeSet<&'a Path>,
    found: SideFiles,
    other_formats: NameSample,
    not_regular: NameSample,
    bad_names: NameSample,
    /// Folders that conversions made.
    conversions: NameSample,
}

impl Search<'_> {
    /// Searches a folder. Its path below the root is empty or ends in a slash.
    fn folder(&mut self, folder: &str, depth: usize) -> Result<(), ConvertError> {
        let path = self.root.join(folder);
        let failed = |source| ConvertError::Read { path: path.clone(), operation: "list", source };
        for name in names_in(&path).map_err(failed)? {
            self.entry(folder, &name.map_err(failed)?, depth)?;
        }
        Ok(())
    }

    fn entry(&mut self, folder: &str, raw: &OsStr, depth: usize) -> Result<(), ConvertError> {
        if raw.as_encoded_bytes().starts_with(b".") {
            return Ok(());
        }
        let name = format!("{folder}{}", raw.to_string_lossy());
        // A file system may list bad names: none must lead out of the target.
        let is_plain = raw.to_str().is_some_and(|text| !text.contains('/'));
        if !is_plain || relative_name(&name) != Ok(&name) {
            self.bad_names.add(name);
            return Ok(());
        }
        let path = self.root.join(&name);
        let is_link = path.is_symlink();
        let Ok(metadata) = path.metadata() else {
            self.unreachable(name, raw);
            return Ok(());
        };
        match FileKind::of(metadata.file_type()) {
            FileKind::Directory if is_link => self.not_regular.add(name),
            FileKind::Directory if Some((metadata.dev(), metadata.ino())) == self.target => {}
            FileKind::Directory if path.join(MANIFEST_NAME).exists() => {
                self.conversions.add(format!("{name}/"))
            }
            FileKind::Directory if depth == DEPTH_MAX => self.not_regular.add(format!("{name}/ (too deep)")),
            FileKind::Directory => return self.folder(&format!("{name}/"), depth + 1),
            FileKind::Regular => return self.regular(name, raw, path, &metadata),
            _ => self.not_regular.add(name),
        }
        Ok(())
    }

    /// Notes a link that leads nowhere, or a file that was removed.
    fn unreachable(&mut self, name: String, raw: &OsStr) {
        match kind_of_name(&raw.to_string_lossy()) {
            NameKind::Tensors => self.found.other_tensors.add(name),
            NameKind::OtherFormat => self.other_formats.add(name),
            NameKind::Manifest | NameKind::Index => {}
            NameKind::Other => self.not_regular.add(name),
        }
    }

    fn regular(
        &mut self,
        name: String,
        raw: &OsStr,
        path: PathBuf,
        metadata: &Metadata,
    ) -> Result<(), ConvertError> {
        match kind_of_name(&raw.to_string_lossy()) {
            // A file of any name may have been given as the source.
            _ if self.converted.contains(path.as_path()) => {}
            NameKind::Manifest => {}
            NameKind::Index => self.found.indices.push(name),
            NameKind::Tensors => self.found.other_tensors.add(name),
            NameKind::OtherFormat => self.other_formats.add(name),
            NameKind::Other if self.found.files.len() == FILES_MAX => {
                let (path, limit) = (self.root.to_owned(), to_u64(FILES_MAX));
                return Err(ConvertError::TooManySideFiles { path, limit });
            }
            NameKind::Other => {
                self.found.files.push(SideFile { name, path, bytes: metadata.len(), contents: None })
            }
        }
        Ok(())
    }
}

/// The kind of a file, from its name.
#[derive(Debug, PartialEq, Eq)]
enum NameKind {
    /// A safetensors file.
    Tensors,
    /// Weights in another format.
    OtherFormat,
    /// The index of weights in any format.
    Index,
    /// The manifest of a conversion.
    Manifest,
    /// Anything else.
    Other,
}

fn kind_of_name(name: &str) -> NameKind {
    let name = name.to_ascii_lowercase();
    let is_other_format = |name: &str| OTHER_FORMATS.iter().any(|end| name.ends_with(end));
    // `model.safetensors.index.json`, `pytorch_model.bin.index.fp16.json`
    let stem = name.strip_suffix(".json").and_then(|name| Some(name.rsplit_once(".index")?.0));
    if name == MANIFEST_NAME {
        NameKind::Manifest
    } else if stem.is_some_and(|stem| stem.ends_with(TENSORS) || is_other_format(stem)) {
        NameKind::Index
    } else if name.ends_with(TENSORS) {
        NameKind::Tensors
    } else if is_other_format(&name) {
        NameKind::OtherFormat
    } else {
        NameKind::Other
    }
}

impl SideFile {
    /// Replaces what will be written.
    pub(super) fn set_contents(&mut self, contents: String) {
        self.bytes = to_u64(contents.len());
        self.contents = Some(contents);
    }

    /// Writes the file to `out`; `out_path` is its path, for errors. Holds 256 KiB.
    ///
    /// # Errors
    /// [`ConvertError::Read`], [`ConvertError::Write`], and [`CheckpointError::FileChanged`] if the
    /// file changed meanwhile.
    pub(super) fn copy_to(
        &self,
        out: &mut impl Write,
        out_path: &Path,
        with_sha256: bool,
    ) -> Result<SideFileRecord, ConvertError> {
        let mut digest = Digest::new(with_sha256);
        let mut write = |piece: &[u8]| {
            digest.update(piece);
            out.write_all(piece).map_err(|source| ConvertError::Write {
                path: out_path.to_owned(),
                operation: "write",
                source,
            })
        };
        let bytes = match &self.contents {
            Some(contents) => write(contents.as_bytes()).map(|()| self.bytes)?,
            None => read_file(&self.path, write).map_err(|fault| fault.at(&self.path))?,
        };
        let hashes = digest.take();
        let sha256 = hashes.sha256.as_ref().map(hex);
        Ok(SideFileRecord { name: self.name.clone(), bytes, blake3: hex(&hashes.blake3), sha256 })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, Mode, mkfifoat};
    use tempfile::TempDir;

    use super::*;
    use crate::checkpoint::CheckpointError;

    /// A file of one tensor without bytes.
    const WEIGHTS_FILE: &[u8] =
        b"\x36\0\0\0\0\0\0\0{\"t\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}} ";

    /// A folder with these files, whose parts are made.
    fn folder(files: &[&str]) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let is_weights = name.ends_with(".safetensors");
            fs::write(path, if is_weights { WEIGHTS_FILE } else { name.as_bytes() }).unwrap();
        }
        folder
    }

    fn listed(source: &Path, target: &Path) -> (Vec<String>, Vec<String>) {
        let checkpoint = Checkpoint::open(source).unwrap();
        let found = SideFiles::list(source, Some(target), &checkpoint).unwrap();
        (found.files.into_iter().map(|file| file.name).collect(), found.notes)
    }

    const NOWHERE: &str = "/nonexistent/target";

    #[test]
    fn all_that_is_no_weights_goes_along() {
        let source = folder(&[
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "generation_config.json",
            "README.md",
            "modeling_x.py",
            "chat_template.jinja",
            "tokenizer.model",
            "sub/folder/vocab.txt",
            "1_Pooling/config.json",
            "onnx/model.onnx",
            "onnx/model.onnx_data",
            "original/consolidated.00.pth",
            "pytorch_model.bin",
            "PYTORCH_MODEL-2.BIN",
            "pytorch_model.bin.index.json",
            "model.fp16.safetensors",
            "model.safetensors.index.fp16.json.bak",
            "onelayer.manifest.json",
            ".gitattributes",
            ".git/config",
            ".onelayer-convert/job.json",
            "my.index.json",
        ]);
        let (names, notes) = listed(source.path(), Path::new(NOWHERE));
        let expected = [
            "1_Pooling/config.json",
            "README.md",
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors.index.fp16.json.bak",
            "modeling_x.py",
            "my.index.json",
            "sub/folder/vocab.txt",
            "tokenizer.json",
            "tokenizer.model",
        ];
        assert_eq!(names, expected);
        assert_eq!(
            notes,
            [
                "not copied, since they hold tensors that are not converted: model.fp16.safetensors",
                "not copied, since they hold weights in other formats: PYTORCH_MODEL-2.BIN, onnx/model.onnx, \
                 onnx/model.onnx_data, original/consolidated.00.pth and 1 more",
            ]
        );
        let checkpoint = Checkpoint::open(source.path()).unwrap();
        let found = SideFiles::list(source.path(), None, &checkpoint).unwrap();
        assert_eq!(found.indices, ["pytorch_model.bin.index.json"]);
        assert_eq!(found.other_tensors.text().as_deref(), Some("model.fp16.safetensors"));
    }

    #[test]
    fn a_file_of_tensors_has_no_side_files_and_an_index_has_those_of_its_folder() {
        let source = folder(&["model-a.safetensors", "config.json"]);
        let index = source.path().join("x.safetensors.index.json");
        fs::write(&index, r#"{"weight_map":{"t":"model-a.safetensors"}}"#).unwrap();
        let nowhere = Path::new(NOWHERE);
        assert_eq!(listed(&source.path().join("model-a.safetensors"), nowhere), (vec![], vec![]));
        let expected = (vec!["config.json".to_owned()], vec![]);
        assert_eq!(listed(&index, nowhere), expected);
        assert_eq!(listed(source.path(), nowhere), expected);
    }

    #[test]
    fn parts_of_a_pipeline_keep_their_folders() {
        let files = ["unet/model.safetensors", "unet/config.json", "scheduler/scheduler_config.json"];
        let source = folder(&files);
        let index = r#"{"unet":["diffusers","X"],"scheduler":["diffusers","Y"]}"#;
        fs::write(source.path().join("model_index.json"), index).unwrap();
        let expected = ["model_index.json", "scheduler/scheduler_config.json", "unet/config.json"];
        assert_eq!(listed(source.path(), Path::new(NOWHERE)), (expected.map(str::to_owned).to_vec(), vec![]));
    }

    #[test]
    fn the_target_and_other_conversions_are_left_out() {
        let source = folder(&[
            "model.safetensors",
            "config.json",
            "out/config.json",
            "other/config.json",
            "other/onelayer.manifest.json",
        ]);
        let inside = source.path().join("other/../out");
        let (names, notes) = listed(source.path(), &inside);
        assert_eq!(
            (names, notes),
            (
                vec!["config.json".to_owned()],
                vec!["not copied, since other conversions made them: other/".to_owned()]
            )
        );
    }

    #[test]
    fn links_to_files_are_followed_and_nothing_else_is_opened() {
        let blobs = folder(&["blob", "secret/config.json"]);
        let source = folder(&["model.safetensors"]);
        let at = |name: &str| source.path().join(name);
        symlink(blobs.path().join("blob"), at("config.json")).unwrap();
        symlink(blobs.path().join("secret"), at("folder")).unwrap();
        symlink(blobs.path().join("none"), at("dangling.json")).unwrap();
        symlink(source.path(), at("loop")).unwrap();
        mkfifoat(CWD, at("fifo.json"), Mode::RWXU).unwrap();
        symlink("/dev/zero", at("zero.json")).unwrap();
        fs::write(at("back\\slash"), "x").unwrap();
        fs::write(source.path().join(OsStr::from_bytes(b"not \xff text")), "x").unwrap();
        let (names, notes) = listed(source.path(), Path::new(NOWHERE));
        assert_eq!(names, ["config.json"]);
        assert_eq!(
            notes,
            [
                "not copied, since they are not regular files: dangling.json, fifo.json, folder, loop and 1 more",
                "not copied, since a manifest cannot have their names: back\\slash, not \u{fffd} text",
            ]
        );
    }

    #[test]
    fn what_is_too_deep_or_too_much_is_said() {
        let deep = "a/".repeat(DEPTH_MAX) + "kept";
        let deeper = "b/".repeat(DEPTH_MAX + 1) + "lost";
        let source = folder(&["model.safetensors", &deep, &deeper]);
        let (names, notes) = listed(source.path(), Path::new(NOWHERE));
        assert_eq!(names, [deep]);
        assert!(notes[0].ends_with("b/b/b/b/b/b/b/b/b/ (too deep)"), "{notes:?}");
        for number in 0..FILES_MAX {
            fs::write(source.path().join(format!("n{number}")), "").unwrap();
        }
        let checkpoint = Checkpoint::open(source.path()).unwrap();
        let error = SideFiles::list(source.path(), None, &checkpoint).unwrap_err();
        assert!(matches!(error, ConvertError::TooManySideFiles { limit: 10_000, .. }), "{error}");
    }

    #[test]
    fn a_copy_is_hashed_and_refused_if_its_source_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("big.bin.txt");
        let bytes: Vec<u8> =
            (0..9_000_001_u32).map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
        fs::write(&path, &bytes).unwrap();
        let file = SideFile {
            name: "sub/big".to_owned(),
            path: path.clone(),
            bytes: to_u64(bytes.len()),
            contents: None,
        };
        let mut out = Vec::new();
        let record = file.copy_to(&mut out, Path::new("target"), true).unwrap();
        assert!(out == bytes);
        assert_eq!((record.name.as_str(), record.bytes), ("sub/big", 9_000_001));
        assert_eq!(record.blake3, blake3::hash(&bytes).to_hex().as_str());
        assert_eq!(record.sha256.map(|text| text.len()), Some(64));

        for (start, len_bytes) in [(9_000_001, 9_000_002), (8_000_000, 9_000_002)] {
            let mut meddler = Meddler { path: path.clone(), writes: 0, start };
            let error = file.copy_to(&mut meddler, Path::new("target"), false).unwrap_err();
            let ConvertError::Checkpoint(CheckpointError::FileChanged { states, .. }) = &error else {
                panic!("{error}")
            };
            assert_eq!(states.1.len_bytes, len_bytes, "longer first, then as long as before");
        }
    }

    /// Changes the file that is being copied, from `start` on.
    struct Meddler {
        path: PathBuf,
        writes: usize,
        start: u64,
    }

    impl Write for Meddler {
        fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
            self.writes += 1;
            if self.writes == 5 {
                let file = fs::OpenOptions::new().write(true).open(&self.path).unwrap();
                std::os::unix::fs::FileExt::write_all_at(&file, b"x", self.start).unwrap();
            }
            Ok(piece.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_copy_that_cannot_be_written_names_the_target() {
        let folder = folder(&["config.json"]);
        let path = folder.path().join("config.json");
        let file = SideFile { name: "config.json".to_owned(), path, bytes: 11, contents: None };
        let error = file.copy_to(&mut &mut [0; 3][..], Path::new("/t/config.json"), false).unwrap_err();
        assert_eq!(error.to_string(), "/t/config.json: cannot write");
        let gone = SideFile { path: folder.path().join("gone"), ..file };
        let error = gone.copy_to(&mut Vec::new(), Path::new("t"), false).unwrap_err();
        assert!(error.to_string().ends_with("gone: cannot open"), "{error}");
    }
}
