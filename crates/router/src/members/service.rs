//! [`Membership`]: the thread that runs all sources of events: probes, beats, DNS, the operators' socket and the clock.

use std::{io, net::SocketAddr, os::unix::net::UnixListener, sync::Arc, time::Duration};

use kvlane_door::RuntimeThread;
use tokio::sync::mpsc;

use super::{
    allow::AllowList,
    beats,
    configured::{Configured, Reconfigured},
    dns::{self, DnsName, Resolve},
    event::{Event, Refusal, Spec},
    probes,
    registry::Registry,
    serve_control,
};
use crate::shared::Shared;

/// Period of [`Event::Tick`], and of the removal of idle nodes.
const TICK: Duration = Duration::from_millis(200);

/// Where beats are received, and from whom.
#[derive(Debug, Clone)]
pub struct PingOptions {
    /// Address of the ZeroMQ socket.
    pub at: SocketAddr,
    /// Both the senders and the addresses that their beats name must be in it.
    pub allow: AllowList,
}

/// The sources of nodes.
#[derive(Default)]
pub struct MembershipOptions {
    /// Nodes that flags and the file name.
    pub nodes: Vec<Spec>,
    /// Names whose addresses are nodes.
    pub names: Vec<DnsName>,
    /// Resolves `names`. None: the system's resolver.
    pub resolver: Option<Arc<dyn Resolve>>,
    /// None: the router receives no beats.
    pub ping: Option<PingOptions>,
    /// The operators' socket, bound. None: there is none.
    pub control: Option<UnixListener>,
}

impl std::fmt::Debug for MembershipOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { nodes, names, ping, control, .. } = self;
        f.debug_struct("MembershipOptions")
            .field("nodes", nodes)
            .field("names", names)
            .field("ping", ping)
            .field("control", control)
            .finish_non_exhaustive()
    }
}

/// Keeps the scheduler's nodes up to date, on a thread of its own.
#[derive(Debug)]
pub struct Membership {
    thread: RuntimeThread,
    ping: Option<SocketAddr>,
    configured: Configured,
}

impl Membership {
    /// Adds the configured nodes, and starts all sources.
    ///
    /// # Errors
    /// Two configured nodes have one address and different roles, the socket for beats cannot be bound, or the kernel gives no
    /// thread.
    pub fn start(shared: &Arc<Shared>, options: MembershipOptions) -> io::Result<Self> {
        let (joined, mut joining) = mpsc::unbounded_channel();
        let registry = Arc::new(Registry::new(Arc::clone(shared), joined));
        let MembershipOptions { nodes, names, resolver, ping, control } = options;
        for node in &nodes {
            registry.apply(Event::Configured(node.clone())).map_err(io::Error::other)?;
        }
        let probed = Arc::clone(&registry);
        let thread = RuntimeThread::start("kvlane-members", move || async move {
            while let Some((id, address)) = joining.recv().await {
                tokio::spawn(probes::probe(Arc::clone(&probed), id, address));
            }
        })?;
        let runtime = thread.runtime().clone();
        let listener = match ping {
            Some(PingOptions { at, allow }) => {
                let listener = runtime.block_on(beats::bind(at, allow.clone()))?;
                Some((listener, allow))
            }
            None => None,
        };
        let ping = listener.as_ref().map(|(listener, _)| listener.address());
        if let Some((listener, allow)) = listener {
            runtime.spawn(beats::listen(listener, allow, Arc::clone(&registry)));
        }
        if let Some(control) = control {
            let registry = Arc::clone(&registry);
            runtime.spawn(async move {
                if let Err(error) = serve_control::serve(control, registry).await {
                    // Log: the router serves clients, but its socket is closed until a restart. Do: restart the
                    // router, and report its log if it repeats.
                    tracing::error!(%error, "cannot serve the router's socket: `kvlane route list` and its like do not work");
                }
            });
        }
        runtime.spawn(tick(Arc::clone(&registry)));
        let resolver = resolver.unwrap_or_else(|| Arc::new(dns::SystemResolver));
        let configured = Configured::start(registry, resolver, runtime, nodes, names);
        Ok(Self { thread, ping, configured })
    }

    /// Replaces the nodes and names of flags and the file. Dropped nodes drain, unless beats or operators name them.
    ///
    /// # Errors
    /// Two nodes have one address and different roles. The former configuration stays.
    pub fn configure(&mut self, nodes: Vec<Spec>, names: Vec<DnsName>) -> Result<Reconfigured, Refusal> {
        self.configured.change(nodes, names)
    }

    /// The bound address for beats.
    pub fn ping(&self) -> Option<SocketAddr> {
        self.ping
    }

    /// Stops all sources. The scheduler's nodes stay as they are.
    pub fn stop(self) {
        self.thread.stop();
    }
}

async fn tick(registry: Arc<Registry>) {
    let mut period = tokio::time::interval(TICK);
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        period.tick().await;
        registry.remove_idle();
        let _ = registry.apply(Event::Tick);
    }
}
