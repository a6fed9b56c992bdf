//! Byte ranges, alignment and sizes.
//!
//! All arithmetic is checked: an overflow is `None` or a documented panic, never a wrapped number.

use std::fmt;

/// One kibibyte, in bytes.
pub const KIB: u64 = 1 << 10;
/// One mebibyte, in bytes.
pub const MIB: u64 = 1 << 20;
/// One gibibyte, in bytes.
pub const GIB: u64 = 1 << 30;

/// A half-open range of bytes, `start..end`, with `start <= end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteRange {
    start: u64,
    end: u64,
}

impl ByteRange {
    /// The range `start..end`, or `None` if `start > end`.
    #[must_use]
    pub const fn new(start: u64, end: u64) -> Option<Self> {
        if start <= end { Some(Self { start, end }) } else { None }
    }

    /// The range of `len_bytes` bytes from `start`, or `None` if its end does not fit in a `u64`.
    #[must_use]
    pub const fn with_len(start: u64, len_bytes: u64) -> Option<Self> {
        match start.checked_add(len_bytes) {
            Some(end) => Some(Self { start, end }),
            None => None,
        }
    }

    /// First byte.
    #[must_use]
    pub const fn start(self) -> u64 {
        self.start
    }

    /// One past the last byte.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.end
    }

    /// Number of bytes.
    #[must_use]
    pub const fn len_bytes(self) -> u64 {
        self.end - self.start
    }

    /// True if the range holds no byte.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// True if every byte of `other` is in this range.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// The bytes in both ranges, or `None` if there are none.
    #[must_use]
    pub fn intersect(self, other: Self) -> Option<Self> {
        let (start, end) = (self.start.max(other.start), self.end.min(other.end));
        (start < end).then_some(Self { start, end })
    }

    /// The smallest range that contains both.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        Self { start: self.start.min(other.start), end: self.end.max(other.end) }
    }

    /// The smallest range around this one whose ends are multiples of `alignment`, or `None` on
    /// overflow.
    #[must_use]
    pub fn align_outward(self, alignment: Alignment) -> Option<Self> {
        Some(Self { start: alignment.down(self.start), end: alignment.up(self.end)? })
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// A power of two, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Alignment(u64);

impl Alignment {
    /// No alignment at all.
    pub const ONE: Self = Self(1);
    /// A cache line of x86-64 and most 64-bit Arm processors.
    pub const CACHE_LINE: Self = Self(64);
    /// The start of a tensor in a device arena, as CUDA allocators and kernels expect it.
    pub const TENSOR: Self = Self(256);
    /// Reads, unless the file system reports more.
    pub const PAGE: Self = Self(4096);
    /// Rings, and arenas of at least this size: a huge page on x86-64 and the granularity of device
    /// memory.
    pub const HUGE_PAGE: Self = Self(2 * MIB);

    /// `bytes` as an alignment, or `None` if it is not a power of two.
    #[must_use]
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() { Some(Self(bytes)) } else { None }
    }

    /// The alignment in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The largest multiple that is at most `offset`.
    #[must_use]
    pub const fn down(self, offset: u64) -> u64 {
        offset & !(self.0 - 1)
    }

    /// The smallest multiple that is at least `offset`, or `None` if it does not fit in a `u64`.
    #[must_use]
    pub const fn up(self, offset: u64) -> Option<u64> {
        match offset.checked_add(self.0 - 1) {
            Some(sum) => Some(sum & !(self.0 - 1)),
            None => None,
        }
    }

    /// True if `offset` is a multiple.
    #[must_use]
    pub const fn divides(self, offset: u64) -> bool {
        self.down(offset) == offset
    }
}

/// `bytes` as a `usize`, to index slices.
///
/// # Panics
/// If the number does not fit. Lengths of memory in this process always fit.
#[inline]
#[must_use]
pub fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a length of memory in this process fits in usize")
}

/// `len` as a `u64`.
#[inline]
#[must_use]
pub fn to_u64(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits wide on every supported target")
}

/// A byte count for people: `64 MiB`, `1.5 GiB`, `17 B`. Binary units, rounded to nearest; one
/// decimal below 100, none above.
#[derive(Clone, Copy, Debug)]
pub struct HumanBytes(pub u64);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)];
        for (name, unit) in UNITS {
            if self.0 >= unit {
                // Tenths in integers, rounded to nearest: exact, and no float formatting surprises.
                let tenths = (u128::from(self.0) * 10 + u128::from(unit) / 2) / u128::from(unit);
                return if tenths >= 1000 || tenths.is_multiple_of(10) {
                    f.pad(&format!("{} {name}", (tenths + 5 * u128::from(tenths >= 1000)) / 10))
                } else {
                    f.pad(&format!("{}.{} {name}", tenths / 10, tenths % 10))
                };
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_refuse_to_wrap() {
        assert_eq!(ByteRange::new(2, 1), None);
        assert_eq!(ByteRange::with_len(u64::MAX, 1), None);
        assert_eq!(ByteRange::with_len(u64::MAX, 0).map(ByteRange::len_bytes), Some(0));
        assert_eq!(Alignment::PAGE.up(u64::MAX), None);
    }

    #[test]
    fn alignment_goes_outward() {
        let range = ByteRange::new(4097, 8192).unwrap().align_outward(Alignment::PAGE).unwrap();
        assert_eq!((range.start(), range.end()), (4096, 8192));
        assert!(Alignment::PAGE.divides(8192) && !Alignment::PAGE.divides(8191));
    }

    #[test]
    fn intersections_are_never_empty() {
        let (left, right) = (ByteRange::new(0, 4).unwrap(), ByteRange::new(4, 8).unwrap());
        assert_eq!(left.intersect(right), None);
        assert_eq!(left.intersect(ByteRange::new(3, 9).unwrap()), ByteRange::new(3, 4));
    }

    #[test]
    fn sizes_read_well() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (KIB, "1 KiB"),
            (1536, "1.5 KiB"),
            (64 * MIB, "64 MiB"),
            (17 * GIB, "17 GiB"),
        ] {
            assert_eq!(HumanBytes(bytes).to_string(), text);
        }
        assert_eq!(HumanBytes(743 * MIB + MIB / 2).to_string(), "744 MiB");
    }
}
