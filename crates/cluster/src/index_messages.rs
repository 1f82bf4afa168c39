//! The messages between daemons and the replicas of an index. `cluster.proto` is their reference.

use std::net::SocketAddr;
use std::ops::Range;

use kvlane_index::{Changes, Delta, Heartbeat, KeySet, Part};
use kvlane_proto::cluster::{self, envelope::Body};

use crate::fields::{self, BadMessage};

/// Most keys of one message. Even if each is of another space, a message has at most 60 KiB.
pub(crate) const KEYS_MAX: usize = 1024;
/// Most owners of one answer, and of one list.
const OWNERS_MAX: usize = 1024;

/// From a daemon to a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToReplica {
    Join { epoch: u64, address: SocketAddr },
    Announce { epoch: u64, delta: Delta },
    Count { epoch: u64, heartbeat: Heartbeat },
    Part { epoch: u64, part: Part },
    Leave { epoch: u64 },
}

/// From a replica to a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FromReplica {
    /// The daemons that live, and the receiver's epoch that the replica follows.
    Owners {
        epoch: u64,
        addresses: Vec<SocketAddr>,
    },
    SnapshotWanted {
        epoch: u64,
        ticket: u64,
    },
    /// The daemon must join again, with a greater epoch than this.
    Unknown {
        epoch: u64,
        why: String,
    },
    /// The owners of a part of a question, and their runs of positions in it.
    Located {
        number: u64,
        first: u32,
        owners: Vec<(SocketAddr, Vec<Range<u32>>)>,
    },
}

impl ToReplica {
    pub(crate) fn encode(self) -> Body {
        match self {
            Self::Join { epoch, address } => {
                Body::Join(cluster::Join { epoch, address: address.to_string() })
            }
            Self::Announce { epoch, delta: Delta { first, last, changes } } => {
                let changes = changes.iter().map(encode_changes).collect();
                Body::Announce(cluster::Announce { epoch, first, last, changes })
            }
            Self::Count { epoch, heartbeat: Heartbeat { number, keys } } => {
                Body::Count(cluster::Count { epoch, number, blocks: keys.count, digest: keys.digest })
            }
            Self::Part { epoch, part } => Body::Part(cluster::Part {
                epoch,
                ticket: part.ticket,
                number: part.number,
                is_last: part.is_last,
                base: part.base,
                read_at: part.read_at,
                namespace: part.space.namespace.0.to_vec().into(),
                cut: part.space.cut.0.to_vec().into(),
                hashes: fields::hash_bytes(&part.hashes).into(),
            }),
            Self::Leave { epoch } => Body::Leave(cluster::Leave { epoch }),
        }
    }

    pub(crate) fn of_join(cluster::Join { epoch, address }: cluster::Join) -> Result<Self, BadMessage> {
        Ok(Self::Join { epoch, address: fields::address(&address)? })
    }

    pub(crate) fn of_announce(announce: cluster::Announce) -> Result<Self, BadMessage> {
        let cluster::Announce { epoch, first, last, changes } = announce;
        if changes.len() > KEYS_MAX {
            return Err(BadMessage::Invalid("more spaces than one message has"));
        }
        let changes = changes.iter().map(decode_changes).collect::<Result<_, _>>()?;
        Ok(Self::Announce { epoch, delta: Delta { first, last, changes } })
    }

    pub(crate) fn of_count(cluster::Count { epoch, number, blocks, digest }: cluster::Count) -> Self {
        Self::Count { epoch, heartbeat: Heartbeat { number, keys: KeySet { count: blocks, digest } } }
    }

    pub(crate) fn of_part(part: &cluster::Part) -> Result<Self, BadMessage> {
        let space = fields::space(&part.namespace, &part.cut)?;
        let hashes = fields::hashes(&part.hashes, KEYS_MAX)?;
        let &cluster::Part { epoch, ticket, number, is_last, base, read_at, .. } = part;
        Ok(Self::Part { epoch, part: Part { ticket, number, is_last, base, read_at, space, hashes } })
    }
}

fn encode_changes(changes: &Changes) -> cluster::Changes {
    cluster::Changes {
        namespace: changes.space.namespace.0.to_vec().into(),
        cut: changes.space.cut.0.to_vec().into(),
        announced: fields::hash_bytes(&changes.announced).into(),
        withdrawn: fields::hash_bytes(&changes.withdrawn).into(),
    }
}

fn decode_changes(changes: &cluster::Changes) -> Result<Changes, BadMessage> {
    Ok(Changes {
        space: fields::space(&changes.namespace, &changes.cut)?,
        announced: fields::hashes(&changes.announced, KEYS_MAX)?,
        withdrawn: fields::hashes(&changes.withdrawn, KEYS_MAX)?,
    })
}

impl FromReplica {
    pub(crate) fn encode(self) -> Body {
        match self {
            Self::Owners { epoch, addresses } => {
                let addresses = addresses.iter().map(SocketAddr::to_string).collect();
                Body::Owners(cluster::Owners { addresses, epoch })
            }
            Self::SnapshotWanted { epoch, ticket } => {
                Body::SnapshotWanted(cluster::SnapshotWanted { epoch, ticket })
            }
            Self::Unknown { epoch, why } => Body::Unknown(cluster::Unknown { epoch, why }),
            Self::Located { number, first, owners } => {
                let owner = |(address, runs): &(SocketAddr, Vec<Range<u32>>)| cluster::Owner {
                    address: address.to_string(),
                    runs: fields::run_pairs(runs),
                };
                let owners = owners.iter().map(owner).collect();
                Body::Located(cluster::Located { number, first, owners })
            }
        }
    }

    pub(crate) fn of_owners(
        cluster::Owners { addresses, epoch }: cluster::Owners,
    ) -> Result<Self, BadMessage> {
        check_owners(addresses.len())?;
        let addresses = addresses.iter().map(|address| fields::address(address)).collect::<Result<_, _>>()?;
        Ok(Self::Owners { epoch, addresses })
    }

    pub(crate) fn of_unknown(cluster::Unknown { epoch, why }: cluster::Unknown) -> Self {
        Self::Unknown { epoch, why: fields::text(why) }
    }

    pub(crate) fn of_located(located: &cluster::Located) -> Result<Self, BadMessage> {
        check_owners(located.owners.len())?;
        let owner =
            |owner: &cluster::Owner| Ok((fields::address(&owner.address)?, fields::runs(&owner.runs)?));
        let owners = located.owners.iter().map(owner).collect::<Result<_, _>>()?;
        Ok(Self::Located { number: located.number, first: located.first, owners })
    }
}

fn check_owners(owners: usize) -> Result<(), BadMessage> {
    if owners > OWNERS_MAX { Err(BadMessage::Invalid("more owners than an index has")) } else { Ok(()) }
}
