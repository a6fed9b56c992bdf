//! What a load needs, resolved and typed: made from the command line by the parent, read from JSON by its worker.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use onelayer::plan::HOST_BUDGET_FLOOR_BYTES;
use onelayer::units::HumanBytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::args::{Device, Io, LoadArgs, Window};
use crate::problem::{Code, Problem};
use crate::report::Params;
use crate::sizes::Size;

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

/// Where layers go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TargetChoice {
    /// Memory of the worker.
    Host,
    /// Nowhere.
    None,
}

impl TargetChoice {
    /// As in the report.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::None => "none",
        }
    }
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
    /// Where layers go.
    pub(crate) target: TargetChoice,
    /// Layers resident at once; `None` is all.
    pub(crate) window: Option<u32>,
    /// Layers read ahead.
    pub(crate) prefetch: u32,
    /// Threads that read; `None` leaves it to the plan.
    pub(crate) readers: Option<u32>,
    /// Only tensors whose name matches.
    pub(crate) select: Option<String>,
    /// Hash every tensor.
    pub(crate) hash: bool,
    /// File with layer rules.
    pub(crate) layers: Option<RawPath>,
    /// Unknown dtypes pass as bytes.
    pub(crate) opaque_dtypes: bool,
}

impl LoadConfig {
    /// The configuration that `args` asks for, and everything about it that cannot be.
    pub(crate) fn new(args: &LoadArgs, hash: bool, path: PathBuf) -> (Self, Vec<Problem>) {
        let mut problems = Vec::new();
        let target = match args.device {
            Device::Auto | Device::Host => TargetChoice::Host,
            Device::None => TargetChoice::None,
            Device::Cuda(index) => {
                problems.push(
                    Problem::new(
                        Code::NoDevice,
                        format!(
                            "cannot use --device cuda:{index}: this build of loadcheck has no CUDA device"
                        ),
                    )
                    .help("--device host keeps the layers in memory, --device none only reads them"),
                );
                TargetChoice::Host
            }
        };
        let mut select = args.select.clone();
        if let Some(Err(error)) = args.select.as_deref().map(regex::Regex::new) {
            problems.push(bad_pattern("--select", &error));
            // The rest can still be checked without it.
            select = None;
        }
        let window = match args.window {
            Window::All => None,
            Window::Layers(layers) => Some(layers),
        };
        let config = Self {
            path: RawPath(path),
            budget: args.budget,
            io: args.io,
            target,
            window,
            prefetch: args.prefetch,
            readers: args.readers,
            select,
            hash,
            layers: args.layers.clone().map(RawPath),
            opaque_dtypes: args.opaque_dtypes,
        };
        (config, problems)
    }

    /// A budget that works for no checkpoint: what can be said about it where there is no checkpoint to plan for.
    pub(crate) fn below_floor(&self, known: &[Problem]) -> Option<Problem> {
        let Size::Bytes(budget_bytes) = self.budget else { return None };
        let is_known = known.iter().any(|problem| problem.code == Code::BudgetTooSmall);
        if is_known || budget_bytes >= HOST_BUDGET_FLOOR_BYTES {
            return None;
        }
        let (budget, floor) = (HumanBytes(budget_bytes), HumanBytes(HOST_BUDGET_FLOOR_BYTES));
        let message = format!(
            "budget {budget} is below the floor of {floor}, and of what the checkpoint's description takes"
        );
        Some(
            Problem::new(Code::BudgetTooSmall, message).help("`loadcheck inspect` shows the smallest budget"),
        )
    }

    /// The parameters as a report has them.
    pub(crate) fn params(&self, budget_bytes: u64, readers: Option<u64>) -> Params {
        let io = match self.io {
            Io::Buffered => "buffered",
            Io::Mmap => "mmap",
            Io::Direct => "direct",
        };
        Params {
            budget_bytes,
            prefetch: u64::from(self.prefetch),
            window: self.window.map(u64::from),
            io: io.to_owned(),
            device: self.target.name().to_owned(),
            readers,
            hash: self.hash,
        }
    }
}

/// A regular expression that does not compile: its message has the place in several lines, only the last one says what.
pub(crate) fn bad_pattern(flag: &str, error: &regex::Error) -> Problem {
    let text = error.to_string();
    let reason = text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
    Problem::new(Code::BadPattern, format!("{flag}: {reason}"))
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
