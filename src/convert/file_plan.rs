//! The plan of a conversion: every file of the target with its tensors, types and length, and a
//! fingerprint of all of it.
//!
//! It depends on the headers of the source and the settings alone: processes that convert parts of
//! a checkpoint all come to the same plan.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use super::duplicates;
use super::hash::{Hashes, hex};
use super::header::{HEADER_BYTES_MAX, Header};
use super::layout::{self, Component, FileLayout, Rules, TargetFile};
use super::manifest::{ManifestSource, SourceFile};
use super::output::{FileSet, WriteBuffers};
use super::side_files::directory_of;
use super::target_directory::TargetDirectory;
use super::{Casting, Conversion, ConvertError, Part};
use crate::checkpoint::{Checkpoint, DType, FileFormat, Shard, TensorId};
use crate::layers::Layers;
use crate::load::hash_each;
use crate::plan::{
    Cast, Group, Landing, LoadOptions, LoadPlan, MemoryTerm, PlanError, PlanLimits, Quantisation,
    QuantiseRule, ResidentKind, TermKind, Transform, Window, grouping_peak_bytes, is_plain,
};
use crate::source;
use crate::units::{to_u64, to_usize};

/// The version of the files. Another version would make other files of the same source.
const FORMAT: &str = "onelayer-convert/1";

/// The length of one file of tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileSize {
    /// With its header.
    pub(super) file_bytes: u64,
    /// Where the data starts: the length of the header.
    data_start: u64,
}

impl FileSize {
    /// Bytes of the tensors.
    pub(super) fn data_bytes(self) -> u64 {
        self.file_bytes - self.data_start
    }
}

/// Every file of a conversion.
#[derive(Debug)]
pub(super) struct FilePlan {
    pub(super) checkpoint: Checkpoint,
    pub(super) layers: Layers,
    pub(super) layout: FileLayout,
    /// Of each tensor of the checkpoint.
    transforms: Vec<Transform>,
    /// The text of `__metadata__`, of each component.
    metadata: Vec<BTreeMap<String, String>>,
    /// Of each file.
    pub(super) sizes: Vec<FileSize>,
    /// The buffers of the writers.
    pub(super) buffers: WriteBuffers,
    /// Tensors that are left out, each with the one that has the same bytes.
    pub(super) aliases: Vec<(TensorId, TensorId)>,
    /// Tensors that were not selected, ascending.
    pub(super) left_out: Vec<TensorId>,
    pub(super) source: ManifestSource,
    pub(super) fingerprint: String,
    pub(super) notes: Vec<String>,
}

impl FilePlan {
    /// Names that share the bytes of a written tensor in the source, each with that tensor.
    pub(super) fn tied_names(&self) -> impl Iterator<Item = (String, TensorId)> {
        let is_written = |&(_, id): &(&str, TensorId)| self.left_out.binary_search(&id).is_err();
        let kept = |id| self.aliases.iter().find(|&&(left, _)| left == id).map_or(id, |&(_, kept)| kept);
        self.checkpoint.aliases().filter(is_written).map(move |(name, id)| (name.to_owned(), kept(id)))
    }

    /// Plans every file of a conversion of the checkpoint at `path`. Reads its headers, and with
    /// [`Conversion::drop_duplicates`] tensors that may be tied.
    pub(super) fn new(settings: &Conversion, path: &Path) -> Result<Self, ConvertError> {
        let checkpoint = settings.open_options.open(path)?;
        if checkpoint.tensor_count() == 0 {
            return Err(ConvertError::NoTensors { path: path.to_owned() });
        }
        let layers = Layers::group_with(&checkpoint, &settings.map)?;
        let mut notes = checkpoint.notes().to_vec();
        if let Some((name, id)) = checkpoint.aliases().next() {
            let others = match checkpoint.aliases().len() - 1 {
                0 => String::new(),
                more => format!(" (and {more} more)"),
            };
            let kept = checkpoint.name_of(id);
            notes.push(format!("{name} shares its bytes with {kept}, which is written once{others}"));
        }
        let transforms = transforms(settings, &checkpoint, &layers)?;
        let is_selected = |id: TensorId| {
            let select = settings.select.as_ref();
            select.is_none_or(|select| select(&checkpoint.tensor(id), &layers.layer_of(id).id))
        };
        let selected: Vec<bool> = checkpoint.tensors().map(|tensor| is_selected(tensor.id)).collect();
        let mut wanted = selected.clone();
        let mut aliases: Vec<(TensorId, TensorId)> = Vec::new();
        if settings.drop_duplicates {
            let grouping = MemoryTerm::new(TermKind::Grouping, layers.metadata_bytes());
            let is_selected = |id: TensorId| selected[id.index()];
            let found =
                duplicates::find(&checkpoint, &layers, &is_selected, settings.reading(), vec![grouping])?;
            notes.extend(found.notes);
            aliases = found.pairs;
            aliases.iter().for_each(|(left, _)| wanted[left.index()] = false);
        }
        if !wanted.contains(&true) {
            return Err(ConvertError::NothingSelected { tensors: to_u64(checkpoint.tensor_count()) });
        }
        let size_of = |id: TensorId| delivered_size(&checkpoint, transforms[id.index()], id);
        let is_wanted = |id: TensorId| wanted[id.index()];
        let rules = Rules {
            checkpoint: &checkpoint,
            layers: &layers,
            settings,
            size_of: &size_of,
            is_wanted: &is_wanted,
        };
        let layout = layout::lay_out(&rules);
        let left_out =
            checkpoint.tensors().map(|tensor| tensor.id).filter(|id| !selected[id.index()]).collect();
        let components = layout.components.iter();
        let metadata = components.map(|component| metadata(&checkpoint, component, &mut notes)).collect();
        let source = identity(&checkpoint, path)?;
        let mut plan = Self {
            checkpoint,
            layers,
            layout,
            transforms,
            metadata,
            sizes: Vec::new(),
            buffers: settings.write_buffers(),
            aliases,
            left_out,
            source,
            fingerprint: String::new(),
            notes,
        };
        plan.measure(settings)?;
        plan.fingerprint = plan.fingerprint(settings);
        Ok(plan)
    }

    /// The load that writes some of the files, in their order.
    pub(super) fn load_plan(&self, settings: &Conversion, files: &[usize]) -> Result<LoadPlan, ConvertError> {
        let mut limits = PlanLimits::of(LoadOptions { window: Window::Layers(1), ..settings.reading() });
        limits.alignment = source::alignment(&self.checkpoint).map_err(crate::load::LoadError::from)?;
        (limits.resident, limits.landing) = (ResidentKind::Nowhere, Landing::Packed);
        limits.other_terms = self.terms(files);
        let groups = files.iter().map(|&file| {
            let file = &self.layout.files[file];
            Group { id: &file.id, tensors: self.layout.tensors(file) }
        });
        limits.options.quantise = settings.options.quantise;
        let transform = |id: TensorId| self.transforms[id.index()];
        let plan = LoadPlan::build_groups(
            &self.checkpoint,
            groups,
            &limits,
            transform,
            grouping_peak_bytes(&self.checkpoint, &self.layers),
        )?;
        Ok(plan)
    }

    /// The memory of a conversion beside that of its load.
    fn terms(&self, files: &[usize]) -> Vec<MemoryTerm> {
        /// Buffers of journals, index and manifest.
        const TEXT_BYTES: u64 = 256 << 10;
        /// The layout, record and state of a file, with its name in each of them.
        const FILE_BYTES: u64 = 768;
        /// A tensor in the list that is sorted for an index.
        const TENSOR_BYTES: u64 = 16;
        let tensors = files.iter().map(|&file| to_usize(self.tensor_count(&self.layout.files[file])));
        // For the file that is being written and the one that is being published.
        let hashes = 2 * to_u64(tensors.max().unwrap_or(0) * size_of::<Hashes>());
        let lists = self.layout.held_bytes()
            + to_u64(self.transforms.capacity() * size_of::<Transform>())
            + to_u64(self.checkpoint.tensor_count()) * TENSOR_BYTES;
        vec![
            MemoryTerm::new(TermKind::WriteBuffers, self.buffers.bytes()),
            MemoryTerm::new(
                TermKind::Files,
                lists + to_u64(self.layout.files.len()) * FILE_BYTES + TEXT_BYTES,
            ),
            MemoryTerm::new(TermKind::Hashes, hashes),
        ]
    }

    /// The files of a run: those of `plan`, which is that of `files`.
    pub(super) fn file_set(
        &self,
        plan: &Arc<LoadPlan>,
        files: &[usize],
        directory: &TargetDirectory,
    ) -> FileSet {
        let components = self.layout.components.iter().zip(&self.metadata);
        FileSet {
            plan: Arc::clone(plan),
            directory: directory.clone(),
            checkpoint: self.checkpoint.clone(),
            components: components
                .map(|(component, text)| (component.prefix.clone(), text.clone()))
                .collect(),
            component_of: files.iter().map(|&file| self.layout.files[file].component).collect(),
        }
    }

    /// The component of a file.
    pub(super) fn component(&self, file: &TargetFile) -> &Component {
        &self.layout.components[file.component]
    }

    /// How a tensor is cast, if it is.
    pub(super) fn cast(&self, id: TensorId) -> Option<Cast> {
        match self.transforms[id.index()] {
            Transform::Cast(cast) => Some(cast),
            Transform::Keep | Transform::Quantise(_) => None,
        }
    }

    /// The form that a tensor is quantised to, if it is.
    pub(super) fn quantisation(&self, id: TensorId) -> Option<Quantisation> {
        match self.transforms[id.index()] {
            Transform::Quantise(form) => Some(form.to()),
            Transform::Keep | Transform::Cast(_) => None,
        }
    }

    /// The number of tensors in a file. Scales count too.
    pub(super) fn tensor_count(&self, file: &TargetFile) -> u64 {
        let tensors = self.layout.tensors(file);
        let scales = tensors.iter().filter(|&&id| self.quantisation(id).is_some());
        to_u64(tensors.len()) + to_u64(scales.count())
    }

    /// The files of a part, or all. Parts are runs of files with about equal bytes.
    pub(super) fn files_of(&self, part: Option<Part>) -> Vec<usize> {
        let Some(part) = part else { return (0..self.sizes.len()).collect() };
        let total: u128 = self.sizes.iter().map(|size| u128::from(size.file_bytes)).sum();
        let (number, count) = (u128::from(part.number()), u128::from(part.of()));
        let mut before = 0_u128;
        let mut is_in = |bytes: u64| {
            // A file belongs to the part that has its middle.
            let middle = before + u128::from(bytes) / 2;
            before += u128::from(bytes);
            middle * count / total.max(1) == number - 1
        };
        let files: Vec<bool> = self.sizes.iter().map(|size| is_in(size.file_bytes)).collect();
        (0..files.len()).filter(|&file| files[file]).collect()
    }

    /// The load that writes all files, with the largest buffers for which the budget is enough. So
    /// every larger budget is enough too.
    fn plan_with_largest_buffers(
        &mut self,
        settings: &Conversion,
        all: &[usize],
    ) -> Result<LoadPlan, ConvertError> {
        loop {
            match (self.load_plan(settings, all), self.buffers.halved()) {
                (Err(ConvertError::Plan(error)), Some(smaller)) if error.is_over_budget() => {
                    self.buffers = smaller
                }
                (planned, _) => return planned,
            }
        }
    }

    /// Finds the length of every file.
    fn measure(&mut self, settings: &Conversion) -> Result<(), ConvertError> {
        let all: Vec<usize> = (0..self.layout.files.len()).collect();
        let plan = self.plan_with_largest_buffers(settings, &all)?;
        for (planned, file) in plan.layers().iter().zip(&self.layout.files) {
            let component = file.component;
            let header = Header {
                checkpoint: &self.checkpoint,
                name_prefix: &self.layout.components[component].prefix,
                metadata: &self.metadata[component],
                placements: plan.placements(planned),
                plan: &plan,
            };
            let data_start = header.data_start();
            if data_start > HEADER_BYTES_MAX {
                return Err(ConvertError::HeaderTooLong {
                    file: file.id.to_string(),
                    header_bytes: data_start,
                    limit_bytes: HEADER_BYTES_MAX,
                });
            }
            self.sizes.push(FileSize { file_bytes: data_start + planned.arena_bytes, data_start });
        }
        Ok(())
    }

    fn fingerprint(&self, settings: &Conversion) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut text = |text: &str| {
            hasher.update(&to_u64(text.len()).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        text(FORMAT);
        text(if settings.sha256 { "sha256" } else { "" });
        for file in &self.source.files {
            text(&file.name);
            text(&format!("{} {} {}", file.bytes, file.modified_ns, file.header_blake3));
        }
        for (metadata, component) in self.metadata.iter().zip(&self.layout.components) {
            text(&component.prefix);
            metadata.iter().for_each(|(key, value)| [key, value].into_iter().for_each(|part| text(part)));
        }
        for (file, size) in self.layout.files.iter().zip(&self.sizes) {
            text(file.id.as_str());
            text(&size.file_bytes.to_string());
            for &tensor in self.layout.tensors(file) {
                let entry = self.checkpoint.tensor(tensor);
                text(entry.name);
                text(&match self.transforms[tensor.index()] {
                    Transform::Keep => entry.dtype.to_string(),
                    Transform::Cast(cast) => cast.to().to_string(),
                    Transform::Quantise(form) => form.to().to_string(),
                });
            }
        }
        hex(hasher.finalize().as_bytes())
    }
}

impl Conversion {
    /// How passes over the source read, before or after the conversion itself.
    pub(super) fn reading(&self) -> LoadOptions {
        LoadOptions {
            readers: Some(self.readers()),
            // The passes hash tensors as they are in the files.
            dtype: None,
            quantise: None,
            quantise_choice: None,
            ..self.options.clone()
        }
    }

    /// Threads that read. Direct reads wait for the disk, so even a small machine has a few.
    fn readers(&self) -> u32 {
        let cores = std::thread::available_parallelism()
            .map_or(1, |cores| cores.get().try_into().unwrap_or(u32::MAX));
        self.options.readers.unwrap_or(cores.clamp(2, 8)).min(64)
    }

    /// The buffers of the writers, if the budget has room for them.
    fn write_buffers(&self) -> WriteBuffers {
        const WRITERS: std::ops::RangeInclusive<u32> = 1..=4;
        let writers = self.options.readers.unwrap_or(2).clamp(*WRITERS.start(), *WRITERS.end());
        WriteBuffers::for_budget(self.options.host_budget_bytes, writers)
    }
}

/// The bits of an element and the bytes of a tensor in its file.
fn delivered_size(checkpoint: &Checkpoint, transform: Transform, id: TensorId) -> (u64, u64) {
    let entry = checkpoint.tensor(id);
    let bytes = entry.len_bytes();
    let (dtype, bytes) = match transform {
        Transform::Keep => (entry.dtype, bytes),
        Transform::Cast(cast) => (cast.to().into(), cast.delivered_bytes(bytes)),
        // Values and scales stay together; within their file, the plan orders them by width.
        Transform::Quantise(form) => (form.to().scales(), form.value_bytes(bytes) + form.scale_bytes(bytes)),
    };
    (dtype.bits().unwrap_or(8), bytes)
}

/// How each tensor is changed.
fn transforms(
    settings: &Conversion,
    checkpoint: &Checkpoint,
    layers: &Layers,
) -> Result<Vec<Transform>, ConvertError> {
    let mut transforms = Vec::with_capacity(checkpoint.tensor_count());
    let choice = settings.options.quantise_choice.as_ref();
    let quantising = settings.options.quantise.map(|to| QuantiseRule::new(checkpoint, layers, to, choice));
    let mut has_quantised = false;
    for entry in checkpoint.tensors() {
        let rule = settings.rule.as_ref().and_then(|rule| rule(&entry));
        let quantising = quantising.as_ref().filter(|_| rule.is_none());
        if let Some(form) = quantising.and_then(|quantising| quantising.of(entry.id)) {
            has_quantised = true;
            transforms.push(Transform::Quantise(form));
            continue;
        }
        let cast = match rule {
            Some(Casting::Keep) => None,
            Some(Casting::To(to)) if entry.dtype == DType::from(to) => None,
            Some(Casting::To(to)) => {
                let cast = Cast::between(entry.dtype, to);
                Some(cast.ok_or_else(|| ConvertError::CannotCast {
                    tensor: entry.name.to_owned(),
                    dtype: entry.dtype_name.to_owned(),
                    wanted: to.to_string(),
                })?)
            }
            None => settings
                .options
                .dtype
                .filter(|_| matches!(entry.dtype, DType::Block(_)) || is_plain(checkpoint, layers, entry.id))
                .and_then(|to| Cast::between(entry.dtype, to)),
        };
        transforms.push(cast.into());
    }
    match settings.options.quantise.filter(|_| !has_quantised) {
        Some(form) => Err(PlanError::NothingToQuantise { form }.into()),
        None => Ok(transforms),
    }
}

/// The `__metadata__` of a component: that of all its files in the source. If they disagree, the
/// first one counts.
fn metadata(
    checkpoint: &Checkpoint,
    component: &Component,
    notes: &mut Vec<String>,
) -> BTreeMap<String, String> {
    let mut text: BTreeMap<String, String> = BTreeMap::new();
    for shard in checkpoint.shards().iter().filter(|shard| shard.name_prefix == component.prefix) {
        // They number the files of the source.
        let is_of_split = |key: &str| shard.format == FileFormat::Gguf && key.starts_with("split.");
        for (key, value) in shard.metadata.iter().filter(|(key, _)| !is_of_split(key)) {
            let known = text.entry(key.to_owned()).or_insert_with(|| value.to_owned());
            if known != value {
                notes.push(format!(
                    "{}: its header has another text for {key:?} than the files before it",
                    shard.path.display()
                ));
            }
        }
    }
    text
}

/// The identity of the source: lengths, times and headers of its files.
fn identity(checkpoint: &Checkpoint, path: &Path) -> Result<ManifestSource, ConvertError> {
    let root = directory_of(path);
    let name_of = |shard: &Shard| {
        let below = root.as_ref().and_then(|root| shard.path.strip_prefix(root).ok());
        let name = below.unwrap_or_else(|| Path::new(shard.path.file_name().unwrap_or_default()));
        name.to_string_lossy().into_owned()
    };
    let shards = checkpoint.shards();
    let hashes: Vec<io::Result<String>> = hash_each(shards, hash_header);
    let mut files = Vec::with_capacity(shards.len());
    for (shard, hash) in shards.iter().zip(hashes) {
        let header_blake3 = hash.map_err(|source| ConvertError::Read {
            path: shard.path.clone(),
            operation: "read its header again",
            source,
        })?;
        let (bytes, modified_ns) = (shard.identity.len_bytes, shard.identity.modified_ns);
        files.push(SourceFile { name: name_of(shard), bytes, modified_ns, header_blake3 });
    }
    Ok(ManifestSource { path: path.to_string_lossy().into_owned(), files })
}

fn hash_header(shard: &Shard) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(&shard.path)?.take(shard.data.start()))?;
    if hasher.count() < shard.data.start() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(hex(hasher.finalize().as_bytes()))
}
