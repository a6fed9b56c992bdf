//! Hostile and broken GGUF files, each with the error that a strict reader must give. The published
//! faults of other readers come first. Nothing here shares code with the reader.

#![allow(clippy::unwrap_used, dead_code, reason = "each test program uses a part")]

use onelayer_testing::gguf_file::{GgufFile, Value, text_bytes};

const F32: u32 = 0;
const F16: u32 = 1;
const Q4_0: u32 = 2;
const Q4_K: u32 = 12;
const I8: u32 = 24;

/// A name, the file, and the error that a strict reader must give: its kind, and a part of its
/// text.
pub(crate) type Row = (String, Vec<u8>, &'static str, &'static str);

fn row(label: impl Into<String>, file: &GgufFile, kind: &'static str, text: &'static str) -> Row {
    (label.into(), file.bytes(), kind, text)
}

/// A file with one tensor of 32 bytes, and keys.
pub(crate) fn good() -> GgufFile {
    GgufFile::new()
        .key("general.architecture", Value::text("llama"))
        .key("general.alignment", Value::u32(32))
        .key("tokenizer.ggml.tokens", Value::array(8, 2, &[text_bytes(b"a"), text_bytes(b"bc")].concat()))
        .key("tokenizer.ggml.scores", Value::array(6, 3, &[0; 12]))
        .tensor("blk.0.attn_q.weight", &[4, 2], F32, 32)
}

/// The regression set: faults that other readers had.
fn published_rows() -> Vec<Row> {
    let tensor = |dims: &[u64], kind| GgufFile::new().tensor("t", dims, kind, 32);
    let mut counts = good();
    (counts.tensor_count, counts.key_count) = (Some(u64::MAX / 2), Some(4));
    let mut few = good();
    few.tensor_count = Some(0x0FFF_FFFF_FFFF_FFF0);
    let aligned = |alignment| good().key("x", Value::u32(0)).key("general.alignment2", Value::u32(alignment));
    let mut zero = aligned(0);
    zero.keys[1].1 = Value::u32(0);
    let mut file = zero.clone();
    file.keys.remove(0);
    let past = |offset| GgufFile::new().tensor_at("t", &[8], F32, offset);
    vec![
        // CVE-2025-53630: sizes of tensors whose padded sum wraps.
        row("sum of sizes wraps", &tensor(&[1 << 62, 1], I8), "SizeOverflow", "2^64 bits"),
        row(
            "two halves of 2^64",
            &tensor(&[1 << 60], I8).tensor_at("u", &[1 << 60], I8, 1 << 60),
            "Truncated",
            "`t`",
        ),
        row("offset near 2^64", &past(u64::MAX - 31), "InvalidFile", "an offset inside the file"),
        row("offset wraps to the header", &past(u64::MAX - 127), "Truncated", "`t`"),
        // CVE-2026-27940: a number of tensors whose table wraps.
        row("table of tensors wraps", &counts, "InvalidFile", "tensors announced"),
        row("table of tensors wraps to little", &few, "InvalidFile", "tensors announced"),
        // CVE-2026-33298: a product of dimensions that wraps.
        row("dimensions wrap to 0", &tensor(&[1 << 32, 1 << 32], F32), "SizeOverflow", "4294967296"),
        row(
            "dimensions wrap to 16",
            &tensor(&[1 << 22, 1 << 20, 1 << 20, 1 << 6], F32),
            "SizeOverflow",
            "`t`",
        ),
        row("bytes wrap, elements do not", &tensor(&[1 << 31, 1 << 31], F32), "SizeOverflow", "`t`"),
        row("blocks wrap", &tensor(&[1 << 40, 1 << 27], Q4_K), "SizeOverflow", "Q4_K"),
        // CVE-2026-7482: a tensor larger than its file.
        row("larger than the file", &tensor(&[1 << 20], F16), "Truncated", "2097"),
        row(
            "blocks larger than the file",
            &tensor(&[4096, 4096], Q4_K),
            "Truncated",
            "cut inside tensor `t`",
        ),
        row("one byte short", &tensor(&[33], I8), "Truncated", "1 bytes short"),
        // candle 3533, 3714: lengths and counts that are allocated before they are read.
        row("a text of 2^63", &lied_text(1 << 63), "InvalidFile", "9223372036854775808 bytes of a text"),
        row("a text of 2^32", &lied_text(1 << 32), "InvalidFile", "4294967296 bytes of a text"),
        row("an array of 2^60", &lied_array(6, 1 << 60), "InvalidFile", "an array of"),
        row("an array whose bytes wrap", &lied_array(10, 1 << 61), "InvalidFile", "an array of"),
        row("an array of 2^64 - 1 bytes", &lied_array(0, u64::MAX), "InvalidFile", "an array of"),
        // candle 3876: an alignment of zero.
        row("alignment 0", &zero, "InvalidFile", "a power of two"),
        row("alignment 0, first key", &file, "InvalidFile", "a power of two"),
        // llama.cpp 26946: a dimension of zero.
        row("a dimension of 0", &tensor(&[0], F32), "InvalidFile", "dimensions above zero"),
        row("an outer dimension of 0", &tensor(&[32, 0], Q4_0), "InvalidFile", "dimensions above zero"),
        row("0 beside 2^63", &tensor(&[1 << 63, 0], F32), "InvalidFile", "dimensions above zero"),
    ]
}

fn lied_text(len_bytes: u64) -> GgufFile {
    good().key("x", Value { kind: 8, bytes: [&len_bytes.to_le_bytes()[..], b"abc"].concat() })
}

fn lied_array(kind: u32, count: u64) -> GgufFile {
    good().key("x", Value::array(kind, count, b"abcdefgh"))
}

/// Magic, version and counts.
fn start_rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for version in [0, 4, 5, 100, 0x300, 0x7FFF_FFFF, u32::MAX, 0x0400_0000, 0x0100_0001, 0x0500_0000] {
        let file = GgufFile { version, ..good() };
        rows.push(row(format!("version {version:#x}"), &file, "InvalidFile", "version 2 or 3"));
    }
    rows.push(row("version 1", &GgufFile { version: 1, ..good() }, "NotStreamable", "GGUF version 1"));
    rows.push(row(
        "version 1, big-endian",
        &GgufFile { version: 1 << 24, ..good() },
        "NotStreamable",
        "version 1",
    ));
    for count in [1_u64 << 16, 1 << 32, 1 << 60, 1 << 63, u64::MAX] {
        let tensors = GgufFile { tensor_count: Some(count), ..good() };
        rows.push(row(format!("{count} tensors"), &tensors, "InvalidFile", "announced, more than the rest"));
        let keys = GgufFile { key_count: Some(count), ..good() };
        rows.push(row(format!("{count} keys"), &keys, "InvalidFile", "announced, more than the rest"));
    }
    rows.push(row("a key too many", &GgufFile { key_count: Some(5), ..good() }, "InvalidFile", "at byte"));
    rows.push(row(
        "a tensor too many",
        &GgufFile { tensor_count: Some(2), ..good() },
        "InvalidFile",
        "at byte",
    ));
    rows.push(row(
        "keys are read as tensors",
        &GgufFile { key_count: Some(0), ..good() },
        "InvalidFile",
        "`general",
    ));
    rows.push(("magic alone".into(), b"GGUF".to_vec(), "InvalidFile", "the version"));
    rows.push((
        "magic and version".into(),
        b"GGUF\x03\0\0\0".to_vec(),
        "InvalidFile",
        "the number of tensors",
    ));
    rows
}

/// Keys and values.
fn key_rows() -> Vec<Row> {
    let key = |name: &[u8], value| {
        let mut file = good();
        file.keys.push((name.to_vec(), value));
        file
    };
    let one = || Value::u32(1);
    let twice = good().key("general.architecture", Value::text("gemma"));
    let twice_other = key(b"x", one()).key("y", one()).key("x", Value::text("1"));
    let deep = (0..9).fold(Value::array(0, 0, b""), |inner, _| Value::array(9, 1, &inner.bytes));
    let very_deep = (0..5000).fold(Value::array(0, 0, b""), |inner, _| Value::array(9, 1, &inner.bytes));
    let mut rows = vec![
        row("a key twice", &twice, "InvalidFile", "found `general.architecture` twice"),
        row("a key twice, apart", &twice_other, "InvalidFile", "found `x` twice"),
        row("a key that is not UTF-8", &key(b"\xFF\xFE", one()), "InvalidFile", "a key in UTF-8"),
        row("half a character", &key(b"\xC3", one()), "InvalidFile", "a key in UTF-8"),
        row("a key of 65536 bytes", &key(&[b'k'; 65536], one()), "InvalidFile", "a key of at most 65535"),
        row("arrays in ten levels", &key(b"x", deep), "InvalidFile", "in at most 8 levels"),
        row("arrays in 5000 levels", &key(b"x", very_deep), "InvalidFile", "in at most 8 levels"),
        row(
            "an array of lying texts",
            &key(b"x", Value::array(8, 1, &u64::MAX.to_le_bytes())),
            "InvalidFile",
            "a text",
        ),
        row("an array of lying arrays", &lied_array(9, 1 << 50), "InvalidFile", "an array of"),
        row("an array of an unknown type", &lied_array(13, 1), "InvalidFile", "from 0 to 12, found 13"),
    ];
    for kind in [13, 14, 255, 256, 1 << 16, 1 << 31, u32::MAX] {
        let file = key(b"x", Value { kind, bytes: vec![0; 8] });
        rows.push(row(format!("a value of type {kind}"), &file, "InvalidFile", "from 0 to 12"));
    }
    for alignment in [3, 5, 24, 31, 33, 48, 100, 0xFFFF_FFFF, 0x8000_0001] {
        let mut file = good();
        file.keys[1].1 = Value::u32(alignment);
        rows.push(row(format!("alignment {alignment}"), &file, "InvalidFile", "a power of two"));
    }
    for value in [Value::u16(32), Value::text("32"), Value::array(4, 1, &[32, 0, 0, 0])] {
        let mut file = good();
        file.keys[1].1 = value;
        rows.push(row("alignment of another type", &file, "InvalidFile", "number of 32 bits"));
    }
    let mut wide = good();
    wide.keys[1].1 = Value { kind: 10, bytes: 32_u64.to_le_bytes().to_vec() };
    rows.push(row("alignment of 64 bits", &wide, "InvalidFile", "number of 32 bits"));
    let mut far = good();
    far.keys[1].1 = Value::u32(1 << 31);
    rows.push(row("alignment of 2 GiB", &far, "Truncated", "`blk.0.attn_q.weight`"));
    rows
}

/// Entries of tensors.
fn tensor_rows() -> Vec<Row> {
    let tensor = |dims: &[u64], kind| GgufFile::new().tensor("t", dims, kind, 4096);
    let named = |name: &[u8]| {
        let mut file = tensor(&[4], F32);
        file.tensors[0].name = name.to_vec();
        file
    };
    let mut rows = vec![
        row("a name of 64 bytes", &named(&[b'n'; 64]), "InvalidFile", "at most 63 bytes, found 64"),
        row("a name of 2000 bytes", &named(&[b'n'; 2000]), "InvalidFile", "found 2000"),
        row("a name that is not UTF-8", &named(b"w\xFF"), "InvalidFile", "a tensor's name in UTF-8"),
        row("half a character in a name", &named(b"w\xE2\x82"), "InvalidFile", "a tensor's name in UTF-8"),
        row(
            "five dimensions",
            &tensor(&[1, 1, 1, 1, 4], F32),
            "InvalidFile",
            "at most 4 dimensions, found 5",
        ),
        row("a thousand dimensions", &tensor(&[1; 1000], F32), "InvalidFile", "found 1000"),
        row("two of a name", &tensor(&[4], F32).tensor("t", &[4], F32, 16), "DuplicateKey", "`t`"),
    ];
    for kind in [4, 5, 31, 32, 33, 36, 37, 38] {
        let text = if kind < 6 { "Q4_" } else { "quantise the original again" };
        rows.push(row(format!("removed type {kind}"), &tensor(&[256], kind), "NotStreamable", text));
    }
    rows.push(row("Q2_0", &tensor(&[256], 42), "NotStreamable", "disagree about the length of its blocks"));
    for kind in [43, 44, 99, 100, 255, 256, 0x1000_0000, u32::MAX] {
        rows.push(row(format!("type {kind}"), &tensor(&[256], kind), "InvalidFile", "a known type"));
    }
    for (kind, elements) in
        [(2, 32), (3, 32), (6, 32), (8, 32), (12, 256), (14, 256), (39, 32), (40, 64), (41, 128)]
    {
        for columns in [1, elements - 1, elements + 1, elements / 2] {
            let label = format!("{columns} columns of type {kind}");
            rows.push(row(label, &tensor(&[columns, elements], kind), "InvalidFile", "rows of whole blocks"));
        }
    }
    rows.push(row("a scalar of blocks", &tensor(&[], Q4_0), "InvalidFile", "rows of whole blocks"));
    let apart = |offset| tensor(&[64], I8).tensor_at("u", &[64], I8, offset);
    for offset in [0, 1, 32, 63] {
        rows.push(row(format!("overlap at {offset}"), &apart(offset), "InvalidFile", "behind those of `t`"));
    }
    let inside = GgufFile::new().tensor("t", &[4096], I8, 4096).tensor_at("u", &[8], I8, 1024);
    rows.push(row("one inside another", &inside, "InvalidFile", "tensor `u`: expected its bytes behind"));
    let same = GgufFile::new().tensor("t", &[64], I8, 64).tensor_at("u", &[64], I8, 0);
    rows.push(row("two over the same bytes", &same, "InvalidFile", "expected its bytes behind"));
    for (dims, kind, text) in [(&[4][..], F32, "F32 in big-endian"), (&[256], Q4_K, "Q4_K in big-endian")] {
        let file = GgufFile { is_big_endian: true, ..tensor(dims, kind) };
        rows.push(row(text, &file, "NotStreamable", "gguf_convert_endian"));
    }
    rows
}

/// A good file, cut at every byte of its header and data.
pub(crate) fn cut_rows() -> Vec<Row> {
    let file = good().bytes();
    let header = good().header().len();
    let row = |len: usize| {
        let (kind, text) = match len {
            0..4 => ("UnknownFormat", "expected a safetensors"),
            len if len < header => ("InvalidFile", "at byte"),
            _ => ("Truncated", "blk.0.attn_q.weight"),
        };
        (format!("cut at {len}"), file[..len].to_vec(), kind, text)
    };
    (0..file.len()).map(row).collect()
}

/// All files but those that are only cut.
pub(crate) fn named_rows() -> Vec<Row> {
    [published_rows(), start_rows(), key_rows(), tensor_rows()].concat()
}
