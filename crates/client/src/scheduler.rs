//! The scheduler's handle: drives its [link](crate::links::scheduler) in the caller's thread. No call blocks longer than it
//! says.

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
    awaited_save::AwaitedSave,
    boot::BootId,
    connection::{Connection, poll_for},
    daemon_user::DaemonUser,
    group_spec::GroupSpec,
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
/// Most hashes of one lookup, over all groups, so that it fits into a frame. Further hashes of a longer prompt are not sent.
const HASHES_MAX: usize = 3 << 20;

/// Arguments of [`Scheduler::new`].
#[derive(Debug, Clone)]
pub struct SchedulerOptions {
    /// The daemon's address.
    pub address: Address,
    /// A user whose daemon is trusted beside this user's and root's.
    pub daemon_user: DaemonUser,
    /// Name of the engine instance; its workers use the same.
    pub engine_id: String,
    /// Name and version for the daemon's logs.
    pub client: String,
    /// The index of a group in this list is its number everywhere.
    pub groups: Vec<GroupSpec>,
    /// Number of the engine's workers.
    pub workers: u32,
    /// A lookup that takes longer is a miss. The daemon may extend it, to fetch blocks from its SSD, or to wait for another
    /// engine's saves.
    pub lookup_timeout: Duration,
    /// Whether to read the daemon's journal, for [`Scheduler::take_changes`].
    pub follows_journal: bool,
}

/// The scheduler's connection to the daemon.
#[derive(Debug)]
pub struct Scheduler {
    address: Address,
    daemon_user: DaemonUser,
    lookup_timeout: Duration,
    link: SchedulerLink,
    /// Returned by the link, and not carried out yet; empty between calls.
    actions: VecDeque<SchedulerAction>,
    connection: Option<(ConnectionId, Connection)>,
    /// Daemons whose ends the link waits for.
    processes: Processes,
}

/// The request that looks up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LookupRequest<'a> {
    /// The engine's name of the lookup.
    pub name: &'a str,
    /// The request's number in recordings; 0 for none.
    pub number: u64,
    /// Recordings leave this lookup out.
    pub again: bool,
    /// The `traceparent` that the request came with; empty if none.
    pub traceparent: &'a str,
}

impl<'a> LookupRequest<'a> {
    /// A request of this name, which is neither recorded nor traced.
    pub fn named(name: &'a str) -> Self {
        Self { name, ..Self::default() }
    }
}

impl Scheduler {
    /// Starts to connect; without a daemon it keeps trying. If a daemon answers, waits up to three seconds until it has opened
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

    /// The daemon has welcomed this process and opened the engine.
    pub fn is_connected(&self) -> bool {
        self.link.is_connected()
    }

    /// The last answer said that all workers of the engine have mapped the pool.
    pub fn is_ready(&self) -> bool {
        self.link.is_ready()
    }

    /// Somebody records the daemon's requests, so their ends are worth [reporting](Self::requests_ended).
    pub fn is_recorded(&self) -> bool {
        self.link.is_recorded()
    }

    /// The daemon's run, once connected.
    pub fn boot(&self) -> Option<BootId> {
        self.link.boot()
    }

    /// Size of the daemon's pool in bytes; 0 while not connected.
    pub fn pool_bytes(&self) -> u64 {
        self.link.pool_bytes()
    }

    /// Boots that this scheduler has left, the last eight. The caller must not promise a hit of one.
    pub fn gone(&self) -> impl Iterator<Item = BootId> + '_ {
        self.link.gone()
    }

    /// Boots in [`gone`](Self::gone) that this scheduler cannot come back to, because their processes have ended. Workers unmap
    /// a boot's pool once a step names it ([`Promises`](crate::Promises)).
    pub fn over(&self) -> impl Iterator<Item = BootId> + '_ {
        self.link.over()
    }

    /// The daemon's address, as in the options.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Identifies this scheduler to the daemon over all its connections; drawn at random by [`new`](Self::new). Other engines'
    /// lookups name it in an [`AwaitedSave`].
    pub fn run(&self) -> [u8; 16] {
        self.link.nonce()
    }

    /// As in the options.
    pub fn engine_id(&self) -> &str {
        self.link.engine_id()
    }

    /// Starts to look up a prefix. `hashes` has one list per group; `max_tokens` bounds the answer. With an awaited save the
    /// daemon waits for it before it answers. It fetches nothing that would come later than an engine that computes
    /// `tokens_per_s` could have computed it; 0 if that is not known.
    pub fn lookup_start(
        &mut self,
        request: &LookupRequest<'_>,
        hashes: &[Vec<BlockHash>],
        max_tokens: u64,
        awaited_save: Option<AwaitedSave>,
        tokens_per_s: u32,
    ) {
        // A lookup that waits for saves must not time out earlier because the daemon is busy.
        let wait = awaited_save.as_ref().map_or(Duration::ZERO, AwaitedSave::wait);
        let timeout = self.lookup_timeout.max(wait);
        self.look_up(request, hashes, max_tokens, (awaited_save, tokens_per_s), timeout);
    }

    /// The answer to a lookup, which the caller then owns with its lease; `None` while it is pending. Waits up to `wait` for
    /// it. A lookup that was never started, timed out, or found no daemon is a miss.
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

    /// Looks a prefix up, and waits for the answer up to `timeout`.
    pub fn lookup(&mut self, hashes: &[Vec<BlockHash>], max_tokens: u64, timeout: Duration) -> Hit {
        const REQUEST: &str = "\0lookup";
        self.look_up(&LookupRequest::named(REQUEST), hashes, max_tokens, (None, 0), timeout);
        self.lookup_poll(REQUEST, timeout).unwrap_or_else(|| {
            self.forget(REQUEST);
            Hit::default()
        })
    }

    /// Drops a lookup whose answer was not taken. Its lease is released, now or when the answer comes.
    pub fn forget(&mut self, request: &str) {
        self.feed(SchedulerEvent::Forget { request: request.to_owned() }, Instant::now());
    }

    /// Releases a lease. A lease of another boot ended with that boot.
    pub fn release(&mut self, boot: BootId, lease: u64) {
        self.feed(SchedulerEvent::Release { boot, lease }, Instant::now());
    }

    /// To be called once a step: reconnects when due, sends buffered requests, takes answers, renews leases.
    pub fn tick(&mut self) {
        let now = Instant::now();
        // The end of the connected daemon shows on its connection. Polling its process too would cost each step a system call.
        if self.connection.is_none() || self.link.awaits_an_end() {
            self.poll_processes(now);
        }
        self.advance(now);
    }

    /// Cancels all saves of the engine below this job that are not complete; they may end without effect in any case. True if
    /// no daemon reads the engine's blocks for them, or accepts one of them from a worker that writes by itself: then the blocks
    /// may be overwritten. Waits for the daemon up to the timeout.
    pub fn cancel_saves(&mut self, below_job: u64, timeout: Duration) -> bool {
        let mut now = Instant::now();
        let until = now + timeout;
        self.advance(now);
        self.feed(SchedulerEvent::CancelSaves { below: below_job, until }, now);
        loop {
            self.poll_processes(now);
            self.advance(now);
            if let Some(answer) = self.link.cancelled(now) {
                return answer;
            }
            let wake_at = self.link.wake_at().map_or(until, |at| at.min(until));
            self.wait_for_daemons(wake_at.saturating_duration_since(now));
            now = Instant::now();
        }
    }

    /// Reports requests that ended, if somebody records them.
    pub fn requests_ended(&mut self, requests: Vec<v1::EndedRequest>) {
        let now = Instant::now();
        self.advance(now);
        self.feed(SchedulerEvent::RequestsEnded(requests), now);
    }

    /// Blocks that became visible or went since the last call, at most 4,096; none if the options do not ask for them.
    /// [`tick`](Self::tick) fetches more once these are taken.
    pub fn take_changes(&mut self) -> BlockChanges {
        self.link.take_changes()
    }

    /// Counters since the last call.
    pub fn take_stats(&mut self) -> SchedulerStats {
        self.link.take_stats()
    }

    /// Why the daemon refused the last time, or belongs to another user; None again once it opens the engine.
    pub fn last_refusal(&self) -> Option<&str> {
        self.link.refusal()
    }

    /// Says goodbye and waits until the daemon has freed what this process held, at most a second. The scheduler does not
    /// reconnect after it.
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
        request: &LookupRequest<'_>,
        hashes: &[Vec<BlockHash>],
        max_tokens: u64,
        (awaited_save, tokens_per_s): (Option<AwaitedSave>, u32),
        timeout: Duration,
    ) {
        // One time for both events, because encoding a long prompt takes a while: a probe that `advance` sends must not count as
        // unanswered for that long.
        let now = Instant::now();
        self.advance(now);
        let groups = hashes.iter().enumerate().map(|(group, of_group)| {
            let sent = of_group.len().min(HASHES_MAX / hashes.len());
            v1::LookupGroup { group: group as u32, hashes: concatenate(&of_group[..sent]) }
        });
        let groups = groups.collect();
        let event = SchedulerEvent::LookUp {
            request: request.name.to_owned(),
            number: request.number,
            again: request.again,
            traceparent: request.traceparent.to_owned(),
            groups,
            max_tokens,
            awaited_save,
            tokens_per_s,
            timeout,
        };
        self.feed(event, now);
    }

    /// One turn: feeds what has arrived, then `Tick`.
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

    /// Feeds the ends of daemons' processes.
    fn poll_processes(&mut self, now: Instant) {
        for process in self.processes.take_ended() {
            self.feed(SchedulerEvent::ProcessEnded(process), now);
        }
    }

    /// Feeds an event, and carries out the actions that follow, which may cause further events.
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

    /// Waits until the connection is ready, at most that long.
    fn wait(&self, time: Duration) {
        if let Some((_, open)) = &self.connection {
            open.wait(time);
        }
    }

    /// Waits until the connection is ready or a watched daemon has ended, at most that long.
    fn wait_for_daemons(&self, time: Duration) {
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
