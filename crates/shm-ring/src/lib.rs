//! A ring of bytes in shared memory: one process writes, one reads, and neither calls the kernel.
//!
//! ```text
//!  0        written u64         bytes ever written              the writer's line:
//!  8        reader_sleeps u32   1: wake the reader              it writes here with each message
//!  128      read u64            bytes ever read                 the reader's line:
//!  136      writer_waits u32    1: wake the writer              it writes here with each read
//!  4096     capacity bytes, a power of two: byte n of the stream is at n % capacity
//! ```
//!
//! Positions count on and wrap at 2^64. A flag lies in the line of the side that looks at it each time, so that the look
//! costs nothing while the other side does not sleep. Each side knows its own position by itself and remembers the last
//! one that it saw of the other, which it reads again only where that does not suffice: in steady state a message moves
//! one line of the header, `written`, from one processor to the other.
//!
//! **Trust.** The sides rely on each other for progress, and for nothing else. All that a side takes from the header is
//! the other's position, which can only go on from where it was last seen, and not past where it could be: anything else is
//! [`RingError::Corrupt`], and nothing is touched. What a side does with the ring's bytes is bounded by its own numbers.
//!
//! **Sleep.** A side that finds nothing to do sets its flag, then looks once more. A side that moved its position looks at
//! the other's flag. With a fence between the two steps on both sides, at least one side sees what the other did, and no
//! wakeup is lost. The wake itself travels some other way, such as a byte over a socket.
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
