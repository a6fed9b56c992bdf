"""Tensors as numpy arrays and torch tensors. Neither package is imported before it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import torch

    from ._native import Tensor

# Type names in files -> type names of numpy, or of the package ml_dtypes if numpy has no such type.
_NUMPY = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
_ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
# Block types of GGUF files: elements and bytes per block. They are delivered as bytes.
_BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q8_1": (32, 40),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50),
    "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110),
    "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136),
    "IQ1_M": (256, 56),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "Q1_0": (128, 18),
}
# torch uses the same names, and has a type for a pair of 4-bit floats.
_TORCH = {**_NUMPY, **_ML_DTYPES, "F4": "float4_e2m1fn_x2"}


def numpy_dtype(name: str) -> numpy.dtype[Any]:
    """The numpy type for a type name in files."""
    import numpy

    if name in _BLOCKS:
        return numpy.dtype("uint8")
    if name in _NUMPY:
        return numpy.dtype(_NUMPY[name])
    if name in _ML_DTYPES:
        try:
            import ml_dtypes
        except ImportError as error:
            raise ImportError(f"numpy has no {name}: install the package ml_dtypes") from error
        found: numpy.dtype[Any] = numpy.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
        return found
    raise TypeError(f"neither numpy nor ml_dtypes has {name}: see Tensor.view_bytes()")


def torch_dtype(name: str) -> torch.dtype:
    """The torch type for a type name in files."""
    import torch

    if name in _BLOCKS:
        return torch.uint8
    found: torch.dtype | None = getattr(torch, _TORCH.get(name, ""), None)
    if found is None:
        raise TypeError(f"this torch has no {name}: see Tensor.view_bytes()")
    return found


def float_name(dtype: object) -> str:
    """``bf16``, ``f16`` or ``f32`` for that name, for ``"bfloat16"`` and the like, or for a torch or numpy type."""
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32"}.get(name, name)


def torch_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in elements of ``torch_dtype``: a pair of 4-bit floats is one element, blocks are bytes."""
    if name in _BLOCKS:
        elements, size = _BLOCKS[name]
        return (*shape[:-1], shape[-1] // elements * size)
    return (*shape[:-1], shape[-1] // 2) if name == "F4" else tuple(shape)


def to_numpy(tensor: Tensor) -> numpy.ndarray[Any, Any]:
    """An array that shares the memory."""
    import numpy

    if tensor.dtype in _NUMPY or tensor.dtype in _BLOCKS:
        return numpy.from_dlpack(tensor)
    dtype = numpy_dtype(tensor.dtype)
    plain: Any = numpy.from_dlpack(tensor.view_bytes())
    found: numpy.ndarray[Any, Any] = plain.view(dtype).reshape(tensor.shape)
    return found


def to_torch(tensor: Tensor) -> torch.Tensor:
    """A tensor that shares the memory."""
    import torch

    return torch.from_dlpack(tensor)
