//! Archives: end records, directories, local headers and names that lie.

use onelayer_testing::torch_file::{ZipWriter, crc32};

use super::{Case, DATA, plain, plain_pickle, read, refused};

const INVALID: &str = "InvalidFile";

/// The plain archive with these bytes at some place.
fn patched(at: usize, bytes: &[u8]) -> Vec<u8> {
    let (mut file, _) = plain();
    file[at..at + bytes.len()].copy_from_slice(bytes);
    file
}

/// Positions in the plain archive.
struct Places {
    end: usize,
    end64: usize,
    directory: usize,
    /// The entry of the pickle in the directory, and its local header.
    pickle: (usize, usize),
    /// The same of the storage.
    storage: (usize, usize),
}

fn places() -> Places {
    let (_, parts) = plain();
    let entry = |number: usize| {
        let entry = parts.entries[number];
        (entry.central, usize::try_from(entry.local).unwrap())
    };
    Places {
        end: parts.end,
        end64: parts.end64,
        directory: parts.directory,
        pickle: entry(0),
        storage: entry(4),
    }
}

/// The records at the end of the file.
fn ends() -> Vec<Case> {
    let places = places();
    let (file, _) = plain();
    let (end, end64, locator) = (places.end, places.end64, places.end64 + 56);
    let mut cases = vec![];
    let mut change = |name: &str, at: usize, bytes: &[u8], text: &str| {
        cases.push(refused(format!("end: {name}"), patched(at, bytes), INVALID, text));
    };
    change("disk 1", end + 4, &[1, 0], "contradict");
    change("directory on disk 1", end + 6, &[1, 0], "contradict");
    change("another count here", end + 8, &[3, 0], "contradict");
    change("another count", end + 10, &[3, 0], "contradict");
    change("another length", end + 12, &[0, 0, 0, 0], "contradict");
    change("another start", end + 16, &[0, 0, 0, 0], "contradict");
    change("a comment that is not there", end + 20, &[5, 0], "5 bytes of comment, found 0");
    change("no magic", end, b"PK\x05\x07", "expected the end record");
    change("locator of disk 1", locator + 4, &[1], "right before its locator");
    change("locator to the start", locator + 8, &[0; 8], "right before its locator");
    change("locator far away", locator + 8, &[0xff; 8], "right before its locator");
    change("locator of two disks", locator + 16, &[2], "right before its locator");
    change("locator without magic", locator, b"XX", "right before its end record");
    change("64-bit record without magic", end64, b"XX", "64-bit end record of 56 bytes");
    change("64-bit record of another length", end64 + 4, &[45], "64-bit end record of 56 bytes");
    change("64-bit record on disk 1", end64 + 16, &[1], "contradict");
    change("64-bit count here", end64 + 24, &[1], "contradict");
    change("64-bit count", end64 + 32, &[0xff; 8], "contradict");
    change("64-bit length", end64 + 40, &[0xff; 8], "contradict");
    change("64-bit start", end64 + 48, &[0xff; 8], "contradict");
    let both = |name: &str, short: (usize, &[u8]), wide: (usize, &[u8]), text: &str| {
        let mut file = file.clone();
        file[end + short.0..][..short.1.len()].copy_from_slice(short.1);
        file[end64 + wide.0..][..wide.1.len()].copy_from_slice(wide.1);
        refused(format!("end: {name}"), file, INVALID, text)
    };
    cases.extend([
        both("one entry more", (8, &[8, 0, 8, 0]), (24, &[8, 0, 0, 0, 0, 0, 0, 0, 8]), "expected 8 entries"),
        both("one entry fewer", (8, &[6, 0, 6, 0]), (24, &[6, 0, 0, 0, 0, 0, 0, 0, 6]), "expected 6 entries"),
        both("2^64 - 1 entries", (8, &[0xff; 4]), (24, &[0xff; 16]), "expected 18446744073709551615 entries"),
        both("length 2^64 - 1", (12, &[0xff; 4]), (40, &[0xff; 8]), "right before its end record"),
        both("start 2^64 - 1", (16, &[0xff; 4]), (48, &[0xff; 8]), "right before its end record"),
        both("an empty directory", (12, &[0; 4]), (40, &[0; 8]), "right before its end record"),
        both("counts differ", (8, &[0xff; 2]), (24, &[6]), "in one file"),
    ]);
    for cut in [1, 21, 22, 42, 98, 99, 200] {
        let cut_file = file[..file.len() - cut].to_vec();
        cases.push(refused(format!("end: {cut} bytes cut off"), cut_file, INVALID, "interrupted download?"));
    }
    for tail in [1_usize, 3, 1000, 70_000] {
        let more = [&file[..], &vec![b'x'; tail]].concat();
        let text = if tail > 65_536 { "interrupted download?" } else { "bytes of comment" };
        cases.push(refused(format!("end: {tail} bytes behind it"), more, INVALID, text));
    }
    // A second end record in the comment of the first: readers would differ in which they take.
    let mut hidden = file.clone();
    hidden[end + 20..end + 22].copy_from_slice(&[22, 0]);
    hidden.extend_from_slice(&file[end..]);
    cases.push(refused(
        "end: a second end record in the comment",
        hidden,
        INVALID,
        "right before its end record",
    ));
    let mut commented = file.clone();
    commented[end + 20..end + 22].copy_from_slice(&[5, 0]);
    commented.extend(b"hello");
    cases.push(read("end: a comment", commented, &["w"]));
    cases.push(refused(
        "end: only an end record",
        file[end..].to_vec(),
        INVALID,
        "right before its end record",
    ));
    cases.push(refused("end: only local headers", file[..places.directory].to_vec(), INVALID, "interrupted"));
    cases
}

/// Entries of the directory, and local headers.
fn headers() -> Vec<Case> {
    let places = places();
    let mut cases = vec![];
    for (what, (central, local)) in [("pickle", places.pickle), ("storage", places.storage)] {
        let mut change = |name: &str, at: usize, bytes: &[u8], kind: &'static str, text: &str| {
            cases.push(refused(format!("{what}: {name}"), patched(at, bytes), kind, text));
        };
        change("no entry", central, b"PK\x01\x03", INVALID, "expected an entry of the directory");
        change("encrypted", central + 8, &[9, 8], "NotStreamable", "is encrypted");
        change("patched", central + 8, &[0x28, 8], "NotStreamable", "is compressed");
        change("masked headers", central + 8, &[8, 0x28], "NotStreamable", "is compressed");
        change("deflated", central + 10, &[8, 0], "NotStreamable", "is compressed");
        change("zstd", central + 10, &[93, 0], "NotStreamable", "is compressed");
        change("packed smaller", central + 20, &[1, 0, 0, 0], "NotStreamable", "is compressed");
        change("longer", central + 20, &[0, 0, 1, 0, 0, 0, 1, 0], INVALID, "to end before the next");
        change(
            "4 GiB",
            central + 20,
            &[0xff, 0xff, 0xff, 0xfe, 0xff, 0xff, 0xff, 0xfe],
            INVALID,
            "to end before",
        );
        change(
            "64-bit sizes that are missing",
            central + 20,
            &[0xff; 8],
            INVALID,
            "64-bit sizes are missing",
        );
        change("64-bit start that is missing", central + 42, &[0xff; 4], INVALID, "64-bit sizes are missing");
        change("a shorter name", central + 28, &[3, 0], INVALID, "");
        change("a name without end", central + 28, &[0xff, 0xff], INVALID, "at most 1024 bytes");
        change("an extra field without end", central + 30, &[0xff, 0xff], INVALID, "more bytes");
        change("a comment without end", central + 32, &[0xff, 0xff], INVALID, "more bytes");
        change("a folder with bytes", central + 38, &[0x10], INVALID, "is a folder with bytes");
        change("on another disk", central + 34, &[1, 0], INVALID, "in another file");
        change("start moved", central + 42, &[1, 0, 0, 0], INVALID, "");
        change(
            "start in the directory",
            central + 42,
            &1_u32.to_le_bytes().map(|byte| byte << 7),
            INVALID,
            "",
        );
        change("local: no header", local, b"PK\x03\x05", INVALID, "");
        change("local: encrypted", local + 6, &[9, 8], INVALID, "another compression or encryption");
        change("local: deflated", local + 8, &[8, 0], INVALID, "another compression or encryption");
        change("local: another checksum", local + 14, &[1, 2, 3, 4], INVALID, "another checksum");
        change("local: another size", local + 22, &[9, 0, 0, 0], INVALID, "another size");
        change("local: another packed size", local + 18, &[9, 0, 0, 0], INVALID, "another size");
        change("local: 64-bit sizes that are missing", local + 18, &[0xff; 8], INVALID, "another size");
        change("local: a shorter name", local + 26, &[5, 0], INVALID, "another name");
        change("local: a name into the data", local + 26, &[0xff, 0xff], INVALID, "");
        change("local: an extra field into the data", local + 28, &[0xff, 0xff], INVALID, "");
        change("local: another name", local + 35, b"Z", INVALID, "another name");
    }
    // Sizes and checksums may follow the data, and checksums are not compared with it, as torch
    // does.
    cases.push(read("another checksum", patched(places.storage.0 + 16, &[1, 2, 3, 4]), &["w"]));
    // The pickle at the place of a storage: found by two names.
    let storage = u32::try_from(places.storage.1).unwrap().to_le_bytes();
    cases.push(refused(
        "two entries over one local header",
        patched(places.pickle.0 + 42, &storage),
        INVALID,
        "expected the first entry at the start",
    ));
    cases.retain(|case| case.name != "pickle: local: no header");
    cases.push(refused(
        "no local header at the start",
        patched(0, b"XX"),
        "HeaderExceedsFile",
        "not a safetensors file",
    ));
    cases.push(refused(
        "an unknown magic at the start",
        patched(2, b"\x05\x06"),
        INVALID,
        "local header of entry",
    ));
    cases
}

/// An archive of entries with full names.
fn named(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Vec::new(), "archive");
    for (name, data) in entries {
        zip.add_as(name, data, crc32(data)).unwrap();
    }
    zip.finish().unwrap().0
}

/// Names that leave the root, occur twice, or are missing.
fn names() -> Vec<Case> {
    let pickle = plain_pickle();
    let with = |more: &str| named(&[("a/data.pkl", &pickle), ("a/data/0", &DATA), (more, b"x")]);
    let mut cases = vec![];
    for name in ["a/../x", "a/..", "a/b/../../x", "a/.", "a/./x", "a/b\\c", "a/\0", "a/x\0y", "a/..\\x"] {
        cases.push(refused(format!("name {name:?}"), with(name), INVALID, "leaves its folder"));
    }
    for name in ["a//x", "a/b//x"] {
        cases.push(refused(format!("name {name:?}"), with(name), INVALID, "is empty"));
    }
    for name in ["b/x", "x", "/a/x", "", "A/x", "../a/x", "C:/x"] {
        cases.push(refused(format!("name {name:?}"), with(name), INVALID, "in the root folder"));
    }
    for name in ["a/data.pkl", "a/data/0", "a/DATA.PKL", "a/Data.pkl", "a/DATA/0", "a/Data/7"] {
        cases.push(refused(format!("twice: {name:?}"), with(name), INVALID, "expected each name once"));
    }
    cases.push(refused(
        "a name of 2000 bytes",
        with(&format!("a/{}", "n".repeat(2000))),
        INVALID,
        "1024 bytes",
    ));
    for name in ["a/code/x.py", "a/constants.pkl", "a/code/__torch__.py.debug_pkl"] {
        cases.push(refused(format!("TorchScript: {name}"), with(name), "NotStreamable", "TorchScript"));
    }
    for name in ["a/data/00", "a/data/0x", "a/ü", "a/data/4294967296", "a/.data/x"] {
        cases.push(read(format!("name {name:?}"), with(name), &["w"]));
    }
    for (data, verdict) in [(&b""[..], None), (b"x", Some("is a folder with bytes"))] {
        for name in ["a/", "a/data/"] {
            let file = named(&[("a/data.pkl", &pickle), ("a/data/0", &DATA), (name, data)]);
            let label = format!("folder {name} of {} bytes", data.len());
            cases.push(match verdict {
                None => read(label, file, &["w"]),
                Some(text) => refused(label, file, INVALID, text),
            });
        }
    }
    let first = |name: &str| named(&[(name, b"x"), ("a/data.pkl", &pickle), ("a/data/0", &DATA)]);
    for name in ["data.pkl", "/data.pkl", "", "x"] {
        cases.push(refused(format!("first name {name:?}"), first(name), INVALID, "in a root folder"));
    }
    for name in ["../x", "./x", "..\\a/x"] {
        cases.push(refused(format!("first name {name:?}"), first(name), INVALID, "leaves its folder"));
    }
    for root in ["archive", "my model", "ü", "...", "a.b", "~"] {
        let names = [format!("{root}/data.pkl"), format!("{root}/data/0")];
        let file = named(&[(&names[0], &pickle), (&names[1], &DATA)]);
        cases.push(read(format!("root folder {root:?}"), file, &["w"]));
    }
    let missing = "only archives that torch.save wrote";
    cases.push(refused("no pickle", named(&[("a/data/0", &DATA)]), "NotStreamable", missing));
    cases.push(refused("a spreadsheet", named(&[("xl/workbook.xml", b"<x/>")]), "NotStreamable", missing));
    cases.push(refused(
        "no storage",
        named(&[("a/data.pkl", &pickle)]),
        INVALID,
        "entry `data/0`, found none",
    ));
    cases.push(refused("an empty pickle", named(&[("a/data.pkl", b"")]), INVALID, "more bytes"));
    for (order, verdict) in
        [("big", "big-endian"), ("middle", "`little` or `big`"), ("", "`little` or `big`")]
    {
        let file = named(&[("a/data.pkl", &pickle), ("a/byteorder", order.as_bytes()), ("a/data/0", &DATA)]);
        let kind = if order == "big" { "NotStreamable" } else { INVALID };
        cases.push(refused(format!("byte order {order:?}"), file, kind, verdict));
    }
    cases.push(read("storages in any order", named(&[("a/data/0", &DATA), ("a/data.pkl", &pickle)]), &["w"]));
    cases
}

/// The cases of archives.
pub(super) fn cases() -> Vec<Case> {
    let (file, _) = plain();
    [vec![read("a plain archive", file, &["w"])], ends(), headers(), names()].concat()
}
