//! The story: a person overrides the grouping, and every mistake they can make is told with its
//! place and a way out.

#![allow(clippy::unwrap_used, reason = "a test helper that fails should fail the test")]

use onelayer::layers::{Confidence, LayerId, LayerKind, LayerMap, Layers, LayersError, NamedShape};

/// Two stacks, a list that is none, an embedding, a norm and a head.
fn names() -> Vec<String> {
    let mut names =
        vec!["model.embed.weight".to_owned(), "model.norm.weight".into(), "lm_head.weight".into()];
    for index in 0..3 {
        for part in ["attn.q", "attn.o", "mlp.up", "norm"] {
            names.push(format!("model.layers.{index}.{part}.weight"));
            names.push(format!("vision.blocks.{index}.{part}.weight"));
        }
        names.push(format!("vision.neck.{index}.weight"));
    }
    names
}

fn group(map: &str) -> Result<Layers, LayersError> {
    let names = names();
    let entries: Vec<_> = names.iter().map(|name| NamedShape { name, shape: None }).collect();
    Layers::from_names(&entries, &LayerMap::parse(map)?)
}

fn ids(map: &str) -> Vec<String> {
    group(map).unwrap().as_slice().iter().map(|layer| layer.id.to_string()).collect()
}

fn message(map: &str) -> String {
    group(map).unwrap_err().to_string()
}

#[test]
fn lists_become_stacks_and_stop_being_stacks() {
    let layers = group("stacks = ['vision.neck']\nnot_stacks = ['vision.blocks']").unwrap();
    assert!(layers.find(&LayerId::new("vision.neck.2")).is_some());
    assert_eq!(layers.find(&LayerId::new("vision.blocks")).unwrap().tensors.len(), 12);
    let neck = layers.stacks().iter().position(|stack| &**stack == "vision.neck").unwrap();
    assert_eq!(layers.confidence(neck), Confidence::Given);
}

#[test]
fn a_stack_inside_of_a_stack_takes_its_place() {
    let names: Vec<String> = (0..4)
        .flat_map(|layer| {
            (0..4).flat_map(move |part| ["a.b", "c.d", "e"].map(|leaf| format!("h.{layer}.x.{part}.{leaf}")))
        })
        .collect();
    let entries: Vec<_> = names.iter().map(|name| NamedShape { name, shape: None }).collect();
    let map = LayerMap::parse("stacks = ['h.2.x']").unwrap();
    let layers = Layers::from_names(&entries, &map).unwrap();
    assert!(layers.find(&LayerId::new("h.2.x.3")).is_some());
    assert!(layers.stacks().iter().all(|stack| &**stack != "h"), "the list around it gives way");
    assert_eq!(layers.as_slice().iter().map(|layer| layer.tensors.len()).sum::<usize>(), names.len());
}

#[test]
fn groups_merge_and_keep_in_one_piece() {
    let layers = group("[groups]\nends = ['model.embed', 'lm_head']\n'vision' = ['vision']").unwrap();
    assert_eq!(layers.find(&LayerId::new("ends")).unwrap().tensors.len(), 2);
    let vision = layers.find(&LayerId::new("vision")).unwrap();
    assert_eq!((vision.tensors.len(), vision.kind), (15, LayerKind::Group));
    assert_eq!(layers.stacks().len(), 1);
    let one = group("[groups]\nsplit = ['model.layers.1.norm.weight']").unwrap();
    assert_eq!(one.find(&LayerId::new("model.layers.1")).unwrap().tensors.len(), 3, "a tensor by its name");
}

#[test]
fn the_order_takes_layers_stacks_and_containers() {
    let listed = ids("order = ['lm_head', 'vision', 'model.layers.2', 'model.layers']");
    let blocks: Vec<_> = listed.iter().position(|id| id == "vision.blocks.0").into_iter().collect();
    assert_eq!(listed[0], "lm_head");
    assert!(blocks[0] < 6, "all of `vision` follows");
    let at = |id: &str| listed.iter().position(|other| other == id).unwrap();
    assert_eq!(at("model.layers.2") + 1, at("model.layers.0"));
    assert!(at("model.embed") > at("model.layers.1"), "what is not listed comes last");
    assert_eq!(listed.len(), ids("").len());
}

#[test]
fn mistakes_are_told_with_their_place_and_a_way_out() {
    let messages = [
        message("stacks = ['model.layer']"),
        message("not_stacks = ['model.layers', \n 'zzz']"),
        message("order = ['model.norms']"),
        message("order = ['model', 'model']"),
        message("stacks = ['model.layers']\nnot_stacks = ['model.layers']"),
        message("[groups]\nhead = ['lm_heads']"),
        message("[groups]\nhead = ['lm_head']\ntail = ['lm_head']"),
        message("[groups]\nhead = ['model']\ntail = ['model.norm']"),
        message("[groups]\nlm_head = ['model.norm']"),
        message("[groups]\nhead = ['model.layers.1', 'model.layer']"),
        message("stack = []"),
        message("order = 1"),
        message("order = ["),
    ]
    .join("\n");
    insta::with_settings!({ omit_expression => true }, { insta::assert_snapshot!(messages) });
}

#[test]
fn prefixes_end_with_a_component() {
    let error = group("[groups]\nhead = ['model.layer']").unwrap_err();
    assert!(matches!(error, LayersError::MapUnknownName { .. }), "{error}");
}
