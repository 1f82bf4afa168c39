//! The idle connections to nodes, and the read buffer, of one thread.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    io,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{net::TcpStream, time::sleep};

use crate::address::Address;

/// Idle connections that are kept for each node.
const IDLE_MAX: usize = 256;
/// Longest idle time of a kept connection. vLLM closes one after 5 s (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`). A request that meets the
/// close may be lost, so the router closes the connection first.
const IDLE_TIME_MAX: Duration = Duration::from_secs(4);
/// Period of the sweep over idle connections.
const SWEEP_PERIOD: Duration = Duration::from_secs(2);
/// Size of the read buffer.
const READ_BYTES: usize = 64 << 10;

/// The idle connections and the read buffer of one thread. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Upstreams(Rc<IdleConnections>);

#[derive(Debug)]
struct IdleConnections {
    idle: RefCell<HashMap<Arc<Address>, VecDeque<Idle>>>,
    /// One for all connections. Bytes leave it as soon as they are read, so a waiting connection needs no buffer.
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
        Self(Rc::new(IdleConnections { idle: RefCell::default(), buffer }))
    }
}

impl Upstreams {
    /// Lends the read buffer of this thread.
    pub(super) fn with_buffer<T>(&self, work: impl FnOnce(&mut [u8]) -> T) -> T {
        work(&mut self.0.buffer.borrow_mut())
    }

    /// Keeps a connection whose answer was read to its end. Closes it if the node has enough idle ones.
    pub(super) fn keep(&self, address: Arc<Address>, stream: TcpStream) {
        let mut idle = self.0.idle.borrow_mut();
        let of_node = idle.entry(address).or_default();
        if of_node.len() < IDLE_MAX {
            of_node.push_back(Idle { since: Instant::now(), stream });
        }
    }

    /// Takes a connection that can carry a request, if there is one.
    pub(super) fn take(&self, address: &Arc<Address>) -> Option<TcpStream> {
        let mut idle = self.0.idle.borrow_mut();
        let of_node = idle.get_mut(address)?;
        // The one that was used last, so that connections in excess grow old and are closed.
        while let Some(Idle { stream, since }) = of_node.pop_back() {
            if since.elapsed() < IDLE_TIME_MAX && is_quiet(&stream) {
                return Some(stream);
            }
        }
        None
    }

    /// Closes all idle connections to this node.
    pub(super) fn forget(&self, address: &Arc<Address>) {
        self.0.idle.borrow_mut().remove(address);
    }

    /// Closes connections that nodes have closed, or that have been idle too long. Runs forever.
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

/// Whether nothing came over an idle connection: neither its end nor unsolicited bytes. Costs a system call only if something
/// came.
fn is_quiet(stream: &TcpStream) -> bool {
    matches!(stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}
