//! A host's reads, borrowed and carried out as [`Borrowing`](crate::borrowing::Borrowing) does: its bookkeeping of leases, in
//! simulated time.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use kvlane_memory::Arena;
use kvlane_store::BlockRead;

use super::faults::Fault;
use super::net::{Address, Event, Net};
use super::pool::{BLOCK_BYTES, SHARD_BYTES, SPACE, bytes_at};
use crate::borrowing::AwaitedLeases;
use crate::members::{MemberNumber, MemberState};
use crate::messages::{Blocks, Lease, Message};

/// Blocks of one loan, and of one READ.
const LOAN_BLOCKS: usize = 8;
const READ_BLOCKS: usize = 2;
/// Loans of one member at a time.
const THREADS: usize = 2;
const SPARE: Duration = Duration::from_millis(500);
/// How long a READ that is given up may still run.
const CANCEL_MS: u64 = 20;

/// Reads of one member, in order.
struct Todo {
    deadline: Instant,
    blocks: VecDeque<BlockRead>,
    /// Blocks that were not lent the last time, and how many were asked for then.
    again: (Vec<BlockRead>, usize),
}

struct Loan {
    member: usize,
    todo: Todo,
    asked: Instant,
    lease: Receiver<Lease>,
    /// The blocks asked for, until the lease has come. Then those that are not lent.
    blocks: Vec<BlockRead>,
    asked_for: usize,
    is_granted: bool,
    begun: Instant,
    reads_left: usize,
    bytes: u64,
    is_right: bool,
}

/// One READ of a loan. It copies a block at a time.
struct Read {
    loan: u64,
    window: u32,
    /// Each block, its checksums, and its position in the window.
    blocks: Vec<(BlockRead, Vec<u32>, usize)>,
    copied: usize,
    until: Instant,
    has_failed: bool,
}

pub(crate) struct Borrowing {
    me: Address,
    arena: Arc<Arena>,
    leases: AwaitedLeases,
    loans: BTreeMap<u64, Loan>,
    reads: BTreeMap<u64, Read>,
    read_count: u64,
    queued: Vec<VecDeque<Todo>>,
    busy: Vec<usize>,
}

impl Borrowing {
    pub(crate) fn new(me: Address, hosts: usize, arena: Arc<Arena>) -> Borrowing {
        Borrowing {
            me,
            arena,
            leases: AwaitedLeases::default(),
            loans: BTreeMap::new(),
            reads: BTreeMap::new(),
            read_count: 0,
            queued: (0..hosts).map(|_| VecDeque::new()).collect(),
            busy: vec![0; hosts],
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.loans.is_empty() && self.reads.is_empty() && self.queued.iter().all(VecDeque::is_empty)
    }

    pub(crate) fn read(
        &mut self,
        net: &mut Net,
        members: &mut [MemberState],
        member: usize,
        blocks: Vec<BlockRead>,
        deadline: Instant,
    ) {
        self.queued[member].push_back(Todo { deadline, blocks: blocks.into(), again: Default::default() });
        self.start(net, members, member);
    }

    fn start(&mut self, net: &mut Net, members: &mut [MemberState], member: usize) {
        while self.busy[member] < THREADS
            && let Some(todo) = self.queued[member].pop_front()
        {
            self.busy[member] += 1;
            self.go_on(net, members, member, todo);
        }
    }

    /// Borrows the next blocks.
    fn go_on(&mut self, net: &mut Net, members: &mut [MemberState], member: usize, mut todo: Todo) {
        loop {
            let (mut blocks, before) = std::mem::take(&mut todo.again);
            if blocks.is_empty() || blocks.len() == before {
                // Dropped reads have failed.
                drop(blocks);
                blocks = todo.blocks.drain(..todo.blocks.len().min(LOAN_BLOCKS)).collect();
            }
            if blocks.is_empty() {
                self.busy[member] -= 1;
                return;
            }
            let asked = net.instant();
            let lasts = todo.deadline.saturating_duration_since(asked);
            if lasts.is_zero() || net.peer(self.me.host, member).is_none() {
                drop((blocks, std::mem::take(&mut todo.blocks)));
                continue;
            }
            let (number, lease) = self.leases.wait_for(MemberNumber(member as u32));
            let hashes = blocks.iter().map(|block| block.key.hash).collect();
            let request = Message::Borrow {
                number,
                blocks: Blocks { space: SPACE, shard_bytes: SHARD_BYTES.to_vec(), hashes },
                lasts_ms: (lasts + SPARE).as_millis() as u32,
            };
            net.send(self.me, member, request);
            let patience = members[member].lease_patience(lasts).min(lasts);
            net.at(net.now + patience, Event::LeaseDue(self.me, number));
            let loan = Loan {
                member,
                todo,
                asked,
                lease,
                asked_for: blocks.len(),
                blocks,
                is_granted: false,
                begun: asked,
                reads_left: 0,
                bytes: 0,
                is_right: true,
            };
            self.loans.insert(number, loan);
            return;
        }
    }

    /// A lease has come.
    pub(crate) fn leased(
        &mut self,
        net: &mut Net,
        members: &mut [MemberState],
        member: usize,
        mut number: u64,
        lease: Lease,
    ) {
        if net.fault == Fault::AnyLease
            && let Some((oldest, _)) =
                self.loans.iter().find(|(_, loan)| loan.member == member && !loan.is_granted)
        {
            number = *oldest;
        }
        if !self.leases.came(MemberNumber(member as u32), number, lease) {
            net.seen.unwanted_leases += 1;
            return;
        }
        let Some(loan) = self.loans.get_mut(&number) else { return };
        let Ok(lease) = loan.lease.try_recv() else { return };
        loan.is_granted = true;
        let now = net.instant();
        let granted = Duration::from_millis(u64::from(lease.lasts_ms));
        let from = if net.fault == Fault::LeaseFromItsArrival { now } else { loan.asked };
        let until = loan.todo.deadline.min(from + granted);
        let bytes = loan.blocks.len() as u64 * BLOCK_BYTES;
        let patience = members[member].read_patience(bytes, until.saturating_duration_since(now));
        let until = until.min(now + patience);
        loan.begun = now;
        let blocks = std::mem::take(&mut loan.blocks);
        let fitting = lease.window.zip(lease.blocks(blocks.len(), SHARD_BYTES.len()));
        let Some((window, crcs)) = fitting else {
            loan.is_right = lease.window.is_none();
            loan.blocks = blocks;
            return self.end(net, members, number);
        };
        let (mut waiting, mut reads, mut position) = (Vec::new(), Vec::new(), 0);
        for (block, crcs) in blocks.into_iter().zip(crcs) {
            let Some(crcs) = crcs else {
                loan.blocks.push(block);
                continue;
            };
            waiting.push((block, crcs.to_vec(), position));
            position += 1;
            if waiting.len() == READ_BLOCKS {
                reads.push(std::mem::take(&mut waiting));
            }
        }
        reads.extend((!waiting.is_empty()).then_some(waiting));
        loan.reads_left = reads.len();
        let slow_ms = [3, 20, 200][net.dice.below(3) as usize];
        for blocks in reads {
            self.read_count += 1;
            let mut at = net.now;
            for _ in &blocks {
                at += net.dice.ms(0, slow_ms);
                net.at(at, Event::Copy(self.me, self.read_count));
            }
            let given_up = net.since_start(until) + net.dice.ms(0, CANCEL_MS);
            net.at(at.min(given_up), Event::ReadEnds(self.me, self.read_count));
            let read =
                Read { loan: number, window: window.number, blocks, copied: 0, until, has_failed: false };
            self.reads.insert(self.read_count, read);
        }
        if self.loans[&number].reads_left == 0 {
            self.end(net, members, number);
        }
    }

    /// The lease of a loan has not come for too long.
    pub(crate) fn lease_due(&mut self, net: &mut Net, members: &mut [MemberState], number: u64) {
        if self.loans.get(&number).is_some_and(|loan| !loan.is_granted) {
            self.leases.give_up(number);
            // All of the batch fails.
            self.loans.entry(number).and_modify(|loan| {
                loan.is_right = false;
                loan.todo.blocks.clear();
            });
            self.end(net, members, number);
        }
    }

    /// The next block of a READ is copied from its owner's memory.
    pub(crate) fn copy(&mut self, net: &mut Net, number: u64) {
        let Some(read) = self.reads.get_mut(&number) else { return };
        if read.has_failed || net.instant() > read.until {
            read.has_failed = true;
            return;
        }
        let window = net.windows.get(&read.window);
        let is_there = window.is_some_and(|window| net.is_alive(window.owner) && !window.is_closing);
        let is_cut = window.is_some_and(|window| net.is_cut(self.me.host, window.owner.host));
        if !is_there || is_cut {
            read.has_failed = true;
            // Its reader would have taken these bytes.
            if net.expired_windows.contains(&read.window) && !is_cut {
                net.is_wrong("an owner ended a loan on which its reader still counted");
            }
            return;
        }
        let (block, _, position) = &read.blocks[read.copied];
        let window = &net.windows[&read.window];
        let shards = &window.extents[position * SHARD_BYTES.len()..];
        for (from, to) in shards.iter().zip(&block.extents) {
            bytes_at(&self.arena, *to).copy_from_slice(bytes_at(&window.arena, *from));
        }
        read.copied += 1;
    }

    pub(crate) fn read_ends(&mut self, net: &mut Net, members: &mut [MemberState], number: u64) {
        let Some(read) = self.reads.remove(&number) else { return };
        let Some(loan) = self.loans.get_mut(&read.loan) else { return };
        let came_in_time =
            !read.has_failed && read.copied == read.blocks.len() && net.instant() <= read.until;
        for (block, crcs, _) in read.blocks {
            let found = block.crcs(&self.arena);
            if !came_in_time {
                net.seen.late_reads += 1;
                loan.is_right = false;
            } else if found == crcs || net.fault == Fault::NoChecksums {
                net.seen.fetched_blocks += 1;
                loan.bytes += BLOCK_BYTES;
                block.done.call(Some(found));
            } else {
                net.seen.damaged_blocks += 1;
                loan.is_right = false;
            }
        }
        loan.reads_left -= 1;
        if loan.reads_left == 0 {
            self.end(net, members, read.loan);
        }
    }

    /// A loan is over. The reader asks again for the blocks that were not lent.
    fn end(&mut self, net: &mut Net, members: &mut [MemberState], number: u64) {
        let Some(loan) = self.loans.remove(&number) else { return };
        let Loan { member, mut todo, blocks, asked_for, begun, bytes, is_right, .. } = loan;
        let now = net.instant();
        if bytes > 0 || !is_right {
            let took = now.saturating_duration_since(begun);
            net.seen.left_out += u64::from(members[member].note_loan(is_right, bytes, took, now));
        }
        net.send(self.me, member, Message::Return { number });
        todo.again = (blocks, asked_for);
        self.go_on(net, members, member, todo);
        self.start(net, members, member);
    }
}
