//! Classes and functions that a pickle may name, and the few whose meaning is known.
//!
//! None is ever called. A known one stands for a value that is made here; all others give an opaque
//! object.

use super::super::element::Element;

/// What a class or function means here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Known {
    /// Nothing: its objects are opaque.
    No,
    /// `OrderedDict`, `dict`: of pairs.
    Dict,
    /// `defaultdict`: of a class.
    DefaultDict,
    /// `list` and `tuple`, of one value; `torch.Size`, too.
    Sequence,
    /// `set`, `frozenset`.
    Set,
    /// A value that nothing depends on: bytes, complex numbers, devices.
    Plain,
    /// `torch.float32` and the like.
    DType(Element),
    /// A class of storages.
    Storage(Element),
    /// A class of tensors without meaning of their own: `Tensor`, `Parameter`.
    Tensor,
    /// `_rebuild_tensor` and `_rebuild_tensor_v2`: storage, offset, shape, strides, ...
    Rebuild,
    /// `_rebuild_tensor_v3`: the same with an element type.
    RebuildTyped,
    /// `_rebuild_parameter`: of a tensor.
    Parameter,
    /// `_rebuild_from_type_v2`: of a function, a class and arguments.
    FromType,
    /// `_rebuild_device_tensor_from_cpu_tensor`: of a tensor and an element type.
    FromCpu,
    /// Makes a tensor that has no plain bytes.
    Layout(Layout),
}

/// Tensors without plain bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Layout {
    Sparse,
    Quantised,
    Nested,
    Meta,
    Wrapper,
    Numpy,
    Embedded,
    Cast,
    Unnamed,
    Conjugated,
    Negated,
}

impl Layout {
    /// What it is, and what to do instead.
    pub(in super::super) fn texts(self) -> (&'static str, &'static str) {
        match self {
            Self::Sparse => ("a sparse tensor", "save tensor.to_dense()"),
            Self::Quantised => {
                ("a quantised tensor", "save tensor.dequantize(), or its int_repr() and scales")
            }
            Self::Nested => ("a nested tensor", "save the tensors of tensor.unbind()"),
            Self::Meta => {
                ("a tensor on the meta device, which has no bytes", "save the model with its weights")
            }
            Self::Wrapper => ("a tensor that wraps others", "save the tensors inside as plain ones"),
            Self::Numpy => ("a tensor made of a numpy array", "load it with torch and save tensor.cpu()"),
            Self::Embedded => ("a file of its own inside the pickle", "load it with torch and save it again"),
            Self::Cast => {
                ("a tensor that is cast when it is loaded", "load it with torch and save tensor.cpu()")
            }
            Self::Unnamed => {
                ("a tensor made by an unnamed function", "load it with torch and save plain tensors")
            }
            Self::Conjugated => ("a conjugated view", "save tensor.resolve_conj()"),
            Self::Negated => ("a negated view", "save tensor.resolve_neg()"),
        }
    }
}

impl Known {
    /// The meaning of `module.name`.
    pub(in super::super) fn of(module: &str, name: &str) -> Self {
        match module {
            "collections" => match name {
                "OrderedDict" => Self::Dict,
                "defaultdict" => Self::DefaultDict,
                _ => Self::No,
            },
            "builtins" | "__builtin__" => match name {
                "dict" => Self::Dict,
                "list" | "tuple" => Self::Sequence,
                "set" | "frozenset" => Self::Set,
                "bytearray" | "complex" | "bytes" | "slice" | "range" | "xrange" | "object" => Self::Plain,
                _ => Self::No,
            },
            "_codecs" if name == "encode" => Self::Plain,
            "torch._utils" => Self::rebuilding(name),
            "torch._tensor" if name == "_rebuild_from_type_v2" => Self::FromType,
            "torch.tensor" if name == "_rebuild_from_type_v2" => Self::FromType,
            "torch.nn.parameter" if matches!(name, "Parameter" | "Buffer") => Self::Tensor,
            "torch.serialization" if name == "_get_layout" => Self::Plain,
            "torch.storage" if name == "_load_from_bytes" => Self::Layout(Layout::Embedded),
            "torch" if name == "Size" => Self::Sequence,
            "torch" if name == "device" => Self::Plain,
            "torch" if name == "Tensor" => Self::Tensor,
            "torch" => match Element::of_dtype(name) {
                Some(element) => Self::DType(element),
                None => Self::storage(name),
            },
            "torch.storage" | "torch.cuda" => Self::storage(name),
            _ => Self::No,
        }
    }

    fn storage(name: &str) -> Self {
        if let Some(element) = Element::of_storage(name) {
            return Self::Storage(element);
        }
        // Before 0.4 each element type had a class of tensors.
        let typed = name.strip_suffix("Tensor").map(|kind| Element::of_storage(&format!("{kind}Storage")));
        if let Some(Some(_)) = typed { Self::Tensor } else { Self::No }
    }

    fn rebuilding(name: &str) -> Self {
        Self::Layout(match name {
            "_rebuild_tensor" | "_rebuild_tensor_v2" => return Self::Rebuild,
            "_rebuild_tensor_v3" => return Self::RebuildTyped,
            "_rebuild_parameter" | "_rebuild_parameter_with_state" => return Self::Parameter,
            "_rebuild_device_tensor_from_cpu_tensor" => return Self::FromCpu,
            "_rebuild_sparse_tensor" | "_rebuild_sparse_csr_tensor" => Layout::Sparse,
            "_rebuild_qtensor" => Layout::Quantised,
            "_rebuild_nested_tensor" => Layout::Nested,
            "_rebuild_meta_tensor_no_storage" => Layout::Meta,
            "_rebuild_wrapper_subclass" => Layout::Wrapper,
            "_rebuild_device_tensor_from_numpy" | "_rebuild_xla_tensor" => Layout::Numpy,
            _ => return Self::No,
        })
    }

    /// True if it is said in the notes that its objects were not looked at.
    pub(in super::super) fn is_stranger(self) -> bool {
        self == Self::No
    }
}
