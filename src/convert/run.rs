//! Runs a conversion: recovers the files of earlier runs, writes the others, publishes them one by
//! one, and finishes.
//!
//! ```text
//! load (readers, packer, writers) --> whole, unfinished name --> journal: written
//!     --> the next file may begin
//!     --> fsync, rename, fsync the folder --> journal: published
//! ```
//!
//! One file is written at a time while the one before it is published. So a run that is killed
//! leaves at most one file with missing bytes; the one before it only has to be hashed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};

use super::finish::{finish, incomplete, remove_journals};
use super::hash::{Digest, hex};
use super::header::Written;
use super::journal::{Journal, Record};
use super::manifest::{ManifestFile, ManifestTensor, write_file_entry};
use super::output::{FileBackend, FinishedFile, OutputEnd};
use super::prepare::PreparedConversion;
use super::read_file::{ReadFault, drop_from_cache, read_open_file};
use super::target_directory::{Found, TargetDirectory};
use super::target_state::{FileState, remove_other_conversion};
use super::{
    Conversion, ConvertError, ConvertEvent, ConvertReport, KernelCopied, Part, Verification, source_overlap,
};
use crate::checkpoint::{FileIdentity, ShardId, open_regular};
use crate::load::{Hooks, LayerStream, LoadError, LoadSetup, Progress};
use crate::plan::{IoMode, LoadOptions, LoadPlan, PlannedLayer};
use crate::units::{ByteRange, to_u64};

/// Time between two reports of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Layers read ahead: as many as the ring holds. Many files are small.
const PREFETCH_LAYERS: u32 = 64;

impl PreparedConversion {
    /// Converts. If the conversion has parts, only the files of this part are made, and
    /// [`Self::finish`] is left to be called; else the target is complete when this returns.
    ///
    /// # Errors
    /// [`ConvertError`]. Files that are published stay.
    pub fn run(mut self) -> Result<ConvertReport, ConvertError> {
        let started = Instant::now();
        let mut report = self.empty_report();
        if self.state.is_complete {
            if let Some(target) = TargetDirectory::open(&self.target)? {
                remove_journals(&target, Vec::new())?;
            }
            self.keep_all(&mut report);
            return self.verified(report, started);
        }
        self.check_room()?;
        let target = TargetDirectory::create(&self.target)?;
        let part = self.settings.part.or_else(|| Part::new(1, 1)).expect("there is a first part of one");
        if self.settings.overwrite {
            let source_paths =
                source_overlap::paths_of(&self.source, &self.files.checkpoint, &self.side_files);
            remove_other_conversion(&target, &self.files, &self.side_files, &source_paths, part.of())?;
        }
        let journal = Journal::begin(&target, part, &self.files.fingerprint)?;
        // Another run may have ended since this one was prepared. From here on, no other run works
        // on this part.
        self.read_state_again()?;
        if self.state.is_complete {
            drop(journal);
            remove_journals(&target, Vec::new())?;
            self.keep_all(&mut report);
            return self.verified(report, started);
        }
        let plan = self.plan.take();
        let mut run = Run { prepared: &self, target: &target, journal, report: &mut report };
        let todo = run.recover()?;
        run.write(&todo, plan)?;
        drop(run);
        if self.settings.part.is_some() {
            report.elapsed = started.elapsed();
            return Ok(report);
        }
        finish(&self, &target, &mut report)?;
        self.verified(report, started)
    }

    /// Checks that every file of every part is there, and writes side files, index and manifest.
    ///
    /// # Errors
    /// [`ConvertError::Incomplete`] if files are missing, [`ConvertError::Locked`] if a part is
    /// being converted.
    pub fn finish(self) -> Result<ConvertReport, ConvertError> {
        let started = Instant::now();
        let mut report = self.empty_report();
        match TargetDirectory::open(&self.target)? {
            Some(target) if self.state.is_complete => remove_journals(&target, Vec::new())?,
            Some(target) => finish(&self, &target, &mut report)?,
            None => {
                let all: Vec<usize> = (0..self.files.layout.files.len()).collect();
                return Err(incomplete(&self, &all));
            }
        }
        self.keep_all(&mut report);
        self.verified(report, started)
    }

    fn empty_report(&self) -> ConvertReport {
        ConvertReport {
            elapsed: Duration::ZERO,
            files_written: 0,
            files_kept: 0,
            written_bytes: 0,
            read_bytes: 0,
            side_files: 0,
            is_complete: false,
            write_mode: None,
            kernel_copied: KernelCopied::default(),
            fallbacks: Vec::new(),
            notes: self.files.notes.clone(),
            quantisation: Vec::new(),
            verification: None,
        }
    }

    fn check_room(&self) -> Result<(), ConvertError> {
        let (needed_bytes, free_bytes) = (self.needed_bytes, self.free_bytes());
        if needed_bytes <= free_bytes {
            return Ok(());
        }
        Err(ConvertError::NoSpace { path: self.target.clone(), needed_bytes, free_bytes })
    }

    /// Reports that every file was there already.
    fn keep_all(&self, report: &mut ConvertReport) {
        report.files_kept = to_u64(self.files.layout.files.len());
        report.is_complete = true;
    }

    /// Compares source and target, if that was asked for.
    fn verified(&self, mut report: ConvertReport, started: Instant) -> Result<ConvertReport, ConvertError> {
        report.elapsed = started.elapsed();
        if self.settings.verify {
            let mut observe = |event: &ConvertEvent<'_>| self.settings.report(event);
            let settings = &self.settings;
            let verification =
                Verification::with(settings.open_options.clone(), settings.reading(), self.cancel.clone());
            report.verification = Some(verification.run(&self.target, Some(&self.source), &mut observe)?);
        }
        Ok(report)
    }
}

/// One run, with its part locked.
struct Run<'a> {
    prepared: &'a PreparedConversion,
    target: &'a TargetDirectory,
    journal: Journal,
    report: &'a mut ConvertReport,
}

impl Run<'_> {
    /// Publishes files that an earlier run wrote, and returns those that are left to be written.
    fn recover(&mut self) -> Result<Vec<usize>, ConvertError> {
        let prepared = self.prepared;
        let mut todo = Vec::new();
        for file in prepared.own_files() {
            let name = prepared.files.layout.files[file].id.as_str();
            let bytes = prepared.files.sizes[file].file_bytes;
            let is_kept = match prepared.state.files[file] {
                FileState::Done => true,
                FileState::Unsure => self.publish_if_whole(name, bytes)?,
                FileState::Missing => false,
            };
            if !is_kept {
                self.target.remove_partial(name)?;
                todo.push(file);
                continue;
            }
            self.report.files_kept += 1;
            prepared.settings.report(&ConvertEvent::FileKept { file: name, bytes });
        }
        Ok(todo)
    }

    /// Publishes a file that has the bytes that an earlier run wrote, under its final or its
    /// unfinished name. False if there is none.
    fn publish_if_whole(&mut self, name: &str, expected_bytes: u64) -> Result<bool, ConvertError> {
        let Some(record) = self.prepared.state.records.find(name) else { return Ok(false) };
        if let Some(Found::File { len_bytes, modified_ns, .. }) = self.target.find(name)?
            && len_bytes == expected_bytes
            && self.hashes_to(&self.target.open_file(name)?, name, record)?
        {
            self.target.sync_folder_of(name)?;
            self.journal.published(name, modified_ns)?;
            self.target.remove_partial(name)?;
            return Ok(true);
        }
        if let Some(Found::File { len_bytes, .. }) = self.target.find_partial(name)?
            && len_bytes == expected_bytes
        {
            let partial = self.target.open_partial(name)?;
            if self.hashes_to(partial.file(), name, record)? {
                let modified_ns = partial.publish(true)?;
                self.journal.published(name, modified_ns)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn hashes_to(&self, file: &File, name: &str, record: &Record) -> Result<bool, ConvertError> {
        let path = self.target.path_of(name);
        let stat_failed = |source| ConvertError::Read { path: path.clone(), operation: "stat", source };
        let was = FileIdentity::of(file).map_err(stat_failed)?;
        let cancel = &self.prepared.cancel;
        let mut digest = Digest::new(false);
        let read = read_open_file(file, was, |piece| {
            if cancel.is_cancelled() {
                return Err(LoadError::Cancelled);
            }
            digest.update(piece);
            Ok(())
        });
        match read {
            Ok(_) => Ok(hex(&digest.take().blake3) == record.blake3),
            // Another program changed it: it is written again.
            Err(ReadFault::Changed(_)) => Ok(false),
            Err(fault) => Err(fault.at(&path)),
        }
    }

    /// Writes the files. `planned` is the plan of those that seemed to be left before recovery.
    fn write(&mut self, todo: &[usize], planned: Option<Arc<LoadPlan>>) -> Result<(), ConvertError> {
        if todo.is_empty() {
            return Ok(());
        }
        let prepared = self.prepared;
        let plan = match planned {
            Some(plan) if todo == prepared.todo => plan,
            planned => {
                // The budget has room for one plan only.
                drop(planned);
                Arc::new(prepared.files.load_plan(&prepared.settings, todo)?)
            }
        };
        let files = prepared.files.file_set(&plan, todo, self.target);
        let settings = &prepared.settings;
        let (backend, end) =
            FileBackend::start(files, prepared.files.buffers, settings.kernel_copy, settings.sha256)?;
        let setup = LoadSetup {
            checkpoint: prepared.files.checkpoint.clone(),
            plan: Arc::clone(&plan),
            options: LoadOptions { prefetch_layers: PREFETCH_LAYERS, ..LoadOptions::default() },
            adapts: false,
            queues: (plan.io() == IoMode::Uring).then_some(1),
            observer: None,
            hooks: Hooks::default(),
            started: Instant::now(),
        };
        let mut stream = setup.start_on(backend, None)?;
        prepared.cancel.set_load(Some(stream.cancel_handle()));
        let outcome =
            while_reporting(settings, stream.progress(), || self.publish_all(&mut stream, &end, &plan, todo));
        prepared.cancel.set_load(None);
        self.report_load(&stream);
        self.report.write_mode = Some(end.write_mode());
        self.report.kernel_copied = end.kernel_copied();
        outcome
    }

    fn report_load(&mut self, stream: &LayerStream) {
        let files = &self.prepared.files;
        let load = stream.report();
        self.report.read_bytes += load.read_bytes;
        self.report.fallbacks = load.fallbacks;
        for (tensor, elements) in stream.progress().overflowed() {
            let (name, cast) = (files.checkpoint.tensor(tensor).name, files.cast(tensor));
            let cast = cast.map_or_else(String::new, |cast| format!(", from {cast}"));
            self.report
                .notes
                .push(format!("{name:?}: {elements} finite elements became infinite when cast{cast}"));
        }
        for error in stream.progress().quantisation_errors() {
            let name = files.checkpoint.name_of(error.tensor).to_owned();
            self.report.quantisation.push((name, error));
        }
    }

    /// Publishes each file once it is written.
    fn publish_all(
        &mut self,
        stream: &mut LayerStream,
        end: &OutputEnd,
        plan: &LoadPlan,
        todo: &[usize],
    ) -> Result<(), ConvertError> {
        while let Some(layer) = stream.next() {
            let layer = layer.map_err(|error| end.explain(error))?;
            let finished = end.finished.recv().map_err(|_| end.explain(LoadError::Cancelled))?;
            let file = todo[finished.index];
            self.note_written(plan, file, &finished)?;
            // The next file begins while this one is published.
            drop(layer);
            let FinishedFile { index, partial, .. } = finished;
            let (name, bytes) = (partial.path().to_owned(), self.prepared.files.sizes[file].file_bytes);
            let replace =
                self.prepared.settings.overwrite || self.prepared.state.records.find(&name).is_some();
            let modified_ns = partial.publish(replace)?;
            self.journal.published(&name, modified_ns)?;
            self.report.files_written += 1;
            self.report.written_bytes += bytes;
            self.prepared.settings.report(&ConvertEvent::FilePublished { file: &name, bytes });
            self.drop_source_pages(stream, &plan.layers()[index]);
        }
        Ok(())
    }

    /// Drops the source of a file from the page cache, which would be charged to the container.
    fn drop_source_pages(&self, stream: &LayerStream, planned: &PlannedLayer) {
        let (plan, checkpoint) = (stream.plan(), &self.prepared.files.checkpoint);
        let fallbacks = stream.report().fallbacks;
        let is_cached = |shard: ShardId| match plan.io() {
            // It drops only pages that were not cached before.
            IoMode::Auto => false,
            IoMode::Direct | IoMode::Uring => fallbacks.iter().any(|fallback| fallback.shard == shard),
            IoMode::Buffered | IoMode::Mmap => true,
        };
        let mut ranges: BTreeMap<ShardId, ByteRange> = BTreeMap::new();
        for placement in plan.placements(planned).iter().filter(|placement| !placement.extent.is_empty()) {
            let shard = checkpoint.tensor(placement.tensor).shard;
            let range = ranges.entry(shard).or_insert(placement.extent);
            *range = range.join(placement.extent);
        }
        for (shard, range) in ranges.into_iter().filter(|(shard, _)| is_cached(*shard)) {
            // A file that cannot be opened keeps its pages.
            if let Ok((file, _)) = open_regular(&checkpoint.shard(shard).path) {
                drop_from_cache(&file, range.start(), range.end());
            }
        }
    }

    /// Adds a file to the journal, with its entry of the manifest.
    fn note_written(
        &mut self,
        plan: &LoadPlan,
        file: usize,
        finished: &FinishedFile,
    ) -> Result<(), ConvertError> {
        let planned = &self.prepared.files;
        let target_file = &planned.layout.files[file];
        let layers = planned.layout.layers(target_file, &planned.layers);
        let entry = ManifestFile {
            name: target_file.id.to_string(),
            bytes: planned.sizes[file].file_bytes,
            blake3: hex(&finished.hashes.blake3),
            sha256: finished.hashes.sha256.as_ref().map(hex),
            layers: layers.iter().map(ToString::to_string).collect(),
            tensors: Vec::new(),
        };
        let prefix = &*planned.component(target_file).prefix;
        let placements = plan.placements(&plan.layers()[finished.index]);
        let tensors = placements.iter().zip(&finished.tensors).map(|(placement, hashes)| {
            let source = planned.checkpoint.tensor(placement.tensor);
            let Written { name, dtype, shape, .. } = Written::of(plan, placement, &source);
            ManifestTensor {
                name: name.strip_prefix(prefix).unwrap_or(name).to_owned(),
                dtype: dtype.to_owned(),
                cast_from: planned.cast(placement.tensor).map(|_| source.dtype.to_string()),
                quantised: placement.quantised.map(|form| form.to().to_string()),
                shape: shape.to_vec(),
                bytes: placement.len_bytes(),
                blake3: hex(&hashes.blake3),
                sha256: hashes.sha256.as_ref().map(hex),
            }
        });
        let write_entry = |out: &mut dyn Write| write_file_entry(out, &entry, tensors);
        self.journal.written(&entry.name, entry.bytes, &entry.blake3, write_entry)
    }
}

/// Does `work`, and meanwhile reports the progress of a load from another thread, if there is an
/// observer.
fn while_reporting(
    settings: &Conversion,
    progress: Progress,
    work: impl FnOnce() -> Result<(), ConvertError>,
) -> Result<(), ConvertError> {
    if settings.observer.is_none() {
        return work();
    }
    thread::scope(|scope| {
        let (stop, stopped) = bounded::<()>(0);
        let reporter = thread::Builder::new().name("onelayer-report".to_owned());
        let spawned = reporter.spawn_scoped(scope, move || report_progress(settings, &progress, &stopped));
        spawned.map_err(|source| LoadError::Thread { source })?;
        let outcome = work();
        drop(stop);
        outcome
    })
}

/// Reports the progress of a load until the channel is closed.
fn report_progress(settings: &Conversion, progress: &Progress, stopped: &Receiver<()>) {
    let total_bytes = progress.tensor_bytes_total();
    let report = || {
        let done_bytes = progress.tensor_bytes_done();
        settings.report(&ConvertEvent::Progress { done_bytes, total_bytes });
    };
    report();
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(PROGRESS_INTERVAL) {
        report();
    }
    report();
}
