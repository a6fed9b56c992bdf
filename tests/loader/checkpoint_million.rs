//! What opening costs when headers are huge: a checkpoint with a million tensors, and hostile
//! headers and indices made to be expensive. Time and the growth of peak resident memory are
//! measured and bounded.
//!
//! Each opening happens in a process of its own, since the peak belongs to the whole process.
//! Figures are printed: `cargo test -p onelayer --release --test loader -- checkpoint_million
//! --nocapture`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests too")]

use std::fmt::Write as _;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use onelayer::checkpoint::{Checkpoint, OpenOptions};
use onelayer_testing::safetensors_file::with_header;
use onelayer_testing::sample;

pub(crate) const MIB: u64 = 1 << 20;

/// A debug build on a busy machine is this much slower than what is promised of a release build.
pub(crate) const PATIENCE: u32 = if cfg!(debug_assertions) { 60 } else { 2 };

/// A line of /proc/self/status, in bytes.
fn status_bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_matches(|character: char| !character.is_ascii_digit()).parse::<u64>().unwrap() << 10
}

/// What one opening cost and how it ended.
pub(crate) struct Cost {
    /// The variant of the error, or `Ok`.
    pub(crate) outcome: String,
    pub(crate) time: Duration,
    pub(crate) peak_growth_bytes: u64,
    /// What the checkpoint says that it holds.
    pub(crate) held_bytes: u64,
}

const PATH_VARIABLE: &str = "ONELAYER_TEST_OPEN";

/// Opens `path` in a fresh process, where no memory that something else gave back hides what is
/// used.
pub(crate) fn measured(path: &Path) -> Cost {
    let mut command = onelayer_testing::again(module_path!(), "huge_headers_cost_what_is_promised");
    let output = command.env(PATH_VARIABLE, path).output().unwrap();
    let output = String::from_utf8_lossy(&output.stdout);
    let line =
        output.lines().find_map(|line| line.strip_prefix("measured ")).unwrap_or_else(|| panic!("{output}"));
    let mut fields = line.split(' ');
    let mut field = || fields.next().unwrap();
    let outcome = field().to_owned();
    let mut number = || field().parse::<u64>().unwrap();
    let (time, peak_growth_bytes, held_bytes) = (Duration::from_nanos(number()), number(), number());
    Cost { outcome, time, peak_growth_bytes, held_bytes }
}

/// What the fresh process does.
fn measure(path: &Path) {
    let options = OpenOptions::new().allow_opaque_dtypes(true);
    // 5 resets VmHWM to what is resident now.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status_bytes("VmRSS:");
    let start = Instant::now();
    let result = options.open(path);
    let time = start.elapsed().as_nanos();
    let growth = status_bytes("VmHWM:").saturating_sub(before);
    let (outcome, held) = match &result {
        Ok(checkpoint) => ("Ok".to_owned(), checkpoint.metadata_bytes()),
        Err(error) => (format!("{error:?}").split([' ', '{']).next().unwrap().to_owned(), 0),
    };
    // The harness may have begun this line.
    println!("\nmeasured {outcome} {time} {growth} {held}");
}

/// Writes a checkpoint of `count` tensors of two bytes each, without holding its header. Returns
/// the header's length.
fn write_many(path: &Path, count: u64) -> u64 {
    let mut file = BufWriter::new(std::fs::File::create(path).unwrap());
    file.write_all(&[0; 8]).unwrap();
    let mut header_bytes = 0;
    let mut text = String::new();
    for number in 0..count {
        text.clear();
        let (layer, expert) = (number / 1000, number % 1000);
        text.push(if number == 0 { '{' } else { ',' });
        write!(
            text,
            r#""model.layers.{layer}.mlp.experts.{expert}.w":{{"dtype":"BF16","shape":[1],"data_offsets":[{},{}]}}"#,
            2 * number,
            2 * number + 2
        )
        .unwrap();
        header_bytes += u64::try_from(text.len()).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }
    file.write_all(b"}").unwrap();
    header_bytes += 1;
    file.seek(SeekFrom::Start(0)).unwrap();
    file.write_all(&header_bytes.to_le_bytes()).unwrap();
    file.into_inner().unwrap().set_len(8 + header_bytes + 2 * count).unwrap();
    header_bytes
}

/// The bounds that hold for every header over 8 MiB.
fn check(label: &str, header_bytes: u64, cost: &Cost) {
    let Cost { time, peak_growth_bytes, .. } = cost;
    println!(
        "{label}: {:.1} MB of text, {:.3} s, peak + {:.1} MiB ({:.2} of the text)",
        to_f64(header_bytes) / 1e6,
        time.as_secs_f64(),
        to_f64(*peak_growth_bytes) / 1024.0 / 1024.0,
        to_f64(*peak_growth_bytes) / to_f64(header_bytes)
    );
    assert!(*peak_growth_bytes <= 4 * header_bytes + 16 * MIB, "{label}: {peak_growth_bytes}");
    let seconds = u32::try_from(header_bytes.div_ceil(50_000_000)).unwrap();
    assert!(*time <= Duration::from_secs(1) * seconds * PATIENCE, "{label}: {time:?}");
}

pub(crate) fn to_f64(bytes: u64) -> f64 {
    u32::try_from(bytes).unwrap().into()
}

/// `before`, then items numbered from 0 with commas between them until the text is long enough,
/// then `after`.
fn repeated(before: &str, item: impl Fn(&mut String, u64), after: &str) -> String {
    const LEN: usize = 12 << 20;
    let mut text = String::with_capacity(LEN + 1024);
    text.push_str(before);
    for number in 0.. {
        if number > 0 {
            text.push(',');
        }
        item(&mut text, number);
        if text.len() > LEN {
            break;
        }
    }
    text.push_str(after);
    text
}

/// Headers that cost as much as they can, and the kind of error they end in.
fn expensive_headers() -> Vec<(&'static str, String, &'static str)> {
    let tensor = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    vec![
        (
            "one shape",
            repeated(r#"{"t":{"dtype":"U8","data_offsets":[0,1],"shape":["#, |text, _| text.push('0'), "]}}"),
            "SizeMismatch",
        ),
        (
            "many shapes",
            repeated(
                "{",
                |text, number| {
                    let zeros = "0,".repeat(2000);
                    write!(text, r#""{number}":{{"dtype":"U8","shape":[{zeros}0],"data_offsets":[0,0]}}"#)
                        .unwrap();
                },
                "}",
            ),
            "TrailingBytes",
        ),
        (
            "small tensors",
            repeated("{", |text, number| write!(text, r#""{number:x}":{tensor}"#).unwrap(), "}"),
            "TrailingBytes",
        ),
        (
            "one name, again and again",
            repeated("{", |text, _| write!(text, r#""t":{tensor}"#).unwrap(), "}"),
            "DuplicateKey",
        ),
        (
            "one range, again and again",
            repeated(
                "{",
                |text, number| {
                    write!(text, r#""{number:x}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#)
                        .unwrap();
                },
                "}",
            ),
            "Overlap",
        ),
        (
            "texts",
            repeated(
                r#"{"__metadata__":{"#,
                |text, number| write!(text, r#""{number:x}":"""#).unwrap(),
                "}}",
            ),
            "TrailingBytes",
        ),
        (
            "one text",
            format!(r#"{{"__metadata__":{{"x":"{}"}}}}"#, "\\u0041".repeat(2 << 20)),
            "TrailingBytes",
        ),
        ("one name", format!(r#"{{"{}":{tensor}}}"#, "\\n".repeat(6 << 20)), "TrailingBytes"),
        ("one long name without end", format!(r#"{{"{}"#, "x".repeat(12 << 20)), "Syntax"),
        (
            "unknown fields",
            repeated(r#"{"t":{"#, |text, number| write!(text, r#""{number:x}":0"#).unwrap(), "}}"),
            "MissingField",
        ),
        (
            "an unknown object",
            repeated(r#"{"t":{"x":{"#, |text, number| write!(text, r#""{number:x}":[]"#).unwrap(), "}}}"),
            "MissingField",
        ),
        ("digits", format!(r#"{{"t":{{"shape":[{}]}}}}"#, "9".repeat(12 << 20)), "Syntax"),
        ("spaces", format!("{}{{}}", " ".repeat(12 << 20)), "TrailingBytes"),
        ("brackets", format!(r#"{{"t":{{"x":{}"#, "[".repeat(12 << 20)), "Syntax"),
        (
            "names of 64 KiB",
            repeated(
                "{",
                |text, number| {
                    let long = "n".repeat(64 << 10);
                    write!(text, r#""{long}{number}":{tensor}"#).unwrap();
                },
                "}",
            ),
            "TrailingBytes",
        ),
        (
            "names that part one after the other",
            repeated(
                "{",
                |text, number| {
                    let (len, end) = if number % 2 == 0 { (9000, 'x') } else { (7 * number / 2, 'a') };
                    let long = "x".repeat(usize::try_from(len).unwrap());
                    write!(text, r#""{long}{end}{number}":{tensor}"#).unwrap();
                },
                "}",
            ),
            "TrailingBytes",
        ),
        (
            "dtypes nobody knows",
            repeated(
                "{",
                |text, number| {
                    write!(text, r#""{number:x}":{{"dtype":"{number:x}","shape":[],"data_offsets":[0,0]}}"#)
                        .unwrap();
                },
                "}",
            ),
            "TrailingBytes",
        ),
    ]
}

fn expensive_indices() -> Vec<(&'static str, String, &'static str)> {
    vec![
        (
            "a file per tensor",
            repeated(
                r#"{"weight_map":{"#,
                |text, number| write!(text, r#""{number:x}":"{number:x}""#).unwrap(),
                "}}",
            ),
            "TooMany",
        ),
        (
            "flat, a file per tensor",
            repeated("{", |text, number| write!(text, r#""{number:x}":"{number:x}""#).unwrap(), "}"),
            "TooMany",
        ),
        (
            "65 536 files",
            repeated(
                r#"{"weight_map":{"#,
                |text, number| write!(text, r#""{number:x}":"{:x}""#, number & 0xffff).unwrap(),
                "}}",
            ),
            "MissingShards",
        ),
        (
            "two files by turns",
            repeated(
                r#"{"weight_map":{"#,
                |text, number| write!(text, r#""{number:x}":"{}""#, number & 1).unwrap(),
                "}}",
            ),
            "MissingShards",
        ),
        (
            "one tensor, again and again",
            repeated(r#"{"weight_map":{"#, |text, _| text.push_str(r#""t":"f""#), "}}"),
            "DuplicateKey",
        ),
    ]
}

#[test]
fn huge_headers_cost_what_is_promised() {
    if let Some(path) = std::env::var_os(PATH_VARIABLE) {
        return measure(Path::new(&path));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("million.safetensors");
    let header_bytes = write_many(&path, 1_000_000);
    // The file is in the page cache now: what is timed is the work, not the disk.
    let cost = measured(&path);
    assert_eq!(cost.outcome, "Ok");
    check("10^6 tensors", header_bytes, &cost);
    assert!(cost.peak_growth_bytes <= 250 * MIB, "{}", cost.peak_growth_bytes);
    assert!(cost.time <= Duration::from_secs(1) * PATIENCE, "{:?}", cost.time);
    // What it says that it holds is what it holds: no more, and nearly all that became resident.
    let held = cost.held_bytes;
    println!("held: {:.1} MiB", to_f64(held) / 1024.0 / 1024.0);
    assert!(held <= cost.peak_growth_bytes + MIB && cost.peak_growth_bytes <= held + 16 * MIB, "{held}");
    std::fs::remove_file(&path).unwrap();

    let path = folder.path().join("expensive.safetensors");
    for (label, header, expected) in sample(expensive_headers(), 4) {
        std::fs::write(&path, with_header(&header, 1)).unwrap();
        let cost = measured(&path);
        assert_eq!(cost.outcome, expected, "{label}");
        check(label, header.len().try_into().unwrap(), &cost);
    }
    // Far down, where each path that is made takes nearly a page.
    let deep = folder.path().join(vec!["d".repeat(250); 14].join("/"));
    std::fs::create_dir_all(&deep).unwrap();
    let path = deep.join("model.safetensors.index.json");
    for (label, text, expected) in sample(expensive_indices(), 4) {
        std::fs::write(&path, &text).unwrap();
        let cost = measured(&path);
        assert_eq!(cost.outcome, expected, "{label}");
        check(label, text.len().try_into().unwrap(), &cost);
    }
}

#[test]
fn tensors_of_a_large_checkpoint_are_found() {
    if std::env::var_os(PATH_VARIABLE).is_some() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("many.safetensors");
    write_many(&path, 20_000);
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.tensor_count(), 20_000);
    let tensor = checkpoint.find("model.layers.12.mlp.experts.345.w").unwrap();
    assert_eq!(tensor.extent.start(), checkpoint.shards()[0].data.start() + 2 * 12_345);
    assert!(checkpoint.tensors().all(|tensor| checkpoint.find(tensor.name) == Some(tensor)));
}
