//! How an engine is set up, and within which limits.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZero;
use std::time::Duration;

use super::error::FabricError;
use crate::carriers::{CMA, TCP, TCP_SLOTS};
use crate::inbox::{InboxOptions, MESSAGE_BYTES_MAX};
use crate::tcp::{BYTES_MAX, ENTRIES_MAX, Tls};
use crate::transfers::Options;

/// Threads that copy between processes of this host, if nobody says how many, and at the most.
const COPY_THREADS_USUAL: usize = 4;
const COPY_THREADS_MAX: usize = 64;

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Where peers find it: port 0 for any. Each address is a path of its own for those who connect.
    pub listen: Vec<SocketAddr>,
    /// What peers are told instead, where they reach it at other addresses; needed where `listen` says all addresses.
    pub advertise: Vec<SocketAddr>,
    /// What both sides of a connection have to know; they prove it to each other. Needed where an address is not of this
    /// host only. Empty: [`Trust`](crate::Trust) says what is proved instead, the secret of this process's user mostly.
    pub token: String,
    /// Connections to each address of a peer.
    pub connections: usize,
    /// The carriers that may move bytes. With None each post takes the best that both sides have.
    pub transport: Option<Transport>,
    /// So many threads at the most copy between this process and others of this host, whoever waits among them; 1 to 64.
    /// The others are made when 256 KiB or more are to be copied for the first time, and sleep when there is nothing.
    pub copy_threads: usize,
    /// Whether what crosses sockets carries checksums (crc32c), so that bytes which a network, or a host on the way, has
    /// changed are not taken for those that were sent: the connection ends then, and what it had under way is sent again. If
    /// one side has it off, there are none. With TLS there are none either: it finds every change itself.
    pub checksums: bool,
    /// With it all connections are encrypted, and nothing is sent to peers that have none. What is encrypted goes by TCP.
    pub tls: Option<Tls>,
    /// The limits of transfers.
    pub transfers: Options,
    /// The limits of what waits for [`crate::Engine::receive`].
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
            checksums: true,
            tls: None,
            transfers: Options::default(),
            inbox: InboxOptions::default(),
        }
    }
}

/// As many as this process has processors, but few: what is left of the memory's rate is others'.
fn copy_threads() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get).min(COPY_THREADS_USUAL)
}

/// Names of the carriers that a caller requires, of this crate or another: bytes go by these or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transport(pub &'static [&'static str]);

impl Transport {
    /// Sockets; bytes of GPUs go through pinned memory on their way.
    pub const TCP: Transport = Transport(&[TCP, TCP_SLOTS]);
    /// From the memory of one process straight into another's of the same host, by process_vm (cross-memory attach).
    pub const CMA: Transport = Transport(&[CMA]);

    pub(super) fn allows(self, name: &str) -> bool {
        self.0.contains(&name)
    }
}

impl EngineOptions {
    /// Whether an engine can be made with them, and anything can move.
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
        if !(1..=COPY_THREADS_MAX).contains(&self.copy_threads) {
            let threads = self.copy_threads;
            return Err(FabricError::Limit(format!("copy_threads {threads}: 1 to {COPY_THREADS_MAX}")));
        }
        let Some(Transport(names)) = self.transport.filter(|_| self.tls.is_some()) else { return Ok(()) };
        match names.iter().find(|name| !Transport::TCP.allows(name)) {
            Some(other) => Err(FabricError::Limit(format!("with TLS bytes go by TCP, and not by {other}"))),
            None => Ok(()),
        }
    }
}

/// Whether transfers of these limits fit into frames.
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

/// Whether any message can ever be taken.
fn check_inbox(options: &InboxOptions) -> Result<(), FabricError> {
    let fits = options.messages > 0 && options.bytes >= MESSAGE_BYTES_MAX;
    let wanted =
        || format!("an inbox has to hold one message of {MESSAGE_BYTES_MAX} bytes at least: {options:?}");
    fits.then_some(()).ok_or_else(|| FabricError::Limit(wanted()))
}
