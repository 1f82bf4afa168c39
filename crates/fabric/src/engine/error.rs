//! [`FabricError`]: the errors of the engine's calls. A transfer that has begun ends with a [`Failure`](crate::Failure)
//! instead.

use std::io;
use std::net::SocketAddr;

use kvlane_gpu::GpuError;
use kvlane_memory::Forked;
use thiserror::Error;

use crate::inbox::MESSAGE_BYTES_MAX;
use crate::regions::WindowRefused;
use crate::registrar::RegisterError;
use crate::shape::ShapeError;
use crate::tcp::TlsError;
use crate::transfers::Route;
use crate::trust::Mistrust;
use crate::window::PEER_RANGES_MAX;

/// Why a call of an engine failed.
#[derive(Debug, Error)]
pub enum FabricError {
    /// The engine would listen on an address that other hosts reach, and has no token.
    #[error(
        "{0} can be reached from other hosts: give a token that only your processes know, or listen on 127.0.0.1"
    )]
    NoToken(SocketAddr),
    /// The engine would listen on an unspecified address, and advertises no other that peers can connect to.
    #[error("peers cannot connect to {0}: advertise the addresses at which they reach this host")]
    NoAddressToTell(SocketAddr),
    /// An option is outside of what the protocol allows, or would let nothing move.
    #[error("{0}")]
    Limit(String),
    /// A GPU's driver refused.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// None of the engine's carriers reaches memory of GPUs.
    #[error("memory of GPUs cannot go by cma or another carrier of this engine: none reaches it")]
    NoWayToGpus,
    /// None of the engine's carriers moves bytes between the two memories of a transfer, because its options require others.
    #[error(
        "no carrier of this engine moves bytes between {0}: leave the transport open, or require another"
    )]
    NoRoute(Route),
    /// [`crate::EngineOptions::transport`] names a carrier that is not in the engine's list.
    #[error("no carrier is called {name}: this engine has {known}")]
    NoSuchCarrier {
        /// The name that the options require.
        name: &'static str,
        /// The names of the engine's carriers, separated by commas.
        known: String,
    },
    /// Two carriers have one name.
    #[error("two carriers are called {0}")]
    SameCarrier(&'static str),
    /// A file of [`crate::Tls`] cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The regions that the transfer uses, here or at the peer, changed during each of several checks.
    #[error(
        "what is registered here or at the peer has changed again and again while the transfer was checked: try again"
    )]
    Changing,
    /// A peer added by its address must share a secret with this engine, which has neither a token nor its user's secret.
    #[error(
        "without a token and without a runtime folder this engine shares no secret with others: connect by a descriptor"
    )]
    NoSharedSecret,
    /// The operating system refused something that the engine needs.
    #[error("the fabric cannot be opened: {0}")]
    Io(#[from] io::Error),
    /// [`crate::Engine::close`] was called.
    #[error("the engine is closed")]
    Closed,
    /// The calling process was forked from the engine's.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The descriptor has no address of a kind that this version knows.
    #[error("the peer's descriptor has no address of a kind that is known here")]
    NoAddress,
    /// This engine and the descriptor's share no secret.
    #[error(transparent)]
    Mistrust(#[from] Mistrust),
    /// The transfer does not fit the memory of both sides.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The peer was removed, or the descriptor is another process's.
    #[error("no such peer: it was removed, or restarted; connect with its new descriptor")]
    NoSuchPeer,
    /// No region with this number is registered, or another thread gives it back already.
    #[error("region {0} is not registered")]
    NoSuchRegion(u32),
    /// A window's ranges are not registered, lie in several memories, are empty, or are too few or too many.
    #[error("a window shows ranges of registered memory, all of the host or all of one GPU: {0}")]
    Window(String),
    /// The peer has closed the window that the transfer names.
    #[error("the peer has closed this window: ask it for another")]
    WindowClosed,
    /// A transfer would write through a window.
    #[error("a window can only be read")]
    WindowIsRead,
    /// No window with this number and generation is open, or another thread closes it already.
    #[error("window {0} is not open")]
    NoSuchWindow(u32),
    /// A carrier failed to register the memory.
    #[error("the memory cannot be registered: {0}")]
    Register(#[from] RegisterError),
    /// All numbers for regions and windows are in use; this many.
    #[error("{0} regions are registered, as many as can be: unregister some")]
    RegionsFull(usize),
    /// The windows of one peer would have more ranges than it keeps.
    #[error("the windows of this peer have {PEER_RANGES_MAX} ranges, as many as can be: close some")]
    WindowsFull,
    /// A peer added by its address has not announced its regions in time.
    #[error("nobody has answered at {address}: {why}")]
    NotReached {
        /// The address that the caller gave.
        address: SocketAddr,
        /// Why the last attempt failed.
        why: String,
    },
    /// Transfers under way use the region.
    #[error("region {region} is in use by {transfers} transfers: wait for them or cancel them first")]
    RegionInUse {
        /// The region's number.
        region: u32,
        /// The transfers that use it.
        transfers: usize,
    },
    /// This many transfers are under way, the limit ([`crate::Options::live_max`]).
    #[error("{0} transfers are under way, as many as can be: wait for one to be over")]
    Full(usize),
    /// The message has this many bytes, more than [`crate::MESSAGE_BYTES_MAX`].
    #[error("a message of {0} bytes; it can have {MESSAGE_BYTES_MAX}")]
    MessageTooLong(usize),
    /// With this message [`crate::Options::message_bytes`] would be exceeded; this many bytes are under way.
    #[error("{0} bytes of messages are under way, as many as can be: wait for some to be over")]
    MessagesFull(usize),
    /// Two members of a group are the same peer; their indices in the list.
    #[error("members {0} and {1} of the group are the same peer")]
    SameMember(usize, usize),
    /// The number of parts, or counters, is not the number of members.
    #[error("{given} parts for a group of {members} members: each has one, which may be empty")]
    Parts {
        /// Parts, or counters, in the call.
        given: usize,
        /// Members of the group.
        members: usize,
    },
    /// One member's part cannot begin, so none has begun.
    #[error("member {member} of the group: {why}")]
    Member {
        /// Index in the group's list.
        member: usize,
        /// Why its part cannot begin.
        #[source]
        why: Box<FabricError>,
    },
    /// Fewer transfers can begin than the group has members, so none has begun.
    #[error("a group of {members} members, and room for {room} transfers: wait for others to be over")]
    NoRoomForAll {
        /// Members of the group.
        members: usize,
        /// Transfers that can begin now.
        room: usize,
    },
}

impl From<WindowRefused> for FabricError {
    fn from(why: WindowRefused) -> FabricError {
        match why {
            WindowRefused::NotInOneMemory => FabricError::Window(why.to_string()),
            WindowRefused::PeerFull => FabricError::WindowsFull,
        }
    }
}
