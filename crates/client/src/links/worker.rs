//! A worker's side of the wire, without I/O.

pub mod event;
