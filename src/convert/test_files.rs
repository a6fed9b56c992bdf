//! Small checkpoints for unit tests of the conversion.

use std::fs;
use std::path::Path;

use crate::checkpoint::DType;
use crate::units::{to_u64, to_usize};

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: Vec<u8>,
}

/// A tensor of bytes that look random and differ from every other seed's.
pub(super) fn tensor(name: &str, dtype: DType, shape: &[u64], seed: u64) -> Tensor {
    let bits = shape.iter().product::<u64>() * dtype.bits().unwrap();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    let mut bytes = vec![0; to_usize(bits / 8)];
    hasher.finalize_xof().fill(&mut bytes);
    Tensor { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
}

/// Writes a file with its tensors in the order given.
pub(super) fn write_file(path: &Path, tensors: &[Tensor]) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for tensor in tensors {
        let start = data.len();
        data.extend_from_slice(&tensor.bytes);
        let entry = serde_json::json!({
            "dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [start, data.len()],
        });
        assert!(header.insert(tensor.name.clone(), entry).is_none());
    }
    let header = serde_json::Value::from(header).to_string();
    let file = [&to_u64(header.len()).to_le_bytes(), header.as_bytes(), &data].concat();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, file).unwrap();
}

/// Writes files, and the index that lists them.
pub(super) fn write_sharded(folder: &Path, shards: &[(&str, Vec<Tensor>)]) {
    let mut map = serde_json::Map::new();
    for (name, tensors) in shards {
        write_file(&folder.join(name), tensors);
        map.extend(tensors.iter().map(|tensor| (tensor.name.clone(), (*name).into())));
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}
