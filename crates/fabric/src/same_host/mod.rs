//! Transfers between two processes of one host, by process_vm (cross-memory attach, "cma").
//!
//! A READ is done by the reader alone. A WRITE is read by the process that it is for: whoever owns memory is the
//! only one that writes it, and knows when nothing does so any more. Beside them goes a TCP connection, which carries
//! what has to be said, and small writes.
//!
//! ```text
//!  reader                                      owner
//!    |  process_vm_readv: bytes, then the card  |    the card says what is registered: else nothing was read
//!
//!  writer                                      owner
//!    |  -- Pull: token, runs, addresses ----->  |    process_vm_readv from the writer's memory
//!    |  <------------- Ack: tokens -----------  |
//! ```

mod card;
mod crew;
mod process;

pub(crate) use card::Card;
pub(crate) use crew::{Crew, Generations};
pub(crate) use process::{Neighbour, PARTS_MAX, Part, PullError};
