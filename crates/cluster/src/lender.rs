//! Lends this pool's blocks: a window of the fabric for each loan, which is closed when it is returned or its time is over.
//!
//! ```text
//!   Borrow --> room? --> lease the blocks in the store --> open a window for that peer --> Lease
//!                '-- none: it waits for a window to be closed, for a while
//!   Return, or time over --> close the window, which may take a second --> give the blocks back to the store
//! ```
//! In that order, so no extent is used again while a window shows it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, SendError, Sender, at, bounded, never, select, unbounded};
use kvlane_fabric::{Engine, EngineId, PeerId, SendOptions, WindowDescriptor, WindowRange};
use kvlane_store::{Loan, Store};
use parking_lot::Mutex;

use crate::messages::{Blocks, Lease, Message};

/// Longest loan, whatever the borrower asks for: as long as a lookup may wait.
const LONGEST: Duration = Duration::from_secs(60);
/// Loans of one borrower.
const LOANS_OF_ONE: usize = 64;
/// How long a message may be on its way: those that a peer does not take fill what all peers share.
pub(crate) const SEND_PATIENCE: Duration = Duration::from_secs(1);
/// Requests that wait for the lender's thread. Further ones are refused.
const REQUESTS_MAX: usize = 256;
/// Requests that wait for room.
const WAITING_MAX: usize = 256;
/// Threads that close windows. Each waits a second for a borrower that has stopped.
const CLOSERS: usize = 4;

/// A request of a borrower.
pub(crate) enum Wish {
    Borrow {
        from: EngineId,
        peer: PeerId,
        number: u64,
        blocks: Blocks,
        lasts: Duration,
    },
    Return {
        from: EngineId,
        number: u64,
    },
    /// The end: all windows are closed.
    Stop,
}

/// Counts for `kvlane status`.
#[derive(Default)]
pub(crate) struct LentCounts {
    /// Blocks and bytes lent, since the start.
    pub(crate) blocks: AtomicU64,
    pub(crate) bytes: AtomicU64,
    /// Bytes that are lent now.
    pub(crate) bytes_now: AtomicU64,
    /// Requests that were refused whole.
    pub(crate) refused: AtomicU64,
    /// Loans that ended by their time.
    pub(crate) expired: AtomicU64,
}

/// The thread that lends.
pub(crate) struct Lender {
    wishes: Sender<Wish>,
    thread: Option<JoinHandle<()>>,
}

impl Lender {
    /// Starts it. `pool` is the number of the region that holds the pool; `most_bytes` are lent at a time.
    pub(crate) fn start(
        engine: Arc<Engine>,
        store: Arc<Store>,
        pool: u32,
        most_bytes: u64,
        counts: Arc<LentCounts>,
    ) -> std::io::Result<Self> {
        let (wishes, receiver) = bounded(REQUESTS_MAX);
        let (closing, to_close) = unbounded();
        let held = Held::default();
        let (has_closed, closed) = bounded(1);
        let closers = (0..CLOSERS)
            .map(|_| {
                let (engine, to_close) = (Arc::clone(&engine), to_close.clone());
                let (held, counts, has_closed) = (Arc::clone(&held), Arc::clone(&counts), has_closed.clone());
                let close = move || {
                    for lent in &to_close {
                        close(&engine, lent, &held, &counts);
                        // A full channel is enough: the lender looks at all requests that wait.
                        let _ = has_closed.try_send(());
                    }
                };
                std::thread::Builder::new().name("kvlane-closer".into()).spawn(close)
            })
            .collect::<std::io::Result<Vec<_>>>()?;
        let mut loans = Loans {
            engine,
            store,
            pool,
            most_bytes,
            all: HashMap::new(),
            held,
            waiting: VecDeque::new(),
            closing,
            counts: Arc::clone(&counts),
        };
        let run = move || {
            loans.run(&receiver, &closed);
            drop(loans);
            closers.into_iter().for_each(|closer| drop(closer.join()));
        };
        let thread = std::thread::Builder::new().name("kvlane-lender".into()).spawn(run)?;
        Ok(Self { wishes, thread: Some(thread) })
    }

    /// Hands a wish over. False: too many wait, or the lender has stopped.
    pub(crate) fn wish(&self, wish: Wish) -> bool {
        self.wishes.try_send(wish).is_ok()
    }

    /// Closes all windows and waits for that.
    pub(crate) fn stop(&mut self) {
        // Fails only if the thread has ended.
        let _ = self.wishes.send(Wish::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: a bug. Do: report it, with the daemon's log.
            tracing::error!("thread kvlane-lender panicked");
        }
    }
}

struct Lent {
    borrower: EngineId,
    window: WindowDescriptor,
    loan: Loan,
    until: Instant,
}

/// A request that waits for room.
struct Waiting {
    from: EngineId,
    peer: PeerId,
    number: u64,
    blocks: Blocks,
    lasts: Duration,
    /// Then it is refused.
    until: Instant,
}

/// What each borrower has now, windows that are being closed included.
type Held = Arc<Mutex<HashMap<EngineId, (usize, u64)>>>;

struct Loans {
    engine: Arc<Engine>,
    store: Arc<Store>,
    pool: u32,
    most_bytes: u64,
    all: HashMap<(EngineId, u64), Lent>,
    held: Held,
    /// In the order in which they came.
    waiting: VecDeque<Waiting>,
    closing: Sender<Lent>,
    counts: Arc<LentCounts>,
}

impl Loans {
    /// `closed` tells that a window was closed, so that there may be room.
    fn run(&mut self, wishes: &Receiver<Wish>, closed: &Receiver<()>) {
        loop {
            let now = Instant::now();
            // The channels give their messages first, however late it is.
            self.expire(now);
            self.lend_to_waiting(now);
            let ends = self.all.values().map(|lent| lent.until);
            let next = ends.chain(self.waiting.iter().map(|waiting| waiting.until)).min();
            let next = next.map_or_else(never, at);
            select! {
                recv(wishes) -> wish => match wish {
                    Ok(Wish::Borrow { from, peer, number, blocks, lasts }) => {
                        let until = now + lasts / 8;
                        self.waiting.push_back(Waiting { from, peer, number, blocks, lasts, until });
                    }
                    Ok(Wish::Return { from, number }) => {
                        self.waiting.retain(|waiting| (waiting.from, waiting.number) != (from, number));
                        self.end((from, number));
                    }
                    Ok(Wish::Stop) | Err(_) => return,
                },
                recv(closed) -> _ => {}
                recv(next) -> _ => {}
            }
        }
    }

    /// Answers the requests for which there is room, and those that have waited too long. Each borrower's come in their order.
    fn lend_to_waiting(&mut self, now: Instant) {
        let mut left = VecDeque::new();
        let mut without_room = HashSet::new();
        while let Some(waiting) = self.waiting.pop_front() {
            let may_wait = waiting.until > now && left.len() < WAITING_MAX;
            let lease = if without_room.contains(&waiting.from) && may_wait {
                None
            } else {
                self.lend(waiting.from, waiting.number, &waiting.blocks, waiting.lasts, now)
            };
            let lease = lease.or_else(|| {
                (!may_wait).then(|| {
                    self.counts.refused.fetch_add(1, Ordering::Relaxed);
                    Lease::refused("as much of this pool is lent as can be")
                })
            });
            let Some(lease) = lease else {
                without_room.insert(waiting.from);
                left.push_back(waiting);
                continue;
            };
            let message = Message::Lease { number: waiting.number, lease };
            // If it does not arrive, the borrower gives up, and the loan ends by its time.
            let options = SendOptions { timeout: SEND_PATIENCE, ..SendOptions::default() };
            drop(self.engine.send(waiting.peer, message.encode(), options));
        }
        self.waiting = left;
    }

    /// The answer to a request. None: there is no room now.
    fn lend(
        &mut self,
        from: EngineId,
        number: u64,
        blocks: &Blocks,
        lasts: Duration,
        now: Instant,
    ) -> Option<Lease> {
        let refused = |why: &str| {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
            Some(Lease::refused(why))
        };
        if self.all.contains_key(&(from, number)) {
            return refused("this loan is open already");
        }
        let (loans, bytes_held) = self.held.lock().get(&from).copied().unwrap_or_default();
        if loans >= LOANS_OF_ONE {
            return None;
        }
        let block_bytes = blocks.shard_bytes.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        // A borrower gets half of it at most, so that others get some too.
        let left_of_all = self.most_bytes.saturating_sub(self.counts.bytes_now.load(Ordering::Relaxed));
        let left = left_of_all.min((self.most_bytes / 2).saturating_sub(bytes_held));
        let room = usize::try_from(left / block_bytes.max(1)).unwrap_or(usize::MAX);
        if room == 0 {
            return None;
        }
        let hashes = &blocks.hashes[..blocks.hashes.len().min(room)];
        let Some(loan) = self.store.lend(blocks.space, &blocks.shard_bytes, hashes, now) else {
            return refused("the blocks are gone");
        };
        let shards = loan.blocks.iter().flatten().flatten();
        let ranges = shards.map(|shard| WindowRange {
            region: self.pool,
            offset: shard.extent.offset.0,
            len: shard.extent.bytes,
        });
        let window = match self.engine.open_window(from, ranges.collect()) {
            Ok(window) => window,
            Err(error) => return refused(&error.to_string()),
        };
        let mut crcs: Vec<Option<Vec<u32>>> = loan
            .blocks
            .iter()
            .map(|block| Some(block.as_ref()?.iter().map(|shard| shard.crc32c).collect()))
            .collect();
        crcs.resize(blocks.hashes.len(), None);
        let lasts = lasts.min(LONGEST);
        let lent = loan.blocks.iter().flatten().count() as u64;
        self.counts.blocks.fetch_add(lent, Ordering::Relaxed);
        self.counts.bytes.fetch_add(window.len, Ordering::Relaxed);
        self.counts.bytes_now.fetch_add(window.len, Ordering::Relaxed);
        let mut held = self.held.lock();
        let (loans, bytes) = held.entry(from).or_default();
        (*loans, *bytes) = (*loans + 1, *bytes + window.len);
        drop(held);
        self.all.insert((from, number), Lent { borrower: from, window, loan, until: now + lasts });
        Some(Lease::new(window, &crcs, lasts.as_millis() as u32))
    }

    fn expire(&mut self, now: Instant) {
        let over: Vec<_> =
            self.all.iter().filter(|(_, lent)| lent.until <= now).map(|(key, _)| *key).collect();
        self.counts.expired.fetch_add(over.len() as u64, Ordering::Relaxed);
        over.into_iter().for_each(|key| self.end(key));
    }

    fn end(&mut self, key: (EngineId, u64)) {
        if let Some(lent) = self.all.remove(&key) {
            self.close(lent);
        }
    }

    /// Closes a window in another thread; here only if those have ended.
    fn close(&self, lent: Lent) {
        if let Err(SendError(lent)) = self.closing.send(lent) {
            close(&self.engine, lent, &self.held, &self.counts);
        }
    }
}

impl Drop for Loans {
    fn drop(&mut self) {
        let left: Vec<Lent> = self.all.drain().map(|(_, lent)| lent).collect();
        left.into_iter().for_each(|lent| self.close(lent));
    }
}

/// Closes a window, and only then gives the blocks back to the store.
fn close(engine: &Engine, lent: Lent, held: &Held, counts: &LentCounts) {
    let Lent { borrower, window, loan, .. } = lent;
    // Fails if the engine is closed, which has closed all windows.
    let _ = engine.close_window(&window);
    drop(loan);
    counts.bytes_now.fetch_sub(window.len, Ordering::Relaxed);
    let mut held = held.lock();
    if let Some((loans, bytes)) = held.get_mut(&borrower) {
        (*loans, *bytes) = (*loans - 1, *bytes - window.len);
        if *loans == 0 {
            held.remove(&borrower);
        }
    }
}
