//! Reads a manifest piece by piece, since that of a large model should not be in memory.
//!
//! A manifest is text that anybody may have written. Its names become paths, so they are checked
//! like those of an index. A wrong hash or size refuses the manifest, with line and column.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::manifest::{
    Entry, MANIFEST_SCHEMA, Manifest, ManifestFile, ManifestHead, ManifestTensor, SideFileRecord,
};
use super::{ConvertError, hash};
use crate::checkpoint::{OpenFault, open_regular, relative_name};
use crate::units::HumanBytes;

/// The longest manifest that is read, in bytes: four million tensors.
const MANIFEST_BYTES_MAX: u64 = 1 << 30;
/// Characters of a wrong text that an error shows.
const SHOWN_CHARACTERS: usize = 80;

impl Manifest {
    /// Reads a manifest.
    ///
    /// # Errors
    /// [`ConvertError::Read`] if there is none. [`ConvertError::BadManifest`] with line and column
    /// if it is not one of this version, or names files outside its directory.
    pub fn read(path: &Path) -> Result<Self, ConvertError> {
        let mut files: Vec<ManifestFile> = Vec::new();
        let opened = OpenManifest::open(path)?.ok_or_else(|| {
            let source = io::Error::from(io::ErrorKind::NotFound);
            ConvertError::Read { path: path.to_owned(), operation: "open", source }
        })?;
        let (head, side_files) = opened.read(&mut |entry| match entry {
            Entry::File(file) => files.push(file),
            Entry::Tensor(tensor) => files.last_mut().expect("it comes after its file").tensors.push(tensor),
        })?;
        let ManifestHead { tool, fingerprint, source, options, aliases, left_out } = head;
        let schema = MANIFEST_SCHEMA.to_owned();
        Ok(Self { schema, tool, fingerprint, source, options, aliases, left_out, files, side_files })
    }
}

/// Takes the entries of files, in order.
type OnEntry<'a> = &'a mut dyn FnMut(Entry);

/// Reads the entry of one file, as the journal has it.
///
/// # Errors
/// Those of `json`; [`io::ErrorKind::InvalidData`] if it is not one whole entry.
pub(super) fn read_file_entry(json: impl Read, on_entry: OnEntry<'_>) -> io::Result<()> {
    let mut json = serde_json::Deserializer::from_reader(json);
    let mut names = Names::default();
    let read = FileSeed { on_entry, names: &mut names }.deserialize(&mut json);
    read.and_then(|()| json.end()).map_err(|error| match error.is_io() {
        true => error.into(),
        false => io::Error::new(io::ErrorKind::InvalidData, error),
    })
}

/// A manifest that is open and not read yet.
#[derive(Debug)]
pub(super) struct OpenManifest<'a> {
    path: &'a Path,
    file: File,
}

impl<'a> OpenManifest<'a> {
    /// Opens the manifest at `path`; `None` if nothing is there.
    ///
    /// # Errors
    /// [`ConvertError::Read`]; [`ConvertError::BadManifest`] if it is not a file, or too long.
    pub(super) fn open(path: &'a Path) -> Result<Option<Self>, ConvertError> {
        let bad = |reason| ConvertError::BadManifest { path: path.to_owned(), reason };
        match open_regular(path) {
            Ok((_, identity)) if identity.len_bytes > MANIFEST_BYTES_MAX => Err(bad(format!(
                "it has {}, and {} are the most that is read",
                HumanBytes(identity.len_bytes),
                HumanBytes(MANIFEST_BYTES_MAX)
            ))),
            Ok((file, _)) => Ok(Some(Self { path, file })),
            Err(OpenFault::NotRegular(found)) => Err(bad(format!("it is a {found}"))),
            Err(OpenFault::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(OpenFault::Io(source)) => {
                Err(ConvertError::Read { path: path.to_owned(), operation: "open", source })
            }
        }
    }

    /// Reads it. `on_entry` gets files and tensors one by one, in their order, before a later fault
    /// is known.
    ///
    /// # Errors
    /// [`ConvertError::Read`], [`ConvertError::BadManifest`].
    pub(super) fn read(
        self,
        on_entry: OnEntry<'_>,
    ) -> Result<(ManifestHead, Vec<SideFileRecord>), ConvertError> {
        let mut json = serde_json::Deserializer::from_reader(BufReader::new(self.file));
        let read = json.deserialize_map(ManifestVisitor { on_entry });
        read.and_then(|manifest| json.end().map(|()| manifest)).map_err(|error| match error.io_error_kind() {
            Some(kind) => {
                ConvertError::Read { path: self.path.to_owned(), operation: "read", source: kind.into() }
            }
            None => ConvertError::BadManifest { path: self.path.to_owned(), reason: error.to_string() },
        })
    }
}

/// Reads the outermost object.
struct ManifestVisitor<'a> {
    on_entry: OnEntry<'a>,
}

impl<'de> Visitor<'de> for ManifestVisitor<'_> {
    type Value = (ManifestHead, Vec<SideFileRecord>);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a manifest")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut names = Names::default();
        let (mut schema, mut tool, mut source, mut options) = (None::<String>, None, None, None);
        let mut fingerprint = None;
        let (mut aliases, mut left_out, mut files, mut side_files) = (None, None, None, None);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "schema" => {
                    once(&mut map, &mut schema, "schema")?;
                    check_schema(schema.as_deref()).map_err(A::Error::custom)?;
                }
                "tool" => once(&mut map, &mut tool, "tool")?,
                "fingerprint" => once(&mut map, &mut fingerprint, "fingerprint")?,
                "source" => once(&mut map, &mut source, "source")?,
                "options" => once(&mut map, &mut options, "options")?,
                "aliases" => once(&mut map, &mut aliases, "aliases")?,
                "left_out" => once(&mut map, &mut left_out, "left_out")?,
                "files" if files.is_some() => return Err(A::Error::duplicate_field("files")),
                "files" => {
                    let seed = FilesSeed { on_entry: &mut *self.on_entry, names: &mut names };
                    files = Some(map.next_value_seed(seed)?);
                }
                "side_files" => once(&mut map, &mut side_files, "side_files")?,
                // A later version may add parts; those that are known can be checked without them.
                _ => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        let missing = A::Error::missing_field;
        schema.ok_or_else(|| missing("schema"))?;
        files.ok_or_else(|| missing("files"))?;
        let side_files: Vec<SideFileRecord> = side_files.ok_or_else(|| missing("side_files"))?;
        for file in &side_files {
            let hashes = check_hashes([Some(&file.blake3), file.sha256.as_ref()]);
            hashes.and_then(|()| names.add(&file.name)).map_err(A::Error::custom)?;
        }
        let head = ManifestHead {
            tool: tool.ok_or_else(|| missing("tool"))?,
            fingerprint: fingerprint.ok_or_else(|| missing("fingerprint"))?,
            source: source.ok_or_else(|| missing("source"))?,
            options: options.ok_or_else(|| missing("options"))?,
            aliases: aliases.ok_or_else(|| missing("aliases"))?,
            left_out: left_out.ok_or_else(|| missing("left_out"))?,
        };
        Ok((head, side_files))
    }
}

/// Reads a value whose key may occur only once.
fn once<'de, A: MapAccess<'de>, T: Deserialize<'de>>(
    map: &mut A,
    place: &mut Option<T>,
    key: &'static str,
) -> Result<(), A::Error> {
    if place.is_some() {
        return Err(A::Error::duplicate_field(key));
    }
    *place = Some(map.next_value()?);
    Ok(())
}

fn check_schema(found: Option<&str>) -> Result<(), String> {
    match found {
        Some(found) if found != MANIFEST_SCHEMA => {
            Err(format!("it is of {:?}, not of {MANIFEST_SCHEMA:?}", short(found)))
        }
        _ => Ok(()),
    }
}

/// Reads the entries of files, one by one.
struct FilesSeed<'a> {
    on_entry: OnEntry<'a>,
    names: &'a mut Names,
}

impl<'de> DeserializeSeed<'de> for FilesSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for FilesSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of files")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<(), A::Error> {
        let Self { on_entry, names } = self;
        while array.next_element_seed(FileSeed { on_entry: &mut *on_entry, names: &mut *names })?.is_some() {}
        Ok(())
    }
}

/// Reads the entry of one file. The tensors must come last: they are too many to be kept until the
/// rest of the entry is known.
struct FileSeed<'a> {
    on_entry: OnEntry<'a>,
    names: &'a mut Names,
}

impl<'de> DeserializeSeed<'de> for FileSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FileSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the entry of a file")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let (mut name, mut bytes, mut blake3, mut sha256, mut layers) = (None, None, None, None, None);
        let mut has_tensors = false;
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "name" | "bytes" | "blake3" | "sha256" | "layers" | "tensors" if has_tensors => {
                    let text = format_args!("`{key}` of a file comes after its tensors");
                    return Err(A::Error::custom(text));
                }
                "name" => once(&mut map, &mut name, "name")?,
                "bytes" => once(&mut map, &mut bytes, "bytes")?,
                "blake3" => once(&mut map, &mut blake3, "blake3")?,
                "sha256" => once::<_, Option<String>>(&mut map, &mut sha256, "sha256")?,
                "layers" => once(&mut map, &mut layers, "layers")?,
                "tensors" => {
                    let missing = A::Error::missing_field;
                    let file = ManifestFile {
                        name: name.take().ok_or_else(|| missing("name"))?,
                        bytes: bytes.take().ok_or_else(|| missing("bytes"))?,
                        blake3: blake3.take().ok_or_else(|| missing("blake3"))?,
                        sha256: sha256.take().flatten(),
                        layers: layers.take().ok_or_else(|| missing("layers"))?,
                        tensors: Vec::new(),
                    };
                    has_tensors = true;
                    let hashes = check_hashes([Some(&file.blake3), file.sha256.as_ref()]);
                    hashes.and_then(|()| self.names.add(&file.name)).map_err(A::Error::custom)?;
                    let (name, bytes) = (short(&file.name), file.bytes);
                    (self.on_entry)(Entry::File(file));
                    let tensor_bytes = map.next_value_seed(TensorsSeed { on_entry: &mut *self.on_entry })?;
                    if tensor_bytes > bytes {
                        let text = format_args!("{name:?} has {bytes} bytes, its tensors {tensor_bytes}");
                        return Err(A::Error::custom(text));
                    }
                }
                _ => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        if has_tensors { Ok(()) } else { Err(A::Error::missing_field("tensors")) }
    }
}

/// Reads the tensors of a file, one by one. Returns the sum of their bytes.
struct TensorsSeed<'a> {
    on_entry: OnEntry<'a>,
}

impl<'de> DeserializeSeed<'de> for TensorsSeed<'_> {
    type Value = u64;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<u64, D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for TensorsSeed<'_> {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of tensors")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<u64, A::Error> {
        let mut bytes = 0_u64;
        while let Some(tensor) = array.next_element::<ManifestTensor>()? {
            check_hashes([Some(&tensor.blake3), tensor.sha256.as_ref()]).map_err(A::Error::custom)?;
            bytes = bytes.saturating_add(tensor.bytes);
            (self.on_entry)(Entry::Tensor(tensor));
        }
        Ok(bytes)
    }
}

/// Names of files. Each may occur only once.
#[derive(Default)]
struct Names(BTreeSet<String>);

impl Names {
    fn add(&mut self, name: &str) -> Result<(), String> {
        match relative_name(name) {
            Err(reason) => {
                return Err(format!("the name {:?} leads out of the directory: {reason}", short(name)));
            }
            Ok(rest) if rest != name => {
                return Err(format!("the name {:?} is not in its shortest form", short(name)));
            }
            Ok(_) => {}
        }
        match self.0.insert(name.to_owned()) {
            true => Ok(()),
            false => Err(format!("the file {:?} occurs twice", short(name))),
        }
    }
}

fn check_hashes<'a>(hashes: impl IntoIterator<Item = Option<&'a String>>) -> Result<(), String> {
    match hashes.into_iter().flatten().find(|hash| hash::from_hex(hash).is_none()) {
        Some(hash) => Err(format!("{:?} is not a hash of 64 lower-case hexadecimal digits", short(hash))),
        None => Ok(()),
    }
}

/// The start of a text from a manifest.
fn short(text: &str) -> String {
    text.chars().take(SHOWN_CHARACTERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(change: impl Fn(&mut serde_json::Value)) -> serde_json::Value {
        let hash = "0".repeat(64);
        let mut value = serde_json::json!({
            "schema": "onelayer-manifest/1", "tool": "test 1", "fingerprint": "f", "options": [], "aliases": [], "left_out": [],
            "source": {"path": "model", "files": []},
            "files": [{
                "name": "model-00001-of-00001.safetensors", "bytes": 100, "blake3": hash, "layers": ["a"],
                "tensors": [{"name": "a", "dtype": "U8", "shape": [3], "bytes": 3, "blake3": hash}]
            }],
            "side_files": [{"name": "config.json", "bytes": 3, "blake3": hash, "sha256": hash}],
        });
        change(&mut value);
        value
    }

    fn read(text: &str) -> Result<Manifest, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("onelayer.manifest.json");
        std::fs::write(&path, text).unwrap();
        Manifest::read(&path).map_err(|error| match error {
            ConvertError::BadManifest { reason, .. } => reason,
            other => panic!("{other}"),
        })
    }

    #[test]
    fn names_hashes_and_sizes_are_checked() {
        assert!(read(&manifest(|_| {}).to_string()).is_ok());
        type Change = fn(&mut serde_json::Value);
        let cases: [(Change, &str); 14] = [
            (|value| value["files"][0]["name"] = "../x.safetensors".into(), "it has a part `..`"),
            (|value| value["files"][0]["name"] = "/x.safetensors".into(), "it is absolute"),
            (|value| value["side_files"][0]["name"] = "a/../../x".into(), "it has a part `..`"),
            (|value| value["side_files"][0]["name"] = "./config.json".into(), "not in its shortest form"),
            (|value| value["side_files"][0]["name"] = value["files"][0]["name"].clone(), "occurs twice"),
            (|value| value["files"][0]["blake3"] = "0".into(), "not a hash"),
            (|value| value["files"][0]["tensors"][0]["blake3"] = "A".repeat(64).into(), "not a hash"),
            (|value| value["side_files"][0]["sha256"] = "".into(), "not a hash"),
            (|value| value["files"][0]["tensors"][0]["bytes"] = 101.into(), "has 100 bytes, its tensors 101"),
            (|value| value["files"][0]["bytes"] = (-1).into(), "expected u64"),
            (|value| value["files"][0]["tensors"] = 1.into(), "expected an array of tensors"),
            (|value| value["files"][0] = 1.into(), "expected the entry of a file"),
            (|value| value["files"] = 1.into(), "expected an array of files"),
            (
                |value| value["schema"] = "onelayer-manifest/2".into(),
                "it is of \"onelayer-manifest/2\", not of",
            ),
        ];
        for (change, expected) in cases {
            let reason = read(&manifest(change).to_string()).unwrap_err();
            assert!(reason.contains(expected) && reason.contains(" at line 1 column "), "{reason}");
        }
    }

    #[test]
    fn all_parts_are_there_once() {
        for part in [
            "schema",
            "tool",
            "fingerprint",
            "source",
            "options",
            "aliases",
            "left_out",
            "files",
            "side_files",
        ] {
            let whole = manifest(|_| {});
            let mut less = whole.clone();
            less.as_object_mut().unwrap().remove(part);
            let reason = read(&less.to_string()).unwrap_err();
            assert!(reason.contains(&format!("missing field `{part}`")), "{reason}");
            let twice = format!("{{\"{part}\":{},{}", whole[part], &whole.to_string()[1..]);
            let reason = read(&twice).unwrap_err();
            assert!(reason.contains(&format!("duplicate field `{part}`")), "{reason}");
        }
        let more = manifest(|value| value["later"] = serde_json::json!({"a": [1, {"b": null}]}));
        assert!(read(&more.to_string()).is_ok(), "what a later version adds is passed over");
    }

    #[test]
    fn what_a_file_says_of_itself_stands_before_its_tensors() {
        let file = manifest(|_| {})["files"][0].clone();
        let with = |order: &[&str]| {
            let members = order.iter().map(|&key| format!("\"{key}\":{}", file[key]));
            let file = format!("{{{}}}", members.collect::<Vec<_>>().join(","));
            read(
                &manifest(|value| value["files"] = "FILES".into())
                    .to_string()
                    .replace("\"FILES\"", &format!("[{file}]")),
            )
        };
        let sorted = ["blake3", "bytes", "layers", "name", "tensors"];
        assert!(with(&sorted).is_ok());
        for missing in sorted {
            let order: Vec<&str> = sorted.into_iter().filter(|&key| key != missing).collect();
            let reason = with(&order).unwrap_err();
            assert!(reason.contains(&format!("missing field `{missing}`")), "{reason}");
        }
        let twice = |key: &'static str| [&[key], &sorted[..]].concat();
        for key in ["blake3", "bytes", "layers", "name"] {
            let reason = with(&twice(key)).unwrap_err();
            assert!(reason.contains(&format!("duplicate field `{key}`")), "{reason}");
        }
        for key in sorted {
            let reason = with(&[&sorted[..], &[key]].concat()).unwrap_err();
            assert!(reason.contains(&format!("`{key}` of a file comes after its tensors")), "{reason}");
        }
    }

    #[test]
    fn what_is_no_manifest_is_refused_with_its_place() {
        let whole = manifest(|_| {}).to_string();
        for end in [0, 1, 50, whole.len() - 1] {
            let reason = read(&whole[..end]).unwrap_err();
            assert!(reason.starts_with("EOF while parsing"), "{reason}");
        }
        for text in ["[]", "null", "{} x", "\u{feff}{}", "{\"files\":{}}", &format!("{whole}{whole}")] {
            assert!(read(text).unwrap_err().contains(" at line 1 column "), "{text}");
        }
        let folder = tempfile::tempdir().unwrap();
        let error = Manifest::read(&folder.path().join("none")).unwrap_err();
        assert!(error.to_string().ends_with("none: cannot open"), "{error}");
        let error = Manifest::read(folder.path()).unwrap_err();
        assert!(error.to_string().ends_with("not a manifest of this program: it is a directory"), "{error}");
    }

    #[test]
    fn files_before_a_fault_are_known() {
        let text = manifest(|value| value["side_files"] = 7.into()).to_string();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m");
        std::fs::write(&path, text).unwrap();
        let mut names = Vec::new();
        let opened = OpenManifest::open(&path).unwrap().unwrap();
        let read = opened.read(&mut |entry| match entry {
            Entry::File(file) => names.push(file.name),
            Entry::Tensor(tensor) => names.push(tensor.name),
        });
        assert!(read.is_err());
        assert_eq!(names, ["model-00001-of-00001.safetensors", "a"]);
        assert!(OpenManifest::open(&folder.path().join("none")).unwrap().is_none());
    }
}

#[cfg(test)]
mod round_trip_tests {
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;

    use super::super::manifest::{Alias, ManifestSource, ManifestWriter, SourceFile, write_file_entry};
    use super::*;

    fn written(manifest: &Manifest) -> Vec<u8> {
        let Manifest { tool, fingerprint, source, options, aliases, left_out, .. } = manifest.clone();
        let head = ManifestHead { tool, fingerprint, source, options, aliases, left_out };
        let mut writer = ManifestWriter::new(Vec::new(), &head).unwrap();
        for file in &manifest.files {
            let json = serde_json::to_string(file).unwrap();
            let mut line = Vec::new();
            let file = ManifestFile { tensors: Vec::new(), ..file.clone() };
            write_file_entry(&mut line, &file, tensors_of(&json).into_iter()).unwrap();
            assert_eq!(line, json.as_bytes(), "an entry of the journal");
            read_file_entry(&*line, &mut |entry| writer.entry(&entry).unwrap()).unwrap();
        }
        writer.finish(&manifest.side_files).unwrap()
    }

    fn tensors_of(json: &str) -> Vec<ManifestTensor> {
        serde_json::from_str::<ManifestFile>(json).unwrap().tensors
    }

    fn hash() -> impl Strategy<Value = String> {
        any::<[u8; 32]>().prop_map(|bytes| hash::hex(&bytes))
    }

    /// Texts with characters that JSON escapes, and with brackets and quotes.
    fn text() -> impl Strategy<Value = String> {
        prop_oneof![any::<String>(), "[\\[\\]{}\",\\\\ \n]{0,12}"]
    }

    fn tensor() -> impl Strategy<Value = ManifestTensor> {
        let kind = (text(), option::of(text()), vec(any::<u64>(), 0..4));
        (text(), kind, 0..1000_u64, hash(), option::of(hash())).prop_map(
            |(name, (dtype, cast_from, shape), bytes, blake3, sha256)| ManifestTensor {
                name,
                dtype,
                cast_from,
                quantised: None,
                shape,
                bytes,
                blake3,
                sha256,
            },
        )
    }

    fn file() -> impl Strategy<Value = ManifestFile> {
        (hash(), option::of(hash()), vec(text(), 0..3), vec(tensor(), 0..4)).prop_map(
            |(blake3, sha256, layers, tensors)| {
                let name = String::new(); // numbered below: names occur once
                ManifestFile { name, bytes: u64::MAX, blake3, sha256, layers, tensors }
            },
        )
    }

    fn source_file() -> impl Strategy<Value = SourceFile> {
        (text(), any::<u64>(), any::<i128>(), hash()).prop_map(|(name, bytes, modified_ns, header_blake3)| {
            SourceFile { name, bytes, modified_ns, header_blake3 }
        })
    }

    prop_compose! {
        fn manifest()(
            tool in text(),
            source in (text(), vec(source_file(), 0..3)),
            options in vec(text(), 0..3),
            aliases in vec((text(), text()), 0..3),
            left_out in vec(text(), 0..3),
            mut files in vec(file(), 0..4),
            hashes in vec((hash(), option::of(hash()), any::<u64>()), 0..3),
        ) -> Manifest {
            for (number, file) in files.iter_mut().enumerate() {
                file.name = format!("part \"{number}\"/x.safetensors");
            }
            let side_files = hashes.into_iter().enumerate().map(|(number, (blake3, sha256, bytes))| {
                SideFileRecord { name: format!("side {number}"), bytes, blake3, sha256 }
            });
            Manifest {
                schema: MANIFEST_SCHEMA.to_owned(),
                tool,
                fingerprint: "f".to_owned(),
                source: ManifestSource { path: source.0, files: source.1 },
                options,
                aliases: aliases.into_iter().map(|(name, same_as)| Alias { name, same_as }).collect(),
                left_out,
                files,
                side_files: side_files.collect(),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_was_written_reads_the_same(manifest in manifest()) {
            let text = written(&manifest);
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("manifest.json");
            std::fs::write(&path, &text).unwrap();
            prop_assert_eq!(&Manifest::read(&path).unwrap(), &manifest);
            // Another JSON reader reads the same. It has no 128-bit numbers, so the times are small.
            let mut smaller = manifest.clone();
            for file in &mut smaller.source.files {
                file.modified_ns = i128::from(file.bytes);
            }
            let value: serde_json::Value = serde_json::from_slice(&written(&smaller)).unwrap();
            prop_assert_eq!(value, serde_json::to_value(&smaller).unwrap());
        }
    }

    #[test]
    fn a_person_can_read_it() {
        let hash = "0".repeat(64);
        let tensor = |name: &str| ManifestTensor {
            name: name.to_owned(),
            dtype: "BF16".to_owned(),
            cast_from: Some("F32".to_owned()),
            quantised: None,
            shape: vec![2, 3],
            bytes: 12,
            blake3: hash.clone(),
            sha256: None,
        };
        let file = |name: &str, tensors| ManifestFile {
            name: name.to_owned(),
            bytes: 4120,
            blake3: hash.clone(),
            sha256: None,
            layers: vec!["model.norm".to_owned(), "lm_head".to_owned()],
            tensors,
        };
        let source_file = SourceFile {
            name: "model.safetensors".to_owned(),
            bytes: 9,
            modified_ns: -1,
            header_blake3: hash.clone(),
        };
        let manifest = Manifest {
            schema: MANIFEST_SCHEMA.to_owned(),
            tool: "onelayer 0.1.0".to_owned(),
            fingerprint: "abc".to_owned(),
            source: ManifestSource { path: "./model".to_owned(), files: vec![source_file] },
            options: vec!["--dtype".to_owned(), "bf16".to_owned()],
            aliases: vec![Alias { name: "lm_head.weight".to_owned(), same_as: "embed.weight".to_owned() }],
            left_out: Vec::new(),
            files: vec![
                file("a.safetensors", vec![tensor("a"), tensor("}],\"[{")]),
                file("b.safetensors", vec![]),
            ],
            side_files: Vec::new(),
        };
        let text = String::from_utf8(written(&manifest)).unwrap().replace(&hash, "HASH");
        assert_eq!(text, EXPECTED);
    }

    const EXPECTED: &str = r#"{
  "schema": "onelayer-manifest/1",
  "tool": "onelayer 0.1.0",
  "fingerprint": "abc",
  "source": {
    "path": "./model",
    "files": [
      {"name":"model.safetensors","bytes":9,"modified_ns":-1,"header_blake3":"HASH"}
    ]
  },
  "options": ["--dtype","bf16"],
  "aliases": [
    {"name":"lm_head.weight","same_as":"embed.weight"}
  ],
  "left_out": [],
  "files": [
    {"name":"a.safetensors","bytes":4120,"blake3":"HASH","layers":["model.norm","lm_head"],"tensors":[
      {"name":"a","dtype":"BF16","cast_from":"F32","shape":[2,3],"bytes":12,"blake3":"HASH"},
      {"name":"}],\"[{","dtype":"BF16","cast_from":"F32","shape":[2,3],"bytes":12,"blake3":"HASH"}
    ]},
    {"name":"b.safetensors","bytes":4120,"blake3":"HASH","layers":["model.norm","lm_head"],"tensors":[]}
  ],
  "side_files": []
}
"#;

    #[test]
    fn entries_that_are_not_whole_are_refused() {
        let hash = "0".repeat(64);
        let whole = format!(
            r#"{{"name":"a","bytes":9,"blake3":"{hash}","layers":["x"],"tensors":[{{"name":"}}]","dtype":"U8","shape":[1],"bytes":1,"blake3":"{hash}"}}]}}"#
        );
        let read = |json: &str| read_file_entry(json.as_bytes(), &mut |_| {});
        assert!(read(&whole).is_ok());
        let cut = (0..whole.len()).map(|end| whole[..end].to_owned());
        let more = ["{}", "]", "0"].map(|more| format!("{whole}{more}"));
        let wrong = ["{}{}", "{}\n", "[]", "7", r#"{"a":"b}"#, r#"{"a":["#, "{ }", "{}]", r#"{"a":"\"}"#];
        for json in cut.chain(more).chain(wrong.map(str::to_owned)) {
            assert_eq!(read(&json).unwrap_err().kind(), io::ErrorKind::InvalidData, "{json}");
        }
    }
}
