//! Test checkpoints: the tensors a model requests, with weights derived from their names.
#![allow(
    dead_code,
    unreachable_pub,
    missing_debug_implementations,
    reason = "each test file uses its own part"
)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;

/// A checkpoint of the fixtures.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/checkpoints").join(name)
}

/// Deterministic numbers between -1 and 1: splitmix64.
pub fn numbers(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        f64::from(u32::try_from((word ^ (word >> 31)) >> 32).unwrap()) / f64::from(u32::MAX) * 2.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Creates every tensor that a model requests and records it: a checkpoint with the names and
/// shapes of candle's code.
pub struct Inventor {
    /// Names that exist before they are requested.
    there: &'static [&'static str],
    invented: Mutex<HashMap<String, Tensor>>,
}

impl Inventor {
    pub fn new(there: &'static [&'static str]) -> Self {
        Self { there, invented: Mutex::default() }
    }

    pub fn var_builder(&self) -> VarBuilder<'_> {
        VarBuilder::from_backend(Box::new(self), DType::F32, Device::Cpu)
    }

    /// Writes the requested tensors as `dtype` into the only file of `directory`.
    pub fn save(self, directory: &Path, dtype: DType) {
        let tensors = self.invented.into_inner().unwrap();
        let stored: HashMap<_, _> =
            tensors.iter().map(|(name, tensor)| (name.clone(), tensor.to_dtype(dtype).unwrap())).collect();
        candle_core::safetensors::save(&stored, directory.join("model.safetensors")).unwrap();
    }
}

impl SimpleBackend for &Inventor {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let seed =
            name.bytes().fold(0, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
        // Small, so that nothing saturates in the layers.
        let values: Vec<_> = numbers(shape.elem_count(), seed).into_iter().map(|value| value * 0.2).collect();
        let tensor = Tensor::from_vec(values, shape, device)?.to_dtype(dtype)?;
        self.invented.lock().unwrap().insert(name.to_owned(), tensor.clone());
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("no shape for {name}")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.there.contains(&name)
    }
}

/// Loads the files of a checkpoint with candle's own loader.
pub fn candles_own(directory: &Path, dtype: DType) -> VarBuilder<'static> {
    let mut files: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    assert!(!files.is_empty(), "no weights in {}", directory.display());
    // SAFETY: nothing changes the files of a test while it runs.
    #[allow(unsafe_code, reason = "the loader to compare with")]
    unsafe { VarBuilder::from_mmaped_safetensors(&files, dtype, &Device::Cpu) }.unwrap()
}

/// The bits of a tensor.
pub fn bits(tensor: &Tensor) -> Vec<u8> {
    let flat = tensor.flatten_all().unwrap();
    match tensor.dtype() {
        DType::U8 => flat.to_vec1::<u8>().unwrap(),
        DType::U32 => flat.to_vec1::<u32>().unwrap().into_iter().flat_map(u32::to_le_bytes).collect(),
        DType::I16 => flat.to_vec1::<i16>().unwrap().into_iter().flat_map(i16::to_le_bytes).collect(),
        DType::I32 => flat.to_vec1::<i32>().unwrap().into_iter().flat_map(i32::to_le_bytes).collect(),
        DType::I64 => flat.to_vec1::<i64>().unwrap().into_iter().flat_map(i64::to_le_bytes).collect(),
        DType::BF16 => {
            flat.to_vec1::<half::bf16>().unwrap().into_iter().flat_map(half::bf16::to_le_bytes).collect()
        }
        DType::F16 => {
            flat.to_vec1::<half::f16>().unwrap().into_iter().flat_map(half::f16::to_le_bytes).collect()
        }
        DType::F32 => flat.to_vec1::<f32>().unwrap().into_iter().flat_map(f32::to_le_bytes).collect(),
        DType::F64 => flat.to_vec1::<f64>().unwrap().into_iter().flat_map(f64::to_le_bytes).collect(),
        DType::F8E4M3 => {
            // Its 256 values differ in single precision, except NaN.
            let wide = flat.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            wide.into_iter().flat_map(f32::to_le_bytes).collect()
        }
        other => panic!("no bits of {other:?}"),
    }
}
