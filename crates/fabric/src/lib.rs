//! Moves bytes between registered memory of processes, on one host or several: [`Engine`] is the API.
//!
//! ```text
//!  Engine          the API, the lock and the threads        engine.rs, engine/
//!    Hub           all state under that lock                hub.rs
//!      Transfers   decides what to post on which path       transfers.rs: no I/O, no clock, no threads
//!      Outside     carries it out (a Provider)              hub/outside.rs
//!        Control   one control connection to each peer      control.rs
//!        Carriers  bytes, over sockets or process_vm        carrier.rs, carriers/
//! ```
//! Two invariants hold throughout:
//! - No late write. Memory belongs to a transfer until it is over, on both sides. A transfer whose connection broke is over
//!   only once its peer has confirmed that nothing more is placed (fences.rs), or a lease has expired (lease.rs).
//! - A transfer ends exactly once, and a counter counts it exactly once (immediates.rs), however often it is sent again.
#![deny(unsafe_code)]

mod audit;
mod carrier;
mod carriers;
mod clock;
mod completion;
mod control;
mod descriptor;
mod engine;
mod fences;
mod frames;
#[cfg(any(feature = "fuzzing", test))]
pub mod fuzzing;
mod gpus;
mod greeted;
mod hold_time;
mod hub;
mod identity;
mod immediates;
mod inbox;
mod lease;
mod links;
mod logged_peers;
mod numbered;
mod peers;
mod process;
mod provider;
mod random;
mod ranges;
mod region_news;
mod regions;
mod registrar;
mod runs;
mod served;
mod sessions;
mod shape;
mod shm;
mod silence;
mod status;
mod tcp;
mod transfers;
mod trust;
mod watch;
mod window;
mod wire;

pub use carrier::{
    BadWords, Carrier, CarrierPost, Context, Job, Owner, Party, PostedRun, SessionId, Touched,
    WORDS_BYTES_MAX,
};
pub use carriers::NewCarrier;
pub use carriers::slots::Staged;
pub use descriptor::{
    Access, Address, DESCRIPTOR_BYTES_MAX, Descriptor, DescriptorError, MemoryKind, RegionDescriptor,
};
pub use engine::{
    Engine, EngineOptions, FabricError, Group, GroupHandle, GroupPart, Handle, Receiving, SendOptions,
    Transfer, Transport,
};
pub use hold_time::HoldTime;
pub use immediates::{Arrival, COUNTERS_MAX, Immediates};
pub use inbox::{Admission, EngineId, Inbox, InboxOptions, MESSAGE_BYTES_MAX, Message};
pub use peers::{RemoteBytes, RemoteMemory};
pub use provider::{Event, NotNow, Provider, drive};
pub use registrar::{MemoryRegion, OpenedWindow, RegisterError, Registrar};
pub use runs::{Place, Run};
pub use shape::{Pages, Pieces, RegionLengths, ShapeError, Side};
pub use status::PathStatus;
pub use tcp::{Tls, TlsError};
pub use transfers::{
    Action, Between, CannotSend, Completion, Failure, Full, Memory, Op, Options, PathId, PathSpec, PeerId,
    Post, Priority, Reach, Request, Route, Stretch, Ticket, Token, Transfers, Work,
};
pub use trust::{Mistrust, Secret, Trust};
pub use watch::{Interest, Watch};
pub use window::{NoWindow, WINDOW_DESCRIPTOR_BYTES, WINDOW_RANGES_MAX, WindowDescriptor, WindowRange};
