//! The bytes of a synthetic tensor: fast, finite as floats, and never zero.
//!
//! A tensor consists of groups of [`GROUP_BYTES`]. The bytes of a group depend only on seed, tensor
//! and group, so any thread can make any part at any time with the same result. Inside a group,
//! eight independent xorshift generators fill eight interleaved lanes. The loop has no
//! multiplication and no dependency between lanes, so the compiler vectorizes it even for the
//! oldest x86-64.
//!
//! This is neither a good statistical nor a cryptographic generator. Its output does not compress,
//! differs everywhere, and cannot be mistaken for a hole in a file.

use onelayer_system::FloatType;

/// Bytes of a group; a multiple of one round of the eight lanes.
pub(super) const GROUP_BYTES: usize = 4096;

/// Lanes of 64 bits that a round fills.
const LANE_COUNT: usize = 8;

/// Bytes filled by one round of all lanes.
const ROUND_BYTES: usize = LANE_COUNT * 8;

/// The increment of splitmix64: 2^64 divided by the golden ratio, made odd.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The random bits of a 64-bit word that are kept, and the bits that are then set.
///
/// Sign and fraction stay random. The exponent keeps two random bits below fixed ones, so that
/// every magnitude is in `[2^-7, 2^-3)`: like a weight, and far from zero, infinity and NaN. The
/// lowest bit of every byte of the fraction alone is set, so that no byte is zero.
fn masks(float: FloatType) -> Masks {
    match float {
        FloatType::Bf16 => Masks { keep: repeat_u16(0x81FF), set: repeat_u16(0x3C01) },
        FloatType::F16 => Masks { keep: repeat_u16(0x8FFF), set: repeat_u16(0x2001) },
        FloatType::F32 => Masks { keep: repeat_u32(0x81FF_FFFF), set: repeat_u32(0x3C01_0101) },
    }
}

/// See [`masks`].
#[derive(Clone, Copy)]
struct Masks {
    keep: u64,
    set: u64,
}

/// The generator of one tensor's bytes.
#[derive(Clone, Copy)]
pub(super) struct TensorBytes {
    key: u64,
    masks: Masks,
}

impl TensorBytes {
    /// The bytes of tensor `tensor_index` (in the order of the state dict) with `seed`.
    pub(super) fn new(seed: u64, tensor_index: u64, float: FloatType) -> Self {
        Self { key: mix(mix(seed.wrapping_add(GOLDEN)).wrapping_add(tensor_index)), masks: masks(float) }
    }

    /// Fills `target` with the tensor's bytes from `offset_bytes` on.
    pub(super) fn fill(self, offset_bytes: u64, target: &mut [u8]) {
        let group_bytes = u64::try_from(GROUP_BYTES).expect("a small constant");
        let mut group = offset_bytes / group_bytes;
        let skipped = usize::try_from(offset_bytes % group_bytes).expect("less than a group");
        let mut rest = target;
        if skipped > 0 {
            let (head, tail) = rest.split_at_mut(rest.len().min(GROUP_BYTES - skipped));
            self.copy_from_group(group, skipped, head);
            group += 1;
            rest = tail;
        }
        let mut whole = rest.chunks_exact_mut(GROUP_BYTES);
        for chunk in &mut whole {
            self.fill_rounds(group, chunk);
            group += 1;
        }
        let tail = whole.into_remainder();
        if !tail.is_empty() {
            self.copy_from_group(group, 0, tail);
        }
    }

    /// Copies part of a group, starting `skipped` bytes into it.
    fn copy_from_group(self, group: u64, skipped: usize, target: &mut [u8]) {
        let mut scratch = [0; GROUP_BYTES];
        let end = skipped + target.len();
        self.fill_rounds(group, &mut scratch[..end.next_multiple_of(ROUND_BYTES)]);
        target.copy_from_slice(&scratch[skipped..end]);
    }

    /// Fills the start of a group; the length is a multiple of [`ROUND_BYTES`].
    fn fill_rounds(self, group: u64, target: &mut [u8]) {
        debug_assert_eq!(target.len() % ROUND_BYTES, 0, "whole rounds only");
        let key = mix(self.key.wrapping_add(group));
        let mut lanes = [0_u64; LANE_COUNT];
        let mut state = key;
        for lane in &mut lanes {
            state = state.wrapping_add(GOLDEN);
            // A xorshift generator must not start at zero, where it would stay.
            *lane = mix(state) | 1;
        }
        for round in target.chunks_exact_mut(ROUND_BYTES) {
            for (lane, word) in lanes.iter_mut().zip(round.chunks_exact_mut(8)) {
                let mut bits = *lane;
                bits ^= bits << 13;
                bits ^= bits >> 7;
                bits ^= bits << 17;
                *lane = bits;
                word.copy_from_slice(&((bits & self.masks.keep) | self.masks.set).to_le_bytes());
            }
        }
    }
}

/// The output function of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014).
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// Four copies of a 16-bit pattern.
const fn repeat_u16(pattern: u16) -> u64 {
    let [low, high] = pattern.to_le_bytes();
    u64::from_le_bytes([low, high, low, high, low, high, low, high])
}

/// Two copies of a 32-bit pattern.
const fn repeat_u32(pattern: u32) -> u64 {
    let [a, b, c, d] = pattern.to_le_bytes();
    u64::from_le_bytes([a, b, c, d, a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn sample(float: FloatType) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 20];
        TensorBytes::new(7, 3, float).fill(0, &mut bytes);
        bytes
    }

    fn values(float: FloatType, bytes: &[u8]) -> Vec<f32> {
        match float {
            FloatType::Bf16 => {
                bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            FloatType::F16 => {
                bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            FloatType::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
        }
    }

    /// The extremes that the masks allow are finite, so every value is finite, for any output of the generator
    /// yields.
    #[test]
    fn masks_allow_only_small_finite_values() {
        for float in FloatType::ALL {
            let masks = masks(float);
            for bits in [0, u64::MAX, 0x5555_5555_5555_5555, 0xAAAA_AAAA_AAAA_AAAA] {
                let word = ((bits & masks.keep) | masks.set).to_le_bytes();
                for value in values(float, &word) {
                    let magnitude = value.abs();
                    assert!((2_f32.powi(-7)..2_f32.powi(-3)).contains(&magnitude), "{float:?}: {value}");
                }
            }
        }
    }

    #[test]
    fn bytes_are_never_zero_and_use_every_free_bit() {
        for float in FloatType::ALL {
            let bytes = sample(float);
            assert!(bytes.iter().all(|&byte| byte != 0), "{float:?}");
            let masks = masks(float);
            let (mut ones, mut zeros) = (0, 0);
            for word in bytes.chunks_exact(8) {
                let word = u64::from_le_bytes(word.try_into().unwrap());
                ones |= word;
                zeros |= !word;
            }
            assert_eq!(ones, masks.keep | masks.set, "{float:?}");
            assert_eq!(zeros, !masks.set, "{float:?}");
        }
    }

    #[test]
    fn values_look_like_weights() {
        for float in FloatType::ALL {
            let values = values(float, &sample(float));
            assert!(values.iter().all(|value| value.is_finite() && *value != 0.0));
            let count = f64::from(u32::try_from(values.len()).unwrap());
            let mean = values.iter().copied().map(f64::from).sum::<f64>() / count;
            assert!(mean.abs() < 1e-3, "{float:?}: mean {mean}");
        }
    }

    /// Any window of a tensor equals that part of the whole.
    #[test]
    fn a_part_equals_the_same_part_of_the_whole() {
        let whole = sample(FloatType::Bf16);
        let tensor = TensorBytes::new(7, 3, FloatType::Bf16);
        for (start, length) in [
            (0, 2),
            (2, 4094),
            (4094, 4),
            (4096, 4096),
            (4098, 20_000),
            (8191, 1),
            (100, 64),
            (70_001, 12_289),
        ] {
            let mut part = vec![0; length];
            tensor.fill(u64::try_from(start).unwrap(), &mut part);
            assert!(part == whole[start..start + length], "{length} bytes at {start}");
        }
    }

    #[test]
    fn seed_tensor_and_group_all_change_the_bytes() {
        let make = |seed, tensor, offset| {
            let mut bytes = [0; 256];
            TensorBytes::new(seed, tensor, FloatType::F32).fill(offset, &mut bytes);
            bytes
        };
        let base = make(0, 0, 0);
        assert_eq!(base, make(0, 0, 0));
        for other in [make(1, 0, 0), make(0, 1, 0), make(0, 0, 4096), make(0, 0, 256)] {
            assert_ne!(base, other);
        }
    }
}
