//! The scheduler's side of an engine: feeds its [link](crate::links::scheduler) from the caller's thread and carries its
//! actions out. No call blocks longer than it says.

use std::{
    collections::VecDeque,
    io,
    time::{Duration, Instant},
};

use bytes::Bytes;
use kvlane_block::BlockHash;
use kvlane_memory::random;
use kvlane_proto::{Address, v1};

use crate::{
    boot::BootId,
    connection::{Connection, poll_for},
    daemon_user::DaemonUser,
    group_spec::GroupSpec,
    hand_off::HandOff,
    hit::Hit,
    links::{
        ids::ConnectionId,
        scheduler::{
            BlockChanges, LookupState, SchedulerAction, SchedulerEvent, SchedulerLink, SchedulerLinkOptions,
            SchedulerStats,
        },
        standing::log_notice,
    },
    processes::Processes,
};

/// How long a new scheduler waits for its engine to be opened.
const FIRST_OPENING: Duration = Duration::from_secs(3);
/// Hashes that one lookup sends, over all groups: those of a longer prompt are left away.
const HASHES_MAX: usize = 3 << 20;

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
    /// The index of a group in this list is its number everywhere.
    pub groups: Vec<GroupSpec>,
    /// Number of the engine's workers.
    pub workers: u32,
    /// A lookup that takes longer is a miss, but for the time that the daemon says it needs: to bring blocks from its SSD, or
    /// for what another engine saves.
    pub lookup_timeout: Duration,
    /// The daemon is asked which blocks come and go, for [`Scheduler::take_changes`].
    pub follows_journal: bool,
}

/// The scheduler's side of an engine.
#[derive(Debug)]
pub struct Scheduler {
    address: Address,
    daemon_user: DaemonUser,
    lookup_timeout: Duration,
    link: SchedulerLink,
    /// What the link wants done; empty between calls.
    actions: VecDeque<SchedulerAction>,
    connection: Option<(ConnectionId, Connection)>,
    /// Of daemons, whose ends the link waits for.
    processes: Processes,
}

impl Scheduler {
    /// Starts to connect; without a daemon it keeps trying. Where one answers, waits up to three seconds for it to open
    /// the engine, so that the first request can already hit.
    ///
    /// # Errors
    /// The kernel gives no random bytes for this process's nonce.
    pub fn new(options: SchedulerOptions) -> io::Result<Self> {
        let start = Instant::now();
        let link_options = SchedulerLinkOptions {
            address: options.address.clone(),
            engine_id: options.engine_id,
            client: options.client,
            nonce: random()?,
            groups: options.groups,
            workers: options.workers,
            lookup_timeout: options.lookup_timeout,
            follows_journal: options.follows_journal,
        };
        let mut scheduler = Self {
            address: options.address,
            daemon_user: options.daemon_user,
            lookup_timeout: options.lookup_timeout,
            link: SchedulerLink::new(link_options, start),
            actions: VecDeque::new(),
            connection: None,
            processes: Processes::default(),
        };
        loop {
            scheduler.advance(Instant::now());
            let left = FIRST_OPENING.saturating_sub(start.elapsed());
            if !scheduler.link.is_opening() || left.is_zero() {
                return Ok(scheduler);
            }
            scheduler.wait(left);
        }
    }

    /// The daemon greeted us and opened the engine.
    pub fn is_connected(&self) -> bool {
        self.link.is_connected()
    }

    /// The last answer said that all workers of the engine have mapped the pool.
    pub fn is_ready(&self) -> bool {
        self.link.is_ready()
    }

    /// The daemon's run, once connected.
    pub fn boot(&self) -> Option<BootId> {
        self.link.boot()
    }

    /// Boots that this was connected to and is no more, the last eight. A hit of one must not be promised.
    pub fn gone(&self) -> impl Iterator<Item = BootId> + '_ {
        self.link.gone()
    }

    /// Those of [`gone`](Self::gone) that this never comes back to, since their processes have ended: workers let a pool go once
    /// they are told ([`Promises`](crate::Promises)).
    pub fn over(&self) -> impl Iterator<Item = BootId> + '_ {
        self.link.over()
    }

    /// Where the daemon is looked for.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Names this scheduler to the daemon over all its connections; drawn when it was made. Other engines' lookups name it
    /// in a [`HandOff`].
    pub fn run(&self) -> [u8; 16] {
        self.link.nonce()
    }

    /// The name of the engine.
    pub fn engine_id(&self) -> &str {
        self.link.engine_id()
    }

    /// Asks for a prefix. `hashes` has one list per group; `max_tokens` bounds the answer. With a hand-off the daemon waits
    /// for what that engine saves before it answers.
    pub fn lookup_start(
        &mut self,
        request: &str,
        hashes: &[Vec<BlockHash>],
        max_tokens: u64,
        hand_off: Option<HandOff>,
    ) {
        // Who waits that long for blocks does not give up earlier because the daemon is busy.
        let wait = hand_off.as_ref().map_or(Duration::ZERO, HandOff::wait);
        self.look_up(request, hashes, max_tokens, hand_off, self.lookup_timeout.max(wait));
    }

    /// The answer to a lookup, which the caller then owns with its lease; `None` while it is pending. Waits up to
    /// `wait` for it. A lookup that was never asked, timed out, or met no daemon is a miss.
    pub fn lookup_poll(&mut self, request: &str, wait: Duration) -> Option<Hit> {
        let start = Instant::now();
        let mut now = start;
        loop {
            self.advance(now);
            let until = match self.link.poll_lookup(request, now) {
                LookupState::Over(hit) => return Some(hit),
                LookupState::Pending { until } => until,
            };
            let left = wait.saturating_sub(now.duration_since(start));
            let left = left.min(until.saturating_duration_since(now));
            if left.is_zero() {
                return None;
            }
            self.wait(left);
            now = Instant::now();
        }
    }

    /// Asks and waits up to `timeout`.
    pub fn lookup(&mut self, hashes: &[Vec<BlockHash>], max_tokens: u64, timeout: Duration) -> Hit {
        const REQUEST: &str = "\0lookup";
        self.look_up(REQUEST, hashes, max_tokens, None, timeout);
        self.lookup_poll(REQUEST, timeout).unwrap_or_else(|| {
            self.forget(REQUEST);
            Hit::default()
        })
    }

    /// Drops a lookup that was not consumed; its lease is given back, now or when it comes.
    pub fn forget(&mut self, request: &str) {
        self.feed(SchedulerEvent::Forget { request: request.to_owned() }, Instant::now());
    }

    /// Gives a lease back. One of another boot is gone already.
    pub fn release(&mut self, boot: BootId, lease: u64) {
        self.feed(SchedulerEvent::Release { boot, lease }, Instant::now());
    }

    /// Once a step: reconnects when due, sends what waits, takes answers, renews leases.
    pub fn tick(&mut self) {
        let now = Instant::now();
        // Of the daemon that it is connected to, the connection tells. Looking would cost each step a system call.
        if self.connection.is_none() || self.link.awaits_an_end() {
            self.look_for_ends(now);
        }
        self.advance(now);
    }

    /// No save of the engine below this job may become a block any more, unless it is complete. True when the daemon reads its
    /// blocks for none of them, and takes none of them from a worker that writes by itself: then they may be overwritten. Waits
    /// for the daemon until the timeout. Whatever the answer is, a save
    /// that is not complete by now may end without effect.
    pub fn cancel_saves(&mut self, below_job: u64, timeout: Duration) -> bool {
        let mut now = Instant::now();
        let until = now + timeout;
        self.advance(now);
        self.feed(SchedulerEvent::CancelSaves { below: below_job, until }, now);
        loop {
            self.look_for_ends(now);
            self.advance(now);
            if let Some(answer) = self.link.cancelled(now) {
                return answer;
            }
            let wake_at = self.link.wake_at().map_or(until, |at| at.min(until));
            self.wait_for_anybody(wake_at.saturating_duration_since(now));
            now = Instant::now();
        }
    }

    /// Blocks that came and went since the last call, 4,096 at most, where the options ask for it. A call of
    /// [`tick`](Self::tick) fetches more once these are taken.
    pub fn take_changes(&mut self) -> BlockChanges {
        self.link.take_changes()
    }

    /// Counters since the last call.
    pub fn take_stats(&mut self) -> SchedulerStats {
        self.link.take_stats()
    }

    /// Why the daemon refused the last time, or is a stranger's, until it opens the engine.
    pub fn last_refusal(&self) -> Option<&str> {
        self.link.refusal()
    }

    /// Says goodbye and waits until the daemon has freed what this process held, at most a second. Nothing reconnects after
    /// it.
    pub fn close(&mut self) {
        let mut now = Instant::now();
        self.feed(SchedulerEvent::Close, now);
        while !self.link.is_over() {
            let wake_at = self.link.wake_at().unwrap_or(now);
            self.wait(wake_at.saturating_duration_since(now));
            now = Instant::now();
            self.advance(now);
        }
    }

    fn look_up(
        &mut self,
        request: &str,
        hashes: &[Vec<BlockHash>],
        max_tokens: u64,
        hand_off: Option<HandOff>,
        timeout: Duration,
    ) {
        // One moment for both: a probe that this sends must not count as silence because a long prompt takes time to encode.
        let now = Instant::now();
        self.advance(now);
        let groups = hashes.iter().enumerate().map(|(group, of_group)| {
            let sent = of_group.len().min(HASHES_MAX / hashes.len());
            v1::LookupGroup { group: group as u32, hashes: concatenate(&of_group[..sent]) }
        });
        let groups = groups.collect();
        let request = request.to_owned();
        let event = SchedulerEvent::LookUp { request, groups, max_tokens, hand_off, timeout };
        self.feed(event, now);
    }

    /// One turn: takes what has arrived, then lets timers run.
    fn advance(&mut self, now: Instant) {
        while let Some((connection, open)) = &mut self.connection {
            let connection = *connection;
            match open.flush().and_then(|()| open.receive()) {
                Ok(Some(reply)) => self.feed(SchedulerEvent::Reply { connection, reply }, now),
                Ok(None) => break,
                Err(lost) => {
                    self.connection = None;
                    self.feed(SchedulerEvent::Lost { connection, why: lost.to_string() }, now);
                }
            }
        }
        self.feed(SchedulerEvent::Tick, now);
    }

    /// Tells the link which daemons have ended.
    fn look_for_ends(&mut self, now: Instant) {
        for process in self.processes.take_ended() {
            self.feed(SchedulerEvent::ProcessEnded(process), now);
        }
    }

    /// Hands an event in and carries out what follows, which may be further events.
    fn feed(&mut self, event: SchedulerEvent, now: Instant) {
        self.link.handle(event, now, &mut self.actions);
        while let Some(action) = self.actions.pop_front() {
            if let Some(event) = self.carry_out(action) {
                self.link.handle(event, now, &mut self.actions);
            }
        }
    }

    fn carry_out(&mut self, action: SchedulerAction) -> Option<SchedulerEvent> {
        match action {
            SchedulerAction::Connect(connection) => Some(self.connect(connection)),
            SchedulerAction::Send { connection, request } => {
                let (_, open) = self.connection.as_mut().filter(|(id, _)| *id == connection)?;
                let lost = open.send(&request).err()?;
                self.connection = None;
                Some(SchedulerEvent::Lost { connection, why: lost.to_string() })
            }
            SchedulerAction::Close(connection) => {
                self.connection.take_if(|(id, _)| *id == connection);
                None
            }
            SchedulerAction::Log(notice) => {
                log_notice(Some(notice));
                None
            }
        }
    }

    fn connect(&mut self, connection: ConnectionId) -> SchedulerEvent {
        let link = &self.link;
        self.processes.retain(|process| link.needs(process));
        match Connection::connect(&self.address, self.daemon_user) {
            Ok(open) => {
                let life = self.processes.watch(open.unix());
                self.connection = Some((connection, open));
                SchedulerEvent::Connected { connection, life }
            }
            Err(error) => SchedulerEvent::NotConnected { connection, why: error.into() },
        }
    }

    /// Waits until the daemon says something, at most that long.
    fn wait(&self, time: Duration) {
        if let Some((_, open)) = &self.connection {
            open.wait(time);
        }
    }

    /// Waits until the daemon says something or one of those that were left has ended, at most that long.
    fn wait_for_anybody(&self, time: Duration) {
        let present = self.connection.iter().map(|(_, open)| open.poll_fd());
        let mut watched: Vec<_> = present.chain(self.processes.poll_fds()).collect();
        poll_for(&mut watched, Some(time.max(Duration::from_millis(1))));
    }
}

fn concatenate(hashes: &[BlockHash]) -> Bytes {
    let mut all = vec![[0; 16]; hashes.len()];
    all.iter_mut().zip(hashes).for_each(|(to, hash)| *to = hash.0);
    all.into_flattened().into()
}
