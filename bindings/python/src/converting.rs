//! Conversions and verifications, as the Python half asks for them.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use onelayer::checkpoint::{OpenOptions, TensorNames};
use onelayer::convert::{
    Casting, Conversion, ConvertReport, Experts, Grouping, KernelCopy, Part, Verification, VerifyReport,
    WriteMode,
};
use onelayer::layers::LayerMap;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors;
use crate::options::{float, io, layer_map, quantisation, unknown};
use crate::watched;

/// A dictionary with all of these keys; `None` where the library decides.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct ConvertOptions {
    opening: Opening,
    budget: Option<u64>,
    io: Option<String>,
    jobs: Option<u32>,
    grouping: String,
    experts: String,
    max_shard: Option<u64>,
    layer_map: Option<String>,
    dtype: Option<String>,
    /// Names of tensors that a rule decides about, with their type; `None` keeps it.
    dtype_rules: HashMap<String, Option<String>>,
    quantise: Option<String>,
    quantise_only: Option<HashSet<String>>,
    select: Option<HashSet<String>>,
    drop_duplicates: bool,
    sha256: bool,
    verify: bool,
    overwrite: bool,
    part: Option<(u32, u32)>,
    kernel_copy: String,
    /// For the manifest.
    described: Vec<String>,
}

/// A dictionary with all of these keys; `None` where the library decides.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct VerifyOptions {
    opening: Opening,
    budget: Option<u64>,
    io: Option<String>,
    jobs: Option<u32>,
}

/// How a checkpoint is opened.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Opening {
    header_bytes_max: Option<u64>,
    allow_opaque_dtypes: bool,
    prefix: Option<String>,
    names: Option<String>,
}

impl Opening {
    /// The options as the library has them.
    pub(crate) fn options(&self) -> OpenOptions {
        let names = if self.names.is_some() { TensorNames::HuggingFace } else { TensorNames::AsStored };
        let options = OpenOptions::new().allow_opaque_dtypes(self.allow_opaque_dtypes).names(names);
        let options = match self.prefix.as_deref() {
            None => options,
            Some("") => options.whole_file(),
            Some(prefix) => options.select(prefix),
        };
        match self.header_bytes_max {
            Some(bytes) => options.header_bytes_max(bytes),
            None => options,
        }
    }
}

impl ConvertOptions {
    fn conversion(self) -> PyResult<Conversion> {
        let mut conversion = Conversion::new()
            .open_options(self.opening.options())
            .grouping(grouping(&self.grouping)?)
            .experts(experts(&self.experts)?)
            .kernel_copy(kernel_copy(&self.kernel_copy)?)
            .layer_map(self.layer_map.as_deref().map_or(Ok(LayerMap::default()), layer_map)?)
            .drop_duplicates(self.drop_duplicates)
            .sha256(self.sha256)
            .verify(self.verify)
            .overwrite(self.overwrite)
            .describe_options(self.described);
        if let Some(bytes) = self.budget {
            conversion = conversion.host_budget(bytes);
        }
        if let Some(mode) = &self.io {
            conversion = conversion.io(io(mode)?);
        }
        if let Some(threads) = self.jobs {
            conversion = conversion.jobs(threads);
        }
        if let Some(bytes) = self.max_shard {
            conversion = conversion.max_shard_bytes(bytes);
        }
        if let Some(dtype) = &self.dtype {
            conversion = conversion.dtype(float(dtype)?);
        }
        if let Some(form) = &self.quantise {
            conversion = conversion.quantise(quantisation(form)?);
        }
        if let Some(names) = self.quantise_only {
            conversion = conversion.quantise_only(move |tensor| names.contains(tensor.name));
        }
        if let Some(names) = self.select {
            conversion = conversion.select(move |tensor, _| names.contains(tensor.name));
        }
        if !self.dtype_rules.is_empty() {
            let casting = |dtype: Option<String>| match dtype {
                None => Ok(Casting::Keep),
                Some(dtype) => float(&dtype).map(Casting::To),
            };
            let rules = self.dtype_rules.into_iter();
            let rules = rules.map(|(name, dtype)| Ok((name, casting(dtype)?)));
            let rules = rules.collect::<PyResult<HashMap<String, Casting>>>()?;
            conversion = conversion.dtype_rule(move |tensor| rules.get(tensor.name).copied());
        }
        if let Some((number, of)) = self.part {
            conversion = conversion.part(part(number, of)?);
        }
        Ok(conversion)
    }
}

fn part(number: u32, of: u32) -> PyResult<Part> {
    let message = || format!("part=({number}, {of}): expected a number from 1 to the number of parts");
    Part::new(number, of).ok_or_else(|| PyValueError::new_err(message()))
}

fn grouping(name: &str) -> PyResult<Grouping> {
    match name {
        "per-layer" => Ok(Grouping::PerLayer),
        "merged" => Ok(Grouping::Merged),
        _ => Err(unknown("grouping", name, "per-layer, merged")),
    }
}

fn experts(name: &str) -> PyResult<Experts> {
    match name {
        "together" => Ok(Experts::Together),
        "per-file" => Ok(Experts::PerFile),
        _ => Err(unknown("experts", name, "together, per-file")),
    }
}

fn kernel_copy(name: &str) -> PyResult<KernelCopy> {
    match name {
        "auto" => Ok(KernelCopy::Auto),
        "never" => Ok(KernelCopy::Never),
        "always" => Ok(KernelCopy::Always),
        _ => Err(unknown("kernel_copy", name, "auto, never, always")),
    }
}

/// The report of a conversion; a dictionary in Python.
#[derive(IntoPyObject)]
pub(crate) struct ConvertParts {
    seconds: f64,
    files_written: u64,
    files_kept: u64,
    written_bytes: u64,
    read_bytes: u64,
    side_files: u64,
    is_complete: bool,
    write_mode: Option<String>,
    cloned_bytes: u64,
    copied_bytes: u64,
    fallbacks: Vec<String>,
    notes: Vec<String>,
    /// Tensor, largest magnitude, largest and root-mean-square error.
    quantisation: Vec<(String, f32, f32, f32)>,
    verification: Option<VerifyParts>,
}

/// The report of a verification; a dictionary in Python.
#[derive(IntoPyObject)]
pub(crate) struct VerifyParts {
    files: u64,
    tensors: u64,
    nbytes: u64,
    /// Place and fault.
    differences: Vec<(String, String)>,
    notes: Vec<String>,
}

/// Converts, or with `finish` writes index and manifest of a conversion in parts. `progress` is
/// called with the bytes done and in all.
#[pyfunction]
pub(crate) fn convert(
    py: Python<'_>,
    source: PathBuf,
    target: PathBuf,
    options: ConvertOptions,
    finish: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<ConvertParts> {
    let (reporter, watch) = watched::watch();
    let reporter = Mutex::new(reporter);
    let settings = options.conversion()?.observe(move |event| {
        reporter.lock().unwrap_or_else(PoisonError::into_inner).hear(event);
    });
    let prepared = py.detach(|| settings.prepare(&source, &target).map_err(Box::new));
    let prepared = prepared.map_err(|error| errors::of_convert(py, &error))?;
    let cancel = prepared.cancel_handle();
    let report = watch.run(py, progress.as_ref(), &cancel, move || {
        let report = if finish { prepared.finish() } else { prepared.run() };
        report.map_err(Box::new)
    })?;
    report.map(ConvertParts::new).map_err(|error| errors::of_convert(py, &error))
}

/// Checks a checkpoint by its manifest, and against its source.
#[pyfunction]
pub(crate) fn verify(
    py: Python<'_>,
    directory: PathBuf,
    against: Option<PathBuf>,
    options: VerifyOptions,
    progress: Option<Py<PyAny>>,
) -> PyResult<VerifyParts> {
    let mut verification = Verification::new().open_options(options.opening.options());
    if let Some(bytes) = options.budget {
        verification = verification.host_budget(bytes);
    }
    if let Some(mode) = &options.io {
        verification = verification.io(io(mode)?);
    }
    if let Some(threads) = options.jobs {
        verification = verification.jobs(threads);
    }
    let (reporter, watch) = watched::watch();
    let cancel = verification.cancel_handle();
    let report = watch.run(py, progress.as_ref(), &cancel, move || {
        let found = verification.run(&directory, against.as_deref(), &mut |event| reporter.hear(event));
        found.map_err(Box::new)
    })?;
    report.map(VerifyParts::new).map_err(|error| errors::of_convert(py, &error))
}

impl ConvertParts {
    fn new(report: ConvertReport) -> Self {
        let write_mode = report.write_mode.map(|mode| match mode {
            WriteMode::Direct => "direct".to_owned(),
            WriteMode::DropBehind { reason } => {
                format!("through the page cache, dropped on the way: {reason}")
            }
            _ => "another way".to_owned(),
        });
        let errors = report.quantisation.into_iter();
        Self {
            seconds: report.elapsed.as_secs_f64(),
            files_written: report.files_written,
            files_kept: report.files_kept,
            written_bytes: report.written_bytes,
            read_bytes: report.read_bytes,
            side_files: report.side_files,
            is_complete: report.is_complete,
            write_mode,
            cloned_bytes: report.kernel_copied.cloned_bytes,
            copied_bytes: report.kernel_copied.copied_bytes,
            fallbacks: report.fallbacks.into_iter().map(|fallback| fallback.reason).collect(),
            notes: report.notes,
            quantisation: errors
                .map(|(name, error)| (name, error.max_abs, error.max_abs_error, error.rms_error))
                .collect(),
            verification: report.verification.map(VerifyParts::new),
        }
    }
}

impl VerifyParts {
    fn new(report: VerifyReport) -> Self {
        let differences = report.differences.into_iter();
        Self {
            files: report.files,
            tensors: report.tensors,
            nbytes: report.bytes,
            differences: differences.map(|difference| (difference.place, difference.what)).collect(),
            notes: report.notes,
        }
    }
}
