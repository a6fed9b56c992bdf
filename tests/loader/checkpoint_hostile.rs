//! Hostile and broken input: every row of a table of headers, indices and files is refused with the
//! expected kind of error, in time, with a message that names the file.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onelayer::checkpoint::{Checkpoint, CheckpointError, OpenOptions};
use onelayer_testing::safetensors_file::{FileBuilder, announced, index, one, with_header};

/// The kind of an error: the name of its variant.
fn kind(error: &CheckpointError) -> String {
    let text = format!("{error:?}");
    text.split([' ', '{']).next().unwrap_or_default().to_owned()
}

/// Opens `path`, which must fail in time with an error of that kind that says `text` and names
/// `named`.
#[track_caller]
fn refused(label: &str, path: &Path, named: &Path, expected_kind: &str, text: &str) {
    let start = Instant::now();
    let error = Checkpoint::open(path).expect_err(label);
    let message = error.to_string();
    assert_eq!(kind(&error), expected_kind, "{label}: {message}");
    assert!(message.contains(text), "{label}: expected `{text}` in: {message}");
    assert!(message.contains(&named.display().to_string()), "{label}: no file in: {message}");
    assert!(!message.contains('\n'), "{label}: {message}");
    assert!(message.len() <= 500 + named.as_os_str().len(), "{label}: {} bytes", message.len());
    assert!(start.elapsed() < Duration::from_secs(1), "{label}: {:?}", start.elapsed());
    assert!(error.is_missing() || error.is_invalid(), "{label}: {message}");
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn inside(&self, name: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

type Row = (&'static str, Vec<u8>, &'static str, &'static str);

fn text_row(
    label: &'static str,
    header: &str,
    data_bytes: usize,
    kind: &'static str,
    text: &'static str,
) -> Row {
    (label, with_header(header, data_bytes), kind, text)
}

/// Announced lengths and things that are no safetensors file.
fn length_rows() -> Vec<Row> {
    vec![
        ("empty file", vec![], "UnknownFormat", "an empty file"),
        ("seven bytes", vec![1; 7], "UnknownFormat", "7 bytes"),
        ("length 0", announced(0, b"", 0), "Syntax", "found the end"),
        ("length past the end", announced(3, b"{}", 0), "HeaderExceedsFile", "header of 3 bytes"),
        ("length 2^63", announced(1 << 63, b"{}", 0), "HeaderExceedsFile", "9223372036854775808"),
        ("length wraps with + 8", announced(u64::MAX - 7, b"{}", 0), "HeaderExceedsFile", "only 2"),
        ("length 2^64 - 1", announced(u64::MAX, b"{}", 0), "HeaderExceedsFile", "only 2"),
        ("length cuts the header", announced(1, b"{}", 0), "Syntax", "found the end"),
        ("length reaches into the data", announced(4, b"{}", 8), "Syntax", "nothing but whitespace"),
        ("git lfs", b"version https://git-lfs.github.com/spec/v1\n".to_vec(), "UnknownFormat", "LFS"),
        ("short git lfs", b"version https://git-lfs".to_vec(), "UnknownFormat", "git lfs pull"),
        ("zip", b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl".to_vec(), "InvalidFile", "PyTorch"),
        ("pickle", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.".to_vec(), "InvalidFile", "PyTorch"),
        ("gguf", b"GGUF\x03\x00\x00\x00\x10\x00\x00\x00".to_vec(), "InvalidFile", "GGUF"),
        ("html", b"<!DOCTYPE html><html>404</html>".to_vec(), "UnknownFormat", "HTML"),
        ("json", br#"{"weight_map":{"a":"b"}}"#.to_vec(), "UnknownFormat", ".json"),
        ("hdf5", b"\x89HDF\r\n\x1a\n\0\0\0\0".to_vec(), "UnknownFormat", "HDF5"),
    ]
}

/// Text and grammar of the header.
fn grammar_rows() -> Vec<Row> {
    let row = |label, header: &[u8], text| (label, with_header(header, 0), "Syntax", text);
    let deep = |opening: &str, closing: &str| {
        let value = format!("{}{}", opening.repeat(100_000), closing.repeat(100_000));
        with_header(format!(r#"{{"t":{{"x":{value}}}}}"#), 0)
    };
    vec![
        row("byte order mark", b"\xef\xbb\xbf{}", "byte order mark"),
        row("UTF-16", b"{\0}\0", "byte 0x00"),
        row("NUL padding", b"{}\0\0\0\0\0\0", "byte 0x00"),
        row("NUL before", b"\0{}", "byte 0x00"),
        row("form feed is no whitespace", b"{}\x0c", "byte 0x0c"),
        row("array", b"[]", "expected `{`"),
        row("text", b"\"{}\"", "expected `{`"),
        row("null", b"null", "expected `{`"),
        row("number", b"1", "expected `{`"),
        row("two documents", b"{}{}", "nothing but whitespace"),
        row("garbage behind", b"{} x", "found `x`"),
        row("comment", b"{/* */}", "found `/`"),
        row("open", b"{", "found the end"),
        row("open key", b"{\"t", "found the end"),
        row("no colon", b"{\"t\"}", "expected `:`"),
        row("single quotes", b"{'t':1}", "found `'`"),
        row("key without quotes", b"{t:1}", "found `t`"),
        row("trailing comma", b"{\"__metadata__\":{},}", "a key in double quotes"),
        row("no key", b"{1:{}}", "a key in double quotes or `}`"),
        row("leading comma", b"{,}", "found `,`"),
        row("missing comma", b"{\"__metadata__\":{} \"t\":1}", "expected `,` or `}`"),
        row("control character in a name", b"{\"a\x01\":1}", "byte 0x01"),
        row("line break in a name", b"{\"a\n\":1}", "byte 0x0a"),
        row("unknown escape", b"{\"a\\x\":1}", "after a backslash"),
        row("short escape", b"{\"a\\u12\":1}", "hexadecimal"),
        row("lone high surrogate", b"{\"\\ud800\":1}", "surrogate"),
        row("lone low surrogate", b"{\"\\udc00\":1}", "surrogate"),
        row("high surrogate twice", b"{\"\\ud800\\ud800\":1}", "surrogate"),
        row("high surrogate, then text", b"{\"\\ud800abcdef\":1}", "surrogate"),
        row("encoded surrogate", b"{\"\xed\xa0\x80\":1}", "UTF-8"),
        row("overlong encoding", b"{\"\xc0\xaf\":1}", "UTF-8"),
        row("lone continuation byte", b"{\"\x80\":1}", "UTF-8"),
        row("cut character", b"{\"\xf0\x9f\x98\":1}", "UTF-8"),
        row("escaped and not UTF-8", b"{\"\\n\xff\":1}", "UTF-8"),
        row("upper-case literal", b"{\"t\":{\"x\":True}}", "a value"),
        row("not a number", b"{\"t\":{\"x\":NaN}}", "a value"),
        row("hexadecimal", b"{\"t\":{\"x\":0x10}}", "found `x`"),
        row("leading zero", b"{\"t\":{\"x\":01}}", "found `1`"),
        row("leading plus", b"{\"t\":{\"x\":+1}}", "a value"),
        row("bare point", b"{\"t\":{\"x\":1.}}", "a digit"),
        row("bare exponent", b"{\"t\":{\"x\":1e}}", "a digit"),
        ("100 000 arrays deep", deep("[", "]"), "Syntax", "127 levels"),
        ("100 000 objects deep", deep("{\"a\":", "}"), "Syntax", "127 levels"),
    ]
}

/// Types of the values.
fn type_rows() -> Vec<Row> {
    let row = |label, header: &str, text| (label, with_header(header, 4), "Syntax", text);
    vec![
        row("metadata null", r#"{"__metadata__":null}"#, "an object of texts"),
        row("metadata array", r#"{"__metadata__":[]}"#, "an object of texts"),
        row("metadata number", r#"{"__metadata__":{"a":1}}"#, "a text"),
        row("metadata nested", r#"{"__metadata__":{"a":{}}}"#, "a text"),
        row(
            "metadata as a tensor",
            r#"{"__metadata__":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            "a text",
        ),
        row("escaped metadata", r#"{"__\u006detadata__":null}"#, "an object of texts"),
        row("tensor null", r#"{"t":null}"#, "an object with"),
        row("tensor as an array", r#"{"t":["U8",[4],[0,4]]}"#, "an object with"),
        row("dtype null", r#"{"t":{"dtype":null}}"#, "the name of a dtype"),
        row("dtype number", r#"{"t":{"dtype":1}}"#, "the name of a dtype"),
        row("dtype as a tagged value", r#"{"t":{"dtype":{"U8":null}}}"#, "the name of a dtype"),
        row("shape number", &one("U8", "4", "[0,4]"), "an array of dimensions"),
        row("shape object", &one("U8", "{}", "[0,4]"), "an array of dimensions"),
        row("shape null", &one("U8", "null", "[0,4]"), "an array of dimensions"),
        row("dimension text", &one("U8", r#"["4"]"#, "[0,4]"), "a dimension"),
        row("dimension nested", &one("U8", "[[4]]", "[0,4]"), "a dimension"),
        row("dimension negative", &one("U8", "[-4]", "[0,4]"), "found `-4`"),
        row("dimension -0", &one("U8", "[4,-0]", "[0,4]"), "found `-0`"),
        row("dimension 4.0", &one("U8", "[4.0]", "[0,4]"), "found `4.0`"),
        row("dimension 4e0", &one("U8", "[4e0]", "[0,4]"), "found `4e0`"),
        row("dimension 2^64", &one("U8", "[18446744073709551616]", "[0,4]"), "found `18446744073709551616`"),
        row("dimension true", &one("U8", "[true]", "[0,4]"), "found `t`"),
        row("trailing comma in shape", &one("U8", "[4,]", "[0,4]"), "a value"),
        row("offsets null", &one("U8", "[4]", "null"), "two offsets"),
        row("no offsets", &one("U8", "[4]", "[]"), "two offsets"),
        row("one offset", &one("U8", "[4]", "[0]"), "two offsets"),
        row("three offsets", &one("U8", "[4]", "[0,4,4]"), "two offsets"),
        row("offset -0", &one("U8", "[4]", "[-0,4]"), "found `-0`"),
        row("offset 4.0", &one("U8", "[4]", "[0,4.0]"), "found `4.0`"),
        row("offset 2^64", &one("U8", "[4]", "[0,18446744073709551616]"), "two offsets"),
        row("offsets as an object", &one("U8", "[4]", r#"{"0":0,"1":4}"#), "two offsets"),
    ]
}

/// Fields, names and keys.
fn key_rows() -> Vec<Row> {
    let tensor = r#"{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#;
    let twice = |first: &str, second: &str| {
        let last = r#"{"dtype":"U8","shape":[2],"data_offsets":[2,4]}"#;
        format!("{{{first}:{tensor},{second}:{last}}}")
    };
    let row = |label, header: &str, text| (label, with_header(header, 4), "DuplicateKey", text);
    vec![
        row("name twice", &twice(r#""t""#, r#""t""#), "`t`"),
        row("name twice after unescaping", &twice(r#""t/é""#, r#""\u0074\/\u00e9""#), "`t/é`"),
        row("empty name twice", &twice(r#""""#, r#""""#), "``"),
        row("metadata twice", r#"{"__metadata__":{},"__metadata__":{}}"#, "__metadata__"),
        row("metadata key twice", r#"{"__metadata__":{"a":"1","b":"2","\u0061":"1"}}"#, "`a`"),
        row("dtype twice", r#"{"t":{"dtype":"U8","dtype":"U8"}}"#, "`dtype`"),
        row("shape twice", r#"{"t":{"shape":[4],"\u0073hape":[4]}}"#, "`shape`"),
        row("offsets twice", r#"{"t":{"data_offsets":[0,4],"data_offsets":[0,4]}}"#, "`data_offsets`"),
        row("unknown field twice", r#"{"t":{"x":1,"y":2,"x":1}}"#, "`x`"),
        row("key twice inside an unknown field", r#"{"t":{"x":[{"a":{"b":1,"b":2}}]}}"#, "`b`"),
        text_row("no dtype", r#"{"t":{"shape":[4],"data_offsets":[0,4]}}"#, 4, "MissingField", "no dtype"),
        text_row("no shape", r#"{"t":{"dtype":"U8","data_offsets":[0,4]}}"#, 4, "MissingField", "no shape"),
        text_row("no offsets", r#"{"t":{"dtype":"U8","shape":[4]}}"#, 4, "MissingField", "no data_offsets"),
        text_row("no fields", r#"{"t":{}}"#, 4, "MissingField", "`t`"),
        text_row("unknown dtype", &one("F7", "[4]", "[0,4]"), 4, "UnknownDType", "`F7`"),
        text_row("lower-case dtype", &one("u8", "[4]", "[0,4]"), 4, "UnknownDType", "`u8`"),
        text_row("empty dtype", &one("", "[4]", "[0,4]"), 4, "UnknownDType", "``"),
    ]
}

/// Sizes, offsets and coverage.
fn layout_rows() -> Vec<Row> {
    let two = |first: &str, second: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        )
    };
    let big = u64::MAX;
    let near_the_end = format!(
        r#"{{"a":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}},"b":{{"dtype":"U8","shape":[8],"data_offsets":[{0},{1}]}}}}"#,
        (big >> 3) - 8,
        big >> 3
    );
    vec![
        text_row("reversed", &one("U8", "[4]", "[4,0]"), 4, "ReversedOffsets", "[4, 0]"),
        text_row("too few bytes", &one("F32", "[2]", "[0,4]"), 4, "SizeMismatch", "expected 8 bytes"),
        text_row("too many bytes", &one("U8", "[2]", "[0,4]"), 4, "SizeMismatch", "span 4"),
        text_row("scalar of no bytes", &one("U8", "[]", "[0,0]"), 0, "SizeMismatch", "expected 1 bytes"),
        text_row("zero size with bytes", &one("U8", "[0]", "[0,4]"), 4, "SizeMismatch", "expected 0 bytes"),
        text_row(
            "product wraps to 0",
            &one("U8", "[4294967296,4294967296]", "[0,0]"),
            0,
            "SizeOverflow",
            "U8",
        ),
        text_row(
            "product wraps to 4",
            &one("U8", "[2147483649,2147483650,2]", "[0,4]"),
            4,
            "SizeOverflow",
            "",
        ),
        text_row("bits wrap", &one("F64", "[288230376151711745]", "[0,8]"), 8, "SizeOverflow", ""),
        text_row("bits wrap for F4", &one("F4", "[4611686018427387906]", "[0,1]"), 1, "SizeOverflow", "F4"),
        text_row(
            "overflow before a zero",
            &one("U8", "[4294967296,4294967296,0]", "[0,0]"),
            0,
            "SizeOverflow",
            "",
        ),
        text_row(
            "overflow behind a zero",
            &one("U8", "[0,4294967296,4294967296]", "[0,0]"),
            0,
            "SizeOverflow",
            "",
        ),
        text_row("half a byte", &one("F4", "[3]", "[0,2]"), 2, "PartialByte", "12 bits"),
        text_row("three quarters of a byte", &one("F6_E2M3", "[1]", "[0,1]"), 1, "PartialByte", "6 bits"),
        text_row("starts at 1", &one("U8", "[4]", "[1,5]"), 5, "Hole", "found 1"),
        text_row("hole", &two("[0,4]", "[5,9]"), 9, "Hole", "1 bytes belong to no tensor"),
        text_row("overlap", &two("[0,4]", "[3,7]"), 7, "Overlap", "inside tensor `a`"),
        text_row("same range", &two("[0,4]", "[0,4]"), 4, "Overlap", "tensor `b`"),
        text_row("hole, listed backwards", &two("[5,9]", "[0,4]"), 9, "Hole", "tensor `a`"),
        text_row(
            "one byte short",
            &two("[0,4]", "[4,8]"),
            7,
            "Truncated",
            "1 bytes short, cut inside tensor `b`",
        ),
        text_row("no data", &two("[4,8]", "[0,4]"), 0, "Truncated", "8 bytes short, cut inside tensor `b`"),
        text_row("trailing byte", &two("[0,4]", "[4,8]"), 9, "TrailingBytes", "1 bytes follow"),
        text_row("data without tensors", "{}", 1, "TrailingBytes", "1 bytes follow"),
        text_row("offsets near 2^61", &near_the_end, 0, "Truncated", "interrupted download?"),
        text_row(
            "one tensor near 2^61",
            &one("U8", "[2305843009213693951]", "[0,2305843009213693951]"),
            0,
            "Truncated",
            "cut inside tensor `t`",
        ),
        text_row(
            "zero size past the end",
            r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[18446744073709551615,18446744073709551615]}}"#,
            0,
            "Hole",
            "18446744073709551615",
        ),
    ]
}

#[test]
fn hostile_files_are_refused() {
    let folder = Folder::new();
    let rows: Vec<Row> = [length_rows(), grammar_rows(), type_rows(), key_rows(), layout_rows()]
        .into_iter()
        .flatten()
        .collect();
    assert!(rows.len() >= 120, "{} rows", rows.len());
    for (label, bytes, kind, text) in rows {
        let path = folder.write("file.safetensors", bytes);
        refused(label, &path, &path, kind, text);
    }
}

#[test]
fn opaque_offsets_cannot_wrap_around_the_file() {
    let folder = Folder::new();
    let header = one("F7", "[1]", "[0,18446744073709551615]");
    let path = folder.write("file.safetensors", with_header(&header, 4));
    let error = OpenOptions::new().allow_opaque_dtypes(true).open(&path).unwrap_err();
    let CheckpointError::Truncated { expected_bytes, .. } = error else { panic!("{error}") };
    assert_eq!(expected_bytes, 8 + u128::from(u64::MAX) + u128::try_from(header.len()).unwrap());
}

#[test]
fn hostile_indices_are_refused() {
    let parent = Folder::new();
    let folder = parent.inside("checkpoint");
    let shard = "a.safetensors";
    FileBuilder::new().bytes_tensor("t", 4).write(folder.join(shard));
    // A target outside, so that a name that leads there would succeed if it were followed.
    let outside = parent.write("outside", FileBuilder::new().bytes_tensor("t", 4).build());
    let outside = outside.display().to_string();
    let rows: Vec<(&str, Vec<u8>, &str, &str)> = vec![
        ("empty", vec![], "NotAnIndex", "an empty file"),
        ("git lfs", b"version https://git-lfs.github.com/spec/v1\n".to_vec(), "NotAnIndex", "LFS"),
        ("byte order mark", b"\xef\xbb\xbf{}".to_vec(), "NotAnIndex", "byte order mark"),
        ("array", b"[]".to_vec(), "Syntax", "the start of an index"),
        (
            "two documents",
            [index(&[("t", shard)]), index(&[("t", shard)])].concat().into(),
            "Syntax",
            "nothing but",
        ),
        ("cut", br#"{"weight_map":{"t":"a.safe"#.to_vec(), "Syntax", "the end"),
        ("NUL padding", [index(&[("t", shard)]), "\0".to_owned()].concat().into(), "Syntax", "byte 0x00"),
        ("no object", br#"{"weight_map":[]}"#.to_vec(), "Syntax", "an object of tensors"),
        ("null", br#"{"weight_map":null}"#.to_vec(), "Syntax", "an object of tensors"),
        ("text", br#"{"weight_map":"a.safetensors"}"#.to_vec(), "Syntax", "an object of tensors"),
        ("number as a file", br#"{"weight_map":{"t":1}}"#.to_vec(), "Syntax", "the name of a file"),
        (
            "list as a file",
            br#"{"weight_map":{"t":["a.safetensors"]}}"#.to_vec(),
            "Syntax",
            "the name of a file",
        ),
        ("no tensors", br#"{"weight_map":{}}"#.to_vec(), "NotAnIndex", "without tensors"),
        ("nothing", b"{}".to_vec(), "NotAnIndex", "no weight_map"),
        (
            "a config",
            br#"{"architectures":["X"],"model_type":"x"}"#.to_vec(),
            "NotAnIndex",
            "`architectures`",
        ),
        ("only metadata", br#"{"metadata":{"total_size":1}}"#.to_vec(), "NotAnIndex", "no weight_map"),
        (
            "tensor twice",
            br#"{"weight_map":{"t":"a.safetensors","\u0074":"a.safetensors"}}"#.to_vec(),
            "DuplicateKey",
            "`t`",
        ),
        (
            "map twice",
            br#"{"weight_map":{"t":"a.safetensors"},"weight_map":{}}"#.to_vec(),
            "DuplicateKey",
            "weight_map",
        ),
        (
            "metadata twice",
            br#"{"metadata":{},"metadata":{},"weight_map":{"t":"a.safetensors"}}"#.to_vec(),
            "DuplicateKey",
            "metadata",
        ),
        (
            "metadata key twice",
            br#"{"metadata":{"a":1,"a":1},"weight_map":{"t":"a.safetensors"}}"#.to_vec(),
            "DuplicateKey",
            "`a`",
        ),
        (
            "nested key twice",
            br#"{"metadata":{"a":{"b":1,"b":1}},"weight_map":{"t":"a.safetensors"}}"#.to_vec(),
            "DuplicateKey",
            "`b`",
        ),
        ("flat, twice", br#"{"t":"a.safetensors","t":"a.safetensors"}"#.to_vec(), "DuplicateKey", "`t`"),
        ("up", index(&[("t", "../outside")]).into(), "UnsafeName", "`..`"),
        ("up in the middle", index(&[("t", "x/../../outside")]).into(), "UnsafeName", "`..`"),
        (
            "up, escaped",
            br#"{"weight_map":{"t":"\u002e\u002e\u002foutside"}}"#.to_vec(),
            "UnsafeName",
            "`..`",
        ),
        ("absolute", index(&[("t", &outside)]).into(), "UnsafeName", "absolute"),
        ("absolute behind ./", index(&[("t", &format!("./{outside}"))]).into(), "UnsafeName", "absolute"),
        ("device", index(&[("t", "/dev/zero")]).into(), "UnsafeName", "absolute"),
        ("address", index(&[("t", "https://host/a.safetensors")]).into(), "UnsafeName", "scheme"),
        ("file address", index(&[("t", "file:a.safetensors")]).into(), "UnsafeName", "scheme"),
        ("backslash", index(&[("t", "..\\a.safetensors")]).into(), "UnsafeName", "backslash"),
        ("NUL", index(&[("t", "a.safetensors\0x")]).into(), "UnsafeName", "NUL"),
        ("empty name", index(&[("t", "")]).into(), "UnsafeName", "empty"),
        ("dot", index(&[("t", ".")]).into(), "UnsafeName", "`.`"),
        ("empty part", index(&[("t", "x//a.safetensors")]).into(), "UnsafeName", "empty part"),
        ("flat and up", br#"{"t":"../outside"}"#.to_vec(), "UnsafeName", "`..`"),
        ("100 000 deep", [b"{\"x\":".to_vec(), b"[".repeat(100_000)].concat(), "Syntax", "127 levels"),
    ];
    for (label, bytes, kind, text) in rows {
        let path = parent.write("checkpoint/model.safetensors.index.json", bytes);
        refused(label, &path, &path, kind, text);
        refused(label, &folder, &path, kind, text);
    }
}

#[test]
fn indices_and_shards_are_compared_both_ways() {
    let folder = Folder::new();
    let path = folder.0.path();
    FileBuilder::new().bytes_tensor("t", 4).bytes_tensor("u", 2).write(path.join("a.safetensors"));
    FileBuilder::new().bytes_tensor("v", 4).write(path.join("b.safetensors"));
    FileBuilder::new().bytes_tensor("t", 4).write(path.join("again.safetensors"));
    symlink("a.safetensors", path.join("same.safetensors")).unwrap();
    folder.write("broken.safetensors", with_header("{}", 1));
    std::fs::create_dir(path.join("folder.safetensors")).unwrap();
    let (a, b) = ("a.safetensors", "b.safetensors");
    let rows: Vec<(&str, String, &str, &str)> = vec![
        (
            "not in its shard",
            index(&[("t", a), ("u", a), ("w", a)]),
            "MissingTensor",
            "`w` in `a.safetensors`",
        ),
        ("not listed", index(&[("t", a)]), "UnindexedTensor", "`u` only in"),
        (
            "in the other shard",
            index(&[("t", a), ("u", b), ("v", b)]),
            "WrongShard",
            "`u` in `b.safetensors`",
        ),
        ("in two shards", index(&[("t", "again.safetensors"), ("u", a)]), "DuplicateTensor", "tensor `t`"),
        (
            "one file by two names",
            index(&[("t", a), ("u", "same.safetensors")]),
            "DuplicateTensor",
            "(and 1 more)",
        ),
        (
            "file is missing",
            index(&[("t", a), ("u", a), ("v", "c.safetensors")]),
            "MissingShards",
            "1 of 2 files",
        ),
        (
            "files are missing",
            index(&[("t", "c1"), ("u", "c2"), ("v", "c3")]),
            "MissingShards",
            "`c1`, `c2`, `c3`",
        ),
        (
            "file is broken",
            index(&[("t", a), ("u", a), ("v", "broken.safetensors")]),
            "TrailingBytes",
            "broken",
        ),
        ("file is a folder", index(&[("t", "folder.safetensors")]), "NotRegular", "directory"),
        ("two faults", index(&[("t", a), ("w", a), ("v", "broken.safetensors")]), "TrailingBytes", "broken"),
        ("two kinds of fault", index(&[("t", a), ("w", a)]), "Several", "(and 1 more)"),
    ];
    for (label, text, kind, message) in rows {
        let index = folder.write("model.safetensors.index.json", text);
        let named = if message.contains("broken") || kind == "NotRegular" || kind == "DuplicateTensor" {
            path
        } else {
            &index
        };
        refused(label, &index, named, kind, message);
    }
}

#[test]
fn special_files_are_refused_and_never_awaited() {
    let folder = Folder::new();
    let path = |name: &str| folder.0.path().join(name);
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, path("fifo.safetensors"), mode).unwrap();
    let _listener = UnixListener::bind(path("socket.safetensors")).unwrap();
    symlink("/dev/zero", path("zero.safetensors")).unwrap();
    symlink("loop.safetensors", path("loop.safetensors")).unwrap();
    symlink("nowhere", path("dangling.safetensors")).unwrap();
    for (name, kind, text) in [
        ("fifo.safetensors", "NotRegular", "named pipe"),
        ("socket.safetensors", "NotRegular", "socket"),
        ("zero.safetensors", "NotRegular", "character device"),
        ("dangling.safetensors", "DanglingLink", "nowhere"),
        ("none.safetensors", "NotFound", "no such file"),
    ] {
        refused(name, &path(name), &path(name), kind, text);
    }
    assert!(matches!(Checkpoint::open(path("loop.safetensors")), Err(CheckpointError::Io { .. })));
    assert!(matches!(Checkpoint::open("a\0b"), Err(CheckpointError::Io { .. })));
    assert!(Checkpoint::open("").unwrap_err().is_missing());
    for device in ["/dev/null", "/dev/zero", "/dev/tty"] {
        let Err(error) = Checkpoint::open(device) else { panic!("{device}") };
        assert!(!error.to_string().is_empty());
    }
    // Files of procfs are regular and claim to be empty.
    for file in ["/proc/self/status", "/proc/kmsg", "/proc/self/mem"] {
        assert!(Checkpoint::open(file).is_err(), "{file}");
    }
    // In place of a shard and of an index.
    let set = Folder::new();
    rustix::fs::mkfifoat(rustix::fs::CWD, set.0.path().join("a.safetensors"), mode).unwrap();
    refused("shard", set.0.path(), set.0.path(), "NotRegular", "named pipe");
    let fifo = set.0.path().join("model.safetensors.index.json");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, mode).unwrap();
    refused("index", set.0.path(), &fifo, "NotRegular", "named pipe");
}

#[test]
fn the_limit_on_headers_is_an_option() {
    let folder = Folder::new();
    let path = folder.write("file.safetensors", with_header(format!("{{}}{}", " ".repeat(1000)), 0));
    let options = OpenOptions::new().header_bytes_max(1001);
    let error = options.open(&path).unwrap_err();
    assert_eq!(kind(&error), "OverLimit", "{error}");
    assert!(error.to_string().contains("1002") && error.to_string().contains("1001"), "{error}");
    options.header_bytes_max(1002).open(&path).unwrap();

    // A sparse file at the default limit, and one over it: nothing may be read before the length is
    // checked.
    let file = std::fs::File::create(folder.0.path().join("sparse.safetensors")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &100_000_001_u64.to_le_bytes(), 0).unwrap();
    file.set_len(1 << 40).unwrap();
    let path = folder.0.path().join("sparse.safetensors");
    refused("sparse", &path, &path, "OverLimit", "100000001");
}

#[test]
fn every_truncation_of_a_file_is_refused() {
    let folder = Folder::new();
    let file =
        FileBuilder::new().metadata("format", "pt").tensor("a\u{e9}", "F16", &[2, 2], 8).bytes_tensor("b", 3);
    let bytes = file.build();
    for len in 0..bytes.len() {
        let path = folder.write("file.safetensors", &bytes[..len]);
        let error = Checkpoint::open(&path).expect_err("cut file");
        assert!(error.is_invalid(), "{len}: {error}");
    }
    Checkpoint::open(folder.write("file.safetensors", &bytes)).unwrap();
}
