//! The wire between an engine and the daemon: messages, framing, versions and addresses. And the messages between daemons
//! ([`cluster`]).
//!
//! A connection carries frames both ways: a little-endian `u32` length, then one protobuf message. `proto/kvlane.proto` is the
//! reference of the messages. [`packed`] and [`shard_layout`] decode fields that travel as bytes.
#![forbid(unsafe_code)]

mod address;
mod frame;
pub mod packed;
pub mod shard_layout;
mod version;

pub use address::{Address, AddressError};
pub use frame::{FrameError, FrameReader, MAX_FRAME_BYTES, encode_frame};
pub use prost::Message;
pub use version::{
    Incompatible, WIRE_MAX, WIRE_MIN, WIRE_OF_GROUPS_FLAGS, WIRE_OF_JOURNAL, WIRE_OF_RECORDINGS, negotiate,
};

/// The text of `kvlane.proto`, for the generated reference pages.
pub const PROTO_SOURCE: &str = include_str!("../proto/kvlane.proto");

/// Generated message types.
#[allow(missing_docs, reason = "generated; the comments stand in kvlane.proto")]
#[allow(clippy::all, reason = "generated")]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/kvlane.v1.rs"));
}

/// Generated types of the messages between daemons.
#[allow(missing_docs, reason = "generated; the comments stand in cluster.proto")]
#[allow(clippy::all, reason = "generated")]
pub mod cluster {
    include!(concat!(env!("OUT_DIR"), "/kvlane.cluster.v1.rs"));
}
