//! Describes many checkpoints, one line each: for comparisons with another reader.
//!
//! `cargo run --release -p onelayer --example describe < PATHS`
//!
//! A line of input is a path, or a part, a tab and a path: `ema<TAB>file.ckpt`; the part `*` is the
//! whole file. A line of output is JSON: `{"error":kind,"message":text}`, or `{"tensors":{name:
//! [dtype, shape, bytes as hexadecimal digits]}}`. Only for small files: it reads every tensor.
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::unix::fs::FileExt;

use onelayer::checkpoint::{Checkpoint, CheckpointError, OpenOptions, TensorEntry};
use serde_json::{Map, Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    let mut output = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let described = match line.split_once('\t') {
            Some(("*", path)) => OpenOptions::new().whole_file().open(path),
            Some((part, path)) => OpenOptions::new().select(part).open(path),
            None => Checkpoint::open(&line),
        };
        let described = match described {
            Ok(checkpoint) => tensors(&checkpoint)?,
            Err(error) => failure(&error),
        };
        writeln!(output, "{described}")?;
        output.flush()?;
    }
    Ok(())
}

fn failure(error: &CheckpointError) -> Value {
    let kind = format!("{error:?}");
    let kind = kind.split([' ', '{']).next().unwrap_or_default();
    json!({"error": kind, "message": error.to_string()})
}

/// The tensors of a checkpoint by name, aliases too.
pub(crate) fn tensors(checkpoint: &Checkpoint) -> Result<Value, Box<dyn Error>> {
    let files: Vec<File> =
        checkpoint.shards().iter().map(|shard| File::open(&shard.path)).collect::<io::Result<_>>()?;
    let mut described = Map::new();
    for tensor in checkpoint.tensors() {
        let row = row(&files[tensor.shard.index()], &tensor)?;
        described.insert(tensor.name.to_owned(), row);
    }
    for (name, id) in checkpoint.aliases() {
        let row = described[checkpoint.tensor(id).name].clone();
        described.insert(name.to_owned(), row);
    }
    Ok(json!({"tensors": described}))
}

fn row(file: &File, tensor: &TensorEntry<'_>) -> Result<Value, Box<dyn Error>> {
    let mut bytes = vec![0; usize::try_from(tensor.extent.len_bytes())?];
    file.read_exact_at(&mut bytes, tensor.extent.start())?;
    let bytes = match tensor.strides {
        [] => bytes,
        _ => gathered(&bytes, tensor)?,
    };
    let digits = bytes.iter().fold(String::new(), |mut digits, byte| {
        let _ = write!(digits, "{byte:02x}");
        digits
    });
    Ok(json!([tensor.dtype.name(), tensor.shape, digits]))
}

/// The elements of a tensor with strides, row by row.
fn gathered(bytes: &[u8], tensor: &TensorEntry<'_>) -> Result<Vec<u8>, Box<dyn Error>> {
    let element_bytes = usize::try_from(tensor.dtype.bits().ok_or("an element has a size")? / 8)?;
    let mut places = vec![0_usize];
    for (&len, &stride) in tensor.shape.iter().zip(tensor.strides) {
        let (len, stride) = (usize::try_from(len)?, usize::try_from(stride)?);
        places = places.iter().flat_map(|place| (0..len).map(move |step| place + step * stride)).collect();
    }
    let elements = places.into_iter().map(|place| &bytes[place * element_bytes..][..element_bytes]);
    Ok(elements.collect::<Vec<_>>().concat())
}
