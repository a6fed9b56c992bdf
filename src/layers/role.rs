//! Whether a group stands in front of the stacks or behind them, by the shapes of its tensors.
//!
//! A matrix that maps into the width of the stacks is in front, one that maps out of it is behind,
//! a group of vectors is a closing norm. Words decide only where shapes cannot: see [`words`].

/// The words that decide where shapes do not.
pub(super) mod words {
    /// In front. An embedding has the same shape as a head.
    pub(in super::super) const FRONT: &str = "emb";
    /// Behind.
    pub(in super::super) const BACK: [&str; 3] = ["head", "out", "final"];
    /// Behind, and before a head.
    pub(in super::super) const NORM: &str = "norm";
    /// After its encoder.
    pub(in super::super) const DECODER: &str = "decoder";
}

/// The position of a group among its siblings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    Front,
    Middle,
    Norm,
    Back,
}

/// How the matrices of a group connect to the widths of the stacks beside it.
#[derive(Default)]
pub(super) struct Flow {
    maps_in: bool,
    maps_out: bool,
    /// It maps out and has a bias of its output's length: a linear layer, not an embedding table.
    has_output_bias: bool,
    only_vectors: bool,
    is_known: bool,
    /// Width of an embedding table that is longer than any dimension of the stacks.
    pub(super) vocabulary_width: Option<u64>,
}

impl Flow {
    pub(super) fn of<'s>(
        widths: &[u64],
        dimension_max: u64,
        shapes: impl Iterator<Item = Option<&'s [u64]>>,
    ) -> Self {
        let mut flow = Self { only_vectors: true, ..Self::default() };
        let mut outputs = Vec::new();
        let mut biases = Vec::new();
        let is_width = |length: u64| widths.contains(&length);
        for shape in shapes.flatten() {
            flow.is_known = true;
            match *shape {
                [] => {}
                [length] => biases.push(length),
                [first, second, ..] => {
                    flow.only_vectors = false;
                    flow.maps_in |= is_width(first) && !is_width(second);
                    if is_width(second) && !is_width(first) {
                        flow.maps_out = true;
                        outputs.push(first);
                        if shape.len() == 2 && first > dimension_max {
                            flow.vocabulary_width = Some(second);
                        }
                    }
                }
            }
        }
        flow.has_output_bias = outputs.iter().any(|output| biases.contains(output));
        flow.vocabulary_width = flow.vocabulary_width.filter(|_| !flow.has_output_bias);
        flow
    }

    /// The role of a group called `name` (lower case) in its container.
    pub(super) fn role(&self, name: &str, is_outside: bool, has_several_stacks: bool) -> Role {
        let is_front_word = name.contains(words::FRONT);
        let is_back_word = words::BACK.iter().any(|word| name.contains(word));
        let is_norm_word = name.contains(words::NORM);
        if self.is_known && self.only_vectors {
            let own_parameters = name.is_empty();
            return if is_front_word || own_parameters { Role::Front } else { Role::Norm };
        }
        if self.maps_in && !(self.maps_out && (is_back_word || is_norm_word)) {
            return Role::Front;
        }
        if self.maps_out && self.has_output_bias {
            return Role::Back;
        }
        match (is_front_word, is_back_word) {
            (true, true) => Role::Back,
            (true, false) => Role::Front,
            (false, _) if is_norm_word => Role::Norm,
            (false, true) => Role::Back,
            (false, false) if is_outside => Role::Back,
            (false, false) if has_several_stacks && !self.maps_out => Role::Middle,
            (false, false) => Role::Front,
        }
    }
}
