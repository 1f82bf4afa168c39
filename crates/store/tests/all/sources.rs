//! A store over sources with several holders: who is asked for what, and what happens if one is late, fails or says too
//! much.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace, PoolExtent, Space};
use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa, PAGE_BYTES};
use kvlane_store::{
    BlockRead, FetchPlan, FindDone, Found, HolderId, LookupGroup, OwnerId, Question, Source, SpaceId, Store,
    StoreOptions,
};
use parking_lot::Mutex;

const MODEL: Namespace = Namespace([1; 16]);
const ENGINE: OwnerId = OwnerId(1);
const A: HolderId = HolderId(1);
const B: HolderId = HolderId(2);
/// Long enough for a loaded machine; reached only by a test that fails.
const PATIENCE: Duration = Duration::from_secs(30);

const NEAR: Duration = Duration::from_micros(100);
const FAR: Duration = Duration::from_secs(10);

/// A source whose holders the test plays.
#[derive(Default)]
struct Hosts {
    /// Positions that each holder says it has, of whatever it is asked.
    says: Mutex<BTreeMap<HolderId, Vec<std::ops::Range<u32>>>>,
    /// Questions and reads that the test has not answered yet.
    questions: Mutex<Vec<(Question, FindDone)>>,
    reads: Mutex<BTreeMap<HolderId, Vec<BlockRead>>>,
    answers_later: bool,
    brings_copies: bool,
    /// Takes 10 s before the first byte.
    far: Option<HolderId>,
}

impl Hosts {
    fn saying(says: &[(HolderId, std::ops::Range<u32>)]) -> Arc<Self> {
        let says = says.iter().map(|(holder, run)| (*holder, std::iter::once(run.clone()).collect()));
        Arc::new(Self { says: Mutex::new(says.collect()), ..Self::default() })
    }

    fn found(&self) -> Vec<Found> {
        let found = |(holder, positions): (&HolderId, &Vec<_>)| Found {
            holder: *holder,
            positions: positions.clone(),
            round_trip: if self.far == Some(*holder) { FAR } else { NEAR },
        };
        self.says.lock().iter().map(found).collect()
    }

    /// Reads that wait at this holder.
    fn take(&self, holder: HolderId) -> Vec<BlockRead> {
        self.reads.lock().remove(&holder).unwrap_or_default()
    }

    fn waiting(&self, holder: HolderId) -> usize {
        self.reads.lock().get(&holder).map_or(0, Vec::len)
    }
}

struct Played(Arc<Hosts>);

impl Source for Played {
    fn find(&self, question: Question, done: FindDone) {
        if self.0.answers_later {
            self.0.questions.lock().push((question, done));
        } else {
            done.call(self.0.found());
        }
    }

    fn read(&self, holder: HolderId, blocks: Vec<BlockRead>, _: Instant) {
        self.0.reads.lock().entry(holder).or_default().extend(blocks);
    }

    fn brings_copies(&self) -> bool {
        self.0.brings_copies
    }
}

struct Pool {
    hosts: Vec<Arc<Hosts>>,
    arena: Arc<Arena>,
    store: Arc<Store>,
    space: SpaceId,
}

/// Pages of a block.
const BLOCK: u64 = 2;
/// More blocks than one holder is asked for at a time.
const TOO_MANY: u16 = 1100;

impl Pool {
    fn over(hosts: &[Arc<Hosts>]) -> Self {
        let options =
            ArenaOptions { bytes: 4096 * PAGE_BYTES, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
        let arena = Arc::new(Arena::create(&options, &|_| {}).unwrap());
        let sources = hosts.iter().map(|hosts| Arc::new(Played(Arc::clone(hosts))) as Arc<dyn Source>);
        let store = Store::with_tiers(Arc::clone(&arena), StoreOptions::default(), None, sources.collect());
        let space = store.space(MODEL, "a model", CutDigest([5; 16]), &[BLOCK * PAGE_BYTES]);
        store.let_cross_hosts(space);
        Self { hosts: hosts.to_vec(), arena, store, space }
    }

    fn group<'a>(&self, hashes: &'a [BlockHash]) -> LookupGroup<'a> {
        LookupGroup { space: self.space, tokens_per_block: 16, window_blocks: 0, hashes }
    }

    fn plan(&self, hashes: &[BlockHash]) -> Option<FetchPlan> {
        self.store.find(&[self.group(hashes)], u64::MAX).wait_until(Instant::now()).ok().unwrap()
    }

    fn fetch(&self, plan: FetchPlan, within: Duration) -> Receiver<()> {
        let (done, is_done) = channel();
        let now = Instant::now();
        self.store.fetch(plan, now, now + within, move || done.send(()).unwrap());
        is_done
    }

    /// Writes the blocks, as their holder has them, and completes the reads.
    fn serve(&self, reads: Vec<BlockRead>) {
        for BlockRead { key, extents, done } in reads {
            let crc = |at: &PoolExtent| {
                let bytes = self.bytes_at(*at);
                bytes.fill(key.hash.0[0]);
                kvlane_block::crc32c(bytes)
            };
            let crcs = extents.iter().map(crc).collect();
            done.call(Some(crcs));
        }
    }

    #[allow(clippy::mut_from_ref, reason = "the pool is shared memory")]
    fn bytes_at(&self, at: PoolExtent) -> &mut [u8] {
        // SAFETY: the test's store handed this extent out for as long as it is used here.
        unsafe {
            std::slice::from_raw_parts_mut(self.arena.base().add(at.offset.0 as usize), at.bytes as usize)
        }
    }

    fn hit_blocks(&self, hashes: &[BlockHash]) -> u64 {
        let Some(hit) = self.store.lookup(ENGINE, &[self.group(hashes)], u64::MAX, Instant::now()) else {
            return 0;
        };
        for (page, hash) in hit.groups[0].pages.iter().zip(hashes) {
            let at = PoolExtent { offset: page.offset(), bytes: BLOCK * PAGE_BYTES };
            assert!(self.bytes_at(at).iter().all(|byte| *byte == hash.0[0]), "{hash:?}");
        }
        self.store.release(ENGINE, hit.lease);
        hit.tokens / 16
    }
}

fn hashes(count: u8) -> Vec<BlockHash> {
    (0..count).map(|block| BlockHash([block + 1; 16])).collect()
}

/// The blocks of another prompt, as many as it takes.
fn long_prompt(number: u8, blocks: u16) -> Vec<BlockHash> {
    let hash = |block: u16| {
        let mut hash = [number; 16];
        hash[1..3].copy_from_slice(&block.to_le_bytes());
        BlockHash(hash)
    };
    (0..blocks).map(hash).collect()
}

#[test]
fn a_plan_may_come_later_and_is_taken_up_on_the_thread_that_brings_it() {
    let hosts = Arc::new(Hosts {
        says: Mutex::new(BTreeMap::from([(A, std::iter::once(0..6).collect())])),
        answers_later: true,
        ..Hosts::default()
    });
    let pool = Pool::over(&[hosts]);
    let prompt = hashes(6);
    let finding = pool.store.find(&[pool.group(&prompt)], u64::MAX);
    let finding = finding.wait_until(Instant::now()).err().expect("nobody has answered");
    let (done, is_done) = channel();
    let store = Arc::clone(&pool.store);
    finding.then(move |plan| {
        let now = Instant::now();
        store.fetch(plan.unwrap(), now, now + PATIENCE, move || done.send(()).unwrap());
    });
    // Its space may not be forgotten meanwhile, although no session names it.
    pool.store.forget_spaces(0, &Default::default());
    assert_eq!(pool.store.count_spaces(), 1);
    let (question, answer) = pool.hosts[0].questions.lock().pop().unwrap();
    assert_eq!(*question.hashes, *prompt);
    assert_eq!(*question.shard_bytes, [BLOCK * PAGE_BYTES]);
    answer.call(pool.hosts[0].found());
    pool.serve(pool.hosts[0].take(A));
    is_done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&prompt), 6);
    drop(question);
    // Nothing names it any more, and its blocks can be lost.
    pool.store.forget_spaces(0, &Default::default());
    assert_eq!(pool.store.count_spaces(), 0);
}

#[test]
fn a_source_that_drops_its_question_has_nothing() {
    let hosts = Arc::new(Hosts { answers_later: true, ..Hosts::default() });
    let pool = Pool::over(&[Arc::clone(&hosts)]);
    let finding = pool.store.find(&[pool.group(&hashes(6))], u64::MAX);
    drop(hosts.questions.lock().pop());
    assert!(finding.wait_until(Instant::now() + PATIENCE).ok().unwrap().is_none());
}

#[test]
fn a_holder_that_says_too_much_is_believed_for_what_was_asked() {
    let hosts = Hosts::saying(&[(A, 2..u32::MAX), (B, 9..12)]);
    hosts.says.lock().get_mut(&A).unwrap().push(0..2);
    let pool = Pool::over(&[hosts]);
    let prompt = hashes(6);
    let done = pool.fetch(pool.plan(&prompt).unwrap(), PATIENCE);
    pool.serve(pool.hosts[0].take(A));
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&prompt), 6);
}

#[test]
fn what_one_holder_lacks_comes_from_another_one_of_any_source() {
    let pool = Pool::over(&[Hosts::saying(&[(A, 0..4)]), Hosts::saying(&[(A, 4..6)])]);
    let prompt = hashes(6);
    let done = pool.fetch(pool.plan(&prompt).unwrap(), PATIENCE);
    let (first, second) = (pool.hosts[0].take(A), pool.hosts[1].take(A));
    assert_eq!((first.len(), second.len()), (4, 2));
    pool.serve(first);
    pool.serve(second);
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&prompt), 6);
}

#[test]
fn a_block_is_a_copy_if_the_source_that_brought_it_brings_copies() {
    let others = Hosts {
        says: Mutex::new(BTreeMap::from([(A, std::iter::once(4..8).collect())])),
        brings_copies: true,
        ..Hosts::default()
    };
    // This host has the first five, and the last two again.
    let own = Hosts::saying(&[(A, 0..5)]);
    own.says.lock().get_mut(&A).unwrap().push(8..10);
    let pool = Pool::over(&[own, Arc::new(others)]);
    let prompt = hashes(10);
    let done = pool.fetch(pool.plan(&prompt).unwrap(), PATIENCE);
    let (own, mut copied) = (pool.hosts[0].take(A), pool.hosts[1].take(A));
    assert_eq!((own.len(), copied.len()), (7, 3));
    assert_eq!(pool.store.stats().copied_blocks, 3, "they count while they are being fetched");
    pool.serve(copied.drain(..2).collect());
    // The other host does not bring its last one, and nobody else has it.
    drop(copied);
    // This host's SSD fails to bring the fifth, which the other host has too.
    let (fifth, rest) = own.into_iter().partition(|read| read.key.hash == prompt[4]);
    pool.serve(rest);
    drop::<Vec<BlockRead>>(fifth);
    assert_eq!(pool.store.stats().copied_blocks, 2);
    pool.serve(pool.hosts[1].take(A));
    done.recv_timeout(PATIENCE).unwrap();
    let stats = pool.store.stats();
    assert_eq!((stats.copied_blocks, stats.copied_bytes), (3, 3 * BLOCK * PAGE_BYTES));
    assert_eq!(pool.hit_blocks(&prompt), 7);
}

/// A hung host stopped the SSD: all reads had one deadline and one queue.
#[test]
fn a_late_holder_is_left_out_and_stops_no_other() {
    let pool = Pool::over(&[Hosts::saying(&[(A, 0..6)])]);
    let hung = pool.fetch(pool.plan(&hashes(6)).unwrap(), Duration::ZERO);
    assert_eq!(pool.hosts[0].waiting(A), 0, "there is no time for its round trip");
    hung.recv_timeout(PATIENCE).unwrap();
    let hung = pool.fetch(pool.plan(&hashes(6)).unwrap(), Duration::from_millis(1));
    let now = Instant::now();
    assert_eq!(pool.hosts[0].waiting(A), 6);
    while now.elapsed() <= Duration::from_millis(1) {
        std::thread::yield_now();
    }
    let others: Vec<BlockHash> = (0..4).map(|block| BlockHash([block + 100; 16])).collect();
    assert!(pool.plan(&others).is_none());
    pool.hosts[0].says.lock().insert(B, std::iter::once(0..4).collect());
    let done = pool.fetch(pool.plan(&others).unwrap(), PATIENCE);
    assert_eq!(pool.hosts[0].waiting(A), 6);
    pool.serve(pool.hosts[0].take(B));
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&others), 4);
    // What it brings in the end is there, and it is asked again.
    pool.serve(pool.hosts[0].take(A));
    hung.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&hashes(6)), 6);
    pool.hosts[0].says.lock().remove(&B);
    let more: Vec<BlockHash> = (0..4).map(|block| BlockHash([block + 200; 16])).collect();
    assert!(pool.plan(&more).is_some());
}

/// Reads that waited behind a holder that answered nothing waited until their deadline, although another one had the blocks.
#[test]
fn reads_that_wait_behind_a_holder_that_hangs_come_from_another_one() {
    let pool = Pool::over(&[Hosts::saying(&[(A, 0..u32::MAX)])]);
    let (long, short) = (long_prompt(1, TOO_MANY), long_prompt(2, 6));
    let began = Instant::now();
    let hung = pool.fetch(pool.plan(&long).unwrap(), PATIENCE);
    let in_flight = pool.hosts[0].waiting(A);
    assert!(in_flight < long.len(), "the others wait in its queue");
    // A has one block more, so it is asked for all of them.
    pool.hosts[0].says.lock().insert(B, std::iter::once(0..5).collect());
    let done = pool.fetch(pool.plan(&short).unwrap(), 2 * PATIENCE);
    pool.store.leave_stalled_holders(began + PATIENCE / 3);
    assert_eq!(pool.hosts[0].waiting(B), 0, "it may still be in time");
    pool.store.leave_stalled_holders(Instant::now() + PATIENCE / 2);
    assert_eq!(pool.hosts[0].waiting(B), 5);
    pool.serve(pool.hosts[0].take(B));
    assert!(done.try_recv().is_err(), "its last block may still come");
    // Nobody waits any more for what is in flight. What nobody else has is a miss.
    pool.store.leave_stalled_holders(Instant::now() + PATIENCE);
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&short), 5);
    assert_eq!(pool.hosts[0].waiting(A), in_flight, "its source may still write there");
    assert!(hung.try_recv().is_err());
    let failed = (long.len() - in_flight + 1) as u64;
    assert_eq!(pool.store.stats().counters.failed_fetches, failed);
    pool.serve(pool.hosts[0].take(A));
    hung.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&long), in_flight as u64);
    assert_eq!(pool.store.stats().counters.failed_fetches, failed, "each block ends once");
}

#[test]
fn the_background_takes_reads_out_of_the_queue_of_a_holder_that_hangs() {
    let pool = Pool::over(&[Hosts::saying(&[(A, 0..u32::MAX), (B, 0..u32::from(TOO_MANY) - 1)])]);
    let _background = pool.store.start_background(1, 0).unwrap();
    let long = long_prompt(1, TOO_MANY);
    let done = pool.fetch(pool.plan(&long).unwrap(), Duration::from_secs(6));
    let in_flight = pool.hosts[0].waiting(A);
    let began = Instant::now();
    while pool.hosts[0].waiting(B) == 0 {
        assert!(began.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    let mut from_b = pool.hosts[0].take(B);
    assert_eq!(from_b.len(), long.len() - in_flight - 1, "A alone has the last one");
    pool.serve(from_b.split_off(1));
    drop(from_b);
    // Those in flight, and then the last one.
    pool.serve(pool.hosts[0].take(A));
    pool.serve(pool.hosts[0].take(A));
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&long), in_flight as u64, "B failed to bring the next one");
}

/// A holder that brings block after block is busy, however many wait.
#[test]
fn reads_stay_in_the_queue_of_a_holder_that_brings_blocks() {
    let pool = Pool::over(&[Hosts::saying(&[(A, 0..u32::MAX), (B, 0..u32::from(TOO_MANY) - 1)])]);
    let long = long_prompt(1, TOO_MANY);
    let began = Instant::now();
    let done = pool.fetch(pool.plan(&long).unwrap(), PATIENCE);
    let mut reads = pool.hosts[0].take(A);
    pool.serve(reads.split_off(reads.len() - 1));
    // Half of the time since then is not over.
    pool.store.leave_stalled_holders(began + PATIENCE / 2);
    assert_eq!(pool.hosts[0].waiting(B), 0);
    pool.serve(reads);
    pool.serve(pool.hosts[0].take(A));
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&long), u64::from(TOO_MANY));
}

/// A holder that had hung once was asked for no more than 8 MiB of each prompt from then on.
#[test]
fn a_holder_that_was_late_once_brings_whole_prompts_again() {
    let pool = Pool::over(&[Hosts::saying(&[(A, 0..u32::MAX)])]);
    let late = pool.fetch(pool.plan(&long_prompt(1, 4)).unwrap(), Duration::from_millis(1));
    let began = Instant::now();
    while began.elapsed() <= Duration::from_millis(1) {
        std::thread::yield_now();
    }
    drop(pool.hosts[0].take(A));
    late.recv_timeout(PATIENCE).unwrap();
    let bring = |number| {
        let prompt = long_prompt(number, TOO_MANY);
        let done = pool.fetch(pool.plan(&prompt).unwrap(), PATIENCE);
        while pool.hosts[0].waiting(A) > 0 {
            pool.serve(pool.hosts[0].take(A));
        }
        done.recv_timeout(PATIENCE).unwrap();
        pool.hit_blocks(&prompt)
    };
    assert_eq!(bring(2), (8 << 20) / (BLOCK * PAGE_BYTES), "it is measured with one share");
    assert_eq!(bring(3), u64::from(TOO_MANY));
}

#[test]
fn blocks_that_one_holder_fails_to_bring_come_from_another() {
    let pool = Pool::over(&[Hosts::saying(&[(A, 0..6), (B, 0..5)])]);
    let prompt = hashes(6);
    let done = pool.fetch(pool.plan(&prompt).unwrap(), PATIENCE);
    let mut at_first = pool.hosts[0].take(A);
    let from_first = !at_first.is_empty();
    assert!(from_first, "it has more of the prompt");
    let rest = at_first.split_off(3);
    pool.serve(at_first);
    // It dies half-way. Nobody else has the last block.
    rest.into_iter().for_each(|read| read.done.call(None));
    pool.serve(pool.hosts[0].take(B));
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&prompt), 5);
    assert_eq!(pool.store.stats().counters.failed_fetches, 1);
    assert_eq!((pool.hosts[0].waiting(A), pool.hosts[0].waiting(B)), (0, 0));
}

#[test]
fn each_holder_fails_once_and_then_it_is_a_miss() {
    let pool = Pool::over(&[Hosts::saying(&[(A, 0..6)]), Hosts::saying(&[(B, 0..6)])]);
    let prompt = hashes(6);
    let done = pool.fetch(pool.plan(&prompt).unwrap(), PATIENCE);
    let mut failed = 0;
    loop {
        let reads: Vec<BlockRead> =
            [pool.hosts[0].take(A), pool.hosts[1].take(B)].into_iter().flatten().collect();
        if reads.is_empty() {
            break;
        }
        failed += reads.len();
        // Dropped is failed.
        drop(reads);
    }
    assert_eq!(failed, 12);
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&prompt), 0);
    assert_eq!(pool.store.stats().used_bytes, 0);
}

/// Blocks that are lent stay where they are, whatever happens to them.
#[test]
fn lent_blocks_keep_their_bytes_until_they_are_given_back() {
    let pool = Pool::over(&[Hosts::saying(&[(A, 0..6)])]);
    let prompt = hashes(6);
    let done = pool.fetch(pool.plan(&prompt).unwrap(), PATIENCE);
    pool.serve(pool.hosts[0].take(A));
    done.recv_timeout(PATIENCE).unwrap();
    let space = Space { namespace: MODEL, cut: CutDigest([5; 16]) };
    let lengths = [BLOCK * PAGE_BYTES];
    let asked = [prompt[2], BlockHash([99; 16]), prompt[0]];
    assert_eq!(pool.store.visible_runs(space, &lengths, &asked, false), [0..1, 2..3]);
    assert_eq!(pool.store.visible_runs(space, &lengths, &asked, true).len(), 1);
    assert!(pool.store.visible_runs(space, &[PAGE_BYTES], &asked, false).is_empty(), "other shards");
    assert!(pool.store.lend(space, &[PAGE_BYTES], &asked, Instant::now()).is_none());
    let loan = pool.store.lend(space, &lengths, &asked, Instant::now()).unwrap();
    assert!(loan.blocks[1].is_none());
    pool.store.drop_namespace(MODEL);
    assert_eq!(pool.hit_blocks(&prompt), 0);
    assert_eq!(pool.store.stats().limbo_bytes, 2 * BLOCK * PAGE_BYTES, "two of six are lent");
    for (shards, hash) in [(&loan.blocks[0], prompt[2]), (&loan.blocks[2], prompt[0])] {
        let shard = shards.as_ref().unwrap()[0];
        let bytes = pool.bytes_at(shard.extent);
        assert!(bytes.iter().all(|byte| *byte == hash.0[0]));
        assert_eq!(kvlane_block::crc32c(bytes), shard.crc32c);
    }
    drop(loan);
    assert_eq!(pool.store.stats().used_bytes, 0);
}

#[test]
fn nothing_is_fetched_that_an_engine_computes_sooner() {
    let says = [(A, std::iter::once(0..4).collect()), (B, std::iter::once(4..6).collect())];
    let hosts = Hosts { says: Mutex::new(BTreeMap::from(says)), far: Some(B), ..Hosts::default() };
    let pool = Pool::over(&[Arc::new(hosts)]);
    let prompt = hashes(6);
    let worth = |tokens_per_s: u32| {
        let now = Instant::now();
        pool.store.worth_fetching(pool.plan(&prompt).unwrap(), tokens_per_s, now, now + PATIENCE)
    };
    // 64 tokens in 64 us, before the near holder's first byte.
    assert!(worth(1_000_000).is_none());
    // 64 tokens in 64 ms, and all 96 before the far one's first byte.
    let done = pool.fetch(worth(1000).unwrap(), PATIENCE);
    pool.serve(pool.hosts[0].take(A));
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!((pool.hosts[0].waiting(B), pool.hit_blocks(&prompt)), (0, 4));
    // The rest would take 32 s to compute, or the engine does not know.
    *pool.hosts[0].says.lock() = BTreeMap::from([(B, std::iter::once(0..2).collect())]);
    assert!(worth(10).is_none() && worth(1).is_some());
    let done = pool.fetch(worth(0).unwrap(), PATIENCE);
    pool.serve(pool.hosts[0].take(B));
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(&prompt), 6);
}
