//! Every type, level and target against the floats of gguf-py, in
//! `fixtures/gguf_blocks.safetensors`.

use safetensors::SafeTensors;

use super::super::tests::levels;
use super::*;
use crate::checkpoint::DType;
use crate::checkpoint::TensorId;
use crate::plan::{Cast, CastOp};
use crate::staging::cast::cast_step_with;
use crate::units::to_u64;

/// Blocks of a type, and the bits of their elements in single precision.
fn fixture(block: BlockType) -> (Vec<u8>, Vec<u32>) {
    let file = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/gguf_blocks.safetensors"));
    let file = SafeTensors::deserialize(file).unwrap();
    let blocks = file.tensor(&format!("{block}.blocks")).unwrap().data().to_vec();
    let singles = file.tensor(&format!("{block}.floats")).unwrap();
    let singles = singles.data().as_chunks::<4>().0.iter().map(|single| u32::from_le_bytes(*single));
    let singles: Vec<u32> = singles.collect();
    let count = blocks.len() / to_usize(block.bytes());
    assert_eq!(
        (count * to_usize(block.bytes()), count * to_usize(block.elements())),
        (blocks.len(), singles.len())
    );
    (blocks, singles)
}

fn decoded() -> impl Iterator<Item = BlockType> {
    BlockType::ALL.into_iter().filter(|block| block.is_decoded())
}

/// The bytes of an element in the target.
fn narrowed(single: u32, to: FloatType) -> Vec<u8> {
    let number = f32::from_bits(single);
    match to {
        FloatType::F32 => single.to_le_bytes().to_vec(),
        FloatType::Bf16 => half::bf16::from_f32(number).to_le_bytes().to_vec(),
        FloatType::F16 => half::f16::from_f32(number).to_le_bytes().to_vec(),
    }
}

#[test]
fn every_type_is_decoded_as_gguf_py_does_it() {
    for block in decoded() {
        let (blocks, singles) = fixture(block);
        let (bytes, elements) = (to_usize(block.bytes()), to_usize(block.elements()));
        let given = blocks.len() / bytes;
        for to in [FloatType::F32, FloatType::Bf16, FloatType::F16] {
            let cast = Cast::between(DType::Block(block), to).unwrap();
            // Around the length of a group, and at phases of every kind.
            let group = GROUP_ELEMENTS / elements;
            for (count, phase) in [(1, 0), (given, 7), (group, 1), (group + 1, 64), (3 * group + given, 33)] {
                let wanted = || (0..count).map(|at| at % given);
                let source: Vec<u8> =
                    wanted().flat_map(|at| &blocks[at * bytes..][..bytes]).copied().collect();
                let of = |at: usize| &singles[at * elements..][..elements];
                let expected: Vec<u8> = wanted().flat_map(of).flat_map(|&bits| narrowed(bits, to)).collect();
                let infinite = |bits: &u32| {
                    to == FloatType::F16 && half::f16::from_f32(f32::from_bits(*bits)).is_infinite()
                };
                let lost = to_u64(wanted().flat_map(of).filter(|bits| infinite(bits)).count());
                for level in levels() {
                    let mut slot = vec![0xA5; phase];
                    slot.extend(&source);
                    slot.resize(phase + expected.len() + 9, 0x5A);
                    let step = CastOp {
                        tensor: TensorId(0),
                        slot_offset_bytes: to_u64(phase),
                        source_len_bytes: to_u64(source.len()),
                        cast,
                    };
                    let overflowed = cast_step_with(level, &mut slot, &step);
                    let found = &slot[phase..phase + expected.len()];
                    let at = found.iter().zip(&expected).position(|(found, expected)| found != expected);
                    assert_eq!(at, None, "{cast}, {level}, {count} blocks");
                    assert_eq!(overflowed, lost, "{cast}, {level}, {count} blocks");
                    assert!(slot[..phase].iter().all(|&byte| byte == 0xA5));
                    assert!(slot[phase + expected.len()..].iter().all(|&byte| byte == 0x5A));
                }
            }
        }
    }
}

/// Prints rates: `cargo test --release -p onelayer --lib ggml::tests::speed -- --ignored
/// --nocapture`.
#[test]
#[ignore = "measures"]
#[allow(clippy::print_stderr, reason = "that is what it is for")]
fn speed() {
    for block in decoded() {
        let (blocks, _) = fixture(block);
        let count = 1024 * 1024 / to_usize(block.elements());
        let source: Vec<u8> = blocks.iter().cycle().take(count * to_usize(block.bytes())).copied().collect();
        let mut line = format!("{block:8}");
        for to in [FloatType::Bf16, FloatType::F16, FloatType::F32] {
            for level in levels() {
                let mut slot = vec![0; count * to_usize(block.elements() * to.bytes())];
                let best = (0..20).map(|_| {
                    slot[..source.len()].copy_from_slice(&source);
                    let start = std::time::Instant::now();
                    decode(level, &mut slot, source.len(), block, to);
                    start.elapsed()
                });
                let seconds = best.min().unwrap().as_secs_f64();
                let elements = f64::from(1024 * 1024);
                line += &format!("  {to} {level} {:.2} G/s", elements / seconds / 1e9);
            }
        }
        eprintln!("{line}");
    }
}
