//! A grouping override is accepted, or refused with a position in the text. In every case each
//! tensor is in exactly one layer.
//!
//! Input: TOML. Comments `#n NAME` give names of tensors; without any, the tensors are those of a
//! small model.

use onelayer::layers::{LayerMap, Layers, LayersError, TextPosition};

use super::layers::{Named, check_layers, entries};

/// Maximum length of a message without its citations.
const MESSAGE_BYTES_MAX: usize = 1000;

/// Checks one input.
pub fn check(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let map = match LayerMap::parse(&text) {
        Ok(map) => map,
        Err(LayersError::MapSyntax { position, .. }) => return check_position(&text, position),
        Err(error) => panic!("{error}"),
    };
    assert_eq!(LayerMap::parse(&text).ok().as_ref(), Some(&map));
    let mut named: Vec<Named> = Vec::new();
    for name in text.lines().filter_map(|line| line.strip_prefix("#n ")) {
        if named.iter().all(|(known, _)| known != name) {
            named.push((name.to_owned(), None));
        }
    }
    if named.is_empty() {
        named = small_model();
    }
    match Layers::from_names(&entries(&named), &map) {
        Ok(layers) => check_layers(&layers, named.len()),
        Err(error) => {
            let message = error.to_string();
            assert!(message.len() <= MESSAGE_BYTES_MAX + 4 * text.len(), "{message}");
            assert!(!map.is_empty(), "{error}");
        }
    }
}

/// Checks that a position is within the text or at its end.
fn check_position(text: &str, position: TextPosition) {
    let line = text.split('\n').nth(position.line.checked_sub(1).expect("lines count from 1"));
    let line = line.unwrap_or_else(|| panic!("there is no line {}", position.line));
    assert!((1..=line.chars().count() + 1).contains(&position.column), "{position:?} in {line:?}");
}

/// A decoder, a vision tower and experts.
fn small_model() -> Vec<Named> {
    let mut named: Vec<Named> = Vec::new();
    let mut add = |name: String, shape: &[u64]| named.push((name, Some(shape.to_vec())));
    add("model.embed_tokens.weight".to_owned(), &[64, 8]);
    for layer in 0..3 {
        add(format!("model.layers.{layer}.norm.weight"), &[8]);
        add(format!("model.layers.{layer}.attn.q.weight"), &[8, 8]);
        add(format!("model.layers.{layer}.attn.o.weight"), &[8, 8]);
        add(format!("model.layers.{layer}.attn.o.weight_scale"), &[8]);
        for expert in 0..2 {
            add(format!("model.layers.{layer}.mlp.experts.{expert}.up.weight"), &[16, 8]);
        }
        add(format!("vision.blocks.{layer}.attn.weight"), &[4, 4]);
        add(format!("vision.blocks.{layer}.mlp.up.weight"), &[4, 4]);
        add(format!("vision.neck.{layer}.weight"), &[4, 4]);
    }
    add("model.norm.weight".to_owned(), &[8]);
    add("lm_head.weight".to_owned(), &[64, 8]);
    named
}
