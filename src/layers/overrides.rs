//! Applies an override to a checkpoint: names become lists, prefixes and layers, or an error that
//! suggests names that exist.

use std::collections::{BTreeSet, HashMap};

use super::lists::{Lists, NO_CHILD};
use super::map::{Entry, Group};
use super::name_parts;
use super::names::Names;
use super::positions::{index32, slot};
use super::{LayerMap, LayersError};
use crate::footprint::{Held, PeakMeter, items_bytes};

/// "Claimed by none".
const NO_GROUP: u32 = u32::MAX;

/// The tensors that the groups of an override claim.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Group per tensor, or [`NO_GROUP`]; empty without groups.
    groups: Vec<u32>,
}

impl Claims {
    /// Finds the tensors of every group.
    ///
    /// # Errors
    /// If a prefix matches no tensor, or two prefixes match the same one.
    pub(super) fn find(names: Names<'_>, map: &LayerMap, meter: &mut PeakMeter) -> Result<Self, LayersError> {
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
        let mut groups = Vec::with_capacity(names.count());
        meter.keep(Held::default().list(&groups));
        for name in names.tensors().map(|tensor| names.name(tensor)) {
            let mut claimed: Option<(u32, &Entry)> = None;
            for &length in lengths.iter().take_while(|&&length| length <= name.len()) {
                let ends_here = matches!(name.as_bytes().get(length), None | Some(b'.' | b'/'));
                let Some(prefix) = name.get(..length).filter(|_| ends_here) else { continue };
                let Some((group, prefix, used)) = prefixes.get_mut(prefix) else { continue };
                *used = true;
                if let Some((other, first)) = claimed {
                    let others = (&map.groups[slot(other)], first);
                    return Err(conflict((&map.groups[slot(*group)], prefix), others));
                }
                claimed = Some((*group, prefix));
            }
            groups.push(claimed.map_or(NO_GROUP, |(group, _)| group));
        }
        let mut unused: Vec<_> =
            prefixes.values().filter(|(_, _, used)| !used).map(|&(_, entry, _)| entry).collect();
        unused.sort_by_key(|entry| (entry.position.line, entry.position.column));
        match unused.first() {
            None => Ok(Self { groups }),
            Some(entry) => {
                let key = map.groups.iter().find(|group| group.prefixes.contains(entry));
                let key = key.map_or_else(String::new, |group| format!("groups.{}", group.id.name));
                let known = names.tensors().flat_map(|tensor| prefixes_of(names.name(tensor)));
                Err(unknown(entry, key, "tensor or prefix of tensors", known))
            }
        }
    }

    /// The group that claims a tensor.
    pub(super) fn group(&self, tensor: u32) -> Option<u32> {
        self.groups.get(slot(tensor)).copied().filter(|&group| group != NO_GROUP)
    }
}

fn conflict(second: (&Group, &Entry), first: (&Group, &Entry)) -> LayersError {
    LayersError::MapConflict {
        position: second.1.position,
        key: format!("groups.{}", second.0.id.name),
        name: second.1.name.clone(),
        other_key: format!("groups.{}", first.0.id.name),
        other_position: first.1.position,
    }
}

/// The override's decisions on lists: stack or not. A list around a given stack is not a stack.
///
/// # Errors
/// If a name is not a list, or two entries contradict each other.
pub(super) fn given_lists(lists: &Lists<'_>, map: &LayerMap) -> Result<HashMap<u32, bool>, LayersError> {
    let mut given = HashMap::new();
    if map.stacks.is_empty() && map.not_stacks.is_empty() {
        return Ok(given);
    }
    // Only named lists are indexed, since a checkpoint may have a million.
    let entries = || map.stacks.iter().chain(&map.not_stacks);
    let mut list_of: HashMap<&str, Option<u32>> =
        entries().map(|entry| (entry.name.as_str(), None)).collect();
    for list in 0..index32(lists.count()) {
        if let Some(named) = list_of.get_mut(lists.path(list)) {
            *named = Some(list);
        }
    }
    let mut said: HashMap<u32, (&'static str, &Entry)> = HashMap::new();
    let keyed = [("stacks", &map.stacks), ("not_stacks", &map.not_stacks)];
    for (key, entry) in keyed.iter().flat_map(|&(key, entries)| entries.iter().map(move |entry| (key, entry)))
    {
        let Some(list) = list_of[entry.name.as_str()] else {
            let known = (0..index32(lists.count())).map(|list| lists.path(list));
            return Err(unknown(entry, key.to_owned(), "numbered list", known));
        };
        if let Some((other_key, first)) = said.insert(list, (key, entry)) {
            return Err(contradiction(key, entry, other_key, first));
        }
        given.insert(list, key == "stacks");
    }
    for (entry, list) in map.stacks.iter().filter_map(|entry| Some((entry, list_of[entry.name.as_str()]?))) {
        let mut parent = lists.list(list).parent;
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
        position: entry.position,
        key: key.to_owned(),
        name: entry.name.clone(),
        other_key: other_key.to_owned(),
        other_position: first.position,
    }
}

/// The names of a layer in the order of an override.
pub(super) struct Ordered<'a> {
    /// Its id.
    pub(super) id: &'a str,
    /// The path of its stack, if it is in one.
    pub(super) stack: Option<&'a str>,
}

/// Applies the override's order to `count` layers; `layer` gives them in the default order. Returns
/// their positions in that order, reordered.
///
/// # Errors
/// If an entry is not a layer, stack or container, or is listed twice.
pub(super) fn reorder<'a>(
    count: usize,
    layer: impl Fn(u32) -> Ordered<'a>,
    order: &[Entry],
    meter: &mut PeakMeter,
) -> Result<Vec<u32>, LayersError> {
    let layers = || (0..index32(count)).map(|position| (position, layer(position)));
    // Only named layers are indexed, since a checkpoint may have a million.
    let mut by_id: HashMap<&str, Vec<u32>> =
        order.iter().map(|entry| (entry.name.as_str(), Vec::new())).collect();
    for (position, layer) in layers() {
        for name in [Some(layer.id), layer.stack].into_iter().flatten() {
            if let Some(named) = by_id.get_mut(name) {
                named.push(position);
            }
        }
    }
    let mut said: HashMap<&str, &Entry> = HashMap::new();
    let mut placed = vec![false; count];
    let mut positions = Vec::with_capacity(count);
    let named = by_id.values().fold(Held::default(), Held::grown_list);
    // The layers of one container at a time: at most all layers, doubled while the list grows.
    let below = items_bytes::<u32>(count.saturating_mul(2));
    meter.note(named.list(&placed).list(&positions).grown(below));
    for entry in order {
        if let Some(first) = said.insert(&entry.name, entry) {
            return Err(contradiction("order", entry, "order", first));
        }
        let below: Vec<u32>;
        let named = match &by_id[entry.name.as_str()] {
            named if !named.is_empty() => named,
            _ => {
                let inside = layers().filter(|(_, layer)| is_below(layer.id, &entry.name));
                below = inside.map(|(position, _)| position).collect();
                &below
            }
        };
        if named.is_empty() {
            let known = layers().flat_map(|(_, layer)| prefixes_of(layer.id));
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

/// The first few containers around `name`, outermost first, and `name` itself.
fn prefixes_of(name: &str) -> impl Iterator<Item = &str> {
    let component = name_parts::body_start(name);
    let first = (component > 0).then(|| &name[..component.saturating_sub(1)]);
    first.into_iter().chain(name_parts::components(name, component).take(6).map(|(_, end)| &name[..end]))
}

fn unknown<'a>(
    entry: &Entry,
    key: String,
    expected: &'static str,
    known: impl Iterator<Item = &'a str>,
) -> LayersError {
    LayersError::MapUnknownName {
        position: entry.position,
        key,
        name: entry.name.clone(),
        expected,
        nearest: nearest(&entry.name, known),
    }
}

/// Up to three known names with the smallest distance to `name`.
fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Vec<String> {
    /// More candidates or longer names do not help a person, and cost time.
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
