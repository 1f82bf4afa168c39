//! [`LayoutError`]: why bytes do not decode as a structure.

use thiserror::Error;

/// Why bytes do not decode as a structure of the kind that was expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// The bytes begin another kind of structure, or none.
    #[error("it does not begin with the right name")]
    OtherKind,
    /// The length it claims is impossible.
    #[error("it has an impossible length")]
    Length,
    /// Its checksum is wrong.
    #[error("its checksum is wrong")]
    Checksum,
    /// Fields contradict each other.
    #[error("its fields contradict each other")]
    Fields,
}
