//! What is odd but legal is accepted: no tensors, no bytes, high ranks, long and strange names,
//! whitespace, unknown fields, any order. And dtypes that nobody knows, if the caller asks for it.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

use std::path::PathBuf;

use onelayer::checkpoint::{Checkpoint, CheckpointError, DType, OpenOptions};
use onelayer_testing::safetensors_file::{FileBuilder, one, pattern, with_header};

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

#[test]
fn odd_but_legal_files_are_accepted() {
    let folder = Folder::new();
    let open = |header: &str, data_bytes: usize| {
        let path = folder.write("file.safetensors", with_header(header, data_bytes));
        Checkpoint::open(&path).unwrap_or_else(|error| panic!("{header:.200}: {error}"))
    };
    assert_eq!(open("{}", 0).tensor_count(), 0);
    assert_eq!(open(" \t\r\n{ } \n", 0).tensor_count(), 0);
    let empty = open(r#"{"__metadata__":{}}"#, 0);
    assert!(empty.shards()[0].metadata.is_empty() && empty.tensor_bytes() == 0);
    let texts = open(r#"{"__metadata__":{"format":"pt","":"\u0000\ud83d\ude00"}}"#, 0);
    assert_eq!(texts.shards()[0].metadata.get(""), Some("\0\u{1f600}"));
    assert_eq!(texts.shards()[0].metadata.get("format"), Some("pt"));

    let scalar = open(&one("F64", "[]", "[0,8]"), 8);
    assert!(scalar.find("t").unwrap().shape.is_empty());
    let ones = format!("[{}]", vec!["1"; 1000].join(","));
    assert_eq!(open(&one("U8", &ones, "[0,1]"), 1).find("t").unwrap().shape.len(), 1000);
    assert_eq!(open(&one("F4", "[2]", "[0,1]"), 1).find("t").unwrap().dtype, DType::F4);
    assert_eq!(open(&one("F6_E3M2", "[4]", "[0,3]"), 3).tensor_bytes(), 3);
    assert_eq!(open(&one("F4", "[0,9]", "[0,0]"), 0).tensor_bytes(), 0);

    for name in ["", " ", "\0", "a\nb", "\u{202e}x", "../../etc/passwd", "__metadata__x", "\u{10ffff}"] {
        let file = FileBuilder::new().bytes_tensor(name, 3);
        assert_eq!(open(&file.header(), 3).find(name).unwrap().name, name);
    }
    let long = "n".repeat(64 << 10);
    assert_eq!(open(&FileBuilder::new().bytes_tensor(&long, 1).header(), 1).find(&long).unwrap().name, long);

    // Unaligned data, unknown fields, any order of fields and tensors.
    let header = r#"{"b":{"data_offsets":[1,5],"x":{"y":[null,1e9,{"z":"é"}]},"shape":[1],"dtype":"F32"},
        "a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let checkpoint = open(header, 5);
    let names: Vec<&str> = checkpoint.tensors().map(|tensor| tensor.name).collect();
    assert_eq!(names, ["a", "b"]);
    let (data, b) = (checkpoint.shards()[0].data, checkpoint.find("b").unwrap());
    assert_eq!((b.extent.start(), b.extent.end()), (data.start() + 1, data.end()));
    let bytes = std::fs::read(folder.0.path().join("file.safetensors")).unwrap();
    let first = usize::try_from(b.extent.start()).unwrap();
    assert_eq!(bytes[first], pattern(1));
}

#[test]
fn tensors_without_bytes_stand_in_order_of_their_names() {
    let folder = Folder::new();
    let empty =
        |name: &str, at: u64| format!(r#""{name}":{{"dtype":"U8","shape":[0],"data_offsets":[{at},{at}]}}"#);
    let full = r#""m":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#;
    let members =
        [empty("z", 0), empty("d", 2), empty("b", 0), full.to_owned(), empty("c", 2), empty("a", 0)];
    for rotation in 0..members.len() {
        let mut members = members.clone();
        members.rotate_left(rotation);
        let path = folder.write("file.safetensors", with_header(format!("{{{}}}", members.join(",")), 2));
        let checkpoint = Checkpoint::open(path).unwrap();
        let names: Vec<&str> = checkpoint.tensors().map(|tensor| tensor.name).collect();
        assert_eq!(names, ["a", "b", "z", "m", "c", "d"], "{rotation}");
    }
}

#[test]
fn opaque_dtypes_pass_if_asked() {
    let folder = Folder::new();
    let file = FileBuilder::new()
        .tensor("a", "F7", &[3, 3], 10)
        .tensor("b", "U8", &[2], 2)
        .tensor("c", "F7", &[], 0)
        .tensor("d", "INT3", &[1], 1);
    let path = folder.write("file.safetensors", file.build());
    let error = Checkpoint::open(&path).unwrap_err();
    assert!(matches!(error, CheckpointError::UnknownDType { .. }), "{error}");
    let checkpoint = OpenOptions::new().allow_opaque_dtypes(true).open(&path).unwrap();
    let dtypes: Vec<(&str, DType, &str, u64)> = checkpoint
        .tensors()
        .map(|tensor| (tensor.name, tensor.dtype, tensor.dtype_name, tensor.extent.len_bytes()))
        .collect();
    assert_eq!(
        dtypes,
        [
            ("a", DType::Opaque, "F7", 10),
            ("b", DType::U8, "U8", 2),
            ("c", DType::Opaque, "F7", 0),
            ("d", DType::Opaque, "INT3", 1)
        ]
    );
}
