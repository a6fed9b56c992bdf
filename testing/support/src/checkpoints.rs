//! Builders that several test files share.

use std::fs;
use std::path::{Path, PathBuf};

/// A tensor to be written: name, dtype, shape, bytes.
#[derive(Clone, Debug)]
pub struct TestTensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl TestTensor {
    /// A `U8` tensor of `len` bytes that look random and differ from every other seed's.
    pub fn random(name: impl Into<String>, len: usize, seed: u64) -> Self {
        Self { name: name.into(), dtype: "U8", shape: vec![len as u64], bytes: random_bytes(len, seed) }
    }
}

/// Bytes of a splitmix64 sequence: no zero runs, no repetition.
pub fn random_bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bytes.extend_from_slice(&(word ^ (word >> 31)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A sequence of numbers that a seed repeats: SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (word ^ (word >> 31)) % end
    }

    pub fn number(&mut self, end: u64) -> u32 {
        u32::try_from(self.below(end)).unwrap()
    }

    /// A place in a list of so many; 0 in an empty one.
    pub fn place(&mut self, len: usize) -> usize {
        self.number(len.max(1) as u64) as usize
    }

    pub fn byte(&mut self) -> u8 {
        self.below(256).to_le_bytes()[0]
    }

    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.number(list.len() as u64) as usize]
    }
}

/// Writes one safetensors file with its tensors in the order given, `padding` spaces after the
/// header.
pub fn write_file(path: &Path, tensors: &[TestTensor], padding: usize) {
    let mut header = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.bytes.len();
        let name = serde_json::to_string(&tensor.name).unwrap();
        header.push_str(&format!(
            ",{name}:{{\"dtype\":\"{}\",\"shape\":{:?},\"data_offsets\":[{offset},{end}]}}",
            tensor.dtype, tensor.shape
        ));
        offset = end;
    }
    header.push('}');
    header.push_str(&" ".repeat(padding));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    for tensor in tensors {
        file.extend_from_slice(&tensor.bytes);
    }
    fs::write(path, file).unwrap();
}

/// Writes `shards` and their index into `folder`. Without any tensor there is nothing to index.
pub fn write_sharded(folder: &Path, shards: &[Vec<TestTensor>]) {
    let mut map = serde_json::Map::new();
    let mut total = 0;
    for (number, tensors) in (1..).zip(shards) {
        let name = format!("model-{number:05}-of-{:05}.safetensors", shards.len());
        // Different phases, as real headers have.
        write_file(&folder.join(&name), tensors, number * 3);
        for tensor in tensors {
            total += tensor.bytes.len();
            map.insert(tensor.name.clone(), name.clone().into());
        }
    }
    if map.is_empty() {
        return;
    }
    let index = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": map });
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// A small decoder: embedding, `layers` layers of five tensors of odd sizes, norm and head, over
/// two shards.
pub fn small_decoder(layers: usize, unit: usize) -> Vec<Vec<TestTensor>> {
    let mut tensors = vec![TestTensor::random("model.embed_tokens.weight", 7 * unit + 13, 1)];
    for layer in 0..layers {
        let sizes = [
            ("input_layernorm.weight", 64),
            ("mlp.down_proj.weight", 3 * unit),
            ("mlp.up_proj.weight", 3 * unit + 256),
            ("self_attn.q_proj.weight", unit + 1),
            ("self_attn.k_proj.bias", 0),
        ];
        for (number, (name, len)) in (0..).zip(sizes) {
            let seed = 100 + 10 * layer as u64 + number;
            tensors.push(TestTensor::random(format!("model.layers.{layer}.{name}"), len, seed));
        }
    }
    tensors.push(TestTensor::random("model.norm.weight", 64, 2));
    tensors.push(TestTensor::random("lm_head.weight", 5 * unit + 3, 3));
    let second = tensors.split_off(tensors.len() / 2);
    vec![tensors, second]
}

/// A folder of the repository's fixtures.
pub fn fixture(name: &str) -> PathBuf {
    crate::repository().join("fixtures/checkpoints").join(name)
}
