//! The one binary `kvlane`.
fn main() {}
