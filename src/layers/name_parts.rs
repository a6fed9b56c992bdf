//! Parts of tensor names: components, numbered components, suffixes, natural order.
//!
//! Works on slices of a name and allocates nothing.

use std::cmp::Ordering;

/// Start of the dotted part of a name: behind `component/` in a pipeline, else 0.
///
/// Only a first part without a dot is a component, so that a `/` inside a module name changes
/// nothing.
pub(super) fn body_start(name: &str) -> usize {
    match name.bytes().position(|byte| byte == b'.' || byte == b'/') {
        Some(at) if at > 0 && name.as_bytes()[at] == b'/' => at + 1,
        _ => 0,
    }
}

/// True if `component` is an index: ASCII digits only, at least one.
fn is_index(component: &[u8]) -> bool {
    !component.is_empty() && component.iter().all(u8::is_ascii_digit)
}

/// Byte ranges of the numbered components of `name` from byte `start` on, where a component begins.
pub(super) fn numbered(name: &str, start: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
    let mut next = start;
    let components = name.as_bytes()[start..].split(|&byte| byte == b'.');
    components.filter_map(move |component| {
        let start = next;
        next += component.len() + 1;
        is_index(component).then(|| (start, start + component.len()))
    })
}

/// Byte ranges of the components of `name` from byte `start` on.
pub(super) fn components(name: &str, start: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
    let mut next = Some(start);
    std::iter::from_fn(move || {
        let start = next?;
        let end = name[start..].find('.').map_or(name.len(), |length| start + length);
        next = (end < name.len()).then_some(end + 1);
        Some((start, end))
    })
}

/// The text behind the component that ends at byte `end`, without the dot; empty at the end of the
/// name.
pub(super) fn suffix_after(name: &str, end: usize) -> &str {
    name.get(end + 1..).unwrap_or("")
}

/// The suffix without its last component: the module that owns the parameter, "" for a bare
/// parameter.
pub(super) fn module_of(suffix: &str) -> &str {
    suffix.rfind('.').map_or("", |dot| &suffix[..dot])
}

/// A hash (FNV-1a) of `suffix` that ignores the values of indices: `experts.3.w1` and
/// `experts.41.w1` have the same.
///
/// A collision could make the rule miscount, but never lose a tensor.
pub(super) fn indexless_hash(suffix: &str) -> u64 {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    suffix.split('.').fold(0xcbf2_9ce4_8422_2325, |hash, component| {
        // Neither byte occurs in UTF-8, so no component can look like an index or an end.
        let index: &[u8] = b"\xff";
        let bytes = if is_index(component.as_bytes()) { index } else { component.as_bytes() };
        mix(bytes.iter().fold(hash, |hash, &byte| mix(hash, byte)), 0xfe)
    })
}

/// A list's prefix without its separator: `model.layers.` is `model.layers`, `vae/` is `vae`, "" is
/// the root.
pub(super) fn path_of_prefix(prefix: &str) -> &str {
    prefix.strip_suffix(['.', '/']).unwrap_or(prefix)
}

/// Compares two indices by value, then by spelling: `9 < 10`, and `01` differs from `1`. Works on
/// digits, since an index may have a thousand of them.
pub(super) fn compare_indices(left: &[u8], right: &[u8]) -> Ordering {
    let significant = |digits: &[u8]| digits.len() - digits.iter().take_while(|&&byte| byte == b'0').count();
    let (left_length, right_length) = (significant(left), significant(right));
    (left_length.cmp(&right_length))
        .then_with(|| left[left.len() - left_length..].cmp(&right[right.len() - right_length..]))
        .then_with(|| left.len().cmp(&right.len()))
}

/// Compares two texts so that runs of digits count by value: `layer_2 < layer_10`.
pub(super) fn compare_natural(left: &str, right: &str) -> Ordering {
    let (mut left_rest, mut right_rest) = (left.as_bytes(), right.as_bytes());
    loop {
        let (left_run, right_run) = (digit_run(left_rest), digit_run(right_rest));
        let order = if left_run > 0 && right_run > 0 {
            let (left_digits, right_digits) = (&left_rest[..left_run], &right_rest[..right_run]);
            left_rest = &left_rest[left_run..];
            right_rest = &right_rest[right_run..];
            compare_indices(left_digits, right_digits)
        } else {
            match (left_rest.split_first(), right_rest.split_first()) {
                (Some((left_byte, left_tail)), Some((right_byte, right_tail))) => {
                    left_rest = left_tail;
                    right_rest = right_tail;
                    left_byte.cmp(right_byte)
                }
                (left_end, right_end) => return left_end.is_some().cmp(&right_end.is_some()),
            }
        };
        if order != Ordering::Equal {
            return order;
        }
    }
}

fn digit_run(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|byte| byte.is_ascii_digit()).count()
}

/// Length of the common prefix of two texts.
pub(super) fn agreed_len(left: &[u8], right: &[u8]) -> usize {
    let (left_words, _) = left.as_chunks::<8>();
    let (right_words, _) = right.as_chunks::<8>();
    let words = left_words.iter().zip(right_words).take_while(|(left, right)| left == right).count();
    let start = 8 * words;
    let rest = left[start..].iter().zip(&right[start..]);
    start + rest.take_while(|(left, right)| left == right).count()
}

/// Length of the deepest common container of two paths: their common prefix, cut back to whole
/// components, or 0. Equal paths share all their bytes.
pub(super) fn common_container(left: &str, right: &str) -> usize {
    let agreed = agreed_len(left.as_bytes(), right.as_bytes());
    let at_boundary = |text: &str| text.len() == agreed || text.as_bytes()[agreed] == b'.';
    if at_boundary(left) && at_boundary(right) {
        return agreed;
    }
    left.as_bytes()[..agreed].iter().rposition(|&byte| byte == b'.').unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_first_part_without_a_dot_is_a_component() {
        assert_eq!(body_start("vae/encoder.conv_in.weight"), 4);
        assert_eq!(body_start("model.layers.0.a/b.weight"), 0);
        assert_eq!(body_start("/weight"), 0);
        assert_eq!(body_start(""), 0);
    }

    #[test]
    fn indices_are_whole_components_of_ascii_digits() {
        let indices =
            |name| numbered(name, body_start(name)).map(|(start, end)| &name[start..end]).collect::<Vec<_>>();
        assert_eq!(indices("a.0.norm1.12.1b.٣.x"), ["0", "12"]);
        assert_eq!(indices("vae/0.weight"), ["0"]);
        assert_eq!(indices("..0..1."), ["0", "1"]);
        assert_eq!(indices(""), [""; 0]);
    }

    #[test]
    fn natural_order_counts_digits_by_value() {
        let big = "9".repeat(1000);
        assert_eq!(compare_natural("layer_2", "layer_10"), Ordering::Less);
        assert_eq!(compare_natural("a", "a1"), Ordering::Less);
        assert_eq!(compare_natural("a01", "a1"), Ordering::Greater);
        assert_eq!(compare_natural(&big, "10"), Ordering::Greater);
        assert_eq!(compare_indices(b"9", b"10"), Ordering::Less);
        assert_eq!(compare_indices(b"1", b"01"), Ordering::Less);
        assert_eq!(compare_indices(b"0", b"00"), Ordering::Less);
        assert_eq!(compare_indices(b"7", b"7"), Ordering::Equal);
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
    fn containers_end_at_whole_components() {
        assert_eq!(common_container("model.layers", "model.layer_norm"), 5);
        assert_eq!(common_container("model.layers", "model.layers.norm"), 12);
        assert_eq!(common_container("encoder", "encoders"), 0);
        assert_eq!(common_container("a.b", "a.b"), 3);
        assert_eq!(common_container("a.b", "c"), 0);
    }

    #[test]
    fn suffixes_differ_by_words_and_not_by_indices() {
        assert_eq!(indexless_hash("experts.3.w1"), indexless_hash("experts.41.w1"));
        assert_ne!(indexless_hash("experts.3.w1"), indexless_hash("experts.w1"));
        assert_ne!(indexless_hash("a.b"), indexless_hash("ab"));
        assert_eq!(module_of("weight"), "");
        assert_eq!(module_of("mlp.up.weight"), "mlp.up");
        assert_eq!(suffix_after("h.0", 3), "");
        assert_eq!(suffix_after("h.0.ln.weight", 3), "ln.weight");
    }
}
