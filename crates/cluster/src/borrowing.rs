//! Reads blocks of another daemon's pool: borrows them, reads them through its window, compares checksums.
//!
//! ```text
//!   a batch of reads --> Borrow --> Lease --> READs of 8 MiB or more, two at a time
//!                           '-- nothing lent: these blocks fail; no answer in time: all that wait for this member
//!   each READ in turn: over, and within the lease? --> checksums right? --> the block is there
//!   the last one --> Return
//! ```
//! The lease counts from before it was asked for, so that its owner never ends it first. Bytes that come later are thrown
//! away.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use kvlane_fabric::{Engine, Handle, PeerId, Pieces, Place, Run, SendOptions, Transfer, WindowDescriptor};
use kvlane_memory::Arena;
use kvlane_store::BlockRead;
use parking_lot::Mutex;

use crate::members::{Member, MemberNumber};
use crate::messages::{Blocks, Lease, Message, blocks_of_a_loan};
use crate::parked;

/// Bytes of one READ, if there are as many: its checksums are compared while the next ones run.
const READ_BYTES: u64 = 8 << 20;
/// READs of a loan at a time. The fabric gives all READs of a peer turns, so with more of them most end together, and the
/// checksums of all are left for the end.
const READS: usize = 2;
/// Most bytes of one loan, so that two of one member overlap, and an owner can lend to several.
const LOAN_BYTES: u64 = 64 << 20;
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

/// How a loan went, from the best to the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Right,
    Late,
    Damaged,
}

/// The blocks of a request that the member does not answer in time, or cannot get.
struct Unanswered(Vec<BlockRead>);

/// Leases that readers wait for.
#[derive(Default)]
pub(crate) struct AwaitedLeases {
    all: Mutex<HashMap<u64, (MemberNumber, Sender<Lease>)>>,
    last: AtomicU64,
}

impl AwaitedLeases {
    pub(crate) fn wait_for(&self, member: MemberNumber) -> (u64, Receiver<Lease>) {
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

    /// Nothing comes from this member any more.
    pub(crate) fn lost(&self, member: MemberNumber) {
        self.all.lock().retain(|_, (of, _)| *of != member);
    }

    pub(crate) fn give_up(&self, number: u64) {
        self.all.lock().remove(&number);
    }
}

/// Reads from all members, and counts.
pub(crate) struct Borrowing {
    pub(crate) engine: Arc<Engine>,
    pub(crate) arena: Arc<Arena>,
    /// The region that holds the pool.
    pub(crate) pool: u32,
    pub(crate) leases: Arc<AwaitedLeases>,
    pub(crate) counts: BorrowedCounts,
    queues: Mutex<Queues>,
}

/// The queue of each member, made with its first read.
enum Queues {
    Open(HashMap<MemberNumber, Queue>),
    Stopped,
}

struct Queue {
    sender: Sender<Batch>,
    threads: Vec<JoinHandle<()>>,
}

/// Consecutive blocks of a window that are being read, each with the checksums that it must have. Their memory is given back
/// only once the READ is over.
struct Reading<'a> {
    blocks: Vec<(BlockRead, &'a [u32])>,
    /// None: the READ has not begun, or is over.
    handle: Option<Handle>,
}

impl Reading<'_> {
    /// Waits until the READ is over. True: all bytes have come.
    fn wait(&mut self) -> bool {
        let outcome = self.handle.as_mut().map(parked::wait);
        self.handle = None;
        outcome.is_some_and(|outcome| outcome.is_ok())
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        if let Some(handle) = &mut self.handle {
            handle.cancel();
            // Its outcome does not matter, only that nothing writes to the blocks any more.
            let _ = parked::wait(handle);
        }
    }
}

impl Borrowing {
    pub(crate) fn new(engine: Arc<Engine>, arena: Arc<Arena>, pool: u32) -> Self {
        let (leases, counts) = (Arc::default(), BorrowedCounts::default());
        Self { engine, arena, pool, leases, counts, queues: Mutex::new(Queues::Open(HashMap::new())) }
    }

    /// Reads a batch in the member's own threads. It is bounded by what the store has in flight.
    pub(crate) fn read(self: &Arc<Self>, member: &Arc<Member>, batch: Batch) {
        let queue = {
            let mut queues = self.queues.lock();
            match &mut *queues {
                Queues::Stopped => None,
                Queues::Open(queues) => {
                    let queue = queues.entry(member.number).or_insert_with(|| self.start(member));
                    Some(queue.sender.clone())
                }
            }
        };
        let Batch { mut blocks, deadline } = batch;
        while !blocks.is_empty() {
            // A loan each, so that the member's threads take turns.
            let rest = blocks.split_off(blocks_of_bytes(LOAN_BYTES, &blocks));
            let batch = Batch { blocks: std::mem::replace(&mut blocks, rest), deadline };
            // Without the lock: reads that are dropped fail, and then another member may be asked at once.
            drop(queue.as_ref().map(|queue| queue.send(batch)));
        }
    }

    fn start(self: &Arc<Self>, member: &Arc<Member>) -> Queue {
        let (sender, receiver) = unbounded();
        let mut threads = Vec::new();
        for _ in 0..THREADS {
            let (borrowing, of, batches) = (Arc::clone(self), Arc::clone(member), receiver.clone());
            let run = move || borrowing.run(&of, &batches);
            match std::thread::Builder::new().name("kvlane-borrow".into()).spawn(run) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    // Log: blocks of that daemon are not read, or half as fast. Do: raise the limit of threads
                    // (ulimit -u, pids of the container).
                    tracing::warn!(member = %member.address, %error, "cannot start thread kvlane-borrow");
                }
            }
        }
        Queue { sender, threads }
    }

    /// Lets the threads of members end that are no more, and forgets those that have ended.
    pub(crate) fn keep_only(&self, is_member: impl Fn(MemberNumber) -> bool) {
        if let Queues::Open(queues) = &mut *self.queues.lock() {
            queues.retain(|number, queue| {
                is_member(*number) && queue.threads.iter().any(|thread| !thread.is_finished())
            });
        }
    }

    /// Takes no more reads. Returns the threads, which end once they are done with what is queued.
    pub(crate) fn stop(&self) -> Vec<JoinHandle<()>> {
        match std::mem::replace(&mut *self.queues.lock(), Queues::Stopped) {
            Queues::Open(queues) => queues.into_values().flat_map(|queue| queue.threads).collect(),
            Queues::Stopped => Vec::new(),
        }
    }

    fn run(&self, member: &Member, batches: &Receiver<Batch>) {
        while let Ok(Batch { mut blocks, deadline }) = batches.recv() {
            // The store refills its queue in small batches.
            let mut next = None;
            while blocks.iter().map(bytes_of).sum::<u64>() < LOAN_BYTES
                && let Ok(batch) = batches.try_recv()
            {
                if batch.deadline != deadline {
                    next = Some(batch);
                    break;
                }
                blocks.extend(batch.blocks);
            }
            let next = next.map(|Batch { blocks, deadline }| (blocks, deadline));
            for (blocks, deadline) in std::iter::once((blocks, deadline)).chain(next) {
                if !self.run_batch(member, blocks, deadline) {
                    // The others would be waited for in vain, until it is too late for another holder.
                    batches.try_iter().for_each(|batch| self.fail(batch.blocks));
                }
            }
        }
    }

    /// False: the member does not answer, so all of it has failed.
    fn run_batch(&self, member: &Member, blocks: Vec<BlockRead>, deadline: Instant) -> bool {
        let mut left = blocks.into_iter().peekable();
        while let Some(first) = left.peek() {
            let (space, shards) = (first.key.space, shard_bytes(first));
            let block_bytes = shards.iter().sum::<u64>().max(1);
            let most = blocks_of_a_loan(shards.len()).min((LOAN_BYTES / block_bytes).max(1) as usize);
            let mut loan = Vec::new();
            while loan.len() < most
                && let Some(block) =
                    left.next_if(|block| block.key.space == space && shard_bytes(block) == shards)
            {
                loan.push(block);
            }
            // An owner lends as much at a time as it has room for.
            while !loan.is_empty() {
                let before = loan.len();
                match self.borrow(member, loan, &shards, deadline) {
                    Ok(not_lent) => loan = not_lent,
                    Err(Unanswered(not_lent)) => {
                        self.fail(not_lent.into_iter().chain(left).collect());
                        return false;
                    }
                }
                if loan.len() == before {
                    break;
                }
            }
            self.fail(loan);
        }
        true
    }

    /// Borrows and reads blocks of one space. Returns those that were not lent.
    ///
    /// # Errors
    /// [`Unanswered`], with all of them.
    fn borrow(
        &self,
        member: &Member,
        blocks: Vec<BlockRead>,
        shard_bytes: &[u64],
        deadline: Instant,
    ) -> Result<Vec<BlockRead>, Unanswered> {
        let asked = Instant::now();
        let lasts = deadline.saturating_duration_since(asked);
        if lasts.is_zero() {
            return Err(Unanswered(blocks));
        }
        let (number, lease) = self.leases.wait_for(member.number);
        // Only now: if the member is lost from here on, that ends the wait.
        let Some(peer) = member.peer() else {
            self.leases.give_up(number);
            return Err(Unanswered(blocks));
        };
        let hashes = blocks.iter().map(|block| block.key.hash).collect();
        let request = Message::Borrow {
            number,
            blocks: Blocks { space: blocks[0].key.space, shard_bytes: shard_bytes.to_vec(), hashes },
            lasts_ms: (lasts + SPARE).as_millis() as u32,
        };
        let options = SendOptions { timeout: lasts, ..SendOptions::default() };
        let sent = self.engine.send(peer, request.encode(), options);
        // Soon enough that another holder can still be asked.
        let patience = member.state.lock().lease_patience(lasts);
        let lease = sent.ok().and_then(|_| lease.recv_deadline(deadline.min(asked + patience)).ok());
        self.leases.give_up(number);
        let left = if let Some(lease) = lease {
            // Its owner closes the window later than this, because its time began later.
            let until = deadline.min(asked + Duration::from_millis(u64::from(lease.lasts_ms)));
            let bytes = blocks.len() as u64 * shard_bytes.iter().sum::<u64>();
            let now = Instant::now();
            let patience = member.state.lock().read_patience(bytes, until.saturating_duration_since(now));
            let until = until.min(now + patience);
            Ok(self.read_lease(member, peer, blocks, shard_bytes, &lease, until))
        } else {
            note_loan(member, false, 0, Duration::ZERO);
            Err(Unanswered(blocks))
        };
        // The owner may have lent the blocks although its answer did not come.
        drop(self.engine.send(peer, Message::Return { number }.encode(), SendOptions::default()));
        left
    }

    /// Reads the blocks that a lease lends. Returns the others.
    fn read_lease(
        &self,
        member: &Member,
        peer: PeerId,
        blocks: Vec<BlockRead>,
        shard_bytes: &[u64],
        lease: &Lease,
        until: Instant,
    ) -> Vec<BlockRead> {
        let block_bytes: u64 = shard_bytes.iter().sum();
        let fitting = lease.window.zip(lease.blocks(blocks.len(), shard_bytes.len()));
        let Some((window, crcs)) = fitting else {
            if lease.window.is_some() {
                tracing::debug!(member = %member.address, "a lease that does not fit its request");
                note_loan(member, false, 0, Duration::ZERO);
            }
            return blocks;
        };
        let lent = crcs.iter().flatten().count() as u64;
        if window.len != lent * block_bytes {
            tracing::debug!(member = %member.address, "a window that does not fit its lease");
            note_loan(member, false, 0, Duration::ZERO);
            return blocks;
        }
        let begun = Instant::now();
        let mut parts = Vec::new();
        let (mut gone, mut offset) = (Vec::new(), 0);
        let mut waiting = Vec::new();
        for (block, crcs) in blocks.into_iter().zip(crcs) {
            match crcs {
                Some(crcs) => waiting.push((block, crcs)),
                None => gone.push(block),
            }
            if waiting.len() as u64 * block_bytes >= READ_BYTES {
                let bytes = waiting.len() as u64 * block_bytes;
                parts.push((std::mem::take(&mut waiting), offset));
                offset += bytes;
            }
        }
        if !waiting.is_empty() {
            parts.push((waiting, offset));
        }
        let mut parts =
            parts.into_iter().map(|(blocks, offset)| self.begin(peer, window, blocks, offset, until));
        let mut reads: VecDeque<Reading<'_>> = parts.by_ref().take(READS).collect();
        let (mut outcome, mut bytes) = (Outcome::Right, 0);
        while let Some(mut reading) = reads.pop_front() {
            let came_in_time = reading.wait() && Instant::now() <= until;
            // Before the checksums, so that bytes come while they are compared.
            reads.extend(parts.next());
            for (block, crcs) in std::mem::take(&mut reading.blocks) {
                if !came_in_time {
                    outcome = outcome.max(Outcome::Late);
                    self.fail(vec![block]);
                } else if self.finish(member, block, crcs, outcome != Outcome::Damaged) {
                    bytes += block_bytes;
                } else {
                    outcome = Outcome::Damaged;
                }
            }
        }
        if lent > 0 {
            note_loan(member, outcome == Outcome::Right, bytes, begun.elapsed());
        }
        gone
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

    /// A block's bytes are there. True: they are those that its owner sealed, and count.
    fn finish(&self, member: &Member, block: BlockRead, crcs: &[u32], is_logged: bool) -> bool {
        let found = block.crcs(&self.arena);
        if found == crcs {
            self.counts.blocks.fetch_add(1, Ordering::Relaxed);
            self.counts.bytes.fetch_add(bytes_of(&block), Ordering::Relaxed);
            block.done.call(Some(found));
            return true;
        }
        self.counts.damaged.fetch_add(1, Ordering::Relaxed);
        if !is_logged {
            return false;
        }
        // Log: bytes changed in that daemon's memory, or on the way; the block is a miss and is computed. Do: if it comes
        // again, test that machine's memory and the network.
        tracing::warn!(
            member = %member.address,
            namespace = %block.key.space.namespace,
            hash = %block.key.hash,
            "block of another daemon discarded: its bytes differ from its checksum"
        );
        false
    }

    fn fail(&self, blocks: Vec<BlockRead>) {
        self.counts.failed.fetch_add(blocks.len() as u64, Ordering::Relaxed);
        // Dropped reads have failed.
        drop(blocks);
    }
}

/// Notes how a loan went, and logs it if the member is left out from now on.
fn note_loan(member: &Member, is_right: bool, bytes: u64, took: Duration) {
    if member.state.lock().note_loan(is_right, bytes, took, Instant::now()) {
        // Log: three loans of that daemon in a row were late or damaged; it is asked again after a pause. Do: look at its
        // load, its memory and the network.
        tracing::warn!(member = %member.address, "daemon lends late or damaged blocks: it is left out for a while");
    }
}

/// How many of the first blocks have so many bytes in all at most; one at least.
fn blocks_of_bytes(most_bytes: u64, blocks: &[BlockRead]) -> usize {
    let mut sum = 0;
    let fits = |block: &&BlockRead| {
        sum += bytes_of(block);
        sum <= most_bytes
    };
    blocks.iter().take_while(fits).count().max(1)
}

fn bytes_of(block: &BlockRead) -> u64 {
    block.extents.iter().map(|extent| extent.bytes).sum()
}

fn shard_bytes(block: &BlockRead) -> Vec<u64> {
    block.extents.iter().map(|extent| extent.bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_of_a_member_that_is_lost_is_not_waited_for() {
        let (a, b) = (MemberNumber(1), MemberNumber(2));
        let leases = AwaitedLeases::default();
        let (of_a, (number, of_b)) = (leases.wait_for(a).1, leases.wait_for(b));
        leases.lost(a);
        assert!(of_a.recv().is_err());
        assert!(leases.came(b, number, Lease::refused("")));
        assert!(of_b.recv().is_ok());
    }
}
