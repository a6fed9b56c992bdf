//! The files of a conversion in words: `27 files` are `24 layers of 29 MiB, model.embed_tokens,
//! model.norm, lm_head`.

use onelayer_system::units::to_u64;
use std::collections::{BTreeSet, HashMap};

use crate::numbers::{bytes, count, grouped};
use crate::report::ConvertFile;

/// Single layers that are named; the others are counted.
const NAMES_MAX: usize = 4;

/// The contents of the files. `stack_of` returns the stack of a layer, if it belongs to one.
pub(crate) fn summary(files: &[ConvertFile], stack_of: &dyn Fn(&str) -> Option<String>) -> String {
    let mut stacks = Stacks::default();
    let (mut alone, mut shared) = (Vec::new(), 0_u64);
    for file in files {
        match file.layers.as_slice() {
            [layer] => match stack_of(layer) {
                Some(stack) => stacks.add(&stack, layer, file.bytes),
                // A layer that was split has several files in a row.
                None if alone.last() == Some(&layer) => {}
                None => alone.push(layer),
            },
            _ => shared += 1,
        }
    }
    let mut parts = stacks.parts();
    if shared > 0 && shared == to_u64(files.len()) {
        let layers: BTreeSet<&String> = files.iter().flat_map(|file| &file.layers).collect();
        return count(to_u64(layers.len()), "layer");
    }
    if shared > 0 {
        parts.push(format!("{} of several layers", count(shared, "file")));
    }
    let hidden = alone.len().saturating_sub(NAMES_MAX);
    // `1 more` would be no shorter than the name.
    let shown = if hidden == 1 { alone.len() } else { alone.len() - hidden };
    parts.extend(alone.iter().take(shown).map(|layer| (*layer).clone()));
    if hidden > 1 {
        parts.push(format!("{} more", grouped(to_u64(alone.len() - shown))));
    }
    parts.join(", ")
}

/// Files of single layers by stack, in order of first appearance.
#[derive(Default)]
struct Stacks {
    positions: HashMap<String, usize>,
    stacks: Vec<Stack>,
}

struct Stack {
    name: String,
    files: u64,
    layers: u64,
    last_layer: String,
    bytes: (u64, u64),
}

impl Stacks {
    fn add(&mut self, stack: &str, layer: &str, file_bytes: u64) {
        let position = *self.positions.entry(stack.to_owned()).or_insert(self.stacks.len());
        if position == self.stacks.len() {
            self.stacks.push(Stack {
                name: stack.to_owned(),
                files: 0,
                layers: 0,
                last_layer: String::new(),
                bytes: (u64::MAX, 0),
            });
        }
        let stack = &mut self.stacks[position];
        stack.files += 1;
        if stack.last_layer != layer {
            stack.layers += 1;
            layer.clone_into(&mut stack.last_layer);
        }
        stack.bytes = (stack.bytes.0.min(file_bytes), stack.bytes.1.max(file_bytes));
    }

    /// `24 layers of 29 MiB`; with the stack's name if there are several, and with the number of
    /// files if layers were split.
    fn parts(&self) -> Vec<String> {
        let part = |stack: &Stack| {
            let name = if self.stacks.len() > 1 { format!(" of {}", stack.name) } else { String::new() };
            let files = if stack.files > stack.layers {
                format!(" in {}", count(stack.files, "file"))
            } else {
                String::new()
            };
            let (least, most) = (bytes(stack.bytes.0), bytes(stack.bytes.1));
            let size = if least == most { most } else { format!("{least} to {most}") };
            let word = if self.stacks.len() > 1 || stack.files > stack.layers { "," } else { " of" };
            format!("{}{name}{files}{word} {size}", count(stack.layers, "layer"))
        };
        self.stacks.iter().map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::FileState;

    fn file(layers: &[&str], size: u64) -> ConvertFile {
        ConvertFile {
            name: String::new(),
            bytes: size,
            tensors: 1,
            layers: layers.iter().map(|layer| (*layer).to_owned()).collect(),
            state: FileState::Planned,
        }
    }

    fn of(files: &[ConvertFile]) -> String {
        summary(files, &|layer| {
            layer
                .rsplit_once('.')
                .filter(|(_, last)| last.parse::<u32>().is_ok())
                .map(|(stack, _)| stack.to_owned())
        })
    }

    #[test]
    fn equal_layers_are_counted_and_the_rest_is_named() {
        let mut files = vec![file(&["embed"], 9)];
        files.extend((0..24).map(|layer| file(&[&format!("layers.{layer}")], 29 << 20)));
        files.extend([file(&["norm"], 1), file(&["head"], 9)]);
        assert_eq!(of(&files), "24 layers of 29 MiB, embed, norm, head");
        files.extend([file(&["a"], 1), file(&["b"], 1), file(&["c"], 1)]);
        assert_eq!(of(&files), "24 layers of 29 MiB, embed, norm, head, a, 2 more");
        assert_eq!(of(&[]), "");
    }

    #[test]
    fn sizes_that_differ_are_a_range_and_stacks_have_names() {
        let files = [file(&["e.0"], 1 << 20), file(&["d.0"], 5 << 20), file(&["d.1"], 6 << 20)];
        assert_eq!(of(&files), "1 layer of e, 1 MiB, 2 layers of d, 5 MiB to 6 MiB");
        assert_eq!(of(&files[1..]), "2 layers of 5 MiB to 6 MiB");
    }

    #[test]
    fn files_that_are_all_shared_are_as_many_layers() {
        let files = [file(&["embed", "l.0", "l.1"], 9), file(&["l.1", "l.2", "head"], 9)];
        assert_eq!(of(&files), "5 layers");
        assert_eq!(of(&files[..1]), "3 layers");
    }

    #[test]
    fn cut_layers_and_shared_files_are_told_apart() {
        let files = [
            file(&["l.0"], 3),
            file(&["l.0"], 4),
            file(&["l.1"], 4),
            file(&["head"], 1),
            file(&["head"], 1),
            file(&["l.2", "l.3"], 9),
        ];
        assert_eq!(of(&files), "2 layers in 3 files, 3 B to 4 B, 1 file of several layers, head");
    }
}
