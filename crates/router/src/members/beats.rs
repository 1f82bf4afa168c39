//! Beats of nodes: pings of vLLM's P2P NCCL engines, and heartbeats of `kvlane route beat`, over ZeroMQ.

use std::{io, net::IpAddr, net::SocketAddr, sync::Arc, time::Duration};

use kvlane_kv_events::ping::{self, MOST_PING_BYTES, Ping, decode_ping, encode_ping};
use kvlane_zmtp::{ConnectionError, Counts, Dealer, Limits, Listener, ListenerOptions, PeerOptions};
use thiserror::Error;
use tokio::{net::lookup_host, time::interval};

use super::{
    allow::AllowList,
    event::{Event, Refusal, Spec},
    inner::Inner,
};
use crate::{
    address::Address,
    beats_refused::BeatRefused,
    counters::Counters,
    schedule::{Connector, Role},
};

/// Between two beats, as vLLM's engines have it.
const PERIOD: Duration = Duration::from_secs(3);
/// Nodes that may be connected at a time.
const CONNECTIONS: usize = 2048;

/// What is taken of a node.
fn options() -> ListenerOptions {
    let limits = Limits {
        frame_bytes: MOST_PING_BYTES,
        message_bytes: MOST_PING_BYTES,
        message_frames: 2,
        ..Limits::default()
    };
    ListenerOptions { limits, connections: CONNECTIONS, ..ListenerOptions::default() }
}

/// Takes connections from then on.
pub(super) async fn bind(at: SocketAddr, allow: AllowList) -> io::Result<Listener> {
    Listener::bind_for(at, options(), move |peer| allow.has(peer)).await
}

/// Tells of what comes, for ever.
pub(super) async fn listen(mut listener: Listener, allow: AllowList, inner: Arc<Inner>) {
    let mut second = interval(Duration::from_secs(1));
    let mut seen = Counts::default();
    loop {
        let received = tokio::select! {
            received = listener.recv() => received,
            _ = second.tick() => {
                seen = note_counts(&inner, seen, listener.counts());
                continue;
            }
        };
        let Some(received) = received else { return };
        // A REQ socket sends an empty frame first.
        let message = received.frames.last().map_or(&[][..], |frame| &frame[..]);
        if let Err((reason, sentence)) = take(message, &allow, &inner) {
            refuse(&inner, reason, 1, &format!("{sentence} (from {})", received.peer));
        }
    }
}

fn take(message: &[u8], allow: &AllowList, inner: &Inner) -> Result<(), (BeatRefused, String)> {
    let ping = decode_ping(message).map_err(|error| (BeatRefused::Malformed, error.to_string()))?;
    let is_bye = ping.bye;
    let spec = spec_of(ping, allow)?;
    let event = if is_bye { Event::Bye(spec.address) } else { Event::Beat(spec) };
    Counters::count(&inner.shared.counters.beats);
    inner.tell(event).map_err(|refusal| {
        let reason = match refusal {
            Refusal::WasRemoved(_) => BeatRefused::Removed,
            Refusal::Differs { .. } => BeatRefused::Differs,
            Refusal::TooOften(_) => BeatRefused::TooOften,
            _ => BeatRefused::Nodes,
        };
        (reason, refusal.to_string())
    })
}

/// The node that a ping names.
fn spec_of(ping: Ping, allow: &AllowList) -> Result<Spec, (BeatRefused, String)> {
    for address in [Some(&ping.http_address), ping.zmq_address.as_ref()].into_iter().flatten() {
        let is_allowed = number_of(address).is_some_and(|number| allow.has(number));
        if !is_allowed {
            let sentence = format!("a node names {address}, which is no number of --ping-allow");
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
        // vLLM's engines name none.
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

/// The number of `HOST:PORT`.
fn number_of(address: &str) -> Option<IpAddr> {
    address.parse::<SocketAddr>().map(|address| address.ip()).ok()
}

/// Counts what the listener itself has refused.
fn note_counts(inner: &Inner, before: Counts, now: Counts) -> Counts {
    let all = [
        (
            BeatRefused::Stranger,
            now.strangers - before.strangers,
            "a connection comes from outside --ping-allow",
        ),
        (
            BeatRefused::Protocol,
            now.breaches - before.breaches,
            "a peer speaks no ZeroMQ, or sends more than a ping has",
        ),
        (BeatRefused::Connections, now.refused - before.refused, "there are as many connections as may be"),
    ];
    for (reason, more, sentence) in all {
        if more > 0 {
            refuse(inner, reason, more, sentence);
        }
    }
    now
}

fn refuse(inner: &Inner, reason: BeatRefused, more: u64, sentence: &str) {
    if inner.shared.counters.beats_refused.add(reason, more) {
        tracing::warn!(
            reason = reason.name(),
            "{sentence}: it does not count. Further ones are only counted (kvlane_route_beats_refused_total)"
        );
    }
}

/// Who beats, and for whom.
#[derive(Debug, Clone)]
pub struct BeatTo {
    /// The router's `--ping`, `HOST:PORT`.
    pub router: String,
    /// The node that is there.
    pub node: Spec,
}

/// A node that cannot be told of.
#[derive(Debug, Error)]
pub enum BeatError {
    /// Its name has no address now.
    #[error("the address of {0} cannot be looked up: {1}")]
    Node(Address, io::Error),
    /// Routers know nodes without a path only.
    #[error("{0} has a path or a rank, which a beat cannot name: give http://HOST:PORT")]
    Path(Address),
}

/// Sends a beat every 3 s until `ended` is done, then a good-bye. A router that is away misses beats.
///
/// # Errors
/// The node cannot be told of.
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
    let mut is_told = false;
    loop {
        let connected = tokio::select! {
            () = &mut ended => return Ok(()),
            connected = connect(&to.router) => connected,
        };
        let error = match connected {
            Ok(mut router) => match say(&mut router, &ping, ended.as_mut()).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            },
            Err(error) => error,
        };
        if !std::mem::replace(&mut is_told, true) {
            tracing::warn!(router = to.router, %error, "the router cannot be reached: trying again every 3 s");
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

/// Beats over one connection, until the end.
async fn say(
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
            // A router says nothing; but this tells that it has gone.
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
