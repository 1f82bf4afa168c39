//! Connections to nodes that wait for their next request: those of one thread.

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
/// Longest idle time of a kept connection. vLLM closes one after 5 s (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`), and a request that meets
/// the close may be lost, so the router closes it first.
const IDLE_TIME_MAX: Duration = Duration::from_secs(4);
/// Period of the sweep over idle connections.
const SWEEP_PERIOD: Duration = Duration::from_secs(2);
/// Most that is read at once.
const READ_BYTES: usize = 64 << 10;

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

    /// One that can carry a request.
    pub(super) fn take(&self, address: &Arc<Address>) -> Option<TcpStream> {
        let mut idle = self.0.idle.borrow_mut();
        let of_node = idle.get_mut(address)?;
        // The last one that was used: the others may grow old and be closed.
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
