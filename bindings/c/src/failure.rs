//! Failures: a status and its text. Each thread keeps the text of its last failure. Panics become
//! failures here.
#![allow(unsafe_code, reason = "exports symbols")]

use std::any::Any;
use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use onelayer::{CheckpointError, DeviceError, LoadError};
use onelayer_dlpack::ExportError;

use crate::status::Status;

/// The failure of a call.
#[derive(Debug)]
pub(crate) struct Failure {
    status: Status,
    text: String,
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// The text of the last failure on the calling thread, or an empty string. Successful calls do not
/// change it. Valid until the next failure on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn ol_last_error() -> *const c_char {
    // The text may already be gone while the thread ends.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

impl Failure {
    /// An invalid argument.
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self { status: Status::OL_EINVAL, text: text.into() }
    }

    /// Something that this library does not support.
    pub(crate) fn unsupported(text: impl Into<String>) -> Self {
        Self { status: Status::OL_EUNSUPPORTED, text: text.into() }
    }

    /// Something that does not exist.
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
        Self { status: Status::OL_EPANIC, text: format!("a bug in the library: {text}") }
    }

    /// Stores the text for the calling thread.
    fn report(self) -> Status {
        // C strings end at the first NUL.
        let text = CString::new(self.text.replace('\0', "\u{fffd}")).unwrap_or_default();
        // A thread that ends cannot read it any more.
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

/// Runs the body of a function. A failure or panic becomes the thread's last failure.
pub(crate) fn guarded(body: impl FnOnce() -> Result<Status, Failure>) -> Status {
    // A handle is still usable after a panic: lock poisoning is ignored, and the loader ends the
    // load.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => status,
        Ok(Err(failure)) => failure.report(),
        Err(panic) => Failure::of_panic(&*panic).report(),
    }
}

/// Like [`guarded`], for functions that return another type: a failure returns `fallback`.
pub(crate) fn guarded_or<T>(fallback: T, body: impl FnOnce() -> Result<T, Failure>) -> T {
    let mut value = None;
    guarded(|| {
        value = Some(body()?);
        Ok(Status::OL_OK)
    });
    value.unwrap_or(fallback)
}
