//! Moves bytes between processes and hosts: the parts that decide.
//!
//! Pure: no I/O, no clock, no threads; time comes in as an argument. [`Transfers`] tells what to post where, and is told
//! what became of it; whoever owns sockets, queue pairs or shared memory carries it out.
#![forbid(unsafe_code)]

mod descriptor;
mod immediates;
mod runs;
mod shape;
mod transfers;

pub use descriptor::{
    Access, Address, DESCRIPTOR_BYTES_MAX, Descriptor, DescriptorError, MemoryKind, RegionDescriptor,
};
pub use immediates::{Arrival, COUNTERS_MAX, Immediates};
pub use runs::{Place, Run};
pub use shape::{Pages, Pieces, RegionLengths, ShapeError, Side};
pub use transfers::{
    Action, Completion, Failure, Full, Op, Options, PathId, PeerId, Post, Priority, Request, Ticket, Token,
    Transfers, Work,
};
