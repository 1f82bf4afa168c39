//! Nodes from the DNS records of a name, such as a headless service's. Each name is resolved every 3 s.

use std::{future::Future, io, net::IpAddr, pin::Pin, sync::Arc, time::Duration};

use tokio::time::timeout;

use super::{
    event::{Event, Spec},
    registry::Registry,
};
use crate::{address::Address, counters::Counters};

/// Time between two look-ups of a name.
const PERIOD: Duration = Duration::from_secs(3);
/// A look-up that takes longer counts as failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// A name whose records are nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsName {
    /// A template for the nodes. Its address has the name, and the port of all nodes.
    pub like: Spec,
    /// Data-parallel ranks of each server; 0 if a server is one node.
    pub ranks: u32,
}

/// The future of a look-up.
pub type Resolving<'r> = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'r>>;

/// Resolves names; tests replace it.
pub trait Resolve: Send + Sync {
    /// All addresses of a name. On an error the name's nodes stay as they are.
    fn resolve<'r>(&'r self, host: &'r str, port: u16) -> Resolving<'r>;
}

/// The system's resolver.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'r>(&'r self, host: &'r str, port: u16) -> Resolving<'r> {
        Box::pin(async move {
            let found = tokio::net::lookup_host((host, port)).await?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }
}

/// Resolves a name every [`PERIOD`] for ever, and reports its addresses to the registry. `number` identifies the name.
pub(super) async fn look_up(
    registry: Arc<Registry>,
    resolver: Arc<dyn Resolve>,
    number: usize,
    name: DnsName,
) {
    let mut period = tokio::time::interval(PERIOD);
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let address = &name.like.address;
    let mut has_failed = false;
    loop {
        period.tick().await;
        let looked_up = timeout(PATIENCE, resolver.resolve(&address.host, address.port)).await;
        let hosts = match looked_up.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(hosts) if hosts.is_empty() => Err(io::Error::other("it has no address")),
            found => found,
        };
        let mut hosts = match hosts {
            Ok(hosts) => hosts,
            Err(error) => {
                Counters::count(&registry.shared.counters.names_failed);
                if !std::mem::replace(&mut has_failed, true) {
                    // Log: a name of the file or flags has no answer; its nodes stay, and the router asks again
                    // every few seconds. Do: correct the name or the DNS server.
                    tracing::warn!(name = address.host, %error, "name cannot be looked up; its nodes stay as they are");
                }
                continue;
            }
        };
        has_failed = false;
        hosts.sort_unstable();
        hosts.dedup();
        let ranks: Vec<Option<u32>> =
            if name.ranks == 0 { vec![None] } else { (0..name.ranks).map(Some).collect() };
        for rank in ranks {
            let like = Spec { address: Address { rank, ..address.clone() }, ..name.like.clone() };
            if let Err(refusal) = registry.apply(Event::Resolved { name: number, like, hosts: hosts.clone() })
            {
                tracing::debug!(name = address.host, %refusal, "some addresses of a name are not nodes");
            }
        }
    }
}
