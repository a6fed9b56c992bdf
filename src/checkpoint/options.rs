//! Options for opening a checkpoint.

/// The reference's limit on a header, in bytes.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Options for opening a checkpoint.
///
/// # Example
/// ```
/// use onelayer::checkpoint::OpenOptions;
///
/// let options = OpenOptions::new().allow_opaque_dtypes(true).header_bytes_max(1 << 30);
/// assert!(options.open("/nonexistent").unwrap_err().is_missing());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenOptions {
    pub(super) header_bytes_max: u64,
    pub(super) allow_opaque_dtypes: bool,
    pub(super) selection: Selection,
    pub(super) names: TensorNames,
}

/// The names of a GGUF file's tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorNames {
    /// Those of the file: `blk.0.attn_q.weight`.
    #[default]
    AsStored,
    /// Those of the model in transformers: `model.layers.0.self_attn.q_proj.weight`.
    HuggingFace,
}

/// What is read of a PyTorch file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Selection {
    /// The weights, if there is a dictionary that is called so; else the whole file.
    #[default]
    Weights,
    /// What has this name.
    Named(Box<str>),
    Whole,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            header_bytes_max: HEADER_BYTES_MAX,
            allow_opaque_dtypes: false,
            selection: Selection::default(),
            names: TensorNames::default(),
        }
    }
}

impl OpenOptions {
    /// The defaults: headers and indices up to 100 000 000 bytes, only dtypes of safetensors 0.8.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The longest header or index that is accepted, in bytes. The description takes at most four
    /// times this memory. The pickle of a PyTorch file, which spells a tensor at greater length,
    /// may be twice as long.
    #[must_use]
    pub fn header_bytes_max(mut self, bytes: u64) -> Self {
        self.header_bytes_max = bytes;
        self
    }

    /// Accepts tensors whose dtype the format does not know, as [`DType::Opaque`]. Their size comes
    /// from the offsets alone and is not compared with the shape.
    ///
    /// [`DType::Opaque`]: super::DType::Opaque
    #[must_use]
    pub fn allow_opaque_dtypes(mut self, allow: bool) -> Self {
        self.allow_opaque_dtypes = allow;
        self
    }

    /// Reads one part of a PyTorch file: `ema`, `optimizer.state`. A part is a key of the outermost
    /// dictionary, or several with points between. Its tensors are named from there on.
    ///
    /// Without this, a training checkpoint is read as its weights: what its key `state_dict`,
    /// `model_state_dict`, `model` or `module` holds. [`Checkpoint::notes`] says so, and which
    /// other parts have tensors. Files of other formats have no parts, and are refused.
    ///
    /// [`Checkpoint::notes`]: super::Checkpoint::notes
    #[must_use]
    pub fn select(mut self, part: impl Into<String>) -> Self {
        self.selection = Selection::Named(part.into().into_boxed_str());
        self
    }

    /// Names the tensors of GGUF files as the model in transformers does, and gives them the order
    /// of rows that they have there: llama.cpp's converter changes it for some architectures.
    /// Architectures and tensors for which that is not exact are refused by name. Tensors that only
    /// llama.cpp has (`rope_freqs.weight`) are left out, which [`Checkpoint::notes`] says. Files of
    /// other formats keep their names.
    ///
    /// [`Checkpoint::notes`]: super::Checkpoint::notes
    #[must_use]
    pub fn names(mut self, names: TensorNames) -> Self {
        self.names = names;
        self
    }

    /// The same without a chosen part, for another checkpoint.
    #[cfg(feature = "convert")]
    pub(crate) fn of_weights(mut self) -> Self {
        self.selection = Selection::Weights;
        self
    }

    /// Reads all tensors of a PyTorch file, under their full names: `model.layer.weight`,
    /// `optimizer.state.0.exp_avg`.
    #[must_use]
    pub fn whole_file(mut self) -> Self {
        self.selection = Selection::Whole;
        self
    }
}
