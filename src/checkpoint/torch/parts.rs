//! From the value of a pickle to the table of tensors: which part is read, and what is said of the
//! rest.

use super::super::DType;
use super::super::error::{CheckpointError, kept};
use super::super::format::{FoundTensor, Input};
use super::super::options::Selection;
use super::super::tensor::TensorTable;
use super::element::Element;
use super::pickle::{Arena, Chain, Item, Ref, Unreadable};
use super::tree::{Contains, Key, Survey, TreeFault, Walk, check_keys, entries};
use crate::units::to_u64;

/// Names under which training checkpoints keep the weights, the usual ones first.
const WEIGHTS: [&str; 4] = ["state_dict", "model_state_dict", "model", "module"];

/// The name of a tensor that is the whole file.
const ONLY_TENSOR: &str = "tensor";

/// The longest name of a tensor.
const NAME_BYTES_MAX: usize = 64 << 10;

/// Names in a note.
const LISTED_MAX: usize = 8;
const LISTED_BYTES_MAX: usize = 64;

/// What a pickle holds.
pub(super) struct Contained<'a> {
    pub(super) arena: &'a Arena,
    pub(super) survey: &'a Survey,
    pub(super) root: Ref,
}

/// The chosen value.
struct Chosen {
    value: Ref,
    /// The key by which it was chosen without being asked for.
    by: Option<&'static str>,
    /// The name of the value if it is a tensor itself.
    name: String,
}

impl Contained<'_> {
    fn contains(&self, value: Ref) -> Contains {
        self.survey.contains(self.arena, value)
    }

    /// Adds the tensors of the chosen part to the table. `start_of` gives the first byte of a
    /// storage in the file. Returns notes for people.
    pub(super) fn deliver(
        &self,
        input: &Input<'_>,
        table: &mut TensorTable,
        start_of: impl Fn(u32) -> Option<u64>,
    ) -> Result<Vec<String>, CheckpointError> {
        let chosen = self.choose(input)?;
        let fault = |fault, name: &str| tree_fault(input, fault, name);
        let mut delivery = Delivery { input, arena: self.arena, start_of, spent_bytes: 0, dims: Vec::new() };
        match self.arena.item(chosen.value) {
            Item::Dict(_) | Item::List(_) | Item::Tuple(_) => {
                let walk = Walk::new(self.arena, self.survey, chosen.value);
                let mut walk = walk.map_err(|circle| fault(circle, &chosen.name))?;
                loop {
                    match walk.next() {
                        Ok(Some(value)) => delivery.add(table, &walk.name, value)?,
                        Ok(None) => break,
                        Err(circle) => return Err(fault(circle, &walk.name)),
                    }
                }
            }
            _ if self.contains(chosen.value) == Contains::default() => {}
            Item::Object { .. } if chosen.value == self.root => delivery.add(table, "", chosen.value)?,
            _ => delivery.add(table, &chosen.name, chosen.value)?,
        }
        Ok(self.notes(&chosen))
    }

    fn choose(&self, input: &Input<'_>) -> Result<Chosen, CheckpointError> {
        let whole = Chosen { value: self.root, by: None, name: ONLY_TENSOR.to_owned() };
        match &input.options.selection {
            Selection::Whole => Ok(whole),
            Selection::Named(part) => self.named(input, part),
            Selection::Weights => {
                let Item::Dict(dict) = self.arena.item(self.root) else { return Ok(whole) };
                let found = |name: &'static str| {
                    let named = entries(self.arena, dict).find(|&(key, value)| {
                        self.arena.text_of(key) == Some(name)
                            && matches!(self.arena.item(value), Item::Dict(_))
                            && self.contains(value).tensors()
                    });
                    named.map(|(_, value)| Chosen { value, by: Some(name), name: String::new() })
                };
                let chosen = WEIGHTS.into_iter().find_map(found);
                if chosen.is_some() {
                    check_keys(self.arena, dict).map_err(|fault| tree_fault(input, fault, ""))?;
                }
                Ok(chosen.unwrap_or(whole))
            }
        }
    }

    /// The value of that name: keys with points between, each as long as possible.
    fn named(&self, input: &Input<'_>, part: &str) -> Result<Chosen, CheckpointError> {
        let (mut value, mut rest) = (self.root, part);
        let none = |value| CheckpointError::NoSuchPart {
            path: input.path.to_owned(),
            part: kept(part),
            found: self.parts_text(value),
        };
        loop {
            let mut best: Option<(usize, Ref)> = None;
            let mut name = String::new();
            let mut consider = |key: Option<Key<'_>>, inner: Ref| {
                name.clear();
                let Some(key) = key else { return };
                key.push_to(&mut name);
                let fits =
                    rest.strip_prefix(&name[..]).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
                if fits && best.is_none_or(|(len, _)| len <= name.len()) {
                    best = Some((name.len(), inner));
                }
            };
            match self.arena.item(value) {
                Item::Dict(dict) => {
                    check_keys(self.arena, dict).map_err(|fault| tree_fault(input, fault, part))?;
                    entries(self.arena, dict)
                        .for_each(|(key, inner)| consider(Key::of(self.arena, key), inner));
                }
                Item::List(chain) => {
                    let values = self.arena.chunks(chain).flatten().copied();
                    (0..).zip(values).for_each(|(index, inner)| consider(Some(Key::Number(index)), inner));
                }
                Item::Tuple(slice) => {
                    let values = self.arena.values(slice).iter().copied();
                    (0..).zip(values).for_each(|(index, inner)| consider(Some(Key::Number(index)), inner));
                }
                _ => return Err(none(self.root)),
            }
            let (len, inner) = best.ok_or_else(|| none(value))?;
            if !self.contains(inner).tensors() && !self.contains(inner).hidden() {
                return Err(none(value));
            }
            match rest.get(len + 1..) {
                Some(more) if rest.len() > len => (value, rest) = (inner, more),
                _ => return Ok(Chosen { value: inner, by: None, name: rest.to_owned() }),
            }
        }
    }

    /// The keys of a dictionary that lead to tensors, or those that do not.
    fn keys(&self, value: Ref, with_tensors: bool) -> impl Iterator<Item = Key<'_>> {
        let dict = match self.arena.item(value) {
            Item::Dict(dict) => dict,
            _ => Chain::EMPTY,
        };
        let wanted = move |&(_, inner): &(Ref, Ref)| self.contains(inner).tensors() == with_tensors;
        entries(self.arena, dict).filter(wanted).filter_map(|(key, _)| Key::of(self.arena, key))
    }

    fn parts_text(&self, value: Ref) -> String {
        match listed(self.keys(value, true)) {
            None => "no parts with tensors".to_owned(),
            Some(parts) => format!("tensors in {parts}"),
        }
    }

    /// What was chosen, and what else is in the file.
    fn notes(&self, chosen: &Chosen) -> Vec<String> {
        let mut notes = Vec::new();
        let root = self.contains(self.root);
        if !root.tensors() && !root.hidden() {
            notes.push("the file holds no tensors".to_owned());
        }
        if let Some(by) = chosen.by {
            notes.push(match listed(self.keys(self.root, true).filter(|key| *key != Key::Text(by))) {
                None => format!("the tensors are those of `{by}`"),
                Some(others) => format!(
                    "the tensors are those of `{by}`; there are others in {others}: select one of them, or read \
                     the whole file"
                ),
            });
        }
        if let Some(rest) = listed(self.keys(self.root, false)) {
            notes.push(format!("also in the file, without tensors: {rest}"));
        }
        if let Some(classes) = listed(self.arena.strangers.iter().map(|name| Key::Text(name))) {
            notes.push(format!("objects of other classes were not looked into: {classes}"));
        }
        notes
    }
}

/// The first few names; none of none.
fn listed<'k>(mut names: impl Iterator<Item = Key<'k>>) -> Option<String> {
    let shown: Vec<String> = names
        .by_ref()
        .take(LISTED_MAX)
        .map(|key| {
            let mut name = String::new();
            key.push_to(&mut name);
            let end = (0..=LISTED_BYTES_MAX.min(name.len())).rev().find(|&at| name.is_char_boundary(at));
            let shown = &name[..end.unwrap_or(0)];
            format!("`{shown}{}`", if shown.len() < name.len() { "..." } else { "" })
        })
        .collect();
    match (shown.is_empty(), names.count()) {
        (true, _) => None,
        (false, 0) => Some(shown.join(", ")),
        (false, more) => Some(format!("{} and {more} more", shown.join(", "))),
    }
}

fn tree_fault(input: &Input<'_>, fault: TreeFault, name: &str) -> CheckpointError {
    let found = match fault {
        TreeFault::Circle => "a container that holds itself",
        TreeFault::Shared => "containers that hold each other many times",
        TreeFault::Deep => "containers nested too deeply",
        TreeFault::Key => "a dictionary key that is neither a text nor a number",
        TreeFault::Twice => "a dictionary that has a key twice",
    };
    input.refused(name, found, "save a plain dictionary of tensors, such as model.state_dict()")
}

/// Tensors on their way to the table.
struct Delivery<'a, F> {
    input: &'a Input<'a>,
    arena: &'a Arena,
    start_of: F,
    spent_bytes: u64,
    dims: Vec<u64>,
}

impl<F: Fn(u32) -> Option<u64>> Delivery<'_, F> {
    fn add(&mut self, table: &mut TensorTable, name: &str, value: Ref) -> Result<(), CheckpointError> {
        match self.arena.item(value) {
            Item::Tensor(position) => self.tensor(table, name, position),
            Item::Unreadable(position) => Err(self.unreadable(name, position)),
            item => {
                let class = match item {
                    Item::Object { class, .. } => self.class_name(class),
                    _ => "set".to_owned(),
                };
                let found = format!("tensors inside an object of class {class}");
                let advice = "save model.state_dict(), or select another part of the file";
                Err(self.input.refused(name, found, advice))
            }
        }
    }

    fn class_name(&self, mut class: Ref) -> String {
        while let Item::Object { class: inner, .. } = self.arena.item(class) {
            class = inner;
        }
        match self.arena.item(class) {
            Item::Class { name, .. } => format!("`{}`", kept(self.arena.text(name))),
            _ => "without a name".to_owned(),
        }
    }

    fn tensor(&mut self, table: &mut TensorTable, name: &str, position: u32) -> Result<(), CheckpointError> {
        // What the table takes for a tensor, about.
        self.spent_bytes += to_u64(name.len()) + 64;
        let limit_bytes = self.input.options.header_bytes_max.saturating_mul(2);
        if self.spent_bytes > limit_bytes {
            let (path, what, found_bytes) = (self.input.path.to_owned(), "list of tensors", self.spent_bytes);
            return Err(CheckpointError::OverLimit { path, what, found_bytes, limit_bytes });
        }
        if name.len() > NAME_BYTES_MAX {
            let found = format!("a name of {} bytes", name.len());
            return Err(self.input.refused(name, found, "give its module a shorter name"));
        }
        let tensor = self.arena.tensor(position);
        let (element, shape, strides) = self.arena.kind_of(tensor.kind);
        let Some(dtype) = element.dtype() else {
            let found = format!("elements of type {}", element.name());
            return Err(self.input.refused(name, found, "cast it to another type, and save it again"));
        };
        let Some(start) = (self.start_of)(tensor.storage) else {
            let found = "a storage of which the file has no bytes";
            return Err(self.input.refused(name, found, "the file is damaged: save or download it again"));
        };
        // The offset was checked against the storage, and the storage against the file.
        let start = start + tensor.offset_bytes;
        let shape = match dtype {
            DType::F4 => match pairs(shape, strides, &mut self.dims) {
                Some(shape) => shape,
                None => return Err(self.packed(name, element)),
            },
            _ => shape,
        };
        self.input.add(table, FoundTensor { name, dtype, shape, dims: shape, strides, start })
    }

    fn packed(&self, name: &str, element: Element) -> CheckpointError {
        let found = format!("{} with strides, or without dimensions", element.name());
        self.input.refused(name, found, "save tensor.contiguous()")
    }

    fn unreadable(&self, name: &str, position: u32) -> CheckpointError {
        match self.arena.unreadable(position) {
            Unreadable::Layout(layout) => {
                let (found, advice) = layout.texts();
                self.input.refused(name, found, advice)
            }
            Unreadable::Code(class) => {
                let found = format!("a tensor that `{}` makes", kept(self.arena.text(class)));
                self.input.refused(
                    name,
                    found,
                    "nothing is executed here: load it with torch, and save plain tensors",
                )
            }
            Unreadable::Outside { needed_bytes, storage_bytes } => {
                let (path, tensor) = (self.input.path.to_owned(), kept(name));
                CheckpointError::OutsideStorage { path, tensor, needed_bytes, storage_bytes }
            }
        }
    }
}

/// The shape in values of a tensor whose elements are pairs of values.
fn pairs<'d>(shape: &[u64], strides: &[u64], dims: &'d mut Vec<u64>) -> Option<&'d [u64]> {
    dims.clear();
    dims.extend_from_slice(shape);
    let last = dims.last_mut().filter(|_| strides.is_empty())?;
    *last = last.checked_mul(2)?;
    Some(dims)
}
