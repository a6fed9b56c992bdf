//! Failures: a status and its text. The text of a thread's last failure is kept for it; panics
//! become failures here.
#![allow(unsafe_code, reason = "exports symbols")]

use std::any::Any;
use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use onelayer::{CheckpointError, DeviceError, LoadError};
use onelayer_dlpack::ExportError;

use crate::status::Status;

/// Why a call did not do what it was asked for.
#[derive(Debug)]
pub(crate) struct Failure {
    status: Status,
    text: String,
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// The text of the last failure on the calling thread; an empty text if there was none. Calls that
/// do not fail leave it as it is. Valid until the next failure on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn ol_last_error() -> *const c_char {
    // While a thread ends its text may be gone already.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

impl Failure {
    /// An argument that cannot be meant.
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self { status: Status::OL_EINVAL, text: text.into() }
    }

    /// Something that this version of the library does not do.
    pub(crate) fn unsupported(text: impl Into<String>) -> Self {
        Self { status: Status::OL_EUNSUPPORTED, text: text.into() }
    }

    /// Something that is not there.
    pub(crate) fn not_found(text: impl Into<String>) -> Self {
        Self { status: Status::OL_ENOTFOUND, text: text.into() }
    }

    fn with_causes(status: Status, error: &dyn Error) -> Self {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        Self { status, text }
    }

    fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Self { status: Status::OL_EPANIC, text: format!("a fault of the library: {text}") }
    }

    /// Keeps the text for the calling thread.
    fn report(self) -> Status {
        // C's texts end at the first zero.
        let text = CString::new(self.text.replace('\0', "\u{fffd}")).unwrap_or_default();
        // While a thread ends there is nobody to read it.
        let _ = LAST.try_with(|last| *last.borrow_mut() = text);
        self.status
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        Self::with_causes((&error).into(), &error)
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        Self::with_causes((&error).into(), &error)
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self::with_causes((&error).into(), &error)
    }
}

impl From<ExportError> for Failure {
    fn from(error: ExportError) -> Self {
        Self::with_causes((&error).into(), &error)
    }
}

/// Runs what a function does. A failure, a panic too, becomes the thread's last one.
pub(crate) fn guarded(body: impl FnOnce() -> Result<Status, Failure>) -> Status {
    // A handle whose call panicked may be used again: locks do not stay poisoned, and the loader ends a
    // load that panicked.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => status,
        Ok(Err(failure)) => failure.report(),
        Err(panic) => Failure::of_panic(&*panic).report(),
    }
}

/// As [`guarded`], for functions that return something else: `fallback` is what they return then.
pub(crate) fn guarded_or<T>(fallback: T, body: impl FnOnce() -> Result<T, Failure>) -> T {
    let mut value = None;
    guarded(|| {
        value = Some(body()?);
        Ok(Status::OL_OK)
    });
    value.unwrap_or(fallback)
}
