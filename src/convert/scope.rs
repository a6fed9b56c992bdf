//! Everything that follows from the source's headers and the settings alone: what is converted,
//! into which files, and a fingerprint of both. Every process that converts a part comes to the
//! same.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::digest::hex;
use super::duplicates;
use super::files::{self, Component, FileShape, FileShapes, Rules};
use super::header::{HEADER_BYTES_MAX, Header};
use super::manifest::{ManifestSource, SourceFile};
use super::output::{Headers, WriteBuffers};
use super::side_files::directory_of;
use super::{Casting, Conversion, ConvertError, Part};
use crate::checkpoint::{Checkpoint, DType, Shard, TensorId};
use crate::layers::Layers;
use crate::plan::{
    Cast, Group, Landing, LoadOptions, LoadPlan, MemoryTerm, PlanError, PlanLimits, Quantisation,
    QuantiseRule, ResidentKind, TermKind, Transform, Window, grouping_peak_bytes, is_plain,
};
use crate::source;
use crate::units::{to_u64, to_usize};

/// Stands for how files are made: a version that makes others has another one.
const FORMAT: &str = "onelayer-convert/1";

/// What is converted, into which files.
#[derive(Debug)]
pub(super) struct Scope {
    pub(super) checkpoint: Checkpoint,
    pub(super) layers: Layers,
    pub(super) shapes: FileShapes,
    /// Per tensor of the checkpoint.
    transforms: Vec<Transform>,
    /// Free text of the headers, per component.
    metadata: Vec<BTreeMap<String, String>>,
    /// Length of each file, header included, and where its data starts.
    pub(super) lengths: Vec<(u64, u64)>,
    /// What is written from.
    pub(super) buffers: WriteBuffers,
    /// Tensors that are left out, each with the one that has the same bytes.
    pub(super) aliases: Vec<(TensorId, TensorId)>,
    /// Tensors that were not selected.
    pub(super) left_out: Vec<TensorId>,
    pub(super) source: ManifestSource,
    pub(super) fingerprint: String,
    pub(super) notes: Vec<String>,
}

impl Scope {
    /// Decides about everything.
    pub(super) fn new(settings: &Conversion, path: &Path) -> Result<Self, ConvertError> {
        let checkpoint = settings.open_options.open(path)?;
        if checkpoint.tensor_count() == 0 {
            return Err(ConvertError::NoTensors { path: path.to_owned() });
        }
        let layers = Layers::group_with(&checkpoint, &settings.map)?;
        let mut notes = checkpoint.notes().to_vec();
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
        let size_of = |id: TensorId| {
            let entry = checkpoint.tensor(id);
            let bytes = entry.extent.len_bytes();
            let (dtype, bytes) = match transforms[id.index()] {
                Transform::Keep => (entry.dtype, bytes),
                Transform::Cast(cast) => (cast.to().into(), cast.delivered_bytes(bytes)),
                // Values and scales stay together; within their file, the plan orders them by width.
                Transform::Quantise(form) => {
                    (form.to().scales(), form.value_bytes(bytes) + form.scale_bytes(bytes))
                }
            };
            (dtype.bits().unwrap_or(8), bytes)
        };
        let is_wanted = |id: TensorId| wanted[id.index()];
        let rules = Rules {
            checkpoint: &checkpoint,
            layers: &layers,
            settings,
            size_of: &size_of,
            is_wanted: &is_wanted,
        };
        let shapes = files::shape(&rules);
        let left_out =
            checkpoint.tensors().map(|tensor| tensor.id).filter(|id| !selected[id.index()]).collect();
        let metadata = shapes.components.iter().map(|component| metadata(&checkpoint, component, &mut notes));
        let metadata = metadata.collect();
        let source = identity(&checkpoint, path)?;
        let mut scope = Self {
            checkpoint,
            layers,
            shapes,
            transforms,
            metadata,
            lengths: Vec::new(),
            buffers: settings.write_buffers(),
            aliases,
            left_out,
            source,
            fingerprint: String::new(),
            notes,
        };
        scope.measure(settings)?;
        scope.fingerprint = scope.fingerprint(settings);
        Ok(scope)
    }

    /// The plan of some of the files, in their order.
    pub(super) fn plan(&self, settings: &Conversion, files: &[usize]) -> Result<LoadPlan, ConvertError> {
        let mut limits = PlanLimits::of(LoadOptions { window: Window::Layers(1), ..settings.reading() });
        limits.alignment = source::alignment(&self.checkpoint).map_err(crate::load::LoadError::from)?;
        (limits.resident, limits.landing) = (ResidentKind::Nowhere, Landing::Packed);
        limits.beside = self.terms(files);
        let groups = files.iter().map(|&file| {
            let file = &self.shapes.files[file];
            Group { id: &file.id, tensors: self.shapes.tensors(file) }
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

    /// What a conversion holds beside what a load holds.
    fn terms(&self, files: &[usize]) -> Vec<MemoryTerm> {
        /// Journals, index and manifest pass through buffers.
        const TEXT_BYTES: u64 = 256 << 10;
        /// What is known about a file, from above: its shape, its record, its state, its name in
        /// each of them.
        const FILE_BYTES: u64 = 768;
        /// A tensor in the list that an index is sorted from.
        const TENSOR_BYTES: u64 = 16;
        let tensors = files.iter().map(|&file| to_usize(self.tensor_count(&self.shapes.files[file])));
        // Of the file that is being written, and of the one that is being published.
        let hashes = 2 * to_u64(tensors.max().unwrap_or(0) * size_of::<super::digest::Hashes>());
        let lists = self.shapes.held_bytes()
            + to_u64(self.transforms.capacity() * size_of::<Transform>())
            + to_u64(self.checkpoint.tensor_count()) * TENSOR_BYTES;
        vec![
            MemoryTerm::new(TermKind::WriteBuffers, self.buffers.bytes()),
            MemoryTerm::new(
                TermKind::Files,
                lists + to_u64(self.shapes.files.len()) * FILE_BYTES + TEXT_BYTES,
            ),
            MemoryTerm::new(TermKind::Hashes, hashes),
        ]
    }

    /// What the headers of some of the files are made of.
    pub(super) fn headers(&self, files: &[usize]) -> Headers {
        let components = self.shapes.components.iter().zip(&self.metadata);
        Headers {
            checkpoint: self.checkpoint.clone(),
            components: components
                .map(|(component, text)| (component.prefix.clone(), text.clone()))
                .collect(),
            component_of: files.iter().map(|&file| self.shapes.files[file].component).collect(),
        }
    }

    /// The component of a file.
    pub(super) fn component(&self, file: &FileShape) -> &Component {
        &self.shapes.components[file.component]
    }

    /// Bytes of the tensors of a file.
    pub(super) fn data_bytes(&self, file: usize) -> u64 {
        let (bytes, data_start) = self.lengths[file];
        bytes - data_start
    }

    /// How a tensor is cast, if it is.
    pub(super) fn cast(&self, id: TensorId) -> Option<Cast> {
        match self.transforms[id.index()] {
            Transform::Cast(cast) => Some(cast),
            Transform::Keep | Transform::Quantise(_) => None,
        }
    }

    /// What a tensor is quantised to, if it is.
    pub(super) fn quantisation(&self, id: TensorId) -> Option<Quantisation> {
        match self.transforms[id.index()] {
            Transform::Quantise(form) => Some(form.to()),
            Transform::Keep | Transform::Cast(_) => None,
        }
    }

    /// Tensors of a file as it is written: scales are some of their own.
    pub(super) fn tensor_count(&self, file: &FileShape) -> u64 {
        let tensors = self.shapes.tensors(file);
        let scales = tensors.iter().filter(|&&id| self.quantisation(id).is_some());
        to_u64(tensors.len()) + to_u64(scales.count())
    }

    /// The files of a part, or all. Parts are stretches of about as many bytes.
    pub(super) fn files_of(&self, part: Option<Part>) -> Vec<usize> {
        let Some(part) = part else { return (0..self.lengths.len()).collect() };
        let total: u128 = self.lengths.iter().map(|(bytes, _)| u128::from(*bytes)).sum();
        let (number, count) = (u128::from(part.number()), u128::from(part.of()));
        let mut before = 0_u128;
        let is_in = |bytes: u64| {
            // A file belongs where its middle is.
            let middle = before + u128::from(bytes) / 2;
            before += u128::from(bytes);
            middle * count / total.max(1) == number - 1
        };
        let files: Vec<bool> = self.lengths.iter().map(|&(bytes, _)| bytes).map(is_in).collect();
        (0..files.len()).filter(|&file| files[file]).collect()
    }

    /// The plan of all files, with the largest buffers that leave room for everything else: what
    /// works with one budget works with every larger one.
    fn plan_all(&mut self, settings: &Conversion, all: &[usize]) -> Result<LoadPlan, ConvertError> {
        loop {
            match (self.plan(settings, all), self.buffers.halved()) {
                (Err(ConvertError::Plan(error)), Some(smaller)) if error.is_over_budget() => {
                    self.buffers = smaller
                }
                (planned, _) => return planned,
            }
        }
    }

    /// Finds out how long every file will be.
    fn measure(&mut self, settings: &Conversion) -> Result<(), ConvertError> {
        let all: Vec<usize> = (0..self.shapes.files.len()).collect();
        let plan = self.plan_all(settings, &all)?;
        for (planned, file) in plan.layers().iter().zip(&self.shapes.files) {
            let component = file.component;
            let header = Header {
                checkpoint: &self.checkpoint,
                name_prefix: &self.shapes.components[component].prefix,
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
            self.lengths.push((data_start + planned.arena_bytes, data_start));
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
        for (metadata, component) in self.metadata.iter().zip(&self.shapes.components) {
            text(&component.prefix);
            metadata.iter().for_each(|(key, value)| [key, value].into_iter().for_each(|part| text(part)));
        }
        for (file, (bytes, _)) in self.shapes.files.iter().zip(&self.lengths) {
            text(file.id.as_str());
            text(&bytes.to_string());
            for &tensor in self.shapes.tensors(file) {
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
    /// How passes over the source read that come before or after the conversion itself.
    pub(super) fn reading(&self) -> LoadOptions {
        LoadOptions {
            readers: Some(self.readers()),
            // The passes read files as they are.
            dtype: None,
            quantise: None,
            quantise_choice: None,
            ..self.options.clone()
        }
    }

    /// Threads that read: direct reads wait for the disk, so a few even on a small machine.
    fn readers(&self) -> u32 {
        let cores = std::thread::available_parallelism()
            .map_or(1, |cores| cores.get().try_into().unwrap_or(u32::MAX));
        self.options.readers.unwrap_or(cores.clamp(2, 8)).min(64)
    }

    /// The buffers that writes come from, if there is room.
    fn write_buffers(&self) -> WriteBuffers {
        const WRITERS: std::ops::RangeInclusive<u32> = 1..=4;
        let writers = self.options.readers.unwrap_or(2).clamp(*WRITERS.start(), *WRITERS.end());
        WriteBuffers::for_budget(self.options.host_budget_bytes, writers)
    }
}

/// What becomes of each tensor.
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
                .filter(|_| is_plain(checkpoint, layers, entry.id))
                .and_then(|to| Cast::between(entry.dtype, to)),
        };
        transforms.push(cast.into());
    }
    match settings.options.quantise.filter(|_| !has_quantised) {
        Some(form) => Err(PlanError::NothingToQuantise { form }.into()),
        None => Ok(transforms),
    }
}

/// The free text of a component's headers: that of all its files in the source. Where they
/// disagree, the first one counts.
fn metadata(
    checkpoint: &Checkpoint,
    component: &Component,
    notes: &mut Vec<String>,
) -> BTreeMap<String, String> {
    let mut text: BTreeMap<String, String> = BTreeMap::new();
    for shard in checkpoint.shards().iter().filter(|shard| shard.name_prefix == component.prefix) {
        for (key, value) in shard.metadata.iter() {
            let known = text.entry(key.to_owned()).or_insert_with(|| value.to_owned());
            if known != value {
                notes.push(format!(
                    "{}: its header says something else under {key:?} than the files before it",
                    shard.path.display()
                ));
            }
        }
    }
    text
}

/// What the source is: lengths, times and headers of its files.
fn identity(checkpoint: &Checkpoint, path: &Path) -> Result<ManifestSource, ConvertError> {
    let root = directory_of(path);
    let name_of = |shard: &Shard| {
        let below = root.as_ref().and_then(|root| shard.path.strip_prefix(root).ok());
        let name = below.unwrap_or_else(|| Path::new(shard.path.file_name().unwrap_or_default()));
        name.to_string_lossy().into_owned()
    };
    let mut files = Vec::with_capacity(checkpoint.shards().len());
    for shard in checkpoint.shards() {
        let header_blake3 = hash_header(shard).map_err(|source| ConvertError::Read {
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
    let file = File::open(&shard.path)?;
    let mut hasher = blake3::Hasher::new();
    let mut piece = [0; 16 << 10];
    let mut offset = 0;
    while offset < shard.data.start() {
        let wanted = to_usize((shard.data.start() - offset).min(to_u64(piece.len())));
        match file.read_at(&mut piece[..wanted], offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                hasher.update(&piece[..count]);
                offset += to_u64(count);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(hex(hasher.finalize().as_bytes()))
}
