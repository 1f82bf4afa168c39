//! What vLLM's engines tell a router, read from bytes that a stranger may have sent: batches of KV events, the numbers that
//! they are published under, and the pings of P2P NCCL engines. Pure: no I/O, no clock.
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
