//! A byte ring in shared memory: one process writes, another reads, and neither calls the kernel.
//!
//! ```text
//!  0        written u64         bytes ever written              the writer's line:
//!  8        reader_sleeps u32   1: wake the reader              it writes here with each message
//!  128      read u64            bytes ever read                 the reader's line:
//!  136      writer_waits u32    1: wake the writer              it writes here with each read
//!  4096     capacity bytes, a power of two: byte n of the stream is at n % capacity
//! ```
//!
//! Positions only increase, and wrap at 2^64. Each side keeps its own position, and a copy of the other's that it
//! refreshes only if the copy does not suffice. So in steady state a message moves one cache line of the header, that
//! of `written`, from one processor to the other. A flag lies in the line of the side that checks it with each message.
//! So the check costs nothing while the other side does not sleep.
//!
//! **Trust.** The sides rely on each other for progress and for nothing else. A side takes only the other's position
//! from the header. That position must not go back, and must not pass the side's own bounds: anything else is
//! [`RingError::Corrupt`], and nothing is touched. Each side bounds its accesses to the ring's bytes by its own
//! numbers.
//!
//! **Sleep.** A side that finds nothing to do sets its flag, then checks the other's position once more. A side that
//! has moved its position checks the other's flag. Each side has a fence between its two steps, so at least one of them
//! sees what the other did, and no wake is lost. The wake itself takes another way, such as a byte over a socket.
#![deny(unsafe_code)]

mod header;
#[cfg_attr(loom, path = "memory_under_loom.rs")]
mod memory;
mod ring;
mod sync;
#[cfg(all(loom, test))]
mod under_loom;

pub use header::HEADER_BYTES;
pub use memory::Memory;
pub use ring::{Reader, RingError, Writer};
