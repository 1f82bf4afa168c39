//! One non-blocking connection to the daemon.

use std::{
    fs,
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::FileTypeExt, net::UnixStream},
    },
    time::{Duration, Instant},
};

use kvlane_memory::{FolderFault, FolderRefused, RuntimeFolder, recv_with_fds, send_with_fds};
use kvlane_proto::{Address, FrameError, FrameReader, MAX_FRAME_BYTES, Message, encode_frame, v1};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use thiserror::Error;

use crate::{
    daemon_user::{DaemonUser, Stranger},
    links::ids::NotConnected,
};

/// Most bytes that wait to be sent. Above it the daemon does not read, and is as good as down.
const OUT_BYTES_MAX: usize = 96 << 20;
/// Most descriptors that came and were not taken: the daemon sends one, with its pool.
const DESCRIPTORS_KEPT_MAX: usize = 4;
const RECEIVE_BYTES: usize = 64 << 10;
/// How long a goodbye waits for the daemon. One that is stopped finds out by itself that we are gone.
const GOODBYE: Duration = Duration::from_secs(1);

/// No connection.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// Nobody answers there.
    #[error("{}", describe_refusal(address, error))]
    Refused {
        /// Where the daemon was looked for.
        address: Address,
        /// Why: most often that there is no socket, or that nobody accepts.
        error: io::Error,
    },
    /// The folder of the default socket may be a stranger's. Nothing was said to whoever listens there.
    #[error(transparent)]
    Folder(#[from] FolderRefused),
    /// Somebody else than the daemon that is wanted. Nothing was said to them.
    #[error("{address} is not used: {stranger}")]
    Stranger {
        /// Where the daemon was looked for.
        address: Address,
        /// Whose process listens instead, and whose would be trusted.
        stranger: Stranger,
    },
    /// The daemon refused the greeting, in its own words.
    #[error("the daemon at {address} refused: {sentence}")]
    Turned {
        /// Where it listens.
        address: Address,
        /// Why, in a sentence of the daemon that says what to do.
        sentence: String,
    },
}

impl From<ConnectError> for NotConnected {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Folder(_) | ConnectError::Stranger { .. } => Self::Refused(error.to_string()),
            ConnectError::Refused { .. } | ConnectError::Turned { .. } => Self::Absent(error.to_string()),
        }
    }
}

/// Why nobody answers, in words that say what to do.
fn describe_refusal(address: &Address, error: &io::Error) -> String {
    if error.kind() == ErrorKind::PermissionDenied {
        let own = rustix::process::geteuid().as_raw();
        return format!(
            "this process belongs to user {own}, who may not open the socket at {address}: a daemon serves its own user and \
             root; run both as the same user, or start a daemon of your own with `kvlane serve`"
        );
    }
    let why = match (error.kind(), address) {
        (ErrorKind::NotFound, _) => "there is no such socket".to_owned(),
        (ErrorKind::ConnectionRefused, Address::Unix(path)) => {
            let is_socket = fs::metadata(path).is_ok_and(|found| found.file_type().is_socket());
            let why =
                if is_socket { "its socket is there, but the daemon has ended" } else { "it is no socket" };
            why.to_owned()
        }
        (ErrorKind::ConnectionRefused, Address::Tcp(_)) => "nobody listens there".to_owned(),
        _ => error.to_string(),
    };
    format!(
        "no kvlane daemon answers at {address} ({why}): start one with `kvlane serve`, or name its address (--addr for tools, \
         kvlane.address for engines, or KVLANE_ADDR)"
    )
}

/// A connection that ended.
#[derive(Debug, Error)]
pub(crate) enum Lost {
    #[error("the daemon closed the connection")]
    Closed,
    #[error("{0} bytes wait to be sent and the daemon does not read")]
    Stuck(usize),
    #[error("a request of {0} bytes is longer than the {MAX_FRAME_BYTES} that a frame may have")]
    TooLong(usize),
    #[error("the daemon sent descriptors that nobody asked for")]
    Descriptors,
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

#[derive(Debug)]
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// A connection with its buffers. No call waits, but [`wait`](Self::wait).
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Stream,
    reader: FrameReader,
    scratch: Box<[u8]>,
    out: Vec<u8>,
    sent: usize,
    /// Descriptors that ride on the byte at this place of `out`.
    riding: Option<(usize, Vec<OwnedFd>)>,
    descriptors: Vec<OwnedFd>,
    /// The last read took all that had arrived: asking again at once would be a system call for nothing.
    drained: bool,
}

impl Connection {
    /// Connects, and says nothing to somebody who is neither this user, nor root, nor `user`.
    pub(crate) fn connect(address: &Address, user: DaemonUser) -> Result<Self, ConnectError> {
        let refused = |error| ConnectError::Refused { address: address.clone(), error };
        let stream = match address {
            Address::Unix(path) => {
                check_folder(path)?;
                let stream = connect_unix(path).map_err(refused)?;
                if let Some(stranger) = user.stranger_at(&stream).map_err(refused)? {
                    return Err(ConnectError::Stranger { address: address.clone(), stranger });
                }
                Stream::Unix(stream)
            }
            Address::Tcp(at) => TcpStream::connect_timeout(at, Duration::from_secs(1))
                .and_then(|stream| {
                    stream.set_nonblocking(true)?;
                    stream.set_nodelay(true)?;
                    Ok(Stream::Tcp(stream))
                })
                .map_err(refused)?,
        };
        Ok(Self {
            stream,
            reader: FrameReader::default(),
            scratch: vec![0; RECEIVE_BYTES].into(),
            out: Vec::new(),
            sent: 0,
            riding: None,
            descriptors: Vec::new(),
            drained: false,
        })
    }

    /// The Unix socket, for the peer's credentials.
    pub(crate) fn unix(&self) -> Option<&UnixStream> {
        match &self.stream {
            Stream::Unix(stream) => Some(stream),
            Stream::Tcp(_) => None,
        }
    }

    /// Sends a request as far as the socket takes it. Its id is the caller's.
    pub(crate) fn send(&mut self, request: &v1::Request) -> Result<(), Lost> {
        self.send_with(request, Vec::new())
    }

    /// The same with descriptors, which are closed once they are sent. Only one request with descriptors is under way at a
    /// time.
    pub(crate) fn send_with(&mut self, request: &v1::Request, descriptors: Vec<OwnedFd>) -> Result<(), Lost> {
        let waiting = self.out.len() - self.sent;
        if waiting > OUT_BYTES_MAX {
            return Err(Lost::Stuck(waiting));
        }
        if request.encoded_len() > MAX_FRAME_BYTES {
            return Err(Lost::TooLong(request.encoded_len()));
        }
        let frame = encode_frame(request);
        if !descriptors.is_empty() {
            self.riding = Some((self.out.len(), descriptors));
        }
        if self.out.is_empty() {
            self.out = frame;
        } else {
            self.out.extend_from_slice(&frame);
        }
        self.flush()
    }

    /// Sends what waits, as far as the socket takes it.
    pub(crate) fn flush(&mut self) -> Result<(), Lost> {
        while self.sent < self.out.len() {
            let written = match (&mut self.stream, &self.riding) {
                (Stream::Unix(stream), Some((at, descriptors))) if *at == self.sent => {
                    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                    send_with_fds(stream, &self.out[self.sent..], &borrowed)
                }
                (Stream::Unix(stream), Some((at, _))) if *at > self.sent => {
                    stream.write(&self.out[self.sent..*at])
                }
                (Stream::Unix(stream), _) => stream.write(&self.out[self.sent..]),
                (Stream::Tcp(stream), _) => stream.write(&self.out[self.sent..]),
            };
            match written {
                Ok(0) => return Err(Lost::Closed),
                Ok(n) => {
                    // They went with the first byte.
                    self.riding.take_if(|(at, _)| *at == self.sent);
                    self.sent += n;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.out.clear();
        self.sent = 0;
        Ok(())
    }

    /// The next answer that has arrived, without waiting.
    pub(crate) fn receive(&mut self) -> Result<Option<v1::Reply>, Lost> {
        loop {
            if let Some(reply) = self.reader.next_message()? {
                return Ok(Some(reply));
            }
            if std::mem::take(&mut self.drained) {
                return Ok(None);
            }
            let received = match &mut self.stream {
                Stream::Unix(stream) => recv_with_fds(stream, &mut self.scratch, &mut self.descriptors),
                Stream::Tcp(stream) => stream.read(&mut self.scratch),
            };
            match received {
                Ok(0) => return Err(Lost::Closed),
                Ok(_) if self.descriptors.len() > DESCRIPTORS_KEPT_MAX => return Err(Lost::Descriptors),
                Ok(n) => {
                    self.drained = n < self.scratch.len();
                    self.reader.push(&self.scratch[..n]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The descriptor that came with an answer.
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop()
    }

    /// What a wait has to watch: ready when the daemon sent something, or can take what waits.
    pub(crate) fn poll_fd(&self) -> PollFd<'_> {
        let wanted = if self.out.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        let mine = match &self.stream {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        };
        PollFd::from_borrowed_fd(mine, wanted)
    }

    /// Waits until the daemon sent something (or can take what waits), or the time is up.
    pub(crate) fn wait(&self, timeout: Duration) {
        poll_for(&mut [self.poll_fd()], Some(timeout));
    }

    /// Says goodbye and waits until the daemon has freed what this session held, or a second.
    pub(crate) fn say_goodbye(mut self, id: u64) {
        let bye = v1::Request { id, body: Some(v1::request::Body::Bye(v1::Bye {})) };
        if let Err(lost) = self.call(&bye, GOODBYE) {
            tracing::debug!(%lost, "the goodbye was not answered");
        }
    }

    /// Sends a request and waits for its answer; other answers are dropped.
    pub(crate) fn call(
        &mut self,
        request: &v1::Request,
        timeout: Duration,
    ) -> Result<Option<v1::Reply>, Lost> {
        let deadline = Instant::now() + timeout;
        self.send(request)?;
        loop {
            while let Some(reply) = self.receive()? {
                if reply.id == request.id {
                    return Ok(Some(reply));
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.wait(left);
            self.flush()?;
        }
    }
}

/// Waits for the descriptors; `None` waits without bound. An interrupted wait counts as an event: callers look again.
pub(crate) fn poll_for(watched: &mut [PollFd<'_>], timeout: Option<Duration>) {
    let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
    let _ = poll(watched, timeout.as_ref());
}

/// Where the socket lies in this user's runtime folder, that has to be this user's. Other folders are whose they may be, as
/// containers share them: there it counts who listens.
fn check_folder(path: &std::path::Path) -> Result<(), FolderRefused> {
    let folder = RuntimeFolder::of_this_user();
    if !folder.holds(path) {
        return Ok(());
    }
    match folder.open() {
        // There is no socket either, as connecting will say.
        Err(FolderRefused { why: FolderFault::Missing, .. }) => Ok(()),
        opened => opened.map(drop),
    }
}

fn connect_unix(path: &std::path::Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    // Non-blocking before connecting: a stopped daemon with a full backlog would block us otherwise.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    Ok(UnixStream::from(socket))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// What was never taken stayed open: a daemon with a defect used up the engine's descriptors, and its next file or socket
    /// could not be opened.
    #[test]
    fn a_daemon_that_sends_descriptors_that_nobody_asked_for_is_hung_up_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("k.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let mut connection = Connection::connect(&Address::Unix(path), DaemonUser::default()).unwrap();
        let (daemon, _) = listener.accept().unwrap();
        // The beginning of a frame that never ends.
        let mut first: Vec<u8> = 1000u32.to_le_bytes().into();
        let mut lost = None;
        for _ in 0..100 {
            send_with_fds(&daemon, &first, &[listener.as_fd()]).unwrap();
            first = vec![0];
            connection.drained = false;
            lost = connection.receive().err();
            if lost.is_some() {
                break;
            }
        }
        assert!(
            matches!(lost, Some(Lost::Descriptors)),
            "{lost:?}, {} are kept",
            connection.descriptors.len()
        );
    }
}
