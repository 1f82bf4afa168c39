//! One connection: reads requests, answers each, and cleans up after itself.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind, Read},
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use kvlane_block::{BlockHash, LayoutDigest, Namespace, Region, parse_hashes, shard_bytes};
use kvlane_memory::{DESCRIPTORS_MAX, ProcessVm, own_user_is_unclear, recv_with_fds};
use kvlane_proto::{
    FrameReader, MAX_FRAME_BYTES, WIRE_MAX, WIRE_MIN, negotiate,
    v1::{
        self, hello::Role, refused::Reason, register_worker::Method, reply::Body as Answer,
        request::Body as Ask,
    },
};
use kvlane_store::{LeaseId, LookupGroup, OwnerId, WriterId};

use crate::{
    Shared,
    calls::{
        late::{Late, LateLookups},
        load,
        save_thread::SaveThread,
        saver::{Granted, Saver},
    },
    chunks::SharedChunks,
    engines::{GroupSpec, OpenGroup, SessionId, WorkerGroup},
    gpu::GpuMemory,
    metrics::Call,
    peer::{Peer, Stream, refuse_user},
    refusal_log,
    replies::Replies,
    save_pace::Pace,
    sessions::{Busy, Connected, Info, settle_session},
    slots::Slot,
    status,
    worker_memory::WorkerMemory,
};

const READ_BYTES: usize = 64 << 10;
/// A process of the daemon's user that does not say Hello for so long is cut off.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for who has proven nothing: whoever comes over TCP, and other users.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(2);
/// Over TCP the next request has to be there so long after the last answer.
const TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest message of who has proven nothing.
const STRANGER_FRAME_BYTES: usize = 4096;
/// Connections over TCP at the same time, apart from --max-sessions.
pub(crate) const TCP_CONNECTIONS_MAX: usize = 16;
/// Longest engine id and client name, in bytes.
const NAME_BYTES_MAX: usize = 512;
/// Bytes of pages in one answer; a longer prefix is answered in part.
const PAGES_BYTES_MAX: usize = 32 << 20;
/// A peer that does not take its answers for so long is cut off.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Descriptors that may have come before their requests are handled: those of a request and of the next.
const DESCRIPTORS_PENDING_MAX: usize = 2 * DESCRIPTORS_MAX;
/// Longest time that an engine may wait for its saves to be given up.
const CANCEL_TIMEOUT_MAX: Duration = Duration::from_secs(10);
/// Claims that a mapped worker may hold without committing them.
const CLAIMS_MAX: usize = 4096;

/// A refusal: why, and the sentence.
pub(crate) type Refusal = (Reason, String);

/// Serves a connection in a thread of its own.
pub(crate) fn start(stream: Stream, shared: Arc<Shared>) {
    let connected = match &stream {
        // Without room it is closed.
        Stream::Tcp(_) => match shared.tcp_slots.take() {
            Some(slot) => Place::Tcp(slot),
            None => return,
        },
        Stream::Unix(_) => match Connected::new(&shared) {
            Ok(connected) => Place::Unix(connected),
            Err(sentence) => return tracing::warn!("a connection was closed: {sentence}"),
        },
    };
    let spawned =
        std::thread::Builder::new().name("kvlane-session".into()).stack_size(512 << 10).spawn(move || {
            let peer = match stream.peer() {
                Ok(peer) => peer,
                Err(error) => return tracing::warn!(%error, "a peer without credentials was turned away"),
            };
            let replies = match stream.try_clone() {
                Ok(clone) => Arc::new(Replies::new(clone, Arc::clone(&shared), refusal_log::name_of(&peer))),
                Err(error) => return tracing::warn!(%error, "no descriptor for another session"),
            };
            let mut session = Session {
                stream,
                replies,
                peer,
                shared,
                greeted: None,
                descriptors: VecDeque::new(),
                _connected: connected,
            };
            match session.serve() {
                Ok(()) => {}
                Err(error) => tracing::info!(session = session.id(), %error, "connection ended"),
            }
        });
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread for another session");
    }
}

/// Where the connection is counted, until it ends.
#[allow(dead_code, reason = "kept for its end")]
enum Place {
    Unix(Connected),
    Tcp(Slot),
}

struct Session {
    stream: Stream,
    replies: Arc<Replies>,
    peer: Peer,
    shared: Arc<Shared>,
    greeted: Option<Greeted>,
    /// Received, of requests that were not handled yet.
    descriptors: VecDeque<OwnedFd>,
    _connected: Place,
}

/// Whatever ends the thread: the session leaves.
impl Drop for Session {
    fn drop(&mut self) {
        self.stream.shutdown();
        self.end();
    }
}

/// What is known after the greeting.
struct Greeted {
    id: SessionId,
    info: Info,
    nonce: [u8; 16],
    heard: Arc<AtomicU64>,
    said_bye: bool,
    /// A scheduler that has opened its engine.
    opened: Option<OwnerId>,
    /// A scheduler some of whose lookups had to wait.
    late: Option<LateLookups>,
    /// Of a worker that is about to register.
    chunks: SharedChunks,
    /// A worker that has registered.
    worker: Option<WorkerState>,
}

struct WorkerState {
    registered: Arc<Registered>,
    /// For a worker on a GPU.
    saves: Option<SaveThread>,
    granted: HashMap<u64, Granted>,
    next_claim: u64,
}

/// What a worker registered.
pub(crate) struct Registered {
    owner: OwnerId,
    rank: u32,
    /// Of its shards, group by group.
    regions: Vec<Vec<Region>>,
    /// What a load brings, group by group.
    slices: Vec<Vec<Vec<Region>>>,
    /// None where the worker copies by itself.
    memory: Option<WorkerMemory>,
}

impl Session {
    /// Whether the kernel says that the peer is of a user who may use the daemon.
    fn is_proven(&self) -> bool {
        match &self.peer {
            Peer::Local { credentials, .. } => {
                refuse_user(credentials.uid, rustix::process::geteuid().as_raw(), own_user_is_unclear())
                    .is_none()
            }
            Peer::Remote => false,
        }
    }

    fn id(&self) -> SessionId {
        self.greeted.as_ref().map_or(0, |greeted| greeted.id)
    }

    fn serve(&mut self) -> io::Result<()> {
        let is_proven = self.is_proven();
        let (most, scratch_bytes, within) = if is_proven {
            (MAX_FRAME_BYTES, READ_BYTES, GREETING_TIMEOUT)
        } else {
            (STRANGER_FRAME_BYTES, STRANGER_FRAME_BYTES, STRANGER_TIMEOUT)
        };
        let mut reader = FrameReader::with_max(most);
        let mut scratch = vec![0; scratch_bytes];
        let mut descriptors = Vec::new();
        // Until then the next request has to be there, however slowly its bytes come.
        let mut deadline = Instant::now() + within;
        loop {
            if self.greeted.is_none() || !is_proven {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(io::Error::new(ErrorKind::TimedOut, "no request came in time"));
                }
                self.stream.set_timeouts(Some(left), SEND_TIMEOUT)?;
            }
            let received = match &mut self.stream {
                Stream::Unix(stream) => recv_with_fds(stream, &mut scratch, &mut descriptors),
                Stream::Tcp(stream) => stream.read(&mut scratch),
            };
            match received {
                Ok(0) => return Ok(()),
                Ok(count) => reader.push(&scratch[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            self.descriptors.extend(descriptors.drain(..));
            if self.descriptors.len() > DESCRIPTORS_PENDING_MAX {
                return Err(io::Error::new(ErrorKind::InvalidData, "descriptors came that nobody announced"));
            }
            loop {
                match reader.next_message::<v1::Request>() {
                    Ok(Some(request)) => {
                        if !self.handle(request)? {
                            return Ok(());
                        }
                        // What comes before the greeting gains no time.
                        if self.greeted.is_some() {
                            deadline = Instant::now() + TCP_IDLE_TIMEOUT;
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        self.shared.metrics.bad_frame();
                        self.reply(0, refused((Reason::Invalid, error.to_string())), None)?;
                        return Err(io::Error::new(ErrorKind::InvalidData, error));
                    }
                }
            }
        }
    }

    /// Handles one request. False when the connection is to be closed.
    fn handle(&mut self, request: v1::Request) -> io::Result<bool> {
        let start = Instant::now();
        let Some(body) = request.body else {
            self.reply(
                request.id,
                refused((Reason::Invalid, "the request has no body this daemon knows".into())),
                None,
            )?;
            return Ok(true);
        };
        let call = Call::of(&body);
        if let Some(greeted) = &self.greeted {
            greeted.heard.store(self.shared.sessions.now_ms(), Ordering::Relaxed);
        }
        let shared = Arc::clone(&self.shared);
        let body = match (body, self.save_thread()) {
            (Ask::Save(save), Some(saves)) if !shared.is_stopping() => {
                saves.push(&shared, request.id, save, call, start);
                return Ok(true);
            }
            (Ask::Lookup(lookup), _) if lookup.may_wait && !shared.is_stopping() => {
                match self.look_up_later(request.id, lookup, call, start)? {
                    Some(lookup) => Ask::Lookup(lookup),
                    None => return Ok(true),
                }
            }
            (body, _) => body,
        };
        let is_greeting = matches!(body, Ask::Hello(_));
        let is_goodbye = matches!(body, Ask::Bye(_));
        let mut descriptor = None;
        // Until the answer is sent: a stopping daemon lets the engine hear of what was done.
        let _busy = Busy::new(&shared);
        let answer = self.answer(body, &mut descriptor);
        if is_goodbye {
            // Before the answer: who has it can rely on being gone.
            self.end();
        }
        let was_refused = answer.is_err();
        let body = answer.unwrap_or_else(refused);
        self.reply(request.id, body, descriptor)?;
        self.shared.metrics.answered(call, start.elapsed(), was_refused);
        Ok(!(is_goodbye || is_greeting && was_refused))
    }

    fn save_thread(&self) -> Option<&SaveThread> {
        self.greeted.as_ref()?.worker.as_ref()?.saves.as_ref()
    }

    /// Starts to bring what the tier has of the prompt, if its hit grows by it; the answer comes later then. Gives the lookup
    /// back where there is nothing to wait for.
    fn look_up_later(
        &mut self,
        id: u64,
        lookup: v1::Lookup,
        call: Call,
        since: Instant,
    ) -> io::Result<Option<v1::Lookup>> {
        let shared = Arc::clone(&self.shared);
        let (Some(ssd), Some(greeted)) = (&shared.ssd, &mut self.greeted) else { return Ok(Some(lookup)) };
        let Ok(owner) = greeted.scheduler() else { return Ok(Some(lookup)) };
        let engine_id = &greeted.info.engine_id;
        // Held until the fetch has begun: the plan names spaces.
        let Some((open, workers)) = shared.engines.ready(engine_id) else { return Ok(Some(lookup)) };
        let Ok(asked) = asked_blocks(&open, workers, &lookup) else { return Ok(Some(lookup)) };
        let plan = shared.store.plan_fetch(&lookup_groups(&asked), lookup.max_tokens, since);
        let Some(plan) = plan else { return Ok(Some(lookup)) };
        let late = match &mut greeted.late {
            Some(late) => late,
            none => {
                let replies = Arc::clone(&self.replies);
                match LateLookups::start(Arc::clone(&shared), engine_id.clone(), replies) {
                    Ok(late) => none.insert(late),
                    Err(error) => {
                        tracing::warn!(%error, "no thread for lookups that wait for the SSD");
                        return Ok(Some(lookup));
                    }
                }
            }
        };
        let (wait_ms, until) = (ssd.wait.as_millis() as u32, since + ssd.wait);
        self.replies.send(id, Answer::LookupPending(v1::LookupPending { wait_ms }), None)?;
        let came = late.push(Late { id, lookup, owner, call, since, until, _busy: Busy::new(&shared) })?;
        shared.store.fetch(plan, since, until, came);
        Ok(None)
    }

    fn answer(&mut self, body: Ask, descriptor: &mut Option<OwnedFd>) -> Result<Answer, Refusal> {
        if let Ask::Hello(hello) = body {
            return self.greet(hello);
        }
        let shared = Arc::clone(&self.shared);
        let Some(greeted) = &mut self.greeted else {
            return Err((Reason::Invalid, "the first message of a connection must be Hello".into()));
        };
        let local = matches!(self.peer, Peer::Local { .. });
        match body {
            Ask::GetStatus(_) if local => Ok(Answer::Status(status::collect(&shared))),
            Ask::GetStatus(_) => Ok(Answer::Status(status::for_anybody(&shared))),
            Ask::Bye(_) => {
                greeted.said_bye = true;
                Ok(done())
            }
            _ if !local => {
                Err((Reason::NotAllowed, "over TCP only status is served: use the Unix socket".into()))
            }
            Ask::Settle(settle) => {
                let deadline = Instant::now() + Duration::from_millis(settle.timeout_ms.into());
                let timeout = settle.timeout_ms;
                if !shared.store.settle(deadline.saturating_duration_since(Instant::now())) {
                    Err((Reason::Limit, format!("not everything was sealed within {timeout} ms")))
                } else if shared.ssd.is_some() && !shared.store.settle_spill(deadline) {
                    Err((Reason::Limit, format!("not everything was on the SSD within {timeout} ms")))
                } else {
                    Ok(done())
                }
            }
            Ask::DropNamespaces(drop) => drop_namespaces(&shared, greeted, &drop),
            Ask::MapPool(map) => {
                let writer = greeted.info.role == Role::Tool
                    || greeted.worker.as_ref().is_some_and(|worker| worker.registered.memory.is_none());
                if map.writable && !writer {
                    return Err((
                        Reason::NotAllowed,
                        "only workers that save by mapping may write the pool".into(),
                    ));
                }
                let fd = shared.arena.descriptor(map.writable);
                *descriptor =
                    Some(fd.map_err(|e| (Reason::Limit, format!("no descriptor of the pool: {e}")))?);
                let page_size = shared.arena.page_size().into();
                Ok(Answer::PoolDescriptor(v1::PoolDescriptor { bytes: shared.arena.bytes(), page_size }))
            }
            Ask::CancelSaves(cancel) => {
                greeted.scheduler()?;
                let timeout = Duration::from_millis(cancel.timeout_ms.into()).min(CANCEL_TIMEOUT_MAX);
                let gate = shared.engines.save_gate(&greeted.info.engine_id);
                let is_closed =
                    gate.is_some_and(|gate| gate.close(cancel.below_job, Instant::now() + timeout));
                if is_closed {
                    return Ok(done());
                }
                let sentence = format!("saves were still being copied after {} ms", timeout.as_millis());
                Err((Reason::Limit, sentence))
            }
            Ask::Release(release) => {
                let owner = greeted.scheduler()?;
                release.leases.iter().for_each(|lease| shared.store.release(owner, LeaseId(*lease)));
                Ok(done())
            }
            Ask::Heartbeat(heartbeat) => {
                let live: Vec<_> = heartbeat.live_leases.into_iter().map(LeaseId).collect();
                shared.store.heartbeat(greeted.scheduler()?, &live, Instant::now());
                Ok(done())
            }
            // Also while stopping: it was promised.
            Ask::Load(load) => {
                let worker = Arc::clone(&greeted.worker()?.registered);
                let Some(WorkerMemory::Gpu(memory)) = &worker.memory else {
                    let sentence = "this worker loads by itself, from its mapping of the pool";
                    return Err((Reason::NotAllowed, sentence.into()));
                };
                let who = (greeted.info.engine_id.as_str(), worker.rank);
                let result = load::load(&shared, who, &worker.slices, memory, &load).map_err(invalid)?;
                Ok(Answer::LoadResult(result))
            }
            Ask::Commit(commit) => {
                let worker = greeted.worker()?;
                let Granted { job, claims } = worker
                    .granted
                    .remove(&commit.claim)
                    .ok_or((Reason::Unknown, format!("claim {} is not open", commit.claim)))?;
                let gate = shared.engines.save_gate(&greeted.info.engine_id);
                let inside = gate.and_then(|gate| gate.enter(job));
                if !commit.written {
                    shared.store.abort(&claims);
                } else if inside.is_some() {
                    shared.store.commit(&claims, Instant::now());
                } else {
                    shared.store.abort(&claims);
                    return Err(cancelled());
                }
                Ok(done())
            }
            _ if shared.is_stopping() => {
                Err((Reason::Stopping, "the daemon is stopping and takes no new work".into()))
            }
            Ask::OpenEngine(open) => open_engine(&shared, greeted, open),
            Ask::ShareChunks(share) => {
                if greeted.info.role != Role::Worker {
                    return Err((Reason::NotAllowed, "only workers share memory".into()));
                }
                let count = share.chunk_bytes.len().min(self.descriptors.len());
                share_chunks(&shared, greeted, &share, self.descriptors.drain(..count).collect())
            }
            Ask::RegisterWorker(register) => {
                register_worker(&shared, greeted, &self.peer, &self.replies, register)
            }
            Ask::PoolMapped(_) => {
                shared.engines.mapped(&greeted.info.engine_id, greeted.id);
                Ok(done())
            }
            Ask::Lookup(lookup) => {
                let owner = greeted.scheduler()?;
                look_up(&shared, &greeted.info.engine_id, owner, &lookup)
            }
            Ask::Save(save) => {
                let (id, engine_id) = (greeted.id, greeted.info.engine_id.clone());
                self::save(&shared, id, &engine_id, &greeted.worker()?.registered, &save, &Pace::URGENT)
            }
            Ask::Claim(claim) => {
                let (id, engine_id) = (greeted.id, greeted.info.engine_id.clone());
                let worker = greeted.worker()?;
                if worker.granted.len() >= CLAIMS_MAX {
                    return Err((Reason::Limit, format!("{CLAIMS_MAX} claims are open: commit some")));
                }
                let (mut result, granted) =
                    with_saver(&shared, id, &engine_id, &worker.registered, claim.job, |saver| {
                        Ok(saver.grant(&saver.parse(&claim.groups)?))
                    })?;
                worker.next_claim += 1;
                result.claim = worker.next_claim;
                let granted = Granted { job: claim.job, claims: granted };
                worker.granted.insert(worker.next_claim, granted);
                Ok(Answer::ClaimResult(result))
            }
            Ask::Hello(_) => Err((Reason::Invalid, "this connection has said Hello already".into())),
        }
    }

    fn greet(&mut self, hello: v1::Hello) -> Result<Answer, Refusal> {
        if self.greeted.is_some() {
            return Err((Reason::Invalid, "this connection has said Hello already".into()));
        }
        let wire = negotiate(hello.wire_min..=hello.wire_max, WIRE_MIN..=WIRE_MAX)
            .map_err(|error| (Reason::Incompatible, error.to_string()))?;
        let role = Role::try_from(hello.role)
            .map_err(|_| (Reason::Invalid, format!("role {} does not exist", hello.role)))?;
        let nonce: [u8; 16] = hello.process_nonce.as_ref().try_into().map_err(|_| {
            (Reason::Invalid, format!("a process nonce has 16 bytes, this one {}", hello.process_nonce.len()))
        })?;
        let (pid, pidfd) = match &self.peer {
            Peer::Local { credentials, pidfd } => {
                if let Some(sentence) =
                    refuse_user(credentials.uid, rustix::process::geteuid().as_raw(), own_user_is_unclear())
                {
                    return Err((Reason::NotAllowed, sentence));
                }
                let pidfd =
                    pidfd.try_clone().map_err(|e| (Reason::Limit, format!("no descriptor left: {e}")))?;
                (credentials.pid, Some(pidfd))
            }
            Peer::Remote if role == Role::Tool => (0, None),
            Peer::Remote => {
                let sentence =
                    "engines connect over the Unix socket: TCP carries neither the pool nor credentials";
                return Err((Reason::NotAllowed, sentence.into()));
            }
        };
        if role != Role::Tool && hello.engine_id.is_empty() {
            return Err((Reason::Invalid, "the engine id is empty".into()));
        }
        for (what, name) in [("engine id", &hello.engine_id), ("client's name", &hello.client)] {
            if name.len() > NAME_BYTES_MAX {
                let sentence =
                    format!("the {what} has {} bytes, at most {NAME_BYTES_MAX} are kept", name.len());
                return Err((Reason::Invalid, sentence));
            }
        }
        if self.shared.is_stopping() {
            return Err((Reason::Stopping, "the daemon is stopping and takes no new sessions".into()));
        }
        let info = Info {
            engine_id: hello.engine_id,
            role,
            pid,
            client: hello.client,
            method: String::new(),
            reason: String::new(),
        };
        let heard = Arc::new(AtomicU64::new(self.shared.sessions.now_ms()));
        let stream =
            self.stream.try_clone().map_err(|e| (Reason::Limit, format!("no descriptor left: {e}")))?;
        let id = self
            .shared
            .sessions
            .add(info.clone(), nonce, stream, pidfd, Arc::clone(&heard))
            .map_err(|sentence| (Reason::Limit, sentence))?;
        tracing::info!(session = id, engine = info.engine_id, role = ?role, pid, client = info.client, "connected");
        self.greeted = Some(Greeted {
            id,
            info: info.clone(),
            nonce,
            heard,
            said_bye: false,
            opened: None,
            late: None,
            chunks: SharedChunks::default(),
            worker: None,
        });
        if role != Role::Tool {
            self.take_over(id, &nonce, &info, &hello.live_leases);
        }
        // From here on a silent peer is an idle one; over TCP it may be that for a while only.
        self.stream.set_timeouts(None, SEND_TIMEOUT).map_err(|e| (Reason::Limit, e.to_string()))?;
        Ok(Answer::Welcome(v1::Welcome {
            wire,
            version: env!("CARGO_PKG_VERSION").into(),
            session_id: id,
            pool_bytes: self.shared.arena.bytes(),
        }))
    }

    /// The process may have been here before, over a connection that was lost.
    fn take_over(&self, id: SessionId, nonce: &[u8; 16], info: &Info, live_leases: &[u64]) {
        let live: Vec<_> = live_leases.iter().map(|lease| LeaseId(*lease)).collect();
        for (former, engine_id) in self.shared.sessions.take_former(nonce, info.role, id) {
            if engine_id != info.engine_id {
                // It serves another engine now.
                settle_session(&self.shared, former, &engine_id);
                continue;
            }
            self.shared.store.writer_gone(WriterId(former));
            let owner = self.shared.engines.replace(&info.engine_id, former, id);
            if let Some(owner) = owner.filter(|_| info.role == Role::Scheduler) {
                self.shared.store.adopt(owner, owner, &live);
            }
        }
    }

    fn reply(&self, id: u64, body: Answer, descriptor: Option<OwnedFd>) -> io::Result<()> {
        self.replies.send(id, body, descriptor)
    }

    fn end(&mut self) {
        let Some(mut greeted) = self.greeted.take() else { return };
        // Its saves are over before its claims are settled.
        greeted.worker = None;
        // And no lookup takes a lease for it any more.
        greeted.late = None;
        let gone = self.shared.sessions.end(greeted.id, greeted.said_bye);
        if gone && greeted.info.role != Role::Tool {
            settle_session(&self.shared, greeted.id, &greeted.info.engine_id);
        }
        tracing::info!(session = greeted.id, engine = greeted.info.engine_id, gone, "session ended");
    }
}

impl Greeted {
    fn scheduler(&self) -> Result<OwnerId, Refusal> {
        self.opened.ok_or((Reason::NotAllowed, "open the engine's groups first".into()))
    }

    fn worker(&mut self) -> Result<&mut WorkerState, Refusal> {
        self.worker.as_mut().ok_or((Reason::NotAllowed, "register the worker's memory first".into()))
    }
}

/// Sends an answer.
fn done() -> Answer {
    Answer::Done(v1::Done {})
}

pub(crate) fn refused((reason, sentence): Refusal) -> Answer {
    Answer::Refused(v1::Refused { reason: reason.into(), sentence })
}

fn invalid(sentence: impl ToString) -> Refusal {
    (Reason::Invalid, sentence.to_string())
}

fn cancelled() -> Refusal {
    (Reason::Cancelled, "the engine has cancelled this save".into())
}

fn open_engine(shared: &Shared, greeted: &mut Greeted, open: v1::OpenEngine) -> Result<Answer, Refusal> {
    if greeted.info.role != Role::Scheduler {
        return Err((Reason::NotAllowed, "only the scheduler opens an engine".into()));
    }
    // Where it fails the engine may end, and its owner with it.
    greeted.opened = None;
    let groups = open
        .groups
        .iter()
        .map(|group| {
            Ok(GroupSpec {
                namespace: Namespace::from_bytes(&group.namespace).map_err(invalid)?,
                name: group.name.chars().take(256).collect(),
                tokens_per_block: group.tokens_per_block,
                window_blocks: group.window_blocks,
            })
        })
        .collect::<Result<Vec<_>, Refusal>>()?;
    let (owner, ready) = shared
        .engines
        .open(&greeted.info.engine_id, greeted.id, open.workers, groups, open.cancelled_below, &shared.store)
        .map_err(|error| (Reason::Conflict, error.to_string()))?;
    greeted.opened = Some(owner);
    Ok(Answer::EngineOpened(v1::EngineOpened { ready }))
}

fn share_chunks(
    shared: &Shared,
    greeted: &mut Greeted,
    share: &v1::ShareChunks,
    descriptors: Vec<OwnedFd>,
) -> Result<Answer, Refusal> {
    let gpus = shared.gpus.as_ref().ok_or_else(no_gpu)?;
    greeted.chunks.push(gpus, share, descriptors).map_err(|error| {
        // A part of a range is good for nothing.
        greeted.chunks = SharedChunks::default();
        (Reason::Invalid, format!("the worker's GPU memory cannot be used: {error}"))
    })?;
    Ok(done())
}

fn no_gpu() -> Refusal {
    (Reason::NotAllowed, "the worker's blocks lie on a GPU, and this daemon has none".into())
}

fn register_worker(
    shared: &Arc<Shared>,
    greeted: &mut Greeted,
    peer: &Peer,
    replies: &Arc<Replies>,
    register: v1::RegisterWorker,
) -> Result<Answer, Refusal> {
    if greeted.info.role != Role::Worker {
        return Err((Reason::NotAllowed, "only workers register memory".into()));
    }
    // Where it fails the engine may end, and another shape come under its name: what was registered before must not
    // meet that one's groups.
    greeted.worker = None;
    let chunks = std::mem::take(&mut greeted.chunks);
    let method = register.method();
    let group = |group| worker_group(group, register.rank, register.workers);
    let groups = register.groups.into_iter().map(group).collect::<Result<Vec<_>, Refusal>>()?;
    let pool_bytes = shared.arena.bytes();
    if let Some(bytes) = groups.iter().map(|g| shard_bytes(&g.regions)).find(|bytes| *bytes > pool_bytes) {
        return Err(invalid(format!(
            "a block of {bytes} bytes does not fit into the pool of {pool_bytes} bytes"
        )));
    }
    let regions: Vec<Vec<Region>> = groups.iter().map(|group| group.regions.clone()).collect();
    let slices: Vec<Vec<Vec<Region>>> = groups.iter().map(|group| group.slices.clone()).collect();
    let (memory, reason) = match (peer, method) {
        (Peer::Local { pidfd, .. }, _) if register.gpu.is_some() || method == Method::Gpu => {
            let gpus = shared.gpus.as_ref().ok_or_else(no_gpu)?;
            let gpu = register.gpu.as_ref().ok_or_else(|| invalid("method GPU needs the worker's GPU"))?;
            let pidfd = pidfd.try_clone().map_err(|e| (Reason::Limit, format!("no descriptor left: {e}")))?;
            let regions: Vec<&Region> = slices.iter().flatten().flatten().collect();
            let memory =
                GpuMemory::import(gpus, &greeted.info.engine_id, gpu, chunks, &regions, greeted.nonce, pidfd)
                    .map_err(|error| {
                        (Reason::Invalid, format!("the worker's GPU memory cannot be used: {error}"))
                    })?;
            (Some(WorkerMemory::Gpu(Arc::new(memory))), "the GPU copies".to_owned())
        }
        (_, Method::Mapped) => (None, "the worker asked for it".to_owned()),
        (Peer::Local { credentials, pidfd }, _) => {
            let pidfd = pidfd.try_clone().map_err(|e| (Reason::Limit, format!("no descriptor left: {e}")))?;
            match ProcessVm::probe(credentials.pid, pidfd, register.fence_address, greeted.nonce) {
                Ok(memory) => (Some(WorkerMemory::ProcessVm(memory)), "process_vm works".to_owned()),
                Err(error) if method == Method::ProcessVm => {
                    return Err((Reason::NotAllowed, format!("process_vm was asked for, but {error}")));
                }
                Err(error) => (None, error.to_string()),
            }
        }
        (Peer::Remote, _) => return Err((Reason::NotAllowed, "workers connect over the Unix socket".into())),
    };
    let owner = shared
        .engines
        .register(&greeted.info.engine_id, greeted.id, register.rank, register.workers, groups, &shared.store)
        .map_err(|error| (Reason::Conflict, error.to_string()))?;
    let (method, name) = match &memory {
        Some(WorkerMemory::Gpu(_)) => (Method::Gpu, "gpu"),
        Some(WorkerMemory::ProcessVm(_)) => (Method::ProcessVm, "process_vm"),
        None => (Method::Mapped, "mapped"),
    };
    tracing::info!(
        session = greeted.id,
        engine = greeted.info.engine_id,
        rank = register.rank,
        method = name,
        reason,
        "worker registered"
    );
    shared.sessions.set_method(greeted.id, name, &reason);
    shared.metrics.worker_registered(name);
    let on_gpu = matches!(memory, Some(WorkerMemory::Gpu(_)));
    let registered = Arc::new(Registered { owner, rank: register.rank, regions, slices, memory });
    let start = || {
        let (shared, worker) = (Arc::clone(shared), Arc::clone(&registered));
        SaveThread::start(shared, greeted.id, greeted.info.engine_id.clone(), worker, Arc::clone(replies))
            .map_err(|error| (Reason::Limit, format!("no thread for the worker's saves: {error}")))
    };
    let saves = on_gpu.then(start).transpose()?;
    greeted.worker = Some(WorkerState { registered, saves, granted: HashMap::new(), next_claim: 0 });
    Ok(Answer::WorkerRegistered(v1::WorkerRegistered { method: method.into(), reason }))
}

fn worker_group(group: v1::WorkerGroup, rank: u32, workers: u32) -> Result<WorkerGroup, Refusal> {
    let layout: [u8; 16] = group
        .layout
        .as_ref()
        .try_into()
        .map_err(|_| invalid(format!("a layout digest has 16 bytes, this one {}", group.layout.len())))?;
    let regions = valid_regions(group.regions)?;
    let slices = group.slices.into_iter().map(|slice| valid_regions(slice.regions));
    let mut slices = slices.collect::<Result<Vec<_>, Refusal>>()?;
    match slices.len() {
        0 => slices.push(regions.clone()),
        count if !(workers as usize).is_multiple_of(count) => {
            return Err(invalid(format!("{workers} workers cannot share blocks of {count} slices")));
        }
        count if slices[rank as usize % count] != regions => {
            return Err(invalid(format!(
                "the shard of rank {rank} is none of the {count} slices in its place"
            )));
        }
        _ => {}
    }
    Ok(WorkerGroup {
        namespace: Namespace::from_bytes(&group.namespace).map_err(invalid)?,
        layout: LayoutDigest(layout),
        regions,
        slices,
    })
}

fn valid_regions(regions: Vec<v1::Region>) -> Result<Vec<Region>, Refusal> {
    if regions.is_empty() {
        return Err(invalid("a group or slice without regions has nothing to keep"));
    }
    let region = |region: v1::Region| {
        let region = Region {
            base: region.base,
            block_stride: region.block_stride,
            blocks: region.blocks,
            piece_bytes: region.piece_bytes,
            piece_offsets: region.piece_offsets,
        };
        region.validate().map_err(invalid)?;
        Ok(region)
    };
    regions.into_iter().map(region).collect()
}

pub(crate) fn look_up(
    shared: &Shared,
    engine_id: &str,
    owner: OwnerId,
    lookup: &v1::Lookup,
) -> Result<Answer, Refusal> {
    shared
        .engines
        .with_ready(engine_id, |open, workers| look_up_ready(shared, open, workers, owner, lookup))
        // Workers are missing: nothing can be promised.
        .unwrap_or_else(|| Ok(Answer::LookupResult(v1::LookupResult::default())))
}

fn look_up_ready(
    shared: &Shared,
    open: &[OpenGroup],
    workers: u32,
    owner: OwnerId,
    lookup: &v1::Lookup,
) -> Result<Answer, Refusal> {
    let asked = asked_blocks(open, workers, lookup)?;
    let groups = lookup_groups(&asked);
    for group in &groups {
        let blocks = lookup.max_tokens / u64::from(group.tokens_per_block.max(1));
        let blocks = usize::try_from(blocks).unwrap_or(usize::MAX).min(group.hashes.len());
        shared.ceilings.record(shared.store.namespace(group.space), &group.hashes[..blocks]);
    }
    let Some(hit) = shared.store.lookup(owner, &groups, lookup.max_tokens, Instant::now()) else {
        return Ok(Answer::LookupResult(v1::LookupResult { ready: true, ..Default::default() }));
    };
    let groups = hit
        .groups
        .iter()
        .enumerate()
        .map(|(index, group)| {
            let mut pages = vec![0; group.pages.len() * 4];
            pages.chunks_exact_mut(4).zip(&group.pages).for_each(|(bytes, page)| {
                bytes.copy_from_slice(&page.to_le_bytes());
            });
            v1::HitGroup {
                group: index as u32,
                first_block: group.first_block,
                pages: pages.into(),
                workers,
                stored_blocks: group.stored_blocks,
            }
        })
        .collect();
    Ok(Answer::LookupResult(v1::LookupResult { tokens: hit.tokens, lease: hit.lease.0, groups, ready: true }))
}

/// The blocks that a lookup names, group by group.
fn asked_blocks(
    open: &[OpenGroup],
    workers: u32,
    lookup: &v1::Lookup,
) -> Result<Vec<(OpenGroup, Vec<BlockHash>)>, Refusal> {
    if lookup.groups.len() != open.len() {
        return Err(invalid(format!(
            "{} groups were looked up, the engine has {}",
            lookup.groups.len(),
            open.len()
        )));
    }
    let mut hashes: Vec<(OpenGroup, Vec<BlockHash>)> = Vec::with_capacity(open.len());
    for (index, group) in lookup.groups.iter().enumerate() {
        if group.group as usize != index {
            return Err(invalid(format!("group {} was named in place {index}", group.group)));
        }
        let mut named = parse_hashes(&group.hashes).map_err(invalid)?;
        named.truncate(PAGES_BYTES_MAX / (size_of::<u32>() * workers.max(1) as usize * open.len()));
        hashes.push((open[index], named));
    }
    Ok(hashes)
}

fn lookup_groups(asked: &[(OpenGroup, Vec<BlockHash>)]) -> Vec<LookupGroup<'_>> {
    asked
        .iter()
        .map(|(group, hashes)| LookupGroup {
            space: group.space,
            tokens_per_block: group.tokens_per_block,
            window_blocks: group.window_blocks,
            hashes,
        })
        .collect()
}

/// Copies blocks out of a worker's memory.
pub(crate) fn save(
    shared: &Shared,
    id: SessionId,
    engine_id: &str,
    worker: &Registered,
    save: &v1::Save,
    pace: &Pace<'_>,
) -> Result<Answer, Refusal> {
    let memory = worker
        .memory
        .as_ref()
        .ok_or((Reason::NotAllowed, "this worker saves by mapping: ask for claims".into()))?;
    with_saver(shared, id, engine_id, worker, save.job, |saver| {
        let blocks = saver.parse(&save.groups)?;
        Ok(Answer::SaveResult(saver.copy_out(&blocks, memory, save.epoch, save.event, pace)))
    })
}

fn with_saver<T>(
    shared: &Shared,
    id: SessionId,
    engine_id: &str,
    worker: &Registered,
    job: u64,
    save: impl FnOnce(&Saver<'_>) -> Result<T, String>,
) -> Result<T, Refusal> {
    let gate = shared.engines.save_gate(engine_id);
    let inside = gate.and_then(|gate| gate.enter(job)).ok_or_else(cancelled)?;
    shared
        .engines
        .with_ready(engine_id, |open, _| {
            let saver = Saver {
                shared,
                owner: worker.owner,
                writer: WriterId(id),
                rank: worker.rank,
                regions: &worker.regions,
                open,
                inside: &inside,
            };
            save(&saver).map_err(invalid)
        })
        .unwrap_or_else(|| {
            Err((
                Reason::Unknown,
                format!("engine '{engine_id}' is not ready: its scheduler or other workers are missing"),
            ))
        })
}

fn drop_namespaces(shared: &Shared, greeted: &Greeted, drop: &v1::DropNamespaces) -> Result<Answer, Refusal> {
    if greeted.info.role != Role::Tool {
        return Err((Reason::NotAllowed, "engines drop nothing that others may share: use a tool".into()));
    }
    let mut known = shared.engines.all_namespaces();
    known.extend(shared.store.spaces().into_iter().map(|space| space.namespace));
    let named = drop
        .namespaces
        .iter()
        .map(|n| Namespace::from_bytes(n))
        .collect::<Result<Vec<_>, _>>()
        .map_err(invalid)?;
    for namespace in &named {
        // The SSD may have blocks of engines that have not come back yet.
        if !known.contains(namespace) && !shared.ssd.as_ref().is_some_and(|ssd| ssd.knows(namespace)) {
            return Err((Reason::Unknown, format!("namespace {namespace} does not exist here")));
        }
    }
    let mut not_durable = Vec::new();
    for namespace in named {
        let dropped = shared.store.drop_namespace(namespace);
        tracing::info!(%namespace, blocks = dropped.blocks, "namespace dropped");
        if let Err(error) = dropped.below {
            not_durable.push(format!("namespace {namespace} was dropped from RAM, but {error}"));
        }
    }
    if not_durable.is_empty() {
        return Ok(done());
    }
    let sentence = format!(
        "{}. A restart of the daemon would bring back the blocks there; until then it tries again to note it",
        not_durable.join("; ")
    );
    Err((Reason::NotDurable, sentence))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_that_cannot_be_those_of_the_workers_are_refused() {
        let slice = |bytes| {
            let region = v1::Region {
                base: 4096,
                block_stride: 8192,
                blocks: 4,
                piece_bytes: bytes,
                piece_offsets: vec![0],
            };
            v1::Slice { regions: vec![region] }
        };
        let group = |own: u64, slices: &[u64]| v1::WorkerGroup {
            namespace: vec![1; 16].into(),
            layout: vec![2; 16].into(),
            regions: slice(own).regions,
            slices: slices.iter().map(|bytes| slice(*bytes)).collect(),
        };
        let shared = worker_group(group(2048, &[4096, 2048]), 3, 4).unwrap();
        assert_eq!(shared.slices.len(), 2);
        assert_eq!(worker_group(group(2048, &[]), 3, 4).unwrap().slices, [shared.regions]);
        let cases = [
            (group(2048, &[4096, 2048]), 1, 3, "3 workers cannot share blocks of 2 slices"),
            (group(2048, &[4096, 2048]), 2, 4, "rank 2 is none of the 2 slices"),
            (group(2048, &[0, 2048]), 1, 2, "piece size is 0"),
            (
                v1::WorkerGroup { slices: vec![v1::Slice::default(); 2], ..group(2048, &[]) },
                1,
                2,
                "without regions",
            ),
        ];
        for (group, rank, workers, sentence) in cases {
            let (reason, found) = worker_group(group, rank, workers).unwrap_err();
            assert!(reason == Reason::Invalid && found.contains(sentence), "{found}");
        }
    }
}
