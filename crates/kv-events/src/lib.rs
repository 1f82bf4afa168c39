//! Decodes the messages that vLLM's engines send to a router: batches of KV events, their sequence numbers, and the pings of
//! P2P NCCL engines. A stranger may have sent the bytes, so everything is bounded. Pure: no I/O, no clock.
#![forbid(unsafe_code)]

mod batch;
mod error;
mod event;
mod fields;
mod limits;
pub mod ping;
mod published;
mod reader;
pub mod sequence;

pub use batch::{Batch, decode_batch};
pub use error::{DecodeError, Wrong};
pub use event::{BlockRemoved, BlockStored, Event, ExternalHash, ExtraKey};
pub use limits::Limits;
pub use published::{FramesError, Published, Replayed, replay_request};
