//! Reads whole tensors to the CPU in their stored type, directly into a vector that candle will
//! own.

use candle_core::{DType, Device, Result, Tensor, WithDType};
use half::{bf16, f16};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::error::AdapterError;
use crate::pull::Pull;

/// Reads the tensor into its final memory on the CPU. `None` for F8_E4M3, whose elements are not
/// plain bytes for [`zerocopy`].
pub(crate) fn read(pull: &Pull<'_>, dtype: DType) -> Option<Result<Tensor>> {
    Some(match dtype {
        DType::U8 => typed::<u8>(pull),
        DType::U32 => typed::<u32>(pull),
        DType::I16 => typed::<i16>(pull),
        DType::I32 => typed::<i32>(pull),
        DType::I64 => typed::<i64>(pull),
        DType::BF16 => typed::<bf16>(pull),
        DType::F16 => typed::<f16>(pull),
        DType::F32 => typed::<f32>(pull),
        DType::F64 => typed::<f64>(pull),
        _ => return None,
    })
}

fn typed<T: WithDType + FromBytes + IntoBytes>(pull: &Pull<'_>) -> Result<Tensor> {
    // Zeroed by the kernel: no page is touched before its bytes arrive.
    let mut elements = zeroed::<T>(pull, pull.count)?;
    pull.read(0, elements.as_mut_slice().as_mut_bytes())?;
    Tensor::from_vec(elements, pull.shape.clone(), &Device::Cpu)
}

/// Reads a tensor of a type without arithmetic. Candle copies it once more.
pub(crate) fn read_opaque(pull: &Pull<'_>, dtype: DType, device: &Device) -> Result<Tensor> {
    let count = usize::try_from(pull.len_bytes()).map_err(|_| pull.out_of_memory(pull.len_bytes()))?;
    let mut bytes = zeroed::<u8>(pull, count)?;
    pull.read(0, &mut bytes)?;
    Tensor::from_raw_buffer(&bytes, dtype, pull.shape.dims(), device)
}

/// Allocates elements, or returns the error.
pub(crate) fn zeroed<T: FromZeros>(
    pull: &Pull<'_>,
    count: usize,
) -> std::result::Result<Vec<T>, AdapterError> {
    T::new_vec_zeroed(count).map_err(|_| {
        let bytes = count.saturating_mul(size_of::<T>());
        pull.out_of_memory(u64::try_from(bytes).unwrap_or(u64::MAX))
    })
}
