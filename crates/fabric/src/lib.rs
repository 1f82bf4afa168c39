//! Moves bytes between processes and hosts.
//!
//! [`Transfers`] decides, without I/O, clock or threads: it tells what to post where, and is told what became of it. An
//! [`Engine`] carries that out, over TCP, and between processes of one host by process_vm.
#![deny(unsafe_code)]

mod completion;
mod descriptor;
mod engine;
mod fences;
#[cfg(any(feature = "fuzzing", test))]
pub mod fuzzing;
mod group;
mod hub;
mod immediates;
mod inbox;
mod lease;
mod numbered;
mod regions;
mod runs;
mod same_host;
mod sessions;
mod shape;
mod shm;
mod tcp;
mod transfers;

pub use descriptor::{
    Access, Address, DESCRIPTOR_BYTES_MAX, Descriptor, DescriptorError, MemoryKind, RegionDescriptor,
};
pub use engine::{Engine, EngineOptions, FabricError, Handle, Receiving, SendOptions, Transfer};
pub use group::{Group, GroupHandle, Part};
pub use hub::{PathStatus, Transport};
pub use immediates::{Arrival, COUNTERS_MAX, Immediates};
pub use inbox::{Admission, EngineId, Inbox, InboxOptions, MESSAGE_BYTES_MAX, Message};
pub use runs::{Place, Run};
pub use shape::{Pages, Pieces, RegionLengths, ShapeError, Side};
pub use tcp::{Tls, TlsError};
pub use transfers::{
    Action, CannotSend, Completion, Failure, Full, Op, Options, PathId, PeerId, Post, Priority, Request,
    Ticket, Token, Transfers, Work,
};
