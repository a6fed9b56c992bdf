//! Names as C has them: each ends with a zero. All of them in one piece of memory.

use std::ffi::{CStr, CString, c_char};
use std::sync::LazyLock;

use onelayer::DType;

/// Names, one after the other, each with a zero behind it.
#[derive(Debug)]
pub(crate) struct Names {
    text: Box<str>,
    /// Where each one starts, and where the last one ends.
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

    /// A name, without the zero behind it.
    pub(crate) fn get(&self, index: usize) -> Option<&str> {
        let (&start, &end) = (self.starts.get(index)?, self.starts.get(index + 1)?);
        Some(&self.text[start..end - 1])
    }

    /// Where a name starts that ends with a zero.
    pub(crate) fn pointer(&self, index: usize) -> Option<*const c_char> {
        let &start = self.starts[..self.starts.len() - 1].get(index)?;
        Some(self.text[start..].as_ptr().cast())
    }
}

/// Names of element types, as headers spell them.
static TYPES: LazyLock<Vec<(DType, CString)>> = LazyLock::new(|| {
    let name = |dtype: DType| (dtype, CString::new(dtype.name()).unwrap_or_default());
    DType::ALL.into_iter().chain([DType::Opaque]).map(name).collect()
});

/// The name of an element type. Lives for ever.
pub(crate) fn of_type(dtype: DType) -> &'static CStr {
    let found = TYPES.iter().find(|(known, _)| *known == dtype);
    found.map_or(c"opaque", |(_, name)| name.as_c_str())
}
