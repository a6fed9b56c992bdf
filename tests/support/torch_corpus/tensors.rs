//! Tensors whose numbers lie, and containers that are traps.

use onelayer_testing::torch_file::{Pickle, View, vector};

use super::{Case, read, refused, zipped};

const INVALID: &str = "InvalidFile";

/// A dictionary with a tensor `w` of this view.
fn viewed(view: &View<'_>, count: i64) -> Vec<u8> {
    zipped(&Pickle::new().raw(b"}").text("w").tensor("ByteStorage", "0", count, view).raw(b"s").end())
}

/// Offsets, shapes and strides.
fn views() -> Vec<Case> {
    let big = 1 << 21;
    let outside = "OutsideStorage";
    let rows: [(&str, View<'_>, &'static str, &str); 24] = [
        ("one element too many", View { offset: 0, shape: &[5], strides: &[1] }, outside, "5 bytes"),
        ("an offset too far", View { offset: 1, shape: &[4], strides: &[1] }, outside, "5 bytes"),
        ("an offset behind the storage", View { offset: 99, shape: &[], strides: &[] }, outside, "100 bytes"),
        (
            "an offset of 2^62",
            View { offset: 1 << 62, shape: &[1], strides: &[1] },
            outside,
            "inside its storage",
        ),
        (
            "an offset that wraps",
            View { offset: i64::MAX, shape: &[2], strides: &[i64::MAX] },
            outside,
            "inside",
        ),
        ("strides too far", View { offset: 0, shape: &[2], strides: &[4] }, outside, "5 bytes"),
        ("strides that wrap", View { offset: 0, shape: &[3], strides: &[i64::MAX] }, outside, "inside"),
        (
            "a shape that wraps",
            View { offset: 0, shape: &[i64::MAX, 4], strides: &[4, 1] },
            outside,
            "inside",
        ),
        (
            "2^31 by 2^31 by 2^31",
            View { offset: 0, shape: &[1 << 31, 1 << 31, 1 << 31], strides: &[1, 1, 1] },
            outside,
            "inside",
        ),
        (
            "expanded, 2^21 by 2^21",
            View { offset: 0, shape: &[big, big], strides: &[0, 0] },
            "NotStreamable",
            "expanded",
        ),
        ("expanded once", View { offset: 0, shape: &[2, 4], strides: &[0, 1] }, "NotStreamable", "expanded"),
        ("expanded to 2^62", View { offset: 0, shape: &[1 << 62], strides: &[0] }, "SizeOverflow", "2^64"),
        (
            "expanded beyond 2^64 bits",
            View { offset: 0, shape: &[1 << 62, 1 << 40], strides: &[0, 0] },
            "SizeOverflow",
            "2^64",
        ),
        (
            "empty beyond 2^64 bits",
            View { offset: 0, shape: &[0, 1 << 62, 1 << 40], strides: &[1, 1, 1] },
            "SizeOverflow",
            "2^64",
        ),
        ("a negative offset", View { offset: -1, shape: &[1], strides: &[1] }, INVALID, "offset of a tensor"),
        ("a negative dimension", View { offset: 0, shape: &[-1], strides: &[1] }, INVALID, "numbers from 0"),
        ("a negative stride", View { offset: 3, shape: &[2], strides: &[-1] }, INVALID, "numbers from 0"),
        (
            "fewer strides",
            View { offset: 0, shape: &[2, 2], strides: &[1] },
            INVALID,
            "2 dimensions, found 1",
        ),
        ("more strides", View { offset: 0, shape: &[2], strides: &[1, 1] }, INVALID, "1 dimensions, found 2"),
        (
            "65 dimensions",
            View { offset: 0, shape: &[1; 65], strides: &[1; 65] },
            INVALID,
            "at most 64 numbers",
        ),
        (
            "strides 2^63 - 1 and one element",
            View { offset: 4, shape: &[1], strides: &[i64::MAX] },
            outside,
            "5 bytes",
        ),
        (
            "an offset beyond, empty",
            View { offset: 5, shape: &[0, i64::MAX >> 1], strides: &[1, 1] },
            "SizeOverflow",
            "2^64",
        ),
        ("scalar behind the end", View { offset: 4, shape: &[], strides: &[] }, outside, "5 bytes"),
        ("a square too large", View { offset: 0, shape: &[3, 3], strides: &[3, 1] }, outside, "9 bytes"),
    ];
    let mut cases: Vec<Case> =
        rows.iter().map(|(name, view, kind, text)| refused(*name, viewed(view, 4), kind, text)).collect();
    for (name, count, text) in [
        ("a storage longer than its entry", 5, "5 elements of 1 bytes, found 4"),
        ("a storage of 2^62", 1 << 62, "found 4 bytes"),
        ("a storage of -1", -1, "number from 0"),
    ] {
        cases.push(refused(name, viewed(&vector(&[4]), count), INVALID, text));
    }
    cases.push(refused(
        "a storage that says it is shorter",
        viewed(&vector(&[4]), 3),
        "OutsideStorage",
        "4 bytes",
    ));
    cases.push(read(
        "64 dimensions",
        viewed(&View { offset: 0, shape: &[[1; 63].as_slice(), &[4]].concat(), strides: &[1; 64] }, 4),
        &["w"],
    ));
    cases
}

/// Storages and element types.
fn storages() -> Vec<Case> {
    let mut cases = vec![];
    let tensor = |class: &str, count: i64| {
        let view = View { offset: 0, shape: &[1], strides: &[1] };
        zipped(&Pickle::new().raw(b"}").text("w").tensor(class, "0", count, &view).raw(b"s").end())
    };
    for class in ["DoubleStorage", "LongStorage", "ComplexFloatStorage"] {
        cases.push(refused(format!("one {class} in 4 bytes"), tensor(class, 1), INVALID, "found 4 bytes"));
    }
    for class in ["NoStorage", "Storage", "__import__", "Tensor", "float32", "TypedStorage", ""] {
        cases.push(refused(
            format!("class {class:?}"),
            tensor(class, 1),
            INVALID,
            "class of storages that torch has",
        ));
    }
    for class in ["QInt8Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage", "QInt32Storage"] {
        cases.push(refused(format!("type {class}"), tensor(class, 1), "NotStreamable", "elements of type q"));
    }
    let typed = |dtype: &str, bytes: i64, view: &View<'_>| {
        zipped(&Pickle::new().raw(b"}").text("w").typed_tensor(dtype, "0", bytes, view).raw(b"s").end())
    };
    for dtype in ["complex32", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "bcomplex32"] {
        cases.push(refused(dtype, typed(dtype, 4, &vector(&[1])), "NotStreamable", "elements of type"));
    }
    for dtype in ["float", "Tensor", "float7", "per_tensor_affine", "os"] {
        cases.push(refused(
            format!("dtype {dtype}"),
            typed(dtype, 4, &vector(&[1])),
            INVALID,
            "element type of a tensor",
        ));
    }
    cases.push(refused(
        "two uint32 in 4 bytes",
        typed("uint32", 4, &vector(&[2])),
        "OutsideStorage",
        "8 bytes",
    ));
    let turned = View { offset: 0, shape: &[2, 2], strides: &[1, 2] };
    cases.push(refused(
        "float4 with strides",
        typed("float4_e2m1fn_x2", 4, &turned),
        "NotStreamable",
        "contiguous",
    ));
    let scalar = View { offset: 0, shape: &[], strides: &[] };
    cases.push(refused(
        "a float4 scalar",
        typed("float4_e2m1fn_x2", 4, &scalar),
        "NotStreamable",
        "dimensions",
    ));
    for (name, class) in [("a Python 2 class", "__builtin__"), ("a class of another package", "numpy")] {
        let mut pickle = Pickle::new();
        pickle.raw(b"}").text("w").global("torch._utils", "_rebuild_tensor_v2").raw(b"((").text("storage");
        pickle
            .global(class, "FloatStorage")
            .text("0")
            .text("cpu")
            .int(1)
            .raw(b"tQ")
            .int(0)
            .ints(&[1])
            .ints(&[1]);
        cases.push(refused(name, zipped(&pickle.raw(b"\x89NtRs").end()), INVALID, "class of storages"));
    }
    cases.extend(identities());
    cases
}

/// Persistent identities that are no storages.
fn identities() -> Vec<Case> {
    let mut cases = vec![];
    let ids: [(&str, &[u8], &str); 9] = [
        ("a number", b"K\x01", "as a tuple"),
        ("nothing", b"N", "as a tuple"),
        ("an empty tuple", b")", "five parts"),
        ("a list", b"]", "as a tuple"),
        ("four parts", b"(X\x07\0\0\0storageNNNt", "five parts"),
        ("another kind", b"(X\x06\0\0\0moduleNNNNt", "identity of a storage"),
        ("a key that is a number", b"(X\x07\0\0\0storagectorch\nByteStorage\nK\0X\x03\0\0\0cpuK\x04t", "as text"),
        ("a count that is a text", b"(X\x07\0\0\0storagectorch\nByteStorage\nX\x01\0\0\x000X\x03\0\0\0cpuX\x01\0\0\x004t", "as text"),
        ("a count of 200 bits", b"(X\x07\0\0\0storagectorch\nByteStorage\nX\x01\0\0\x000X\x03\0\0\0cpu\x8a\x19aaaaaaaaaaaaaaaaaaaaaaaaat", "as text"),
    ];
    for (name, id, text) in ids {
        let pickle = Pickle::new().raw(b"}").text("w").raw(id).raw(b"Qs").end();
        cases.push(refused(format!("identity: {name}"), zipped(&pickle), INVALID, text));
    }
    for key in ["1", "00", "-1", "../../etc/passwd", "0\0", "data/0", "", " 0", "99999999999999999999", "é"]
    {
        let pickle =
            Pickle::new().raw(b"}").text("w").tensor("ByteStorage", key, 4, &vector(&[4])).raw(b"s").end();
        cases.push(refused(format!("storage key {key:?}"), zipped(&pickle), INVALID, "expected the entry"));
    }
    cases
}

/// Containers in themselves, in each other, and deep.
fn containers() -> Vec<Case> {
    let tensor = |pickle: &mut Pickle| {
        pickle.tensor("ByteStorage", "0", 4, &vector(&[4]));
    };
    let mut cases = vec![];
    let mut circle = Pickle::new();
    circle.raw(b"}q\x01").text("w");
    tensor(&mut circle);
    circle.raw(b"s").text("me").raw(b"h\x01s");
    cases.push(refused("a dictionary in itself", zipped(&circle.end()), "NotStreamable", "holds itself"));
    let mut list = Pickle::new();
    list.raw(b"]q\x01");
    tensor(&mut list);
    list.raw(b"ah\x01a");
    cases.push(refused("a list in itself", zipped(&list.end()), "NotStreamable", "holds itself"));
    let mut beside = Pickle::new();
    beside.raw(b"}").text("w");
    tensor(&mut beside);
    beside.raw(b"s").text("circle").raw(b"]q\x01h\x01as");
    cases.push(read("a circle beside the tensors", zipped(&beside.end()), &["w"]));
    // Ten lists, each ten times in the next.
    for levels in [10_u8, 200] {
        let mut bomb = Pickle::new();
        bomb.raw(b"]q\0");
        tensor(&mut bomb);
        bomb.raw(b"a");
        for level in 1..levels {
            bomb.raw([b'0', b']', b'q', level, b'(']);
            bomb.raw([b'h', level - 1].repeat(10)).raw(b"e");
        }
        let text = "hold each other many times";
        cases.push(refused(format!("a bomb of {levels} lists"), zipped(&bomb.end()), "NotStreamable", text));
    }
    for (name, depth, open, close, verdict) in [
        ("300 dictionaries deep", 300, &b"}X\x01\0\0\0k"[..], &b"s"[..], Some("nested too deeply")),
        ("200 dictionaries deep", 200, b"}X\x01\0\0\0k", b"s", None),
        ("100 000 lists deep", 100_000, b"]", b"a", Some("nested too deeply")),
    ] {
        let mut deep = Pickle::new();
        deep.raw(open.repeat(depth));
        tensor(&mut deep);
        deep.raw(close.repeat(depth));
        match verdict {
            Some(text) => cases.push(refused(name, zipped(&deep.end()), "NotStreamable", text)),
            None => {
                let name = "k.".repeat(depth - 1) + "k";
                cases.push(read("200 dictionaries deep", zipped(&deep.end()), vec![&*name.leak()].leak()));
            }
        }
    }
    cases.extend(keys());
    cases
}

/// Keys that are no names.
fn keys() -> Vec<Case> {
    let tensor = |pickle: &mut Pickle| {
        pickle.tensor("ByteStorage", "0", 4, &vector(&[4]));
    };
    let mut cases = vec![];
    for (name, key) in [
        ("a tuple", &b")"[..]),
        ("nothing", b"N"),
        ("a fraction", b"G\0\0\0\0\0\0\0\0"),
        ("bytes", b"C\x01a"),
        ("half a character", b"X\x03\0\0\0\xed\xa0\x80"),
        ("40 000 bytes", b"40"),
    ] {
        let mut pickle = Pickle::new();
        pickle.raw(b"}");
        match key {
            b"40" => {
                pickle.text(&"n".repeat(40_000));
            }
            key => {
                pickle.raw(key);
            }
        }
        tensor(&mut pickle);
        cases.push(refused(
            format!("key: {name}"),
            zipped(&pickle.raw(b"s").end()),
            "NotStreamable",
            "neither a text nor",
        ));
    }
    for (name, first, second) in
        [("tensors", 0, 0), ("tensor and nothing", 0, 1), ("nothing and tensor", 1, 0)]
    {
        let mut pickle = Pickle::new();
        pickle.raw(b"}(");
        for kind in [first, second] {
            pickle.text("w");
            match kind {
                0 => tensor(&mut pickle),
                _ => {
                    pickle.raw(b"N");
                }
            }
        }
        let kind = if first + second == 0 { "DuplicateKey" } else { "NotStreamable" };
        cases.push(refused(format!("a key twice: {name}"), zipped(&pickle.raw(b"u").end()), kind, "twice"));
    }
    let mut joined = Pickle::new();
    joined.raw(b"}(").text("a").raw(b"}").text("b");
    tensor(&mut joined);
    joined.raw(b"s").text("a.b");
    tensor(&mut joined);
    cases.push(refused("one name from two paths", zipped(&joined.raw(b"u").end()), "DuplicateKey", "twice"));
    let mut long = Pickle::new();
    for _ in 0..5 {
        long.raw(b"}").text(&"n".repeat(30_000));
    }
    tensor(&mut long);
    cases.push(refused(
        "a name of 150 000 bytes",
        zipped(&long.raw(b"sssss").end()),
        "NotStreamable",
        "shorter name",
    ));
    cases
}

/// The cases of tensors.
pub(super) fn cases() -> Vec<Case> {
    [views(), storages(), containers()].concat()
}
