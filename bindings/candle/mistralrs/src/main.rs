//! mistral.rs with the adapter: passes the same backend to `ShardedSafeTensors::wrap` and creates
//! layers of mistral.rs from it, whole and for one of two ranks.
//!
//! `cargo run -- CHECKPOINT`, with a checkpoint of the Llama architecture. Compares every weight
//! with a plain reader.

use std::error::Error;

use candle_core::{DType, Device, IndexOp, Tensor};
use candle_nn::var_builder::SimpleBackend;
use mistralrs_quant::{Shard, ShardedSafeTensors, ShardedVarBuilder};
use onelayer::Checkpoint;
use onelayer_candle::CheckpointBackend;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("name a checkpoint")?;
    let checkpoint = Checkpoint::open(&path)?;
    let backend: Box<dyn SimpleBackend> = Box::new(CheckpointBackend::new(&checkpoint)?);

    let weights: ShardedVarBuilder = ShardedSafeTensors::wrap(backend, DType::F32, Device::Cpu);

    let mut compared = 0;
    for entry in checkpoint.tensors() {
        let shape = entry.shape.iter().map(|&dim| usize::try_from(dim)).collect::<Result<Vec<_>, _>>()?;
        let expected = expected(&checkpoint, entry.name)?;
        let whole = weights.get(shape.clone(), entry.name)?;
        check(entry.name, &whole, &expected)?;
        if let [rows, _] = shape[..]
            && rows % 2 == 0
        {
            let second_half = Shard::Simple { dim: 0, rank: 1, world_size: 2 };
            let part = weights.get_with_hints(shape, entry.name, second_half)?;
            check(entry.name, &part, &expected.i(rows / 2..)?)?;
        }
        compared += 1;
    }
    println!("{compared} tensors of {path} are the same through mistral.rs, whole and in halves");
    Ok(())
}

/// The tensor from candle's own reader.
fn expected(checkpoint: &Checkpoint, name: &str) -> Result<Tensor, Box<dyn Error>> {
    let entry = checkpoint.find(name).ok_or("the name comes from the checkpoint")?;
    let file = std::fs::read(&checkpoint.shards()[entry.shard.index()].path)?;
    let mut tensors = candle_core::safetensors::load_buffer(&file, &Device::Cpu)?;
    let tensor = tensors.remove(name).ok_or("the file holds it")?;
    Ok(tensor.to_dtype(DType::F32)?)
}

fn check(name: &str, found: &Tensor, expected: &Tensor) -> Result<(), Box<dyn Error>> {
    let bits = |tensor: &Tensor| -> candle_core::Result<Vec<u32>> {
        Ok(tensor.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
    };
    match found.shape() == expected.shape() && bits(found)? == bits(expected)? {
        true => Ok(()),
        false => Err(format!("{name} differs").into()),
    }
}
