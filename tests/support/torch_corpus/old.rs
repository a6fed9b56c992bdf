//! The formats before zip: legacy and tar.

use onelayer_testing::torch_file::{Pickle, View, vector};

use super::{Case, DATA, read, refused};

const INVALID: &str = "InvalidFile";
const MAGIC: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";

/// The parts of a legacy file.
#[derive(Clone)]
struct Legacy {
    version: Vec<u8>,
    machine: Vec<u8>,
    value: Vec<u8>,
    keys: Vec<u8>,
    data: Vec<u8>,
}

/// A storage as legacy pickles name it, with a view or nothing as its last part.
fn storage(pickle: &mut Pickle, key: &str, count: i64, view: &[u8]) {
    pickle.raw(b"(").text("storage").global("torch", "ByteStorage").text(key).text("cpu").int(count);
    pickle.raw(view).raw(b"tQ");
}

fn value(count: i64, view: &[u8], shape: i64) -> Vec<u8> {
    let mut pickle = Pickle::new();
    pickle.raw(b"}").text("w").global("torch._utils", "_rebuild_tensor_v2").raw(b"(");
    storage(&mut pickle, "7", count, view);
    pickle.int(0).ints(&[shape]).ints(&[1]).raw(b"\x89Nt").raw(b"Rs").end()
}

fn data(count: i64, bytes: &[u8]) -> Vec<u8> {
    [&count.to_le_bytes()[..], bytes].concat()
}

impl Legacy {
    fn plain() -> Self {
        Self {
            version: Pickle::new().int(1001).end(),
            machine: Pickle::new().raw(b"}").text("little_endian").raw(b"\x88s").end(),
            value: value(4, b"N", 4),
            keys: Pickle::new().raw(b"]").text("7").raw(b"a").end(),
            data: data(4, &DATA),
        }
    }

    fn file(&self) -> Vec<u8> {
        [MAGIC, &self.version, &self.machine, &self.value, &self.keys, &self.data].concat()
    }
}

fn legacy() -> Vec<Case> {
    let plain = Legacy::plain();
    let mut cases = vec![
        read("legacy: plain", plain.file(), &["w"]),
        read("legacy: bytes behind it", [plain.file(), vec![9; 100]].concat(), &["w"]),
    ];
    let with = |name: &str, kind: &'static str, text: &str, change: &dyn Fn(&mut Legacy)| {
        let mut changed = plain.clone();
        change(&mut changed);
        refused(format!("legacy: {name}"), changed.file(), kind, text)
    };
    let keys = |texts: &[&str]| {
        let mut pickle = Pickle::new();
        pickle.raw(b"](");
        for text in texts {
            pickle.text(text);
        }
        pickle.raw(b"e").end()
    };
    cases.extend([
        with("another version", INVALID, "version 1001", &|file| {
            file.version = Pickle::new().int(1002).end()
        }),
        with("a version of text", INVALID, "version 1001", &|file| {
            file.version = Pickle::new().text("1001").end()
        }),
        with("no version", INVALID, "", &|file| file.version.clear()),
        with("a storage in the version", INVALID, "expected no storage", &|file| {
            let mut pickle = Pickle::new();
            storage(&mut pickle, "7", 4, b"N");
            file.version = pickle.end();
        }),
        with("no list of keys", INVALID, "the list of storages", &|file| {
            file.keys = Pickle::new().raw(b"N").end()
        }),
        with("a key of nothing", INVALID, "found another one", &|file| file.keys = keys(&["8"])),
        with("a key twice", INVALID, "found one twice", &|file| {
            file.keys = keys(&["7", "7"]);
            file.data = [data(4, &DATA), data(4, &DATA)].concat();
        }),
        with("a key that is no text", INVALID, "found another one", &|file| {
            file.keys = Pickle::new().raw(b"]").int(7).raw(b"a").end();
        }),
        with("no keys", "NotStreamable", "no bytes", &|file| file.keys = keys(&[])),
        with("fewer elements", INVALID, "of 4 elements, found one of 3", &|file| file.data = data(3, &DATA)),
        with("more elements", INVALID, "found one of 5", &|file| file.data = data(5, &DATA)),
        with("-1 elements", INVALID, "found one of -1", &|file| file.data = data(-1, &DATA)),
        with("2^62 elements", INVALID, "more bytes", &|file| {
            file.value = value(1 << 62, b"N", 4);
            file.data = data(1 << 62, &DATA);
        }),
        with("-1 elements twice", INVALID, "number from 0", &|file| {
            file.value = value(-1, b"N", 4);
            file.data = data(-1, &DATA);
        }),
        with("data cut off", INVALID, "more bytes", &|file| file.data.truncate(11)),
        with("a count cut off", INVALID, "more bytes", &|file| file.data.truncate(7)),
        with("no data", INVALID, "more bytes", &|file| file.data.clear()),
        with("a tensor outside", "OutsideStorage", "5 bytes", &|file| file.value = value(4, b"N", 5)),
        with("a view outside", INVALID, "a view inside its storage", &|file| {
            file.value = value(4, b"X\x01\0\0\0vK\x03K\x02\x87", 2);
        }),
        with("a view that wraps", INVALID, "a view inside its storage", &|file| {
            let numbers = [&b"X\x01\0\0\0v\x8a\x08"[..], &[0xff; 7], b"\x7fK\x02\x87"].concat();
            file.value = value(4, &numbers, 2);
        }),
        with("a view of words", INVALID, "key, offset and count", &|file| {
            file.value = value(4, b"X\x01\0\0\0vNN\x87", 2);
        }),
        with("a view that is no tuple", INVALID, "key, offset and count", &|file| {
            file.value = value(4, b"K\x01", 2)
        }),
        with("a tensor outside its view", "OutsideStorage", "3 bytes", &|file| {
            file.value = value(4, b"X\x01\0\0\0vK\x01K\x02\x87", 3);
        }),
        with("a storage of two lengths", INVALID, "one length of storage", &|file| {
            let mut pickle = Pickle::new();
            pickle.raw(b"]");
            storage(&mut pickle, "7", 4, b"N");
            pickle.raw(b"a");
            storage(&mut pickle, "7", 5, b"N");
            file.value = pickle.raw(b"a").end();
        }),
    ]);
    let whole = plain.file();
    for cut in [15, 16, 30, 60, 90, 120, whole.len() - 20, whole.len() - 12, whole.len() - 1] {
        cases.push(refused(format!("legacy: cut after {cut} bytes"), whole[..cut].to_vec(), INVALID, ""));
    }
    let mut framed = b"\x80\x04\x95\x0d\0\0\0\0\0\0\0".to_vec();
    framed.extend_from_slice(&whole[2..]);
    cases.push(read("legacy: a magic number in a frame", framed, &["w"]));
    cases.push(refused("legacy: only the magic number", MAGIC.to_vec(), INVALID, "more bytes"));
    // The plain value, without its protocol, its first key and its end, behind a module.
    let rest = &plain.value[9..plain.value.len() - 2];
    let mut module = Pickle::new();
    module.raw(b"}(").text("m").raw(b"(").text("module").global("os", "system").raw(b"NNtQ");
    let module = module.text("w").raw(rest).raw(b"u").end();
    cases.push(read("legacy: a module beside", Legacy { value: module, ..plain }.file(), &["w"]));
    cases
}

/// A member of a tar archive.
fn member(name: &str, data: &[u8], kind: u8) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar  \0");
    sealed(&mut block);
    block.extend_from_slice(data);
    block.resize(block.len().next_multiple_of(512), 0);
    block
}

/// Writes the checksum of a header.
fn sealed(block: &mut [u8]) {
    block[148..156].fill(b' ');
    let sum: u32 = block[..512].iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// The parts of a tar archive.
#[derive(Clone)]
struct Tar {
    storages: Vec<u8>,
    tensors: Vec<u8>,
    pickle: Vec<u8>,
}

fn tensors(key: i64, storage: i64, numbers: &[i64], dimensions: i32) -> Vec<u8> {
    let mut bytes = Pickle::new().int(1).end();
    bytes.extend(Pickle::new().raw(b"(").int(key).int(storage).global("torch", "ByteTensor").raw(b"t").end());
    bytes.extend(dimensions.to_le_bytes());
    bytes.extend([0; 4]);
    numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    bytes
}

fn storages(count: i64, key: i64, elements: i64, views: &[i64]) -> Vec<u8> {
    let mut bytes = Pickle::new().int(count).end();
    bytes.extend(Pickle::new().raw(b"(").int(key).text("cpu").global("torch", "ByteStorage").raw(b"t").end());
    bytes.extend(data(elements, &DATA));
    let mut list = Pickle::new();
    list.raw(b"]");
    if !views.is_empty() {
        list.ints(views).raw(b"a");
    }
    bytes.extend(list.end());
    bytes
}

impl Tar {
    fn plain() -> Self {
        Self {
            storages: storages(1, 1, 4, &[]),
            tensors: tensors(2, 1, &[4, 1, 0], 1),
            pickle: Pickle::new().raw(b"}").text("w").text("2").raw(b"Qs").end(),
        }
    }

    fn file(&self) -> Vec<u8> {
        let members = [("storages", &self.storages), ("tensors", &self.tensors), ("pickle", &self.pickle)];
        let members = members.map(|(name, data)| member(name, data, b'0'));
        [&member("sys_info", b"\x80\x02}.", b'0')[..], &members.concat(), &[0; 1024]].concat()
    }
}

fn tar() -> Vec<Case> {
    let plain = Tar::plain();
    let mut cases = vec![read("tar: plain", plain.file(), &["w"])];
    let with = |name: &str, kind: &'static str, text: &str, change: &dyn Fn(&mut Tar)| {
        let mut changed = plain.clone();
        change(&mut changed);
        refused(format!("tar: {name}"), changed.file(), kind, text)
    };
    cases.extend([
        with("a storage too long", INVALID, "is not whole", &|file| {
            file.storages = storages(1, 1, 1000, &[])
        }),
        with("a storage of 2^62", INVALID, "is not whole", &|file| {
            file.storages = storages(1, 1, 1 << 62, &[])
        }),
        with("a storage of -1", INVALID, "is not whole", &|file| file.storages = storages(1, 1, -1, &[])),
        with("more storages than there are", INVALID, "", &|file| file.storages = storages(2, 1, 4, &[])),
        with("2^40 storages", INVALID, "", &|file| file.storages = storages(1 << 40, 1, 4, &[])),
        with("-1 storages", INVALID, "how many there are", &|file| file.storages = storages(-1, 1, 4, &[])),
        with("no storages", INVALID, "", &|file| file.storages.clear()),
        with("a view outside", INVALID, "leaves it", &|file| {
            file.storages = storages(1, 1, 4, &[3, 1, 3, 2])
        }),
        with("a view that wraps", INVALID, "leaves it", &|file| {
            file.storages = storages(1, 1, 4, &[3, 1, i64::MAX, 2]);
        }),
        with("a view of nothing", INVALID, "one of nothing", &|file| {
            file.storages = storages(1, 1, 4, &[3, 9, 0, 1])
        }),
        with("a view of three numbers", INVALID, "as four numbers", &|file| {
            file.storages = storages(1, 1, 4, &[3, 1, 0]);
        }),
        with("a number twice", INVALID, "found 1 twice", &|file| {
            file.storages = storages(1, 1, 4, &[1, 1, 0, 1])
        }),
        with("a tensor of nothing", INVALID, "one of nothing", &|file| {
            file.tensors = tensors(2, 9, &[4, 1, 0], 1)
        }),
        with("a tensor with the number of a storage", INVALID, "found 1 twice", &|file| {
            file.tensors = tensors(1, 1, &[4, 1, 0], 1);
        }),
        with("a tensor outside", "OutsideStorage", "5 bytes", &|file| {
            file.tensors = tensors(2, 1, &[5, 1, 0], 1)
        }),
        with("a negative shape", INVALID, "found -4", &|file| file.tensors = tensors(2, 1, &[-4, 1, 0], 1)),
        with("a negative offset", INVALID, "found -1", &|file| file.tensors = tensors(2, 1, &[4, 1, -1], 1)),
        with("65 dimensions", INVALID, "0 to 64 dimensions", &|file| {
            file.tensors = tensors(2, 1, &[1; 131], 65)
        }),
        with("-1 dimensions", INVALID, "found -1", &|file| file.tensors = tensors(2, 1, &[1; 9], -1)),
        with("numbers cut off", INVALID, "more bytes", &|file| file.tensors = tensors(2, 1, &[4, 1], 1)),
        with("a value of nothing", INVALID, "number of a tensor", &|file| {
            file.pickle = Pickle::new().raw(b"}").text("w").text("99").raw(b"Qs").end();
        }),
        with("a value of words", INVALID, "number of a tensor", &|file| {
            file.pickle = Pickle::new().raw(b"}").text("w").text("../x").raw(b"Qs").end();
        }),
        with("an empty pickle", INVALID, "more bytes", &|file| file.pickle.clear()),
    ]);
    let file = plain.file();
    let mut change = |name: &str, at: usize, bytes: &[u8], text: &str| {
        let mut changed = file.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        sealed(&mut changed[1024..1536]);
        cases.push(refused(format!("tar: {name}"), changed, INVALID, text));
    };
    change("a link", 1024 + 156, b"1", "a link or another kind");
    change("a folder", 1024 + 156, b"5", "a link or another kind");
    change("a long name", 1024 + 156, b"L", "a link or another kind");
    change("an extended header", 1024 + 156, b"x", "a link or another kind");
    change("a member of 8 GiB", 1024 + 124, b"77777777777", "inside the file");
    change("a member of words", 1024 + 124, b"abc", "inside the file");
    change("a member of 2^63", 1024 + 124, b"\x80\0\0\0\x80\0\0\0\0\0\0\0", "inside the file");
    change("a member of 2^95", 1024 + 124, b"\x80\x80\0\0\0\0\0\0\0\0\0\0", "inside the file");
    change("another magic", 1024 + 257, b"XXXXX", "header of a tar member");
    let mut unsealed = file.clone();
    unsealed[1024] = b'X';
    cases.push(refused("tar: another checksum", unsealed, INVALID, "header of a tar member"));
    for name in ["storages", "tensors", "pickle"] {
        let twice = [&member(name, b"x", b'0')[..], &file].concat();
        cases.push(refused(format!("tar: {name} twice"), twice, INVALID, "found one twice"));
    }
    let missing = "only archives that torch.save wrote";
    cases.push(refused("tar: another archive", member("a.txt", b"x", b'0'), "NotStreamable", missing));
    cases.push(refused("tar: cut off", file[..1500].to_vec(), INVALID, "more bytes"));
    cases
}

/// A legacy file of the tensor's view, for readers that take offsets of views.
pub(crate) fn legacy_of_view(offset: i64) -> Vec<u8> {
    let mut file = Legacy::plain();
    let view = View { offset, ..vector(&[4]) };
    let mut pickle = Pickle::new();
    pickle.raw(b"}").text("w").global("torch._utils", "_rebuild_tensor_v2").raw(b"(");
    storage(&mut pickle, "7", 4, b"N");
    file.value = pickle.int(view.offset).ints(view.shape).ints(view.strides).raw(b"\x89NtRs").end();
    file.file()
}

/// The cases of old formats.
pub(super) fn cases() -> Vec<Case> {
    let mut all = [legacy(), tar()].concat();
    all.push(read("legacy: a tensor at the start", legacy_of_view(0), &["w"]));
    all.push(refused("legacy: a tensor too far", legacy_of_view(1), "OutsideStorage", "5 bytes"));
    all
}
