//! Device maps: names of modules and their tiers, in the format of accelerate and transformers.
//!
//! `{"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "disk"}`.
//! Names are those of the checkpoint; engines that rename tensors while loading have others.
//! `check.rs` compares a map with a checkpoint.

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::demand::Demand;
use super::error::FitError;
use super::place::FitPlan;
use super::tier::Tier;
use onelayer::checkpoint::Checkpoint;
use onelayer::layers::Layers;

/// Modules (or single tensors) and their tiers, in order. In JSON an object: whole numbers for
/// GPUs, `"cpu"`, `"disk"`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceMap {
    entries: Vec<(String, Tier)>,
}

impl DeviceMap {
    /// The map of a plan: one entry for each outermost module whose tensors all belong to one
    /// layer.
    ///
    /// A head without a tensor in the files, because it shares the embedding's, gets an entry with
    /// the embedding's tier: programs that build the whole model need it.
    #[must_use]
    pub fn of(plan: &FitPlan, demand: &Demand, checkpoint: &Checkpoint, layers: &Layers) -> Self {
        let owners = Owners::of(checkpoint, layers);
        let mut entries = Vec::new();
        let mut seen: HashSet<&str> = HashSet::new();
        for (position, layer) in layers.as_slice().iter().enumerate() {
            for tensor in &layer.tensors {
                let key = owners.module_of(checkpoint.tensor(*tensor).name, position);
                if seen.insert(key) {
                    entries.push((key.to_owned(), plan.tiers[position]));
                }
            }
        }
        if let Some((head, embedding)) = demand.tied_head.filter(|(head, _)| !seen.contains(head)) {
            entries.push((head.to_owned(), plan.tiers[embedding]));
        }
        Self { entries }
    }

    /// A map with these entries.
    ///
    /// # Errors
    /// [`FitError::BadMap`] if a name occurs twice.
    pub fn of_entries(entries: impl IntoIterator<Item = (String, Tier)>) -> Result<Self, FitError> {
        let entries: Vec<(String, Tier)> = entries.into_iter().collect();
        let mut seen = HashSet::new();
        match entries.iter().find(|(name, _)| !seen.insert(name.as_str())) {
            Some((name, _)) => Err(FitError::BadMap { message: format!("`{name}` occurs twice") }),
            None => Ok(Self { entries }),
        }
    }

    /// Reads a map from JSON.
    ///
    /// # Errors
    /// [`FitError::BadMap`] if `text` is not a JSON object of names and places, or has a name
    /// twice.
    ///
    /// # Example
    /// ```
    /// use onelayer_fit::{DeviceMap, Tier};
    /// let map = DeviceMap::parse(br#"{"": 0, "lm_head": "cpu"}"#)?;
    /// assert_eq!(map.tier_of("model.norm.weight"), Some(Tier::Device(0)));
    /// assert_eq!(map.tier_of("lm_head.weight"), Some(Tier::Host));
    /// # Ok::<(), onelayer_fit::FitError>(())
    /// ```
    pub fn parse(text: &[u8]) -> Result<Self, FitError> {
        serde_json::from_slice(text).map_err(|error| FitError::BadMap { message: error.to_string() })
    }

    /// The map as JSON text, one entry a line.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("texts and numbers are JSON");
        text.push('\n');
        text
    }

    /// The entries, in order.
    #[must_use]
    pub fn entries(&self) -> &[(String, Tier)] {
        &self.entries
    }

    /// The tier of a tensor, by the longest entry that is its name or a module around it. For many
    /// tensors, use [`Demand::check`].
    #[must_use]
    pub fn tier_of(&self, tensor: &str) -> Option<Tier> {
        self.lookup().of(tensor).map(|entry| self.entries[entry].1)
    }

    /// The entries by name.
    pub(super) fn lookup(&self) -> Lookup<'_> {
        let entries = self.entries.iter().enumerate();
        Lookup { by_name: entries.map(|(entry, (name, _))| (name.as_str(), entry)).collect() }
    }
}

/// Entries of a map by name.
pub(super) struct Lookup<'a> {
    by_name: HashMap<&'a str, usize>,
}

impl Lookup<'_> {
    /// The entry of a tensor.
    pub(super) fn of(&self, tensor: &str) -> Option<usize> {
        self.around(tensor).next()
    }

    /// The entries for a tensor's name and the modules around it, the longest first.
    pub(super) fn around(&self, tensor: &str) -> impl Iterator<Item = usize> {
        let ends = tensor.rmatch_indices('.').map(|(end, _)| &tensor[..end]);
        let names = std::iter::once(tensor).chain(ends).chain((!tensor.is_empty()).then_some(""));
        names.filter_map(|name| self.by_name.get(name).copied())
    }
}

/// For each module, the position of its tensors' layer; `None` if they belong to several.
struct Owners<'a> {
    of_module: HashMap<&'a str, Option<usize>>,
}

impl<'a> Owners<'a> {
    fn of(checkpoint: &'a Checkpoint, layers: &Layers) -> Self {
        let mut of_module: HashMap<&str, Option<usize>> = HashMap::new();
        for tensor in checkpoint.tensors() {
            let position = layers.position_of(tensor.id);
            for module in modules(tensor.name) {
                let owner = of_module.entry(module).or_insert(Some(position));
                *owner = owner.filter(|owner| *owner == position);
            }
        }
        Self { of_module }
    }

    /// The outermost module around a tensor that belongs to a single layer.
    fn module_of<'b>(&self, tensor: &'b str, position: usize) -> &'b str {
        let own = |module: &&str| self.of_module.get(module) == Some(&Some(position));
        modules(tensor).find(own).unwrap_or(tensor)
    }
}

/// The modules around a tensor, outermost first, and the tensor.
fn modules(tensor: &str) -> impl Iterator<Item = &str> {
    tensor.match_indices('.').map(|(end, _)| &tensor[..end]).chain([tensor])
}

impl Serialize for DeviceMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.entries.iter().map(|(name, tier)| (name, tier)))
    }
}

impl<'de> Deserialize<'de> for DeviceMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = DeviceMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of module names and places")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<DeviceMap, A::Error> {
                let (mut entries, mut seen) = (Vec::new(), HashSet::new());
                while let Some((name, tier)) = access.next_entry::<String, Tier>()? {
                    if !seen.insert(name.clone()) {
                        return Err(A::Error::custom(format!("`{name}` occurs twice")));
                    }
                    entries.push((name, tier));
                }
                Ok(DeviceMap { entries })
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_and_written() {
        let text = "{\n  \"a\": 0,\n  \"a.b\": \"cpu\",\n  \"c\": \"disk\"\n}\n";
        let map = DeviceMap::parse(text.as_bytes()).unwrap();
        assert_eq!(map.to_json(), text);
        let other = DeviceMap::parse(br#"{"a": "cuda:3", "b": "7", "c": "cuda"}"#).unwrap();
        let tiers: Vec<Tier> = other.entries().iter().map(|entry| entry.1).collect();
        assert_eq!(tiers, [Tier::Device(3), Tier::Device(7), Tier::Device(0)]);
    }

    #[test]
    fn the_longest_whole_name_decides() {
        let map = DeviceMap::parse(br#"{"m.1": 1, "m": 0, "m.1.x.weight": "disk"}"#).unwrap();
        for (tensor, expected) in [
            ("m.1.y", Some(Tier::Device(1))),
            ("m.10.y", Some(Tier::Device(0))),
            ("m.1.x.weight", Some(Tier::Disk)),
            ("m", Some(Tier::Device(0))),
            ("mm.1", None),
        ] {
            assert_eq!(map.tier_of(tensor), expected, "{tensor}");
        }
    }

    #[test]
    fn what_is_no_map_is_refused_with_the_reason() {
        for (text, expected) in [
            ("[]", "an object of module names"),
            (r#"{"a": 0, "a": 1}"#, "`a` occurs twice"),
            (r#"{"a": "gpu"}"#, "\"gpu\""),
            (r#"{"a": -1}"#, "the number of a GPU"),
            (r#"{"a": 4294967296}"#, "the number of a GPU"),
            (r#"{"a": {}}"#, "the number of a GPU"),
            (r#"{"a": 0"#, "EOF"),
        ] {
            let error = DeviceMap::parse(text.as_bytes()).unwrap_err();
            assert!(error.is_bad_map() && error.to_string().contains(expected), "{text}: {error}");
        }
    }
}
