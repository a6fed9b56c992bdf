//! Settings of a load, as the Python half hands them over: complete and of the right types.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use onelayer::{
    FloatType, HandOut, IoMode, Keep, LayerId, LayerMap, LoadOptions, Loader, LoaderBuilder, Passes,
    Quantisation, Rank, ReadOrder, Split, SplitRules, Target, Window,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::events::Callbacks;
use crate::spare::NativeSpare;

/// A dictionary with all of these keys; `None` where the library decides.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Options {
    target: String,
    budget: Option<u64>,
    device_budget: Option<u64>,
    /// Layers; zero for all of them.
    window: Option<u32>,
    prefetch: Option<u32>,
    /// How often the layers come; zero for without end.
    passes: Option<u64>,
    /// Names of the layers that stay from the first pass to the last.
    keep: Option<Vec<String>>,
    /// Names of layers, in the order in which they are handed out.
    call_order: Option<Vec<String>>,
    /// Names of tensors.
    select: Option<HashSet<String>>,
    order: String,
    io: Option<String>,
    readers: Option<u32>,
    dtype: Option<String>,
    quantise: Option<String>,
    /// Names of the tensors that are quantised, instead of the rule.
    quantise_only: Option<HashSet<String>>,
    device_reserve: Option<u64>,
    read_through: Option<u64>,
    /// Number of this rank and of all.
    shard: Option<(u32, u32)>,
    /// How tensors are cut among the ranks, by name; `None` for one that every rank gets whole.
    /// What is not listed goes by the table of common architectures.
    cuts: HashMap<String, Option<Cut>>,
    /// Number of this rank and of all, which share the tensors among them, each whole.
    share: Option<(u32, u32)>,
    /// Hashes tensors on the way.
    hash: bool,
    /// The text of a file of layer rules.
    layer_map: Option<String>,
    on_layer: Option<Py<PyAny>>,
    on_pass: Option<Py<PyAny>>,
    stall_seconds: Option<f64>,
    spare: Option<Py<NativeSpare>>,
}

/// Dimension, number of fused blocks, multiple that the dimension is padded to, and range.
type Cut = (usize, u64, Option<u64>, Option<(u64, u64)>);

impl Options {
    /// Where the load goes.
    pub(crate) fn target(&self) -> PyResult<Target> {
        self.target
            .parse()
            .map_err(|error| PyValueError::new_err(format!("device {:?}: {error}", self.target)))
    }

    /// The options as the library has them.
    fn load_options(&self) -> PyResult<LoadOptions> {
        let mut options = LoadOptions::default();
        // The consumer's stream waits for the copies when a tensor is exported to it.
        options.hand_out = HandOut::AtOnce;
        options.order = order(&self.order)?;
        options.host_budget_bytes = self.budget.unwrap_or(options.host_budget_bytes);
        options.device_budget_bytes = self.device_budget;
        options.window = match self.window {
            None => options.window,
            Some(0) => Window::All,
            Some(layers) => Window::Layers(layers),
        };
        options.prefetch_layers = self.prefetch.unwrap_or(options.prefetch_layers);
        options.io = self.io.as_deref().map_or(Ok(options.io), io)?;
        options.readers = self.readers.map(|threads| threads.max(1));
        options.dtype = self.dtype.as_deref().map(float).transpose()?;
        options.quantise = self.quantise.as_deref().map(quantisation).transpose()?;
        options.device_reserve_bytes = self.device_reserve.unwrap_or(options.device_reserve_bytes);
        options.hash = self.hash;
        options.hole_bytes_max = self.read_through.unwrap_or(options.hole_bytes_max);
        options.passes = match self.passes {
            None => options.passes,
            Some(0) => Passes::Endless,
            Some(times) => Passes::Times(times),
        };
        if let Some(seconds) = self.stall_seconds {
            options.stall_timeout = Duration::try_from_secs_f64(seconds)
                .map_err(|error| PyValueError::new_err(format!("on_stall={seconds}: {error}")))?;
        }
        Ok(options)
    }

    /// A builder with these settings, and the callbacks of the load.
    pub(crate) fn builder(self) -> PyResult<(LoaderBuilder, Callbacks)> {
        let mut builder = Loader::builder(self.target()?).options(self.load_options()?);
        if let Some(text) = &self.layer_map {
            builder = builder.layer_map(layer_map(text)?);
        }
        if let Some((rank, world)) = self.share {
            builder = builder.share(ranked(rank, world)?);
        }
        if let Some(names) = self.select {
            builder = builder.select(move |tensor| names.contains(tensor.name));
        }
        if let Some(names) = self.quantise_only {
            builder = builder.quantise_only(move |tensor| names.contains(tensor.name));
        }
        if let Some(layers) = self.keep {
            builder = builder.keep(Keep::Layers(layers.iter().map(|id| LayerId::new(id)).collect()));
        }
        if let Some(layers) = self.call_order {
            builder = builder.call_order(layers.iter().map(|id| LayerId::new(id)));
        }
        if let Some(spare) = &self.spare {
            builder = builder.spare_memory(&spare.get().inner);
        }
        if let Some((rank, world)) = self.shard {
            let cuts = self.cuts;
            let rules = SplitRules::common().with(move |tensor| cut(cuts.get(tensor.name)?));
            builder = builder.shard(ranked(rank, world)?, rules);
        }
        Ok(Callbacks::attach(builder, self.on_layer, self.on_pass))
    }
}

fn cut(cut: &Option<Cut>) -> Option<Split> {
    Some(match *cut {
        None => Split::Whole,
        Some((axis, _, _, Some((start, end)))) => Split::Range { axis, range: start..end },
        Some((axis, _, Some(multiple), None)) => Split::Padded { axis, multiple },
        Some((axis, blocks, None, None)) => Split::Even { axis, blocks },
    })
}

/// Layer rules, from the text of their file.
pub(crate) fn layer_map(text: &str) -> PyResult<LayerMap> {
    LayerMap::parse(text).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// A rank, if there is such a one.
pub(crate) fn ranked(rank: u32, world: u32) -> PyResult<Rank> {
    let message = || format!("rank {rank} of {world}: expected a number from 0 to below the number of ranks");
    Rank::new(rank, world).ok_or_else(|| PyValueError::new_err(message()))
}

fn order(name: &str) -> PyResult<ReadOrder> {
    match name {
        "execution" => Ok(ReadOrder::Layers),
        "file" => Ok(ReadOrder::Files),
        _ => Err(unknown("order", name, "execution, file")),
    }
}

pub(crate) fn io(name: &str) -> PyResult<IoMode> {
    let modes = [IoMode::Auto, IoMode::Buffered, IoMode::Direct, IoMode::Mmap, IoMode::Uring];
    let found = modes.into_iter().find(|mode| mode.to_string() == name);
    found.ok_or_else(|| unknown("io", name, "auto, buffered, direct, mmap, uring"))
}

pub(crate) fn float(name: &str) -> PyResult<FloatType> {
    let types = [FloatType::Bf16, FloatType::F16, FloatType::F32];
    let found = types.into_iter().find(|float| float.to_string().eq_ignore_ascii_case(name));
    found.ok_or_else(|| unknown("dtype", name, "bf16, f16, f32"))
}

pub(crate) fn quantisation(name: &str) -> PyResult<Quantisation> {
    name.parse().map_err(|_| unknown("quantise", name, "int8, fp8, int4, int4-g32, int4-g64, int4-g128"))
}

pub(crate) fn unknown(option: &str, found: &str, expected: &str) -> PyErr {
    PyValueError::new_err(format!("{option}={found:?}: expected one of {expected}"))
}
