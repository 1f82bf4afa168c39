//! Beats of nodes over ZeroMQ: pings of vLLM's P2P NCCL engines, and heartbeats of `kvlane route beat`. The router receives
//! them and applies each as an event; [`beat`] sends them.

use std::{io, net::IpAddr, net::SocketAddr, sync::Arc, time::Duration};

use kvlane_kv_events::ping::{self, MOST_PING_BYTES, Ping, decode_ping, encode_ping};
use kvlane_zmtp::{ConnectionError, Counts, Dealer, Limits, Listener, ListenerOptions, PeerOptions};
use thiserror::Error;
use tokio::{net::lookup_host, time::interval};

use super::{
    allow::AllowList,
    event::{Event, Refusal, Spec},
    registry::Registry,
};
use crate::{
    address::Address,
    beats_refused::BeatRefused,
    counters::Counters,
    schedule::{Connector, Role},
};

/// Time between two beats, as in vLLM's engines.
const PERIOD: Duration = Duration::from_secs(3);
/// Most connections of nodes at a time.
const CONNECTIONS: usize = 2048;

/// Bounds on what a peer may send.
fn options() -> ListenerOptions {
    let limits = Limits {
        frame_bytes: MOST_PING_BYTES,
        message_bytes: MOST_PING_BYTES,
        message_frames: 2,
        ..Limits::default()
    };
    ListenerOptions { limits, connections: CONNECTIONS, ..ListenerOptions::default() }
}

/// Binds the socket. It accepts connections from addresses in `allow` only.
pub(super) async fn bind(at: SocketAddr, allow: AllowList) -> io::Result<Listener> {
    Listener::bind_for(at, options(), move |peer| allow.has(peer)).await
}

/// Receives beats for ever, and applies each to the registry.
pub(super) async fn listen(mut listener: Listener, allow: AllowList, registry: Arc<Registry>) {
    let mut second = interval(Duration::from_secs(1));
    let mut seen = Counts::default();
    loop {
        let received = tokio::select! {
            received = listener.recv() => received,
            _ = second.tick() => {
                seen = count_refused(&registry, seen, listener.counts());
                continue;
            }
        };
        let Some(received) = received else { return };
        // A REQ socket sends an empty frame first.
        let message = received.frames.last().map_or(&[][..], |frame| &frame[..]);
        if let Err((reason, sentence)) = apply(message, &allow, &registry) {
            refuse(&registry, reason, 1, &format!("{sentence} (from {})", received.peer));
        }
    }
}

fn apply(message: &[u8], allow: &AllowList, registry: &Registry) -> Result<(), (BeatRefused, String)> {
    let ping = decode_ping(message).map_err(|error| (BeatRefused::Malformed, error.to_string()))?;
    let is_bye = ping.bye;
    let spec = spec_of(ping, allow)?;
    let event = if is_bye { Event::Bye(spec.address) } else { Event::Beat(spec) };
    Counters::count(&registry.shared.counters.beats);
    registry.apply(event).map_err(|refusal| {
        let reason = match refusal {
            Refusal::WasRemoved(_) => BeatRefused::Removed,
            Refusal::Differs { .. } => BeatRefused::Differs,
            Refusal::TooOften(_) => BeatRefused::TooOften,
            _ => BeatRefused::Nodes,
        };
        (reason, refusal.to_string())
    })
}

/// The node that a ping describes. Its addresses must be IP addresses in `allow`.
fn spec_of(ping: Ping, allow: &AllowList) -> Result<Spec, (BeatRefused, String)> {
    for address in [Some(&ping.http_address), ping.zmq_address.as_ref()].into_iter().flatten() {
        let is_allowed = ip_of(address).is_some_and(|ip| allow.has(ip));
        if !is_allowed {
            let sentence = format!("a node names {address}, which is no IP address in --ping-allow");
            return Err((BeatRefused::Address, sentence));
        }
    }
    let malformed = |sentence: String| (BeatRefused::Malformed, sentence);
    let address: Address = ping.http_address.parse().map_err(|error| malformed(format!("{error}")))?;
    let role = match ping.role {
        ping::Role::Prefill => Role::Prefill,
        ping::Role::Decode => Role::Decode,
        ping::Role::Worker => Role::Worker,
    };
    let connector = match (&ping.connector, &ping.zmq_address) {
        (Some(name), _) => Some(name.parse().map_err(malformed)?),
        // vLLM's engines name no connector.
        (None, Some(_)) => Some(Connector::P2pNccl),
        (None, None) => None,
    };
    let group = ping.group.unwrap_or_default().into();
    Ok(Spec {
        connector,
        connector_address: ping.zmq_address.map(Into::into),
        group,
        ..Spec::new(address, role)
    })
}

/// The IP address of `HOST:PORT`.
fn ip_of(address: &str) -> Option<IpAddr> {
    address.parse::<SocketAddr>().map(|address| address.ip()).ok()
}

/// Counts and logs the connections that the listener itself has refused.
fn count_refused(registry: &Registry, before: Counts, now: Counts) -> Counts {
    let all = [
        (
            BeatRefused::Stranger,
            now.strangers - before.strangers,
            "a connection came from outside --ping-allow",
        ),
        (
            BeatRefused::Protocol,
            now.breaches - before.breaches,
            "a peer does not speak ZeroMQ, or sent more than a ping",
        ),
        (BeatRefused::Connections, now.refused - before.refused, "the connection limit is reached"),
    ];
    for (reason, more, sentence) in all {
        if more > 0 {
            refuse(registry, reason, more, sentence);
        }
    }
    now
}

fn refuse(registry: &Registry, reason: BeatRefused, more: u64, sentence: &str) {
    if registry.shared.counters.beats_refused.add(reason, more) {
        // Log: a registration of an engine had no effect, for the reason named. Do: correct the engine's settings
        // or `--ping-allow`; a stranger's needs nothing.
        tracing::warn!(
            once = true,
            reason = reason.name(),
            "beat refused: {sentence}; further ones are only counted (kvlane_route_beats_refused_total)"
        );
    }
}

/// A node to send beats for, and their receiver.
#[derive(Debug, Clone)]
pub struct BeatTo {
    /// The router's `--ping`, `HOST:PORT`.
    pub router: String,
    /// As the beats describe it.
    pub node: Spec,
}

/// A node that beats cannot describe.
#[derive(Debug, Error)]
pub enum BeatError {
    /// Its host name does not resolve.
    #[error("the address of {0} cannot be looked up: {1}")]
    Node(Address, io::Error),
    /// A beat has no field for a path or a rank.
    #[error("{0} has a path or a rank, which a beat cannot name: give http://HOST:PORT")]
    Path(Address),
}

/// Sends a beat every 3 s until `ended` completes, then a good-bye. If the router is away, it tries again every 3 s.
///
/// # Errors
/// The beats cannot describe the node.
pub async fn beat(to: &BeatTo, ended: impl Future<Output = ()>) -> Result<(), BeatError> {
    let address = &to.node.address;
    if !address.path.is_empty() || address.rank.is_some() {
        return Err(BeatError::Path(address.clone()));
    }
    let failed = |error| BeatError::Node(address.clone(), error);
    let mut found = lookup_host((address.host.as_str(), address.port)).await.map_err(failed)?;
    let at = found.next().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
    let ping = ping_of(&to.node, at);
    let mut ended = std::pin::pin!(ended);
    let mut is_logged = false;
    loop {
        let connected = tokio::select! {
            () = &mut ended => return Ok(()),
            connected = connect(&to.router) => connected,
        };
        let error = match connected {
            Ok(mut router) => match send_beats(&mut router, &ping, ended.as_mut()).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            },
            Err(error) => error,
        };
        if !std::mem::replace(&mut is_logged, true) {
            // Log: `kvlane route beat` does not reach the router, so the router may forget the engine after 30 s.
            // Do: start the router, or correct the address of its `--ping`.
            tracing::warn!(once = true, router = to.router, %error, "cannot reach the router; trying again every 3 s");
        }
        tokio::select! {
            () = &mut ended => return Ok(()),
            () = tokio::time::sleep(PERIOD) => {}
        }
    }
}

async fn connect(router: &str) -> Result<Dealer, ConnectionError> {
    let mut found = lookup_host(router).await?;
    let at = found.next().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    Dealer::connect(at, Default::default(), PeerOptions::default()).await
}

/// Sends beats over one connection until `ended` completes, or the connection fails.
async fn send_beats(
    router: &mut Dealer,
    ping: &Ping,
    mut ended: std::pin::Pin<&mut impl Future<Output = ()>>,
) -> Result<(), ConnectionError> {
    let mut period = interval(PERIOD);
    loop {
        tokio::select! {
            () = &mut ended => {
                let bye = Ping { bye: true, ..ping.clone() };
                return router.send(&[encode_ping(&bye)]).await;
            }
            _ = period.tick() => router.send(&[encode_ping(ping)]).await?,
            // The router sends nothing, but receiving shows when it has gone.
            answer = router.recv() => drop(answer?),
        }
    }
}

fn ping_of(node: &Spec, at: SocketAddr) -> Ping {
    Ping {
        role: match node.role {
            Role::Prefill => ping::Role::Prefill,
            Role::Decode => ping::Role::Decode,
            Role::Worker => ping::Role::Worker,
        },
        http_address: at.to_string(),
        zmq_address: node.connector_address.as_deref().map(str::to_owned),
        group: Some(node.group.to_string()).filter(|group| !group.is_empty()),
        connector: node.connector.map(|connector| connector.name().to_owned()),
        bye: false,
    }
}
