//! One connection: reads requests, answers each, and cleans up after itself.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read},
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use kvlane_engine_memory::SharedChunks;
use kvlane_memory::{DESCRIPTORS_MAX, own_user_is_unclear, recv_with_fds};
use kvlane_proto::{
    FrameReader, MAX_FRAME_BYTES, WIRE_MAX, WIRE_MIN, negotiate,
    v1::{self, hello::Role, reply::Body as Answer, request::Body as Ask},
};
use kvlane_store::{LeaseId, WriterId};

use crate::{
    calls::{
        admit::admit,
        carry_out,
        context::{Answered, Context},
        table::{Call, WhileStopping},
    },
    engines::SessionId,
    greeted::Greeted,
    hand_offs::End,
    peer::{Peer, Stream, refuse_user},
    reaper::settle_session,
    refusal::Refusal,
    refusal_log,
    replies::Replies,
    sessions::{Busy, Connected, Info},
    shared::Shared,
};
use kvlane_door::Slot;

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
/// A peer that does not take its answers for so long is cut off.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Descriptors that may have come before their requests are handled: those of a request and of the next.
const DESCRIPTORS_PENDING_MAX: usize = 2 * DESCRIPTORS_MAX;

/// Serves a connection in a thread of its own.
pub(crate) fn start(stream: Stream, shared: Arc<Shared>) {
    let connected = match &stream {
        // Without room it is closed.
        Stream::Tcp(_) => match shared.tcp_slots.take() {
            Some(slot) => Place::Tcp(slot),
            None => return,
        },
        Stream::Unix(_) => match Connected::new(&shared.sessions) {
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
                Ok(clone) => {
                    let (refusals, name) = (Arc::clone(&shared.refusals), refusal_log::name_of(&peer));
                    Arc::new(Replies::new(clone, shared.boot, refusals, name))
                }
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
                        self.replies.send(0, Refusal::invalid(&error).into(), None)?;
                        return Err(io::Error::new(ErrorKind::InvalidData, error));
                    }
                }
            }
        }
    }

    /// Handles one request. False when the connection is to be closed.
    fn handle(&mut self, request: v1::Request) -> io::Result<bool> {
        let since = Instant::now();
        let Some(ask) = request.body else {
            let refusal = Refusal::invalid("the request has no body this daemon knows");
            self.replies.send(request.id, refusal.into(), None)?;
            return Ok(true);
        };
        let call = Call::of(&ask);
        if let Some(greeted) = &self.greeted {
            greeted.heard.store(self.shared.sessions.now_ms(), Ordering::Relaxed);
        }
        // Until the answer is sent: a stopping daemon lets the engine hear of what was done.
        let _busy = Busy::new(&self.shared.sessions);
        let answered = match self.answer(request.id, call, ask, since) {
            Ok(Answered::Later) => return Ok(true),
            Ok(Answered::Broken(error)) => return Err(error),
            Ok(Answered::Now(answer, descriptor)) => Ok((answer, descriptor)),
            Err(refusal) => Err(refusal),
        };
        if call == Call::Bye {
            // Before the answer: who has it can rely on being gone.
            self.end();
        }
        let was_refused = answered.is_err();
        let (answer, descriptor) = answered.unwrap_or_else(|refusal| (refusal.into(), None));
        self.replies.send(request.id, answer, descriptor)?;
        self.shared.metrics.answered(call, since.elapsed(), was_refused);
        Ok(!(call == Call::Bye || call == Call::Hello && was_refused))
    }

    fn answer(&mut self, id: u64, call: Call, ask: Ask, since: Instant) -> Result<Answered, Refusal> {
        // Before anybody says no: the next call must not find those of this one.
        let count = descriptors_of(&ask).min(self.descriptors.len());
        let descriptors = self.descriptors.drain(..count).collect();
        if let Ask::Hello(hello) = ask {
            return self.greet(hello).map(Answered::from);
        }
        let Some(greeted) = &mut self.greeted else {
            return Err(Refusal::invalid("the first message of a connection must be Hello"));
        };
        admit(call.row(), greeted, &self.peer, self.shared.phase())?;
        let mut context = Context {
            shared: &self.shared,
            greeted,
            peer: &self.peer,
            replies: &self.replies,
            id,
            call,
            since,
            descriptors,
        };
        carry_out(&mut context, ask)
    }

    fn greet(&mut self, hello: v1::Hello) -> Result<Answer, Refusal> {
        if self.greeted.is_some() {
            return Err(Refusal::invalid("this connection has said Hello already"));
        }
        let wire =
            negotiate(hello.wire_min..=hello.wire_max, WIRE_MIN..=WIRE_MAX).map_err(Refusal::incompatible)?;
        let role = Role::try_from(hello.role)
            .map_err(|_| Refusal::invalid(format!("role {} does not exist", hello.role)))?;
        let nonce: [u8; 16] = hello.process_nonce.as_ref().try_into().map_err(|_| {
            Refusal::invalid(format!("a process nonce has 16 bytes, this one {}", hello.process_nonce.len()))
        })?;
        let (pid, pidfd) = match &self.peer {
            Peer::Local { credentials, pidfd } => {
                if let Some(sentence) =
                    refuse_user(credentials.uid, rustix::process::geteuid().as_raw(), own_user_is_unclear())
                {
                    return Err(Refusal::not_allowed(sentence));
                }
                let pidfd = pidfd.try_clone().map_err(Refusal::no_descriptor)?;
                (credentials.pid, Some(pidfd))
            }
            Peer::Remote if role == Role::Tool => (0, None),
            Peer::Remote => {
                let sentence =
                    "engines connect over the Unix socket: TCP carries neither the pool nor credentials";
                return Err(Refusal::not_allowed(sentence));
            }
        };
        if role != Role::Tool && hello.engine_id.is_empty() {
            return Err(Refusal::invalid("the engine id is empty"));
        }
        for (what, name) in [("engine id", &hello.engine_id), ("client's name", &hello.client)] {
            if name.len() > NAME_BYTES_MAX {
                let sentence =
                    format!("the {what} has {} bytes, at most {NAME_BYTES_MAX} are kept", name.len());
                return Err(Refusal::invalid(sentence));
            }
        }
        if self.shared.is_stopping() && Call::Hello.row().stopping == WhileStopping::Refused {
            return Err(Refusal::stopping("sessions"));
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
        let stream = self.stream.try_clone().map_err(Refusal::no_descriptor)?;
        let id = self
            .shared
            .sessions
            .add(info.clone(), nonce, stream, pidfd, Arc::clone(&heard))
            .map_err(Refusal::limit)?;
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
        self.stream.set_timeouts(None, SEND_TIMEOUT).map_err(Refusal::limit)?;
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
            self.shared.store.writer_gone(WriterId(former), Instant::now());
            let owner = self.shared.engines.replace(&info.engine_id, former, id);
            if let Some(owner) = owner.filter(|_| info.role == Role::Scheduler) {
                self.shared.store.adopt(owner, owner, &live);
            }
        }
    }
    fn end(&mut self) {
        let Some(mut greeted) = self.greeted.take() else { return };
        // Its saves are over before its claims are settled.
        greeted.worker = None;
        // And no lookup takes a lease for it any more.
        greeted.late = None;
        // Others may greet with its id, too: a session that was refused or replaced ends no wait for the engine.
        let was_of_engine = greeted.info.role != Role::Tool
            && self.shared.engines.has_session(&greeted.info.engine_id, greeted.id);
        let gone = self.shared.sessions.end(greeted.id, greeted.said_bye);
        if was_of_engine {
            // Complete blocks that wait for their checksum would come yet, within milliseconds. An engine that goes is rare.
            self.shared.hand_offs.end_of(&greeted.info.engine_id, End::Gone);
        }
        if gone && greeted.info.role != Role::Tool {
            settle_session(&self.shared, greeted.id, &greeted.info.engine_id);
        }
        tracing::info!(session = greeted.id, engine = greeted.info.engine_id, gone, "session ended");
    }
}

/// How many descriptors ride on a request.
fn descriptors_of(ask: &Ask) -> usize {
    match ask {
        Ask::ShareChunks(share) => share.chunk_bytes.len(),
        _ => 0,
    }
}
