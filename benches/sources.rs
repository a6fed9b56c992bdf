//! later
fn main(){}
