//! The messages between schedulers and ranks of two engines. Each is one fabric message, so its sender is authenticated.
//!
//! ```text
//!  D's scheduler                                   P's scheduler
//!    Want: this hand-off, these blocks of it  ------->  P pins the blocks as it computes them
//!    <----- Queued: P has the request; its progress; where P's ranks are
//!    <----- Refused: the reason; Cancel: it is over
//!    Landed, or Cancel  ----------------------------->  P closes windows and unpins blocks
//!
//!  a scheduler                                     its own ranks
//!    Adopt: proves that it is their scheduler  ------>  ranks obey no other engine
//!    P: Serve: the reader, the blocks it wants ------>  Offers go out
//!    P: Close --------------------------------------->  Closed: no READ is in flight any more
//!    D: Room: write into these blocks  -------------->  Arrived: all blocks before this one are written
//!    D: Stop ---------------------------------------->  Stopped: no READ writes any more
//!
//!  P's rank                                        D's rank of the same number
//!    Offer: these blocks, through this window  ------>  READ
//! ```
//!
//! On the wire: one byte of version, then a protobuf message (wire.rs). The decoder checks the lengths of fields and lists
//! before it reads their contents, and refuses what is too long.

use kvlane_fabric::{EngineId, WindowDescriptor};
use thiserror::Error;

/// The first byte of each message.
pub const VERSION: u8 = 1;
/// Most ranks of an engine.
pub const RANKS_MAX: usize = 256;
/// Most blocks in one message.
pub const BLOCKS_MAX: usize = 8192;
/// Most hashes in one message; more would not fit into a fabric message.
pub const HASHES_MAX: usize = 2048;
/// Most bytes of an endpoint.
pub(crate) const ENDPOINT_BYTES_MAX: usize = 4096;

/// Names a hand-off at both engines: 16 bytes, unique, chosen by the client or router that sends both requests.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandoffId(pub [u8; 16]);

impl std::fmt::Debug for HandoffId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Where a process's fabric engine can be reached: its descriptor, as bytes.
pub type Endpoint = Vec<u8>;

/// Why P refuses a [`Want`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// P did not get the request in time.
    Unknown,
    /// P computes other content: model, weights, adapter or dtype.
    OtherContent,
    /// P cuts its cache otherwise: parallel sizes, tokens a block, or the layout of a rank.
    OtherShape,
    /// P has too many hand-offs under way.
    Full,
    /// The request or its lease ended at P, P's cache was reset, or another engine reads this hand-off.
    Ended,
}

/// D asks P for blocks of a prompt; D repeats this to renew its lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// As both engines' requests name it.
    pub id: HandoffId,
    /// Digest of what D's tokens mean: model, weights, adapter, dtype. P compares it with its own.
    pub content: [u8; 16],
    /// Digest of how D cuts blocks. P refuses another one than its own.
    pub shape: [u8; 16],
    /// Place of the first block that D wants.
    pub first_block: u32,
    /// The place behind the last block that D wants.
    pub end_block: u32,
    /// Endpoint of D's scheduler, which gets P's answers.
    pub scheduler: Endpoint,
    /// Endpoints of the ranks that read, in rank order.
    pub ranks: Vec<Endpoint>,
}

/// Progress of the request at P.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queued {
    /// As in the [`Want`].
    pub id: HandoffId,
    /// Requests ahead of this one in P's queue.
    pub ahead: u32,
    /// Tokens of the prompt that P has computed.
    pub computed: u64,
    /// Endpoints of the ranks that offer, in rank order. D reads them in its first `Queued`.
    pub ranks: Vec<Endpoint>,
}

/// Blocks that a rank of D may read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// As in the [`Want`].
    pub id: HandoffId,
    /// Place of the first block offered.
    pub first_block: u32,
    /// Number of blocks, at least 1.
    pub blocks: u32,
    /// First of the rank's regions (layers) that are offered.
    pub first_region: u32,
    /// Number of regions, at least 1.
    pub regions: u32,
    /// Order of the bytes in the window: block after block, each with all regions. Else region after region.
    pub is_by_block: bool,
    /// Through which D reads the bytes.
    pub window: WindowDescriptor,
    /// First 16 bytes of the last block's hash. None if the sender has no hash for it, as for a block that is not full.
    pub hash: Option<[u8; 16]>,
}

/// Any message of a hand-off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// D to P, and repeated to renew the lease.
    Want(Want),
    /// P to D: the answer to a Want, and at intervals after it.
    Queued(Queued),
    /// P to D: the other answer to a Want.
    Refused(HandoffId, Reason),
    /// D to P: every wanted block has arrived.
    Landed(HandoffId),
    /// Either way: the sender ends the hand-off.
    Cancel(HandoffId),
    /// P's rank to D's rank of the same number.
    Offer(Offer),
    /// A scheduler to its rank. The rank obeys this scheduler from now on, and sends its answers there.
    Adopt {
        /// The rank's number.
        rank: u32,
        /// Secret that the rank has given to its own scheduler only.
        key: [u8; 16],
        /// The scheduler's endpoint.
        scheduler: Endpoint,
    },
    /// P's scheduler to its rank: offer these blocks to that reader.
    Serve {
        /// As in the [`Want`].
        id: HandoffId,
        /// Place of the first block to offer.
        first_block: u32,
        /// The place behind the last block to offer.
        end_block: u32,
        /// Endpoint of the rank that reads.
        reader: Endpoint,
    },
    /// P's scheduler to its rank: close all windows.
    Close(HandoffId),
    /// The answer: every window is closed, and no READ is in flight.
    Closed(HandoffId),
    /// D's scheduler to its rank: read into these blocks. The first one may have no blocks: it names the source only.
    Room {
        /// As in the [`Want`].
        id: HandoffId,
        /// Endpoint of the rank that offers.
        source: Endpoint,
        /// Place of the block that goes into the first of `blocks`.
        first_block: u32,
        /// Block ids of D's own cache, for consecutive places.
        blocks: Vec<u32>,
    },
    /// D's scheduler to its rank: begin no READ, and cancel those in flight.
    Stop(HandoffId),
    /// The answer: no READ is in flight, so no byte is written any more.
    Stopped(HandoffId),
    /// D's rank to its scheduler.
    Arrived {
        /// As in the [`Want`].
        id: HandoffId,
        /// All blocks before this place have arrived.
        end_block: u32,
        /// New hashes, each with its block: of blocks that have arrived, or that are offered and wait for room.
        hashes: Vec<(u32, [u8; 16])>,
    },
    /// A rank to its scheduler: at D a READ failed or an offer was bad; at P computed blocks cannot be offered.
    Lost(HandoffId),
}

/// Why bytes are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadMessage {
    /// No protobuf of this protocol, or a field is out of its range.
    #[error("not a message of a hand-off")]
    Malformed,
    /// The sender is another version of kvlane.
    #[error(
        "a hand-off's message of version {0}, this is version {VERSION}: use one version of kvlane on both sides"
    )]
    Version(u8),
    /// A list or field exceeds the bound that every sender keeps.
    #[error("a hand-off's message with too long a {0}")]
    TooLong(&'static str),
}

impl Message {
    /// The hand-off that the message is about; None for Adopt.
    pub fn id(&self) -> Option<HandoffId> {
        match self {
            Message::Want(want) => Some(want.id),
            Message::Queued(queued) => Some(queued.id),
            Message::Offer(offer) => Some(offer.id),
            Message::Adopt { .. } => None,
            Message::Serve { id, .. } | Message::Room { id, .. } | Message::Arrived { id, .. } => Some(*id),
            Message::Refused(id, _)
            | Message::Landed(id)
            | Message::Cancel(id)
            | Message::Close(id)
            | Message::Closed(id)
            | Message::Stop(id)
            | Message::Stopped(id)
            | Message::Lost(id) => Some(*id),
        }
    }
}

impl Reason {
    pub(crate) const ALL: [Reason; 5] =
        [Reason::Unknown, Reason::OtherContent, Reason::OtherShape, Reason::Full, Reason::Ended];

    pub(crate) fn number(self) -> u32 {
        Reason::ALL.iter().position(|reason| *reason == self).unwrap_or(0) as u32
    }

    /// A sentence for D's log, about the engine that refuses.
    pub fn sentence(self) -> &'static str {
        match self {
            Reason::Unknown => "the request did not come to that engine",
            Reason::OtherContent => {
                "that engine computes other content: start both with the same model, weights, adapter, dtype and hash seed"
            }
            Reason::OtherShape => {
                "that engine cuts its cache otherwise: start both with the same parallel sizes, block size and layout"
            }
            Reason::Full => "that engine has too many hand-offs under way",
            Reason::Ended => "the request ended there, or that engine's cache was reset",
        }
    }
}

/// The fabric engine that an endpoint describes; None if the bytes are no descriptor.
pub fn engine_of(endpoint: &[u8]) -> Option<EngineId> {
    kvlane_fabric::Descriptor::from_bytes(endpoint).ok().map(|descriptor| EngineId::from(&descriptor))
}
