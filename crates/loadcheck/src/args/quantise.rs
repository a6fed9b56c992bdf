//! `--quantise`: the form of the library's, as a person writes it and as a worker's configuration
//! carries it.

use std::fmt;
use std::str::FromStr;

use onelayer::Quantisation;
use onelayer::plan::UnknownQuantisation;
use serde::{Deserialize, Serialize};

/// What weights are quantised to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Quantise(pub(crate) Quantisation);

impl FromStr for Quantise {
    type Err = UnknownQuantisation;

    fn from_str(text: &str) -> Result<Self, UnknownQuantisation> {
        text.parse().map(Self)
    }
}

impl fmt::Display for Quantise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TryFrom<String> for Quantise {
    type Error = UnknownQuantisation;

    fn try_from(text: String) -> Result<Self, UnknownQuantisation> {
        text.parse()
    }
}

impl From<Quantise> for String {
    fn from(quantise: Quantise) -> Self {
        quantise.to_string()
    }
}
