//! Which tensor goes to which file, and in which order.
//!
//! ```text
//! layers in execution order
//! -> pieces: a layer, or its base and each of its experts
//! -> files: a piece each, or as many neighbours as fit; or tensor by tensor (merged)
//! -> names: NAME-00001-of-00027.safetensors, counted per component of a pipeline
//! ```
//!
//! Within a layer, tensors keep the order in which they are loaded, but wider elements come first:
//! so every tensor starts at a multiple of its element, which readers that map files need. The
//! layout depends on names, types and shapes alone: processes that convert parts of a checkpoint
//! all come to the same one.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use super::settings::{Conversion, Experts, Grouping};
use crate::checkpoint::{Checkpoint, TensorId};
use crate::footprint::{Held, list_bytes};
use crate::layers::{Layer, LayerId, Layers};
use crate::units::to_u64;

/// Fewest digits of a number in the name of a file.
const NUMBER_DIGITS_MIN: usize = 5;

/// One file of the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TargetFile {
    /// Its path below the target.
    pub(super) id: LayerId,
    /// Its component: a position in [`FileLayout::components`].
    pub(super) component: usize,
    /// Its tensors: positions in [`FileLayout::tensors`].
    tensors: Range<usize>,
}

/// A folder of the target that is a whole checkpoint: the target, or a component of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Component {
    /// The prefix of its tensors' names and of its files' paths: `component/`, or empty.
    pub(super) prefix: Box<str>,
    /// The start of the names of its files.
    pub(super) base_name: &'static str,
    /// Its files: positions in [`FileLayout::files`].
    pub(super) files: Range<usize>,
}

impl Component {
    /// The path of its index; `None` if it has one file only.
    pub(super) fn index_name(&self) -> Option<String> {
        (self.files.len() > 1).then(|| format!("{}{}.safetensors.index.json", self.prefix, self.base_name))
    }
}

/// All files of a conversion.
#[derive(Clone, Debug, Default)]
pub(super) struct FileLayout {
    pub(super) components: Vec<Component>,
    pub(super) files: Vec<TargetFile>,
    /// The tensors of all files, in file order.
    tensors: Vec<TensorId>,
}

impl FileLayout {
    /// The tensors of a file, in its order.
    pub(super) fn tensors(&self, file: &TargetFile) -> &[TensorId] {
        &self.tensors[file.tensors.clone()]
    }

    /// The layers that a file holds, or holds a part of, in execution order.
    pub(super) fn layers<'a>(&self, file: &TargetFile, layers: &'a Layers) -> Vec<&'a LayerId> {
        let positions: BTreeSet<usize> =
            self.tensors(file).iter().map(|&tensor| layers.position_of(tensor)).collect();
        positions.into_iter().map(|position| &layers.as_slice()[position].id).collect()
    }

    /// Host memory that it takes, in bytes.
    pub(super) fn held_bytes(&self) -> u64 {
        let names: u64 = self.files.iter().map(|file| to_u64(file.id.as_str().len()) + 64).sum();
        Held::default().list(&self.files).list(&self.components).and(list_bytes(&self.tensors)).bytes()
            + names
    }
}

/// Everything that decides about the layout.
pub(super) struct Rules<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) layers: &'a Layers,
    pub(super) settings: &'a Conversion,
    /// Of each tensor in its file: bits of an element, and bytes.
    pub(super) size_of: &'a dyn Fn(TensorId) -> (u64, u64),
    /// Whether a tensor is converted.
    pub(super) is_wanted: &'a dyn Fn(TensorId) -> bool,
}

/// Distributes tensors to files.
pub(super) fn lay_out(rules: &Rules<'_>) -> FileLayout {
    let mut layout = FileLayout::default();
    let mut seen = BTreeSet::new();
    for shard in rules.checkpoint.shards() {
        if !seen.insert(&shard.name_prefix) {
            continue;
        }
        let first = layout.files.len();
        let number = layout.components.len();
        let mut component_layout =
            ComponentLayout { rules, layout: &mut layout, component: number, bytes: 0, is_open: false };
        component_layout.lay_out(&shard.name_prefix);
        let files = first..layout.files.len();
        if files.is_empty() {
            continue;
        }
        let component = Component {
            prefix: shard.name_prefix.clone(),
            base_name: base_name(&shard.path),
            files: files.clone(),
        };
        let count = files.len();
        for (file, number) in layout.files[files].iter_mut().zip(1..) {
            file.id = LayerId::new(&file_name(&component, number, count));
        }
        layout.components.push(component);
    }
    layout.tensors.shrink_to_fit();
    layout.files.shrink_to_fit();
    layout
}

/// The start of the names of files, as loaders expect it.
fn base_name(path: &Path) -> &'static str {
    const KNOWN: [&str; 2] = ["diffusion_pytorch_model", "adapter_model"];
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    KNOWN.into_iter().find(|known| name.starts_with(known)).unwrap_or("model")
}

fn file_name(component: &Component, number: usize, count: usize) -> String {
    let Component { prefix, base_name, .. } = component;
    if count == 1 {
        return format!("{prefix}{base_name}.safetensors");
    }
    let width = count.to_string().len().max(NUMBER_DIGITS_MIN);
    format!("{prefix}{base_name}-{number:0width$}-of-{count:0width$}.safetensors")
}

/// Distributes the tensors of one component to files.
struct ComponentLayout<'a> {
    rules: &'a Rules<'a>,
    layout: &'a mut FileLayout,
    component: usize,
    /// Bytes of the last file.
    bytes: u64,
    /// True if more tensors may be added to the last file.
    is_open: bool,
}

impl ComponentLayout<'_> {
    fn lay_out(&mut self, prefix: &str) {
        let checkpoint = self.rules.checkpoint;
        for layer in self.rules.layers.as_slice() {
            let is_here =
                |id: &TensorId| *checkpoint.shard(checkpoint.tensor(*id).shard).name_prefix == *prefix;
            for piece in self.pieces(layer) {
                let mut tensors: Vec<TensorId> =
                    piece.into_iter().filter(|id| is_here(id) && (self.rules.is_wanted)(*id)).collect();
                self.sort(&mut tensors);
                match self.rules.settings.grouping {
                    Grouping::PerLayer => self.add_piece(&tensors),
                    Grouping::Merged => tensors.chunks(1).for_each(|tensor| self.add_to_last(tensor)),
                }
            }
        }
        let first = self.layout.files.iter().position(|file| file.component == self.component);
        for index in first.unwrap_or(self.layout.files.len())..self.layout.files.len() {
            self.align(index);
        }
    }

    /// The parts of a layer that stay together.
    fn pieces(&self, layer: &Layer) -> Vec<Vec<TensorId>> {
        if self.rules.settings.experts == Experts::Together {
            return vec![layer.tensors.to_vec()];
        }
        let experts = self.experts(layer);
        let in_experts: BTreeSet<TensorId> = experts.iter().flatten().copied().collect();
        let base = layer.tensors.iter().copied().filter(|id| !in_experts.contains(id)).collect();
        std::iter::once(base).chain(experts).collect()
    }

    /// The sub-units of a layer that are experts: two or more of one list that have the same
    /// tensors, of the same shapes.
    fn experts(&self, layer: &Layer) -> Vec<Vec<TensorId>> {
        let checkpoint = self.rules.checkpoint;
        let list_of = |prefix: &str| prefix.rsplit_once('.').map_or("", |(list, _)| list).to_owned();
        let form = |unit: &crate::layers::SubUnit| {
            let tensor = |id: &TensorId| {
                let entry = checkpoint.tensor(*id);
                (entry.name[unit.prefix.len()..].to_owned(), entry.shape.to_vec())
            };
            unit.tensors.iter().map(tensor).collect::<BTreeSet<_>>()
        };
        let units = &layer.sub_units;
        let mut experts = Vec::new();
        let mut start = 0;
        while start < units.len() {
            let list = list_of(&units[start].prefix);
            let end =
                (start..units.len()).find(|&at| list_of(&units[at].prefix) != list).unwrap_or(units.len());
            let first = form(&units[start]);
            if end - start > 1 && units[start + 1..end].iter().all(|unit| form(unit) == first) {
                experts.extend(units[start..end].iter().map(|unit| unit.tensors.to_vec()));
            }
            start = end;
        }
        experts
    }

    /// Wider elements first; tensors without bytes last.
    fn sort(&self, tensors: &mut [TensorId]) {
        tensors.sort_by_key(|&id| {
            let (element_bits, bytes) = (self.rules.size_of)(id);
            (bytes == 0, Reverse(element_bits))
        });
    }

    /// Adds a piece to the last file if files may hold several and it fits, else to a new file.
    fn add_piece(&mut self, tensors: &[TensorId]) {
        if tensors.is_empty() {
            return;
        }
        let bytes: u64 = tensors.iter().map(|&id| (self.rules.size_of)(id).1).sum();
        let Some(most) = self.rules.settings.max_shard_bytes else { return self.add_file(tensors) };
        if self.is_open && self.bytes.saturating_add(bytes) <= most {
            return self.extend_last(tensors);
        }
        if bytes <= most {
            self.add_file(tensors);
            self.is_open = true;
            return;
        }
        // Larger than a file may be: it is cut into files of its own.
        self.is_open = false;
        for tensor in tensors.chunks(1) {
            self.add_to_last(tensor);
        }
        self.is_open = false;
    }

    /// Adds one tensor to the last file if it fits, else to a new file.
    fn add_to_last(&mut self, tensor: &[TensorId]) {
        let bytes = (self.rules.size_of)(tensor[0]).1;
        let most = self.rules.settings.max_shard_bytes.unwrap_or(u64::MAX);
        if self.is_open && self.bytes.saturating_add(bytes) <= most {
            self.extend_last(tensor);
        } else {
            self.add_file(tensor);
            self.is_open = true;
        }
    }

    fn add_file(&mut self, tensors: &[TensorId]) {
        let start = self.layout.tensors.len();
        self.layout.files.push(TargetFile {
            id: LayerId::new(""),
            component: self.component,
            tensors: start..start,
        });
        self.bytes = 0;
        self.extend_last(tensors);
    }

    fn extend_last(&mut self, tensors: &[TensorId]) {
        self.bytes += tensors.iter().map(|&id| (self.rules.size_of)(id).1).sum::<u64>();
        self.layout.tensors.extend_from_slice(tensors);
        let file = self.layout.files.last_mut().expect("a file was added before");
        file.tensors.end = self.layout.tensors.len();
    }

    /// Sorts a file of several layers as a whole, if a tensor would not be aligned otherwise.
    fn align(&mut self, index: usize) {
        let range = self.layout.files[index].tensors.clone();
        let mut tensors = self.layout.tensors[range.clone()].to_vec();
        // Tensors without bytes need no alignment: they go to the end.
        tensors.sort_by_key(|&id| (self.rules.size_of)(id).1 == 0);
        let mut offset = 0_u64;
        let mut is_aligned = true;
        for &id in &tensors {
            let (element_bits, bytes) = (self.rules.size_of)(id);
            is_aligned &= bytes == 0 || offset.is_multiple_of((element_bits / 8).max(1));
            offset = offset.saturating_add(bytes);
        }
        if !is_aligned {
            self.sort(&mut tensors);
        }
        self.layout.tensors[range].copy_from_slice(&tensors);
    }
}
