//! The values that flags take: their spellings, and what they mean.

use clap::ValueEnum;
use onelayer::{IoMode, Target};
use serde::{Deserialize, Serialize};

use crate::sizes::Size;

/// A value as the command line and reports spell it.
pub(crate) fn name_of(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The value of that name. The error lists all names of this kind.
pub(super) fn by_name<T: ValueEnum>(kind: &str, name: &str) -> Result<T, String> {
    T::from_str(name, false).map_err(|_| {
        let known: Vec<String> = T::value_variants().iter().cloned().map(name_of).collect();
        format!("no {kind} is called `{name}`; there are {}", known.join(", "))
    })
}

/// Why a regular expression does not compile: the last line of the error. Those before it show the
/// place.
pub(crate) fn reason_of(error: &regex::Error) -> String {
    let text = error.to_string();
    text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

/// `--io`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Io {
    /// for each file and each read, what suits it
    Auto,
    /// pread through the page cache
    Buffered,
    /// windows of a mapping, dropped behind the cursor
    Mmap,
    /// past the page cache (O_DIRECT)
    Direct,
    /// the same, by a queue of the kernel's (io_uring)
    Uring,
}

impl Io {
    /// The library's.
    pub(crate) const fn mode(self) -> IoMode {
        match self {
            Self::Auto => IoMode::Auto,
            Self::Buffered => IoMode::Buffered,
            Self::Mmap => IoMode::Mmap,
            Self::Direct => IoMode::Direct,
            Self::Uring => IoMode::Uring,
        }
    }
}

/// `--device`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Device {
    /// The first CUDA device, or the host where none can be used.
    Auto,
    /// Memory of this process.
    Host,
    /// Nowhere: bytes are read, hashed if asked, and dropped.
    None,
    /// A CUDA device.
    Cuda(u32),
}

impl std::str::FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cuda" => Ok(Self::Cuda(0)),
            _ => match text.parse() {
                Ok(Target::Host) => Ok(Self::Host),
                Ok(Target::None) => Ok(Self::None),
                Ok(Target::Cuda(ordinal)) => Ok(Self::Cuda(ordinal)),
                _ => Err("write auto, host, none or cuda:N".to_owned()),
            },
        }
    }
}

impl Device {
    /// Where layers go; the host as long as nothing has been decided.
    pub(crate) const fn target(self) -> Target {
        match self {
            Self::Auto | Self::Host => Target::Host,
            Self::None => Target::None,
            Self::Cuda(ordinal) => Target::Cuda(ordinal),
        }
    }

    /// True if its memory can be measured as VRAM.
    pub(crate) const fn has_own_memory(self) -> bool {
        matches!(self, Self::Cuda(_))
    }
}

/// `--window`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Window {
    /// Every layer stays.
    All,
    /// So many at once.
    Layers(u32),
    /// As many as fit so many bytes.
    Bytes(u64),
}

impl std::str::FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text.parse(), text.parse()) {
            _ if text == "all" => Ok(Self::All),
            (Ok(0), _) => {
                Err("write a number of layers, at least 1, `all`, or a size such as 2GiB".to_owned())
            }
            (Ok(layers), _) => Ok(Self::Layers(layers)),
            (Err(_), Ok(Size::Bytes(bytes))) if !text.bytes().all(|byte| byte.is_ascii_digit()) => {
                Ok(Self::Bytes(bytes))
            }
            (Err(_), _) => {
                Err("write a number of layers, at least 1, `all`, or a size such as 2GiB".to_owned())
            }
        }
    }
}

/// `--experts`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExpertsArg {
    /// in the file of their layer
    Together,
    /// each in a file of its own
    PerFile,
}

/// `--names`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NamesArg {
    /// those of Hugging Face models
    Hf,
}

/// `--cache`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) enum CacheArg {
    /// drop the source's pages first, and check
    Cold,
    /// read the source first
    Warm,
    /// leave it as it is
    Asis,
}

/// `--format`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// table on a terminal, plain elsewhere
    Auto,
    /// for people, with colour where allowed
    Table,
    /// for people, never coloured
    Plain,
    /// one JSON object, schema loadcheck/1
    Json,
    /// one JSON object a row
    Jsonl,
    /// Markdown
    Md,
    /// comma-separated values, one row a run or layer
    Csv,
    /// workflow commands for GitHub Actions, with a job summary
    Github,
}

/// `--progress`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProgressArg {
    /// bar on a terminal, plain elsewhere
    Auto,
    /// a bar
    Bar,
    /// a line every 10 %
    Plain,
    /// one JSON object a line
    Json,
    /// nothing
    Never,
}

/// `--color`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorArg {
    /// on a terminal
    Auto,
    /// also in a pipe
    Always,
    /// not at all
    Never,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_windows() {
        assert_eq!("cuda:3".parse(), Ok(Device::Cuda(3)));
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        assert_eq!("all".parse(), Ok(Window::All));
        assert_eq!("2".parse(), Ok(Window::Layers(2)));
        assert_eq!("2GiB".parse(), Ok(Window::Bytes(2 << 30)));
        for text in ["gpu", "cuda:", "cuda:-1", "cuda:+1", "cuda:0 ", ""] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
        for text in ["0", "-1", "some", "", "4294967296", "50%", "2x-layer"] {
            assert!(text.parse::<Window>().is_err(), "{text}");
        }
    }
}
