//! The scheduler's connection: lookups and leases, without ever blocking the engine.
//!
//! ```text
//!          connect()              Welcome              EngineOpened
//!   Down -----------> Greeting -------------> Opening --------------> Open
//!    ^                   |                       |                     |
//!    +---- backoff ------+------ lost -----------+---------------------+
//! ```
//! Lookups asked while greeting or opening wait for it, within their own deadline; while down they are misses.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use bytes::Bytes;
use kvlane_block::BlockHash;
use kvlane_memory::{peer_pidfd, pidfd_exited};
use kvlane_proto::{Address, WIRE_MAX, WIRE_MIN, v1, v1::reply::Body as Answer, v1::request::Body as Ask};
use rustix::event::{PollFd, PollFlags};

use crate::{
    boot::BootId,
    connection::{ConnectError, Connection, Lost, poll_for},
    daemon_user::DaemonUser,
    hit::Hit,
    links::{
        backoff::Backoff,
        standing::{Standing, describe, tell},
    },
    nonce::random_nonce,
};

/// How long a new scheduler waits for its engine to be opened.
const FIRST_OPENING: Duration = Duration::from_secs(3);
/// How often leases in use are renewed. The daemon frees leases that a later heartbeat does not name, so this is
/// well below its lease time.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// How often the daemon is asked whether the workers are ready, until they are. Until then nothing is saved, and while no
/// new request comes no other answer tells.
const READY_PROBE: Duration = Duration::from_millis(20);
/// Lookups that wait for their answer; beyond it new ones are misses.
const PENDING_MAX: usize = 4096;
/// Longest time that a daemon may name for bringing blocks to RAM before it answers.
const FETCH_MAX: Duration = Duration::from_secs(60);
/// How long saves of a worker may last, and then some: longer than any save timeout.
const SAVES_END: Duration = Duration::from_secs(60);
/// Former boots that are remembered, for the workers.
const GONE_MAX: usize = 8;
/// Hashes that one lookup sends, over all groups: those of a longer prompt are left away.
const HASHES_MAX: usize = 3 << 20;

/// One KV cache group of the engine.
#[derive(Debug, Clone)]
pub struct GroupSpec {
    /// Digest of what the group's content means.
    pub namespace: [u8; 16],
    /// For people.
    pub name: String,
    /// Tokens that one block holds.
    pub tokens_per_block: u32,
    /// 0 when a hit needs the whole prefix, else how many blocks before its end.
    pub window_blocks: u32,
}

/// What a scheduler's connection needs to know.
#[derive(Debug, Clone)]
pub struct SchedulerOptions {
    /// The daemon's Unix socket.
    pub address: Address,
    /// Whose daemon it may be beside this user's and root's.
    pub daemon_user: DaemonUser,
    /// Name of the engine instance; its workers give the same.
    pub engine_id: String,
    /// Name and version for the daemon's logs.
    pub client: String,
    /// The engine's groups.
    pub groups: Vec<GroupSpec>,
    /// Number of the engine's workers.
    pub workers: u32,
    /// A lookup that takes longer is a miss, but for the time that the daemon says it needs to bring blocks from its SSD.
    pub lookup_timeout: Duration,
}

/// Counters since the last [`Scheduler::take_stats`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SchedulerStats {
    /// Lookups asked.
    pub lookups: u64,
    /// Lookups answered with at least one block.
    pub hits: u64,
    /// Lookups answered with nothing.
    pub misses: u64,
    /// Lookups that were misses because no answer came in time.
    pub timeouts: u64,
    /// Lookups that were misses because there is no connection.
    pub unavailable: u64,
    /// Connections opened.
    pub connects: u64,
    /// Connections lost.
    pub losses: u64,
    /// Seconds from asking to answer, over answered lookups.
    pub lookup_seconds: f64,
}

#[derive(Debug)]
enum Pending {
    /// Asked, or to be asked once the engine is open (`sent == None`).
    Waiting {
        sent: Option<u64>,
        ask: v1::Lookup,
        /// Without an answer by then it is a miss.
        until: Instant,
    },
    Answered(Hit),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Greeting,
    Opening,
    Open,
}

#[derive(Debug)]
struct Up {
    connection: Connection,
    last_request: u64,
    phase: Phase,
    boot: BootId,
    ready: bool,
    /// Unanswered lookups in the order they were sent. An entry without a name was given up.
    asked: BTreeMap<u64, Asked>,
    /// The last request to cancel saves, and whether the daemon has done so.
    cancelling: Option<(u64, Option<bool>)>,
    /// The daemon's; None where the kernel does not tell.
    process: Option<OwnedFd>,
    heartbeat_at: Instant,
    probe_at: Instant,
}

impl Up {
    fn send(&mut self, body: Ask) -> Result<u64, Lost> {
        self.last_request += 1;
        self.connection.send(&v1::Request { id: self.last_request, body: Some(body) })?;
        Ok(self.last_request)
    }

    fn cancelling_answered(&mut self, id: u64, done: bool) {
        if let Some((_, answer)) = self.cancelling.as_mut().filter(|(asked, _)| *asked == id) {
            *answer = Some(done);
        }
    }
}

/// A daemon that this was connected to and is no more. It may still read for saves as long as its process lives.
#[derive(Debug)]
struct Left {
    boot: BootId,
    at: Instant,
    /// None where the kernel does not tell.
    process: Option<OwnedFd>,
}

impl Left {
    /// Nothing of it can become a block of this engine's any more.
    fn is_over(&self) -> bool {
        match &self.process {
            Some(process) => pidfd_exited(process),
            None => self.at.elapsed() >= SAVES_END,
        }
    }
}

#[derive(Debug)]
struct Asked {
    request: Option<String>,
    since: Instant,
    /// Without an answer by then the daemon counts as silent.
    until: Instant,
}

/// The scheduler's side of an engine.
#[derive(Debug)]
pub struct Scheduler {
    options: SchedulerOptions,
    nonce: [u8; 16],
    backoff: Backoff,
    up: Option<Up>,
    pending: HashMap<String, Pending>,
    /// Boots that were connected to and are no more, the last one last.
    gone: VecDeque<BootId>,
    /// Their processes, as far as they may live.
    left: Vec<Left>,
    /// See [`Self::cancel_saves`].
    cancelled_below: u64,
    /// Leases handed to the caller or waiting to be consumed, by boot.
    leases: BTreeMap<BootId, BTreeSet<u64>>,
    stats: SchedulerStats,
    last_refusal: Option<String>,
    standing: Standing,
    /// What the last daemon said of itself, for the log.
    daemon: String,
}

impl Scheduler {
    /// Starts to connect; without a daemon it keeps trying. Where one answers, waits up to three seconds for it to open
    /// the engine, so that the first request can already hit.
    pub fn new(options: SchedulerOptions) -> Self {
        let now = Instant::now();
        let standing = Standing::new("the scheduler".into(), options.address.clone(), now);
        let mut scheduler = Self {
            options,
            nonce: random_nonce(),
            backoff: Backoff::new(now),
            up: None,
            pending: HashMap::new(),
            gone: VecDeque::new(),
            left: Vec::new(),
            cancelled_below: 0,
            leases: BTreeMap::new(),
            stats: SchedulerStats::default(),
            last_refusal: None,
            standing,
            daemon: String::new(),
        };
        while scheduler.up.is_some() || scheduler.backoff.is_due(Instant::now()) {
            scheduler.advance(Instant::now());
            let left = FIRST_OPENING.saturating_sub(now.elapsed());
            match &scheduler.up {
                Some(up) if up.phase != Phase::Open && !left.is_zero() => {
                    up.connection.wait(Some(left), None)
                }
                _ => break,
            }
        }
        scheduler
    }

    /// The daemon greeted us and opened the engine.
    pub fn is_connected(&self) -> bool {
        self.up.as_ref().is_some_and(|up| up.phase == Phase::Open)
    }

    /// The last answer said that all workers of the engine have mapped the pool.
    pub fn is_ready(&self) -> bool {
        self.up.as_ref().is_some_and(|up| up.ready)
    }

    /// The daemon's run, once connected.
    pub fn boot(&self) -> Option<BootId> {
        self.up.as_ref().filter(|up| up.phase != Phase::Greeting).map(|up| up.boot)
    }

    /// Boots that this was connected to and is no more, the last eight. A hit of one must not be promised: workers let its pool
    /// go once they are told ([`Promises`](crate::Promises)).
    pub fn gone(&self) -> impl Iterator<Item = BootId> + '_ {
        self.gone.iter().copied()
    }

    /// Where the daemon is looked for.
    pub fn address(&self) -> &Address {
        &self.options.address
    }

    /// Asks for a prefix. `hashes` has one list per group; `max_tokens` bounds the answer.
    pub fn lookup_start(&mut self, request: &str, hashes: &[Vec<BlockHash>], max_tokens: u64) {
        let now = Instant::now();
        self.forget(request);
        self.stats.lookups += 1;
        self.advance(now);
        if self.pending.len() >= PENDING_MAX || !self.may_ask(now) {
            self.stats.unavailable += 1;
            return;
        }
        let groups = hashes
            .iter()
            .enumerate()
            .map(|(group, of_group)| {
                let sent = of_group.len().min(HASHES_MAX / hashes.len());
                v1::LookupGroup { group: group as u32, hashes: concatenate(&of_group[..sent]) }
            })
            .collect();
        let ask = v1::Lookup { groups, max_tokens, may_wait: true };
        let until = now + self.options.lookup_timeout;
        self.pending.insert(request.to_owned(), Pending::Waiting { sent: None, ask, until });
        self.send_lookup(request);
    }

    /// The answer to a lookup, which the caller then owns with its lease; `None` while it is pending. Waits up to
    /// `wait` for it. A lookup that was never asked, timed out, or met no daemon is a miss.
    pub fn lookup_poll(&mut self, request: &str, wait: Duration) -> Option<Hit> {
        let start = Instant::now();
        let mut now = start;
        loop {
            self.advance(now);
            match self.pending.get(request) {
                None => return Some(Hit::default()),
                Some(Pending::Answered(_)) => {
                    let Some(Pending::Answered(hit)) = self.pending.remove(request) else { return None };
                    return Some(hit);
                }
                Some(Pending::Waiting { until, .. }) => {
                    if now >= *until {
                        self.stats.timeouts += 1;
                        self.forget(request);
                        return Some(Hit::default());
                    }
                    let left = wait.saturating_sub(now.duration_since(start));
                    let left = left.min(until.saturating_duration_since(now));
                    match &self.up {
                        Some(up) if !left.is_zero() => up.connection.wait(Some(left), None),
                        Some(_) => return None,
                        None => {
                            self.stats.unavailable += 1;
                            self.forget(request);
                            return Some(Hit::default());
                        }
                    }
                }
            }
            now = Instant::now();
        }
    }

    /// Asks and waits up to `timeout`.
    pub fn lookup(&mut self, hashes: &[Vec<BlockHash>], max_tokens: u64, timeout: Duration) -> Hit {
        const REQUEST: &str = "\0lookup";
        let usual = std::mem::replace(&mut self.options.lookup_timeout, timeout);
        self.lookup_start(REQUEST, hashes, max_tokens);
        let hit = self.lookup_poll(REQUEST, timeout).unwrap_or_default();
        self.forget(REQUEST);
        self.options.lookup_timeout = usual;
        hit
    }

    /// Drops a lookup that was not consumed; its lease is given back, now or when it comes.
    pub fn forget(&mut self, request: &str) {
        match self.pending.remove(request) {
            Some(Pending::Answered(hit)) if hit.tokens > 0 => self.release(hit.boot, hit.lease),
            Some(Pending::Waiting { sent: Some(id), .. }) => {
                if let Some(asked) = self.up.as_mut().and_then(|up| up.asked.get_mut(&id)) {
                    asked.request = None;
                }
            }
            _ => {}
        }
    }

    /// Gives a lease back. One of another boot is gone already.
    pub fn release(&mut self, boot: BootId, lease: u64) {
        if let Some(of_boot) = self.leases.get_mut(&boot) {
            of_boot.remove(&lease);
        }
        if self.boot() == Some(boot) {
            self.send(Ask::Release(v1::Release { leases: vec![lease] }));
        }
    }

    /// Once a step: reconnects when due, sends what waits, takes answers, renews leases.
    pub fn tick(&mut self) {
        self.advance(Instant::now());
    }

    /// No save of the engine below this job may become a block any more, unless it is complete. True when the daemon reads its
    /// blocks for none of them, and takes none of them from a worker that writes by itself: then they may be overwritten. Waits
    /// for the daemon until the timeout. Whatever the answer is, a save
    /// that is not complete by now may end without effect.
    pub fn cancel_saves(&mut self, below_job: u64, timeout: Duration) -> bool {
        self.cancelled_below = self.cancelled_below.max(below_job);
        let deadline = Instant::now() + timeout;
        if let Some(up) = &mut self.up {
            up.cancelling = None;
        }
        loop {
            self.advance(Instant::now());
            let now = Instant::now();
            let left = deadline.saturating_duration_since(now);
            let others_are_over = self.left.iter().all(Left::is_over);
            match &mut self.up {
                None if others_are_over => return true,
                Some(Up { cancelling: Some((_, Some(done))), .. }) => return *done && others_are_over,
                _ if left.is_zero() => return false,
                // A daemon that lives: it is connected to again, or ends.
                None => self.wait_for_an_end(left.min(self.backoff.until_due(now))),
                // While the engine is being opened, saves of a former connection may still be accepted.
                Some(up) if up.cancelling.is_none() && up.phase == Phase::Open => {
                    let timeout_ms = left.as_millis() as u32;
                    let asked = self.send(Ask::CancelSaves(v1::CancelSaves { below_job, timeout_ms }));
                    if let (Some(up), Some(id)) = (&mut self.up, asked) {
                        up.cancelling = Some((id, None));
                    }
                }
                Some(up) => up.connection.wait(Some(left), None),
            }
        }
    }

    /// Waits until one of the daemons that were left has ended, or the time is over.
    fn wait_for_an_end(&self, time: Duration) {
        let processes = self.left.iter().filter_map(|left| left.process.as_ref());
        let mut watched: Vec<PollFd<'_>> =
            processes.map(|process| PollFd::new(process, PollFlags::IN)).collect();
        poll_for(&mut watched, Some(time.max(Duration::from_millis(1))));
    }

    /// Counters since the last call.
    pub fn take_stats(&mut self) -> SchedulerStats {
        std::mem::take(&mut self.stats)
    }

    /// Says goodbye and waits until the daemon has freed what this process held, at most a second.
    pub fn close(&mut self) {
        if let Some(up) = self.up.take() {
            up.connection.say_goodbye(up.last_request + 1);
        }
        self.pending.clear();
        self.leases.clear();
        // No reconnecting after a goodbye.
        self.options.groups.clear();
    }

    fn advance(&mut self, now: Instant) {
        self.connect_if_due(now);
        loop {
            let Some(up) = &mut self.up else { return };
            match up.connection.flush().and_then(|()| up.connection.receive()) {
                Ok(Some(reply)) => self.take_reply(reply, now),
                Ok(None) => break,
                Err(lost) => return self.lose(&lost, now),
            }
        }
        self.heartbeat_if_due(now);
        self.probe_if_due(now);
    }

    fn connect_if_due(&mut self, now: Instant) {
        if self.up.is_some() || self.options.groups.is_empty() || !self.backoff.is_due(now) {
            return;
        }
        let mut connection = match Connection::connect(&self.options.address, self.options.daemon_user) {
            Ok(connection) => connection,
            Err(error @ (ConnectError::Folder(_) | ConnectError::Stranger { .. })) => {
                let sentence = error.to_string();
                tell(self.standing.refused(&sentence, now));
                self.last_refusal = Some(sentence);
                return self.backoff.failed(now);
            }
            Err(error) => {
                tell(self.standing.absent(&error.to_string()));
                return self.backoff.failed(now);
            }
        };
        // Which boot answers is not known yet; leases of other boots mean nothing to it.
        let live_leases = self.leases.values().flatten().copied().collect();
        let hello = v1::Hello {
            wire_min: WIRE_MIN,
            wire_max: WIRE_MAX,
            client: self.options.client.clone(),
            role: v1::hello::Role::Scheduler.into(),
            engine_id: self.options.engine_id.clone(),
            process_nonce: Bytes::copy_from_slice(&self.nonce),
            live_leases,
        };
        let hello = v1::Request { id: 1, body: Some(Ask::Hello(hello)) };
        if connection.send(&hello).is_err() {
            return self.backoff.failed(now);
        }
        self.up = Some(Up {
            connection,
            last_request: hello.id,
            phase: Phase::Greeting,
            boot: [0; 16],
            ready: false,
            asked: BTreeMap::new(),
            cancelling: None,
            process: None,
            heartbeat_at: now + HEARTBEAT,
            probe_at: now,
        });
    }

    fn take_reply(&mut self, reply: v1::Reply, now: Instant) {
        let Some(up) = &mut self.up else { return };
        let boot: BootId = reply.boot_id.as_ref().try_into().unwrap_or_default();
        match reply.body {
            Some(Answer::Welcome(welcome)) => {
                self.daemon = describe(&welcome);
                up.process = up.connection.unix().and_then(|stream| peer_pidfd(stream).ok());
                up.boot = boot;
                up.phase = Phase::Opening;
                self.gone.retain(|of| *of != boot);
                self.left.retain(|left| left.boot != boot && !left.is_over());
                // A lease of another boot died with that daemon.
                self.leases.retain(|of, _| *of == boot);
                let groups = self
                    .options
                    .groups
                    .iter()
                    .map(|g| v1::Group {
                        namespace: Bytes::copy_from_slice(&g.namespace),
                        name: g.name.clone(),
                        tokens_per_block: g.tokens_per_block,
                        window_blocks: g.window_blocks,
                    })
                    .collect();
                let (workers, cancelled_below) = (self.options.workers, self.cancelled_below);
                self.send(Ask::OpenEngine(v1::OpenEngine { groups, workers, cancelled_below }));
            }
            Some(Answer::EngineOpened(opened)) => {
                up.phase = Phase::Open;
                up.ready = opened.ready;
                self.backoff.succeeded();
                self.stats.connects += 1;
                self.last_refusal = None;
                tell(self.standing.connected(&self.daemon, now));
                let waiting: Vec<String> = self.pending.keys().cloned().collect();
                waiting.iter().for_each(|request| self.send_lookup(request));
            }
            Some(Answer::LookupResult(result)) => {
                up.ready = result.ready;
                let asked = up.asked.remove(&reply.id);
                self.take_lookup(asked, Hit::from_reply(boot, result), now);
            }
            Some(Answer::LookupPending(pending)) => {
                let Some(asked) = up.asked.get_mut(&reply.id) else { return };
                let wait = Duration::from_millis(pending.wait_ms.into()).min(FETCH_MAX);
                asked.until = now + wait + self.options.lookup_timeout;
                let waiting = asked.request.as_ref().and_then(|request| self.pending.get_mut(request));
                if let Some(Pending::Waiting { sent, until, .. }) = waiting
                    && *sent == Some(reply.id)
                {
                    *until = asked.until;
                }
            }
            Some(Answer::Done(_)) => up.cancelling_answered(reply.id, true),
            Some(Answer::Refused(refused)) => {
                up.cancelling_answered(reply.id, false);
                let asked = up.asked.remove(&reply.id);
                let phase = up.phase;
                let is_new = self.last_refusal.as_ref() != Some(&refused.sentence);
                if phase == Phase::Open && is_new {
                    let (address, sentence) = (&self.options.address, &refused.sentence);
                    tracing::warn!("kvlane: the daemon at {address} refused a request: {sentence}");
                }
                self.last_refusal = Some(refused.sentence.clone());
                if asked.is_some() {
                    self.take_lookup(asked, Hit::default(), now);
                } else if phase != Phase::Open {
                    tell(self.standing.refused(&refused.sentence, now));
                    self.leave();
                    self.backoff.failed(now);
                }
            }
            _ => {}
        }
    }

    fn take_lookup(&mut self, asked: Option<Asked>, hit: Hit, now: Instant) {
        let Some(asked) = asked else { return };
        if hit.tokens > 0 {
            self.leases.entry(hit.boot).or_default().insert(hit.lease);
        }
        let Some(request) = asked.request else {
            // Given up meanwhile.
            if hit.tokens > 0 {
                self.release(hit.boot, hit.lease);
            }
            return;
        };
        self.stats.lookup_seconds += now.duration_since(asked.since).as_secs_f64();
        if hit.tokens > 0 {
            self.stats.hits += 1;
        } else {
            self.stats.misses += 1;
        }
        self.pending.insert(request, Pending::Answered(hit));
    }

    /// Whether an answer is to be expected: connected or connecting, and not silent.
    fn may_ask(&self, now: Instant) -> bool {
        let Some(up) = &self.up else { return false };
        up.asked.values().all(|asked| now < asked.until)
    }

    fn send_lookup(&mut self, request: &str) {
        if !self.is_connected() {
            return;
        }
        let Some(Pending::Waiting { sent: sent @ None, ask, until }) = self.pending.get_mut(request) else {
            return;
        };
        let Some(up) = &mut self.up else { return };
        match up.send(Ask::Lookup(std::mem::take(ask))) {
            Ok(id) => {
                *sent = Some(id);
                let asked = Asked { request: Some(request.to_owned()), since: Instant::now(), until: *until };
                up.asked.insert(id, asked);
            }
            Err(lost) => self.lose(&lost, Instant::now()),
        }
    }

    fn send(&mut self, ask: Ask) -> Option<u64> {
        let up = self.up.as_mut()?;
        match up.send(ask) {
            Ok(id) => Some(id),
            Err(lost) => {
                self.lose(&lost, Instant::now());
                None
            }
        }
    }

    fn heartbeat_if_due(&mut self, now: Instant) {
        let Some(up) = &mut self.up else { return };
        if up.phase != Phase::Open || now < up.heartbeat_at {
            return;
        }
        up.heartbeat_at = now + HEARTBEAT;
        let live_leases = self.leases.values().flatten().copied().collect();
        self.send(Ask::Heartbeat(v1::Heartbeat { live_leases }));
    }

    /// Looks up nothing, to hear whether the workers are ready.
    fn probe_if_due(&mut self, now: Instant) {
        let groups = self.options.groups.len() as u32;
        let Some(up) = &mut self.up else { return };
        // Any answer that is still to come tells it too.
        if up.phase != Phase::Open || up.ready || !up.asked.is_empty() || now < up.probe_at {
            return;
        }
        up.probe_at = now + READY_PROBE;
        let nothing = |group| v1::LookupGroup { group, hashes: Bytes::new() };
        let ask = v1::Lookup { groups: (0..groups).map(nothing).collect(), max_tokens: 0, may_wait: false };
        if let Some(id) = self.send(Ask::Lookup(ask))
            && let Some(up) = &mut self.up
        {
            let until = now + self.options.lookup_timeout;
            up.asked.insert(id, Asked { request: None, since: now, until });
        }
    }

    fn lose(&mut self, lost: &Lost, now: Instant) {
        tell(if self.is_connected() {
            self.standing.lost(&lost.to_string(), now)
        } else {
            self.standing.broken_off(&lost.to_string())
        });
        self.leave();
        self.stats.losses += 1;
        self.backoff.failed(now);
        // What was asked will not be answered, and what was answered is of a run that is over.
        self.pending.clear();
    }

    /// The connection is over, and with it what this boot has answered.
    fn leave(&mut self) {
        if let (Some(boot), Some(up)) = (self.boot(), &mut self.up) {
            let process = up.process.take();
            self.left.retain(|left| !left.is_over());
            self.left.push(Left { boot, at: Instant::now(), process });
            self.gone.push_back(boot);
            if self.gone.len() > GONE_MAX {
                self.gone.pop_front();
            }
        }
        self.up = None;
    }

    /// Why the daemon refused the last time, or is a stranger's, until it opens the engine.
    pub fn last_refusal(&self) -> Option<&str> {
        self.last_refusal.as_deref()
    }
}

fn concatenate(hashes: &[BlockHash]) -> Bytes {
    let mut all = vec![[0; 16]; hashes.len()];
    all.iter_mut().zip(hashes).for_each(|(to, hash)| *to = hash.0);
    all.into_flattened().into()
}
