//! The shards as open files: at most [`OPEN_FILES_MAX`] descriptors, shared by all reader threads.
//!
//! A thread that finds its file open takes a shared lock on that shard alone and clones an [`Arc`]:
//! the same order of work as the kernel's own reference to the file in every `pread`. Only opening
//! takes the lock of the whole set. A file is closed when it was evicted *and* its last reader
//! returned it; the permit goes back after the close, so that the limit is exact at every instant.
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

/// Most descriptors that a source holds at once, however many shards and readers there are.
pub(super) const OPEN_FILES_MAX: usize = 16;

/// The shards of one checkpoint.
pub(super) struct FileSet<S> {
    pub(super) system: S,
    entries: Box<[Entry]>,
    table: Arc<Table>,
    /// Most descriptors at once.
    open_files_max: usize,
    /// Counts openings; what "recently" is measured in. It stands still while every file is found
    /// open, so the common case writes nothing shared.
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

/// What opening and closing agree on. Locked before a slot, never after.
#[derive(Default)]
struct Table {
    state: Mutex<TableState>,
    changed: Condvar,
}

#[derive(Default)]
struct TableState {
    /// Descriptors that exist or are about to.
    permits: usize,
    /// Entries whose slot is filled.
    filled: Vec<usize>,
    /// Counts permits that came back and slots that were filled: what [`Table::changed`] tells of.
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
    /// A panic while the lock is held leaves counters that are still true, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, TableState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: System> FileSet<S> {
    /// A set in which nothing is open yet.
    pub(super) fn new(system: S, shards: &[Shard]) -> Self {
        Self::with_most(system, shards, OPEN_FILES_MAX)
    }

    /// The same with another limit than [`OPEN_FILES_MAX`], for a source that has more than one
    /// set.
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

    /// All shards, the last first: a pass in this order leaves the first ones open.
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

    /// Refuses a payload that ends after the file did when it was checked. A mapping would fill the
    /// rest of the last page with zeros.
    pub(super) fn check_end(&self, request: &ReadRequest) -> Result<(), SourceError> {
        let entry = &self.entries[request.shard.index()];
        let (expected_end_bytes, found_end_bytes) = (request.payload.end(), entry.identity.len_bytes);
        if expected_end_bytes <= found_end_bytes {
            return Ok(());
        }
        Err(SourceError::EndOfFile { path: entry.path.clone(), expected_end_bytes, found_end_bytes })
    }

    /// The open file of a shard. A file that has to be opened is compared with the one that was
    /// checked, then given to `prepare`. May wait until another reader returns its file; a
    /// thread that waits here has no other file of this set, so this cannot deadlock.
    pub(super) fn acquire(
        &self,
        shard: ShardId,
        prepare: impl FnOnce(&File),
    ) -> Result<Arc<OpenFile>, SourceError> {
        Ok(self.acquire_if(shard, true, prepare)?.expect("it was to wait"))
    }

    /// The same, but `None` if it would have to wait for another reader and must not: a thread that
    /// has files already would keep those from others that wait, too.
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

    /// Compares the open file with the one that was checked. Called after bytes have been moved:
    /// every change of a file moves its times or its length *before* the bytes that readers
    /// see, so bytes that arrived before an unchanged status are bytes of the checked file.
    pub(super) fn verify(&self, shard: ShardId, file: &File) -> Result<(), SourceError> {
        let entry = &self.entries[shard.index()];
        let now = self
            .system
            .identity(file)
            .map_err(|source| SourceError::Status { path: entry.path.clone(), source })?;
        entry.compare(now)
    }

    /// Takes the right to open one more file; evicts the least recently used one where there is
    /// none left. `None` if it would have to wait and must not.
    fn permit(&self, may_wait: bool) -> Option<Permit> {
        let mut state = self.table.lock();
        while state.permits >= self.open_files_max {
            if let Some(evicted) = self.take_oldest(&mut state) {
                let seen = state.changes;
                // Closing locks the table, so it happens outside.
                drop(state);
                drop(evicted);
                state = self.table.lock();
                if state.changes != seen {
                    // The permit came back, to this thread or to a faster one. Whatever else came meanwhile
                    // was announced to nobody: to wait now could be to wait for ever.
                    continue;
                }
            }
            if !may_wait {
                return None;
            }
            // Either the evicted file is still being read, or every file is just being opened. Both end in
            // a notification: a permit that comes back, or a slot that is filled and can be evicted.
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

    /// Puts an opened file into its slot; if another thread was faster, its file is the one to use.
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
