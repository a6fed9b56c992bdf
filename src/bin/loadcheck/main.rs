//! `loadcheck`: measures what loading a model checkpoint costs.
fn main() {}
