//! What a call, a state or added values mean: the allow-list of constructors.
//!
//! Everything else gives an opaque object that keeps what was given to it, so that tensors inside
//! are noticed.

use super::super::element::Element;
use super::arena::{Arena, Chain, Full, Item, Ref, Tensor, Unreadable};
use super::class::{Known, Layout};
use super::opcode;

/// Why a pickle cannot be read on.
#[derive(Debug)]
pub(in super::super) enum Refusal {
    /// It breaks a rule: which, and what was found.
    Invalid(String),
    /// It describes too much.
    Full,
}

impl From<Full> for Refusal {
    fn from(_: Full) -> Self {
        Self::Full
    }
}

/// The most elements between the brackets of a shape.
const DIMENSIONS_MAX: usize = 64;

fn invalid<T>(reason: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::Invalid(reason.into()))
}

/// An object of a class that means nothing here.
pub(super) fn opaque(arena: &mut Arena, class: Ref, parts: &[Ref]) -> Result<Item, Full> {
    let parts = match parts {
        [] => Chain::EMPTY,
        parts => arena.extended(Chain::EMPTY, parts)?,
    };
    Ok(Item::Object { class, parts })
}

/// The result of a call, without a call.
pub(super) fn reduce(arena: &mut Arena, class: Ref, arguments: Ref) -> Result<Item, Refusal> {
    let Item::Tuple(tuple) = arena.item(arguments) else {
        return match arena.item(class) {
            // A class without arguments, as protocol 1 writes it.
            Item::Class { known: Known::No, .. } | Item::Object { .. } => {
                Ok(opaque(arena, class, &[arguments])?)
            }
            _ => invalid("expected the arguments of a call as a tuple, found something else"),
        };
    };
    let known = match arena.item(class) {
        Item::Class { known, .. } => known,
        _ => Known::No,
    };
    let first = arena.values(tuple).first().copied();
    match known {
        Known::Rebuild | Known::RebuildTyped => rebuild(arena, known, tuple.len(), arguments),
        Known::Parameter => match first {
            Some(data) => tensor_or_code(arena, class, data),
            None => invalid("expected the tensor of a parameter, found nothing"),
        },
        Known::FromType => from_type(arena, arguments),
        Known::FromCpu => from_cpu(arena, arguments),
        Known::Layout(layout) => Ok(arena.push_unreadable(Unreadable::Layout(layout))?),
        Known::Tensor => match first.map(|data| arena.item(data)) {
            Some(item @ (Item::Tensor(_) | Item::Unreadable(_))) => Ok(item),
            _ => Ok(opaque(arena, class, &[arguments])?),
        },
        Known::Dict => dict(arena, first),
        Known::DefaultDict => Ok(Item::Dict(Chain::EMPTY)),
        Known::Sequence => sequence(arena, first),
        Known::Set => set(arena, first),
        Known::Plain => Ok(Item::Plain),
        Known::No | Known::DType(_) | Known::Storage(_) => Ok(opaque(arena, class, &[arguments])?),
    }
}

/// An `OrderedDict` or `dict`: empty, or of pairs, or of another one.
fn dict(arena: &mut Arena, first: Option<Ref>) -> Result<Item, Refusal> {
    let Some(first) = first else { return Ok(Item::Dict(Chain::EMPTY)) };
    match arena.item(first) {
        Item::Dict(chain) => copied(arena, chain).map(Item::Dict),
        Item::List(chain) => {
            let pairs: Vec<Ref> = arena.chunks(chain).flatten().copied().collect();
            dict_of_pairs(arena, &pairs)
        }
        Item::Tuple(slice) => {
            let pairs = arena.values(slice).to_vec();
            dict_of_pairs(arena, &pairs)
        }
        _ => invalid("expected the pairs of a dictionary, found something else"),
    }
}

fn dict_of_pairs(arena: &mut Arena, pairs: &[Ref]) -> Result<Item, Refusal> {
    let mut entries = Vec::new();
    for &pair in pairs {
        let values: Vec<Ref> = match arena.item(pair) {
            Item::Tuple(slice) => arena.values(slice).to_vec(),
            Item::List(chain) => arena.chunks(chain).flatten().take(3).copied().collect(),
            _ => Vec::new(),
        };
        let [key, value] = values[..] else {
            return invalid("expected pairs of a key and a value for a dictionary, found something else");
        };
        arena.meter.grow(&mut entries, 2)?;
        entries.extend([key, value]);
    }
    Ok(Item::Dict(arena.extended(Chain::EMPTY, &entries)?))
}

fn copied(arena: &mut Arena, chain: Chain) -> Result<Chain, Refusal> {
    let values: Vec<Ref> = arena.chunks(chain).flatten().copied().collect();
    Ok(arena.extended(Chain::EMPTY, &values)?)
}

fn sequence(arena: &mut Arena, first: Option<Ref>) -> Result<Item, Refusal> {
    let Some(first) = first else { return Ok(Item::Tuple(arena.push_values(&[])?)) };
    match arena.item(first) {
        item @ Item::Tuple(_) => Ok(item),
        Item::List(chain) => copied(arena, chain).map(Item::List),
        _ => Ok(Item::Plain),
    }
}

fn set(arena: &mut Arena, first: Option<Ref>) -> Result<Item, Refusal> {
    let Some(first) = first else { return Ok(Item::Set(Chain::EMPTY)) };
    match arena.item(first) {
        Item::List(chain) => copied(arena, chain).map(Item::Set),
        Item::Tuple(slice) => {
            let values = arena.values(slice).to_vec();
            Ok(Item::Set(arena.extended(Chain::EMPTY, &values)?))
        }
        _ => Ok(Item::Plain),
    }
}

/// The tensor that a value is; one that cannot be read if `class` made it of something else.
fn tensor_or_code(arena: &mut Arena, class: Ref, data: Ref) -> Result<Item, Refusal> {
    match arena.item(data) {
        item @ (Item::Tensor(_) | Item::Unreadable(_)) => Ok(item),
        Item::Object { class, .. } => Ok(code(arena, class)?),
        _ => Ok(code(arena, class)?),
    }
}

/// A tensor that this class makes.
fn code(arena: &mut Arena, mut class: Ref) -> Result<Item, Full> {
    // Objects are older than the objects made of them, so this ends.
    loop {
        match arena.item(class) {
            Item::Object { class: inner, .. } => class = inner,
            Item::Class { name, .. } => return arena.push_unreadable(Unreadable::Code(name)),
            _ => return arena.push_unreadable(Unreadable::Layout(Layout::Unnamed)),
        }
    }
}

/// `_rebuild_from_type_v2(function, class, arguments, state)`: a tensor with attributes, or of a
/// subclass.
fn from_type(arena: &mut Arena, arguments: Ref) -> Result<Item, Refusal> {
    let Item::Tuple(tuple) = arena.item(arguments) else { return Ok(Item::Plain) };
    let &[function, class, inner, _state] = arena.values(tuple) else {
        return invalid("expected 4 arguments of _rebuild_from_type_v2, found another number");
    };
    match (arena.item(class), arena.item(function)) {
        (Item::Class { known: Known::Tensor, .. }, Item::Class { known, .. }) => match known {
            Known::Rebuild
            | Known::RebuildTyped
            | Known::Parameter
            | Known::FromCpu
            | Known::Layout(
                Layout::Sparse | Layout::Quantised | Layout::Nested | Layout::Meta | Layout::Numpy,
            ) => reduce(arena, function, inner),
            _ => Ok(code(arena, function)?),
        },
        (Item::Class { known: Known::Tensor, .. }, _) => Ok(code(arena, function)?),
        _ => Ok(code(arena, class)?),
    }
}

/// `_rebuild_device_tensor_from_cpu_tensor(tensor, dtype, device, requires_grad)`.
fn from_cpu(arena: &mut Arena, arguments: Ref) -> Result<Item, Refusal> {
    let Item::Tuple(tuple) = arena.item(arguments) else { return Ok(Item::Plain) };
    let &[data, dtype, _device, _grad] = arena.values(tuple) else {
        return invalid("expected 4 arguments of _rebuild_device_tensor_from_cpu_tensor");
    };
    match (arena.item(data), arena.item(dtype)) {
        (Item::Tensor(position), Item::Class { known: Known::DType(wanted), .. }) => {
            let (element, _, _) = arena.kind_of(arena.tensor(position).kind);
            match element == wanted {
                true => Ok(Item::Tensor(position)),
                false => Ok(arena.push_unreadable(Unreadable::Layout(Layout::Cast))?),
            }
        }
        (item @ Item::Unreadable(_), _) => Ok(item),
        _ => invalid("expected a tensor and an element type, found something else"),
    }
}

/// `_rebuild_tensor`, `_v2` and `_v3`.
fn rebuild(arena: &mut Arena, known: Known, count: usize, arguments: Ref) -> Result<Item, Refusal> {
    let Item::Tuple(tuple) = arena.item(arguments) else { return Ok(Item::Plain) };
    let mut parts = [Ref::NONE; 8];
    let expected = if known == Known::RebuildTyped { 7..=8 } else { 4..=7 };
    if !expected.contains(&count) || count == 5 {
        return invalid(format!("expected the parts of a tensor, found {count} of them"));
    }
    parts[..count].copy_from_slice(arena.values(tuple));
    let [storage, offset, shape, strides, _grad, _hooks, seventh, eighth] = parts;
    let (element, bits) = match known {
        Known::RebuildTyped => match arena.item(seventh) {
            Item::Class { known: Known::DType(element), .. } => (Some(element), eighth),
            _ => return invalid("expected the element type of a tensor, found something else"),
        },
        _ => (None, seventh),
    };
    if let Some(mark) = marked(arena, bits) {
        return Ok(arena.push_unreadable(Unreadable::Layout(mark))?);
    }
    match arena.item(storage) {
        Item::Storage { element: stored, id, count } => {
            let storage_bytes = count.checked_mul(stored.bytes());
            let Some(storage_bytes) = storage_bytes else {
                return invalid(format!("storage of {count} elements of {} bytes", stored.bytes()));
            };
            let storage = Place { id, storage_bytes };
            place(arena, storage, element.unwrap_or(stored), offset, shape, strides)
        }
        item @ Item::Unreadable(_) => Ok(item),
        Item::Object { class, .. } => Ok(code(arena, class)?),
        _ => invalid("expected the storage of a tensor, found something else"),
    }
}

/// The bits `conj` and `neg`: the bytes are those of another number.
fn marked(arena: &Arena, metadata: Ref) -> Option<Layout> {
    let Item::Dict(chain) = arena.item(metadata) else { return None };
    let mut is_key = true;
    let mut key = None;
    for &value in arena.chunks(chain).flatten() {
        if is_key {
            key = arena.text_of(value);
        } else if value != Ref::FALSE {
            match key {
                Some("conj") => return Some(Layout::Conjugated),
                Some("neg") => return Some(Layout::Negated),
                _ => {}
            }
        }
        is_key = !is_key;
    }
    None
}

/// A storage.
#[derive(Clone, Copy)]
pub(in super::super) struct Place {
    pub(in super::super) id: u32,
    pub(in super::super) storage_bytes: u64,
}

/// A tensor in a storage, with these values as its numbers.
fn place(
    arena: &mut Arena,
    storage: Place,
    element: Element,
    offset: Ref,
    shape: Ref,
    strides: Ref,
) -> Result<Item, Refusal> {
    let offset = match arena.item(offset) {
        Item::Int(offset) => u64::try_from(offset).ok(),
        _ => None,
    };
    let Some(offset) = offset else {
        return invalid("expected the offset of a tensor as a number from 0, found something else");
    };
    let (mut dims, mut steps) = ([0; DIMENSIONS_MAX], [0; DIMENSIONS_MAX]);
    let shape = numbers(arena, shape, &mut dims)?;
    let strides = numbers(arena, strides, &mut steps)?;
    placed(arena, storage, element, offset, shape, strides)
}

/// A tensor in a storage. Checks that all its elements are inside.
pub(in super::super) fn placed(
    arena: &mut Arena,
    storage: Place,
    element: Element,
    offset: u64,
    shape: &[u64],
    strides: &[u64],
) -> Result<Item, Refusal> {
    if shape.len() != strides.len() {
        let (shape, strides) = (shape.len(), strides.len());
        return invalid(format!("expected a stride for each of {shape} dimensions, found {strides}"));
    }
    let is_empty = shape.contains(&0);
    let mut row_major = true;
    let (mut expected, mut last) = (Some(1_u64), Some(offset));
    for (&len, &stride) in shape.iter().zip(strides).rev() {
        row_major &= len == 1 || expected == Some(stride);
        expected = expected.and_then(|expected| expected.checked_mul(len));
        let reach = len.saturating_sub(1).checked_mul(stride);
        last = last.zip(reach).and_then(|(last, reach)| last.checked_add(reach));
    }
    let elements = if is_empty { Some(0) } else { last.and_then(|last| last.checked_add(1)) };
    let needed = elements.and_then(|elements| elements.checked_mul(element.bytes()));
    let storage_bytes = storage.storage_bytes;
    if needed.is_none_or(|needed| needed > storage_bytes) {
        let needed_bytes = needed.unwrap_or(u64::MAX);
        return Ok(arena.push_unreadable(Unreadable::Outside { needed_bytes, storage_bytes })?);
    }
    let strides = if row_major || is_empty { &[] } else { strides };
    let kind = arena.kind(element, shape, strides)?;
    let offset_bytes = if is_empty { 0 } else { offset * element.bytes() };
    Ok(arena.push_tensor(Tensor { offset_bytes, storage: storage.id, kind })?)
}

/// The numbers in a tuple or list.
fn numbers<'n>(
    arena: &Arena,
    values: Ref,
    numbers: &'n mut [u64; DIMENSIONS_MAX],
) -> Result<&'n [u64], Refusal> {
    let mut count = 0;
    let mut add = |value: Ref| match (arena.item(value), numbers.get_mut(count)) {
        (Item::Int(number), Some(slot)) => {
            count += 1;
            u64::try_from(number).map(|number| *slot = number).is_ok()
        }
        _ => false,
    };
    let good = match arena.item(values) {
        Item::Tuple(slice) => arena.values(slice).iter().all(|&value| add(value)),
        Item::List(chain) => arena.chunks(chain).flatten().all(|&value| add(value)),
        _ => false,
    };
    match good {
        true => Ok(&numbers[..count]),
        false => invalid(format!(
            "expected shape and strides of a tensor as at most {DIMENSIONS_MAX} numbers from 0, found something else"
        )),
    }
}

/// Adds values to a container.
pub(super) fn extend(arena: &mut Arena, opcode: u8, container: Ref, values: &[Ref]) -> Result<(), Refusal> {
    let item = arena.item(container);
    let pairs = matches!(opcode, opcode::SETITEM | opcode::SETITEMS);
    if pairs && !values.len().is_multiple_of(2) {
        return invalid("expected a value for each key of a dictionary, found one key more");
    }
    let wanted = match item {
        Item::Object { .. } | Item::Plain => true,
        Item::Dict(_) => pairs,
        Item::List(_) => matches!(opcode, opcode::APPEND | opcode::APPENDS),
        Item::Set(_) => opcode == opcode::ADDITEMS,
        _ => false,
    };
    if !wanted {
        return invalid("expected a container for the values before them, found something else");
    }
    if values.is_empty() {
        return Ok(());
    }
    let item = match item {
        Item::Object { class, parts } => Item::Object { class, parts: arena.extended(parts, values)? },
        Item::Dict(chain) => Item::Dict(arena.extended(chain, values)?),
        Item::List(chain) => Item::List(arena.extended(chain, values)?),
        Item::Set(chain) => Item::Set(arena.extended(chain, values)?),
        other => other,
    };
    arena.replace(container, item);
    Ok(())
}

/// Gives an object its state.
pub(super) fn build(arena: &mut Arena, target: Ref, state: Ref) -> Result<(), Refusal> {
    let Item::Object { class, parts } = arena.item(target) else {
        // Attributes of a dictionary or a tensor.
        return Ok(());
    };
    let is_tensor = matches!(arena.item(class), Item::Class { known: Known::Tensor, .. });
    let item = match is_tensor.then(|| tensor_state(arena, state)).transpose()?.flatten() {
        Some(item) => item,
        None => Item::Object { class, parts: arena.extended(parts, &[state])? },
    };
    arena.replace(target, item);
    Ok(())
}

/// The state of a tensor before torch 0.4: storage, offset, shape, strides.
fn tensor_state(arena: &mut Arena, state: Ref) -> Result<Option<Item>, Refusal> {
    let Item::Tuple(tuple) = arena.item(state) else { return Ok(None) };
    match arena.values(tuple) {
        &[storage, ..] if tuple.len() == 4 && matches!(arena.item(storage), Item::Storage { .. }) => {
            rebuild(arena, Known::Rebuild, 4, state).map(Some)
        }
        &[data, ..] => match arena.item(data) {
            item @ (Item::Tensor(_) | Item::Unreadable(_)) => Ok(Some(item)),
            _ => Ok(None),
        },
        [] => Ok(None),
    }
}
