//! Why bytes of a file are refused.

use thiserror::Error;

/// Why bytes are not what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// Another kind of structure, or none.
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
