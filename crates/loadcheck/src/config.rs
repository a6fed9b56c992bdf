//! The configuration of a load: made from the command line by the parent, read from JSON
//! by its worker.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use onelayer::Target;
use onelayer::plan::{FloatType, HOST_BUDGET_FLOOR_BYTES};
use onelayer::units::HumanBytes;
use onelayer::{OpenOptions, TensorNames};
use onelayer_fit::DeviceMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::args::{Device, Io, LoadArgs, PassesArgs, Quantise, RankArgs, Window, name_of, reason_of};
use crate::problem::{Code, Problem};
use crate::report::Params;
use crate::sizes::{Size, SizeContext};

/// A path that survives JSON even where it is no UTF-8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RawPath(pub(crate) PathBuf);

impl Serialize for RawPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.to_str() {
            Some(text) => serializer.serialize_str(text),
            None => self.0.as_os_str().as_bytes().serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for RawPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Text(String),
            Bytes(Vec<u8>),
        }
        Ok(Self(match Form::deserialize(deserializer)? {
            Form::Text(text) => text.into(),
            Form::Bytes(bytes) => OsString::from_vec(bytes).into(),
        }))
    }
}

/// What a load may hold, in bytes: a configuration's sizes once the headers have told what they
/// relate to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Budgets {
    /// Of host memory.
    pub(crate) host_bytes: u64,
    /// Of the device's memory, for layers; `None` is no such limit.
    pub(crate) device_bytes: Option<u64>,
    /// Of the device's memory, to stay free.
    pub(crate) device_reserve_bytes: u64,
}

/// How a load is done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LoadConfig {
    /// The checkpoint.
    pub(crate) path: RawPath,
    /// Host budget, perhaps relative to what only the headers tell.
    pub(crate) budget: Size,
    /// How files are read.
    pub(crate) io: Io,
    /// Most device memory for layers.
    pub(crate) device_budget: Option<Size>,
    /// Device memory that stays free.
    pub(crate) device_reserve: Size,
    /// Where layers go. `auto` until a worker has looked at the machine.
    pub(crate) device: Device,
    /// Where each layer goes, instead of all of them to `device`.
    pub(crate) device_map: Option<DeviceMap>,
    /// The type that wider floats are narrowed to.
    pub(crate) dtype: Option<FloatType>,
    /// The form that weights are quantised to.
    pub(crate) quantise: Option<Quantise>,
    /// Only weights whose name matches are.
    pub(crate) quantise_only: Option<String>,
    /// Layers resident at once; `None` is all, or as many as fit.
    pub(crate) window: Option<u32>,
    /// Bytes of layers resident at once, if that is what is bounded.
    pub(crate) window_bytes: Option<u64>,
    /// How often the layers come, and which of them stay.
    pub(crate) passes: PassesArgs,
    /// How long each layer is held.
    pub(crate) engine_time: Duration,
    /// Layers read ahead.
    pub(crate) prefetch: u32,
    /// Threads that read; `None` leaves it to the plan.
    pub(crate) readers: Option<u32>,
    /// Only tensors whose name matches.
    pub(crate) select: Option<String>,
    /// Which rank's part is loaded, if it is one of several.
    pub(crate) ranks: RankArgs,
    /// Hash every tensor.
    pub(crate) hash: bool,
    /// Read every tensor back and compare it with its file.
    pub(crate) verify: bool,
    /// File with layer rules.
    pub(crate) layers: Option<RawPath>,
    /// How files are opened.
    pub(crate) opening: Opening,
}

/// How the files of a checkpoint are opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opening {
    /// The dictionary of a PyTorch file that is read; empty for the whole file.
    pub(crate) prefix: Option<String>,
    /// Unknown dtypes pass as bytes.
    pub(crate) opaque_dtypes: bool,
    /// GGUF files get the names of Hugging Face models.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) hf_names: bool,
}

impl Opening {
    /// The library's options.
    pub(crate) fn options(&self) -> OpenOptions {
        let names = if self.hf_names { TensorNames::HuggingFace } else { TensorNames::AsStored };
        let options = OpenOptions::new().allow_opaque_dtypes(self.opaque_dtypes).names(names);
        match self.prefix.as_deref() {
            None => options,
            Some("") => options.whole_file(),
            Some(prefix) => options.select(prefix),
        }
    }
}

impl LoadConfig {
    /// The configuration that `args` asks for, and everything about it that cannot be.
    pub(crate) fn new(args: &LoadArgs, path: PathBuf) -> (Self, Vec<Problem>) {
        let mut problems = Vec::new();
        let mut select = args.select.clone();
        if let Some(Err(error)) = args.select.as_deref().map(regex::Regex::new) {
            problems.push(bad_pattern("--select", &error));
            // The rest can still be checked without it.
            select = None;
        }
        let mut quantise_only = args.quantise_only.clone();
        if let Some(Err(error)) = args.quantise_only.as_deref().map(regex::Regex::new) {
            problems.push(bad_pattern("--quantise-only", &error));
            quantise_only = None;
        }
        let window = match args.window {
            Window::All | Window::Bytes(_) => None,
            Window::Layers(layers) => Some(layers),
        };
        let window_bytes = match args.window {
            Window::Bytes(bytes) => Some(bytes),
            Window::All | Window::Layers(_) => None,
        };
        let config = Self {
            path: RawPath(path),
            budget: args.budget,
            io: args.io,
            device_budget: args.device_budget,
            device_reserve: args.device_reserve,
            device: args.device,
            device_map: None,
            dtype: args.dtype,
            quantise: args.quantise,
            quantise_only,
            window,
            window_bytes,
            passes: PassesArgs::default(),
            engine_time: Duration::ZERO,
            prefetch: args.prefetch,
            readers: args.readers,
            select,
            ranks: RankArgs::default(),
            hash: false,
            verify: false,
            layers: args.layers.clone().map(RawPath),
            opening: Opening {
                prefix: args.prefix.clone(),
                opaque_dtypes: args.opaque_dtypes,
                ..Opening::default()
            },
        };
        (config, problems)
    }

    /// The file with layer rules.
    pub(crate) fn layers_path(&self) -> Option<&Path> {
        self.layers.as_ref().map(|path| path.0.as_path())
    }

    /// True if every layer stays until the end.
    pub(crate) fn keeps_all(&self) -> bool {
        self.window.is_none() && self.window_bytes.is_none() && !self.passes.is_asked()
    }

    /// [`below_floor`] of its budget.
    pub(crate) fn below_floor(&self, known: &[Problem]) -> Option<Problem> {
        below_floor(self.budget, known)
    }

    /// The budgets of the load in bytes.
    ///
    /// # Errors
    /// A size that relates to something that is not known.
    pub(crate) fn budgets(&self, context: &SizeContext) -> Result<Budgets, Problem> {
        let on_device = context.of_device();
        let device_bytes = self.device_budget.map(|size| on_device.resolve("--device-budget", size));
        Ok(Budgets {
            host_bytes: context.resolve("--budget", self.budget)?,
            device_bytes: device_bytes.transpose()?,
            device_reserve_bytes: on_device.resolve("--device-reserve", self.device_reserve)?,
        })
    }

    /// Sizes that related to something are so many bytes from now on.
    pub(crate) fn settle(&mut self, budgets: &Budgets) {
        self.budget = Size::Bytes(budgets.host_bytes);
        self.device_budget = budgets.device_bytes.map(Size::Bytes);
        self.device_reserve = Size::Bytes(budgets.device_reserve_bytes);
    }

    /// The parameters as a report has them.
    pub(crate) fn params(&self, budgets: &Budgets, readers: Option<u64>) -> Params {
        Params {
            budget_bytes: budgets.host_bytes,
            prefetch: u64::from(self.prefetch),
            window: self.window.map(u64::from),
            window_bytes: self.window_bytes,
            passes: self.passes.is_asked().then_some(u64::from(self.passes.passes)),
            io: name_of(self.io),
            device: match &self.device_map {
                Some(_) => "map".to_owned(),
                None => self.device.target().to_string(),
            },
            readers,
            hash: self.hash,
            verify: self.verify,
            dtype: self.dtype.map(|dtype| dtype.short_name().to_owned()),
            quantise: self.quantise.map(|form| form.to_string()),
            tp: self.ranks.text(),
            device_budget_bytes: budgets.device_bytes,
            device_reserve_bytes: (self.device_map.is_some()
                || matches!(self.device.target(), Target::Cuda(_)))
            .then_some(budgets.device_reserve_bytes),
        }
    }
}

/// A budget that works for no checkpoint: what can be said about it where there is no checkpoint to
/// plan for.
pub(crate) fn below_floor(budget: Size, known: &[Problem]) -> Option<Problem> {
    let Size::Bytes(budget_bytes) = budget else { return None };
    let is_known = known.iter().any(|problem| problem.code == Code::BudgetTooSmall);
    if is_known || budget_bytes >= HOST_BUDGET_FLOOR_BYTES {
        return None;
    }
    let (budget, floor) = (HumanBytes(budget_bytes), HumanBytes(HOST_BUDGET_FLOOR_BYTES));
    let message = format!(
        "budget {budget} is below the floor of {floor}, and of what the checkpoint's description takes"
    );
    Some(Problem::new(Code::BudgetTooSmall, message).help("`loadcheck inspect` shows the smallest budget"))
}

/// A regular expression that does not compile.
pub(crate) fn bad_pattern(flag: &str, error: &regex::Error) -> Problem {
    Problem::new(Code::BadPattern, format!("{flag}: {}", reason_of(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_survive_json() {
        for bytes in [&b"a/b"[..], b"a/\xff\xfe", b""] {
            let path = RawPath(OsString::from_vec(bytes.to_vec()).into());
            let json = serde_json::to_string(&path).unwrap();
            assert_eq!(serde_json::from_str::<RawPath>(&json).unwrap(), path);
        }
    }

    #[test]
    fn patterns_are_explained_in_a_line() {
        #[expect(clippy::invalid_regex, reason = "that is the point")]
        let error = regex::Regex::new("a(").unwrap_err();
        assert_eq!(bad_pattern("--select", &error).message, "--select: unclosed group");
    }
}
