//! Reads blocks of another daemon's pool: borrows them, reads them through its window, compares checksums.
//!
//! ```text
//!   a batch of reads --> Borrow --> Lease --> READs of 8 MiB or more, all begun
//!                           '-- nothing lent, or no answer in time: these blocks fail
//!   each READ in turn: over, and within the lease? --> checksums right? --> the block is there
//!   the last one --> Return
//! ```
//! The lease counts from before it was asked for, so that its owner never ends it first. Bytes that come later are thrown
//! away.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use kvlane_fabric::{Engine, Handle, PeerId, Pieces, Place, Run, SendOptions, Transfer, WindowDescriptor};
use kvlane_memory::Arena;
use kvlane_store::BlockRead;
use parking_lot::Mutex;

use crate::members::{Member, MemberNumber};
use crate::messages::{Blocks, Lease, Message, blocks_of_a_loan};

/// Bytes of one READ, if there are as many: its checksums are compared while the next ones run.
const READ_BYTES: u64 = 8 << 20;
/// How much longer than its deadline a loan lasts: its owner must not end it first.
const SPARE: Duration = Duration::from_millis(500);
/// Threads for each member. While one compares checksums, the other borrows.
const THREADS: usize = 2;

/// Blocks to read of one member.
pub(crate) struct Batch {
    pub(crate) blocks: Vec<BlockRead>,
    pub(crate) deadline: Instant,
}

/// Counts for `kvlane status`.
#[derive(Default)]
pub(crate) struct BorrowedCounts {
    /// Blocks and bytes that came, with the right checksums.
    pub(crate) blocks: AtomicU64,
    pub(crate) bytes: AtomicU64,
    /// Blocks that did not come: not lent, too late, or the member was lost.
    pub(crate) failed: AtomicU64,
    /// Blocks that came with wrong bytes.
    pub(crate) damaged: AtomicU64,
}

/// Leases that readers wait for.
#[derive(Default)]
pub(crate) struct AwaitedLeases {
    all: Mutex<HashMap<u64, (MemberNumber, Sender<Lease>)>>,
    last: AtomicU64,
}

impl AwaitedLeases {
    fn wait_for(&self, member: MemberNumber) -> (u64, Receiver<Lease>) {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (sender, receiver) = bounded(1);
        self.all.lock().insert(number, (member, sender));
        (number, receiver)
    }

    /// A lease has come. False: nobody waits for it from this member.
    pub(crate) fn came(&self, member: MemberNumber, number: u64, lease: Lease) -> bool {
        let mut all = self.all.lock();
        let is_its = all.get(&number).is_some_and(|(of, _)| *of == member);
        is_its && all.remove(&number).is_some_and(|(_, sender)| sender.send(lease).is_ok())
    }

    fn give_up(&self, number: u64) {
        self.all.lock().remove(&number);
    }
}

/// Reads from all members, and counts.
pub(crate) struct Borrowing {
    pub(crate) engine: Arc<Engine>,
    pub(crate) arena: Arc<Arena>,
    /// The region that holds the pool.
    pub(crate) pool: u32,
    pub(crate) leases: AwaitedLeases,
    pub(crate) counts: BorrowedCounts,
    /// The queue of each member, made with its first read.
    queues: Mutex<HashMap<MemberNumber, Sender<Batch>>>,
}

/// Consecutive blocks of a window that are being read, each with the checksums that it must have.
struct Reading<'a> {
    blocks: Vec<(BlockRead, &'a [u32])>,
    /// None: the READ has not begun.
    handle: Option<Handle>,
}

impl Borrowing {
    pub(crate) fn new(engine: Arc<Engine>, arena: Arc<Arena>, pool: u32) -> Self {
        let (leases, counts) = (AwaitedLeases::default(), BorrowedCounts::default());
        Self { engine, arena, pool, leases, counts, queues: Mutex::default() }
    }

    /// Reads a batch in the member's own threads. It is bounded by what the store has in flight.
    pub(crate) fn read(self: &Arc<Self>, member: &Arc<Member>, batch: Batch) {
        let mut queues = self.queues.lock();
        let queue = queues.entry(member.number).or_insert_with(|| {
            let (sender, receiver) = unbounded();
            for _ in 0..THREADS {
                let (borrowing, of, batches) = (Arc::clone(self), Arc::clone(member), receiver.clone());
                let run = move || borrowing.run(&of, &batches);
                if let Err(error) = std::thread::Builder::new().name("kvlane-borrow".into()).spawn(run) {
                    // Log: blocks of that daemon are not read, or half as fast. Do: raise the limit of threads
                    // (ulimit -u, pids of the container).
                    tracing::warn!(member = %member.address, %error, "cannot start thread kvlane-borrow");
                }
            }
            sender
        });
        // Without a thread the batch is dropped, and its reads fail.
        drop(queue.send(batch));
    }

    /// Lets the threads of members end that are no more.
    pub(crate) fn keep_only(&self, is_member: impl Fn(MemberNumber) -> bool) {
        self.queues.lock().retain(|number, _| is_member(*number));
    }

    /// Lets the threads end once they are done with what is queued.
    pub(crate) fn stop(&self) {
        self.queues.lock().clear();
    }

    fn run(&self, member: &Member, batches: &Receiver<Batch>) {
        for Batch { blocks, deadline } in batches {
            let mut left = blocks.into_iter().peekable();
            while let Some(first) = left.peek() {
                let (space, shards) = (first.key.space, shard_bytes(first));
                let most = blocks_of_a_loan(shards.len());
                let mut loan = Vec::new();
                while loan.len() < most
                    && let Some(block) =
                        left.next_if(|block| block.key.space == space && shard_bytes(block) == shards)
                {
                    loan.push(block);
                }
                self.borrow(member, loan, shards, deadline);
            }
        }
    }

    /// Borrows and reads blocks of one space.
    fn borrow(&self, member: &Member, blocks: Vec<BlockRead>, shard_bytes: Vec<u64>, deadline: Instant) {
        let Some(peer) = member.peer() else { return self.fail(blocks) };
        let asked = Instant::now();
        let lasts = deadline.saturating_duration_since(asked);
        if lasts.is_zero() {
            return self.fail(blocks);
        }
        let (number, lease) = self.leases.wait_for(member.number);
        let hashes = blocks.iter().map(|block| block.key.hash).collect();
        let request = Message::Borrow {
            number,
            blocks: Blocks { space: blocks[0].key.space, shard_bytes: shard_bytes.clone(), hashes },
            lasts_ms: (lasts + SPARE).as_millis() as u32,
        };
        let options = SendOptions { timeout: lasts, ..SendOptions::default() };
        let sent = self.engine.send(peer, request.encode(), options);
        let lease = sent.ok().and_then(|_| lease.recv_deadline(deadline).ok());
        self.leases.give_up(number);
        if let Some(lease) = lease {
            // Its owner closes the window later than this, because its time began later.
            let until = deadline.min(asked + Duration::from_millis(u64::from(lease.lasts_ms)));
            self.read_lease(member, peer, blocks, &shard_bytes, &lease, until);
        } else {
            self.fail(blocks);
        }
        // It may have been lent although the answer did not come.
        drop(self.engine.send(peer, Message::Return { number }.encode(), SendOptions::default()));
    }

    fn read_lease(
        &self,
        member: &Member,
        peer: PeerId,
        blocks: Vec<BlockRead>,
        shard_bytes: &[u64],
        lease: &Lease,
        until: Instant,
    ) {
        let block_bytes: u64 = shard_bytes.iter().sum();
        let fitting = lease.window.zip(lease.blocks(blocks.len(), shard_bytes.len()));
        let Some((window, crcs)) = fitting else {
            if lease.window.is_some() {
                tracing::debug!(member = %member.address, "a lease that does not fit its request");
            }
            return self.fail(blocks);
        };
        let lent = crcs.iter().flatten().count() as u64;
        if window.len != lent * block_bytes {
            tracing::debug!(member = %member.address, "a window that does not fit its lease");
            return self.fail(blocks);
        }
        let mut reads: Vec<Reading<'_>> = Vec::new();
        let (mut gone, mut offset) = (Vec::new(), 0);
        let mut waiting = Vec::new();
        for (block, crcs) in blocks.into_iter().zip(crcs) {
            match crcs {
                Some(crcs) => waiting.push((block, crcs)),
                None => gone.push(block),
            }
            if waiting.len() as u64 * block_bytes >= READ_BYTES {
                let bytes = waiting.len() as u64 * block_bytes;
                reads.push(self.begin(peer, window, std::mem::take(&mut waiting), offset, until));
                offset += bytes;
            }
        }
        if !waiting.is_empty() {
            reads.push(self.begin(peer, window, waiting, offset, until));
        }
        self.fail(gone);
        for Reading { blocks, handle } in reads {
            let came = handle.and_then(|handle| handle.wait(None)).is_some_and(|outcome| outcome.is_ok());
            let came_in_time = came && Instant::now() <= until;
            for (block, crcs) in blocks {
                if came_in_time {
                    self.finish(member, block, crcs);
                } else {
                    self.fail(vec![block]);
                }
            }
        }
    }

    /// Begins to read consecutive blocks of a window. Until the handle says that it is over, the memory belongs to the fabric.
    fn begin<'a>(
        &self,
        peer: PeerId,
        window: WindowDescriptor,
        blocks: Vec<(BlockRead, &'a [u32])>,
        mut offset: u64,
        until: Instant,
    ) -> Reading<'a> {
        let mut runs = Vec::new();
        for extent in blocks.iter().flat_map(|(block, _)| &block.extents) {
            runs.push(Run {
                local: Place { region: self.pool, offset: extent.offset.0 },
                remote: Place { region: window.number, offset },
                len: extent.bytes,
            });
            offset += extent.bytes;
        }
        let timeout = Some(until.saturating_duration_since(Instant::now()));
        let transfer = Transfer { timeout, ..Transfer::read_through(window, Pieces::Runs(runs)) };
        Reading { blocks, handle: self.engine.begin(peer, transfer).ok() }
    }

    /// A block's bytes are there. They count if they are those that its owner sealed.
    fn finish(&self, member: &Member, block: BlockRead, crcs: &[u32]) {
        let found = block.crcs(&self.arena);
        if found == crcs {
            self.counts.blocks.fetch_add(1, Ordering::Relaxed);
            let bytes = block.extents.iter().map(|extent| extent.bytes).sum();
            self.counts.bytes.fetch_add(bytes, Ordering::Relaxed);
            return block.done.call(Some(found));
        }
        self.counts.damaged.fetch_add(1, Ordering::Relaxed);
        // Log: bytes changed in that daemon's memory, or on the way; the block is a miss and is computed. Do: if it comes
        // again, test that machine's memory and the network.
        tracing::warn!(
            member = %member.address,
            namespace = %block.key.space.namespace,
            hash = %block.key.hash,
            "block of another daemon discarded: its bytes differ from its checksum"
        );
    }

    fn fail(&self, blocks: Vec<BlockRead>) {
        self.counts.failed.fetch_add(blocks.len() as u64, Ordering::Relaxed);
        // Dropped reads have failed.
        drop(blocks);
    }
}

fn shard_bytes(block: &BlockRead) -> Vec<u64> {
    block.extents.iter().map(|extent| extent.bytes).collect()
}
