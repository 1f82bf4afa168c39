//! A host's loans, as [`Lender`](crate::lender::Lender) has them, with windows on simulated memory.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use kvlane_fabric::{MemoryKind, WindowDescriptor};
use kvlane_store::Loan;

use super::faults::Fault;
use super::net::{Address, Event, Net};
use super::pool::{BLOCK_BYTES, POOL_BLOCKS, Pool};
use crate::messages::{Blocks, Lease, Message};

const LOANS_OF_ONE: usize = 4;
/// Bytes lent at a time.
const LENT_MAX: u64 = POOL_BLOCKS / 4 * BLOCK_BYTES;
const WAITING_MAX: usize = 16;

struct Lent {
    window: u32,
    loan: Option<Loan>,
    bytes: u64,
    until: Duration,
}

struct Waiting {
    from: Address,
    number: u64,
    blocks: Blocks,
    lasts: Duration,
    until: Duration,
}

pub(crate) struct Lender {
    me: Address,
    /// The longest loan.
    longest: Duration,
    all: BTreeMap<(Address, u64), Lent>,
    /// Loans whose windows are being closed, by window.
    closing: BTreeMap<u32, (Address, Lent)>,
    waiting: VecDeque<Waiting>,
}

impl Lender {
    pub(crate) fn new(me: Address, longest: Duration) -> Lender {
        Lender { me, longest, all: BTreeMap::new(), closing: BTreeMap::new(), waiting: VecDeque::new() }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.all.is_empty() && self.closing.is_empty() && self.waiting.is_empty()
    }

    pub(crate) fn borrow(
        &mut self,
        net: &mut Net,
        pool: &Pool,
        from: Address,
        number: u64,
        blocks: Blocks,
        lasts: Duration,
    ) {
        let until = net.now + lasts / 8;
        self.waiting.push_back(Waiting { from, number, blocks, lasts, until });
        net.at(until, Event::LoansDue(self.me));
        self.lend_to_waiting(net, pool);
    }

    pub(crate) fn returned(&mut self, net: &mut Net, from: Address, number: u64) {
        self.waiting.retain(|waiting| (waiting.from, waiting.number) != (from, number));
        self.end(net, (from, number), false);
    }

    /// Ends loans and refuses requests whose time is over.
    pub(crate) fn due(&mut self, net: &mut Net, pool: &Pool) {
        let over = self.all.iter().filter(|(_, lent)| lent.until <= net.now).map(|(key, _)| *key);
        for key in over.collect::<Vec<_>>() {
            if net.fault != Fault::LoansWithoutEnd {
                net.seen.expired_loans += 1;
                self.end(net, key, true);
            }
        }
        self.lend_to_waiting(net, pool);
    }

    /// Only now its memory may be used again.
    pub(crate) fn closed(&mut self, net: &mut Net, pool: &Pool, window: u32) {
        net.windows.remove(&window);
        self.closing.remove(&window);
        self.lend_to_waiting(net, pool);
    }

    fn lend_to_waiting(&mut self, net: &mut Net, pool: &Pool) {
        let mut left: VecDeque<Waiting> = VecDeque::new();
        while let Some(waiting) = self.waiting.pop_front() {
            let may_wait = waiting.until > net.now && left.len() < WAITING_MAX;
            let comes_later = left.iter().any(|before| before.from == waiting.from) && may_wait;
            let lease = if comes_later { None } else { self.lend(net, pool, &waiting) };
            let lease = lease.or_else(|| {
                (!may_wait).then(|| {
                    net.seen.refused_loans += 1;
                    Lease::refused("as much of this pool is lent as can be")
                })
            });
            match lease {
                Some(lease) => {
                    let message = Message::Lease { number: waiting.number, lease };
                    net.send(self.me, waiting.from.host, message);
                }
                None => {
                    net.seen.waited_loans += 1;
                    left.push_back(waiting);
                }
            }
        }
        self.waiting = left;
    }

    /// The answer to a request. None: there is no room now.
    fn lend(&mut self, net: &mut Net, pool: &Pool, waiting: &Waiting) -> Option<Lease> {
        let key = (waiting.from, waiting.number);
        if self.all.contains_key(&key) {
            return Some(Lease::refused("this loan is open already"));
        }
        let closing = self.closing.values().map(|(borrower, lent)| (*borrower, lent.bytes));
        let held = self.all.iter().map(|((borrower, _), lent)| (*borrower, lent.bytes)).chain(closing);
        let held: Vec<(Address, u64)> = held.collect();
        let of_all: u64 = held.iter().map(|(_, bytes)| bytes).sum();
        let of_one = held.iter().filter(|(borrower, _)| *borrower == waiting.from);
        if of_all > LENT_MAX {
            net.is_wrong("more is lent than may be");
        }
        let left = (LENT_MAX - of_all.min(LENT_MAX))
            .min((LENT_MAX / 2).saturating_sub(of_one.clone().map(|(_, bytes)| bytes).sum()));
        let room = (left / BLOCK_BYTES) as usize;
        if of_one.count() >= LOANS_OF_ONE || room == 0 {
            return None;
        }
        let Blocks { space, shard_bytes, hashes } = &waiting.blocks;
        let hashes = &hashes[..hashes.len().min(room)];
        let Some(loan) = pool.store.lend(*space, shard_bytes, hashes, net.instant()) else {
            return Some(Lease::refused("the blocks are gone"));
        };
        let shards = loan.blocks.iter().flatten().flatten();
        let window = net.open_window(self.me, &pool.arena, shards.map(|shard| shard.extent).collect());
        let of_block = |block: &Option<Vec<kvlane_block::SealedShard>>| {
            Some(block.as_ref()?.iter().map(|shard| shard.crc32c).collect())
        };
        let mut crcs: Vec<Option<Vec<u32>>> = loan.blocks.iter().map(of_block).collect();
        crcs.resize(waiting.blocks.hashes.len(), None);
        let bytes = loan.blocks.iter().flatten().count() as u64 * BLOCK_BYTES;
        let lasts = waiting.lasts.min(self.longest);
        let until = net.now + lasts;
        net.at(until, Event::LoansDue(self.me));
        self.all.insert(key, Lent { window, loan: Some(loan), bytes, until });
        let window = WindowDescriptor { number: window, generation: 1, len: bytes, kind: MemoryKind::Host };
        Some(Lease::new(window, &crcs, lasts.as_millis() as u32))
    }

    fn end(&mut self, net: &mut Net, key: (Address, u64), is_expired: bool) {
        let Some(mut lent) = self.all.remove(&key) else { return };
        if let Some(window) = net.windows.get_mut(&lent.window) {
            window.is_closing = true;
        }
        if is_expired {
            net.expired_windows.insert(lent.window);
        }
        if net.fault == Fault::GivesBackEarly {
            lent.loan = None;
        }
        net.after(0, 50, Event::Closed(self.me, lent.window));
        self.closing.insert(lent.window, (key.0, lent));
    }
}
