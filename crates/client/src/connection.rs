//! A non-blocking connection to the daemon, over a Unix socket or TCP: frames out, frames and descriptors in.

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

/// Most unsent bytes. Beyond that the daemon does not read, and counts as down.
const OUT_BYTES_MAX: usize = 96 << 20;
/// Most descriptors that were received and not taken. The daemon sends one, with its pool.
const DESCRIPTORS_KEPT_MAX: usize = 4;
const RECEIVE_BYTES: usize = 64 << 10;
/// How long a goodbye waits for the daemon. A stopped daemon finds out later, from the socket, that this process is gone.
const GOODBYE: Duration = Duration::from_secs(1);

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// No process accepts connections at the address.
    #[error("{}", describe_refusal(address, error))]
    Refused {
        /// As the caller named it.
        address: Address,
        /// From the kernel: most often that there is no socket, or that no process listens.
        error: io::Error,
    },
    /// The folder of the default socket may belong to another user. Not a byte was sent.
    #[error(transparent)]
    Folder(#[from] FolderRefused),
    /// Another user's process listens. Not a byte was sent to it.
    #[error("{address} is not used: {stranger}")]
    Stranger {
        /// As the caller named it.
        address: Address,
        /// The user of the process that listens, and of this one.
        stranger: Stranger,
    },
    /// The daemon refused the greeting.
    #[error("the daemon at {address} refused: {sentence}")]
    Turned {
        /// As the caller named it.
        address: Address,
        /// The daemon's sentence, which says what to do.
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

/// Why no daemon answers, and what the user can do.
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

/// Why a connection ended.
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

/// A connection with its buffers. Only `wait`, `call`, `say_goodbye`, and connecting by TCP block.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Stream,
    reader: FrameReader,
    scratch: Box<[u8]>,
    /// Frames to send; the first `sent` bytes are out.
    out: Vec<u8>,
    sent: usize,
    /// Descriptors that are sent with the byte at this index of `out`.
    riding: Option<(usize, Vec<OwnedFd>)>,
    /// Received and not taken.
    descriptors: Vec<OwnedFd>,
    /// The last read emptied the socket. Reading again at once would waste a system call.
    drained: bool,
}

impl Connection {
    /// Connects. Sends nothing to a process whose user is neither this one, nor root, nor `user`.
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

    /// Sends a request, as far as the socket takes it. The caller has set its id.
    pub(crate) fn send(&mut self, request: &v1::Request) -> Result<(), Lost> {
        self.send_with(request, Vec::new())
    }

    /// Sends a request with descriptors, which are closed once they are sent. The caller sends no other descriptors before
    /// that.
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

    /// Sends buffered frames, as far as the socket takes them.
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
                    // Descriptors go with the first byte of their request.
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

    /// The descriptor that was received last.
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop()
    }

    /// For `poll`: ready when there is something to read, or when the socket takes buffered frames.
    pub(crate) fn poll_fd(&self) -> PollFd<'_> {
        let wanted = if self.out.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        let mine = match &self.stream {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        };
        PollFd::from_borrowed_fd(mine, wanted)
    }

    /// Waits until [`poll_fd`](Self::poll_fd) is ready, or the timeout.
    pub(crate) fn wait(&self, timeout: Duration) {
        poll_for(&mut [self.poll_fd()], Some(timeout));
    }

    /// Says goodbye, and waits until the daemon has freed what this session held, at most a second.
    pub(crate) fn say_goodbye(mut self, id: u64) {
        let bye = v1::Request { id, body: Some(v1::request::Body::Bye(v1::Bye {})) };
        if let Err(lost) = self.call(&bye, GOODBYE) {
            tracing::debug!(error = %lost, "goodbye not answered");
        }
    }

    /// Sends a request and waits for its answer; None at the timeout. Other answers are dropped.
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

/// Waits for the descriptors; `None` waits without bound. A signal ends the wait too, so callers check for events themselves.
pub(crate) fn poll_for(watched: &mut [PollFd<'_>], timeout: Option<Duration>) {
    let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
    let _ = poll(watched, timeout.as_ref());
}

/// Checks that the runtime folder belongs to this user, if the socket lies in it. Any user may own another folder, because
/// containers share them; there the user of the listening process decides.
fn check_folder(path: &std::path::Path) -> Result<(), FolderRefused> {
    let folder = RuntimeFolder::of_this_user();
    if !folder.holds(path) {
        return Ok(());
    }
    match folder.open() {
        // Without the folder there is no socket. Connecting reports that.
        Err(FolderRefused { why: FolderFault::Missing, .. }) => Ok(()),
        opened => opened.map(drop),
    }
}

fn connect_unix(path: &std::path::Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    // Non-blocking before connecting, because a stopped daemon with a full backlog would block us.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    Ok(UnixStream::from(socket))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Descriptors that were not taken stayed open. A faulty daemon used up the engine's descriptors, and its next file or socket
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
