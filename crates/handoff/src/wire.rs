//! Encodes a [`Message`] as protobuf, and decodes one from untrusted bytes.

use kvlane_fabric::{MESSAGE_BYTES_MAX, WindowDescriptor};
use prost::Message as _;

use crate::message::{
    BLOCKS_MAX, BadMessage, ENDPOINT_BYTES_MAX, HASHES_MAX, HandoffId, Message, Offer, Queued, RANKS_MAX,
    Reason, VERSION, Want,
};

impl Message {
    /// At most [`MESSAGE_BYTES_MAX`] bytes if all lists are within their bounds, but for a Want with long descriptors of very
    /// many ranks: see `Message::fits`.
    pub fn encode(&self) -> Vec<u8> {
        let body = Envelope::from(self.clone()).encode_to_vec();
        let mut bytes = Vec::with_capacity(1 + body.len());
        bytes.push(VERSION);
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Whether the receiver can decode it.
    pub(crate) fn fits(&self) -> bool {
        Message::decode(&self.encode()).as_ref() == Ok(self)
    }

    /// Decodes bytes of any origin. Refuses fields and lists beyond their bounds.
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
            Kind::Want(want) => {
                has_blocks(want.first_block, want.end_block)?;
                Message::Want(Want {
                    id: id(&want.id)?,
                    content: sixteen(&want.content)?,
                    shape: sixteen(&want.shape)?,
                    first_block: want.first_block,
                    end_block: want.end_block,
                    scheduler: endpoint(want.scheduler)?,
                    ranks: endpoints(want.ranks)?,
                })
            }
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
            Kind::Serve(serve) => {
                has_blocks(serve.first_block, serve.end_block)?;
                Message::Serve {
                    id: id(&serve.id)?,
                    first_block: serve.first_block,
                    end_block: serve.end_block,
                    reader: endpoint(serve.reader)?,
                }
            }
            Kind::Close(bytes) => Message::Close(id(&bytes)?),
            Kind::Closed(bytes) => Message::Closed(id(&bytes)?),
            Kind::Room(room) => {
                bounded("list of blocks", room.blocks.len(), BLOCKS_MAX)?;
                // A Room without blocks only names the source.
                if !room.blocks.is_empty() {
                    has_blocks(room.first_block, room.first_block.saturating_add(room.blocks.len() as u32))?;
                }
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

/// Refuses an offer without blocks or regions, or whose ends exceed `u32`.
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

fn has_blocks(first_block: u32, end_block: u32) -> Result<(), BadMessage> {
    if first_block < end_block { Ok(()) } else { Err(BadMessage::Malformed) }
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
mod tests {
    use kvlane_fabric::MemoryKind;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn endpoint() -> impl Strategy<Value = Vec<u8>> {
        vec(any::<u8>(), 0..100)
    }

    fn an_id() -> impl Strategy<Value = HandoffId> {
        any::<[u8; 16]>().prop_map(HandoffId)
    }

    /// A first block, and the one after the last.
    fn blocks() -> impl Strategy<Value = (u32, u32)> {
        (0..u32::MAX, 1..=u32::MAX).prop_map(|(first, count)| (first, first.saturating_add(count)))
    }

    fn want() -> impl Strategy<Value = Message> {
        let digests = any::<([u8; 16], [u8; 16])>();
        (an_id(), digests, blocks(), endpoint(), vec(endpoint(), 0..8)).prop_map(
            |(id, (content, shape), (first_block, end_block), scheduler, ranks)| {
                Message::Want(Want { id, content, shape, first_block, end_block, scheduler, ranks })
            },
        )
    }

    fn an_offer() -> impl Strategy<Value = Message> {
        let window = (0..1u32 << 16, any::<u32>(), any::<u64>(), any::<bool>());
        let window = window.prop_map(|(number, generation, len, is_host)| {
            let kind = if is_host { MemoryKind::Host } else { MemoryKind::Cuda };
            WindowDescriptor { number, generation, len, kind }
        });
        let part = (0..=u32::MAX - BLOCKS_MAX as u32, 1..=BLOCKS_MAX as u32, 0..1000u32, 1..1000u32);
        (an_id(), part, any::<bool>(), window, any::<Option<[u8; 16]>>()).prop_map(
            |(id, (first_block, blocks, first_region, regions), is_by_block, window, hash)| {
                let offer =
                    Offer { id, first_block, blocks, first_region, regions, is_by_block, window, hash };
                Message::Offer(offer)
            },
        )
    }

    fn room() -> impl Strategy<Value = Message> {
        (an_id(), endpoint(), 0..u32::MAX - 100, vec(any::<u32>(), 0..100))
            .prop_map(|(id, source, first_block, blocks)| Message::Room { id, source, first_block, blocks })
    }

    /// A message of any kind.
    fn message() -> impl Strategy<Value = Message> {
        let queued = (an_id(), any::<u32>(), any::<u64>(), vec(endpoint(), 0..8))
            .prop_map(|(id, ahead, computed, ranks)| Message::Queued(Queued { id, ahead, computed, ranks }));
        let refused = (an_id(), 0..Reason::ALL.len())
            .prop_map(|(id, reason)| Message::Refused(id, Reason::ALL[reason]));
        let adopt = (any::<u32>(), any::<[u8; 16]>(), endpoint())
            .prop_map(|(rank, key, scheduler)| Message::Adopt { rank, key, scheduler });
        let serve = (an_id(), blocks(), endpoint()).prop_map(|(id, (first_block, end_block), reader)| {
            Message::Serve { id, first_block, end_block, reader }
        });
        let hashes = vec(any::<(u32, [u8; 16])>(), 0..50);
        let arrived = (an_id(), any::<u32>(), hashes).prop_map(|(id, end_block, hashes)| Message::Arrived {
            id,
            end_block,
            hashes,
        });
        let plain: [fn(HandoffId) -> Message; 7] = [
            Message::Landed,
            Message::Cancel,
            Message::Close,
            Message::Closed,
            Message::Stop,
            Message::Stopped,
            Message::Lost,
        ];
        let plain = (an_id(), 0..plain.len()).prop_map(move |(id, which)| plain[which](id));
        prop_oneof![want(), queued, refused, an_offer(), adopt, serve, room(), arrived, plain]
    }

    proptest! {
        #[test]
        fn what_is_said_is_understood_and_a_part_of_it_is_nothing(message in message(), part in any::<prop::sample::Index>()) {
            let bytes = message.encode();
            prop_assert_eq!(Message::decode(&bytes), Ok(message.clone()));
            let part = Message::decode(&bytes[..part.index(bytes.len())]);
            // If the cut removes the end of a list, the rest decodes, but as another message.
            prop_assert_ne!(part, Ok(message));
        }

        #[test]
        fn any_bytes_are_refused_or_a_message_that_means_the_same_when_it_is_said_again(
            bytes in vec(any::<u8>(), 0..200),
            message in message(),
            changed in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let mut near = message.encode();
            for (at, byte) in changed {
                let at = at.index(near.len());
                near[at] = byte;
            }
            let mut framed = vec![VERSION];
            framed.extend(&bytes);
            for bytes in [bytes, framed, near] {
                if let Ok(message) = Message::decode(&bytes) {
                    prop_assert_eq!(Message::decode(&message.encode()), Ok(message));
                }
            }
        }
    }

    fn decoded(message: &Message) -> Result<(), BadMessage> {
        let bytes = message.encode();
        Message::decode(&bytes).map(|decoded| assert_eq!(decoded, *message))
    }

    const ID: HandoffId = HandoffId([1; 16]);

    #[test]
    fn the_longest_lists_and_descriptors_are_understood_and_longer_ones_refused() {
        let want = |ranks, bytes| {
            let (first_block, end_block, scheduler) = (0, 1, vec![3; bytes]);
            let (content, shape, ranks) = ([1; 16], [2; 16], vec![vec![4; 100]; ranks]);
            Message::Want(Want { id: ID, content, shape, first_block, end_block, scheduler, ranks })
        };
        let room = |blocks| {
            let (source, first_block) = (vec![3; ENDPOINT_BYTES_MAX], 0);
            Message::Room { id: ID, source, first_block, blocks: vec![u32::MAX; blocks] }
        };
        let arrived = |hashes| {
            let hashes = vec![(u32::MAX, [1; 16]); hashes];
            Message::Arrived { id: ID, end_block: u32::MAX, hashes }
        };
        for (longest, longer, what) in [
            (want(RANKS_MAX, 0), want(RANKS_MAX + 1, 0), "list of ranks"),
            (want(1, ENDPOINT_BYTES_MAX), want(1, ENDPOINT_BYTES_MAX + 1), "descriptor"),
            (room(BLOCKS_MAX), room(BLOCKS_MAX + 1), "list of blocks"),
            (arrived(HASHES_MAX), arrived(HASHES_MAX + 1), "list of hashes"),
        ] {
            assert_eq!(decoded(&longest), Ok(()));
            assert_eq!(decoded(&longer), Err(BadMessage::TooLong(what)));
        }
        // Each within its bounds, and all together longer than a message of the fabric.
        let (scheduler, ranks) = (Vec::new(), vec![vec![4; ENDPOINT_BYTES_MAX]; RANKS_MAX]);
        let (content, shape, first_block, end_block) = ([1; 16], [2; 16], 0, 1);
        let want = Message::Want(Want { id: ID, content, shape, first_block, end_block, scheduler, ranks });
        assert_eq!(Message::decode(&want.encode()), Err(BadMessage::TooLong("body")));
        assert!(!want.fits() && room(BLOCKS_MAX).fits());
    }

    #[test]
    fn an_offer_of_too_many_blocks_or_of_none_is_refused() {
        let offer = |first_block, blocks, regions| {
            let window = WindowDescriptor { number: 1, generation: 0, len: 1, kind: MemoryKind::Host };
            let (first_region, is_by_block, hash) = (0, false, None);
            let offer =
                Offer { id: ID, first_block, blocks, first_region, regions, is_by_block, window, hash };
            decoded(&Message::Offer(offer))
        };
        let most = BLOCKS_MAX as u32;
        assert_eq!(offer(0, most, 1), Ok(()));
        assert_eq!(offer(0, most + 1, 1), Err(BadMessage::TooLong("list of blocks")));
        for (first_block, blocks, regions) in [(0, 0, 1), (0, 1, 0), (u32::MAX, 1, 1)] {
            assert_eq!(offer(first_block, blocks, regions), Err(BadMessage::Malformed));
        }
        assert_eq!(offer(u32::MAX - 1, 1, u32::MAX), Ok(()));
    }

    #[test]
    fn another_version_and_blocks_that_end_before_they_begin_are_refused() {
        assert_eq!(Message::decode(&[]), Err(BadMessage::Malformed));
        assert_eq!(Message::decode(&[VERSION]), Err(BadMessage::Malformed));
        let mut bytes = Message::Stop(ID).encode();
        bytes[0] = VERSION + 1;
        assert_eq!(Message::decode(&bytes), Err(BadMessage::Version(VERSION + 1)));
        let serve =
            |first_block, end_block| Message::Serve { id: ID, first_block, end_block, reader: Vec::new() };
        assert_eq!(decoded(&serve(1, 2)), Ok(()));
        assert_eq!(decoded(&serve(2, 2)), Err(BadMessage::Malformed));
        let room =
            |first_block| Message::Room { id: ID, source: Vec::new(), first_block, blocks: vec![1, 2] };
        assert_eq!(decoded(&room(u32::MAX - 2)), Ok(()));
    }
}
