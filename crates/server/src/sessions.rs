//! All sessions: those that are connected, and those in limbo, whose connection was lost and whose process lives.
//!
//! ```text
//!   live ---- Bye, process exited, or a tool --------------------------> gone: claims and leases freed
//!     |                                                                   ^
//!     +--- connection lost, process alive --> limbo -- process exited ----+
//!                                               '---- same nonce greets again: the new session replaces it
//! ```
//! A process in limbo may still copy from or into the mapped pool, so its claims and leases stay as they are.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use kvlane_memory::pidfd_exited;
use kvlane_proto::v1::hello::Role;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use thiserror::Error;

use crate::{engines::SessionId, peer::Stream};

/// Describes a session, for the log and the status page.
#[derive(Debug, Clone)]
pub(crate) struct Info {
    /// Empty for a tool.
    pub(crate) engine_id: String,
    pub(crate) role: Role,
    /// 0 for a session over TCP.
    pub(crate) pid: u32,
    /// Name and version of the client, in its own words.
    pub(crate) client: String,
    /// How a worker's saves travel. Empty before it registers.
    pub(crate) method: String,
    /// Why they travel so.
    pub(crate) reason: String,
}

/// The role's name in logs, metrics and status.
pub(crate) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Tool => "tool",
        Role::Scheduler => "scheduler",
        Role::Worker => "worker",
    }
}

#[derive(Debug)]
struct Entry {
    info: Info,
    nonce: [u8; 16],
    /// `None` in limbo.
    stream: Option<Stream>,
    /// None for a session over TCP.
    pidfd: Option<OwnedFd>,
    last_heard_ms: Arc<AtomicU64>,
}

#[derive(Debug)]
pub(crate) struct Sessions {
    entries: Mutex<HashMap<SessionId, Entry>>,
    /// Notified when a session ends or goes into limbo.
    changed: Condvar,
    next: AtomicU64,
    /// Most sessions over the Unix socket, limbo included.
    max: usize,
    /// Connections with a thread, greeted or not.
    connections: AtomicUsize,
    /// How many [`Busy`] there are.
    busy: Mutex<usize>,
    /// Notified when `busy` falls to 0.
    idle: Condvar,
    /// An epoll descriptor over the pidfds of all sessions, and `wake`.
    exits: OwnedFd,
    /// An eventfd that ends `wait_for_exits`.
    wake: OwnedFd,
    started: Instant,
}

/// Epoll data of `wake`. Session ids count from 1.
const WAKE: u64 = 0;
/// The longest wait for exits. Between two waits the reaper expires claims.
const EXITS_WAIT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// Connections beyond the sessions, for those that have not said Hello yet and those that are being refused.
const NOT_GREETED_MAX: usize = 64;

/// Why there is no room for another connection or session.
#[derive(Debug, Error)]
pub(crate) enum NoCapacity {
    #[error("{0} connections are open, the most that --max-sessions allows")]
    Connections(usize),
    #[error("{0} sessions are open, the most that --max-sessions allows")]
    Sessions(usize),
    #[error("cannot watch process {pid}: {error}")]
    Watch { pid: u32, error: io::Error },
}

/// A connection that is being served.
pub(crate) struct Connected(Arc<Sessions>);

impl Connected {
    /// Counts a connection, or returns why there is no room.
    pub(crate) fn new(sessions: &Arc<Sessions>) -> Result<Self, NoCapacity> {
        let (open, most) = (&sessions.connections, sessions.max + NOT_GREETED_MAX);
        // Counted first. `Drop` takes it back if there is no room.
        let (before, connected) = (open.fetch_add(1, Ordering::Relaxed), Self(Arc::clone(sessions)));
        if before >= most {
            return Err(NoCapacity::Connections(before));
        }
        Ok(connected)
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A call in progress, which a stopping daemon waits for.
pub(crate) struct Busy(Arc<Sessions>);

impl Busy {
    pub(crate) fn new(sessions: &Arc<Sessions>) -> Self {
        *sessions.busy.lock() += 1;
        Self(Arc::clone(sessions))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut busy = self.0.busy.lock();
        *busy -= 1;
        if *busy == 0 {
            self.0.idle.notify_all();
        }
    }
}

impl Sessions {
    pub(crate) fn new(max: usize) -> io::Result<Self> {
        let exits = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&exits, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Self {
            entries: Mutex::default(),
            changed: Condvar::new(),
            next: AtomicU64::new(WAKE + 1),
            max,
            connections: AtomicUsize::new(0),
            busy: Mutex::new(0),
            idle: Condvar::new(),
            exits,
            wake,
            started: Instant::now(),
        })
    }

    /// Adds a session, or returns why there is no room.
    pub(crate) fn add(
        &self,
        info: Info,
        nonce: [u8; 16],
        stream: Stream,
        pidfd: Option<OwnedFd>,
        last_heard_ms: Arc<AtomicU64>,
    ) -> Result<SessionId, NoCapacity> {
        let mut entries = self.entries.lock();
        // Drawn under the lock: a session with a higher id greeted later, which `take_former` relies on.
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        // Sessions that this one is going to replace do not count, nor do those over TCP, which have slots of their own.
        let is_other = |e: &&Entry| e.pidfd.is_some() && !(e.nonce == nonce && e.info.role == info.role);
        let others = entries.values().filter(is_other).count();
        if pidfd.is_some() && others >= self.max {
            return Err(NoCapacity::Sessions(others));
        }
        if let Some(pidfd) = &pidfd {
            let event = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
            epoll::add(&self.exits, pidfd, epoll::EventData::new_u64(id), event)
                .map_err(|error| NoCapacity::Watch { pid: info.pid, error: error.into() })?;
        }
        entries.insert(id, Entry { info, nonce, stream: Some(stream), pidfd, last_heard_ms });
        Ok(id)
    }

    /// Cuts off the sessions of the same process and role that are older than `newer`, waits for their threads, and removes
    /// them. Returns their ids and engines. If two sessions call it at once, only the newer one waits for the other.
    pub(crate) fn take_former(
        &self,
        nonce: &[u8; 16],
        role: Role,
        newer: SessionId,
    ) -> Vec<(SessionId, String)> {
        let mut entries = self.entries.lock();
        let same =
            |id: &SessionId, entry: &Entry| *id < newer && entry.nonce == *nonce && entry.info.role == role;
        entries
            .iter()
            .filter(|(id, e)| same(id, e))
            .filter_map(|(_, e)| e.stream.as_ref())
            .for_each(Stream::shutdown);
        // Their threads finish their calls, copies included, and then leave the entry in limbo.
        while entries.iter().any(|(id, e)| same(id, e) && e.stream.is_some()) {
            self.changed.wait(&mut entries);
        }
        entries
            .extract_if(|id, entry| same(id, entry))
            .map(|(id, entry)| (id, entry.info.engine_id))
            .collect()
    }

    /// Whether all of these are connected, and the scheduler is the process that drew this nonce.
    pub(crate) fn are_connected(
        &self,
        nonce: &[u8; 16],
        scheduler: SessionId,
        workers: &[SessionId],
    ) -> bool {
        let entries = self.entries.lock();
        let is_connected = |id: &SessionId| entries.get(id).is_some_and(|entry| entry.stream.is_some());
        entries.get(&scheduler).is_some_and(|entry| entry.nonce == *nonce)
            && is_connected(&scheduler)
            && workers.iter().all(is_connected)
    }

    /// Records how a worker's saves travel, for the status page.
    pub(crate) fn set_method(&self, id: SessionId, method: &str, reason: &str) {
        if let Some(entry) = self.entries.lock().get_mut(&id) {
            entry.info.method = method.into();
            entry.info.reason = reason.into();
        }
    }

    /// Called when the session's thread ends. True if its process can no longer touch the pool; else the session is in
    /// limbo.
    pub(crate) fn end(&self, id: SessionId, said_bye: bool) -> bool {
        let mut entries = self.entries.lock();
        self.changed.notify_all();
        let Some(entry) = entries.get_mut(&id) else { return false };
        entry.stream = None;
        let harmless = entry.info.role == Role::Tool || entry.pidfd.as_ref().is_none_or(pidfd_exited);
        if said_bye || harmless {
            entries.remove(&id);
            return true;
        }
        false
    }

    /// All sessions: id, description, milliseconds since the last request, and whether it is in limbo.
    pub(crate) fn list(&self) -> Vec<(SessionId, Info, u64, bool)> {
        let now = self.now_ms();
        let entries = self.entries.lock();
        let mut all: Vec<_> = entries
            .iter()
            .map(|(id, e)| {
                let silent = now.saturating_sub(e.last_heard_ms.load(Ordering::Relaxed));
                (*id, e.info.clone(), silent, e.stream.is_none())
            })
            .collect();
        all.sort_by_key(|(id, ..)| *id);
        all
    }

    /// Milliseconds since the daemon started, for `last_heard_ms`.
    pub(crate) fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Waits until no call is in progress. False at the timeout.
    pub(crate) fn drain(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut busy = self.busy.lock();
        while *busy > 0 {
            if self.idle.wait_until(&mut busy, deadline).timed_out() {
                return false;
            }
        }
        true
    }

    /// Cuts all connections, and wakes the reaper so that it ends.
    pub(crate) fn close_all(&self) {
        self.entries.lock().values().filter_map(|entry| entry.stream.as_ref()).for_each(Stream::shutdown);
        // A full counter means that the reaper is awake already.
        let _ = rustix::io::write(self.wake.as_fd(), &1u64.to_ne_bytes());
    }

    /// Called when the session's process has exited. Returns a session that was in limbo and is gone now; one that is
    /// connected is cut off and ends by its thread.
    pub(crate) fn process_exited(&self, id: SessionId) -> Option<Info> {
        let mut entries = self.entries.lock();
        let entry = entries.get(&id)?;
        if let Some(stream) = &entry.stream {
            // A child may still hold the socket open: the session's thread would wait for ever.
            stream.shutdown();
            return None;
        }
        entries.remove(&id).map(|entry| entry.info)
    }

    /// Waits until processes of sessions have exited, up to `EXITS_WAIT`, or until all connections are cut. Returns the
    /// sessions of those processes.
    pub(crate) fn wait_for_exits(&self) -> Vec<SessionId> {
        let mut events =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
        let count = epoll::wait(&self.exits, &mut events, Some(&EXITS_WAIT)).unwrap_or(0);
        events[..count].iter().map(|event| event.data.u64()).collect()
    }
}
