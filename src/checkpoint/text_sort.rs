//! Sorts names. They share long beginnings (`model.layers.`), which a sort by comparison reads again for every pair.
//!
//! Here each name is read once: what all of a group agree on is skipped, then seven bytes at a time tell them apart. Linear
//! in the text where comparing is not, whatever the names are.

use crate::footprint::items_bytes;

/// Bytes that are looked at together.
const WINDOW_BYTES: usize = 7;

/// The last byte of a window's key where the text goes on behind the window.
const GOES_ON: u8 = 8;

/// So few are compared with each other.
const FEW: usize = 16;

/// So many are sorted at once, so that what is held meanwhile does not grow with a checkpoint of a million names.
const PART: usize = 1 << 16;

/// Sorts `items` by their texts, bytewise. Equal texts keep their order.
///
/// Returns what it held meanwhile, in bytes.
pub(super) fn sort_by_text<'t, T: Copy>(items: &mut [T], text_of: impl Fn(T) -> &'t [u8]) -> u64 {
    // Names are mostly sorted: the format's own writer does it, for each dtype.
    if items.windows(2).all(|pair| text_of(pair[0]) <= text_of(pair[1])) {
        return 0;
    }
    for part in items.chunks_mut(PART) {
        sort_part(part, &text_of);
    }
    // The keys, and as much again of the sort that keeps the order of what is equal.
    let part_bytes = 2 * items_bytes::<(u64, T)>(items.len().min(PART));
    if items.len() <= PART {
        return part_bytes;
    }
    // It finds the sorted parts and merges them.
    items.sort_by(|&left, &right| text_of(left).cmp(text_of(right)));
    part_bytes.max(items_bytes::<T>(items.len()))
}

fn sort_part<'t, T: Copy>(items: &mut [T], text_of: impl Fn(T) -> &'t [u8]) {
    let mut keyed: Vec<(u64, T)> = items.iter().map(|&item| (0, item)).collect();
    // Items that agree so far, and how far.
    let mut open = vec![(0..keyed.len(), 0)];
    while let Some((range, agreed)) = open.pop() {
        let mut end = range.start;
        let alike = &mut keyed[range];
        let rest = |item: T| &text_of(item)[agreed..];
        if alike.len() <= FEW {
            alike.sort_by(|&(_, left), &(_, right)| rest(left).cmp(rest(right)));
            continue;
        }
        let sample = rest(alike[0].1);
        let shared = alike.iter().map(|&(_, item)| agreed_len(sample, rest(item))).min().unwrap_or(0);
        for (key, item) in alike.iter_mut() {
            *key = window_key(&rest(*item)[shared..]);
        }
        alike.sort_by_key(|&(key, _)| key);
        for group in alike.chunk_by(|(left, _), (right, _)| left == right) {
            let start = end;
            end += group.len();
            if group.len() > 1 && goes_on(group[0].0) {
                open.push((start..end, agreed + shared + WINDOW_BYTES));
            }
        }
    }
    for (item, (_, sorted)) in items.iter_mut().zip(keyed) {
        *item = sorted;
    }
}

/// A number that sorts as the first bytes of a text do. Its last byte is the length, as far as the window sees it: a text
/// comes before the same with a zero behind it.
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

    fn sorted<'t>(texts: &[&'t str]) -> Vec<(&'t str, usize)> {
        let mut items: Vec<_> = (0..texts.len()).collect();
        sort_by_text(&mut items, |item| texts[item].as_bytes());
        items.into_iter().map(|item| (texts[item], item)).collect()
    }

    fn compared<'t>(texts: &[&'t str]) -> Vec<(&'t str, usize)> {
        let mut expected: Vec<_> = texts.iter().copied().zip(0..).collect();
        expected.sort_by_key(|&(text, _)| text);
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
        fn it_sorts_as_a_stable_comparison_does(
            texts in prop::collection::vec("(model\\.layers\\.){0,3}[01]{0,2}\\.?[\0ab]{0,3}", 0..200),
        ) {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            prop_assert_eq!(sorted(&texts), compared(&texts));
        }
    }
}
