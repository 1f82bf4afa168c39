//! The requests that an engine sends to a daemon, and its use of the answers. A listener in the test plays the daemon by a
//! script, so the test does not depend on the code behind [`Scheduler`] and [`Worker`].
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

use std::{
    io::{Read, Write},
    os::{fd::AsFd, unix::net::UnixListener, unix::net::UnixStream},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use kvlane_block::{BlockHash, BlockId, PoolOffset, Region};
use kvlane_client::{
    DaemonUser, Finished, GroupSpec, Hit, JobKind, LoadGroup, LookupRequest, OwnBlocks, SaveGroupSpec,
    SaveMethod, Scheduler, SchedulerOptions, Worker, WorkerGroupSpec, WorkerOptions,
};
use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa, PoolPage, send_with_fds};
use kvlane_proto::{
    Address, FrameReader, encode_frame,
    v1::{self, refused::Reason, register_worker::Method, reply::Body as Answer, request::Body as Ask},
};

/// Longer than anything takes that a test waits for.
const PATIENCE: Duration = Duration::from_secs(30);
const POOL_BYTES: u64 = 2 << 20;
const BLOCK: usize = 4096;
const FIRST: [u8; 16] = [1; 16];
const SECOND: [u8; 16] = [2; 16];

/// The daemon's end of one connection.
struct Peer {
    stream: UnixStream,
    reader: FrameReader,
    boot: [u8; 16],
}

impl Peer {
    /// The next engine that connects, served by this run of the daemon.
    fn accept(listener: &UnixListener, boot: [u8; 16]) -> Self {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream, reader: FrameReader::default(), boot }
    }

    /// The next request; None when the engine has hung up.
    fn next(&mut self) -> Option<v1::Request> {
        loop {
            if let Some(request) = self.reader.next_message().unwrap() {
                return Some(request);
            }
            let mut received = [0; 4096];
            match self.stream.read(&mut received).unwrap() {
                0 => return None,
                count => self.reader.push(&received[..count]),
            }
        }
    }

    /// The next request has to be this one; its id is given.
    fn hears(&mut self, line: &str) -> u64 {
        let Some(v1::Request { id, body: Some(ask) }) = self.next() else {
            panic!("the engine hung up instead of: {line}");
        };
        assert_eq!(told(&ask), line);
        id
    }

    fn says(&mut self, id: u64, answer: Answer) {
        let reply = v1::Reply { id, boot_id: self.boot.to_vec().into(), body: Some(answer) };
        self.stream.write_all(&encode_frame(&reply)).unwrap();
    }

    /// The pool's descriptor comes with the answer.
    fn says_with_pool(&mut self, id: u64, pool: &Arena, writable: bool) {
        let described = v1::PoolDescriptor { bytes: POOL_BYTES, page_size: "4 kB".into() };
        let body = Some(Answer::PoolDescriptor(described));
        let frame = encode_frame(&v1::Reply { id, boot_id: self.boot.to_vec().into(), body });
        let descriptor = pool.descriptor(writable).unwrap();
        let sent = send_with_fds(&self.stream, &frame, &[descriptor.as_fd()]).unwrap();
        assert_eq!(sent, frame.len());
    }

    fn refuses(&mut self, id: u64, reason: Reason, sentence: &str) {
        self.says(id, Answer::Refused(v1::Refused { reason: reason.into(), sentence: sentence.into() }));
    }

    fn is_done(&mut self, id: u64) {
        self.says(id, Answer::Done(v1::Done::default()));
    }

    fn welcomes(&mut self, hello: &str) {
        let id = self.hears(hello);
        let (version, pool_bytes) = ("0.1.0".into(), POOL_BYTES);
        self.says(id, Answer::Welcome(v1::Welcome { wire: 1, version, session_id: 5, pool_bytes }));
    }

    /// From the greeting on, until the engine is open. Live leases and what is cancelled are as told.
    fn opens(&mut self, leases: &str, cancelled_below: u64, ready: bool) {
        self.welcomes(&format!("Hello wire 1-4 of talk, Scheduler of e, leases {leases}"));
        let id = self.hears(&format!(
            "OpenEngine of 2 workers, cancelled below {cancelled_below}: 0303 full of 16 tokens, window 0; \
             0404 sliding of 16 tokens, window 1"
        ));
        self.says(id, Answer::EngineOpened(v1::EngineOpened { ready }));
    }

    /// A worker, from the greeting until its pool is mapped.
    fn registers(&mut self, method: Method, pool: &Arena) {
        self.welcomes("Hello wire 1-4 of talk, Worker of e, leases []");
        let name = method.as_str_name();
        let id = self.hears(&format!("RegisterWorker 0 of 1 by {name}, with a fence: 0303 0505 1 regions"));
        let reason = "the test says so".into();
        self.says(id, Answer::WorkerRegistered(v1::WorkerRegistered { method: method.into(), reason }));
        let writable = method == Method::Mapped;
        let id = self.hears(&format!("MapPool writable {writable}"));
        self.says_with_pool(id, pool, writable);
        let id = self.hears("PoolMapped");
        self.is_done(id);
    }

    fn takes_leave(&mut self) {
        let id = self.hears("Bye");
        self.is_done(id);
        assert!(self.next().is_none(), "nothing follows a goodbye");
    }
}

/// A request by kind and fields, but for ids and what differs from run to run.
fn told(ask: &Ask) -> String {
    match ask {
        Ask::Hello(hello) => {
            assert_eq!(hello.process_nonce.len(), 16);
            format!(
                "Hello wire {}-{} of {}, {:?} of {}, leases {:?}",
                hello.wire_min,
                hello.wire_max,
                hello.client,
                hello.role(),
                hello.engine_id,
                hello.live_leases
            )
        }
        Ask::OpenEngine(open) => {
            let group = |group: &v1::Group| {
                format!(
                    "{} {} of {} tokens, window {}",
                    short(&group.namespace),
                    group.name,
                    group.tokens_per_block,
                    group.window_blocks
                )
            };
            let groups: Vec<_> = open.groups.iter().map(group).collect();
            let (workers, below) = (open.workers, open.cancelled_below);
            format!("OpenEngine of {workers} workers, cancelled below {below}: {}", groups.join("; "))
        }
        Ask::Lookup(lookup) => {
            let group = |group: &v1::LookupGroup| format!("{}: {}", group.group, group.hashes.len() / 16);
            let groups: Vec<_> = lookup.groups.iter().map(group).collect();
            let (tokens, may_wait) = (lookup.max_tokens, lookup.may_wait);
            format!("Lookup up to {tokens} tokens, may wait {may_wait}: {}", groups.join("; "))
        }
        Ask::Release(release) => format!("Release {:?}", release.leases),
        Ask::Heartbeat(heartbeat) => format!("Heartbeat {:?}", heartbeat.live_leases),
        Ask::CancelSaves(cancel) => {
            assert!(u128::from(cancel.timeout_ms) <= PATIENCE.as_millis());
            format!("CancelSaves below {}", cancel.below_job)
        }
        Ask::RegisterWorker(register) => {
            assert!(register.gpu.is_none());
            let group = |group: &v1::WorkerGroup| {
                assert!(group.slices.is_empty());
                let (namespace, layout) = (short(&group.namespace), short(&group.layout));
                format!("{namespace} {layout} {} regions", group.regions.len())
            };
            let groups: Vec<_> = register.groups.iter().map(group).collect();
            let fence = if register.fence_address == 0 { "without" } else { "with" };
            let (rank, workers, method) = (register.rank, register.workers, register.method().as_str_name());
            format!("RegisterWorker {rank} of {workers} by {method}, {fence} a fence: {}", groups.join("; "))
        }
        Ask::MapPool(map) => format!("MapPool writable {}", map.writable),
        Ask::PoolMapped(_) => "PoolMapped".into(),
        Ask::Save(save) => {
            let (job, epoch, groups) = (save.job, save.epoch, saved(&save.groups));
            format!("Save {job} in epoch {epoch} after {:?}: {groups}", save.event)
        }
        Ask::Claim(claim) => format!("Claim {}: {}", claim.job, saved(&claim.groups)),
        Ask::Commit(commit) => format!("Commit {} written {}", commit.claim, commit.written),
        Ask::Bye(_) => "Bye".into(),
        other => panic!("nobody asks this here: {other:?}"),
    }
}

fn saved(groups: &[v1::SaveGroup]) -> String {
    let group = |group: &v1::SaveGroup| {
        let (parent, hashes) = (short(&group.parent), group.hashes.len() / 16);
        format!("{} after {parent:?}, {hashes} hashes of blocks {:?}", group.group, group.block_ids)
    };
    groups.iter().map(group).collect::<Vec<_>>().join("; ")
}

/// Enough of a name to tell it from others.
fn short(name: &Bytes) -> String {
    name.iter().take(2).map(|byte| format!("{byte:02x}")).collect()
}

fn hashes(count: u8) -> Vec<BlockHash> {
    (1..=count).map(|n| BlockHash([n; 16])).collect()
}

/// Plays the daemon in a thread, while the engine does what is given; panics of either fail the test.
fn play(daemon: impl FnOnce(UnixListener) + Send, engine: impl FnOnce(&Address)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kvlane.sock");
    let listener = UnixListener::bind(&path).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || daemon(listener));
        engine(&Address::Unix(path));
    });
}

fn heard(signal: &Receiver<()>) {
    signal.recv_timeout(PATIENCE).unwrap();
}

// ---------------------------------------------------------------------------------------------------------------- scheduler

fn scheduler(address: &Address) -> Scheduler {
    let group = |namespace, name: &str, window_blocks| GroupSpec {
        namespace: [namespace; 16],
        name: name.into(),
        tokens_per_block: 16,
        window_blocks,
        crosses_hosts: false,
    };
    Scheduler::new(SchedulerOptions {
        address: address.clone(),
        daemon_user: DaemonUser::default(),
        engine_id: "e".into(),
        client: "talk".into(),
        groups: vec![group(3, "full", 0), group(4, "sliding", 1)],
        workers: 2,
        lookup_timeout: PATIENCE,
        follows_journal: false,
    })
    .unwrap()
}

/// Two blocks of each group, of three that are stored.
fn hit(lease: u64) -> Answer {
    let group = |group, first_block: u32| v1::HitGroup {
        group,
        first_block: first_block.into(),
        pages: (first_block * 2..4).flat_map(u32::to_le_bytes).collect(),
        workers: 2,
        stored_blocks: 3,
    };
    let groups = vec![group(0, 0), group(1, 1)];
    Answer::LookupResult(v1::LookupResult { tokens: 32, lease, groups, ready: true, is_recorded: false })
}

fn miss() -> Answer {
    Answer::LookupResult(v1::LookupResult { ready: true, ..Default::default() })
}

const LOOKUP: &str = "Lookup up to 47 tokens, may wait true: 0: 3; 1: 3";

fn ask(scheduler: &mut Scheduler, request: &str) {
    scheduler.lookup_start(&LookupRequest::named(request), &[hashes(3), hashes(3)], 47, None, 0);
}

fn answer(scheduler: &mut Scheduler, request: &str) -> Hit {
    scheduler.lookup_poll(request, PATIENCE).unwrap()
}

/// Ticks as an engine does, until that is so.
fn tick_until(scheduler: &mut Scheduler, mut so: impl FnMut(&Scheduler) -> bool) {
    let start = Instant::now();
    loop {
        scheduler.tick();
        if so(scheduler) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "it does not come to that");
        thread::yield_now();
    }
}

/// Ticks until the daemon's script has come so far.
fn tick_until_heard(scheduler: &mut Scheduler, signal: &Receiver<()>) {
    tick_until(scheduler, |_| match signal.recv_timeout(Duration::from_millis(1)) {
        Ok(()) => true,
        Err(RecvTimeoutError::Timeout) => false,
        Err(RecvTimeoutError::Disconnected) => panic!("the daemon's script ended early"),
    });
}

#[test]
fn a_scheduler_asks_leases_cancels_and_reconnects_in_this_order() {
    let (given_up, forgotten) = channel();
    let (gives_back, was_given_back) = channel();
    let (cut_now, cut) = channel();
    play(
        move |listener| {
            let mut peer = Peer::accept(&listener, FIRST);
            peer.opens("[]", 0, false);
            let id = peer.hears("Lookup up to 0 tokens, may wait false: 0: 0; 1: 0");
            peer.says(id, miss());
            let id = peer.hears(LOOKUP);
            peer.says(id, hit(7));
            let id = peer.hears(LOOKUP);
            peer.says(id, Answer::LookupPending(v1::LookupPending { wait_ms: 5000 }));
            peer.says(id, miss());
            let id = peer.hears(LOOKUP);
            peer.refuses(id, Reason::Limit, "too many lookups");
            let id = peer.hears(LOOKUP);
            heard(&forgotten);
            peer.says(id, hit(9));
            peer.hears("Release [9]");
            gives_back.send(()).unwrap();
            let id = peer.hears("CancelSaves below 5");
            peer.is_done(id);
            let id = peer.hears("CancelSaves below 6");
            peer.refuses(id, Reason::Cancelled, "they go on");
            peer.hears(LOOKUP);
            drop(peer);

            let mut peer = Peer::accept(&listener, SECOND);
            peer.opens("[7]", 6, true);
            let id = peer.hears(LOOKUP);
            peer.says(id, hit(11));
            heard(&cut);
            drop(peer);

            let mut peer = Peer::accept(&listener, SECOND);
            peer.opens("[11]", 6, true);
            peer.hears("Release [11]");
            let id = peer.hears("CancelSaves below 8");
            peer.is_done(id);
            peer.takes_leave();
        },
        |address| {
            let mut scheduler = scheduler(address);
            assert!(scheduler.is_connected() && scheduler.boot() == Some(FIRST));
            tick_until(&mut scheduler, Scheduler::is_ready);

            ask(&mut scheduler, "a hit");
            let found = answer(&mut scheduler, "a hit");
            assert_eq!((found.tokens, found.lease, found.boot), (32, 7, FIRST));
            assert_eq!(found.groups().collect::<Vec<_>>(), [(0, 0), (1, 1)]);
            assert_eq!(
                (found.stored_blocks(0), found.pages(1, kvlane_block::Rank(1))),
                (3, 3u32.to_le_bytes().to_vec())
            );
            ask(&mut scheduler, "a miss after a while");
            assert_eq!(answer(&mut scheduler, "a miss after a while").tokens, 0);
            ask(&mut scheduler, "refused");
            assert_eq!(answer(&mut scheduler, "refused").tokens, 0);
            assert_eq!(scheduler.last_refusal(), Some("too many lookups"));
            ask(&mut scheduler, "given up");
            scheduler.forget("given up");
            assert_eq!(answer(&mut scheduler, "given up").tokens, 0);
            given_up.send(()).unwrap();
            tick_until_heard(&mut scheduler, &was_given_back);
            assert!(scheduler.cancel_saves(5, PATIENCE));
            assert!(!scheduler.cancel_saves(6, PATIENCE));

            ask(&mut scheduler, "cut");
            assert_eq!(answer(&mut scheduler, "cut").tokens, 0, "the daemon hung up");
            let of_the_first = scheduler.take_stats();
            let counted = (of_the_first.hits, of_the_first.misses, of_the_first.timeouts);
            assert_eq!((of_the_first.lookups, counted), (5, (1, 2, 0)));
            assert_eq!((of_the_first.connects, of_the_first.losses), (1, 1));
            assert_eq!((scheduler.boot(), scheduler.gone().collect::<Vec<_>>()), (None, vec![FIRST]));

            tick_until(&mut scheduler, Scheduler::is_connected);
            assert_eq!((scheduler.boot(), scheduler.last_refusal()), (Some(SECOND), None));
            // Nobody there knows of it.
            scheduler.release(FIRST, 7);
            ask(&mut scheduler, "of the second run");
            assert_eq!(answer(&mut scheduler, "of the second run").lease, 11);
            cut_now.send(()).unwrap();
            tick_until(&mut scheduler, |scheduler| !scheduler.is_connected());
            assert_eq!(scheduler.gone().collect::<Vec<_>>(), [FIRST, SECOND]);
            tick_until(&mut scheduler, Scheduler::is_connected);
            assert_eq!(scheduler.gone().collect::<Vec<_>>(), [FIRST], "it is back");
            scheduler.release(SECOND, 11);
            // The process of the first run, which is this one, lives and may still read.
            assert!(!scheduler.cancel_saves(8, PATIENCE));
            scheduler.close();
            assert!(scheduler.boot().is_none());
        },
    );
}

#[test]
fn after_a_lookup_in_vain_none_is_asked_until_the_daemon_speaks_and_its_late_hit_is_given_back() {
    let (in_vain, miss_told) = channel();
    let (speaks, has_spoken) = channel();
    play(
        move |listener| {
            let mut peer = Peer::accept(&listener, FIRST);
            peer.opens("[]", 0, true);
            let id = peer.hears(LOOKUP);
            peer.hears("Heartbeat []");
            heard(&miss_told);
            peer.says(id, hit(13));
            peer.hears("Release [13]");
            speaks.send(()).unwrap();
            let id = peer.hears(LOOKUP);
            peer.says(id, hit(14));
            peer.hears("Release [14]");
            peer.takes_leave();
        },
        |address| {
            let mut scheduler = scheduler(address);
            let prompt = [hashes(3), hashes(3)];
            assert_eq!(scheduler.lookup(&prompt, 47, Duration::from_millis(50)).tokens, 0);
            assert_eq!(scheduler.lookup(&prompt, 47, PATIENCE).tokens, 0, "not asked at all");
            let stats = scheduler.take_stats();
            assert_eq!((stats.timeouts, stats.unavailable), (1, 1));
            in_vain.send(()).unwrap();
            tick_until_heard(&mut scheduler, &has_spoken);
            let hit = scheduler.lookup(&prompt, 47, PATIENCE);
            assert_eq!(hit.lease, 14);
            scheduler.release(hit.boot, hit.lease);
            scheduler.close();
        },
    );
}

#[test]
fn a_scheduler_that_is_refused_comes_again() {
    play(
        |listener| {
            let mut peer = Peer::accept(&listener, FIRST);
            let id = peer.hears("Hello wire 1-4 of talk, Scheduler of e, leases []");
            peer.refuses(id, Reason::Limit, "no session is left");
            assert!(peer.next().is_none());
            let mut peer = Peer::accept(&listener, FIRST);
            peer.welcomes("Hello wire 1-4 of talk, Scheduler of e, leases []");
            let v1::Request { id, body: Some(Ask::OpenEngine(_)) } = peer.next().unwrap() else {
                panic!("it opens the engine");
            };
            peer.refuses(id, Reason::Conflict, "another engine has that name");
            assert!(peer.next().is_none());
            let mut peer = Peer::accept(&listener, FIRST);
            peer.opens("[]", 0, true);
            peer.takes_leave();
        },
        |address| {
            let mut scheduler = scheduler(address);
            assert_eq!((scheduler.boot(), scheduler.last_refusal()), (None, Some("no session is left")));
            let conflict = Some("another engine has that name");
            tick_until(&mut scheduler, |scheduler| scheduler.last_refusal() == conflict);
            tick_until(&mut scheduler, Scheduler::is_connected);
            assert_eq!(scheduler.last_refusal(), None);
            scheduler.close();
        },
    );
}

// ------------------------------------------------------------------------------------------------------------------- worker

const BLOCKS: usize = 8;

/// A worker, and the memory of its blocks: block n is full of n + 1.
struct Rank {
    worker: Worker,
    memory: Vec<u8>,
}

impl Rank {
    fn start(address: &Address, save_method: SaveMethod, save_timeout: Duration) -> Self {
        let memory: Vec<u8> = (0..BLOCKS * BLOCK).map(|at| (at / BLOCK + 1) as u8).collect();
        let region = Region {
            base: memory.as_ptr() as u64,
            block_stride: BLOCK as u64,
            blocks: BLOCKS as u64,
            piece_bytes: BLOCK as u64,
            piece_offsets: vec![0],
        };
        let group =
            WorkerGroupSpec { namespace: [3; 16], layout: [5; 16], regions: vec![region], replicas: 1 };
        // SAFETY: the memory is a Vec that is never resized and lives beside the worker, which is closed before.
        let blocks = unsafe { OwnBlocks::new(vec![group], None) };
        let options = WorkerOptions {
            address: address.clone(),
            daemon_user: DaemonUser::default(),
            engine_id: "e".into(),
            client: "talk".into(),
            rank: kvlane_block::Rank(0),
            workers: 1,
            blocks,
            save_method,
            save_timeout,
            release_ahead: kvlane_client::ReleaseAhead::default(),
        };
        let worker = Worker::start(options).unwrap();
        Self { worker, memory }
    }

    fn save(&self, job: u64, block_ids: &[u32]) {
        let hashes = hashes(block_ids.len() as u8 + 1)[1..].to_vec();
        let parent = Some(BlockHash([1; 16]));
        let group = SaveGroupSpec {
            group: 0,
            parent,
            hashes,
            block_ids: block_ids.iter().map(|id| BlockId(*id)).collect(),
        };
        self.worker.save(job, vec![group]);
    }

    fn load(&self, job: u64, boot: [u8; 16], block: u32, page: u32) {
        let group = LoadGroup { group: 0, block_ids: vec![BlockId(block)], pages: vec![PoolPage(page)] };
        self.worker.load(job, boot, vec![group]);
    }

    /// The one end that there is.
    fn end(&self, job: u64) -> Finished {
        assert!(self.worker.wait(PATIENCE));
        let mut ends = self.worker.poll();
        assert_eq!((ends.len(), ends[0].job), (1, job));
        ends.remove(0)
    }

    fn fails(&self, job: u64, why: &str) {
        let end = self.end(job);
        assert!(!end.ok && end.blocks == 0 && end.detail == why, "{end:?}");
    }

    fn wait_for_loss(&self) {
        let start = Instant::now();
        while self.worker.is_connected() {
            assert!(start.elapsed() < PATIENCE);
            thread::yield_now();
        }
    }

    fn wait_registered(&self) {
        let start = Instant::now();
        // It returns at once while the last news is a refusal, such as that nobody answers.
        while !self.worker.wait_registered(PATIENCE) {
            assert!(start.elapsed() < PATIENCE);
        }
    }
}

fn pool() -> Arena {
    let (hugepages, numa) = (HugePages::Off, Numa::Off);
    Arena::create(&ArenaOptions { bytes: POOL_BYTES, hugepages, numa, threads: 1 }, &|_| {}).unwrap()
}

fn page_holds(pool: &Arena, page: u64, byte: u8) -> bool {
    // SAFETY: the page is in the pool, and the worker that writes it has told that it is done.
    unsafe { pool.bytes_at(PoolOffset(page * BLOCK as u64), BLOCK as u64) }.iter().all(|found| *found == byte)
}

/// 0 is a block that is claimed, at the page of the same place; others are as the wire numbers them.
fn claimed(outcome: &'static [u8], pages: &[u32], claim: u64) -> Answer {
    let pages = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    Answer::ClaimResult(v1::ClaimResult { outcome: Bytes::from_static(outcome), pages, claim })
}

const CLAIM: &str = "after \"0101\", 2 hashes of blocks [2, 3]";

#[test]
fn a_worker_that_writes_by_itself_claims_writes_and_commits() {
    let (pool, second_pool) = (pool(), pool());
    let (of_daemon, of_second) = (&pool, &second_pool);
    let (cut_now, cut) = channel();
    play(
        move |listener| {
            let mut peer = Peer::accept(&listener, FIRST);
            peer.registers(Method::Mapped, of_daemon);
            let id = peer.hears(&format!("Claim 1: 0 {CLAIM}"));
            peer.says(id, claimed(&[0, 1], &[20, 0], 41));
            let id = peer.hears("Commit 41 written true");
            assert!(page_holds(of_daemon, 20, 3), "what is committed is written");
            peer.is_done(id);
            let id = peer.hears(&format!("Claim 2: 0 {CLAIM}"));
            peer.refuses(id, Reason::Cancelled, "that save is cancelled");
            let id = peer.hears(&format!("Claim 3: 0 {CLAIM}"));
            peer.says(id, claimed(&[3], &[0], 43));
            let id = peer.hears("Commit 43 written false");
            peer.is_done(id);
            heard(&cut);
            peer.hears(&format!("Claim 5: 0 {CLAIM}"));
            drop(peer);

            let mut peer = Peer::accept(&listener, SECOND);
            peer.registers(Method::Mapped, of_second);
            let id = peer.hears(&format!("Claim 8: 0 {CLAIM}"));
            peer.says(id, claimed(&[2, 3], &[0, 0], 48));
            let id = peer.hears("Commit 48 written true");
            peer.is_done(id);
            peer.takes_leave();
        },
        |address| {
            let mut rank = Rank::start(address, SaveMethod::Mapped, PATIENCE);
            assert!(rank.worker.is_connected());
            assert_eq!(rank.worker.method(), ("mapped".into(), "the test says so".into()));
            rank.save(1, &[2, 3]);
            let saved = rank.end(1);
            assert!(saved.ok && saved.kind == JobKind::Save && saved.detail.is_empty(), "{saved:?}");
            assert_eq!((saved.blocks, saved.present, saved.bytes), (1, 1, BLOCK as u64));
            rank.save(2, &[2, 3]);
            rank.fails(2, "that save is cancelled");
            rank.save(3, &[2, 3]);
            rank.fails(3, "the daemon answered for fewer blocks than asked");

            // Nobody is asked for a load.
            rank.load(4, FIRST, 7, 20);
            let loaded = rank.end(4);
            assert!(loaded.ok && loaded.kind == JobKind::Load, "{loaded:?}");
            assert_eq!((loaded.blocks, loaded.bytes), (1, BLOCK as u64));
            assert!(rank.memory[7 * BLOCK..].iter().all(|byte| *byte == 3));

            cut_now.send(()).unwrap();
            rank.save(5, &[2, 3]);
            rank.fails(5, "the daemon went away");
            rank.wait_for_loss();
            rank.wait_registered();
            // The pool of the first run is still there, and that of the second is another.
            rank.load(6, FIRST, 6, 20);
            assert!(rank.end(6).ok);
            assert!(rank.memory[6 * BLOCK..7 * BLOCK].iter().all(|byte| *byte == 3));
            rank.load(7, [9; 16], 5, 20);
            rank.fails(7, "the pool of that boot is not mapped");
            rank.save(8, &[2, 3]);
            let present = rank.end(8);
            assert!(present.ok && (present.blocks, present.present) == (0, 1), "{present:?}");
            rank.worker.close();
            let stats = rank.worker.take_stats();
            assert_eq!((stats.connects, stats.losses, stats.save_timeouts), (2, 1, 0));
        },
    );
}

#[test]
fn a_claim_that_is_granted_after_the_worker_gave_it_up_is_handed_back() {
    let (in_vain, failure_told) = channel();
    let (hands_back, was_handed_back) = channel();
    let pool = pool();
    let of_daemon = &pool;
    play(
        move |listener| {
            let mut peer = Peer::accept(&listener, FIRST);
            peer.registers(Method::Mapped, of_daemon);
            let id = peer.hears(&format!("Claim 1: 0 {CLAIM}"));
            heard(&failure_told);
            peer.says(id, claimed(&[0, 0], &[20, 21], 41));
            let id = peer.hears("Commit 41 written false");
            assert!(page_holds(of_daemon, 20, 0), "nothing was written");
            peer.is_done(id);
            hands_back.send(()).unwrap();
            peer.takes_leave();
        },
        |address| {
            let mut rank = Rank::start(address, SaveMethod::Mapped, Duration::from_millis(50));
            rank.save(1, &[2, 3]);
            rank.fails(1, "the daemon did not answer in time");
            rank.save(2, &[2, 3]);
            rank.fails(2, "no kvlane daemon");
            assert_eq!(rank.worker.take_stats().save_timeouts, 1);
            in_vain.send(()).unwrap();
            heard(&was_handed_back);
            rank.worker.close();
        },
    );
}

#[test]
fn a_worker_whose_daemon_copies_names_the_fence_that_holds() {
    let (pool, (cut_now, cut)) = (pool(), channel());
    let of_daemon = &pool;
    play(
        move |listener| {
            let mut peer = Peer::accept(&listener, FIRST);
            peer.registers(Method::ProcessVm, of_daemon);
            let id = peer.hears(&format!("Save 1 in epoch 1 after None: 0 {CLAIM}"));
            let (saved, present, in_flight, bytes) = (2, 1, 1, 2 * BLOCK as u64);
            let done = v1::SaveResult { saved, present, in_flight, no_room: 0, failed: 0, bytes };
            peer.says(id, Answer::SaveResult(done));
            let id = peer.hears(&format!("Save 2 in epoch 1 after None: 0 {CLAIM}"));
            peer.says(id, Answer::SaveResult(v1::SaveResult { failed: 2, ..v1::SaveResult::default() }));
            heard(&cut);
            drop(peer);

            let mut peer = Peer::accept(&listener, FIRST);
            peer.registers(Method::ProcessVm, of_daemon);
            let id = peer.hears(&format!("Save 3 in epoch 2 after None: 0 {CLAIM}"));
            peer.refuses(id, Reason::Limit, "too many saves");
            peer.takes_leave();
        },
        |address| {
            let mut rank = Rank::start(address, SaveMethod::ProcessVm, PATIENCE);
            rank.save(1, &[2, 3]);
            let saved = rank.end(1);
            assert!(saved.ok && saved.detail.is_empty(), "{saved:?}");
            assert_eq!((saved.blocks, saved.present, saved.bytes), (2, 2, 2 * BLOCK as u64));
            rank.save(2, &[2, 3]);
            rank.fails(2, "the copy failed or was cancelled");
            cut_now.send(()).unwrap();
            rank.wait_for_loss();
            rank.wait_registered();
            rank.save(3, &[2, 3]);
            rank.fails(3, "too many saves");
            assert_eq!(rank.worker.refusal(), "too many saves");
            rank.worker.close();
        },
    );
}
