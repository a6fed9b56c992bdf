//! Builds safetensors files for tests: right ones tensor by tensor, wrong ones from any header
//! text.
//!
//! Shares no code with the library, so that a fault in one does not hide in the other.

use std::path::Path;

/// A file with that header, announced with its true length, and `data_bytes` bytes behind it.
pub fn with_header(header: impl AsRef<[u8]>, data_bytes: usize) -> Vec<u8> {
    let header = header.as_ref();
    announced(header.len().try_into().unwrap(), header, data_bytes)
}

/// A file whose first eight bytes announce `header_bytes`, whatever follows.
pub fn announced(header_bytes: u64, header: &[u8], data_bytes: usize) -> Vec<u8> {
    let mut file = header_bytes.to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.extend((0..data_bytes).map(pattern));
    file
}

/// The byte at that position of a data section: never zero, and different from its neighbours.
pub fn pattern(position: usize) -> u8 {
    u8::try_from(position % 251).unwrap() + 1
}

/// A text as JSON.
pub fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap()
}

/// A header with one tensor.
pub fn one(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
}

/// A well-formed file, tensor by tensor, without holes.
#[derive(Default, Clone)]
pub struct FileBuilder {
    members: Vec<String>,
    metadata: Vec<String>,
    data_bytes: usize,
}

impl FileBuilder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a tensor of `bytes` bytes.
    pub fn tensor(mut self, name: &str, dtype: &str, shape: &[u64], bytes: usize) -> Self {
        let (start, end) = (self.data_bytes, self.data_bytes + bytes);
        self.members.push(format!(
            r#"{}:{{"dtype":{},"shape":{shape:?},"data_offsets":[{start},{end}]}}"#,
            quoted(name),
            quoted(dtype)
        ));
        self.data_bytes = end;
        self
    }

    /// Appends a tensor of U8.
    pub fn bytes_tensor(self, name: &str, bytes: usize) -> Self {
        self.tensor(name, "U8", &[bytes.try_into().unwrap()], bytes)
    }

    /// Adds an entry of `__metadata__`.
    pub fn metadata(mut self, key: &str, value: &str) -> Self {
        self.metadata.push(format!("{}:{}", quoted(key), quoted(value)));
        self
    }

    /// The header's text.
    pub fn header(&self) -> String {
        let mut members = self.members.clone();
        if !self.metadata.is_empty() {
            members.insert(0, format!(r#""__metadata__":{{{}}}"#, self.metadata.join(",")));
        }
        format!("{{{}}}", members.join(","))
    }

    /// The file.
    pub fn build(&self) -> Vec<u8> {
        with_header(self.header(), self.data_bytes)
    }

    /// Writes the file.
    pub fn write(&self, path: impl AsRef<Path>) {
        std::fs::write(path, self.build()).unwrap();
    }
}

/// An index in the usual form.
pub fn index(entries: &[(&str, &str)]) -> String {
    let entries: Vec<String> =
        entries.iter().map(|(tensor, file)| format!("{}:{}", quoted(tensor), quoted(file))).collect();
    format!(r#"{{"metadata":{{}},"weight_map":{{{}}}}}"#, entries.join(","))
}
