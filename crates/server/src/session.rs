//! A session: one connection and its thread, which reads requests and answers each.
//!
//! ```text
//!   connected --> greeted (Hello) --> requests and answers --> Bye, or the connection is lost --> end
//!       '- no Hello in time, a stranger's long message: closed
//! ```
//! However the thread ends, `Session::end` runs. It frees the process's claims and leases, unless the process may still touch
//! the pool (sessions.rs).

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
    awaited_saves::End,
    calls::{
        admit::admit,
        carry_out,
        context::{Answered, Context},
        table::{Call, WhileStopping},
    },
    engines::SessionId,
    greeted::Greeted,
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
/// Time for a process of the daemon's user to say Hello. Then it is cut off.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for strangers: peers over TCP, and processes of other users.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest pause over TCP between an answer and the whole next request.
const TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest message of a stranger.
const STRANGER_FRAME_BYTES: usize = 4096;
/// Connections over TCP at the same time, apart from --max-sessions.
pub(crate) const TCP_CONNECTIONS_MAX: usize = 16;
/// Longest engine id and client name, in bytes.
const NAME_BYTES_MAX: usize = 512;
/// Time for a peer to take an answer. Then it is cut off.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Most descriptors that wait for their requests: those of one request and of the next.
const DESCRIPTORS_PENDING_MAX: usize = 2 * DESCRIPTORS_MAX;

/// Serves a connection in a thread of its own.
pub(crate) fn start(stream: Stream, shared: Arc<Shared>) {
    let connected = match &stream {
        // Without a slot the connection is closed.
        Stream::Tcp(_) => match shared.tcp_slots.take() {
            Some(slot) => ConnectionSlot::Tcp(slot),
            None => return,
        },
        Stream::Unix(_) => match Connected::new(&shared.sessions) {
            Ok(connected) => ConnectionSlot::Unix(connected),
            // Log: the daemon has as many connections as it may; this engine or tool was turned away, and tries
            // again. Do: raise `--max-sessions`.
            Err(error) => return tracing::warn!(%error, "connection closed"),
        },
    };
    let spawned =
        std::thread::Builder::new().name("kvlane-session".into()).stack_size(512 << 10).spawn(move || {
            let peer = match stream.peer() {
                Ok(peer) => peer,
                // Log: the kernel did not say which process connected, so the daemon closed the connection. Do:
                // nothing if the process had just ended.
                Err(error) => return tracing::warn!(%error, "connection closed: its peer has no credentials"),
            };
            let replies = match stream.try_clone() {
                Ok(clone) => {
                    let (refusals, name) = (Arc::clone(&shared.refusals), refusal_log::name_of(&peer));
                    Arc::new(Replies::new(clone, shared.boot, refusals, name))
                }
                // Log: file descriptors ran out; the engine tries again. Do: raise the limit of open files
                // (ulimit -n, LimitNOFILE= of systemd).
                Err(error) => return tracing::warn!(%error, "connection closed: no descriptor left"),
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
                // Log: a connection ended by an error, often because its process was killed or sent nothing in
                // time. Do: look at the engine's log if it still runs.
                Err(error) => tracing::info!(session = session.id(), %error, "connection ended"),
            }
        });
    if let Err(error) = spawned {
        // Log: threads ran out; the engine tries again. Do: raise the limit of threads (ulimit -u, TasksMax= of
        // systemd, pids of the container).
        tracing::warn!(%error, "connection closed: no thread for it");
    }
}

/// Counts the connection until it ends.
#[allow(dead_code, reason = "kept for its end")]
enum ConnectionSlot {
    Unix(Connected),
    Tcp(Slot),
}

struct Session {
    stream: Stream,
    replies: Arc<Replies>,
    peer: Peer,
    shared: Arc<Shared>,
    greeted: Option<Greeted>,
    /// Received, but not yet taken by their requests.
    descriptors: VecDeque<OwnedFd>,
    _connected: ConnectionSlot,
}

/// Ends the session, also if its thread panics.
impl Drop for Session {
    fn drop(&mut self) {
        self.stream.shutdown();
        self.end();
    }
}

impl Session {
    /// Whether the peer is a process of a user who may use the daemon, by the kernel's word. Else it is a stranger.
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
        // For the whole next request, so that a peer cannot stay by sending slowly.
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
                        // A request before the greeting gains no time.
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
            greeted.last_heard_ms.store(self.shared.sessions.now_ms(), Ordering::Relaxed);
        }
        // Busy until the answer is sent, so that a stopping daemon waits for it.
        let _busy = Busy::new(&self.shared.sessions);
        let answered = match self.answer(request.id, call, ask, since) {
            Ok(Answered::Later) => return Ok(true),
            Ok(Answered::Broken(error)) => return Err(error),
            Ok(Answered::Now(answer, descriptor)) => Ok((answer, descriptor)),
            Err(refusal) => Err(refusal),
        };
        if call == Call::Bye {
            // Ended before the answer: a process that has it can rely on holding nothing.
            self.end();
        }
        let was_refused = answered.is_err();
        let (answer, descriptor) = answered.unwrap_or_else(|refusal| (refusal.into(), None));
        self.replies.send(request.id, answer, descriptor)?;
        self.shared.metrics.answered(call, since.elapsed(), was_refused);
        Ok(!(call == Call::Bye || call == Call::Hello && was_refused))
    }

    fn answer(&mut self, id: u64, call: Call, ask: Ask, since: Instant) -> Result<Answered, Refusal> {
        // Taken before any refusal, because the next call must not find the descriptors of this one.
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
        let last_heard_ms = Arc::new(AtomicU64::new(self.shared.sessions.now_ms()));
        let stream = self.stream.try_clone().map_err(Refusal::no_descriptor)?;
        let id = self
            .shared
            .sessions
            .add(info.clone(), nonce, stream, pidfd, Arc::clone(&last_heard_ms))
            .map_err(Refusal::limit)?;
        // Log: a scheduler, worker or tool has connected; the line has its process and version.
        tracing::info!(session = id, engine = info.engine_id, role = ?role, pid, client = info.client, "session greeted");
        self.greeted = Some(Greeted {
            id,
            info: info.clone(),
            nonce,
            last_heard_ms,
            said_bye: false,
            wire,
            opened: None,
            late: None,
            chunks: SharedChunks::default(),
            worker: None,
        });
        if role != Role::Tool {
            self.take_over(id, &nonce, &info, &hello.live_leases);
        }
        // From here on a silent peer is idle. Over TCP it may be that only for a while.
        self.stream.set_timeouts(None, SEND_TIMEOUT).map_err(Refusal::limit)?;
        Ok(Answer::Welcome(v1::Welcome {
            wire,
            version: env!("CARGO_PKG_VERSION").into(),
            session_id: id,
            pool_bytes: self.shared.arena.bytes(),
        }))
    }

    /// Takes over from the sessions that the same process had over lost connections: frees their claims, and keeps the
    /// leases that the process still names.
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
        // Joins the thread of saves, because the saves must be over before the claims are settled.
        greeted.worker = None;
        // Joins the thread of late lookups, so that none takes a lease afterwards.
        greeted.late = None;
        // A session that was refused or replaced also names the engine, but must not end the waits for it.
        let was_of_engine = greeted.info.role != Role::Tool
            && self.shared.engines.has_session(&greeted.info.engine_id, greeted.id);
        let gone = self.shared.sessions.end(greeted.id, greeted.said_bye);
        if was_of_engine {
            // Ends also waits whose blocks are complete and only wait for their checksums, some milliseconds. That is rare.
            self.shared.awaited_saves.end_all_of(&greeted.info.engine_id, End::Gone);
        }
        if gone && greeted.info.role == Role::Scheduler {
            self.shared.observer.engine_left(&greeted.info.engine_id);
        }
        if gone && greeted.info.role != Role::Tool {
            settle_session(&self.shared, greeted.id, &greeted.info.engine_id);
        }
        // Log: a scheduler, worker or tool has left; with gone=false its process may still live, so what it holds
        // is kept.
        tracing::info!(session = greeted.id, engine = greeted.info.engine_id, gone, "session ended");
    }
}

/// How many descriptors belong to a request.
fn descriptors_of(ask: &Ask) -> usize {
    match ask {
        Ask::ShareChunks(share) => share.chunk_bytes.len(),
        _ => 0,
    }
}
