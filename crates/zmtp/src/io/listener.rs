//! [`Listener`]: a listening ROUTER socket that only receives.
//!
//! One task accepts connections, and one task per connection runs its session. All messages go into one bounded queue;
//! while it is full, no connection is read.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::connection::{Connection, ConnectionError};
use crate::{Event, Limits, SocketType};

/// Pause after a failed accept, for instance without free descriptors, so that connections can end meanwhile.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Limits and timeouts of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerOptions {
    /// Limits on the bytes of each peer.
    pub limits: Limits,
    /// Limit of connections; one more is closed at once.
    pub connections: usize,
    /// Timeout of a handshake.
    pub handshake: Duration,
    /// A connection without a whole message or command for this long is closed.
    pub idle: Duration,
    /// Limit of messages that wait for [`Listener::recv`]. While it is reached, no connection is read.
    pub queue: usize,
}

impl Default for ListenerOptions {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            connections: 256,
            handshake: Duration::from_secs(5),
            idle: Duration::from_secs(60),
            queue: 64,
        }
    }
}

/// A message from a peer of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// The other end of the connection.
    pub peer: SocketAddr,
    /// The peer's identity, which is only a claim: two peers may claim the same. A peer without one gets five bytes
    /// that begin with a zero, as no claimed identity does.
    pub identity: Bytes,
    /// At least one frame; together within the limits of the connection.
    pub frames: Vec<Bytes>,
}

/// Counters of a listener's connections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections that were accepted. Some of them also count below, when they were closed.
    pub accepted: u64,
    /// Connections closed at once because the connection limit was reached.
    pub refused: u64,
    /// Connections closed at once because their address is not admitted.
    pub strangers: u64,
    /// Connections closed because the peer broke the protocol or a limit.
    pub breaches: u64,
    /// Connections closed because the handshake timed out.
    pub handshakes_late: u64,
    /// Connections closed because they were idle for too long.
    pub idle: u64,
    /// Failed calls of accept, for instance without free descriptors.
    pub accepts_failed: u64,
}

#[derive(Debug, Default)]
struct Counters {
    accepted: AtomicU64,
    refused: AtomicU64,
    strangers: AtomicU64,
    breaches: AtomicU64,
    handshakes_late: AtomicU64,
    idle: AtomicU64,
    accepts_failed: AtomicU64,
}

/// A ROUTER socket to which DEALER, REQ and ROUTER sockets connect. It receives, and never sends a message.
///
/// A peer that breaks the protocol loses only its own connection. Dropping the listener ends all connections.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    received: mpsc::Receiver<Received>,
    counters: Arc<Counters>,
    accepting: JoinHandle<()>,
}

impl Listener {
    /// Listens at `address`. Call it within a tokio runtime with I/O and time, which runs the connections.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn bind(address: SocketAddr, options: ListenerOptions) -> std::io::Result<Self> {
        Self::bind_for(address, options, |_| true).await
    }

    /// Like [`bind`](Self::bind), for peers whose addresses are admitted. Closes other connections before reading any
    /// byte.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn bind_for(
        address: SocketAddr,
        options: ListenerOptions,
        admits: impl Fn(IpAddr) -> bool + Send + 'static,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let (sender, received) = mpsc::channel(options.queue.max(1));
        let counters = Arc::new(Counters::default());
        let accepting = tokio::spawn(accept(listener, options, admits, sender, Arc::clone(&counters)));
        Ok(Self { address, received, counters, accepting })
    }

    /// The address at which this listens, with the port that the system chose.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Receives the next message of any peer. Dropping the future loses nothing.
    pub async fn recv(&mut self) -> Option<Received> {
        self.received.recv().await
    }

    /// The counters so far.
    pub fn counts(&self) -> Counts {
        let now = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            accepted: now(&self.counters.accepted),
            refused: now(&self.counters.refused),
            strangers: now(&self.counters.strangers),
            breaches: now(&self.counters.breaches),
            handshakes_late: now(&self.counters.handshakes_late),
            idle: now(&self.counters.idle),
            accepts_failed: now(&self.counters.accepts_failed),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Accepts connections until it is aborted. Dropping its set of tasks then ends the connections.
async fn accept(
    listener: TcpListener,
    options: ListenerOptions,
    admits: impl Fn(IpAddr) -> bool,
    sender: mpsc::Sender<Received>,
    counters: Arc<Counters>,
) {
    let permits = Arc::new(Semaphore::new(options.connections));
    let nameless = Arc::new(AtomicU32::new(0));
    let mut tasks = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = tasks.join_next() => continue,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                count(&counters.accepts_failed);
                tracing::debug!(%error, "accept failed");
                sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        if !admits(peer.ip()) {
            count(&counters.strangers);
            continue;
        }
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
            count(&counters.refused);
            continue;
        };
        count(&counters.accepted);
        let (sender, counters, nameless) = (sender.clone(), Arc::clone(&counters), Arc::clone(&nameless));
        tasks.spawn(async move {
            if let Err(error) = serve(stream, peer, options, &sender, &counters, &nameless).await {
                if matches!(error, ConnectionError::Protocol(_)) {
                    count(&counters.breaches);
                }
                tracing::debug!(%peer, %error, "connection ended");
            }
            drop(permit);
        });
    }
}

/// Runs one connection until it ends.
async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    options: ListenerOptions,
    sender: &mpsc::Sender<Received>,
    counters: &Counters,
    nameless: &AtomicU32,
) -> Result<(), ConnectionError> {
    let mut connection = Connection::new(stream, SocketType::Router, Bytes::new(), options.limits)?;
    let Ok(identity) = timeout(options.handshake, connection.ready()).await else {
        count(&counters.handshakes_late);
        return Err(ConnectionError::Handshake(options.handshake));
    };
    let mut identity = identity?;
    if identity.is_empty() {
        let mut generated = BytesMut::with_capacity(5);
        generated.put_u8(0);
        generated.put_u32(nameless.fetch_add(1, Ordering::Relaxed));
        identity = generated.freeze();
    }
    loop {
        let Ok(event) = timeout(options.idle, connection.next()).await else {
            count(&counters.idle);
            return Ok(());
        };
        let Event::Message(frames) = event? else { continue };
        let identity = identity.clone();
        if sender.send(Received { peer, identity, frames }).await.is_err() {
            return Ok(());
        }
    }
}
