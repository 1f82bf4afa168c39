//! Carries out what [`Members`] decides, and runs what tells it of events.

use std::{io, net::SocketAddr, os::unix::net::UnixListener, sync::Arc, time::Duration};

use kvlane_door::RuntimeThread;
use tokio::sync::mpsc;

use super::{
    allow::AllowList,
    beats,
    configured::{Configured, Reconfigured},
    dns::{self, DnsName, Resolve},
    event::{Event, Refusal, Spec},
    inner::Inner,
    probes, serve_control,
};
use crate::shared::Shared;

/// How often it is looked whether something is over.
const TICK: Duration = Duration::from_millis(200);

/// Where beats are taken.
#[derive(Debug, Clone)]
pub struct PingOptions {
    /// The ZeroMQ socket.
    pub at: SocketAddr,
    /// Of nodes, and of what they name.
    pub allow: AllowList,
}

/// What tells of nodes.
#[derive(Default)]
pub struct MembershipOptions {
    /// Nodes of flags and the file.
    pub nodes: Vec<Spec>,
    /// Names whose addresses are nodes.
    pub names: Vec<DnsName>,
    /// Looks them up.
    pub resolver: Option<Arc<dyn Resolve>>,
    /// Beats, if they are taken.
    pub ping: Option<PingOptions>,
    /// The socket for operators, if there is one.
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

/// Keeps the scheduler's nodes up to date, in a thread of its own.
#[derive(Debug)]
pub struct Membership {
    thread: RuntimeThread,
    ping: Option<SocketAddr>,
    configured: Configured,
}

impl Membership {
    /// Begins with the nodes that are known from the start.
    ///
    /// # Errors
    /// Two of these nodes are one and have different roles, beats cannot be listened for, or the kernel gives no thread.
    pub fn start(shared: &Arc<Shared>, options: MembershipOptions) -> io::Result<Self> {
        let (joined, mut joining) = mpsc::unbounded_channel();
        let inner = Arc::new(Inner::new(Arc::clone(shared), joined));
        let MembershipOptions { nodes, names, resolver, ping, control } = options;
        for node in &nodes {
            inner.tell(Event::Configured(node.clone())).map_err(io::Error::other)?;
        }
        let members = Arc::clone(&inner);
        let thread = RuntimeThread::start("kvlane-members", move || async move {
            while let Some((id, address)) = joining.recv().await {
                tokio::spawn(probes::ask(Arc::clone(&members), id, address));
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
            runtime.spawn(beats::listen(listener, allow, Arc::clone(&inner)));
        }
        if let Some(control) = control {
            let inner = Arc::clone(&inner);
            runtime.spawn(async move {
                if let Err(error) = serve_control::serve(control, inner).await {
                    tracing::error!(%error, "the router's socket is not served");
                }
            });
        }
        runtime.spawn(tick(Arc::clone(&inner)));
        let resolver = resolver.unwrap_or_else(|| Arc::new(dns::SystemResolver));
        let configured = Configured::start(inner, resolver, runtime, nodes, names);
        Ok(Self { thread, ping, configured })
    }

    /// Replaces the nodes and names of flags and the file. Nodes that are gone drain, unless beats or operators name them.
    ///
    /// # Errors
    /// Two of the nodes are one and have different roles. The former configuration stays.
    pub fn configure(&mut self, nodes: Vec<Spec>, names: Vec<DnsName>) -> Result<Reconfigured, Refusal> {
        self.configured.change(nodes, names)
    }

    /// Where beats are taken.
    pub fn ping(&self) -> Option<SocketAddr> {
        self.ping
    }

    /// Ends; the nodes stay as they are.
    pub fn stop(self) {
        self.thread.stop();
    }
}

/// Has time pass.
async fn tick(inner: Arc<Inner>) {
    let mut period = tokio::time::interval(TICK);
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        period.tick().await;
        inner.end_idle();
        let _ = inner.tell(Event::Tick);
    }
}
