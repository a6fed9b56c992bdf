//! Files for benches: safetensors headers, followed by random bytes if those are read.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// One tensor of a new file.
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    pub(crate) len_bytes: u64,
}

impl Tensor {
    /// A tensor whose elements have `element_bytes` bytes.
    pub(crate) fn new(
        name: impl Into<String>,
        dtype: &'static str,
        element_bytes: u64,
        shape: &[u64],
    ) -> Self {
        let len_bytes = shape.iter().product::<u64>() * element_bytes;
        Self { name: name.into(), dtype, shape: shape.to_vec(), len_bytes }
    }
}

/// The header as text, and the bytes of all tensors.
fn header(tensors: &[Tensor]) -> (String, u64) {
    let mut text = String::from("{");
    let mut end = 0;
    for tensor in tensors {
        let start = end;
        end += tensor.len_bytes;
        let comma = if start == 0 && text.len() == 1 { "" } else { "," };
        let Tensor { name, dtype, shape, .. } = tensor;
        write!(
            text,
            r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#
        )
        .expect("a string takes everything");
    }
    text.push('}');
    (text, end)
}

/// Writes a file for benches that read only headers: its data is a hole. Returns the header size.
///
/// # Errors
/// The error of the system.
pub(crate) fn headers_only(path: &Path, tensors: &[Tensor]) -> io::Result<u64> {
    let (text, data_bytes) = header(tensors);
    let mut file = File::create(path)?;
    let header_bytes = begin(&mut file, &text)?;
    file.set_len(header_bytes + data_bytes)?;
    Ok(header_bytes)
}

/// Writes a file of random bytes to disk, and leaves it in the page cache.
///
/// # Errors
/// The error of the system.
pub(crate) fn random(path: &Path, tensors: &[Tensor]) -> io::Result<()> {
    let (text, data_bytes) = header(tensors);
    let mut file = BufWriter::with_capacity(8 << 20, File::create(path)?);
    begin(&mut file, &text)?;
    let mut state = 1u64;
    for left in (0..data_bytes).step_by(8).map(|done| data_bytes - done) {
        // xorshift64: fast, and no disk or hypervisor compresses it.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let bytes = state.to_le_bytes();
        file.write_all(&bytes[..usize::try_from(left.min(8)).expect("at most eight")])?;
    }
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

fn begin(file: &mut impl Write, text: &str) -> io::Result<u64> {
    let len = u64::try_from(text.len()).expect("64-bit lengths");
    file.write_all(&len.to_le_bytes())?;
    file.write_all(text.as_bytes())?;
    Ok(len + 8)
}
