//! Errors of the grouping.

use onelayer_system::TextPosition;

/// An error of the grouping.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayersError {
    /// A layer id without text.
    #[error("a layer id must not be empty; `loadcheck inspect` lists the ids of a checkpoint")]
    EmptyId,

    /// More tensors than can be counted.
    #[error("{found} tensors cannot be grouped, at most {limit} can")]
    TooManyTensors {
        /// Tensors given.
        found: u64,
        /// Most that are accepted.
        limit: u64,
    },

    /// The names of layers and their parts are too long together.
    #[error("the names of all layers and their parts are longer than {limit_bytes} bytes")]
    TooMuchText {
        /// Most bytes that are accepted.
        limit_bytes: u64,
    },

    /// The override is not TOML, or has a wrong key or type.
    #[error("layer map, line {}, column {}: {message}", .position.line, .position.column)]
    MapSyntax {
        /// Where.
        position: TextPosition,
        /// The parser's message, in one line.
        message: String,
    },

    /// The override has a name that the checkpoint does not have.
    #[error("layer map, line {}, column {}: `{key}` names `{name}`, but no {expected} has that name{}",
        .position.line, .position.column, or_nearest(.nearest))]
    MapUnknownName {
        /// Where.
        position: TextPosition,
        /// The key of the override.
        key: String,
        /// The name it gives.
        name: String,
        /// The expected kind of name: "numbered list", "layer, stack or prefix of one", ...
        expected: &'static str,
        /// Similar names that exist, best first.
        nearest: Vec<String>,
    },

    /// Two entries of the override claim the same tensors or the same list.
    #[error("layer map, line {}, column {}: `{key}` names `{name}`, which `{other_key}` in line {} already claims; remove one",
        .position.line, .position.column, .other_position.line)]
    MapConflict {
        /// Where the second claim is.
        position: TextPosition,
        /// Its key.
        key: String,
        /// The name both claim.
        name: String,
        /// The key of the first claim.
        other_key: String,
        /// Where the first claim is.
        other_position: TextPosition,
    },

    /// A group of the override has the id of another layer.
    #[error("layer map, line {}, column {}: group `{name}` has the id of a layer that the checkpoint has; choose another name",
        .position.line, .position.column)]
    MapIdTaken {
        /// Where the group is named.
        position: TextPosition,
        /// Its name.
        name: String,
    },

    /// The caller's order does not name every layer once.
    #[error("the call order names layer `{layer}` {what}")]
    CallOrder {
        /// The layer.
        layer: String,
        /// The mistake.
        what: &'static str,
    },

    /// The grouping lost or duplicated tensors. This is a bug, reported instead of a wrong load.
    #[error(
        "grouping accounts for {found} {what}, but the headers hold {expected}; please report this as a bug"
    )]
    Unaccounted {
        /// "tensors" or "bytes".
        what: &'static str,
        /// Count by the headers.
        expected: u64,
        /// Count by the layers.
        found: u64,
    },
}

fn or_nearest(nearest: &[String]) -> String {
    if nearest.is_empty() {
        return String::new();
    }
    let names: Vec<_> = nearest.iter().map(|name| format!("`{name}`")).collect();
    format!("; nearest: {}", names.join(", "))
}
