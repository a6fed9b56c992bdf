//! The quick check takes a sample where a test goes through every point of a large space; with
//! `ONELAYER_THOROUGH=1`, which `scripts/check --all` sets, nothing is left out.

/// True if every point is to be tried.
#[must_use]
pub fn is_thorough() -> bool {
    std::env::var_os("ONELAYER_THOROUGH").is_some()
}

/// `all` in a thorough check, else `few`: how many cases of a space too large for every check.
#[must_use]
pub fn all_or<T>(all: T, few: T) -> T {
    if is_thorough() { all } else { few }
}

/// The first, the last and every `nth` of a list; all of it in a thorough check.
#[must_use]
pub fn sample<T>(list: Vec<T>, nth: usize) -> Vec<T> {
    if is_thorough() {
        return list;
    }
    let last = list.len().saturating_sub(1);
    let is_taken = |at: usize| at.is_multiple_of(nth) || at == last;
    list.into_iter().enumerate().filter(|(at, _)| is_taken(*at)).map(|(_, point)| point).collect()
}

/// How many points a test must find at least: `count` in a thorough check, and of a sample of every
/// `nth` as much less.
#[must_use]
pub fn at_least(count: usize, nth: usize) -> usize {
    if is_thorough() { count } else { count / nth }
}
