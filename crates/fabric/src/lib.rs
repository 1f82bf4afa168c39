//! Moves bytes between processes and hosts.
//!
//! [`Transfers`] decides, without I/O, clock or threads: it tells what to post where, and is told what became of it. A
//! [`Provider`] carries that out. An [`Engine`] has the one for TCP, and for process_vm between processes of one host.
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
mod provider;
mod regions;
mod runs;
mod same_host;
mod sessions;
mod shape;
mod shm;
mod sockets;
mod staging;
mod tcp;
mod told;
mod transfers;
mod trust;

pub use descriptor::{
    Access, Address, DESCRIPTOR_BYTES_MAX, Descriptor, DescriptorError, MemoryKind, RegionDescriptor,
};
pub use engine::{Engine, EngineOptions, FabricError, Handle, Receiving, SendOptions, Transfer};
pub use group::{Group, GroupHandle, Part};
pub use immediates::{Arrival, COUNTERS_MAX, Immediates};
pub use inbox::{Admission, EngineId, Inbox, InboxOptions, MESSAGE_BYTES_MAX, Message};
pub use provider::{Event, NotNow, Provider, drive};
pub use runs::{Place, Run};
pub use shape::{Pages, Pieces, RegionLengths, ShapeError, Side};
pub use sockets::{PathStatus, Transport};
pub use staging::Staged;
pub use tcp::{Tls, TlsError};
pub use transfers::{
    Action, Between, CannotSend, Completion, Failure, Full, Memory, Op, Options, PathId, PathSpec, PeerId,
    Post, Priority, Reach, Request, Route, Stretch, Ticket, Token, Transfers, Work,
};
pub use trust::{Mistrust, Secret, Trust};
