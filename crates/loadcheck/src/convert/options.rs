//! From the command line and the files it names to the library's settings of a conversion.

use std::path::Path;
use std::sync::Arc;

use onelayer::convert::{Conversion, Experts, Grouping, KernelCopy};
use onelayer::layers::LayerMap;

use super::observer::Observer;
use super::patterns::Selection;
use super::rules::{DtypeRules, RULES_BYTES_MAX};
use super::survey::Survey;
use crate::args::{ConvertArgs, ExpertsArg, name_of};
use crate::config::Opening;
use crate::config::bad_pattern;
use crate::inputs::layer_map;
use crate::problem::{Code, Problem};
use crate::report::ConvertParams;
use crate::shell::shell_word;
use onelayer_system::small_file;

/// The command line and the contents of the files it names.
#[derive(Debug)]
pub(crate) struct Options {
    /// The command line.
    pub(crate) args: ConvertArgs,
    /// Rules for layers.
    pub(crate) map: LayerMap,
    rules: Option<Arc<DtypeRules>>,
    /// `--quantise-only`.
    quantise_only: Option<regex::Regex>,
}

/// Settings for one source.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Settings for the library.
    pub(crate) conversion: Conversion,
    /// Settings for the report.
    pub(crate) params: ConvertParams,
    selection: Arc<Selection>,
    rules: Option<Arc<DtypeRules>>,
}

impl Options {
    /// Reads the files that the command line names. All of them are checked, even after a problem.
    pub(crate) fn read(args: &ConvertArgs) -> (Self, Vec<Problem>) {
        let mut problems = Vec::new();
        let map = layer_map(args.files.layers.as_deref()).unwrap_or_else(|problem| {
            problems.push(problem);
            LayerMap::default()
        });
        let rules =
            args.tensors.dtype_rules.as_deref().and_then(|path| {
                read_rules(path).map_err(|problem| problems.push(problem)).ok().map(Arc::new)
            });
        let only = args.tensors.quantise_only.as_deref().map(regex::Regex::new).transpose();
        let quantise_only = only.unwrap_or_else(|error| {
            problems.push(bad_pattern("--quantise-only", &error));
            None
        });
        problems.extend(no_directory(&args.target));
        (Self { args: args.clone(), map, rules, quantise_only }, problems)
    }

    /// The file of layer rules.
    pub(crate) fn map_path(&self) -> Option<&Path> {
        self.args.files.layers.as_deref()
    }

    /// How the files of the source are opened.
    pub(crate) fn opening(&self) -> Opening {
        let tensors = &self.args.tensors;
        Opening { prefix: tensors.prefix.clone(), hf_names: tensors.names.is_some(), ..Opening::default() }
    }

    /// The library's settings, with patterns and sizes resolved against the source.
    ///
    /// # Errors
    /// Patterns that are none, sizes that relate to something unknown.
    pub(crate) fn settle(&self, survey: &Survey, observer: &Observer) -> Result<Settings, Vec<Problem>> {
        let ConvertArgs { files, tensors, work, .. } = &self.args;
        let selection = Selection::new(&tensors.select, &tensors.exclude, &|id| survey.is_layer(id));
        let budget_bytes = survey.context.resolve("--budget", work.budget);
        let shard_bytes =
            files.max_shard_size.map(|size| survey.context.resolve("--max-shard-size", size)).transpose();
        let (selection, budget_bytes, shard_bytes) = match (selection, budget_bytes, shard_bytes) {
            (Ok(selection), Ok(budget_bytes), Ok(shard_bytes)) => (selection, budget_bytes, shard_bytes),
            (selection, budget, shard) => {
                let mut problems = selection.err().unwrap_or_default();
                problems.extend(budget.err().into_iter().chain(shard.err()));
                return Err(problems);
            }
        };
        let selection = Arc::new(selection);
        let params = self.params(budget_bytes);
        let mut conversion = self.plain(budget_bytes).describe_options(params.options.iter().cloned());
        if let Some(bytes) = shard_bytes {
            conversion = conversion.max_shard_bytes(bytes);
        }
        if !selection.is_everything() {
            let selection = Arc::clone(&selection);
            conversion = conversion.select(move |tensor, layer| selection.takes(tensor.name, layer.as_str()));
        }
        if let Some(rules) = &self.rules {
            let rules = Arc::clone(rules);
            conversion = conversion.dtype_rule(move |tensor| rules.decide(tensor.name));
        }
        let observer = observer.clone();
        let conversion = conversion.observe(move |event| observer.hear(event));
        Ok(Settings { conversion, params, selection, rules: self.rules.clone() })
    }

    /// The settings that depend on neither the source nor other files.
    fn plain(&self, budget_bytes: u64) -> Conversion {
        let ConvertArgs { files, tensors, work, output, .. } = &self.args;
        let experts = match files.experts {
            Some(ExpertsArg::PerFile) => Experts::PerFile,
            Some(ExpertsArg::Together) | None => Experts::Together,
        };
        let mut conversion = Conversion::new()
            .open_options(self.opening().options())
            .host_budget(budget_bytes)
            .io(work.io.mode())
            .grouping(if files.merge { Grouping::Merged } else { Grouping::PerLayer })
            .experts(experts)
            .layer_map(self.map.clone())
            .drop_duplicates(tensors.drop_duplicates)
            .sha256(work.sha256)
            .verify(work.verify)
            .overwrite(output.force)
            .kernel_copy(if work.no_kernel_copy { KernelCopy::Never } else { KernelCopy::Auto });
        if let Some(jobs) = work.jobs {
            conversion = conversion.jobs(jobs);
        }
        if let Some(dtype) = tensors.dtype {
            conversion = conversion.dtype(dtype);
        }
        if let Some(form) = tensors.quantise {
            conversion = conversion.quantise(form.0);
        }
        if let Some(only) = self.quantise_only.clone() {
            conversion = conversion.quantise_only(move |tensor| only.is_match(tensor.name));
        }
        if let Some(part) = work.part {
            conversion = conversion.part(part);
        }
        conversion
    }

    fn params(&self, budget_bytes: u64) -> ConvertParams {
        let work = &self.args.work;
        ConvertParams {
            budget_bytes,
            io: name_of(work.io),
            jobs: work.jobs.map(u64::from),
            verify: work.verify,
            kernel_copy: !work.no_kernel_copy,
            options: self.described(),
        }
    }

    /// Every option that affects the written bytes, as it was given; rules are listed one by one.
    fn described(&self) -> Vec<String> {
        let ConvertArgs { files, tensors, work, .. } = &self.args;
        let path = |flag: &str, path: &Path| format!("{flag} {}", shell_word(&path.to_string_lossy()));
        let mut options = Vec::new();
        options.extend(files.max_shard_size.map(|size| format!("--max-shard-size {size}")));
        options.extend(tensors.prefix.iter().map(|prefix| format!("--prefix {}", shell_word(prefix))));
        options.extend(tensors.names.map(|names| format!("--names {}", name_of(names))));
        options.extend(files.experts.map(|experts| format!("--experts {}", name_of(experts))));
        options.extend(files.merge.then(|| "--merge".to_owned()));
        options.extend(files.layers.as_deref().map(|file| path("--layers", file)));
        options.extend(tensors.dtype.map(|dtype| format!("--dtype {}", dtype.short_name())));
        options.extend(tensors.quantise.map(|form| format!("--quantise {form}")));
        options.extend(
            tensors.quantise_only.as_ref().map(|text| format!("--quantise-only {}", shell_word(text))),
        );
        options.extend(tensors.dtype_rules.as_deref().map(|file| path("--dtype-rules", file)));
        options.extend(self.rules.iter().flat_map(|rules| rules.lines()));
        options.extend(tensors.select.iter().map(|pattern| format!("--select {}", shell_word(pattern))));
        options.extend(tensors.exclude.iter().map(|pattern| format!("--exclude {}", shell_word(pattern))));
        options.extend(tensors.drop_duplicates.then(|| "--drop-duplicates".to_owned()));
        options.extend(work.sha256.then(|| "--sha256".to_owned()));
        options
    }
}

impl Settings {
    /// Remarks on patterns and rules that matched nothing. Call after every tensor was decided.
    pub(crate) fn notes(&self) -> Vec<String> {
        let rules = self.rules.iter().flat_map(|rules| rules.idle());
        self.selection.idle().chain(rules).collect()
    }
}

fn read_rules(path: &Path) -> Result<DtypeRules, Problem> {
    let failed = |error: &dyn std::fmt::Display| {
        Problem::new(Code::DtypeRules, format!("cannot use the dtype rules: {error}"))
            .at(path.display().to_string())
    };
    let text = small_file::read(path, RULES_BYTES_MAX).map_err(|error| failed(&error))?;
    let text = String::from_utf8(text).map_err(|error| failed(&error))?;
    DtypeRules::parse(&text).map_err(|error| failed(&error))
}

/// A URL is a valid path, but hardly ever the intended one.
fn no_directory(target: &Path) -> Option<Problem> {
    let text = target.to_str()?;
    let (scheme, _) = text.split_once("://")?;
    let problem =
        Problem::new(Code::TargetRefused, format!("{scheme}:// addresses are not written by this version"));
    Some(problem.at(text).help("convert into a local directory, then copy it"))
}
