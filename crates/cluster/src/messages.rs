//! Encodes and checks the messages between daemons. `cluster.proto` is their reference.

use std::ops::Range;

use kvlane_block::{BlockHash, Space};
use kvlane_fabric::{MESSAGE_BYTES_MAX, WindowDescriptor};
use kvlane_proto::Message as _;
use kvlane_proto::cluster::{self, envelope::Body};

use crate::fields::{self, BadMessage, VERSION};
use crate::index_messages::{FromReplica, ToReplica};

/// Most blocks of one message: 48 KiB of hashes.
pub(crate) const BLOCKS_MAX: usize = 3072;
/// Most shards of a block.
const SHARDS_MAX: usize = 1024;
/// Most bytes of a lease's checksums.
const CRCS_BYTES_MAX: usize = MESSAGE_BYTES_MAX - 8192;
/// Blocks of one space, in a prompt's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub(crate) space: Space,
    pub(crate) shard_bytes: Vec<u64>,
    pub(crate) hashes: Vec<BlockHash>,
}

/// A message from one daemon to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    Beat { name: String, software: String },
    Question { number: u64, first: u32, blocks: Blocks, only_prefix: bool },
    Answer { number: u64, first: u32, runs: Vec<Range<u32>> },
    Borrow { number: u64, blocks: Blocks, lasts_ms: u32 },
    Lease { number: u64, lease: Lease },
    Return { number: u64 },
    ToReplica(ToReplica),
    FromReplica(FromReplica),
}

/// The answer to a request to borrow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Lease {
    /// Shows the shards of the lent blocks, in order. None: nothing is lent.
    pub(crate) window: Option<WindowDescriptor>,
    /// A bit for each block, 1 if it is not lent.
    pub(crate) gone: Vec<u8>,
    /// One for each shard of the lent blocks.
    pub(crate) crcs: Vec<u32>,
    pub(crate) lasts_ms: u32,
    /// Why nothing is lent.
    pub(crate) refused: String,
}

/// Most blocks of one request to borrow: the answer has a checksum for each shard.
pub(crate) fn blocks_of_a_loan(shards: usize) -> usize {
    (CRCS_BYTES_MAX / (4 * shards.max(1))).clamp(1, BLOCKS_MAX)
}

impl Message {
    pub(crate) fn encode(self) -> Vec<u8> {
        let body = match self {
            Self::Beat { name, software } => Body::Beat(cluster::Beat { name, software }),
            Self::Question { number, first, blocks, only_prefix } => {
                let blocks = Some(blocks.encode());
                Body::Question(cluster::Question { number, first, blocks, only_prefix })
            }
            Self::Answer { number, first, runs } => {
                Body::Answer(cluster::Answer { number, first, runs: fields::run_pairs(&runs) })
            }
            Self::Borrow { number, blocks, lasts_ms } => {
                Body::Borrow(cluster::Borrow { number, blocks: Some(blocks.encode()), lasts_ms })
            }
            Self::Lease { number, lease } => Body::Lease(lease.encode(number)),
            Self::Return { number } => Body::Returned(cluster::Return { number }),
            Self::ToReplica(message) => message.encode(),
            Self::FromReplica(message) => message.encode(),
        };
        cluster::Envelope { version: VERSION, body: Some(body) }.encode_to_vec()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, BadMessage> {
        let envelope = cluster::Envelope::decode(bytes).map_err(|_| BadMessage::Malformed)?;
        if envelope.version > VERSION {
            return Err(BadMessage::Later(envelope.version));
        }
        Ok(match envelope.body.filter(|_| envelope.version > 0).ok_or(BadMessage::Malformed)? {
            Body::Beat(beat) => {
                Self::Beat { name: fields::text(beat.name), software: fields::text(beat.software) }
            }
            Body::Question(cluster::Question { number, first, blocks, only_prefix }) => {
                Self::Question { number, first, blocks: Blocks::decode(blocks)?, only_prefix }
            }
            Body::Answer(cluster::Answer { number, first, runs }) => {
                Self::Answer { number, first, runs: fields::runs(&runs)? }
            }
            Body::Borrow(cluster::Borrow { number, blocks, lasts_ms }) => {
                let blocks = Blocks::decode(blocks)?;
                if blocks.hashes.len() > blocks_of_a_loan(blocks.shard_bytes.len()) {
                    return Err(BadMessage::Invalid("more blocks than one loan has"));
                }
                Self::Borrow { number, blocks, lasts_ms }
            }
            Body::Lease(lease) => Self::Lease { number: lease.number, lease: Lease::decode(lease)? },
            Body::Returned(cluster::Return { number }) => Self::Return { number },
            Body::Join(join) => Self::ToReplica(ToReplica::of_join(join)?),
            Body::Announce(announce) => Self::ToReplica(ToReplica::of_announce(announce)?),
            Body::Count(count) => Self::ToReplica(ToReplica::of_count(count)),
            Body::Part(part) => Self::ToReplica(ToReplica::of_part(&part)?),
            Body::Leave(cluster::Leave { epoch }) => Self::ToReplica(ToReplica::Leave { epoch }),
            Body::Owners(owners) => Self::FromReplica(FromReplica::of_owners(owners)?),
            Body::SnapshotWanted(cluster::SnapshotWanted { epoch, ticket }) => {
                Self::FromReplica(FromReplica::SnapshotWanted { epoch, ticket })
            }
            Body::Unknown(unknown) => Self::FromReplica(FromReplica::of_unknown(unknown)),
            Body::Located(located) => Self::FromReplica(FromReplica::of_located(&located)?),
        })
    }
}

impl Blocks {
    fn encode(self) -> cluster::Blocks {
        let Self { space, shard_bytes, hashes } = self;
        cluster::Blocks {
            namespace: space.namespace.0.to_vec().into(),
            cut: space.cut.0.to_vec().into(),
            shard_bytes,
            hashes: fields::hash_bytes(&hashes).into(),
        }
    }

    fn decode(blocks: Option<cluster::Blocks>) -> Result<Self, BadMessage> {
        let cluster::Blocks { namespace, cut, shard_bytes, hashes } =
            blocks.ok_or(BadMessage::Invalid("no blocks"))?;
        let space = fields::space(&namespace, &cut)?;
        if shard_bytes.is_empty() || shard_bytes.len() > SHARDS_MAX || shard_bytes.contains(&0) {
            return Err(BadMessage::Invalid("no shards, too many, or empty ones"));
        }
        let hashes = fields::hashes(&hashes, BLOCKS_MAX)?;
        Ok(Self { space, shard_bytes, hashes })
    }
}

impl Lease {
    /// An answer that lends nothing.
    pub(crate) fn refused(why: impl Into<String>) -> Self {
        Self { refused: why.into(), ..Self::default() }
    }

    /// Lends those blocks that have checksums, through a window on their shards in order.
    pub(crate) fn new(window: WindowDescriptor, blocks: &[Option<Vec<u32>>], lasts_ms: u32) -> Self {
        let mut gone = vec![0u8; blocks.len().div_ceil(8)];
        for (at, _) in blocks.iter().enumerate().filter(|(_, block)| block.is_none()) {
            gone[at / 8] |= 1 << (at % 8);
        }
        let crcs = blocks.iter().flatten().flatten().copied().collect();
        Self { window: Some(window), gone, crcs, lasts_ms, refused: String::new() }
    }

    /// The checksums of each of the blocks that were asked for; None for one that is not lent. None in all: the lease does
    /// not fit that many blocks and shards.
    pub(crate) fn blocks(&self, blocks: usize, shards: usize) -> Option<Vec<Option<&[u32]>>> {
        if self.window.is_none() || self.gone.len() != blocks.div_ceil(8) {
            return None;
        }
        let mut crcs = self.crcs.chunks(shards);
        let is_gone = |at: usize| self.gone[at / 8] & 1 << (at % 8) != 0;
        let mut found = Vec::with_capacity(blocks);
        for at in 0..blocks {
            found.push(if is_gone(at) {
                None
            } else {
                Some(crcs.next().filter(|crcs| crcs.len() == shards)?)
            });
        }
        crcs.next().is_none().then_some(found)
    }

    fn encode(self, number: u64) -> cluster::Lease {
        cluster::Lease {
            number,
            window: self.window.map(|window| window.to_bytes().to_vec()).unwrap_or_default().into(),
            gone: self.gone.into(),
            crcs: self.crcs.iter().flat_map(|crc| crc.to_le_bytes()).collect::<Vec<u8>>().into(),
            lasts_ms: self.lasts_ms,
            refused: self.refused,
        }
    }

    fn decode(lease: cluster::Lease) -> Result<Self, BadMessage> {
        let window = match &lease.window[..] {
            [] => None,
            bytes => Some(WindowDescriptor::from_bytes(bytes).map_err(|_| BadMessage::Invalid("no window"))?),
        };
        let (crcs, rest) = lease.crcs.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(BadMessage::Invalid("checksums that are not 4 bytes each"));
        }
        Ok(Self {
            window,
            gone: lease.gone.to_vec(),
            crcs: crcs.iter().map(|crc| u32::from_le_bytes(*crc)).collect(),
            lasts_ms: lease.lasts_ms,
            refused: fields::text(lease.refused),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use kvlane_block::{CutDigest, Namespace};
    use kvlane_fabric::MemoryKind;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::fields::TEXT_MAX;

    fn blocks() -> impl Strategy<Value = Blocks> {
        (any::<[[u8; 16]; 2]>(), vec(1u64..u64::MAX, 1..9), vec(any::<[u8; 16]>(), 0..40)).prop_map(
            |([namespace, cut], shard_bytes, hashes)| Blocks {
                space: Space { namespace: Namespace(namespace), cut: CutDigest(cut) },
                shard_bytes,
                hashes: hashes.into_iter().map(BlockHash).collect(),
            },
        )
    }

    fn message() -> impl Strategy<Value = Message> {
        let runs = vec((0u32..9, 1u32..9), 0..9).prop_map(|steps| {
            let mut end = 0;
            let run = |(gap, len): (u32, u32)| {
                let first = end + gap;
                end = first + len;
                first..end
            };
            steps.into_iter().map(run).collect()
        });
        let number = any::<u64>;
        prop_oneof![
            ("[a-z]{0,20}", "[0-9.]{0,9}").prop_map(|(name, software)| Message::Beat { name, software }),
            (number(), any::<u32>(), blocks(), any::<bool>()).prop_map(
                |(number, first, blocks, only_prefix)| Message::Question {
                    number,
                    first,
                    blocks,
                    only_prefix
                }
            ),
            (number(), any::<u32>(), runs).prop_map(|(number, first, runs)| Message::Answer {
                number,
                first,
                runs
            }),
            (number(), blocks(), any::<u32>()).prop_map(|(number, blocks, lasts_ms)| Message::Borrow {
                number,
                blocks,
                lasts_ms
            }),
            (number(), lease()).prop_map(|(number, (lease, _))| Message::Lease { number, lease }),
            number().prop_map(|number| Message::Return { number }),
        ]
    }

    /// A number of shards, and the checksums of each block that is lent.
    type Lent = (usize, Vec<Option<Vec<u32>>>);

    fn lease() -> impl Strategy<Value = (Lease, Lent)> {
        (1usize..5).prop_flat_map(|shards| {
            let block = proptest::option::of(vec(any::<u32>(), shards));
            (vec(block, 1..40), any::<u32>()).prop_map(move |(blocks, lasts_ms)| {
                let window = WindowDescriptor { number: 7, generation: 3, len: 99, kind: MemoryKind::Host };
                (Lease::new(window, &blocks, lasts_ms), (shards, blocks))
            })
        })
    }

    proptest! {
        #[test]
        fn a_message_is_what_was_sent(message in message()) {
            prop_assert_eq!(Message::decode(&message.clone().encode()), Ok(message));
        }

        #[test]
        fn any_bytes_are_a_message_or_none(bytes in vec(any::<u8>(), 0..200), message in message(), cut in any::<u16>(), flip in any::<u16>()) {
            let _ = Message::decode(&bytes);
            let mut sent = message.encode();
            let at = usize::from(flip) % sent.len();
            sent[at] ^= 1 << (flip % 8);
            sent.truncate(sent.len() - usize::from(cut) % 3);
            if let Ok(Message::Lease { lease, .. }) = Message::decode(&sent) {
                let _ = lease.blocks(20, 2);
            }
        }

        #[test]
        fn a_lease_fits_its_request_only((lease, (shards, blocks)) in lease()) {
            let found = lease.blocks(blocks.len(), shards).unwrap();
            prop_assert_eq!(found.iter().map(|crcs| crcs.map(<[u32]>::to_vec)).collect::<Vec<_>>(), blocks.clone());
            prop_assert_eq!(lease.blocks(blocks.len() + 8, shards), None);
            if blocks.iter().any(Option::is_some) {
                prop_assert_eq!(lease.blocks(blocks.len(), shards + 1), None);
            }
        }
    }

    #[test]
    fn the_longest_messages_fit_the_fabric() {
        let space = Space { namespace: Namespace([1; 16]), cut: CutDigest([2; 16]) };
        for shards in [1, 8, 64, 1024] {
            let blocks = |count| Blocks {
                space,
                shard_bytes: vec![u64::MAX; shards],
                hashes: vec![BlockHash([3; 16]); count],
            };
            let question = Message::Question {
                number: u64::MAX,
                first: u32::MAX,
                blocks: blocks(BLOCKS_MAX),
                only_prefix: true,
            };
            assert!(question.encode().len() <= MESSAGE_BYTES_MAX, "{shards} shards");
            let count = blocks_of_a_loan(shards);
            let window = WindowDescriptor { number: 1, generation: 2, len: 3, kind: MemoryKind::Host };
            let lease = Lease::new(window, &vec![Some(vec![u32::MAX; shards]); count], u32::MAX);
            assert!(Message::Lease { number: u64::MAX, lease }.encode().len() <= MESSAGE_BYTES_MAX);
            let worst: Vec<std::ops::Range<u32>> =
                (0..BLOCKS_MAX as u32 / 2).map(|run| 2 * run..2 * run + 1).collect();
            let answer = Message::Answer { number: u64::MAX, first: u32::MAX, runs: worst };
            assert!(answer.encode().len() <= MESSAGE_BYTES_MAX);
        }
    }

    #[test]
    fn messages_that_make_no_sense_are_refused_with_a_reason() {
        let decode = |body: Body, version| {
            Message::decode(&cluster::Envelope { version, body: Some(body) }.encode_to_vec())
        };
        let returned = || Body::Returned(cluster::Return { number: 1 });
        assert_eq!(decode(returned(), VERSION), Ok(Message::Return { number: 1 }));
        assert_eq!(decode(returned(), 9), Err(BadMessage::Later(9)));
        assert_eq!(decode(returned(), 0), Err(BadMessage::Malformed));
        let blocks = |change: &dyn Fn(&mut cluster::Blocks)| {
            let space = Space { namespace: Namespace([1; 16]), cut: CutDigest([2; 16]) };
            let hashes = vec![BlockHash([3; 16]); 4];
            let mut blocks = Blocks { space, shard_bytes: vec![4096], hashes }.encode();
            change(&mut blocks);
            decode(Body::Borrow(cluster::Borrow { number: 1, blocks: Some(blocks), lasts_ms: 1 }), VERSION)
        };
        assert!(blocks(&|_| ()).is_ok());
        let invalid = |change: &dyn Fn(&mut cluster::Blocks)| {
            assert!(matches!(blocks(change), Err(BadMessage::Invalid(_))));
        };
        invalid(&|blocks| blocks.hashes = vec![0; 17].into());
        invalid(&|blocks| blocks.hashes = vec![0; 16 * (BLOCKS_MAX + 1)].into());
        invalid(&|blocks| blocks.namespace = vec![0; 15].into());
        invalid(&|blocks| blocks.shard_bytes = vec![]);
        invalid(&|blocks| blocks.shard_bytes = vec![1, 0]);
        invalid(&|blocks| blocks.shard_bytes = vec![1; SHARDS_MAX + 1]);
        let runs = |runs: &[u32]| {
            decode(Body::Answer(cluster::Answer { number: 1, first: 0, runs: runs.to_vec() }), VERSION)
        };
        assert!(runs(&[0, 2, 2, 1]).is_ok());
        for bad in [&[0][..], &[0, 0], &[3, 2, 4, 1], &[5, 1, 1, 1], &[u32::MAX, 1]] {
            assert!(matches!(runs(bad), Err(BadMessage::Invalid(_))), "{bad:?}");
        }
        let long = cluster::Beat { name: "ä".repeat(999) + "\n", software: "a\nb".into() };
        let Ok(Message::Beat { name, software }) = decode(Body::Beat(long), VERSION) else {
            panic!("a beat")
        };
        assert_eq!((name.chars().count(), &*software), (TEXT_MAX, "ab"));
    }
}
