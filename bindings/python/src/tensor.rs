//! A Python tensor, and its export to numpy, torch and others with DLPack.
//!
//! A tensor of a layer is usable until the layer is closed. An export has a separate lease and may
//! outlive tensor, layer, stream and checkpoint.
#![allow(unsafe_code, reason = "passes consumer streams and owned memory to DLPack; each block says why")]

use std::ffi::c_void;
use std::sync::Arc;

use onelayer::{DType, LoadedTensor, Target, TensorHash};
use onelayer_dlpack::{DEVICE_CPU, DLDevice, ExportError, FLAG_IS_COPIED, ManagedTensor, Memory};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::capsule;
use crate::errors;
use crate::held::Held;
use crate::memory::HostMemory;

/// The default stream of a CUDA consumer: the legacy default stream.
const LEGACY_STREAM: i64 = 1;
/// The consumer synchronises itself.
const NO_STREAM: i64 = -1;

const CPU: DLDevice = DLDevice { device_type: DEVICE_CPU, device_id: 0 };

/// A tensor in memory.
#[pyclass(frozen, module = "onelayer")]
pub(crate) struct Tensor {
    name: String,
    /// Its element type.
    dtype: DType,
    /// The type as spelled in the file, unless it was cast.
    dtype_name: String,
    shape: Vec<u64>,
    nbytes: u64,
    source: Source,
}

/// The owner of the bytes.
#[derive(Clone)]
enum Source {
    /// A layer, until it is closed.
    Layer(Arc<Held>),
    /// A resident model. The layer stays as long as this does.
    Model(Arc<LoadedTensor>, Target),
    /// Owned host memory.
    Memory(Arc<HostMemory>),
}

impl Tensor {
    pub(crate) fn of_layer(held: &Arc<Held>, tensor: &LoadedTensor) -> Self {
        Self::of_source(tensor, Source::Layer(Arc::clone(held)))
    }

    /// A tensor of a model that is resident on this target.
    pub(crate) fn of_model(tensor: LoadedTensor, target: Target) -> Self {
        let tensor = Arc::new(tensor);
        Self::of_source(&tensor, Source::Model(Arc::clone(&tensor), target))
    }

    fn of_source(tensor: &LoadedTensor, source: Source) -> Self {
        let entry = tensor.entry();
        let dtype = tensor.dtype();
        let dtype_name = if dtype == entry.dtype { entry.dtype_name } else { dtype.name() };
        Self {
            name: tensor.name().to_owned(),
            dtype,
            dtype_name: dtype_name.to_owned(),
            shape: tensor.shape().to_vec(),
            nbytes: tensor.len_bytes(),
            source,
        }
    }

    /// A tensor in owned memory, with its type and the type name of its file.
    pub(crate) fn of_memory(
        name: &str,
        (dtype, dtype_name): (DType, &str),
        shape: Vec<u64>,
        memory: HostMemory,
    ) -> Self {
        let nbytes = memory.len_bytes();
        let source = Source::Memory(Arc::new(memory));
        let (name, dtype_name) = (name.to_owned(), dtype_name.to_owned());
        Self { name, dtype, dtype_name, shape, nbytes, source }
    }

    fn target(&self) -> Target {
        match &self.source {
            Source::Layer(held) => held.target,
            Source::Model(_, target) => *target,
            Source::Memory(_) => Target::Host,
        }
    }

    fn device(&self) -> PyResult<DLDevice> {
        onelayer_dlpack::device(self.target()).ok_or_else(|| self.nowhere())
    }

    /// The error for bytes that were read and dropped.
    fn nowhere(&self) -> PyErr {
        let (name, target) = (&self.name, self.target());
        PyBufferError::new_err(format!(
            "tensor {name:?} was loaded to {target}, where there is nothing to export"
        ))
    }

    /// True if the consumer gets a copy on the host, false if it shares the memory. Refuses other
    /// copies.
    fn must_copy(
        &self,
        device: DLDevice,
        wanted_device: Option<&Bound<'_, PyAny>>,
        wanted_copy: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let copy = wanted_copy.map(|copy| argument::<bool>(copy, "copy")).transpose()?;
        let wanted = wanted_device.map(|wanted| argument::<(i32, i32)>(wanted, "dl_device")).transpose()?;
        let refused = |why: &str| {
            let (name, is) = (&self.name, self.device_name());
            Err(PyBufferError::new_err(format!("tensor {name:?} on {is}: {why}")))
        };
        match wanted.filter(|&wanted| wanted != (device.device_type, device.device_id)) {
            None if copy == Some(true) && device != CPU => {
                refused("it can only be copied to the host, not within its device")
            }
            None => Ok(copy == Some(true)),
            Some((DEVICE_CPU, _)) if copy == Some(false) => refused("the host can only get a copy"),
            Some((DEVICE_CPU, _)) => Ok(true),
            Some((kind, number)) => refused(&format!("it cannot be copied to device ({kind}, {number})")),
        }
    }

    /// An export that shares the memory. Work queued in `stream` waits for the tensor; without a
    /// stream, this call waits.
    fn share(&self, stream: Option<u64>) -> PyResult<ManagedTensor> {
        let tensor = match &self.source {
            Source::Memory(memory) => return self.export_memory(Arc::clone(memory), 0),
            Source::Layer(held) => held.lease(&self.name)?,
            Source::Model(tensor, _) => LoadedTensor::clone(tensor),
        };
        if tensor.dtype() != self.dtype || tensor.shape() != self.shape {
            return self.export_bytes_of(tensor);
        }
        let exported = match stream {
            None => onelayer_dlpack::export(tensor),
            // SAFETY: by the protocol the consumer passes a live stream of this device.
            Some(stream) => unsafe { onelayer_dlpack::export_for_stream(tensor, stream) },
        };
        exported.map_err(|error| refusal(&error))
    }

    /// A byte view of a layer's tensor on the host.
    fn export_bytes_of(&self, tensor: LoadedTensor) -> PyResult<ManagedTensor> {
        // Without bytes there is no memory to share.
        let address = match tensor.host_pointer() {
            Some(pointer) => pointer.as_ptr().cast(),
            None if self.nbytes == 0 && self.target() == Target::Host => std::ptr::null_mut(),
            None => return Err(self.nowhere()),
        };
        let described = self.described(address, 0);
        // SAFETY: the lease keeps the bytes in place, and the loader never writes to a tensor that
        // has arrived.
        let exported = unsafe { onelayer_dlpack::export_with(tensor, &described) };
        exported.map_err(|error| refusal(&error))
    }

    fn export_memory(&self, memory: Arc<HostMemory>, flags: u64) -> PyResult<ManagedTensor> {
        let described = self.described(memory.address().as_ptr().cast(), flags);
        // SAFETY: the memory has the bytes of this tensor, does not move until its last owner is
        // dropped, and is not borrowed once shared.
        let exported = unsafe { onelayer_dlpack::export_with(memory, &described) };
        exported.map_err(|error| refusal(&error))
    }

    fn described(&self, data: *mut c_void, flags: u64) -> Memory<'_> {
        let (name, dtype, shape) = (self.name.as_str(), self.dtype, self.shape.as_slice());
        Memory { name, data, dtype, shape, device: CPU, flags }
    }

    /// A copy of its bytes in owned host memory.
    fn host_copy(&self) -> PyResult<HostMemory> {
        let mut copy = self.empty_copy()?;
        self.read_into(copy.bytes_mut())?;
        Ok(copy)
    }

    fn empty_copy(&self) -> PyResult<HostMemory> {
        HostMemory::new(self.nbytes).map_err(|error| errors::of_memory(&self.name, self.nbytes, &error))
    }

    fn read_into(&self, target: &mut [u8]) -> PyResult<()> {
        let read = match &self.source {
            Source::Memory(memory) => {
                memory.copy_to(target);
                return Ok(());
            }
            Source::Layer(held) => held.lease(&self.name)?.read(0, target),
            Source::Model(tensor, _) => tensor.read(0, target),
        };
        match read {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.nowhere()),
            Err(error) => Err(Python::attach(|py| errors::of_load(py, &error))),
        }
    }
}

#[pymethods]
impl Tensor {
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn dtype(&self) -> &str {
        &self.dtype_name
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    #[getter(device)]
    fn device_name(&self) -> String {
        match self.target() {
            Target::Host => "cpu".to_owned(),
            other => other.to_string(),
        }
    }

    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        let device = self.device()?;
        Ok((device.device_type, device.device_id))
    }

    /// Every refusal is a `BufferError`: after a `TypeError` a consumer would retry in another way.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<Bound<'py, PyAny>>,
        dl_device: Option<Bound<'py, PyAny>>,
        copy: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let device = self.device()?;
        let is_versioned = match max_version {
            None => false,
            Some(version) => argument::<(u32, u32)>(&version, "max_version")?.0 >= 1,
        };
        let is_copied = self.must_copy(device, dl_device.as_ref(), copy.as_ref())?;
        let stream = wanted_stream(device, stream.as_ref())?;
        let managed = match is_copied {
            true => {
                let copy = py.detach(|| self.host_copy())?;
                self.export_memory(Arc::new(copy), FLAG_IS_COPIED)
            }
            false => py.detach(|| self.share(stream)),
        }?;
        match is_versioned {
            true => capsule::versioned(py, managed),
            false => capsule::unversioned(py, managed),
        }
    }

    /// The same memory as a one-dimensional byte tensor, for types unknown to a consumer. Host
    /// only.
    fn view_bytes(&self) -> PyResult<Self> {
        if self.target() != Target::Host {
            return Err(self.nowhere());
        }
        Ok(Self {
            name: self.name.clone(),
            dtype: DType::U8,
            dtype_name: DType::U8.name().to_owned(),
            shape: vec![self.nbytes],
            nbytes: self.nbytes,
            source: self.source.clone(),
        })
    }

    /// BLAKE3 of its bytes as delivered, as 64 hexadecimal digits.
    fn hash(&self, py: Python<'_>) -> PyResult<String> {
        let hash = py.detach(|| match &self.source {
            // Consumers may write to shared memory: it is hashed from a copy.
            Source::Memory(_) => self.host_copy().map(|mut copy| Ok(Some(TensorHash::of(copy.bytes_mut())))),
            Source::Layer(held) => held.lease(&self.name).map(|tensor| tensor.hash()),
            Source::Model(tensor, _) => Ok(tensor.hash()),
        })?;
        let hash = hash.map_err(|error| errors::of_load(py, &error))?;
        hash.map(|hash| hash.to_hex()).ok_or_else(|| {
            let (name, target) = (&self.name, self.target());
            PyValueError::new_err(format!(
                "tensor {name:?} was loaded to {target}, which keeps no bytes: stream with hash=True"
            ))
        })
    }

    /// Its bytes, little-endian and row-major.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let len = usize::try_from(self.nbytes)
            .map_err(|_| PyBufferError::new_err("too many bytes for this machine"))?;
        PyBytes::new_with(py, len, |target| py.detach(|| self.read_into(target)))
    }

    /// A numpy array that shares the memory.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("onelayer._frameworks")?.call_method1("to_numpy", (slf,))
    }

    /// A torch tensor that shares the memory.
    fn torch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("onelayer._frameworks")?.call_method1("to_torch", (slf,))
    }

    fn __repr__(&self) -> String {
        let Self { name, dtype_name, shape, .. } = self;
        format!("<onelayer.Tensor {name:?}: {dtype_name} {shape:?} on {}>", self.device_name())
    }
}

/// An argument of the protocol; never a `TypeError`.
fn argument<'a, 'py, T: FromPyObject<'a, 'py>>(value: &'a Bound<'py, PyAny>, name: &str) -> PyResult<T> {
    value.extract().map_err(|_| PyBufferError::new_err(format!("{name}={value:?} is not supported")))
}

/// The stream that must wait for the copies, by the rules of the protocol; none on the host.
fn wanted_stream(device: DLDevice, stream: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
    let number = stream.map(|stream| argument::<i64>(stream, "stream")).transpose()?;
    if device == CPU {
        return match number {
            None | Some(NO_STREAM) => Ok(None),
            Some(number) => {
                Err(PyBufferError::new_err(format!("stream={number}: host memory has no streams")))
            }
        };
    }
    match number.unwrap_or(LEGACY_STREAM) {
        NO_STREAM => Ok(None),
        0 => Err(PyBufferError::new_err(
            "stream=0 is ambiguous: use 1 (legacy default stream) or 2 (per-thread)",
        )),
        number => match u64::try_from(number) {
            Ok(stream) => Ok(Some(stream)),
            Err(_) => Err(PyBufferError::new_err(format!("stream={number} is not a valid stream"))),
        },
    }
}

fn refusal(error: &ExportError) -> PyErr {
    PyBufferError::new_err(errors::chain(error))
}
