//! The flags for loads that go through the layers again and again, as an engine does.

use clap::Args;
use onelayer::{Keep, LayerId};
use serde::{Deserialize, Serialize};

/// What an engine would ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Load")]
pub(crate) struct PassesArgs {
    /// Decode steps: passes through all layers
    ///
    /// An engine makes one pass per token or batch, a decode step. From the second pass on nothing
    /// is allocated; the report has the time of each pass and the bottleneck: the disk, filling
    /// (casts and copies), the link, or the engine. Each layer is dropped as soon as it was delivered;
    /// `--window` says how many are there at once.
    #[arg(long, value_name = "N", default_value_t = 1, hide_short_help = true, alias = "decode-steps",
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) passes: u32,
    /// Layers that stay from pass to pass
    ///
    /// `none`; `outside`: those outside every stack (embedding, head, norm); or names, with commas
    /// between. They are read once, and their memory comes on top of the window.
    #[arg(long, value_name = "LAYERS", default_value = "none", hide_short_help = true)]
    pub(crate) keep: KeepArg,
}

impl PassesArgs {
    /// True if layers come more than once.
    pub(crate) fn is_asked(&self) -> bool {
        self.passes > 1
    }
}

/// `--keep`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum KeepArg {
    /// Nothing stays.
    #[default]
    Nothing,
    /// What is outside every stack.
    Outside,
    /// These.
    Layers(Vec<String>),
}

impl KeepArg {
    /// As the library has it.
    pub(crate) fn keep(&self) -> Keep {
        match self {
            Self::Nothing => Keep::Nothing,
            Self::Outside => Keep::OutsideStacks,
            Self::Layers(names) => Keep::Layers(names.iter().map(|name| LayerId::new(name)).collect()),
        }
    }
}

impl std::str::FromStr for KeepArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::Nothing),
            "outside" => Ok(Self::Outside),
            _ if text.split(',').any(str::is_empty) => {
                Err("write none, outside, or names of layers with commas between".to_owned())
            }
            _ => Ok(Self::Layers(text.split(',').map(str::to_owned).collect())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept() {
        assert_eq!("none".parse(), Ok(KeepArg::Nothing));
        assert_eq!("outside".parse(), Ok(KeepArg::Outside));
        let names = ["lm_head", "model.norm"].map(str::to_owned).to_vec();
        assert_eq!("lm_head,model.norm".parse(), Ok(KeepArg::Layers(names)));
        for text in ["", ",", "a,", "a,,b"] {
            assert!(text.parse::<KeepArg>().is_err(), "{text:?}");
        }
    }
}
