//! Writes small PyTorch files, as `torch.save` does and as it never would.

use std::io::{self, Write};

/// The pickle of a value, opcode by opcode.
#[derive(Clone, Default, Debug)]
pub struct Pickle(pub Vec<u8>);

impl Pickle {
    /// An empty pickle of protocol 2.
    #[must_use]
    pub fn new() -> Self {
        Self(b"\x80\x02".to_vec())
    }

    /// Appends bytes as they are.
    pub fn raw(&mut self, bytes: impl AsRef<[u8]>) -> &mut Self {
        self.0.extend_from_slice(bytes.as_ref());
        self
    }

    /// A text.
    pub fn text(&mut self, text: &str) -> &mut Self {
        let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
        self.raw(b"X").raw(len.to_le_bytes()).raw(text)
    }

    /// A number.
    pub fn int(&mut self, value: i64) -> &mut Self {
        match (u8::try_from(value), i32::try_from(value)) {
            (Ok(value), _) => self.raw([b'K', value]),
            (_, Ok(value)) => self.raw(b"J").raw(value.to_le_bytes()),
            _ => self.raw([0x8a, 8]).raw(value.to_le_bytes()),
        }
    }

    /// A class or function.
    pub fn global(&mut self, module: &str, name: &str) -> &mut Self {
        self.raw(format!("c{module}\n{name}\n"))
    }

    /// A tuple of numbers.
    pub fn ints(&mut self, values: &[i64]) -> &mut Self {
        self.raw(b"(");
        for &value in values {
            self.int(value);
        }
        self.raw(b"t")
    }

    /// A storage: its class, as `FloatStorage`, its key and its number of elements.
    pub fn storage(&mut self, class: &str, key: &str, count: i64) -> &mut Self {
        let module = if class == "UntypedStorage" { "torch.storage" } else { "torch" };
        self.raw(b"(").text("storage").global(module, class).text(key).text("cpu").int(count).raw(b"tQ")
    }

    /// A tensor of a storage, by `_rebuild_tensor_v2`.
    pub fn tensor(&mut self, class: &str, key: &str, count: i64, view: &View<'_>) -> &mut Self {
        self.global("torch._utils", "_rebuild_tensor_v2").raw(b"(").storage(class, key, count);
        self.int(view.offset).ints(view.shape).ints(view.strides).raw(b"\x89");
        self.global("collections", "OrderedDict").raw(b")RtR")
    }

    /// The same by `_rebuild_tensor_v3`, with an element type of its own.
    pub fn typed_tensor(&mut self, dtype: &str, key: &str, bytes: i64, view: &View<'_>) -> &mut Self {
        self.global("torch._utils", "_rebuild_tensor_v3").raw(b"(").storage("UntypedStorage", key, bytes);
        self.int(view.offset).ints(view.shape).ints(view.strides).raw(b"\x89");
        self.global("collections", "OrderedDict").raw(b")R").global("torch", dtype).raw(b"tR")
    }

    /// The end.
    #[must_use]
    pub fn end(&mut self) -> Vec<u8> {
        self.raw(b".");
        self.0.clone()
    }
}

/// Offset, shape and strides of a tensor, in elements.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Elements before the first one.
    pub offset: i64,
    /// Elements per dimension.
    pub shape: &'a [i64],
    /// Elements from one index to the next.
    pub strides: &'a [i64],
}

/// A row-major vector.
#[must_use]
pub fn vector(shape: &[i64; 1]) -> View<'_> {
    View { offset: 0, shape, strides: &[1] }
}

/// Writes a zip archive as torch does: entries stored and aligned to 64 bytes, sizes behind the
/// data.
#[derive(Debug)]
pub struct ZipWriter<W> {
    target: W,
    root: String,
    at: u64,
    central: Vec<u8>,
    /// Where each entry is.
    pub entries: Vec<ZipEntry>,
}

/// Where the parts of an entry are. Those in the directory are counted from its start.
#[derive(Clone, Copy, Debug)]
pub struct ZipEntry {
    /// The local header.
    pub local: u64,
    /// The data.
    pub data: u64,
    /// The entry of the directory.
    pub central: usize,
}

/// Where the parts of an archive are.
#[derive(Clone, Debug)]
pub struct ZipParts {
    /// The entries; here the places in the directory are counted from the start of the file.
    pub entries: Vec<ZipEntry>,
    /// The directory.
    pub directory: usize,
    /// The 64-bit end record.
    pub end64: usize,
    /// The end record.
    pub end: usize,
}

/// The checksum of zip.
#[must_use]
pub fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, &byte: &u8| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    };
    !bytes.iter().fold(u32::MAX, step)
}

fn len16(bytes: usize) -> [u8; 2] {
    u16::try_from(bytes).unwrap_or(u16::MAX).to_le_bytes()
}

fn len32(bytes: u64) -> [u8; 4] {
    u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes()
}

fn len64(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

impl<W: Write> ZipWriter<W> {
    /// An empty archive with that root folder.
    pub fn new(target: W, root: &str) -> Self {
        Self { target, root: format!("{root}/"), at: 0, central: Vec::new(), entries: Vec::new() }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.at += len64(bytes.len());
        self.target.write_all(bytes)
    }

    /// Adds an entry below the root folder.
    ///
    /// # Errors
    /// Those of the target.
    pub fn add(&mut self, name: &str, data: &[u8]) -> io::Result<()> {
        let name = format!("{}{name}", self.root);
        let checksum = crc32(data);
        self.add_as(&name, data, checksum)
    }

    /// Adds an entry with its full name, and with that checksum.
    ///
    /// # Errors
    /// Those of the target.
    pub fn add_as(&mut self, name: &str, data: &[u8], checksum: u32) -> io::Result<()> {
        let local = self.at;
        let flags = if data.is_empty() { 0x0800_u16 } else { 0x0808 };
        let unpadded = local + 30 + len64(name.len()) + 4;
        let padding = usize::try_from(unpadded.next_multiple_of(64) - unpadded).unwrap_or(0);
        let mut header = b"PK\x03\x04\0\0".to_vec();
        header.extend(flags.to_le_bytes());
        header.extend([0; 18]);
        header.extend(len16(name.len()));
        header.extend(len16(padding + 4));
        header.extend(name.as_bytes());
        header.extend(b"FB");
        header.extend(len16(padding));
        header.extend(std::iter::repeat_n(b'Z', padding));
        self.write(&header)?;
        let start = self.at;
        self.write(data)?;
        let len = len64(data.len());
        if !data.is_empty() {
            let mut descriptor = b"PK\x07\x08".to_vec();
            descriptor.extend(checksum.to_le_bytes());
            descriptor.extend(len32(len));
            descriptor.extend(len32(len));
            self.write(&descriptor)?;
        }
        let central = self.central.len();
        self.entries.push(ZipEntry { local, data: start, central });
        self.central.extend(b"PK\x01\x02\0\0\0\0");
        self.central.extend(flags.to_le_bytes());
        self.central.extend([0; 6]);
        self.central.extend(checksum.to_le_bytes());
        self.central.extend(len32(len));
        self.central.extend(len32(len));
        self.central.extend(len16(name.len()));
        let is_far = local >= u64::from(u32::MAX);
        self.central.extend(len16(if is_far { 12 } else { 0 }));
        self.central.extend([0; 10]);
        self.central.extend(len32(local));
        self.central.extend(name.as_bytes());
        if is_far {
            self.central.extend(b"\x01\0\x08\0");
            self.central.extend(local.to_le_bytes());
        }
        Ok(())
    }

    /// Writes the directory and the end records. Returns the target and where everything is.
    ///
    /// # Errors
    /// Those of the target.
    pub fn finish(mut self) -> io::Result<(W, ZipParts)> {
        let (directory, count) = (self.at, len64(self.entries.len()));
        let central = std::mem::take(&mut self.central);
        self.write(&central)?;
        let end64 = self.at;
        let mut end = b"PK\x06\x06".to_vec();
        end.extend(44_u64.to_le_bytes());
        end.extend([0; 12]);
        end.extend(count.to_le_bytes());
        end.extend(count.to_le_bytes());
        end.extend(len64(central.len()).to_le_bytes());
        end.extend(directory.to_le_bytes());
        end.extend(b"PK\x06\x07\0\0\0\0");
        end.extend(end64.to_le_bytes());
        end.extend([1, 0, 0, 0]);
        end.extend(b"PK\x05\x06\0\0\0\0");
        end.extend(len16(self.entries.len()));
        end.extend(len16(self.entries.len()));
        end.extend(len32(len64(central.len())));
        end.extend(len32(directory));
        end.extend([0, 0]);
        self.write(&end)?;
        self.target.flush()?;
        let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        let entries = self.entries.iter();
        let entries =
            entries.map(|entry| ZipEntry { central: place(directory) + entry.central, ..*entry }).collect();
        let parts =
            ZipParts { entries, directory: place(directory), end64: place(end64), end: place(self.at) - 22 };
        Ok((self.target, parts))
    }
}

/// An archive with this pickle and these storages, whose keys are 0, 1, ...
#[must_use]
pub fn archive(pickle: &[u8], storages: &[&[u8]]) -> (Vec<u8>, ZipParts) {
    let mut zip = ZipWriter::new(Vec::new(), "archive");
    let add = |zip: &mut ZipWriter<Vec<u8>>, name: &str, data: &[u8]| {
        zip.add(name, data).unwrap();
    };
    add(&mut zip, "data.pkl", pickle);
    add(&mut zip, ".format_version", b"1");
    add(&mut zip, ".storage_alignment", b"64");
    add(&mut zip, "byteorder", b"little");
    for (key, storage) in storages.iter().enumerate() {
        add(&mut zip, &format!("data/{key}"), storage);
    }
    add(&mut zip, "version", b"3\n");
    add(&mut zip, ".data/serialization_id", b"0123456789");
    zip.finish().unwrap()
}
