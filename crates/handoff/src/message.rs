//! What engines and their ranks say to each other. Each is one message of the fabric, which proves who sent it.
//!
//! ```text
//!  D's scheduler                                   P's scheduler
//!    Want: this hand-off, these of its blocks  ------>  pins what it computes of it
//!    <----- Queued: it is known; how far it is; where P's ranks are
//!    <----- Refused: why; Cancel: it is over
//!    Landed, or Cancel  ----------------------------->  windows closed, blocks unpinned
//!
//!  a scheduler                                     its own ranks
//!    Adopt: here I am  ------------------------------>  which answer to nobody else
//!    P: Serve: who reads, which of the blocks ------->  Offers go out
//!    P: Close --------------------------------------->  Closed: nothing is read any more
//!    D: Room: these blocks are for it  -------------->  Arrived: so many are there
//!    D: Stop ---------------------------------------->  Stopped: nothing is written any more
//!
//!  P's rank                                        D's rank of the same number
//!    Offer: these blocks, through this window  ------>  READ
//! ```
//!
//! On the wire: the version, then a protobuf message. Fields that are too long, or lists with too many members, are refused
//! before they are looked at.

use kvlane_fabric::{EngineId, WindowDescriptor};
use thiserror::Error;

/// The first byte of each message.
pub const VERSION: u8 = 1;
/// Most ranks of an engine.
pub const RANKS_MAX: usize = 256;
/// Most blocks that one message names.
pub const BLOCKS_MAX: usize = 8192;
/// Most hashes that one message tells, so that it is no longer than messages of the fabric may be.
pub const HASHES_MAX: usize = 2048;
/// Most bytes of an endpoint.
pub(crate) const ENDPOINT_BYTES_MAX: usize = 4096;

/// A hand-off, named by whoever asks both engines for it: 16 bytes that nobody else draws.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandoffId(pub [u8; 16]);

impl std::fmt::Debug for HandoffId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Where a process's fabric engine can be reached: its descriptor, as bytes.
pub type Endpoint = Vec<u8>;

/// Why an engine does not hand over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The request did not come to it.
    Unknown,
    /// It computes other content: model, weights, adapter or dtype.
    OtherContent,
    /// It is cut otherwise: parallel sizes, tokens a block, or the layout of a rank.
    OtherShape,
    /// It has too many hand-offs under way.
    Full,
    /// The request ended there, or its lease did, or its cache was reset.
    Over,
}

/// What an engine asks another one for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// Which hand-off.
    pub id: HandoffId,
    /// What its tokens mean: model, weights, adapter, dtype.
    pub content: [u8; 16],
    /// How its blocks are cut; the same on both sides.
    pub shape: [u8; 16],
    /// The first block of the prompt that is wanted.
    pub first_block: u32,
    /// The one after the last.
    pub end_block: u32,
    /// Where answers go.
    pub scheduler: Endpoint,
    /// Who reads: by rank.
    pub ranks: Vec<Endpoint>,
}

/// How far a hand-off is at the engine that computes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queued {
    /// Which.
    pub id: HandoffId,
    /// Requests that are before it.
    pub ahead: u32,
    /// Tokens of it that are computed.
    pub computed: u64,
    /// Who offers: by rank. Only in the first answer.
    pub ranks: Vec<Endpoint>,
}

/// Blocks that can be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Of which hand-off.
    pub id: HandoffId,
    /// The first of them, counted from the prompt's start.
    pub first_block: u32,
    /// How many.
    pub blocks: u32,
    /// The first of the rank's regions (layers) that it is about.
    pub first_region: u32,
    /// How many of them.
    pub regions: u32,
    /// Whether the bytes come block after block, each with all its regions; else region after region.
    pub is_by_block: bool,
    /// Through what they are read.
    pub window: WindowDescriptor,
    /// The hash of the last of these blocks, in its first 16 bytes; None for one that is not full.
    pub hash: Option<[u8; 16]>,
}

/// All that is said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// D to P.
    Want(Want),
    /// P to D.
    Queued(Queued),
    /// P to D.
    Refused(HandoffId, Reason),
    /// D to P: all that was wanted is there.
    Landed(HandoffId),
    /// Either way: it is over.
    Cancel(HandoffId),
    /// P's rank to D's.
    Offer(Offer),
    /// A scheduler to its rank: the key that the rank has given to its own scheduler only, and where the answers go.
    Adopt {
        /// The rank's number.
        rank: u32,
        /// Proof that it is its own.
        key: [u8; 16],
        /// The scheduler's.
        scheduler: Endpoint,
    },
    /// P's scheduler to its rank.
    Serve {
        /// Which.
        id: HandoffId,
        /// From there on.
        first_block: u32,
        /// Up to there.
        end_block: u32,
        /// Who reads.
        reader: Endpoint,
    },
    /// P's scheduler to its rank.
    Close(HandoffId),
    /// The answer: no byte is read any more.
    Closed(HandoffId),
    /// D's scheduler to its rank.
    Room {
        /// Which.
        id: HandoffId,
        /// Who offers.
        source: Endpoint,
        /// The first of them, counted from the prompt's start.
        first_block: u32,
        /// Ids of the engine's blocks.
        blocks: Vec<u32>,
    },
    /// D's scheduler to its rank.
    Stop(HandoffId),
    /// The answer: no byte is written any more.
    Stopped(HandoffId),
    /// D's rank to its scheduler.
    Arrived {
        /// Which.
        id: HandoffId,
        /// All blocks before this one, counted from the prompt's start.
        end_block: u32,
        /// Hashes that came with them: the block that each is of, and the hash.
        hashes: Vec<(u32, [u8; 16])>,
    },
    /// A rank to its scheduler: at D what was offered cannot be read any more, at P what is computed cannot be offered.
    Lost(HandoffId),
}

/// Why bytes are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadMessage {
    /// Something else.
    #[error("not a message of a hand-off")]
    Malformed,
    /// Another kvlane's.
    #[error(
        "a hand-off's message of version {0}, this is version {VERSION}: use one version of kvlane on both sides"
    )]
    Version(u8),
    /// A list or a field is longer than any that is sent.
    #[error("a hand-off's message with too long a {0}")]
    TooLong(&'static str),
}

impl Message {
    /// The hand-off that it is about; None for what is about none.
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
        [Reason::Unknown, Reason::OtherContent, Reason::OtherShape, Reason::Full, Reason::Over];

    pub(crate) fn number(self) -> u32 {
        Reason::ALL.iter().position(|reason| *reason == self).unwrap_or(0) as u32
    }

    /// A sentence for people, about the engine that refuses.
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
            Reason::Over => "the request ended there, or that engine's cache was reset",
        }
    }
}

/// Who a descriptor is of; None for bytes that are none.
pub fn whose(endpoint: &[u8]) -> Option<EngineId> {
    kvlane_fabric::Descriptor::from_bytes(endpoint).ok().map(|descriptor| EngineId::from(&descriptor))
}
