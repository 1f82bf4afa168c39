//! [`EngineOptions`]: the options of an engine, their defaults, and their checks.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZero;
use std::time::Duration;

use super::error::FabricError;
use crate::carriers::{CMA, CUDA, TCP, TCP_SLOTS};
use crate::inbox::{InboxOptions, MESSAGE_BYTES_MAX};
use crate::tcp::{BYTES_MAX, ENTRIES_MAX, Tls};
use crate::transfers::Options;

/// Most default [`EngineOptions::copy_threads`].
const COPY_THREADS_USUAL: usize = 4;
/// Most threads of one kind that a caller may ask for.
const THREADS_MAX: usize = 64;

/// The options of an engine.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Addresses to listen on; port 0 takes a free port. Each is a path of its own for peers that connect.
    pub listen: Vec<SocketAddr>,
    /// The addresses in the descriptor, if peers reach this engine at others than `listen`. Required if `listen` has an
    /// unspecified address (0.0.0.0 or ::).
    pub advertise: Vec<SocketAddr>,
    /// The secret that both sides of a connection prove to each other. Required if other hosts reach an address. Empty: the
    /// sides prove what [`Trust`](crate::Trust) says instead, mostly the secret of this process's user.
    pub token: String,
    /// Connections to each address of a peer.
    pub connections: usize,
    /// The carriers that may move bytes. None: each post takes the best that both sides have.
    pub transport: Option<Transport>,
    /// Most threads that copy between this process and others of this host, 1 to 64. A thread that waits for a transfer is
    /// one of them. The engine makes the others when it first copies 256 KiB or more; they sleep while there is no copy.
    pub copy_threads: usize,
    /// Threads of the engine that read and write sockets, 1 to 64. One thread moves a few GB/s. More of them serve several
    /// connections at once: those of several peers, several addresses, or more [`EngineOptions::connections`].
    pub socket_threads: usize,
    /// Whether bytes through sockets carry checksums (crc32c), which find changes by a network or a host on the way. If one
    /// differs, the connection ends, and what it had under way is sent again. If one side has this off, there are no
    /// checksums. With TLS there are none either, because it finds every change itself.
    pub checksums: bool,
    /// Encrypts all connections. Bytes then go by TCP only, and nothing is sent to peers without TLS.
    pub tls: Option<Tls>,
    /// The limits of transfers.
    pub transfers: Options,
    /// The limits of messages that wait for [`crate::Engine::receive`].
    pub inbox: InboxOptions,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            listen: vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0)],
            advertise: Vec::new(),
            token: String::new(),
            connections: 1,
            transport: None,
            copy_threads: copy_threads(),
            socket_threads: 1,
            checksums: true,
            tls: None,
            transfers: Options::default(),
            inbox: InboxOptions::default(),
        }
    }
}

/// One for each processor of this process, but at most [`COPY_THREADS_USUAL`], to leave memory bandwidth to others.
fn copy_threads() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get).min(COPY_THREADS_USUAL)
}

/// Names of the carriers that a caller requires, of this crate or another. Bytes go by these or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transport(pub &'static [&'static str]);

impl Transport {
    /// No carrier. The engine sends and receives messages, and has no connections for bytes.
    pub const NONE: Transport = Transport(&[]);
    /// Sockets. Bytes of GPUs go through pinned memory of the host on their way.
    pub const TCP: Transport = Transport(&[TCP, TCP_SLOTS]);
    /// Straight from a GPU's memory of one process into a GPU's memory of another on the same host. The host's memory is out of
    /// its reach.
    pub const CUDA: Transport = Transport(&[CUDA]);
    /// Straight from the memory of one process into that of another on the same host, by process_vm (cross-memory attach).
    pub const CMA: Transport = Transport(&[CMA]);

    pub(super) fn allows(self, name: &str) -> bool {
        self.0.contains(&name)
    }
}

impl EngineOptions {
    /// Checks that an engine with these options can be made, and can move bytes and messages.
    pub(super) fn check(&self) -> Result<(), FabricError> {
        let is_open = |address: &&SocketAddr| !address.ip().is_loopback() && self.token.is_empty();
        if let Some(open) = self.listen.iter().find(is_open) {
            return Err(FabricError::NoToken(*open));
        }
        let all = self.listen.iter().find(|address| address.ip().is_unspecified());
        if let Some(all) = all.filter(|_| self.advertise.is_empty()) {
            return Err(FabricError::NoAddressToTell(*all));
        }
        check_transfers(&self.transfers)?;
        check_inbox(&self.inbox)?;
        for (name, threads) in [("copy_threads", self.copy_threads), ("socket_threads", self.socket_threads)]
        {
            if !(1..=THREADS_MAX).contains(&threads) {
                return Err(FabricError::Limit(format!("{name} {threads}: 1 to {THREADS_MAX}")));
            }
        }
        let Some(Transport(names)) = self.transport.filter(|_| self.tls.is_some()) else { return Ok(()) };
        match names.iter().find(|name| !Transport::TCP.allows(name)) {
            Some(other) => Err(FabricError::Limit(format!("with TLS bytes go by TCP, and not by {other}"))),
            None => Ok(()),
        }
    }
}

/// Checks that posts of these limits fit into frames, and that nothing is stuck or retried without a pause.
fn check_transfers(options: &Options) -> Result<(), FabricError> {
    let Options { chunk_bytes, chunk_runs, credits, bulk_every, live_max, backoff, room_pause, .. } = options;
    let is_one = (1..=BYTES_MAX).contains(chunk_bytes)
        && (1..=ENTRIES_MAX).contains(chunk_runs)
        && *credits > 0
        && *bulk_every > 1
        && *live_max > 0
        && *backoff > Duration::ZERO
        && *room_pause > Duration::ZERO;
    let wanted = || {
        format!(
            "transfers need chunks of 1 to {BYTES_MAX} bytes and 1 to {ENTRIES_MAX} runs, credits, pauses, room for \
             one transfer, and bulk at most every second time: {options:?}"
        )
    };
    is_one.then_some(()).ok_or_else(|| FabricError::Limit(wanted()))
}

/// Checks that the inbox has room for one message of the largest size.
fn check_inbox(options: &InboxOptions) -> Result<(), FabricError> {
    let fits = options.messages > 0 && options.bytes >= MESSAGE_BYTES_MAX;
    let wanted =
        || format!("an inbox has to hold one message of {MESSAGE_BYTES_MAX} bytes at least: {options:?}");
    fits.then_some(()).ok_or_else(|| FabricError::Limit(wanted()))
}
