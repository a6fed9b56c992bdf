//! Observes a conversion: shows progress, and records which files exist, in case it ends early.

use onelayer_system::units::to_u64;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use onelayer::convert::ConvertEvent;

use crate::output::terminal::ProgressMode;
use crate::progress::{Files, Progress};
use crate::report::FileState;

/// Records the events of a conversion. Clones share one record.
#[derive(Clone, Debug)]
pub(crate) struct Observer {
    heard: Arc<Mutex<Heard>>,
}

/// The recorded state.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    mode: Option<ProgressMode>,
    progress: Option<Progress>,
    is_verifying: bool,
    files_total: u64,
    /// Files of tensors that exist.
    pub(crate) files: HashMap<String, FileState>,
    /// Bytes of the files that were written.
    pub(crate) written_bytes: u64,
    /// Side files that exist.
    pub(crate) side_files: u64,
    /// Index and manifest exist.
    pub(crate) is_finished: bool,
}

impl Observer {
    /// An empty record. Progress is hidden until [`Self::show`].
    pub(crate) fn new() -> Self {
        Self { heard: Arc::default() }
    }

    /// Shows progress from now on.
    pub(crate) fn show(&self, mode: ProgressMode, files_total: u64) {
        let mut heard = self.lock();
        (heard.mode, heard.files_total) = (Some(mode), files_total);
    }

    /// Records an event of the library.
    pub(crate) fn hear(&self, event: &ConvertEvent<'_>) {
        self.lock().hear(event);
    }

    /// True once everything is written and is being compared.
    pub(crate) fn is_verifying(&self) -> bool {
        self.lock().is_verifying
    }

    /// Ends the progress display and returns the record.
    pub(crate) fn finish(&self) -> Heard {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Heard {
    fn hear(&mut self, event: &ConvertEvent<'_>) {
        match *event {
            ConvertEvent::Progress { done_bytes, total_bytes } => {
                let files = Files { done: self.files_done(), total: self.files_total };
                if let Some(progress) = self.shown("") {
                    progress.update_files(done_bytes, total_bytes, files);
                }
            }
            ConvertEvent::Verifying { done_bytes, total_bytes } => {
                if !std::mem::replace(&mut self.is_verifying, true) {
                    self.progress = None;
                }
                if let Some(progress) = self.shown("verify") {
                    progress.update(done_bytes, total_bytes, "");
                }
            }
            ConvertEvent::FileKept { file, bytes } => self.file(file, bytes, FileState::Kept),
            ConvertEvent::FilePublished { file, bytes } => {
                self.written_bytes = self.written_bytes.saturating_add(bytes);
                self.file(file, bytes, FileState::Written);
            }
            ConvertEvent::SideFile { .. } => self.side_files += 1,
            ConvertEvent::Finished => self.is_finished = true,
            _ => {}
        }
    }

    fn file(&mut self, name: &str, bytes: u64, state: FileState) {
        self.files.insert(name.to_owned(), state);
        let is_new = state == FileState::Written;
        if let Some(progress) = self.shown("") {
            progress.file(name, bytes, is_new);
        }
    }

    fn shown(&mut self, label: &str) -> Option<&mut Progress> {
        let mode = self.mode?;
        Some(self.progress.get_or_insert_with(|| Progress::start(mode, label)))
    }

    fn files_done(&self) -> u64 {
        to_u64(self.files.len())
    }

    /// Number of files in a state.
    pub(crate) fn count(&self, state: FileState) -> u64 {
        let count = self.files.values().filter(|found| **found == state).count();
        u64::try_from(count).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_remembered() {
        let observer = Observer::new();
        observer.show(ProgressMode::Never, 3);
        let listener = observer.clone();
        for event in [
            ConvertEvent::FileKept { file: "a", bytes: 5 },
            ConvertEvent::Progress { done_bytes: 1, total_bytes: 2 },
            ConvertEvent::FilePublished { file: "b", bytes: 7 },
            ConvertEvent::FilePublished { file: "c", bytes: 8 },
            ConvertEvent::SideFile { file: "config.json", bytes: 1 },
        ] {
            listener.hear(&event);
        }
        let heard = observer.finish();
        assert_eq!((heard.count(FileState::Kept), heard.count(FileState::Written)), (1, 2));
        assert_eq!((heard.written_bytes, heard.side_files, heard.is_finished), (15, 1, false));
        assert_eq!(heard.files["b"], FileState::Written);
    }
}
