//! NUL-terminated names in one allocation.

use std::ffi::{CStr, CString, c_char};
use std::sync::LazyLock;

use onelayer::{BlockType, DType};

/// Names, one after the other, each followed by NUL.
#[derive(Debug)]
pub(crate) struct Names {
    text: Box<str>,
    /// The start of each name, and the end of the last.
    starts: Box<[usize]>,
}

impl Names {
    pub(crate) fn new<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut text, mut starts) = (String::new(), vec![0]);
        for name in names {
            text.push_str(name);
            text.push('\0');
            starts.push(text.len());
        }
        Self { text: text.into(), starts: starts.into() }
    }

    /// A name, without its NUL.
    pub(crate) fn get(&self, index: usize) -> Option<&str> {
        let (&start, &end) = (self.starts.get(index)?, self.starts.get(index + 1)?);
        Some(&self.text[start..end - 1])
    }

    /// A pointer to a NUL-terminated name.
    pub(crate) fn pointer(&self, index: usize) -> Option<*const c_char> {
        let &start = self.starts[..self.starts.len() - 1].get(index)?;
        Some(self.text[start..].as_ptr().cast())
    }
}

/// Names of element types, as spelled in headers.
static TYPES: LazyLock<Vec<(DType, CString)>> = LazyLock::new(|| {
    let name = |dtype: DType| (dtype, CString::new(dtype.name()).unwrap_or_default());
    let blocks = BlockType::ALL.into_iter().map(DType::Block);
    DType::ALL.into_iter().chain(blocks).chain([DType::Opaque]).map(name).collect()
});

/// The name of an element type.
pub(crate) fn of_type(dtype: DType) -> &'static CStr {
    let found = TYPES.iter().find(|(known, _)| *known == dtype);
    found.map_or(c"opaque", |(_, name)| name.as_c_str())
}
