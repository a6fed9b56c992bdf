//! Checkpoints: their tensors, and the plan of a load.
#![allow(unsafe_code, reason = "follows pointers of the caller; each block names its requirement")]

use std::ffi::{CString, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, OnceLock, PoisonError};

use onelayer::checkpoint::TensorEntry;
use onelayer::{LoadError, PlanError, TensorReader};
use onelayer_dlpack::{DLDataType, data_type};

use crate::failure::{Failure, guarded, guarded_or};
use crate::foreign::{Out, borrowed, free, handle, name, text};
use crate::names::{Names, of_type};
use crate::options::Options;
use crate::sized::{self, SizedStruct};
use crate::status::Status;

/// The version of this interface. It grows when functions or fields are added. A program needs a
/// library of at least the version it was built with.
pub const OL_ABI_VERSION: u32 = 1;

/// An open checkpoint: its headers. May be used on several threads at once.
#[derive(Debug)]
pub struct Checkpoint {
    pub(crate) opened: onelayer::Checkpoint,
    /// Created on first use.
    names: OnceLock<Names>,
    /// Created on first use.
    reader: Mutex<Option<TensorReader>>,
}

/// The description of a tensor. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// sizeof(ol_tensor).
    pub struct_size: usize,
    /// Its name; valid until the checkpoint is closed.
    pub name: *const c_char,
    /// Length of the name in bytes. Names may contain NUL.
    pub name_bytes: usize,
    /// Its element type as spelled in the file, such as "BF16"; always valid.
    pub dtype: *const c_char,
    /// Elements per dimension, outermost first; valid until the checkpoint is closed.
    pub shape: *const u64,
    /// Number of dimensions.
    pub dimensions: usize,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Its DLPack element type; lanes is 0 if DLPack has no such type.
    pub element: DLDataType,
    /// Always 0.
    pub reserved: u32,
}

// SAFETY: `repr(C)`, the size comes first, and the rest are integers and pointers.
unsafe impl SizedStruct for Tensor {
    const NAME: &'static str = "ol_tensor";
    const BYTES_LEAST: usize = 64;
}

/// OL_ABI_VERSION of the loaded library.
#[unsafe(no_mangle)]
pub extern "C" fn ol_abi_version() -> u32 {
    OL_ABI_VERSION
}

/// Opens a checkpoint: a safetensors file, an index, or a directory. Reads and checks headers only.
/// Of the options, only hub_cache and revision are used.
///
/// *out is null unless the status is OL_OK; free it with ol_close(). Failures: OL_ENOTFOUND,
/// OL_EFORMAT, OL_EIO, OL_EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_open(
    source: *const c_char,
    options: *const Options,
    out: *mut *mut Checkpoint,
) -> Status {
    guarded(|| {
        // SAFETY: null or a variable of the caller (see `crate`).
        let mut out = unsafe { Out::new(out, std::ptr::null_mut(), "out") }?;
        // SAFETY: null or a string of the caller (see `crate`).
        let source = unsafe { text(source, "source") }?;
        // SAFETY: null or options of the caller (see `crate`).
        let options = unsafe { Options::read(options) }?;
        // SAFETY: strings of the caller (see `crate`).
        let opened = unsafe { options.open(OsStr::from_bytes(source.to_bytes())) }?;
        out.put(handle(Checkpoint::new(opened)));
        Ok(Status::OL_OK)
    })
}

/// Closes a checkpoint. Its streams, layers and tensors stay valid. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_close(checkpoint: *mut Checkpoint) {
    guarded(|| {
        // SAFETY: null or a handle that is no longer used (see `crate`).
        unsafe { free(checkpoint) };
        Ok(Status::OL_OK)
    });
}

/// Number of tensors in the checkpoint; 0 for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_tensor_count(checkpoint: *const Checkpoint) -> usize {
    // SAFETY: null or a live handle (see `crate`).
    guarded_or(0, || Ok(unsafe { borrowed(checkpoint, "checkpoint") }?.opened.tensor_count()))
}

/// Describes the tensor with this index, from 0 on. The first call builds a table of all names:
/// their length and nine bytes each, outside the budget.
///
/// OL_EINVAL if there is no such index or tensor->struct_size is invalid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_tensor_info(
    checkpoint: *const Checkpoint,
    index: usize,
    tensor: *mut Tensor,
) -> Status {
    guarded(|| {
        // SAFETY: null or a live handle (see `crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        let described = checkpoint.describe(index)?;
        // SAFETY: null or a structure of the caller (see `crate`).
        unsafe { sized::write(tensor, &described) }?;
        Ok(Status::OL_OK)
    })
}

/// The index of the tensor with this name. OL_ENOTFOUND if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_find_tensor(
    checkpoint: *const Checkpoint,
    name: *const c_char,
    index: *mut usize,
) -> Status {
    guarded(|| {
        // SAFETY: null or a variable of the caller (see `crate`).
        let mut out = unsafe { Out::new(index, usize::MAX, "index") }?;
        // SAFETY: null or a live handle (see `crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: null or a string of the caller (see `crate`).
        out.put(unsafe { checkpoint.find(name) }?.id.index());
        Ok(Status::OL_OK)
    })
}

/// The smallest host budget for a load with these options, in bytes. Ignores host_budget_bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_min_budget(
    checkpoint: *const Checkpoint,
    options: *const Options,
    bytes: *mut u64,
) -> Status {
    guarded(|| {
        // SAFETY: null or a variable of the caller (see `crate`).
        let mut out = unsafe { Out::new(bytes, 0, "bytes") }?;
        // SAFETY: null or a live handle (see `crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: null or options of the caller (see `crate`).
        let options = unsafe { Options::read(options) }?;
        match options.builder()?.plan(&checkpoint.opened) {
            Ok(plan) => out.put(plan.memory().smallest_budget_bytes()),
            Err(LoadError::Plan(PlanError::BudgetTooSmall { smallest_bytes, .. })) => out.put(smallest_bytes),
            Err(error) => return Err(error.into()),
        }
        Ok(Status::OL_OK)
    })
}

/// The plan of a load with these options, as text: how each file is read, and every term of the
/// peak memory. Reads no tensor.
///
/// *text is null unless the status is OL_OK; free it with ol_text_free(). OL_EBUDGET if the budget
/// is too small.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_plan_text(
    checkpoint: *const Checkpoint,
    options: *const Options,
    text: *mut *mut c_char,
) -> Status {
    guarded(|| {
        // SAFETY: null or a variable of the caller (see `crate`).
        let mut out = unsafe { Out::new(text, std::ptr::null_mut(), "text") }?;
        // SAFETY: null or a live handle (see `crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: null or options of the caller (see `crate`).
        let options = unsafe { Options::read(options) }?;
        let plan = options.builder()?.plan(&checkpoint.opened)?.to_string();
        let plan = CString::new(plan.replace('\0', "\u{fffd}")).unwrap_or_default();
        out.put(plan.into_raw());
        Ok(Status::OL_OK)
    })
}

/// Frees a text. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: made by `CString::into_raw` and no longer used (see `crate`).
        drop(unsafe { CString::from_raw(text) });
    }
}

impl Checkpoint {
    fn new(opened: onelayer::Checkpoint) -> Self {
        Self { opened, names: OnceLock::new(), reader: Mutex::default() }
    }

    /// The reader of single tensors.
    pub(crate) fn reader(&self) -> Result<TensorReader, Failure> {
        // A panic here leaves no half-changed state.
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reader) = reader.as_ref() {
            return Ok(reader.clone());
        }
        Ok(reader.insert(TensorReader::open(&self.opened)?).clone())
    }

    /// The tensor with this name.
    ///
    /// # Safety
    /// Null or a string (see [`crate`]).
    pub(crate) unsafe fn find(&self, wanted: *const c_char) -> Result<TensorEntry<'_>, Failure> {
        // SAFETY: the caller's promise.
        let wanted = name(unsafe { text(wanted, "name") }?, "the name")?;
        let found = self.opened.find(wanted);
        found.ok_or_else(|| Failure::not_found(format!("the checkpoint has no tensor named {wanted:?}")))
    }

    fn describe(&self, index: usize) -> Result<Tensor, Failure> {
        let count = self.opened.tensor_count();
        let names = self.names.get_or_init(|| Names::new(self.opened.tensors().map(|tensor| tensor.name)));
        // An id cannot be made from an index, so look up the name.
        let entry = names.get(index).and_then(|name| self.opened.find(name));
        let (Some(name), Some(entry)) = (names.pointer(index), entry) else {
            return Err(Failure::invalid(format!("there is no tensor {index}: the checkpoint has {count}")));
        };
        Ok(Tensor {
            struct_size: size_of::<Tensor>(),
            name,
            name_bytes: entry.name.len(),
            dtype: of_type(entry.dtype).as_ptr(),
            shape: entry.shape.as_ptr(),
            dimensions: entry.shape.len(),
            len_bytes: entry.len_bytes(),
            element: data_type(entry.dtype).unwrap_or(DLDataType { code: 0, bits: 0, lanes: 0 }),
            reserved: 0,
        })
    }
}
