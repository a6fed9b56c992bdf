//! Writes a manifest piece by piece: what was made so far need not be in memory.
//!
//! The text is JSON that a person can read and compare: keys in a fixed order, a line for each
//! tensor. Entries of files come as JSON that was written when each was made (a journal).
//!
//! The conversion writes it last, into a file of a temporary name.

use std::io::{self, Read, Write};

use serde::Serialize;

use super::manifest::{Alias, MANIFEST_SCHEMA, ManifestSource, SideFileRecord};

/// What stands in a manifest before the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ManifestHead {
    /// Name and version of what writes it.
    pub(super) tool: String,
    /// Tells conversions apart.
    pub(super) fingerprint: String,
    /// What was converted.
    pub(super) source: ManifestSource,
    /// The options, as a person gave them.
    pub(super) options: Vec<String>,
    /// Tensors that are left out because another one has the same bytes.
    pub(super) aliases: Vec<Alias>,
    /// Names of tensors that were not selected.
    pub(super) left_out: Vec<String>,
}

/// A manifest on its way. It is complete after [`Self::finish`].
#[derive(Debug)]
pub(super) struct ManifestWriter<W> {
    out: W,
    has_files: bool,
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
        lines(&mut out, "\n      ", "\n    ", &head.source.files)?;
        out.write_all(b"\n  },\n  \"options\": ")?;
        serde_json::to_writer(&mut out, &head.options)?;
        out.write_all(b",\n  \"aliases\": ")?;
        lines(&mut out, "\n    ", "\n  ", &head.aliases)?;
        out.write_all(b",\n  \"left_out\": ")?;
        lines(&mut out, "\n    ", "\n  ", &head.left_out)?;
        out.write_all(b",\n  \"files\": [")?;
        Ok(Self { out, has_files: false })
    }

    /// Adds the entry of a file, a [`ManifestFile`](super::ManifestFile) that was written as JSON
    /// before, without white space between its parts.
    ///
    /// # Errors
    /// Those of the output and of `json`; [`io::ErrorKind::InvalidData`] if it is no whole object.
    pub(super) fn raw_file(&mut self, mut json: impl Read) -> io::Result<()> {
        self.next_file()?;
        let mut lines = TensorLines::new(&mut self.out);
        io::copy(&mut json, &mut lines)?;
        lines.finish()
    }

    /// Ends the manifest, and gives the output back. It is not flushed.
    ///
    /// # Errors
    /// Those of the output.
    pub(super) fn finish(mut self, side_files: &[SideFileRecord]) -> io::Result<W> {
        self.out.write_all(if self.has_files { b"\n  ]" } else { b"]" })?;
        self.out.write_all(b",\n  \"side_files\": ")?;
        lines(&mut self.out, "\n    ", "\n  ", side_files)?;
        self.out.write_all(b"\n}\n")?;
        Ok(self.out)
    }

    fn next_file(&mut self) -> io::Result<()> {
        self.out.write_all(if self.has_files { b",\n    " } else { b"\n    " })?;
        self.has_files = true;
        Ok(())
    }
}

/// An array with a line for each element.
fn lines<T: Serialize>(mut out: impl Write, before: &str, behind: &str, elements: &[T]) -> io::Result<()> {
    out.write_all(b"[")?;
    for (index, element) in elements.iter().enumerate() {
        out.write_all(if index == 0 { b"" } else { b"," })?;
        out.write_all(before.as_bytes())?;
        serde_json::to_writer(&mut out, element)?;
    }
    out.write_all(if elements.is_empty() { b"" } else { behind.as_bytes() })?;
    out.write_all(b"]")
}

/// The depth of a tensor: in the object of a file, in its array.
const TENSOR_DEPTH: u32 = 3;

/// Passes the JSON of a file on, and breaks the line before each of its tensors and behind the
/// last.
struct TensorLines<W> {
    out: W,
    /// Objects and arrays that are open.
    depth: u32,
    in_text: bool,
    is_escaped: bool,
    /// True between the end of a tensor and whatever follows.
    behind_tensor: bool,
    /// True once the outermost object is closed.
    is_whole: bool,
}

impl<W: Write> TensorLines<W> {
    fn new(out: W) -> Self {
        let (in_text, is_escaped, behind_tensor, is_whole) = (false, false, false, false);
        Self { out, depth: 0, in_text, is_escaped, behind_tensor, is_whole }
    }

    /// What has to stand before the next byte, if something has.
    fn step(&mut self, byte: u8) -> io::Result<Option<&'static [u8]>> {
        if self.in_text {
            let ends = byte == b'"' && !self.is_escaped;
            self.is_escaped = byte == b'\\' && !self.is_escaped;
            self.in_text = !ends;
            return Ok(None);
        }
        let starts = self.depth == 0 && byte == b'{' && !self.is_whole;
        if self.depth == 0 && !starts {
            return Err(malformed());
        }
        let was_behind = std::mem::take(&mut self.behind_tensor);
        match byte {
            b'"' => self.in_text = true,
            b'{' | b'[' => {
                self.depth += 1;
                if byte == b'{' && self.depth == TENSOR_DEPTH {
                    return Ok(Some(b"\n      "));
                }
            }
            b'}' | b']' => {
                self.depth -= 1;
                self.is_whole = self.depth == 0;
                self.behind_tensor = byte == b'}' && self.depth == TENSOR_DEPTH - 1;
                if byte == b']' && was_behind {
                    return Ok(Some(b"\n    "));
                }
            }
            // An entry has to stay on its lines.
            0..=b' ' => return Err(malformed()),
            _ => {}
        }
        Ok(None)
    }

    fn finish(self) -> io::Result<()> {
        if self.is_whole { Ok(()) } else { Err(malformed()) }
    }
}

fn malformed() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the entry of a file is not one whole object without white space",
    )
}

impl<W: Write> Write for TensorLines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut written = 0;
        for (at, &byte) in bytes.iter().enumerate() {
            if let Some(before) = self.step(byte)? {
                self.out.write_all(&bytes[written..at])?;
                self.out.write_all(before)?;
                written = at;
            }
        }
        self.out.write_all(&bytes[written..])?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;

    use super::*;
    use crate::convert::manifest::SourceFile;
    use crate::convert::{Manifest, ManifestFile, ManifestTensor};

    fn written(manifest: &Manifest) -> Vec<u8> {
        let Manifest { tool, fingerprint, source, options, aliases, left_out, .. } = manifest.clone();
        let head = ManifestHead { tool, fingerprint, source, options, aliases, left_out };
        let mut writer = ManifestWriter::new(Vec::new(), &head).unwrap();
        for file in &manifest.files {
            writer.raw_file(serde_json::to_string(file).unwrap().as_bytes()).unwrap();
        }
        writer.finish(&manifest.side_files).unwrap()
    }

    fn hash() -> impl Strategy<Value = String> {
        any::<[u8; 32]>().prop_map(|bytes| super::super::digest::hex(&bytes))
    }

    /// Texts with what JSON has to escape, and what a line breaker could take for structure.
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
                let name = String::new(); // numbered below: names stand once
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
            // The same to a reader that knows nothing of this: 128-bit times aside, which it has no room for.
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
        let head = ManifestHead {
            tool: String::new(),
            fingerprint: String::new(),
            source: ManifestSource { path: String::new(), files: Vec::new() },
            options: Vec::new(),
            aliases: Vec::new(),
            left_out: Vec::new(),
        };
        for json in
            ["", "{", "{}{}", "{}\n", "[]", "7", r#"{"a":"b}"#, r#"{"a":["#, "{ }", "{}]", r#"{"a":"\"}"#]
        {
            let mut writer = ManifestWriter::new(Vec::new(), &head).unwrap();
            let error = writer.raw_file(json.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{json}");
        }
        assert!(ManifestWriter::new(Vec::new(), &head).unwrap().raw_file(&b"{}"[..]).is_ok());
    }
}
