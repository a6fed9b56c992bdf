//! Opens each file whose path comes in a line of the input, and says in a line of JSON what it
//! holds: `{"ok": [[name, type, shape, start, bytes], ..]}`, or `{"refused": reason}`.
//!
//! For comparisons with other readers: scripts/differential_gguf.py.
#![allow(clippy::print_stdout, reason = "that is what it is for")]

use std::io::{self, BufRead as _, Write as _};

use onelayer::Checkpoint;

fn main() -> io::Result<()> {
    let mut out = io::stdout().lock();
    for path in io::stdin().lock().lines() {
        let line = match Checkpoint::open(path?) {
            Ok(checkpoint) => {
                let tensors = checkpoint.tensors().map(|tensor| {
                    let (start, len_bytes) = (tensor.extent.start(), tensor.extent.len_bytes());
                    serde_json::json!([
                        tensor.name,
                        tensor.dtype_name.to_uppercase(),
                        tensor.shape,
                        start,
                        len_bytes
                    ])
                });
                serde_json::json!({ "ok": tensors.collect::<Vec<_>>() })
            }
            Err(error) => serde_json::json!({ "refused": error.to_string() }),
        };
        writeln!(out, "{line}")?;
        out.flush()?;
    }
    Ok(())
}
