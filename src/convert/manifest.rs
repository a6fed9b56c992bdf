//! The manifest: what a conversion made, of what, and what each part of it hashes to.

use serde::{Deserialize, Serialize};

/// The manifest's name in the target.
pub const MANIFEST_NAME: &str = "onelayer.manifest.json";

/// What the manifests of this version call themselves.
pub(super) const MANIFEST_SCHEMA: &str = "onelayer-manifest/1";

/// What a conversion made, of what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// `onelayer-manifest/1`.
    pub schema: String,
    /// Name and version of what wrote it.
    pub tool: String,
    /// Tells conversions apart: a hash of the source's identity and of everything that decides
    /// about the files.
    pub fingerprint: String,
    /// What it was made of.
    pub source: ManifestSource,
    /// The options, as a person gave them.
    pub options: Vec<String>,
    /// Tensors that are left out because another one has the same bytes: their names, and that of
    /// the one that is kept.
    pub aliases: Vec<Alias>,
    /// Names of tensors that were not selected.
    pub left_out: Vec<String>,
    /// The files of tensors, in execution order.
    pub files: Vec<ManifestFile>,
    /// Everything else in the target but the manifest itself: configuration, tokenizer, index.
    pub side_files: Vec<SideFileRecord>,
}

/// What a conversion was made of.
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
    /// Its name, below the source where it lies there.
    pub name: String,
    /// Its length.
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
    /// The one that is left out.
    pub name: String,
    /// The one that is kept.
    pub same_as: String,
}

/// One file of tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ManifestFile {
    /// Its path below the target.
    pub name: String,
    /// Its length.
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
    /// What its weight was quantised to, if it was: of values and of scales.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantised: Option<String>,
    /// Elements per dimension.
    pub shape: Vec<u64>,
    /// Bytes that it takes.
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
    /// Its length.
    pub bytes: u64,
    /// BLAKE3 of it.
    pub blake3: String,
    /// SHA-256 of it, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}
