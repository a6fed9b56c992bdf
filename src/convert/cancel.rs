//! Cancels a conversion or a verification, with the load that it runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::load::CancelHandle;

/// Cancels a conversion or a verification from any thread.
#[derive(Clone, Debug, Default)]
pub struct ConvertCancel {
    is_cancelled: Arc<AtomicBool>,
    load: Arc<Mutex<Option<CancelHandle>>>,
}

impl ConvertCancel {
    /// Cancels it: it ends with [`LoadError::Cancelled`](crate::LoadError::Cancelled). Finished files
    /// stay.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        if let Some(load) = &*self.load.lock().unwrap_or_else(PoisonError::into_inner) {
            load.cancel();
        }
    }

    /// True once it is cancelled.
    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    /// Sets the load that is cancelled too. If the conversion is cancelled already, the load is
    /// cancelled at once.
    pub(super) fn set_load(&self, load: Option<CancelHandle>) {
        let mut current = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(load) = load.as_ref().filter(|_| self.is_cancelled()) {
            load.cancel();
        }
        *current = load;
    }
}
