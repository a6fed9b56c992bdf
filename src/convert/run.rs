//! Carries a conversion out: recover what an earlier run has left, write the files, publish them
//! one by one, end.
//!
//! ```text
//! load (readers, packer, writers) --> whole, unfinished name --> journal: written --> the next file may begin
//!                                                           \--> fsync, rename, fsync the folder --> journal: published
//! ```
//!
//! One file is written at a time, and the one before it is being published meanwhile. So whenever a
//! run is killed, there is at most one whose bytes are not all there; the one before it only has to
//! be hashed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, bounded};
use rustix::fs::Advice;

use super::digest::{Digest, hex};
use super::journal::{Journal, Record};
use super::manifest::ManifestTensor;
use super::output::{FileBackend, FileSet, FinishedFile, Found, OutputEnd, TargetDirectory};
use super::prepared::PreparedConversion;
use super::target::{self, FileState};
use super::{ConvertError, ConvertEvent, ConvertReport, KernelCopied, Part, Verification, clearing, ending};
use crate::checkpoint::{ShardId, open_regular};
use crate::load::{Hooks, LayerStream, LoadError, LoadSetup, Progress};
use crate::plan::{IoMode, LoadOptions, LoadPlan, PlannedLayer};
use crate::units::{ByteRange, to_u64};

/// How often the observer learns how far the conversion is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes that are hashed at once when an earlier run's file is checked.
const PIECE_BYTES: usize = 256 << 10;
/// What of such a file may stay in the page cache behind the cursor.
const CACHED_BYTES_MAX: usize = 8 << 20;
/// Layers read ahead: as many as the ring takes. Many files are small.
const PREFETCH_LAYERS: u32 = 64;

/// Converts, and ends the conversion unless it is one of several parts.
pub(super) fn convert(mut prepared: PreparedConversion) -> Result<ConvertReport, ConvertError> {
    let started = Instant::now();
    let mut report = empty_report(&prepared);
    if prepared.state.is_complete {
        if let Some(target) = TargetDirectory::open(&prepared.target)? {
            ending::tidy(&target, Vec::new())?;
        }
        keep_all(&prepared, &mut report);
        return verified(&prepared, report, started);
    }
    target::no_space(&prepared.target, prepared.needed_bytes, prepared.free_bytes())?;
    let target = TargetDirectory::create(&prepared.target)?;
    if prepared.settings.overwrite {
        clearing::clear(&prepared, &target)?;
    }
    let part = prepared.settings.part.or_else(|| Part::new(1, 1)).expect("there is a first part of one");
    let journal = Journal::begin(&target, part, &prepared.scope.fingerprint)?;
    // Another run may have ended since this one was prepared. From here on, nobody else works on this
    // part.
    prepared.look_again()?;
    if prepared.state.is_complete {
        drop(journal);
        ending::tidy(&target, Vec::new())?;
        keep_all(&prepared, &mut report);
        return verified(&prepared, report, started);
    }
    let plan = prepared.plan.take();
    let mut run = Run { prepared: &prepared, target: &target, journal, report: &mut report };
    let todo = run.recover()?;
    run.write(&todo, plan)?;
    drop(run);
    if prepared.settings.part.is_some() {
        report.elapsed = started.elapsed();
        return Ok(report);
    }
    ending::end(&prepared, &target, &mut report)?;
    verified(&prepared, report, started)
}

/// Ends a conversion whose parts are all there.
pub(super) fn finish(prepared: PreparedConversion) -> Result<ConvertReport, ConvertError> {
    let started = Instant::now();
    let mut report = empty_report(&prepared);
    let target = TargetDirectory::open(&prepared.target)?;
    match target {
        Some(target) if prepared.state.is_complete => ending::tidy(&target, Vec::new())?,
        Some(target) => ending::end(&prepared, &target, &mut report)?,
        None => {
            return Err(ending::incomplete(
                &prepared,
                &(0..prepared.scope.shapes.files.len()).collect::<Vec<_>>(),
            ));
        }
    }
    keep_all(&prepared, &mut report);
    verified(&prepared, report, started)
}

fn empty_report(prepared: &PreparedConversion) -> ConvertReport {
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
        notes: prepared.scope.notes.clone(),
        quantisation: Vec::new(),
        verification: None,
    }
}

/// Every file is there already.
fn keep_all(prepared: &PreparedConversion, report: &mut ConvertReport) {
    report.files_kept = to_u64(prepared.scope.shapes.files.len());
    report.is_complete = true;
}

/// Compares source and target, if that was asked for.
fn verified(
    prepared: &PreparedConversion,
    mut report: ConvertReport,
    started: Instant,
) -> Result<ConvertReport, ConvertError> {
    report.elapsed = started.elapsed();
    if prepared.settings.verify {
        let mut observe = |event: &ConvertEvent<'_>| prepared.settings.tell(event);
        let settings = &prepared.settings;
        let verification = Verification::with(settings.open_options.clone(), settings.reading());
        let found = verification.run(&prepared.target, Some(&prepared.source), &mut observe)?;
        report.verification = Some(found);
    }
    Ok(report)
}

impl super::Conversion {
    /// Tells the observer, if there is one.
    pub(super) fn tell(&self, event: &ConvertEvent<'_>) {
        if let Some(observer) = &self.observer {
            observer(event);
        }
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
    /// Publishes what an earlier run had written, and returns the files that are left to be
    /// written.
    fn recover(&mut self) -> Result<Vec<usize>, ConvertError> {
        let prepared = self.prepared;
        let mut todo = Vec::new();
        for file in prepared.own_files() {
            let (name, bytes) =
                (prepared.scope.shapes.files[file].id.as_str(), prepared.scope.lengths[file].0);
            let is_kept = match prepared.state.files[file] {
                FileState::Done => true,
                FileState::Unsure => self.publish_if_right(name, bytes)?,
                FileState::Missing => false,
            };
            if !is_kept {
                self.target.remove_partial(name)?;
                todo.push(file);
                continue;
            }
            self.report.files_kept += 1;
            prepared.settings.tell(&ConvertEvent::FileKept { file: name, bytes });
        }
        Ok(todo)
    }

    /// True if the file has the bytes that an earlier run wrote, under its final name or its
    /// unfinished one; then it is published.
    fn publish_if_right(&mut self, name: &str, expected_bytes: u64) -> Result<bool, ConvertError> {
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

    fn hashes_to(&self, mut file: &File, name: &str, record: &Record) -> Result<bool, ConvertError> {
        let failed =
            |source| ConvertError::Read { path: self.target.path_of(name), operation: "read", source };
        let mut digest = Digest::new(false);
        let mut piece = vec![0; PIECE_BYTES];
        let mut cached_bytes = 0;
        loop {
            if cached_bytes >= CACHED_BYTES_MAX {
                // A file system that does not heed advice keeps the pages.
                let _ = rustix::fs::fadvise(file, 0, None, Advice::DontNeed);
                cached_bytes = 0;
            }
            if self.prepared.cancel.is_cancelled() {
                return Err(LoadError::Cancelled.into());
            }
            match file.read(&mut piece) {
                Ok(0) => return Ok(hex(&digest.take().blake3) == record.blake3),
                Ok(count) => {
                    digest.update(&piece[..count]);
                    cached_bytes += count;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }

    /// Writes the files. `planned` is what was planned for those that seemed to be left.
    fn write(&mut self, todo: &[usize], planned: Option<Arc<LoadPlan>>) -> Result<(), ConvertError> {
        if todo.is_empty() {
            return Ok(());
        }
        let prepared = self.prepared;
        let plan = match planned {
            Some(plan) if todo == prepared.todo => plan,
            planned => {
                // There is room for one.
                drop(planned);
                Arc::new(prepared.scope.plan(&prepared.settings, todo)?)
            }
        };
        let headers = prepared.scope.headers(todo);
        let files = FileSet { plan: Arc::clone(&plan), headers, directory: self.target.clone() };
        let buffers = prepared.scope.buffers;
        let (backend, end) =
            FileBackend::start(files, buffers, prepared.settings.kernel_copy, prepared.settings.sha256)?;
        let setup = LoadSetup {
            checkpoint: prepared.scope.checkpoint.clone(),
            plan: Arc::clone(&plan),
            options: LoadOptions { prefetch_layers: PREFETCH_LAYERS, ..LoadOptions::default() },
            adapts: false,
            queues: (plan.io() == IoMode::Uring).then_some(1),
            observer: None,
            hooks: Hooks::default(),
            started: Instant::now(),
        };
        let mut stream = setup.start_on(backend, None)?;
        prepared.cancel.follow(Some(stream.cancel_handle()));
        let outcome = self.publish_all(&mut stream, &end, &plan, todo);
        prepared.cancel.follow(None);
        let load = stream.report();
        self.report.read_bytes += load.read_bytes;
        self.report.fallbacks = load.fallbacks;
        for (tensor, elements) in stream.progress().overflowed() {
            let (name, cast) = (prepared.scope.checkpoint.tensor(tensor).name, prepared.scope.cast(tensor));
            let cast = cast.map_or_else(String::new, |cast| format!(", from {cast}"));
            self.report
                .notes
                .push(format!("{name:?}: {elements} finite elements became infinite when cast{cast}"));
        }
        for error in stream.progress().quantisation_errors() {
            let name = prepared.scope.checkpoint.name_of(error.tensor).to_owned();
            self.report.quantisation.push((name, error));
        }
        self.report.write_mode = Some(end.write_mode());
        self.report.kernel_copied = end.kernel_copied();
        outcome
    }

    fn publish_all(
        &mut self,
        stream: &mut LayerStream,
        end: &OutputEnd,
        plan: &LoadPlan,
        todo: &[usize],
    ) -> Result<(), ConvertError> {
        let progress = stream.progress();
        let settings = &self.prepared.settings;
        thread::scope(|scope| {
            let (stop, stopped) = bounded::<()>(0);
            let ticker = thread::Builder::new().name("onelayer-tell".to_owned());
            if settings.observer.is_some() {
                let tell = |event: &ConvertEvent<'_>| settings.tell(event);
                let spawned = ticker.spawn_scoped(scope, move || tell_progress(&progress, &stopped, &tell));
                spawned.map_err(|source| LoadError::Thread { source })?;
            }
            let outcome = self.publish_each(stream, end, plan, todo);
            drop(stop);
            outcome
        })
    }

    fn publish_each(
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
            self.write_down(plan, file, &finished)?;
            // Its place is free: the next file begins while this one is published.
            drop(layer);
            let FinishedFile { index, partial, .. } = finished;
            let (name, bytes) = (partial.path().to_owned(), self.prepared.scope.lengths[file].0);
            let replace =
                self.prepared.settings.overwrite || self.prepared.state.records.find(&name).is_some();
            let modified_ns = partial.publish(replace)?;
            self.journal.published(&name, modified_ns)?;
            self.report.files_written += 1;
            self.report.written_bytes += bytes;
            self.prepared.settings.tell(&ConvertEvent::FilePublished { file: &name, bytes });
            self.drop_source_pages(stream, &plan.layers()[index]);
        }
        Ok(())
    }

    /// Gives back what reading through the page cache has left there of a file's source: it would
    /// be charged to the container.
    fn drop_source_pages(&self, stream: &LayerStream, planned: &PlannedLayer) {
        let (plan, checkpoint) = (stream.plan(), &self.prepared.scope.checkpoint);
        let fallbacks = stream.report().fallbacks;
        let is_cached = |shard: ShardId| match plan.io() {
            // It has manners of its own, and knows what was there before.
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
            // Whatever cannot be opened or does not heed advice keeps its pages.
            if let Ok((file, _)) = open_regular(&checkpoint.shard(shard).path) {
                let len_bytes = NonZeroU64::new(range.len_bytes());
                let _ = rustix::fs::fadvise(&file, range.start(), len_bytes, Advice::DontNeed);
            }
        }
    }

    /// Writes into the journal what the manifest gets.
    fn write_down(
        &mut self,
        plan: &LoadPlan,
        file: usize,
        finished: &FinishedFile,
    ) -> Result<(), ConvertError> {
        let scope = &self.prepared.scope;
        let shape = &scope.shapes.files[file];
        let (name, bytes) = (shape.id.as_str(), scope.lengths[file].0);
        let blake3 = hex(&finished.hashes.blake3);
        let layers = scope.shapes.layers(shape, &scope.layers);
        let prefix = &*scope.component(shape).prefix;
        let placements = plan.placements(&plan.layers()[finished.index]);
        let entry = |out: &mut dyn Write| -> io::Result<()> {
            write!(out, "{{\"name\":")?;
            serde_json::to_writer(&mut *out, name)?;
            write!(out, ",\"bytes\":{bytes},\"blake3\":\"{blake3}\"")?;
            if let Some(sha256) = &finished.hashes.sha256 {
                write!(out, ",\"sha256\":\"{}\"", hex(sha256))?;
            }
            write!(out, ",\"layers\":")?;
            serde_json::to_writer(&mut *out, &layers.iter().map(|id| id.as_str()).collect::<Vec<_>>())?;
            write!(out, ",\"tensors\":[")?;
            for (number, (placement, hashes)) in placements.iter().zip(&finished.tensors).enumerate() {
                let entry = scope.checkpoint.tensor(placement.tensor);
                out.write_all(if number > 0 { b"," } else { b"" })?;
                let (name, shape) = plan.delivered(placement, &entry);
                let tensor = ManifestTensor {
                    name: name.strip_prefix(prefix).unwrap_or(name).to_owned(),
                    dtype: placement.delivered_dtype_name(&entry).to_owned(),
                    cast_from: scope.cast(placement.tensor).map(|_| entry.dtype.to_string()),
                    quantised: placement.quantised.map(|form| form.to().to_string()),
                    shape: shape.to_vec(),
                    bytes: placement.len_bytes(),
                    blake3: hex(&hashes.blake3),
                    sha256: hashes.sha256.as_ref().map(hex),
                };
                serde_json::to_writer(&mut *out, &tensor)?;
            }
            out.write_all(b"]}")
        };
        self.journal.written(name, bytes, &blake3, entry)
    }
}

/// Tells how far the load is until the channel is closed.
fn tell_progress(
    progress: &Progress,
    stopped: &crossbeam_channel::Receiver<()>,
    tell: &dyn Fn(&ConvertEvent<'_>),
) {
    let total_bytes = progress.tensor_bytes_total();
    loop {
        tell(&ConvertEvent::Progress { done_bytes: progress.tensor_bytes_done(), total_bytes });
        match stopped.recv_timeout(PROGRESS_INTERVAL) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    tell(&ConvertEvent::Progress { done_bytes: progress.tensor_bytes_done(), total_bytes });
}
