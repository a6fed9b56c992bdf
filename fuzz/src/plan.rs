//! A random checkpoint and random limits. Either planning is refused for a true reason, or the plan
//! delivers each selected byte once, reads at most a slot at a time, uses at most the slots of its
//! ring, and stays within its budget.

#![allow(clippy::unwrap_used, reason = "a check that cannot go on panics")]

use std::collections::BTreeSet;
use std::fs::File;

use arbitrary::{Result, Unstructured};
use onelayer::checkpoint::TensorId;
use onelayer::plan::{
    FloatType, IoMode, Landing, LoadPlan, Passes, PlanError, PlanLimits, Quantisation, ReadOrder,
    ResidentKind, Window,
};
use onelayer::units::{Alignment, MIB};
use onelayer::{Checkpoint, LayerId, Layers};
use tempfile::TempDir;

use super::plan_check::Wanted;
use super::scratch;
use super::{plan_arena, plan_check};
use onelayer_testing::safetensors_file::quoted;

/// Maximum number of files. Some may have no tensors.
const FILES: usize = 3;
/// Plans of checkpoints up to this size are also executed cell by cell.
const CELLS_MAX: u64 = 96 << 10;
/// Names and sizes of element types.
const DTYPES: [(&str, u64); 7] =
    [("U8", 1), ("BF16", 2), ("F16", 2), ("F32", 4), ("F64", 8), ("I64", 8), ("F8_E4M3", 1)];

/// A tensor of a file.
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    bytes: u64,
}

/// Checks one input.
pub fn check(data: &[u8]) {
    thread_local!(static PLACE: Files = Files::new());
    let mut choices = Unstructured::new(data);
    let Ok(files) = files(&mut choices) else { return };
    let checkpoint = PLACE.with(|place| place.checkpoint(&files));
    let layers = Layers::group(&checkpoint).unwrap();
    let Ok(limits) = limits(&mut choices, &layers) else { return };
    let left_out = choices.arbitrary::<u64>().unwrap_or(0);
    let is_wanted = |tensor: TensorId| left_out >> (tensor.index() % 64) & 1 == 0;
    check_plan(&checkpoint, &layers, limits, &is_wanted);
}

/// Writes files with holes as data: only headers are read.
struct Files {
    folder: TempDir,
    files: Vec<File>,
}

impl Files {
    fn new() -> Self {
        let folder = scratch::folder();
        let name = |number| folder.path().join(format!("model-{number:05}-of-{FILES:05}.safetensors"));
        let files = (1..=FILES).map(|number| File::create(name(number)).unwrap()).collect();
        Self { folder, files }
    }

    fn checkpoint(&self, files: &[Vec<Tensor>]) -> Checkpoint {
        for (file, tensors) in self.files.iter().zip(files) {
            let mut end_bytes = 0;
            let members: Vec<String> = tensors
                .iter()
                .map(|Tensor { name, dtype, shape, bytes }| {
                    let start_bytes = end_bytes;
                    end_bytes += bytes;
                    let (name, offsets) = (quoted(name), [start_bytes, end_bytes]);
                    format!(r#"{name}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":{offsets:?}}}"#)
                })
                .collect();
            let header = format!("{{{}}}", members.join(","));
            let header_bytes = u64::try_from(header.len()).unwrap();
            let bytes = [&header_bytes.to_le_bytes()[..], header.as_bytes()].concat();
            scratch::overwrite(file, &bytes, 8 + header_bytes + end_bytes);
        }
        Checkpoint::open(self.folder.path()).unwrap()
    }
}

fn files(choices: &mut Unstructured<'_>) -> Result<Vec<Vec<Tensor>>> {
    let mut number = 0;
    let mut file = || {
        let count = choices.int_in_range(0..=12_u8)?;
        (0..count).map(|_| tensor(choices, &mut number)).collect()
    };
    (0..FILES).map(|_| file()).collect()
}

fn tensor(choices: &mut Unstructured<'_>, number: &mut u32) -> Result<Tensor> {
    *number += 1;
    let (dtype, element_bytes) = *choices.choose(&DTYPES)?;
    let elements = match choices.int_in_range(0..=15_u8)? {
        0 => 0,
        1..=4 => choices.int_in_range(1..=40)?,
        5..=7 => choices.int_in_range(1..=4000)?,
        8..=10 => 128 * choices.int_in_range(1..=60_u64)?,
        11..=12 => choices.int_in_range(1..=400_000)?,
        13 => choices.int_in_range(900_000..=1_500_000)?,
        14 => choices.int_in_range(1..=1 << 26)?,
        _ => 4096,
    };
    let rows = choices.int_in_range(1..=4_u64)?;
    let shape = if elements % rows == 0 && rows > 1 { vec![rows, elements / rows] } else { vec![elements] };
    let (layer, kind) = (choices.int_in_range(0..=4_u8)?, choices.int_in_range(0..=7_u8)?);
    let name = match kind {
        0 => format!("head.n{number}"),
        1 => format!("model.layers.{layer}.experts.{}.up.n{number}.weight", *number % 3),
        // A scale, if the weight with that number exists.
        2 => format!("model.layers.{layer}.part.n{}.weight_scale.n{number}", number.saturating_sub(1)),
        _ => format!("model.layers.{layer}.part.n{number}.weight"),
    };
    Ok(Tensor { name, dtype, shape, bytes: elements * element_bytes })
}

fn limits(choices: &mut Unstructured<'_>, layers: &Layers) -> Result<PlanLimits> {
    let budget_bytes = match choices.int_in_range(0..=9_u8)? {
        0 => choices.arbitrary()?,
        _ => choices.int_in_range(0..=80 * MIB)?,
    };
    let mut limits = PlanLimits::new(budget_bytes);
    limits.options.readers = Some(choices.int_in_range(0..=12)?);
    limits.alignment = Alignment::new(1 << choices.int_in_range(12..=16)?).unwrap();
    limits.options.io = *choices.choose(&[IoMode::Mmap, IoMode::Direct, IoMode::Buffered, IoMode::Uring])?;
    limits.options.window = match choices.int_in_range(0..=7_u8)? {
        0..=2 => Window::All,
        3 => Window::Bytes(choices.int_in_range(0..=8 * MIB)?),
        count => Window::Layers(u32::from(count - 4)),
    };
    limits.options.order = *choices.choose(&[ReadOrder::Layers, ReadOrder::Files])?;
    limits.resident = *choices.choose(&[ResidentKind::Host, ResidentKind::Device, ResidentKind::Nowhere])?;
    limits.landing = *choices.choose(&[Landing::Exact, Landing::Exact, Landing::InPhase])?;
    limits.options.passes =
        *choices.choose(&[Passes::Times(1), Passes::Times(0), Passes::Times(2), Passes::Endless])?;
    limits.options.dtype =
        *choices.choose(&[None, None, Some(FloatType::Bf16), Some(FloatType::F16), Some(FloatType::F32)])?;
    let forms = [Quantisation::Int8, Quantisation::Int4G32, Quantisation::Int4G128, Quantisation::Fp8];
    limits.options.quantise =
        if choices.int_in_range(0..=7_u8)? == 0 { Some(*choices.choose(&forms)?) } else { None };
    limits.options.device_budget_bytes = match choices.int_in_range(0..=3_u8)? {
        0 => Some(choices.int_in_range(0..=64 * MIB)?),
        _ => None,
    };
    limits.options.hole_bytes_max = choices.int_in_range(0..=256 << 10)?;
    limits.options.hash = choices.arbitrary()?;
    let kept = choices.arbitrary::<u8>()?;
    let ids = layers.as_slice().iter().enumerate().filter(|(at, _)| *at < 8 && kept >> at & 1 == 1);
    limits.kept = ids.map(|(_, layer)| layer.id.clone()).collect::<BTreeSet<LayerId>>();
    Ok(limits)
}

fn check_plan(checkpoint: &Checkpoint, layers: &Layers, mut limits: PlanLimits, is_wanted: Wanted<'_>) {
    match LoadPlan::build(checkpoint, layers, &limits, is_wanted) {
        Ok(plan) => {
            assert!(plan.memory().smallest_budget_bytes() <= limits.options.host_budget_bytes);
            check_bytes(checkpoint, &plan, &limits, is_wanted);
            check_orders(checkpoint, layers, &limits, is_wanted);
            assert_eq!(LoadPlan::build(checkpoint, layers, &limits, is_wanted).as_ref(), Ok(&plan));
            assert!(!format!("{plan:#}").is_empty());
        }
        Err(PlanError::BudgetTooSmall { smallest_bytes, .. }) => {
            assert!(smallest_bytes > limits.options.host_budget_bytes);
            limits.options.host_budget_bytes = smallest_bytes;
            match LoadPlan::build(checkpoint, layers, &limits, is_wanted) {
                Ok(plan) => check_bytes(checkpoint, &plan, &limits, is_wanted),
                Err(error) => panic!("{smallest_bytes} are enough: {error}"),
            }
        }
        Err(PlanError::DeviceBudgetTooSmall { needed_bytes, budget_bytes, .. }) => {
            assert!(needed_bytes > budget_bytes && limits.options.device_budget_bytes == Some(budget_bytes));
        }
        Err(PlanError::WindowTooSmall { needed_bytes, window_bytes, .. }) => {
            assert!(needed_bytes > window_bytes && limits.options.window == Window::Bytes(window_bytes));
        }
        Err(PlanError::NothingToQuantise { .. }) => assert!(limits.options.quantise.is_some()),
        Err(PlanError::NothingSelected { .. }) => {
            assert!(checkpoint.tensors().all(|tensor| !is_wanted(tensor.id)));
        }
        Err(error) => panic!("{error}"),
    }
}

/// Follows the bytes through each way of landing that can be followed.
fn check_bytes(checkpoint: &Checkpoint, plan: &LoadPlan, limits: &PlanLimits, is_wanted: Wanted<'_>) {
    plan_check::check_bounds(checkpoint, plan, limits);
    if limits.options.quantise.is_some() {
        return;
    }
    if limits.landing == Landing::Exact && limits.options.dtype.is_none() {
        plan_check::check(checkpoint, plan, limits, is_wanted);
    }
    if checkpoint.tensor_bytes() <= CELLS_MAX {
        plan_arena::check(checkpoint, plan, is_wanted);
    }
}

/// Checks that both orders read the same. Skips quantised tensors: they arrive as values and
/// scales, which this check cannot distinguish.
fn check_orders(checkpoint: &Checkpoint, layers: &Layers, limits: &PlanLimits, is_wanted: Wanted<'_>) {
    let plan = |order| {
        let mut limits = limits.clone();
        limits.options.order = order;
        LoadPlan::build(checkpoint, layers, &limits, is_wanted)
    };
    let (by_layer, by_file) = (plan(ReadOrder::Layers), plan(ReadOrder::Files));
    if let (Ok(by_layer), Ok(by_file)) = (by_layer, by_file)
        && by_file.order() == ReadOrder::Files
        && limits.options.quantise.is_none()
    {
        plan_check::check_order(checkpoint, &by_layer, &by_file, is_wanted);
    }
}
