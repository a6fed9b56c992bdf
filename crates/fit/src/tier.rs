//! Tiers: the memories that hold layers, and their names in device maps.

use std::fmt;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The memory that holds a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Tier {
    /// The GPU of that number.
    Device(u32),
    /// Host memory.
    Host,
    /// The files.
    Disk,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(device) => f.pad(&format!("GPU {device}")),
            Self::Host => f.pad("the host"),
            Self::Disk => f.pad("the disk"),
        }
    }
}

impl Serialize for Tier {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Device(device) => serializer.serialize_u32(*device),
            Self::Host => serializer.serialize_str("cpu"),
            Self::Disk => serializer.serialize_str("disk"),
        }
    }
}

impl<'de> Deserialize<'de> for Tier {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TierVisitor;

        impl Visitor<'_> for TierVisitor {
            type Value = Tier;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the number of a GPU, \"cuda:N\", \"cpu\" or \"disk\"")
            }

            fn visit_u64<E: serde::de::Error>(self, device: u64) -> Result<Tier, E> {
                let number = u32::try_from(device);
                number
                    .map(Tier::Device)
                    .map_err(|_| E::invalid_value(serde::de::Unexpected::Unsigned(device), &self))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Tier, E> {
                let number = text.strip_prefix("cuda:").unwrap_or(text).parse();
                match (text, number) {
                    ("cpu", _) => Ok(Tier::Host),
                    ("disk", _) => Ok(Tier::Disk),
                    ("cuda", _) => Ok(Tier::Device(0)),
                    (_, Ok(device)) => Ok(Tier::Device(device)),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
                }
            }
        }

        deserializer.deserialize_any(TierVisitor)
    }
}
