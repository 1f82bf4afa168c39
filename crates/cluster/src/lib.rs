//! Hits from other hosts: daemons lend each other the blocks of their pools.
//!
//! ```text
//!   a lookup here lacks blocks
//!     source.rs     asks all members at once, for a millisecond or so          Question --> Answer
//!                   the store's plan: who brings which (store/src/shares.rs)
//!     borrowing.rs  borrows, reads, compares checksums                         Borrow --> Lease, READs, Return
//!   the same at the other host
//!     cluster.rs    takes messages, answers questions from the store
//!     lender.rs     opens a window for each loan, and closes it
//!   members.rs      dials the other daemons, and notices their end             Beat
//!
//!   with an index, source.rs asks a replica instead                            Question --> Located
//!     announcer.rs  announces this pool's blocks to each replica               Join, Announce, Count, Part, Leave
//!     replica.rs    a replica: which daemons there are, and who has what       Owners, SnapshotWanted
//!     bench         owners and lookups that measure a replica
//! ```
//! Each daemon is the only authority on its blocks, and all that one says about another is a hint: a wrong one costs a miss.
//! A loan is a window of the fabric, so no pool can be read as a whole, and a late read fails by itself. No daemon writes
//! another's memory.
#![deny(unsafe_code)]

mod announced;
mod announcer;
pub mod bench;
mod borrowing;
mod breaker;
mod cluster;
mod fields;
#[cfg(any(feature = "fuzzing", test))]
pub mod fuzzing;
mod index_messages;
mod lender;
mod members;
mod messages;
mod parked;
mod questions;
mod replica;
#[cfg(test)]
mod simulation;
mod source;

pub use cluster::{Cluster, ClusterError, ClusterOptions, ClusterStatus, Directory, MemberStatus};
pub use kvlane_index::{OwnerStatus, State};
pub use replica::{Replica, ReplicaOptions, ReplicaStatus};
