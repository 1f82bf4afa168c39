//! State and counters of the store, for metrics and `kvlane status`.

use kvlane_block::{CutDigest, Namespace};
use kvlane_policy::PolicyKind;

use crate::residence::Residence;

/// State and counters of a store. Counters only grow.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoreStats {
    /// Size of the pool.
    pub pool_bytes: u64,
    /// Bytes in extents, as the allocator rounds them.
    pub used_bytes: u64,
    /// Bytes of dead blocks that a lease or a writer still holds. Part of `used_bytes`.
    pub limbo_bytes: u64,
    /// Blocks that lookups find.
    pub blocks: u64,
    /// Visible blocks under at least one lease.
    pub leased_blocks: u64,
    /// Blocks that are claimed and not yet written whole.
    pub claimed_blocks: u64,
    /// Blocks committed and not yet visible.
    pub seal_queue: u64,
    /// Visible blocks that wait for the tier below.
    pub spill_queue: u64,
    /// Leases that were neither released nor freed.
    pub leases: u64,
    /// Blocks that a source brought from another host and that are not own blocks yet, those being fetched included.
    pub copied_blocks: u64,
    /// Pool bytes of those blocks, rounded up to pages.
    pub copied_bytes: u64,
    /// The policy that decides now which blocks are evicted.
    pub policy: PolicyKind,
    /// Totals since the store was made.
    pub counters: Counters,
    /// How long evicted blocks had been in the pool.
    pub residence: Residence,
    /// Bytes of the pool that are free for extents of any size.
    pub unused_bytes: u64,
    /// Free extents that only blocks of their size can take: bytes of each, and how many. At most 32 sizes, those with the
    /// most free bytes.
    pub free_extents: Vec<(u64, u64)>,
}

/// Totals since the store was made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Blocks evicted to make room.
    pub evicted_blocks: u64,
    /// Bytes of the evicted blocks, not rounded up to pages.
    pub evicted_bytes: u64,
    /// Copies among the evicted blocks.
    pub evicted_copies: u64,
    /// Copies that became own blocks because lookups hit them twice.
    pub adopted_copies: u64,
    /// Blocks of engines that became visible.
    pub sealed_blocks: u64,
    /// Bytes of those blocks, not rounded up to pages.
    pub sealed_bytes: u64,
    /// Blocks that the tier below took, or had already.
    pub spilled_blocks: u64,
    /// Blocks that the tier below did not get: they died while they waited, there were too many, or it refused them.
    pub unspilled_blocks: u64,
    /// Blocks that a source brought: the tier below, or another host.
    pub fetched_blocks: u64,
    /// Bytes of those blocks, not rounded up to pages.
    pub fetched_bytes: u64,
    /// Blocks among those that came from another host.
    pub fetched_copies: u64,
    /// Bytes of those.
    pub fetched_copy_bytes: u64,
    /// Fetched blocks that did not come: their source had lost them, or could not bring them in time.
    pub failed_fetches: u64,
    /// Those among them that another host was asked for last.
    pub failed_copies: u64,
    /// Claims answered "present": the block was stored, or the same engine was writing this shard or had written it.
    pub dedup_present: u64,
    /// Claims answered "in flight".
    pub dedup_in_flight: u64,
    /// Claims answered "no room", without those that were not admitted.
    pub no_room: u64,
    /// Claims answered "no room" because the policy found the blocks not worth what they would displace.
    pub not_admitted: u64,
    /// Claims that died: aborted, writer gone, expired.
    pub dead_claims: u64,
    /// Claims among them that expired.
    pub expired_claims: u64,
    /// Commits of a claim that was dead or unknown.
    pub stale_commits: u64,
    /// Blocks whose checksums were compared after they became visible.
    pub scrub_checked: u64,
    /// Blocks dropped because a checksum differed.
    pub scrub_bad: u64,
    /// Leases freed because a heartbeat did not name them in time.
    pub expired_leases: u64,
    /// Leases that ended, expired ones included.
    pub ended_leases: u64,
    /// Blocks that became visible or died, counted from the journal's first read on.
    pub journal_entries: u64,
    /// Reads with a cursor whose next entry was overwritten, or of another journal: the reader must start again.
    pub journal_restarts: u64,
}

/// State and counters of one space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceStats {
    /// Digest of everything that changes what the blocks' bytes mean.
    pub namespace: Namespace,
    /// As the first engine of the space named it; not unique.
    pub name: String,
    /// How the content is cut into shards.
    pub cut: CutDigest,
    /// Shards of a block.
    pub shards: u32,
    /// Blocks that lookups find.
    pub blocks: u64,
    /// Bytes of the visible blocks.
    pub bytes: u64,
    /// Blocks of prompts that lookups covered.
    pub hit_blocks: u64,
    /// Blocks of prompts that lookups did not cover.
    pub missed_blocks: u64,
}
