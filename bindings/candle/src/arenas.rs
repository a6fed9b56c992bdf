//! Layers in memory owned by candle: splits a plan so that each arena has one element type, and
//! makes tensors as views of their arena.
//!
//! Candle frees the memory of its tensors itself, so it cannot use an arena of the loader. Instead
//! candle allocates the arena as one flat tensor, the loader fills it, and each tensor of the layer
//! is a view of it, without a copy. A view has the element type of its arena, so a layer with
//! tensors of several types gets an arena for each type.

use std::collections::{HashMap, HashSet};

use candle_core::{DType, Error, Result, Shape, Tensor};
use onelayer::checkpoint::TensorId;
use onelayer::plan::PlannedLayer;
use onelayer::{Checkpoint, FloatType, LoadPlan};

use crate::types::Taken;

/// The type that wider floats are cast to while loading, for a model with elements of `dtype`.
pub(crate) fn narrowing(dtype: DType) -> Option<FloatType> {
    match dtype {
        DType::BF16 => Some(FloatType::Bf16),
        DType::F16 => Some(FloatType::F16),
        DType::F32 => Some(FloatType::F32),
        _ => None,
    }
}

/// The tensors of a plan that can be views of arenas, by their delivered type. Without types that
/// candle must convert or cannot compute with, and without empty tensors.
pub(crate) fn by_type(checkpoint: &Checkpoint, plan: &LoadPlan) -> HashMap<DType, HashSet<TensorId>> {
    let mut groups: HashMap<_, HashSet<_>> = HashMap::new();
    for layer in plan.layers() {
        for placement in plan.placements(layer) {
            let stored = checkpoint.tensor(placement.tensor).dtype;
            if let Some(Taken::AsIs(dtype)) = Taken::of(placement.delivered_dtype(stored))
                && placement.len_bytes() > 0
            {
                groups.entry(dtype).or_default().insert(placement.tensor);
            }
        }
    }
    groups
}

/// Number of elements of the flat tensor for a whole arena.
pub(crate) fn arena_elements(layer: &PlannedLayer, dtype: DType) -> Option<usize> {
    // Arenas are whole pages: no type here is wider than 8 bytes.
    usize::try_from(layer.arena_bytes).ok().map(|bytes| bytes / dtype.size_in_bytes())
}

/// The tensors of a layer as views of its arena.
pub(crate) fn views(
    checkpoint: &Checkpoint,
    plan: &LoadPlan,
    layer: &PlannedLayer,
    arena: &Tensor,
) -> Result<Vec<(TensorId, Tensor)>> {
    let element_bytes = arena.dtype().size_in_bytes();
    let views = plan.placements(layer).iter().map(|placement| {
        let dims = checkpoint.tensor(placement.tensor).shape.iter();
        let dims: Result<Vec<_>> = dims.map(|&dim| usize::try_from(dim).map_err(Error::msg)).collect();
        let shape = Shape::from(dims?);
        let offset_bytes = usize::try_from(placement.arena_offset_bytes).map_err(Error::msg)?;
        // An offset is a multiple of 256 bytes, so of every element size.
        let part = arena.narrow(0, offset_bytes / element_bytes, shape.elem_count())?;
        Ok((placement.tensor, part.reshape(shape)?))
    });
    views.collect()
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_nn::VarBuilder;
    use onelayer::plan::ReadOrder;
    use onelayer::{LayerId, Loader, LoaderBuilder, Target, Window};

    use super::*;

    /// A checkpoint of the fixtures, and its tensors as read by candle.
    fn fixture(name: &str, dtype: DType) -> (Checkpoint, VarBuilder<'static>) {
        let path = format!("{}/../../fixtures/checkpoints/{name}", env!("CARGO_MANIFEST_DIR"));
        (Checkpoint::open(&path).unwrap(), crate::var_builder(&path, dtype, &Device::Cpu).unwrap())
    }

    fn settings(target: Target, dtype: DType) -> LoaderBuilder {
        let settings = Loader::builder(target).window(Window::All).read_order(ReadOrder::Files);
        narrowing(dtype).into_iter().fold(settings, LoaderBuilder::dtype)
    }

    /// The bytes of an arena as a flat tensor. Host loads place tensors like device loads.
    fn arena(layer: &onelayer::LoadedLayer, planned: &PlannedLayer, plan: &LoadPlan, dtype: DType) -> Tensor {
        let mut bytes = vec![0xA5; arena_elements(planned, dtype).unwrap() * dtype.size_in_bytes()];
        for (tensor, placement) in layer.tensors().zip(plan.placements(planned)) {
            let start = usize::try_from(placement.arena_offset_bytes).unwrap();
            let delivered = tensor.as_bytes().unwrap();
            bytes[start..start + delivered.len()].copy_from_slice(delivered);
        }
        let count = bytes.len() / dtype.size_in_bytes();
        Tensor::from_raw_buffer(&bytes, dtype, &[count], &Device::Cpu).unwrap()
    }

    #[test]
    fn views_of_an_arena_are_the_tensors() {
        for (name, wanted) in [("llama", DType::BF16), ("gpt2", DType::F32), ("gpt2", DType::F16)] {
            let (checkpoint, expected) = fixture(name, wanted);
            let loader = settings(Target::Host, wanted).build().unwrap();
            let mut stream = loader.stream(&checkpoint).unwrap();
            let mut seen = 0;
            let plan = std::sync::Arc::clone(stream.plan());
            for layer in &mut stream {
                let layer = layer.unwrap();
                let planned = &plan.layers()[layer.index()];
                let arena = arena(&layer, planned, &plan, wanted);
                for (id, view) in views(&checkpoint, &plan, planned, &arena).unwrap() {
                    let entry = checkpoint.tensor(id);
                    let expected = expected.get(view.shape().clone(), entry.name).unwrap();
                    let bits = |tensor: &Tensor| tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
                    assert_eq!(
                        bits(&view).to_vec1::<f64>().unwrap(),
                        bits(&expected).to_vec1::<f64>().unwrap()
                    );
                    assert!(view.is_contiguous());
                    seen += 1;
                }
            }
            assert_eq!(seen, checkpoint.tensor_count());
        }
    }

    /// Plans for a CUDA device, without one: each tensor is in exactly one group, of its delivered
    /// type.
    #[test]
    fn every_tensor_is_in_the_group_of_its_type() {
        for (name, wanted, groups_expected) in [
            ("llama", DType::BF16, 1),
            ("llama", DType::F32, 1),
            ("gpt2", DType::BF16, 1),
            ("gpt2", DType::F64, 1),
        ] {
            let (checkpoint, _) = fixture(name, wanted);
            let plan = settings(Target::Cuda(0), wanted).plan(&checkpoint).unwrap();
            let groups = by_type(&checkpoint, &plan);
            assert_eq!(groups.len(), groups_expected);
            let ids: HashSet<LayerId> = plan.layers().iter().map(|layer| layer.id.clone()).collect();
            for (dtype, tensors) in groups {
                assert_eq!(tensors.len(), checkpoint.tensor_count());
                let of_group =
                    settings(Target::Cuda(0), wanted).select(move |entry| tensors.contains(&entry.id));
                let of_group = of_group.plan(&checkpoint).unwrap();
                for layer in of_group.layers() {
                    assert!(ids.contains(&layer.id));
                    let elements = arena_elements(layer, dtype).unwrap();
                    assert_eq!(u64::try_from(elements * dtype.size_in_bytes()).unwrap(), layer.arena_bytes);
                }
            }
        }
    }
}
