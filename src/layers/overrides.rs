//! An override applied to one checkpoint: names become lists, prefixes and layers, or an error that says what
//! exists instead.

use std::collections::{BTreeSet, HashMap};

use super::lists::{Lists, NO_CHILD, index32, slot};
use super::map::{Entry, Group};
use super::names;
use super::{LayerMap, LayersError, NamedShape};

/// Which tensors the groups of an override claim.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Group per tensor, or empty without groups.
    groups: Vec<Option<u32>>,
}

impl Claims {
    /// Finds the tensors of every group.
    ///
    /// # Errors
    /// If a prefix holds no tensor, or two prefixes hold the same one.
    pub(super) fn find(entries: &[NamedShape<'_>], map: &LayerMap) -> Result<Self, LayersError> {
        if map.groups.is_empty() {
            return Ok(Self::default());
        }
        let mut prefixes: HashMap<&str, (u32, &Entry, bool)> = HashMap::new();
        for (number, group) in map.groups.iter().enumerate() {
            for entry in &group.prefixes {
                let claim = (index32(number), entry, false);
                if let Some((other, first, _)) = prefixes.insert(&entry.name, claim) {
                    return Err(conflict((group, entry), (&map.groups[slot(other)], first)));
                }
            }
        }
        let lengths: BTreeSet<usize> = prefixes.keys().map(|prefix| prefix.len()).collect();
        let mut groups = Vec::with_capacity(entries.len());
        for entry in entries {
            let mut claimed: Option<(u32, &Entry)> = None;
            for &length in lengths.iter().take_while(|&&length| length <= entry.name.len()) {
                let ends_here = matches!(entry.name.as_bytes().get(length), None | Some(b'.' | b'/'));
                let Some(prefix) = entry.name.get(..length).filter(|_| ends_here) else { continue };
                let Some((group, prefix, used)) = prefixes.get_mut(prefix) else { continue };
                *used = true;
                if let Some((other, first)) = claimed {
                    let others = (&map.groups[slot(other)], first);
                    return Err(conflict((&map.groups[slot(*group)], prefix), others));
                }
                claimed = Some((*group, prefix));
            }
            groups.push(claimed.map(|(group, _)| group));
        }
        let mut unused: Vec<_> =
            prefixes.values().filter(|(_, _, used)| !used).map(|&(_, entry, _)| entry).collect();
        unused.sort_by_key(|entry| (entry.place.line, entry.place.column));
        match unused.first() {
            None => Ok(Self { groups }),
            Some(entry) => {
                let key = map.groups.iter().find(|group| group.prefixes.contains(entry));
                let key = key.map_or_else(String::new, |group| format!("groups.{}", group.id.name));
                let known = entries.iter().flat_map(|entry| prefixes_of(entry.name));
                Err(unknown(entry, key, "tensor or prefix of tensors", known))
            }
        }
    }

    /// The group that claims a tensor.
    pub(super) fn group(&self, tensor: usize) -> Option<u32> {
        self.groups.get(tensor).copied().flatten()
    }
}

fn conflict(second: (&Group, &Entry), first: (&Group, &Entry)) -> LayersError {
    LayersError::MapConflict {
        place: second.1.place,
        key: format!("groups.{}", second.0.id.name),
        name: second.1.name.clone(),
        other_key: format!("groups.{}", first.0.id.name),
        other_place: first.1.place,
    }
}

/// What the override says of lists: stack or not. A list around a given stack is none.
///
/// # Errors
/// If a name is no list, or two entries contradict each other.
pub(super) fn given_lists(lists: &Lists<'_>, map: &LayerMap) -> Result<HashMap<u32, bool>, LayersError> {
    let mut given = HashMap::new();
    if map.stacks.is_empty() && map.not_stacks.is_empty() {
        return Ok(given);
    }
    let list_of: HashMap<&str, u32> =
        (0..index32(lists.count())).map(|list| (lists.path(list), list)).collect();
    let mut said: HashMap<u32, (&'static str, &Entry)> = HashMap::new();
    let keyed = [("stacks", &map.stacks), ("not_stacks", &map.not_stacks)];
    for (key, entry) in keyed.iter().flat_map(|&(key, entries)| entries.iter().map(move |entry| (key, entry)))
    {
        let Some(&list) = list_of.get(entry.name.as_str()) else {
            let known = (0..index32(lists.count())).map(|list| lists.path(list));
            return Err(unknown(entry, key.to_owned(), "numbered list", known));
        };
        if let Some((other_key, first)) = said.insert(list, (key, entry)) {
            return Err(contradiction(key, entry, other_key, first));
        }
        given.insert(list, key == "stacks");
    }
    for entry in &map.stacks {
        let mut parent = lists.list(list_of[entry.name.as_str()]).parent;
        while parent != NO_CHILD {
            let around = lists.child(parent).list;
            if let (Some(true), Some(&(other_key, first))) = (given.insert(around, false), said.get(&around))
            {
                return Err(contradiction("stacks", entry, other_key, first));
            }
            parent = lists.list(around).parent;
        }
    }
    Ok(given)
}

fn contradiction(key: &str, entry: &Entry, other_key: &str, first: &Entry) -> LayersError {
    LayersError::MapConflict {
        place: entry.place,
        key: key.to_owned(),
        name: entry.name.clone(),
        other_key: other_key.to_owned(),
        other_place: first.place,
    }
}

/// A layer as the order of an override sees it.
pub(super) struct Ordered<'a> {
    /// Its id.
    pub(super) id: &'a str,
    /// The path of its stack, if it is in one.
    pub(super) stack: Option<&'a str>,
}

/// Applies the override's order: `layers` come in the default order; the result is the positions in it, reordered.
///
/// # Errors
/// If an entry names no layer, stack or container, or is listed twice.
pub(super) fn reorder(layers: &[Ordered<'_>], order: &[Entry]) -> Result<Vec<u32>, LayersError> {
    let mut by_id: HashMap<&str, Vec<u32>> = HashMap::new();
    for (position, layer) in layers.iter().enumerate() {
        by_id.entry(layer.id).or_default().push(index32(position));
        if let Some(stack) = layer.stack {
            by_id.entry(stack).or_default().push(index32(position));
        }
    }
    let mut said: HashMap<&str, &Entry> = HashMap::new();
    let mut placed = vec![false; layers.len()];
    let mut positions = Vec::with_capacity(layers.len());
    for entry in order {
        if let Some(first) = said.insert(&entry.name, entry) {
            return Err(contradiction("order", entry, "order", first));
        }
        let below: Vec<u32>;
        let named = match by_id.get(entry.name.as_str()) {
            Some(named) => named,
            None => {
                below = (0_u32..)
                    .zip(layers)
                    .filter(|(_, layer)| is_below(layer.id, &entry.name))
                    .map(|(at, _)| at)
                    .collect();
                &below
            }
        };
        if named.is_empty() {
            let known = layers.iter().flat_map(|layer| prefixes_of(layer.id));
            return Err(unknown(entry, "order".to_owned(), "layer, stack or prefix of layers", known));
        }
        for &position in named {
            if !std::mem::replace(&mut placed[slot(position)], true) {
                positions.push(position);
            }
        }
    }
    positions.extend((0_u32..).zip(&placed).filter(|&(_, &placed)| !placed).map(|(position, _)| position));
    Ok(positions)
}

fn is_below(id: &str, prefix: &str) -> bool {
    id.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(['.', '/']))
}

/// `name` and the containers around it, outermost first; the first few, which is enough to suggest one.
fn prefixes_of(name: &str) -> impl Iterator<Item = &str> {
    let component = names::body_start(name);
    let first = (component > 0).then(|| &name[..component.saturating_sub(1)]);
    first.into_iter().chain(names::components(name, component).take(6).map(|(_, end)| &name[..end]))
}

fn unknown<'a>(
    entry: &Entry,
    key: String,
    expected: &'static str,
    known: impl Iterator<Item = &'a str>,
) -> LayersError {
    LayersError::MapUnknownName {
        place: entry.place,
        key,
        name: entry.name.clone(),
        expected,
        nearest: nearest(&entry.name, known),
    }
}

/// Up to three known names that differ least from `name`.
fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Vec<String> {
    /// More candidates or longer names than this are no help to a person, and cost time.
    const CANDIDATES_MAX: usize = 20_000;
    const LENGTH_MAX: usize = 128;
    let candidates: BTreeSet<&str> =
        known.filter(|known| !known.is_empty() && known.len() <= LENGTH_MAX).take(CANDIDATES_MAX).collect();
    if name.len() > LENGTH_MAX {
        return Vec::new();
    }
    let mut scored: Vec<_> = candidates.iter().map(|known| (distance(name, known), *known)).collect();
    scored.sort_unstable();
    let limit = name.chars().count() / 2 + 1;
    scored
        .into_iter()
        .filter(|&(distance, _)| distance <= limit)
        .take(3)
        .map(|(_, known)| known.to_owned())
        .collect()
}

/// Edit distance in characters (Levenshtein), one row at a time.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (at, left) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = at + 1;
        for (column, &right) in right.iter().enumerate() {
            let substitute = diagonal + usize::from(left != right);
            diagonal = row[column + 1];
            row[column + 1] = substitute.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_names_come_first() {
        let known = ["model.layers", "model.norm", "vision.layers", "lm_head"];
        assert_eq!(nearest("model.layer", known.into_iter()), ["model.layers", "model.norm"]);
        assert_eq!(nearest("zzzzzzzz", known.into_iter()), [""; 0]);
        assert_eq!((distance("", "abc"), distance("kitten", "sitting")), (3, 3));
    }
}
