//! [`Message`] as protobuf.

use kvlane_fabric::{MESSAGE_BYTES_MAX, WindowDescriptor};
use prost::Message as _;

use crate::message::{
    BLOCKS_MAX, BadMessage, ENDPOINT_BYTES_MAX, HASHES_MAX, HandoffId, Message, Offer, Queued, RANKS_MAX,
    Reason, VERSION, Want,
};

impl Message {
    /// As bytes, at most [`MESSAGE_BYTES_MAX`] of them if its lists are within their bounds.
    pub fn encode(&self) -> Vec<u8> {
        let body = Envelope::from(self.clone()).encode_to_vec();
        let mut bytes = Vec::with_capacity(1 + body.len());
        bytes.push(VERSION);
        bytes.extend_from_slice(&body);
        bytes
    }

    /// What bytes of any origin say.
    pub fn decode(bytes: &[u8]) -> Result<Message, BadMessage> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(BadMessage::TooLong("body"));
        }
        let (version, body) = bytes.split_first().ok_or(BadMessage::Malformed)?;
        if *version != VERSION {
            return Err(BadMessage::Version(*version));
        }
        Envelope::decode(body).map_err(|_| BadMessage::Malformed)?.try_into()
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct Envelope {
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15")]
    kind: Option<Kind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Kind {
    #[prost(message, tag = "1")]
    Want(WireWant),
    #[prost(message, tag = "2")]
    Queued(WireQueued),
    #[prost(message, tag = "3")]
    Refused(WireRefused),
    #[prost(bytes, tag = "4")]
    Landed(Vec<u8>),
    #[prost(bytes, tag = "5")]
    Cancel(Vec<u8>),
    #[prost(message, tag = "6")]
    Offer(WireOffer),
    #[prost(message, tag = "7")]
    Adopt(WireAdopt),
    #[prost(message, tag = "8")]
    Serve(WireServe),
    #[prost(bytes, tag = "9")]
    Close(Vec<u8>),
    #[prost(bytes, tag = "10")]
    Closed(Vec<u8>),
    #[prost(message, tag = "11")]
    Room(WireRoom),
    #[prost(bytes, tag = "12")]
    Stop(Vec<u8>),
    #[prost(bytes, tag = "13")]
    Stopped(Vec<u8>),
    #[prost(message, tag = "14")]
    Arrived(WireArrived),
    #[prost(bytes, tag = "15")]
    Lost(Vec<u8>),
}

#[derive(Clone, PartialEq, prost::Message)]
struct WireWant {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    content: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    shape: Vec<u8>,
    #[prost(uint32, tag = "4")]
    first_block: u32,
    #[prost(uint32, tag = "5")]
    end_block: u32,
    #[prost(bytes = "vec", tag = "6")]
    scheduler: Vec<u8>,
    #[prost(bytes = "vec", repeated, tag = "7")]
    ranks: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WireQueued {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
    #[prost(uint32, tag = "2")]
    ahead: u32,
    #[prost(uint64, tag = "3")]
    computed: u64,
    #[prost(bytes = "vec", repeated, tag = "4")]
    ranks: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WireRefused {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
    #[prost(uint32, tag = "2")]
    reason: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WireOffer {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
    #[prost(uint32, tag = "2")]
    first_block: u32,
    #[prost(uint32, tag = "3")]
    blocks: u32,
    #[prost(uint32, tag = "4")]
    first_region: u32,
    #[prost(uint32, tag = "5")]
    regions: u32,
    #[prost(bool, tag = "6")]
    is_by_block: bool,
    #[prost(bytes = "vec", tag = "7")]
    window: Vec<u8>,
    #[prost(bytes = "vec", optional, tag = "8")]
    hash: Option<Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WireAdopt {
    #[prost(uint32, tag = "1")]
    rank: u32,
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    scheduler: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WireServe {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
    #[prost(uint32, tag = "2")]
    first_block: u32,
    #[prost(uint32, tag = "3")]
    end_block: u32,
    #[prost(bytes = "vec", tag = "4")]
    reader: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WireRoom {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    source: Vec<u8>,
    #[prost(uint32, tag = "3")]
    first_block: u32,
    #[prost(uint32, repeated, tag = "4")]
    blocks: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WireArrived {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
    #[prost(uint32, tag = "2")]
    end_block: u32,
    #[prost(uint32, repeated, tag = "3")]
    hashed_blocks: Vec<u32>,
    #[prost(bytes = "vec", repeated, tag = "4")]
    hashes: Vec<Vec<u8>>,
}

impl From<Message> for Envelope {
    fn from(message: Message) -> Envelope {
        let bytes = |id: HandoffId| id.0.to_vec();
        let kind = match message {
            Message::Want(want) => Kind::Want(WireWant {
                id: bytes(want.id),
                content: want.content.to_vec(),
                shape: want.shape.to_vec(),
                first_block: want.first_block,
                end_block: want.end_block,
                scheduler: want.scheduler,
                ranks: want.ranks,
            }),
            Message::Queued(Queued { id, ahead, computed, ranks }) => {
                Kind::Queued(WireQueued { id: bytes(id), ahead, computed, ranks })
            }
            Message::Refused(id, reason) => {
                Kind::Refused(WireRefused { id: bytes(id), reason: reason.number() })
            }
            Message::Landed(id) => Kind::Landed(bytes(id)),
            Message::Cancel(id) => Kind::Cancel(bytes(id)),
            Message::Offer(offer) => Kind::Offer(WireOffer {
                id: bytes(offer.id),
                first_block: offer.first_block,
                blocks: offer.blocks,
                first_region: offer.first_region,
                regions: offer.regions,
                is_by_block: offer.is_by_block,
                window: offer.window.to_bytes().to_vec(),
                hash: offer.hash.map(|hash| hash.to_vec()),
            }),
            Message::Adopt { rank, key, scheduler } => {
                Kind::Adopt(WireAdopt { rank, key: key.to_vec(), scheduler })
            }
            Message::Serve { id, first_block, end_block, reader } => {
                Kind::Serve(WireServe { id: bytes(id), first_block, end_block, reader })
            }
            Message::Close(id) => Kind::Close(bytes(id)),
            Message::Closed(id) => Kind::Closed(bytes(id)),
            Message::Room { id, source, first_block, blocks } => {
                Kind::Room(WireRoom { id: bytes(id), source, first_block, blocks })
            }
            Message::Stop(id) => Kind::Stop(bytes(id)),
            Message::Stopped(id) => Kind::Stopped(bytes(id)),
            Message::Arrived { id, end_block, hashes } => {
                let (hashed_blocks, hashes) =
                    hashes.into_iter().map(|(block, hash)| (block, hash.to_vec())).unzip();
                Kind::Arrived(WireArrived { id: bytes(id), end_block, hashed_blocks, hashes })
            }
            Message::Lost(id) => Kind::Lost(bytes(id)),
        };
        Envelope { kind: Some(kind) }
    }
}

impl TryFrom<Envelope> for Message {
    type Error = BadMessage;

    fn try_from(envelope: Envelope) -> Result<Message, BadMessage> {
        Ok(match envelope.kind.ok_or(BadMessage::Malformed)? {
            Kind::Want(want) => Message::Want(Want {
                id: id(&want.id)?,
                content: sixteen(&want.content)?,
                shape: sixteen(&want.shape)?,
                first_block: want.first_block,
                end_block: want.end_block,
                scheduler: endpoint(want.scheduler)?,
                ranks: endpoints(want.ranks)?,
            }),
            Kind::Queued(queued) => Message::Queued(Queued {
                id: id(&queued.id)?,
                ahead: queued.ahead,
                computed: queued.computed,
                ranks: endpoints(queued.ranks)?,
            }),
            Kind::Refused(refused) => {
                let reason = Reason::ALL.get(refused.reason as usize).ok_or(BadMessage::Malformed)?;
                Message::Refused(id(&refused.id)?, *reason)
            }
            Kind::Landed(bytes) => Message::Landed(id(&bytes)?),
            Kind::Cancel(bytes) => Message::Cancel(id(&bytes)?),
            Kind::Offer(offer) => Message::Offer(self::offer(offer)?),
            Kind::Adopt(adopt) => Message::Adopt {
                rank: adopt.rank,
                key: sixteen(&adopt.key)?,
                scheduler: endpoint(adopt.scheduler)?,
            },
            Kind::Serve(serve) => Message::Serve {
                id: id(&serve.id)?,
                first_block: serve.first_block,
                end_block: serve.end_block,
                reader: endpoint(serve.reader)?,
            },
            Kind::Close(bytes) => Message::Close(id(&bytes)?),
            Kind::Closed(bytes) => Message::Closed(id(&bytes)?),
            Kind::Room(room) => {
                bounded("list of blocks", room.blocks.len(), BLOCKS_MAX)?;
                Message::Room {
                    id: id(&room.id)?,
                    source: endpoint(room.source)?,
                    first_block: room.first_block,
                    blocks: room.blocks,
                }
            }
            Kind::Stop(bytes) => Message::Stop(id(&bytes)?),
            Kind::Stopped(bytes) => Message::Stopped(id(&bytes)?),
            Kind::Arrived(arrived) => {
                bounded("list of hashes", arrived.hashes.len(), HASHES_MAX)?;
                if arrived.hashed_blocks.len() != arrived.hashes.len() {
                    return Err(BadMessage::Malformed);
                }
                let hashes = arrived.hashed_blocks.iter().zip(&arrived.hashes);
                let hashes = hashes.map(|(block, hash)| Ok((*block, sixteen(hash)?)));
                Message::Arrived {
                    id: id(&arrived.id)?,
                    end_block: arrived.end_block,
                    hashes: hashes.collect::<Result<_, BadMessage>>()?,
                }
            }
            Kind::Lost(bytes) => Message::Lost(id(&bytes)?),
        })
    }
}

/// What is offered has blocks and regions, and their ends are numbers.
fn offer(offer: WireOffer) -> Result<Offer, BadMessage> {
    let window = WindowDescriptor::from_bytes(&offer.window).map_err(|_| BadMessage::Malformed)?;
    bounded("list of blocks", offer.blocks as usize, BLOCKS_MAX)?;
    let has_ends = offer.first_block.checked_add(offer.blocks).is_some()
        && offer.first_region.checked_add(offer.regions).is_some();
    if offer.blocks == 0 || offer.regions == 0 || !has_ends {
        return Err(BadMessage::Malformed);
    }
    Ok(Offer {
        id: id(&offer.id)?,
        first_block: offer.first_block,
        blocks: offer.blocks,
        first_region: offer.first_region,
        regions: offer.regions,
        is_by_block: offer.is_by_block,
        window,
        hash: offer.hash.as_deref().map(sixteen).transpose()?,
    })
}

fn id(bytes: &[u8]) -> Result<HandoffId, BadMessage> {
    sixteen(bytes).map(HandoffId)
}

fn sixteen(bytes: &[u8]) -> Result<[u8; 16], BadMessage> {
    bytes.try_into().map_err(|_| BadMessage::Malformed)
}

fn endpoint(bytes: Vec<u8>) -> Result<Vec<u8>, BadMessage> {
    bounded("descriptor", bytes.len(), ENDPOINT_BYTES_MAX)?;
    Ok(bytes)
}

fn endpoints(all: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, BadMessage> {
    bounded("list of ranks", all.len(), RANKS_MAX)?;
    all.into_iter().map(endpoint).collect()
}

fn bounded(what: &'static str, is: usize, most: usize) -> Result<(), BadMessage> {
    if is > most { Err(BadMessage::TooLong(what)) } else { Ok(()) }
}
