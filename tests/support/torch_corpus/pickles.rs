//! Pickles: broken ones, bombs, and calls that must not happen.

use onelayer_testing::torch_file::{Pickle, vector};

use super::{Case, plain_pickle, read, refused, zipped};

const INVALID: &str = "InvalidFile";

/// Functions that scanners of pickles look for, and some by which they were bypassed.
const CALLS: [(&str, &str); 60] = [
    ("os", "system"),
    ("posix", "system"),
    ("nt", "system"),
    ("os", "popen"),
    ("os", "execv"),
    ("os", "spawnl"),
    ("os", "remove"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("builtins", "compile"),
    ("builtins", "open"),
    ("builtins", "getattr"),
    ("builtins", "__import__"),
    ("builtins", "breakpoint"),
    ("builtins", "apply"),
    ("__builtin__", "eval"),
    ("__builtin__", "exec"),
    ("__builtin__", "getattr"),
    ("__builtin__", "apply"),
    ("subprocess", "Popen"),
    ("subprocess", "run"),
    ("subprocess", "check_output"),
    ("commands", "getoutput"),
    ("runpy", "_run_code"),
    ("runpy", "run_path"),
    ("pty", "spawn"),
    ("socket", "create_connection"),
    ("timeit", "timeit"),
    ("pydoc", "pipepager"),
    ("pydoc", "locate"),
    ("pip", "main"),
    ("ensurepip", "_run_pip"),
    ("importlib", "import_module"),
    ("imp", "load_source"),
    ("code", "InteractiveInterpreter"),
    ("bdb", "Bdb.run"),
    ("cProfile", "runctx"),
    ("profile", "run"),
    ("trace", "Trace.run"),
    ("doctest", "debug_script"),
    ("idlelib.run", "Executive.runcode"),
    ("lib2to3.pgen2.grammar", "Grammar.loads"),
    ("pickle", "loads"),
    ("_pickle", "loads"),
    ("dill", "loads"),
    ("marshal", "loads"),
    ("shelve", "open"),
    ("types", "FunctionType"),
    ("operator", "attrgetter"),
    ("operator", "methodcaller"),
    ("functools", "partial"),
    ("ctypes", "CDLL"),
    ("webbrowser", "open"),
    ("urllib.request", "urlopen"),
    ("asyncio.unix_events", "_UnixSubprocessTransport._start"),
    ("torch.utils.data.datapipes.utils.decoder", "basichandlers"),
    ("torch.hub", "load"),
    ("torch", "load"),
    ("torch._inductor.codecache", "compile_file"),
    ("numpy.testing._private.utils", "runstring"),
]; // fmt: as a table

/// Ways to call a function with `command` as its argument. The result is on the stack.
const WAYS: [&str; 8] = ["reduce", "stack global", "inst", "obj", "newobj", "newobj_ex", "build", "by memo"];

fn called(way: &str, module: &str, name: &str) -> Vec<u8> {
    let mut pickle = Pickle(vec![]);
    let command = "touch /tmp/onelayer-was-here";
    match way {
        "stack global" => pickle.text(module).text(name).raw(b"\x93").raw(b"(").text(command).raw(b"tR"),
        "inst" => pickle.raw(b"(").text(command).raw(format!("i{module}\n{name}\n")),
        "obj" => pickle.raw(b"(").global(module, name).text(command).raw(b"o"),
        "newobj" => pickle.global(module, name).raw(b"(").text(command).raw(b"t\x81"),
        "newobj_ex" => pickle.global(module, name).raw(b"(").text(command).raw(b"t}\x92"),
        "build" => pickle.global(module, name).raw(b")R}").text("__setstate__").text(command).raw(b"sb"),
        "by memo" => pickle.global(module, name).raw(b"q\x050h\x05(").text(command).raw(b"t\x85R"),
        _ => pickle.global(module, name).raw(b"(").text(command).raw(b"tR"),
    };
    pickle.0
}

/// Calls beside the tensors are opaque, and tensors made of them are refused by name.
fn calls() -> Vec<Case> {
    let mut cases = vec![];
    for (number, (module, name)) in CALLS.into_iter().enumerate() {
        let way = WAYS[number % WAYS.len()];
        let call = called(way, module, name);
        let mut beside = Pickle::new();
        beside
            .raw(b"}(")
            .text("x")
            .raw(&call)
            .text("w")
            .tensor("ByteStorage", "0", 4, &vector(&[4]))
            .raw(b"u");
        let label = format!("{module}.{name} by {way}");
        cases.push(read(format!("{label}, beside"), zipped(&beside.end()), &["w"]));
        let mut inside = Pickle::new();
        inside.raw(b"}").text("w").global("torch._utils", "_rebuild_tensor_v2").raw(b"(").raw(&call);
        inside.int(0).ints(&[4]).ints(&[1]).raw(b"\x89NtRs");
        let text = format!("tensor `w`: found a tensor that `{module}.{name}` makes");
        cases.push(refused(format!("{label}, as a storage"), zipped(&inside.end()), "NotStreamable", &text));
    }
    let tensor = |pickle: &mut Pickle| {
        pickle.tensor("ByteStorage", "0", 4, &vector(&[4]));
    };
    for (module, name) in CALLS.into_iter().take(12) {
        let mut around = Pickle::new();
        around.raw(b"}").text("w").global(module, name).raw(b"(");
        tensor(&mut around);
        let text = format!("tensors inside an object of class `{module}.{name}`");
        cases.push(refused(
            format!("{module}.{name} of a tensor"),
            zipped(&around.raw(b"tRs").end()),
            "NotStreamable",
            &text,
        ));
        let mut wrapped = Pickle::new();
        wrapped.raw(b"}").text("w").global("torch._tensor", "_rebuild_from_type_v2").raw(b"(");
        wrapped.global(module, name).global("torch", "Tensor").raw(b")}tRs");
        let text = format!("tensor `w`: found a tensor that `{module}.{name}` makes");
        cases.push(refused(
            format!("{module}.{name} by _rebuild_from_type_v2"),
            zipped(&wrapped.end()),
            "NotStreamable",
            &text,
        ));
        let mut parameter = Pickle::new();
        parameter.raw(b"}").text("w").global("torch._utils", "_rebuild_parameter").raw(b"(");
        parameter.raw(called("reduce", module, name)).raw(b"\x88}tRs");
        cases.push(refused(
            format!("{module}.{name} as a parameter"),
            zipped(&parameter.end()),
            "NotStreamable",
            &text,
        ));
    }
    // After the end of the pickle, where some scanners stop and some do not look.
    let behind =
        [plain_pickle(), b"\x80\x02".to_vec(), called("reduce", "os", "system"), b".".to_vec()].concat();
    cases.push(read("a second pickle behind the first", zipped(&behind), &["w"]));
    cases
}

/// Pickles that end too early, or say what no pickle says.
fn broken() -> Vec<Case> {
    let whole = plain_pickle();
    let mut cases = vec![];
    for cut in [0, 1, 2, 3, 5, 9, 12, 30, 45, 60, 80, 100, whole.len() - 1] {
        cases.push(refused(format!("cut after {cut} bytes"), zipped(&whole[..cut]), INVALID, ""));
    }
    for opcode in [0x00, 0x01, b' ', b'!', b'A', b'x', b'z', 0x7f, 0x97, 0x98, 0x99, 0xa0, 0xff] {
        let text = format!("found byte 0x{opcode:02x}");
        cases.push(refused(format!("opcode {opcode:#x}"), zipped(&[0x80, 2, opcode, b'.']), INVALID, &text));
    }
    let rows: [(&str, &[u8], &str); 60] = [
        ("nothing on the stack", b".", "expected 1 values"),
        ("two values at the end", b"NN.", "found several"),
        ("a mark at the end", b"(.", "expected 1 values"),
        ("a value and a mark at the end", b"N(.", "expected 1 values"),
        ("a mark below the value", b"(N.", "found several"),
        ("pop of nothing", b"0.", "expected 1 values"),
        ("pop to no mark", b"N1.", "expected a mark"),
        ("copy of nothing", b"2.", "expected 1 values"),
        ("copy of a mark", b"(2.", "expected 1 values"),
        ("tuple without a mark", b"Nt.", "expected a mark"),
        ("list without a mark", b"Nl.", "expected a mark"),
        ("pair of one", b"N\x86.", "expected 2 values"),
        ("triple of two", b"NN\x87.", "expected 3 values"),
        ("pair across a mark", b"N(N\x86.", "expected 2 values"),
        ("call of one value", b"NR.", "expected 2 values"),
        ("call across a mark", b"N(NR.", "expected 2 values"),
        ("arguments that are no tuple", b"cbuiltins\nset\nNR.", "as a tuple"),
        ("state of nothing", b"Nb.", "expected 1 values"),
        ("items of nothing", b"(NNu.", "expected a container"),
        ("items of a number", b"K\x01(NNu.", "expected a container"),
        ("items of a tuple", b")(NNu.", "expected a container"),
        ("items of a list", b"](NNu.", "expected a container"),
        ("appended to a dictionary", b"}(NNe.", "expected a container"),
        ("added to a list", b"](N\x90.", "expected a container"),
        ("a key without a value", b"}(Nu.", "one key more"),
        ("a key and a mark", b"}N(s.", "expected 2 values"),
        ("append across a mark", b"](Na.", "expected a container"),
        ("dictionary of three", b"(NNNd.", "one key more"),
        ("get of nothing", b"h\x05.", "memo at 5"),
        ("get of nothing, long", b"Nj\x01\0\0\0\x86.", "memo at 1"),
        ("get of 2^32 - 1", b"j\xff\xff\xff\xff.", "memo index 4294967295"),
        ("get of a text", b"gabc\n.", "memo index in digits"),
        ("get of -1", b"g-1\n.", "memo index in digits"),
        ("get of 10^30", b"g1000000000000000000000000000000\n.", "memo index in digits"),
        ("put of nothing", b"q\0.", "expected 1 values"),
        ("put of a mark", b"(q\0.", "expected 1 values"),
        ("put in two ways", b"N\x94Nq\0.", "one way to fill the memo"),
        ("put in two ways, too", b"Nq\0N\x94.", "one way to fill the memo"),
        ("protocol 6", b"\x80\x06N.", "protocol 0 to 5"),
        ("protocol 255", b"\x80\xffN.", "protocol 0 to 5"),
        ("a frame too long", b"\x95\xff\0\0\0\0\0\0\0N.", "frame of 255 bytes"),
        ("a frame of 2^64 - 1", b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN.", "frame of 18446744073709551615"),
        ("a frame in a frame", b"\x95\x0b\0\0\0\0\0\0\0\x95\x02\0\0\0\0\0\0\0N.", "the next frame behind"),
        ("a text of 2^32 - 1", b"X\xff\xff\xff\xffabc.", "more bytes"),
        ("a text of 2^64 - 1", b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc.", "more bytes"),
        ("bytes of 2^63", b"\x8e\0\0\0\0\0\0\0\x80abc.", "more bytes"),
        ("a byte array of 2^40", b"\x96\0\0\0\0\0\x01\0\0abc.", "more bytes"),
        ("a number of 255 bytes", b"\x8a\xffabc.", "more bytes"),
        ("a number of 2^31 bytes", b"\x8b\0\0\0\x80abc.", "more bytes"),
        ("a number of words", b"Iabc\n.", "number in digits"),
        ("an empty number", b"I\n.", "number in digits"),
        ("a number without end", b"I12", "line of at most"),
        ("a text without quotes", b"Sabc\n.", "in quotes"),
        ("a text with one quote", b"S'\n.", "in quotes"),
        ("a class without a name", b"cos\n", "line of at most"),
        ("a class of bytes", b"c\xff\xff\nx\n.", "as text"),
        ("a class of numbers", b"K\x01K\x02\x93.", "names of a module"),
        ("an object without a class", b"(o.", "a class behind the mark"),
        ("an object without a mark", b"No.", "expected a mark"),
        ("a persistent text", b"Pabc\n.", "found a text"),
    ];
    for (name, pickle, text) in rows {
        cases.push(refused(format!("pickle: {name}"), zipped(pickle), INVALID, text));
    }
    cases.extend(arguments());
    cases
}

/// Calls of known functions with other arguments.
fn arguments() -> Vec<Case> {
    let rows: [(&str, &[u8], &str); 16] = [
        ("_rebuild_tensor_v2", b")", "found 0 of them"),
        ("_rebuild_tensor_v2", b"(NNNt", "found 3 of them"),
        ("_rebuild_tensor_v2", b"(NNNNNt", "found 5 of them"),
        ("_rebuild_tensor_v2", b"(NNNNNNNNt", "found 8 of them"),
        ("_rebuild_tensor_v2", b"(NK\0))\x89Nt", "expected the storage"),
        ("_rebuild_tensor_v2", b"(K\x01K\0))\x89Nt", "expected the storage"),
        ("_rebuild_tensor_v2", b"(ctorch\nByteStorage\nK\0))\x89Nt", "expected the storage"),
        ("_rebuild_tensor_v2", b"((NNt(NNt(NNt(NNt\x89Nt", "expected the storage"),
        ("_rebuild_tensor", b"(NNNt", "found 3 of them"),
        ("_rebuild_tensor_v3", b"(NNNNNNt", "found 6 of them"),
        ("_rebuild_tensor_v3", b"(NK\0))\x89NNt", "element type"),
        ("_rebuild_tensor_v3", b"(NK\0))\x89NX\x07\0\0\0float32t", "element type"),
        ("_rebuild_parameter", b")", "found nothing"),
        ("_rebuild_device_tensor_from_cpu_tensor", b"(NNt", "expected 4 arguments"),
        ("_rebuild_device_tensor_from_cpu_tensor", b"(NNNNt", "expected a tensor"),
        ("_rebuild_tensor_v2", b"N", "as a tuple"),
    ];
    let mut cases = vec![];
    for (number, (name, arguments, text)) in rows.into_iter().enumerate() {
        let mut pickle = Pickle::new();
        pickle.raw(b"}").text("w").global("torch._utils", name).raw(arguments).raw(b"Rs");
        cases.push(refused(format!("arguments {number} of {name}"), zipped(&pickle.end()), INVALID, text));
    }
    for (name, what) in [
        ("_rebuild_sparse_tensor", "sparse"),
        ("_rebuild_sparse_csr_tensor", "sparse"),
        ("_rebuild_qtensor", "quantised"),
        ("_rebuild_nested_tensor", "nested"),
        ("_rebuild_meta_tensor_no_storage", "meta device"),
        ("_rebuild_wrapper_subclass", "wraps others"),
        ("_rebuild_device_tensor_from_numpy", "numpy"),
        ("_rebuild_xla_tensor", "numpy"),
    ] {
        let mut pickle = Pickle::new();
        pickle.raw(b"}").text("w").global("torch._utils", name).raw(b"(NNNNt").raw(b"Rs");
        cases.push(refused(name, zipped(&pickle.end()), "NotStreamable", what));
    }
    let pairs: [(&str, &[u8], &str); 4] = [
        ("of a number", b"(K\x01t", "pairs of a dictionary"),
        ("of numbers", b"(](K\x01K\x02et", "pairs of a key"),
        ("of triples", b"(](K\x01K\x02K\x03\x87et", "pairs of a key"),
        ("of lists of one", b"(](](K\x01eet", "pairs of a key"),
    ];
    for (name, arguments, text) in pairs {
        let mut pickle = Pickle::new();
        pickle.global("collections", "OrderedDict").raw(arguments).raw(b"R");
        cases.push(refused(format!("a dictionary {name}"), zipped(&pickle.end()), INVALID, text));
    }
    cases
}

/// Pickles that would need much memory or time.
fn bombs() -> Vec<Case> {
    const MANY: usize = 200_000;
    let with_tensor = |before: Vec<u8>| {
        let mut pickle = Pickle::new();
        pickle.raw(before).raw(b"0}").text("w").tensor("ByteStorage", "0", 4, &vector(&[4])).raw(b"s");
        zipped(&pickle.end())
    };
    let nest = |open: &[u8], close: &[u8]| [open.repeat(MANY), b"N".to_vec(), close.repeat(MANY)].concat();
    let copies = |text: &[u8]| [b"(".as_slice(), &text.repeat(MANY), b"t"].concat();
    let memo: Vec<u8> = (0..60_000_u32)
        .flat_map(|index| [&b"]r"[..], &index.to_le_bytes(), b"0j", &index.to_le_bytes()].concat())
        .collect();
    let doubled: Vec<u8> = [b")".as_slice(), &b"2\x86".repeat(1000)].concat();
    let line = [b"I".as_slice(), &b"9".repeat(4000), b"\n"].concat();
    vec![
        read("marks", with_tensor([b"(".repeat(MANY), b"1".repeat(MANY), b"N".to_vec()].concat()), &["w"]),
        read("lists in lists", with_tensor(nest(b"]", b"a")), &["w"]),
        read("dictionaries in dictionaries", with_tensor(nest(b"}N", b"s")), &["w"]),
        read("tuples in tuples", with_tensor(nest(b"", b"\x85")), &["w"]),
        read("pairs of the same", with_tensor(doubled), &["w"]),
        read("calls of calls", with_tensor([b"N".to_vec(), b")R".repeat(MANY)].concat()), &["w"]),
        read("classes", with_tensor(copies(b"ca\nb\n")), &["w"]),
        read("dictionaries", with_tensor(copies(b"}")), &["w"]),
        read("texts", with_tensor(copies(b"X\x02\0\0\0ab")), &["w"]),
        read("copies", with_tensor([b"(N".to_vec(), b"2".repeat(MANY), b"t".to_vec()].concat()), &["w"]),
        read("memo", with_tensor([b"(".to_vec(), memo, b"t".to_vec()].concat()), &["w"]),
        read("memoized", with_tensor([b"N".to_vec(), b"\x94".repeat(MANY)].concat()), &["w"]),
        read("a number of 4000 digits", with_tensor(line), &["w"]),
        refused(
            "a number of 5000 digits",
            zipped(&[b"I".as_slice(), &b"9".repeat(5000), b"\n."].concat()),
            INVALID,
            "at most 4096",
        ),
        read(
            "a number of 100 000 bytes",
            with_tensor([&b"\x8b\xa0\x86\x01\0"[..], &[0xff; 100_000]].concat()),
            &["w"],
        ),
        read("a text of 1 MB", with_tensor([&b"X\0\0\x10\0"[..], &[b'x'; 1 << 20]].concat()), &["w"]),
        read(
            "empty frames",
            with_tensor([b"\x95\0\0\0\0\0\0\0\0".repeat(MANY / 10), b"N".to_vec()].concat()),
            &["w"],
        ),
        read("protocols", with_tensor([b"\x80\x02".repeat(MANY), b"N".to_vec()].concat()), &["w"]),
        refused(
            "a memo without values",
            zipped(&[b"h\0".repeat(MANY), b".".to_vec()].concat()),
            INVALID,
            "memo at 0",
        ),
    ]
}

/// Values of all protocols beside a tensor.
fn values() -> Vec<Case> {
    let rows: [(&str, &[u8]); 30] = [
        ("I00", b"I00\n"),
        ("I01", b"I01\n"),
        ("I-5", b"I-5\n"),
        ("L", b"L123456789012345678901234567890L\n"),
        ("F", b"F1.5\n"),
        ("S", b"S'ab'\n"),
        ("S with escapes", b"S'a\\x00'\n"),
        ("V", b"Vab\n"),
        ("V with escapes", b"V\\u0041\n"),
        ("T", b"T\x02\0\0\0ab"),
        ("U", b"U\x02ab"),
        ("U, no text", b"U\x02\xff\xfe"),
        ("G", b"G\0\0\0\0\0\0\0\0"),
        ("J", b"J\xff\xff\xff\xff"),
        ("LONG1 of nothing", b"\x8a\0"),
        ("LONG4", b"\x8b\x01\0\0\0\x05"),
        ("B", b"B\x02\0\0\0ab"),
        ("C", b"C\x02ab"),
        ("BINBYTES8", b"\x8e\x02\0\0\0\0\0\0\0ab"),
        ("BYTEARRAY8", b"\x96\x02\0\0\0\0\0\0\0ab"),
        ("SHORT_BINUNICODE", b"\x8c\x02ab"),
        ("set", b"\x8f(K\x01\x90"),
        ("frozenset", b"(K\x01\x91"),
        ("list", b"(K\x01l"),
        ("dict", b"(K\x01K\x02d"),
        ("EXT1", b"\x82\x01"),
        ("EXT2", b"\x83\x01\0"),
        ("EXT4", b"\x84\x01\0\0\0"),
        ("PUT and GET", b"Np5\n0g5\n"),
        ("a surrogate", b"X\x03\0\0\0\xed\xa0\x80"),
    ];
    rows.into_iter()
        .map(|(name, value)| {
            let mut pickle = Pickle::new();
            pickle
                .raw(b"}(")
                .text("x")
                .raw(value)
                .text("w")
                .tensor("ByteStorage", "0", 4, &vector(&[4]))
                .raw(b"u");
            read(format!("value: {name}"), zipped(&pickle.end()), &["w"])
        })
        .collect()
}

/// The cases of pickles.
pub(super) fn cases() -> Vec<Case> {
    [calls(), broken(), bombs(), values()].concat()
}
