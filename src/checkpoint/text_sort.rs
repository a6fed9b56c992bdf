//! Sorts names. They share long beginnings (`model.layers.`), which a sort by comparison reads
//! again for every pair.
//!
//! Here what all of a group agree on is skipped, then seven bytes at a time tell them apart. Linear
//! in the text where comparing is not, whatever the names are: each byte is read a few times at
//! most.

use std::cmp::Ordering;
use std::ops::Range;

use crate::footprint::items_bytes;

/// Bytes that are looked at together.
const WINDOW_BYTES: usize = 7;

/// The last byte of a window's key where the text goes on behind the window.
const GOES_ON: u8 = 8;

/// How far is looked for what all agree on, at first. From there on by doubling: no more than twice
/// what is found is read, or this.
const FIRST_LOOK_BYTES: usize = 64;

/// So few are compared with each other.
const FEW: usize = 16;

/// So many are sorted at once, so that what is held meanwhile does not grow with a checkpoint of a
/// million names.
const PART: usize = 1 << 16;

/// What sorting found out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sorted<T> {
    /// What it held meanwhile, in bytes.
    pub(super) held_bytes: u64,
    /// The first whose text the next one has, too.
    pub(super) duplicate: Option<T>,
}

/// Sorts `items` by their texts, bytewise. Equal ones stand in any order.
pub(super) fn sort_by_text<'t, T: Copy>(items: &mut [T], text_of: impl Fn(T) -> &'t [u8]) -> Sorted<T> {
    // Names are mostly sorted: the format's own writer does it, for each dtype.
    if items.windows(2).all(|pair| text_of(pair[0]) < text_of(pair[1])) {
        return Sorted { held_bytes: 0, duplicate: None };
    }
    let mut has_equals = false;
    for part in items.chunks_mut(PART) {
        has_equals |= sort_part(part, &text_of);
    }
    // The keys, and the groups that are still open, in a list that grew.
    let part = items.len().min(PART);
    let mut held_bytes = items_bytes::<(u64, T)>(part) + items_bytes::<Group>((3 * part / FEW).max(1));
    if items.len() > PART {
        // It finds the sorted parts and merges them.
        items.sort_by(|&left, &right| noting_equals(text_of(left), text_of(right), &mut has_equals));
        held_bytes = held_bytes.max(items_bytes::<T>(items.len()));
    }
    let mut pairs = items.windows(2).filter(|_| has_equals);
    let duplicate = pairs.find(|pair| text_of(pair[0]) == text_of(pair[1])).map(|pair| pair[0]);
    Sorted { held_bytes, duplicate }
}

/// Compares two texts while they are sorted. No sort can know that of two equal neighbours neither
/// comes first unless it has compared some equal ones, so that if there are any, it is noted.
fn noting_equals(left: &[u8], right: &[u8], has_equals: &mut bool) -> Ordering {
    let order = left.cmp(right);
    *has_equals |= order.is_eq();
    order
}

/// Items that agree so far, and how far.
type Group = (Range<usize>, usize);

/// Sorts; true if two are equal, and perhaps if one was compared with itself.
fn sort_part<'t, T: Copy>(items: &mut [T], text_of: impl Fn(T) -> &'t [u8]) -> bool {
    let mut has_equals = false;
    let mut keyed: Vec<(u64, T)> = items.iter().map(|&item| (0, item)).collect();
    let mut open: Vec<Group> = vec![(0..keyed.len(), 0)];
    while let Some((range, agreed)) = open.pop() {
        let mut end = range.start;
        let alike = &mut keyed[range];
        let rest = |item: T| &text_of(item)[agreed..];
        let shared = all_agree_len(alike.iter().map(|&(_, item)| rest(item)));
        for (key, item) in alike.iter_mut() {
            *key = window_key(&rest(*item)[shared..]);
        }
        alike.sort_unstable_by_key(|&(key, _)| key);
        for group in alike.chunk_by_mut(|(left, _), (right, _)| left == right) {
            let start = end;
            end += group.len();
            let agreed = agreed + shared + WINDOW_BYTES;
            if group.len() == 1 {
                continue;
            }
            if !goes_on(group[0].0) {
                has_equals = true;
            } else if group.len() > FEW {
                open.push((start..end, agreed));
            } else {
                let rest = |item: T| &text_of(item)[agreed..];
                group.sort_unstable_by(|&(_, left), &(_, right)| {
                    noting_equals(rest(left), rest(right), &mut has_equals)
                });
            }
        }
    }
    for (item, (_, sorted)) in items.iter_mut().zip(keyed) {
        *item = sorted;
    }
    has_equals
}

/// How many bytes all texts begin with alike. Of one that soon differs, the others are not read to
/// their ends.
fn all_agree_len<'t>(texts: impl Iterator<Item = &'t [u8]> + Clone) -> usize {
    let Some(sample) = texts.clone().next() else { return 0 };
    let (mut agreed, mut look_bytes) = (0, FIRST_LOOK_BYTES);
    loop {
        let looked_at = &sample[agreed..sample.len().min(agreed + look_bytes)];
        let least = texts.clone().map(|text| agreed_len(looked_at, &text[agreed..])).min().unwrap_or(0);
        agreed += least;
        if least < look_bytes {
            return agreed;
        }
        look_bytes *= 2;
    }
}

/// A number that sorts as the first bytes of a text do. Its last byte is the length, as far as the
/// window sees it: a text comes before the same with a zero behind it.
fn window_key(text: &[u8]) -> u64 {
    let mut window = [0; WINDOW_BYTES + 1];
    match text.first_chunk() {
        Some(first) => {
            window = *first;
            window[WINDOW_BYTES] = GOES_ON;
        }
        None => {
            window[..text.len()].copy_from_slice(text);
            window[WINDOW_BYTES] = u8::try_from(text.len()).expect("shorter than the window and one byte");
        }
    }
    u64::from_be_bytes(window)
}

/// How many bytes two texts begin with alike.
pub(crate) fn agreed_len(left: &[u8], right: &[u8]) -> usize {
    let (left_words, _) = left.as_chunks::<8>();
    let (right_words, _) = right.as_chunks::<8>();
    let words = left_words.iter().zip(right_words).take_while(|(left, right)| left == right).count();
    let start = 8 * words;
    let rest = left[start..].iter().zip(&right[start..]);
    start + rest.take_while(|(left, right)| left == right).count()
}

fn goes_on(key: u64) -> bool {
    key.to_be_bytes()[WINDOW_BYTES] == GOES_ON
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The texts in order, each of them once.
    fn sorted<'t>(texts: &[&'t str]) -> Vec<&'t str> {
        let mut items: Vec<_> = (0..texts.len()).collect();
        let found = sort_by_text(&mut items, |item| texts[item].as_bytes());
        let duplicate = items.windows(2).find(|pair| texts[pair[0]] == texts[pair[1]]);
        assert_eq!(found.duplicate, duplicate.map(|pair| pair[0]));
        let in_order = items.iter().map(|&item| texts[item]).collect();
        items.sort_unstable();
        assert!(items.into_iter().eq(0..texts.len()));
        in_order
    }

    fn compared<'t>(texts: &[&'t str]) -> Vec<&'t str> {
        let mut expected = texts.to_vec();
        expected.sort_unstable();
        expected
    }

    #[test]
    fn texts_agree_up_to_the_first_difference() {
        let text = b"model.layers.10.mlp.experts";
        for at in 0..=text.len() {
            let other = |behind: &[u8]| [&text[..at], b"!", behind].concat();
            assert_eq!(agreed_len(text, &text[..at]), at);
            assert_eq!((agreed_len(&other(b""), text), agreed_len(&other(text), text)), (at, at));
        }
    }

    #[test]
    fn ends_and_zeros_are_told_apart() {
        let near: Vec<String> =
            (0..20).flat_map(|len| ["\0", "a", "\u{7f}", "é"].map(|end| "b".repeat(len) + end)).collect();
        let zeros = (0..20).map(|len| "\0".repeat(len));
        let texts: Vec<String> = near.into_iter().chain(zeros).rev().collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        assert_eq!(sorted(&texts), compared(&texts));
    }

    #[test]
    fn many_are_sorted_in_parts() {
        let texts: Vec<String> =
            (0..2 * PART + 7).map(|number| format!("t.{}", number * 7919 % 99_991)).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        assert!(sorted(&texts) == compared(&texts));
    }

    proptest! {
        #[test]
        fn it_sorts_as_comparing_does(
            texts in prop::collection::vec("(model\\.layers\\.){0,3}[01]{0,2}\\.?[\0ab]{0,3}", 0..200),
        ) {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            prop_assert_eq!(sorted(&texts), compared(&texts));
        }
    }
}
