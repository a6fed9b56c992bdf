//! Checkpoints: what they hold, and what a load of them would do.
#![allow(unsafe_code, reason = "follows pointers of the caller's; each block says what it relies on")]

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

/// The version of this interface. It grows when functions or fields are added; a program needs a
/// library of at least the version it was built with.
pub const OL_ABI_VERSION: u32 = 1;

/// What a checkpoint on disk holds: headers only. May be used on several threads at once.
#[derive(Debug)]
pub struct Checkpoint {
    pub(crate) opened: onelayer::Checkpoint,
    /// Made when they are first asked for.
    names: OnceLock<Names>,
    /// Made when it is first asked for.
    reader: Mutex<Option<TensorReader>>,
}

/// What a tensor is. Set struct_size before it is filled in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// sizeof(ol_tensor).
    pub struct_size: usize,
    /// Its name; valid until the checkpoint is closed.
    pub name: *const c_char,
    /// Length of the name in bytes. Names may hold zeros.
    pub name_bytes: usize,
    /// Its element type as the file spells it, "BF16"; valid for ever.
    pub dtype: *const c_char,
    /// Elements per dimension, outermost first; valid until the checkpoint is closed.
    pub shape: *const u64,
    /// Dimensions.
    pub dimensions: usize,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Its element type as DLPack has it; without lanes where it has none.
    pub element: DLDataType,
    /// 0.
    pub reserved: u32,
}

// SAFETY: `repr(C)`, the size comes first, and the rest are integers and pointers.
unsafe impl SizedStruct for Tensor {
    const NAME: &'static str = "ol_tensor";
    const BYTES_LEAST: usize = 64;
}

/// OL_ABI_VERSION of the library that is loaded.
#[unsafe(no_mangle)]
pub extern "C" fn ol_abi_version() -> u32 {
    OL_ABI_VERSION
}

/// Opens a checkpoint: a safetensors file, an index, or a directory. Reads and checks headers only.
/// Of the options only hub_cache and revision matter here.
///
/// *out is null unless it is OL_OK; ol_close() gives it back. OL_ENOTFOUND, OL_EFORMAT, OL_EIO,
/// OL_EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_open(
    source: *const c_char,
    options: *const Options,
    out: *mut *mut Checkpoint,
) -> Status {
    guarded(|| {
        // SAFETY: a variable of the caller's (`crate`).
        let mut out = unsafe { Out::new(out, std::ptr::null_mut(), "out") }?;
        // SAFETY: a text of the caller's (`crate`).
        let source = unsafe { text(source, "source") }?;
        // SAFETY: options of the caller's (`crate`).
        let options = unsafe { Options::read(options) }?;
        // SAFETY: texts of the caller's (`crate`).
        let opened = unsafe { options.open(OsStr::from_bytes(source.to_bytes())) }?;
        out.put(handle(Checkpoint::new(opened)));
        Ok(Status::OL_OK)
    })
}

/// Closes a checkpoint. Streams, layers and tensors that came from it stay as they are. Null is
/// ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_close(checkpoint: *mut Checkpoint) {
    guarded(|| {
        // SAFETY: a handle that nobody uses any more (`crate`).
        unsafe { free(checkpoint) };
        Ok(Status::OL_OK)
    });
}

/// Tensors in the checkpoint; 0 for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_tensor_count(checkpoint: *const Checkpoint) -> usize {
    // SAFETY: a handle of the caller's (`crate`).
    guarded_or(0, || Ok(unsafe { borrowed(checkpoint, "checkpoint") }?.opened.tensor_count()))
}

/// Describes a tensor by its number, from 0 on. The first call makes a table of all names, of their
/// length and nine bytes each, which no budget counts.
///
/// OL_EINVAL if there is no tensor of that number, or if tensor->struct_size is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_tensor_info(
    checkpoint: *const Checkpoint,
    index: usize,
    tensor: *mut Tensor,
) -> Status {
    guarded(|| {
        // SAFETY: a handle of the caller's (`crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        let described = checkpoint.describe(index)?;
        // SAFETY: a structure of the caller's (`crate`).
        unsafe { sized::write(tensor, &described) }?;
        Ok(Status::OL_OK)
    })
}

/// The number of the tensor of that name. OL_ENOTFOUND if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_find_tensor(
    checkpoint: *const Checkpoint,
    name: *const c_char,
    index: *mut usize,
) -> Status {
    guarded(|| {
        // SAFETY: a variable of the caller's (`crate`).
        let mut out = unsafe { Out::new(index, usize::MAX, "index") }?;
        // SAFETY: a handle of the caller's (`crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: a text of the caller's (`crate`).
        out.put(unsafe { checkpoint.find(name) }?.id.index());
        Ok(Status::OL_OK)
    })
}

/// The smallest host budget that a load with these options works with, in bytes; their own
/// host_budget_bytes is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_min_budget(
    checkpoint: *const Checkpoint,
    options: *const Options,
    bytes: *mut u64,
) -> Status {
    guarded(|| {
        // SAFETY: a variable of the caller's (`crate`).
        let mut out = unsafe { Out::new(bytes, 0, "bytes") }?;
        // SAFETY: a handle of the caller's (`crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: options of the caller's (`crate`).
        let options = unsafe { Options::read(options) }?;
        match options.builder()?.plan(&checkpoint.opened) {
            Ok(plan) => out.put(plan.memory().smallest_budget_bytes()),
            Err(LoadError::Plan(PlanError::BudgetTooSmall { smallest_bytes, .. })) => out.put(smallest_bytes),
            Err(error) => return Err(error.into()),
        }
        Ok(Status::OL_OK)
    })
}

/// What a load with these options would do, as text: how each file is read, and every term of the
/// peak of memory. Reads no tensor.
///
/// *text is null unless it is OL_OK; ol_text_free() gives it back. OL_EBUDGET if the budget cannot
/// work.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ol_plan_text(
    checkpoint: *const Checkpoint,
    options: *const Options,
    text: *mut *mut c_char,
) -> Status {
    guarded(|| {
        // SAFETY: a variable of the caller's (`crate`).
        let mut out = unsafe { Out::new(text, std::ptr::null_mut(), "text") }?;
        // SAFETY: a handle of the caller's (`crate`).
        let checkpoint = unsafe { borrowed(checkpoint, "checkpoint") }?;
        // SAFETY: options of the caller's (`crate`).
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
        // SAFETY: made by `CString::into_raw`, and nobody uses it any more (`crate`).
        drop(unsafe { CString::from_raw(text) });
    }
}

impl Checkpoint {
    fn new(opened: onelayer::Checkpoint) -> Self {
        Self { opened, names: OnceLock::new(), reader: Mutex::default() }
    }

    /// What reads single tensors.
    pub(crate) fn reader(&self) -> Result<TensorReader, Failure> {
        // Nothing is half done when a thread panics here.
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reader) = reader.as_ref() {
            return Ok(reader.clone());
        }
        Ok(reader.insert(TensorReader::open(&self.opened)?).clone())
    }

    /// The tensor of a name.
    ///
    /// # Safety
    /// Null or a text, as [`crate`] promises.
    pub(crate) unsafe fn find(&self, wanted: *const c_char) -> Result<TensorEntry<'_>, Failure> {
        // SAFETY: the caller's promise.
        let wanted = name(unsafe { text(wanted, "name") }?, "the name")?;
        let found = self.opened.find(wanted);
        found.ok_or_else(|| Failure::not_found(format!("the checkpoint has no tensor named {wanted:?}")))
    }

    fn describe(&self, index: usize) -> Result<Tensor, Failure> {
        let count = self.opened.tensor_count();
        let names = self.names.get_or_init(|| Names::new(self.opened.tensors().map(|tensor| tensor.name)));
        // Ids cannot be made from numbers; names lead to them.
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
            len_bytes: entry.extent.len_bytes(),
            element: data_type(entry.dtype).unwrap_or(DLDataType { code: 0, bits: 0, lanes: 0 }),
            reserved: 0,
        })
    }
}
