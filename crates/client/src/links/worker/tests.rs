//! The transitions of a worker's link.
