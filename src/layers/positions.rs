//! 32-bit positions in flat arrays: conversions, and values sorted into buckets.

use std::ops::Range;

/// Sorts `(bucket, value)` pairs into buckets, keeping their order. Returns the values, and the
/// start of each bucket.
pub(super) fn bucket(count: usize, pairs: impl Iterator<Item = (u32, u32)> + Clone) -> (Vec<u32>, Vec<u32>) {
    // Shifted by one: while values are filled in, `starts[bucket + 1]` is the position of the
    // bucket's next value. In the end it is the start of the next bucket.
    let mut starts = vec![0_u32; count + 2];
    for (bucket, _) in pairs.clone() {
        starts[slot(bucket) + 2] += 1;
    }
    for at in 1..starts.len() {
        starts[at] += starts[at - 1];
    }
    let mut values = vec![0; slot(starts[count + 1])];
    for (bucket, value) in pairs {
        let at = &mut starts[slot(bucket) + 1];
        values[slot(*at)] = value;
        *at += 1;
    }
    starts.truncate(count + 1);
    (values, starts)
}

/// The range of a bucket's values.
pub(super) fn span(starts: &[u32], bucket: usize) -> Range<usize> {
    slot(starts[bucket])..slot(starts[bucket + 1])
}

/// A position in a flat array, as it is stored.
///
/// # Panics
/// If it does not fit in 32 bits. [`Layers::from_names`](super::Layers::from_names) rules that out.
pub(super) fn index32(position: usize) -> u32 {
    u32::try_from(position).expect("positions were checked to fit in 32 bits")
}

/// A stored position as an index.
pub(super) fn slot(position: u32) -> usize {
    usize::try_from(position).expect("a position of an array in this process fits in usize")
}
