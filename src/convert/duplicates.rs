//! Finds tied weights: one tensor that is stored under two names.
//!
//! Only tensors that a model may tie are compared: outside every stack (embeddings, heads), of two
//! dimensions or more, in one component, of one type and shape. They are tied if all their bytes
//! are equal. Three kinds of tensors are never tied: those of one repeated element, since freshly
//! initialised tensors are equal by chance; parts of a quantized weight (scales, zero points); and
//! weights that have such parts.
//!
//! The configuration of the model says if loaders tie weights again. If it says no, both copies are
//! kept.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::ConvertError;
use super::cancel::ConvertCancel;
use super::hash_pass::{HashPass, PassEvent};
use super::read_file::OpenShard;
use crate::checkpoint::{Checkpoint, DType, TensorId, open_regular};
use crate::layers::{LayerKind, Layers};
use crate::plan::{LoadOptions, MemoryTerm, Transform};
use crate::units::to_usize;

/// The longest configuration that is read, in bytes.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Bytes that are compared at once: whole elements of every type.
const PIECE_BYTES: u64 = 48 << 10;
/// Most names in a note.
const NAMED_MAX: usize = 4;

/// Tensors that can be left out.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Duplicates {
    /// Each tensor that is left out, ascending, with the one that is kept.
    pub(super) pairs: Vec<(TensorId, TensorId)>,
    /// Notes for a person.
    pub(super) notes: Vec<String>,
}

/// Finds tied weights. Reads only tensors that may be tied. `beside` is memory that counts against
/// the same budget.
///
/// # Errors
/// Those of [`HashPass::tensors`], and [`ConvertError::Read`].
pub(super) fn find(
    checkpoint: &Checkpoint,
    layers: &Layers,
    is_wanted: &dyn Fn(TensorId) -> bool,
    options: LoadOptions,
    beside: Vec<MemoryTerm>,
) -> Result<Duplicates, ConvertError> {
    let candidates = candidates(checkpoint, layers, is_wanted);
    let mut wanted: Vec<TensorId> = candidates.iter().flatten().copied().collect();
    wanted.sort_unstable();
    let mut hashes = BTreeMap::new();
    let pass = HashPass { checkpoint, options, beside, cancel: ConvertCancel::default() };
    pass.tensors(&wanted, &|_| Transform::Keep, &mut |event| {
        if let PassEvent::Tensor(id, found) = event {
            hashes.insert(id, found.blake3);
        }
    })?;
    let mut duplicates = Duplicates::default();
    for alike in candidates {
        let mut by_hash: BTreeMap<[u8; 32], Vec<TensorId>> = BTreeMap::new();
        for id in alike {
            by_hash.entry(hashes[&id]).or_default().push(id);
        }
        for equal in by_hash.into_values().filter(|equal| equal.len() > 1) {
            duplicates.add(checkpoint, &equal)?;
        }
    }
    duplicates.pairs.sort_unstable();
    Ok(duplicates)
}

/// Groups of two or more tensors that may be tied, in load order.
fn candidates(
    checkpoint: &Checkpoint,
    layers: &Layers,
    is_wanted: &dyn Fn(TensorId) -> bool,
) -> Vec<Vec<TensorId>> {
    let mut alike: BTreeMap<(&str, &str, &[u64]), Vec<TensorId>> = BTreeMap::new();
    let companions: BTreeSet<TensorId> =
        layers.companions().iter().flat_map(|&(companion, weight)| [companion, weight]).collect();
    for layer in layers.as_slice().iter().filter(|layer| layer.kind == LayerKind::Group) {
        for &id in layer.tensors.iter().filter(|&&id| is_wanted(id)) {
            let tensor = checkpoint.tensor(id);
            if tensor.shape.len() >= 2 && !tensor.extent.is_empty() && !companions.contains(&id) {
                let component = &*checkpoint.shard(tensor.shard).name_prefix;
                alike.entry((component, tensor.dtype_name, tensor.shape)).or_default().push(id);
            }
        }
    }
    alike.into_values().filter(|tensors| tensors.len() > 1).collect()
}

impl Duplicates {
    /// Adds tensors that are equal, unless by chance or the configuration does not tie them.
    fn add(&mut self, checkpoint: &Checkpoint, equal: &[TensorId]) -> Result<(), ConvertError> {
        let (kept, dropped) = (equal[0], &equal[1..]);
        if is_constant(checkpoint, kept)? {
            return Ok(());
        }
        let name = |id: &TensorId| checkpoint.tensor(*id).name;
        let mut names: Vec<&str> = dropped.iter().take(NAMED_MAX).map(name).collect();
        let more = format!("{} more", dropped.len().saturating_sub(NAMED_MAX));
        if dropped.len() > NAMED_MAX {
            names.push(&more);
        }
        let pair = format!("{} and {}", name(&kept), names.join(", "));
        let shard = checkpoint.shard(checkpoint.tensor(kept).shard);
        let config = shard.path.with_file_name("config.json");
        match ties(&config) {
            Ties::No => {
                let config = config.display();
                self.notes.push(format!("{pair} are equal, but both are kept: {config} does not tie them"));
                return Ok(());
            }
            Ties::Yes => {}
            Ties::NotSaid => self.notes.push(format!(
                "{pair} are equal, and only the first is kept, although no configuration says that they are tied: a \
                 loader that does not tie them by itself will miss the others"
            )),
        }
        self.pairs.extend(dropped.iter().map(|&id| (id, kept)));
        Ok(())
    }
}

/// Whether a configuration ties embedding and head.
#[derive(Debug, PartialEq, Eq)]
enum Ties {
    Yes,
    No,
    NotSaid,
}

/// Whether the configuration at `path` ties weights, for the model or for its text part. If they
/// disagree: no.
fn ties(path: &Path) -> Ties {
    let Some(config) = read_config(path) else { return Ties::NotSaid };
    let said = [&config, &config["text_config"]].map(|part| part["tie_word_embeddings"].as_bool());
    match said {
        [Some(false), _] | [_, Some(false)] => Ties::No,
        [Some(true), _] | [_, Some(true)] => Ties::Yes,
        [None, None] => Ties::NotSaid,
    }
}

/// The configuration, if it can be read.
fn read_config(path: &Path) -> Option<serde_json::Value> {
    let (file, identity) = open_regular(path).ok()?;
    if identity.len_bytes > CONFIG_BYTES_MAX {
        return None;
    }
    serde_json::from_reader(std::io::BufReader::new(file)).ok()
}

/// True if all elements of a tensor have the same bytes. Mostly its first bytes decide.
fn is_constant(checkpoint: &Checkpoint, id: TensorId) -> Result<bool, ConvertError> {
    let tensor = checkpoint.tensor(id);
    let file = OpenShard::open(checkpoint, tensor.shard)?;
    let mut at = tensor.extent.start();
    let mut first = vec![0; to_usize(element_bytes(tensor.dtype))];
    file.read(at, &mut first)?;
    let mut piece = vec![0; to_usize(PIECE_BYTES)];
    while at < tensor.extent.end() {
        let len = PIECE_BYTES.min(tensor.extent.end() - at);
        let piece = &mut piece[..to_usize(len)];
        file.read(at, piece)?;
        if piece.chunks(first.len()).any(|element| *element != first[..element.len()]) {
            return Ok(false);
        }
        at += len;
    }
    Ok(true)
}

/// Bytes after which the bytes of a constant tensor repeat.
fn element_bytes(dtype: DType) -> u64 {
    match dtype.bits() {
        Some(bits) if bits.is_multiple_of(8) => bits / 8,
        // Four elements of six bits, two of four bits.
        Some(6) => 3,
        _ => 1,
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::settings::default_options;
    use super::super::test_files::{Tensor, tensor, write_file, write_sharded};
    use super::*;

    /// Two layers, and tensors outside of them.
    fn with_layers(outside: Vec<Tensor>) -> Vec<Tensor> {
        let part = |layer: u64, name: &str| {
            // All layers have the same bytes: that is no tie.
            tensor(&format!("model.layers.{layer}.{name}.weight"), DType::Bf16, &[4, 6], 900)
        };
        let layers = (0..2).flat_map(|layer| [part(layer, "a"), part(layer, "b")]);
        outside.into_iter().chain(layers).collect()
    }

    fn copy_of(original: &Tensor, name: &str) -> Tensor {
        Tensor { name: name.to_owned(), ..original.clone() }
    }

    fn embedding() -> Tensor {
        tensor("model.embed_tokens.weight", DType::Bf16, &[500, 300], 1)
    }

    fn found_in(folder: &Path, is_wanted: &dyn Fn(&str) -> bool) -> (Vec<(String, String)>, Vec<String>) {
        let checkpoint = Checkpoint::open(folder).unwrap();
        let layers = Layers::group(&checkpoint).unwrap();
        let name = |id: TensorId| checkpoint.tensor(id).name.to_owned();
        let is_wanted = |id: TensorId| is_wanted(&name(id));
        let found = find(&checkpoint, &layers, &is_wanted, default_options(), Vec::new()).unwrap();
        (found.pairs.into_iter().map(|(dropped, kept)| (name(dropped), name(kept))).collect(), found.notes)
    }

    fn found(tensors: &[Tensor], config: Option<&str>) -> (Vec<(String, String)>, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        write_file(&folder.path().join("model.safetensors"), tensors);
        if let Some(config) = config {
            fs::write(folder.path().join("config.json"), config).unwrap();
        }
        found_in(folder.path(), &|_| true)
    }

    fn head_of_embedding() -> (String, String) {
        ("lm_head.weight".to_owned(), "model.embed_tokens.weight".to_owned())
    }

    #[test]
    fn a_head_that_is_the_embedding_is_left_out_if_the_configuration_agrees() {
        let embedding = embedding();
        // The head comes first in the file; the first one in a load is kept.
        let tensors = with_layers(vec![copy_of(&embedding, "lm_head.weight"), embedding]);
        let tied = [head_of_embedding()];
        for config in [
            r#"{"tie_word_embeddings": true}"#,
            r#"{"text_config": {"tie_word_embeddings": true}}"#,
            r#"{"tie_word_embeddings": true, "text_config": {}}"#,
        ] {
            assert_eq!(found(&tensors, Some(config)), (tied.to_vec(), vec![]), "{config}");
        }
        for config in [
            r#"{"tie_word_embeddings": false}"#,
            r#"{"text_config": {"tie_word_embeddings": false}}"#,
            r#"{"tie_word_embeddings": true, "text_config": {"tie_word_embeddings": false}}"#,
            r#"{"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}"#,
        ] {
            let (pairs, notes) = found(&tensors, Some(config));
            assert_eq!(pairs, [], "{config}");
            let [note] = notes.as_slice() else { panic!("{notes:?}") };
            let start = "model.embed_tokens.weight and lm_head.weight are equal, but both are kept: ";
            assert!(note.starts_with(start) && note.ends_with("config.json does not tie them"), "{note}");
        }
        for config in
            [None, Some("{}"), Some("no JSON"), Some(r#"{"tie_word_embeddings": "true"}"#), Some("[]")]
        {
            let (pairs, notes) = found(&tensors, config);
            assert_eq!(pairs, tied, "{config:?}");
            let [note] = notes.as_slice() else { panic!("{notes:?}") };
            assert!(note.contains("lm_head.weight are equal, and only the first is kept"), "{note}");
        }
    }

    #[test]
    fn what_is_equal_by_chance_or_cannot_be_tied_is_kept() {
        let embedding = embedding();
        let bias = tensor("bias", DType::F32, &[64], 2);
        let other_type = Tensor { dtype: DType::F16, ..copy_of(&embedding, "half") };
        let other_shape = Tensor { shape: vec![300, 500], ..copy_of(&embedding, "turned") };
        let mut almost = copy_of(&embedding, "almost");
        *almost.bytes.last_mut().unwrap() ^= 1;
        let none = [tensor("none.0x", DType::F32, &[0, 2], 3), tensor("none.1x", DType::F32, &[0, 2], 3)];
        let mut outside =
            vec![copy_of(&bias, "other_bias"), bias, other_type, other_shape, almost, embedding];
        outside.extend(none);
        for (name, dtype, element) in [
            ("one", DType::Bf16, vec![0x80, 0x3f]),
            ("nil", DType::F64, vec![0; 8]),
            ("six", DType::F6E2M3, vec![1, 2, 3]),
        ] {
            // Longer than a piece.
            let bytes: Vec<u8> = element.iter().copied().cycle().take(48 * 4096).collect();
            let rows = 48 * 4096 * 8 / dtype.bits().unwrap() / 32;
            let constant = Tensor { name: name.to_owned(), dtype, shape: vec![rows, 32], bytes };
            outside.extend([copy_of(&constant, &format!("{name}_again")), constant]);
        }
        assert_eq!(found(&with_layers(outside), None), (vec![], vec![]));
    }

    #[test]
    fn a_tensor_that_begins_like_a_constant_one_is_none() {
        let mut zeros = Tensor { bytes: vec![0; 300_000], ..embedding() };
        zeros.bytes[299_000] = 1;
        let tensors = with_layers(vec![copy_of(&zeros, "lm_head.weight"), zeros]);
        assert_eq!(
            found(&tensors, Some(r#"{"tie_word_embeddings": true}"#)),
            (vec![head_of_embedding()], vec![])
        );
    }

    #[test]
    fn of_several_the_first_in_load_order_is_kept() {
        let embedding = embedding();
        let names: Vec<String> = (0..6).map(|number| format!("zhead_{number}.weight")).collect();
        let copies: Vec<Tensor> = names.iter().map(|name| copy_of(&embedding, name)).collect();
        let other = tensor("other.weight", DType::F32, &[9, 9], 4);
        let outside = [&copies[..], &[embedding, copy_of(&other, "other_head.weight"), other]].concat();
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = outside.split_at(4);
        let shards = [("a.safetensors", with_layers(first.to_vec())), ("b.safetensors", second.to_vec())];
        write_sharded(folder.path(), &shards);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let layers = Layers::group(&checkpoint).unwrap();
        let order = layers.as_slice().iter().flat_map(|layer| layer.tensors.iter());
        let order: Vec<&str> = order.map(|&id| checkpoint.tensor(id).name).collect();
        let (pairs, notes) = found_in(folder.path(), &|_| true);
        assert_eq!(pairs.len(), 7, "{pairs:?}");
        let at = |name: &String| order.iter().position(|known| *known == name.as_str());
        assert!(pairs.iter().all(|(dropped, kept)| at(dropped) > at(kept)), "{pairs:?} in {order:?}");
        assert!(notes.iter().any(|note| note.contains(", 2 more are equal")), "{notes:?}");
        let (pairs, _) =
            found_in(folder.path(), &|name| !name.starts_with("zhead") && name != "other.weight");
        assert_eq!(pairs, [], "what is not converted is not there");
    }

    #[test]
    fn quantized_weights_and_other_components_are_left_alone() {
        let weight = tensor("a.weight", DType::F8E4M3, &[64, 64], 5);
        let scale = tensor("a.weight_scale_inv", DType::F32, &[4, 4], 6);
        let outside =
            vec![copy_of(&weight, "b.weight"), weight, copy_of(&scale, "b.weight_scale_inv"), scale];
        let tensors = with_layers(outside);
        let folder = tempfile::tempdir().unwrap();
        write_file(&folder.path().join("model.safetensors"), &tensors);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let companions = Layers::group(&checkpoint).unwrap().companions().len();
        assert_eq!(companions, 2, "the scales are recognized");
        assert_eq!(found_in(folder.path(), &|_| true), (vec![], vec![]));

        let folder = tempfile::tempdir().unwrap();
        for component in ["one", "two"] {
            write_file(
                &folder.path().join(component).join("model.safetensors"),
                &with_layers(vec![embedding()]),
            );
        }
        let index = r#"{"one": ["a", "B"], "two": ["a", "B"]}"#;
        fs::write(folder.path().join("model_index.json"), index).unwrap();
        assert_eq!(found_in(folder.path(), &|_| true), (vec![], vec![]));
    }
}
