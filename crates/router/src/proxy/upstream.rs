//! Connections to nodes, kept alive: those of one thread.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    io,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use hyper::Response;
use thiserror::Error;
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{
    exchange::{Connection, Incoming},
    shared::Address,
};
use crate::answers::AnswerError;

/// Idle connections that are kept for each node.
const IDLE_MAX: usize = 256;
/// A connection that was idle for longer is closed.
const IDLE_TIME_MAX: Duration = Duration::from_secs(60);
/// How often that is looked after.
const SWEEP_PERIOD: Duration = Duration::from_secs(5);
/// Most that is read at once.
const READ_BYTES: usize = 64 << 10;

/// A node did not answer, or not to the end.
#[derive(Debug, Error)]
pub(super) enum UpstreamError {
    #[error("it refuses connections: {0}")]
    Refused(io::Error),
    #[error("it did not take the connection within {} ms", .0.as_millis())]
    Slow(Duration),
    #[error("it ended the connection before an answer")]
    Closed,
    #[error("it ended the connection before an answer: {0}")]
    Failed(io::Error),
    #[error("it ended the connection within its answer")]
    Cut,
    #[error("the connection failed within its answer: {0}")]
    Broken(io::Error),
    #[error(transparent)]
    Nonsense(#[from] AnswerError),
}

impl UpstreamError {
    /// Whether the node may have worked at the request.
    pub(super) fn was_taken(&self) -> bool {
        !matches!(self, Self::Refused(_) | Self::Slow(_))
    }
}

/// The connections of one thread, and the buffer that it reads into.
#[derive(Debug, Clone)]
pub(super) struct Upstreams(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    idle: RefCell<HashMap<Arc<Address>, VecDeque<Idle>>>,
    /// One for all connections: what is read leaves it at once, so that a connection that waits has no buffer.
    buffer: RefCell<Box<[u8]>>,
}

#[derive(Debug)]
struct Idle {
    since: Instant,
    stream: TcpStream,
}

impl Default for Upstreams {
    fn default() -> Self {
        let buffer = RefCell::new(vec![0; READ_BYTES].into_boxed_slice());
        Self(Rc::new(Inner { idle: RefCell::default(), buffer }))
    }
}

impl Upstreams {
    /// Sends a request, a head and a body, and waits for the head of its answer. A kept connection that the node has closed
    /// meanwhile is no failure of the node: the request goes over another one then.
    pub(super) async fn send(
        &self,
        address: &Arc<Address>,
        head: Bytes,
        body: Bytes,
        connect_timeout: Duration,
    ) -> Result<Response<Incoming>, UpstreamError> {
        while let Some(stream) = self.take_idle(address) {
            let connection = Connection::new(stream, self.clone(), Arc::clone(address));
            match connection.ask(head.clone(), body.clone()).await {
                // Nothing has come back of a node that closes a connection just now: it has not worked at the request.
                Err(UpstreamError::Closed | UpstreamError::Failed(_)) => {}
                answered => return answered,
            }
        }
        let stream = connect(address, connect_timeout).await?;
        Connection::new(stream, self.clone(), Arc::clone(address)).ask(head, body).await
    }

    /// Works with the buffer that this thread reads into.
    pub(super) fn with_buffer<T>(&self, work: impl FnOnce(&mut [u8]) -> T) -> T {
        work(&mut self.0.buffer.borrow_mut())
    }

    /// Takes back a connection whose answer was read to its end.
    pub(super) fn keep(&self, address: Arc<Address>, stream: TcpStream) {
        let mut idle = self.0.idle.borrow_mut();
        let of_node = idle.entry(address).or_default();
        if of_node.len() < IDLE_MAX {
            of_node.push_back(Idle { since: Instant::now(), stream });
        }
    }

    fn take_idle(&self, address: &Arc<Address>) -> Option<TcpStream> {
        let mut idle = self.0.idle.borrow_mut();
        let of_node = idle.get_mut(address)?;
        // The last one that was used: the others may grow old and be closed.
        while let Some(Idle { stream, .. }) = of_node.pop_back() {
            if is_quiet(&stream) {
                return Some(stream);
            }
        }
        None
    }

    /// Closes connections that nodes have closed, or that nobody has used for long. For ever.
    pub(super) async fn sweep(self) {
        loop {
            sleep(SWEEP_PERIOD).await;
            self.0.idle.borrow_mut().retain(|_, of_node| {
                of_node.retain(|idle| idle.since.elapsed() < IDLE_TIME_MAX && is_quiet(&idle.stream));
                !of_node.is_empty()
            });
        }
    }
}

/// Whether nothing came over an idle connection: neither its end nor bytes that nobody has asked for. Costs a system call only
/// when something did.
fn is_quiet(stream: &TcpStream) -> bool {
    matches!(stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

async fn connect(address: &Address, connect_timeout: Duration) -> Result<TcpStream, UpstreamError> {
    let connecting = TcpStream::connect((address.host.as_str(), address.port));
    let stream = timeout(connect_timeout, connecting)
        .await
        .map_err(|_| UpstreamError::Slow(connect_timeout))?
        .map_err(UpstreamError::Refused)?;
    stream.set_nodelay(true).map_err(UpstreamError::Refused)?;
    Ok(stream)
}
