//! Measures the rates of copies of one shape on this machine.

mod one;
mod pieces;
mod shape;
mod together;

pub use one::{measure_copy, measure_rails};
pub(crate) use shape::options;
pub use shape::{CopyMethod, Path, Shape};
pub use together::measure_together;
