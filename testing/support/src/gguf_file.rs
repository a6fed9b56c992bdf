//! Builds GGUF files for tests: right ones key by key and tensor by tensor, wrong ones with any
//! numbers in any place.
//!
//! Shares no code with the library, so that a fault in one does not hide in the other.

/// A value of a key: its type and its bytes.
#[derive(Clone, Debug)]
pub struct Value {
    pub kind: u32,
    pub bytes: Vec<u8>,
}

impl Value {
    pub fn u32(number: u32) -> Self {
        Self { kind: 4, bytes: number.to_le_bytes().to_vec() }
    }

    pub fn u16(number: u16) -> Self {
        Self { kind: 2, bytes: number.to_le_bytes().to_vec() }
    }

    pub fn text(text: &str) -> Self {
        Self { kind: 8, bytes: text_bytes(text.as_bytes()) }
    }

    /// An array of `count` items of that kind, which may lie.
    pub fn array(kind: u32, count: u64, items: &[u8]) -> Self {
        let bytes = [&kind.to_le_bytes()[..], &count.to_le_bytes(), items].concat();
        Self { kind: 9, bytes }
    }
}

/// A text with its length.
pub fn text_bytes(text: &[u8]) -> Vec<u8> {
    [&u64::try_from(text.len()).unwrap().to_le_bytes()[..], text].concat()
}

/// A tensor of the list.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: Vec<u8>,
    /// Innermost first, as in the file.
    pub dims: Vec<u64>,
    pub kind: u32,
    /// From the start of the data.
    pub offset: u64,
}

/// A file. Every number in it can be replaced by a lie.
#[derive(Clone, Debug)]
pub struct GgufFile {
    pub magic: [u8; 4],
    pub version: u32,
    pub tensor_count: Option<u64>,
    pub key_count: Option<u64>,
    pub keys: Vec<(Vec<u8>, Value)>,
    pub tensors: Vec<Tensor>,
    pub alignment: usize,
    pub data_bytes: usize,
    /// Numbers in the other byte order. The values of keys and what they lie about stay.
    pub is_big_endian: bool,
}

impl Default for GgufFile {
    fn default() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            key_count: None,
            keys: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
            data_bytes: 0,
            is_big_endian: false,
        }
    }
}

impl GgufFile {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key.
    #[must_use]
    pub fn key(mut self, key: &str, value: Value) -> Self {
        self.keys.push((key.as_bytes().to_vec(), value));
        self
    }

    /// Adds a tensor behind the data so far, with data of `bytes` bytes.
    #[must_use]
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, bytes: usize) -> Self {
        let offset = self.data_bytes.next_multiple_of(self.alignment);
        self.data_bytes = offset + bytes;
        let offset = offset.try_into().unwrap();
        self.tensors.push(Tensor { name: name.as_bytes().to_vec(), dims: dims.to_vec(), kind, offset });
        self
    }

    /// Adds a tensor at any offset, without data.
    #[must_use]
    pub fn tensor_at(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        self.tensors.push(Tensor { name: name.as_bytes().to_vec(), dims: dims.to_vec(), kind, offset });
        self
    }

    /// The bytes up to the padding.
    pub fn header(&self) -> Vec<u8> {
        let long = |number: u64| if self.is_big_endian { number.to_be_bytes() } else { number.to_le_bytes() };
        let word = |number: u32| if self.is_big_endian { number.to_be_bytes() } else { number.to_le_bytes() };
        let length = |list: usize| u64::try_from(list).unwrap();
        let mut bytes = self.magic.to_vec();
        bytes.extend(word(self.version));
        bytes.extend(long(self.tensor_count.unwrap_or(length(self.tensors.len()))));
        bytes.extend(long(self.key_count.unwrap_or(length(self.keys.len()))));
        for (key, value) in &self.keys {
            bytes.extend(long(length(key.len())));
            bytes.extend(key);
            bytes.extend(word(value.kind));
            bytes.extend(&value.bytes);
        }
        for tensor in &self.tensors {
            bytes.extend(long(length(tensor.name.len())));
            bytes.extend(&tensor.name);
            bytes.extend(word(u32::try_from(tensor.dims.len()).unwrap()));
            tensor.dims.iter().for_each(|&dim| bytes.extend(long(dim)));
            bytes.extend(word(tensor.kind));
            bytes.extend(long(tensor.offset));
        }
        bytes
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.header();
        bytes.resize(bytes.len().next_multiple_of(self.alignment.max(1)), 0);
        bytes.extend((0..self.data_bytes).map(super::safetensors_file::pattern));
        bytes
    }
}
