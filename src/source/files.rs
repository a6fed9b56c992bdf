//! The open files of a checkpoint: at most [`OPEN_FILES_MAX`] descriptors, shared by all reader
//! threads.
//!
//! A thread that finds its file open takes a shared lock on that shard alone and clones an [`Arc`],
//! which costs about what the kernel's own file reference costs in every `pread`. Only opening
//! locks the whole set. A file is closed when it was evicted *and* its last reader returned it. Its
//! permit is returned after the close, so the limit is exact at every instant.
//!
//! ```text
//! closed --open, compare identity--> open, in its slot --least recently used--> evicted --last reader--> closed
//! ```

use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};

use crate::checkpoint::{FileIdentity, Shard, ShardId};

use super::system::System;
use super::{ReadRequest, SourceError};

/// Limit of open descriptors of a source, however many shards and readers there are.
pub(super) const OPEN_FILES_MAX: usize = 16;

/// The shards of one checkpoint.
pub(super) struct FileSet<S> {
    pub(super) system: S,
    entries: Box<[Entry]>,
    table: Arc<Table>,
    /// Limit of open descriptors.
    open_files_max: usize,
    /// Counts openings: the clock of "least recently used". It stands still while every file is
    /// found open, so the common case writes nothing shared.
    openings: AtomicU64,
}

struct Entry {
    path: PathBuf,
    identity: FileIdentity,
    slot: RwLock<Option<Arc<OpenFile>>>,
    last_used: AtomicU64,
}

impl Entry {
    fn compare(&self, now: FileIdentity) -> Result<(), SourceError> {
        if now == self.identity {
            return Ok(());
        }
        Err(SourceError::FileChanged {
            path: self.path.clone(),
            was: Box::new(self.identity),
            now: Box::new(now),
        })
    }
}

/// The shared state of opening and closing. Locked before a slot, never after.
#[derive(Default)]
struct Table {
    state: Mutex<TableState>,
    changed: Condvar,
}

#[derive(Default)]
struct TableState {
    /// Descriptors that are open or being opened.
    permits: usize,
    /// Entries whose slot is filled.
    filled: Vec<usize>,
    /// Counts returned permits and filled slots: the events of [`Table::changed`].
    changes: u64,
}

/// An open file. Fields drop in order: the descriptor is closed before the permit is returned.
pub(super) struct OpenFile {
    file: File,
    _permit: Permit,
}

impl Deref for OpenFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

/// The right to hold one descriptor.
struct Permit(Arc<Table>);

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.permits -= 1;
        state.changes += 1;
        drop(state);
        self.0.changed.notify_all();
    }
}

impl Table {
    /// A panic under the lock leaves valid counters, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, TableState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: System> FileSet<S> {
    /// A set in which nothing is open yet.
    pub(super) fn new(system: S, shards: &[Shard]) -> Self {
        Self::with_most(system, shards, OPEN_FILES_MAX)
    }

    /// The same with another limit, for a source that has several sets.
    pub(super) fn with_most(system: S, shards: &[Shard], open_files_max: usize) -> Self {
        let entry = |shard: &Shard| Entry {
            path: shard.path.clone(),
            identity: shard.identity,
            slot: RwLock::new(None),
            last_used: AtomicU64::new(0),
        };
        Self {
            system,
            entries: shards.iter().map(entry).collect(),
            table: Arc::default(),
            open_files_max,
            openings: AtomicU64::new(0),
        }
    }

    /// Number of shards.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// All shards, from the last: a pass in this order leaves the first ones open.
    pub(super) fn shards_from_last(&self) -> impl Iterator<Item = ShardId> + use<S> {
        (0..self.entries.len())
            .rev()
            .map(|index| ShardId(u32::try_from(index).expect("a checkpoint numbers its shards with a u32")))
    }

    /// The length of a shard when it was checked, in bytes.
    pub(super) fn len_bytes(&self, shard: ShardId) -> u64 {
        self.entries[shard.index()].identity.len_bytes
    }

    /// The path of a shard.
    pub(super) fn path(&self, shard: ShardId) -> &Path {
        &self.entries[shard.index()].path
    }

    /// Refuses a payload that ends behind the end of the checked file. A mapping would fill the
    /// rest of its last page with zeros.
    pub(super) fn check_end(&self, request: &ReadRequest) -> Result<(), SourceError> {
        let entry = &self.entries[request.shard.index()];
        let (expected_end_bytes, found_end_bytes) = (request.payload.end(), entry.identity.len_bytes);
        if expected_end_bytes <= found_end_bytes {
            return Ok(());
        }
        Err(SourceError::EndOfFile { path: entry.path.clone(), expected_end_bytes, found_end_bytes })
    }

    /// The open file of a shard. A file that has to be opened is compared with the checked one,
    /// then passed to `prepare`. May wait until another reader returns its file. A thread that
    /// waits here has no other file of this set, so this cannot deadlock.
    pub(super) fn acquire(
        &self,
        shard: ShardId,
        prepare: impl FnOnce(&File),
    ) -> Result<Arc<OpenFile>, SourceError> {
        Ok(self.acquire_if(shard, true, prepare)?.expect("it was to wait"))
    }

    /// The same, but `None` instead of waiting if `may_wait` is false. A thread that already has
    /// files must not wait: others may wait for those.
    pub(super) fn acquire_if(
        &self,
        shard: ShardId,
        may_wait: bool,
        prepare: impl FnOnce(&File),
    ) -> Result<Option<Arc<OpenFile>>, SourceError> {
        let entry = &self.entries[shard.index()];
        let found = entry.slot.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(file) = found {
            let now = self.openings.load(Ordering::Relaxed);
            if entry.last_used.load(Ordering::Relaxed) != now {
                entry.last_used.store(now, Ordering::Relaxed);
            }
            return Ok(Some(file));
        }
        let Some(permit) = self.permit(may_wait) else { return Ok(None) };
        let (file, identity) =
            self.system.open(&entry.path).map_err(|fault| SourceError::from_open(&entry.path, fault))?;
        entry.compare(identity)?;
        prepare(&file);
        Ok(Some(self.insert(shard.index(), OpenFile { file, _permit: permit })))
    }

    /// Compares the open file with the checked one. Called after bytes were moved: a change of a
    /// file changes its times or length *before* readers see it, so bytes that arrived before an
    /// unchanged status are bytes of the checked file.
    pub(super) fn verify(&self, shard: ShardId, file: &File) -> Result<(), SourceError> {
        let entry = &self.entries[shard.index()];
        let now = self
            .system
            .identity(file)
            .map_err(|source| SourceError::Status { path: entry.path.clone(), source })?;
        entry.compare(now)
    }

    /// Takes the permit for one more open file, and evicts the least recently used file if there is
    /// none left. `None` if it would have to wait and must not.
    fn permit(&self, may_wait: bool) -> Option<Permit> {
        let mut state = self.table.lock();
        while state.permits >= self.open_files_max {
            if let Some(evicted) = self.take_oldest(&mut state) {
                let seen = state.changes;
                // Closing locks the table, so it happens outside the lock.
                drop(state);
                drop(evicted);
                state = self.table.lock();
                if state.changes != seen {
                    // A permit came back, maybe to a faster thread. Notifications in between
                    // reached nobody, so waiting now could be for ever.
                    continue;
                }
            }
            if !may_wait {
                return None;
            }
            // Either the evicted file is still being read, or all files are just being opened. Both
            // end in a notification: a returned permit, or a filled slot that can be evicted.
            state = self.table.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.permits += 1;
        Some(Permit(Arc::clone(&self.table)))
    }

    fn take_oldest(&self, state: &mut TableState) -> Option<Arc<OpenFile>> {
        let last_used =
            |position: &usize| self.entries[state.filled[*position]].last_used.load(Ordering::Relaxed);
        let oldest = (0..state.filled.len()).min_by_key(last_used)?;
        let index = state.filled.swap_remove(oldest);
        self.entries[index].slot.write().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Puts an opened file into its slot. If another thread was faster, its file is used.
    fn insert(&self, index: usize, opened: OpenFile) -> Arc<OpenFile> {
        let entry = &self.entries[index];
        let opened = Arc::new(opened);
        let mut state = self.table.lock();
        let mut slot = entry.slot.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = slot.as_ref().map(Arc::clone) {
            drop(slot);
            drop(state);
            return file;
        }
        let now = self.openings.fetch_add(1, Ordering::Relaxed) + 1;
        entry.last_used.store(now, Ordering::Relaxed);
        *slot = Some(Arc::clone(&opened));
        drop(slot);
        state.filled.push(index);
        state.changes += 1;
        drop(state);
        self.table.changed.notify_all();
        opened
    }
}
