//! A ROUTER socket that listens, and only receives.

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

/// After a failed accept, as without descriptors left, for the connections to become fewer.
const AFTER_FAILED_ACCEPT: Duration = Duration::from_millis(100);

/// How a listener treats its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerOptions {
    /// What is accepted of each peer.
    pub limits: Limits,
    /// Connections at a time. One more is closed at once.
    pub connections: usize,
    /// How long a handshake may take.
    pub handshake: Duration,
    /// How long a peer may go without finishing a message or a heartbeat.
    pub idle: Duration,
    /// Messages that wait for [`Listener::recv`]. While so many do, the connections are not read.
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

/// A message of one of a listener's peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// The other end of the connection.
    pub peer: SocketAddr,
    /// What the peer calls itself: a claim, and two may claim the same. A peer without an identity gets one of five bytes
    /// that begins with a zero, as no claimed one does.
    pub identity: Bytes,
    /// At least one; together no longer than the limits of the connection.
    pub frames: Vec<Bytes>,
}

/// What became of a listener's connections so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections that were taken in; those that were closed again are counted below too.
    pub accepted: u64,
    /// Connections closed at once, since there were as many as may be.
    pub refused: u64,
    /// Connections closed at once, since they came from addresses that are not admitted.
    pub strangers: u64,
    /// Connections closed since the peer broke the protocol or a limit.
    pub breaches: u64,
    /// Connections closed since the handshake took too long.
    pub handshakes_late: u64,
    /// Connections closed since nothing came for too long.
    pub idle: u64,
    /// Calls of accept that the kernel failed, such as for want of descriptors.
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

/// A ROUTER socket that DEALER, REQ and ROUTER sockets connect to. It receives and never answers.
///
/// A peer that breaks the protocol loses its own connection and nothing else. All connections end when this is dropped.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    received: mpsc::Receiver<Received>,
    counters: Arc<Counters>,
    accepting: JoinHandle<()>,
}

impl Listener {
    /// Listens at `address`. Has to be called within a tokio runtime with I/O and time, which carries the connections.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn bind(address: SocketAddr, options: ListenerOptions) -> std::io::Result<Self> {
        Self::bind_for(address, options, |_| true).await
    }

    /// The same for peers whose addresses are admitted. Others' connections are closed before anything is read.
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

    /// The address that is listened at, with the port that the system chose.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next message of any peer. May be dropped without losing anything.
    pub async fn recv(&mut self) -> Option<Received> {
        self.received.recv().await
    }

    /// What became of the connections so far.
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

/// Takes connections until it is aborted, and then drops them with its set of tasks.
async fn accept(
    listener: TcpListener,
    options: ListenerOptions,
    admits: impl Fn(IpAddr) -> bool,
    sender: mpsc::Sender<Received>,
    counters: Arc<Counters>,
) {
    let places = Arc::new(Semaphore::new(options.connections));
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
                tracing::debug!(%error, "a connection could not be accepted");
                sleep(AFTER_FAILED_ACCEPT).await;
                continue;
            }
        };
        if !admits(peer.ip()) {
            count(&counters.strangers);
            continue;
        }
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
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
                tracing::debug!(%peer, %error, "a connection ended");
            }
            drop(place);
        });
    }
}

/// One connection, until its end.
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
        let mut made_up = BytesMut::with_capacity(5);
        made_up.put_u8(0);
        made_up.put_u32(nameless.fetch_add(1, Ordering::Relaxed));
        identity = made_up.freeze();
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
