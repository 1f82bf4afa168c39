//! Why something cannot be done.

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
use crate::trust::Mistrust;
use crate::window::PEER_RANGES_MAX;

/// Why something cannot be done.
#[derive(Debug, Error)]
pub enum FabricError {
    /// An address that other hosts reach, without a token.
    #[error(
        "{0} can be reached from other hosts: give a token that only your processes know, or listen on 127.0.0.1"
    )]
    NoToken(SocketAddr),
    /// All addresses, which peers cannot connect to.
    #[error("peers cannot connect to {0}: advertise the addresses at which they reach this host")]
    NoAddressToTell(SocketAddr),
    /// A limit that the protocol does not have, or that would let nothing move.
    #[error("{0}")]
    Limit(String),
    /// A GPU's driver refused.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// Memory of a GPU, which none of the engine's carriers reaches.
    #[error("memory of GPUs cannot go by cma or another carrier of this engine: none reaches it")]
    NoWayToGpus,
    /// [`crate::EngineOptions::transport`] names a carrier that is not in the engine's list.
    #[error("no carrier is called {name}: this engine has {known}")]
    NoSuchCarrier {
        /// The name.
        name: &'static str,
        /// The names that it could be.
        known: String,
    },
    /// Two carriers of one name.
    #[error("two carriers are called {0}")]
    SameCarrier(&'static str),
    /// A file of [`crate::Tls`].
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// What is registered here or at the peer changes all the time.
    #[error(
        "what is registered here or at the peer has changed again and again while the transfer was checked: try again"
    )]
    Changing,
    /// A peer that is known by an address only has to know a secret that this engine has too.
    #[error(
        "without a token and without a runtime folder this engine shares no secret with others: connect by a descriptor"
    )]
    NoSharedSecret,
    /// Of the operating system.
    #[error("the fabric cannot be opened: {0}")]
    Io(#[from] io::Error),
    /// After [`crate::Engine::close`].
    #[error("the engine is closed")]
    Closed,
    /// In a process that was forked from the engine's.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The descriptor names no address that can be reached from here.
    #[error("the peer's descriptor has no address of a kind that is known here")]
    NoAddress,
    /// The descriptor is of an engine that nothing can be proved to.
    #[error(transparent)]
    Mistrust(#[from] Mistrust),
    /// A transfer that does not fit the memory of both sides.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// No such peer, or a descriptor of another process.
    #[error("no such peer: it was removed, or restarted; connect with its new descriptor")]
    NoSuchPeer,
    /// Nobody registered this.
    #[error("region {0} is not registered")]
    NoSuchRegion(u32),
    /// Ranges that are not registered, or of several memories, or none.
    #[error("a window shows ranges of registered memory, all of the host or all of one GPU: {0}")]
    Window(String),
    /// A window that the peer has closed.
    #[error("the peer has closed this window: ask it for another")]
    WindowClosed,
    /// A write to a window.
    #[error("a window can only be read")]
    WindowIsRead,
    /// Nobody opened this.
    #[error("window {0} is not open")]
    NoSuchWindow(u32),
    /// A carrier cannot reach the memory that was to be registered.
    #[error("the memory cannot be registered: {0}")]
    Register(#[from] RegisterError),
    /// As many regions as can be.
    #[error("{0} regions are registered, as many as can be: unregister some")]
    RegionsFull(usize),
    /// A peer may read through as many ranges as it keeps.
    #[error("the windows of this peer have {PEER_RANGES_MAX} ranges, as many as can be: close some")]
    WindowsFull,
    /// A peer that is known by an address only was not reached in time.
    #[error("nobody has answered at {address}: {why}")]
    NotReached {
        /// Where.
        address: SocketAddr,
        /// What was wrong the last time.
        why: String,
    },
    /// Transfers under way use it.
    #[error("region {region} is in use by {transfers} transfers: wait for them or cancel them first")]
    RegionInUse {
        /// The region.
        region: u32,
        /// How many.
        transfers: usize,
    },
    /// As many transfers as can be.
    #[error("{0} transfers are under way, as many as can be: wait for one to be over")]
    Full(usize),
    /// Longer than a message can be.
    #[error("a message of {0} bytes; it can have {MESSAGE_BYTES_MAX}")]
    MessageTooLong(usize),
    /// As many bytes of messages as can be.
    #[error("{0} bytes of messages are under way, as many as can be: wait for some to be over")]
    MessagesFull(usize),
    /// The same peer as two members of a group, by their places in the list.
    #[error("members {0} and {1} of the group are the same peer")]
    SameMember(usize, usize),
    /// Not one part, or counter, for each member.
    #[error("{given} parts for a group of {members} members: each has one, which may be empty")]
    Parts {
        /// How many there are.
        given: usize,
        /// How many there have to be.
        members: usize,
    },
    /// The part of one member cannot be begun, so that none was.
    #[error("member {member} of the group: {why}")]
    Member {
        /// Its place in the group's list.
        member: usize,
        /// What is wrong with it.
        #[source]
        why: Box<FabricError>,
    },
    /// Fewer transfers can begin than a group has members, so that none was.
    #[error("a group of {members} members, and room for {room} transfers: wait for others to be over")]
    NoRoomForAll {
        /// How many would begin.
        members: usize,
        /// How many can.
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
