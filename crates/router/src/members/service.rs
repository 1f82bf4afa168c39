//! Carries out what [`Members`] decides, and runs what tells it of events.

use std::{io, net::SocketAddr, os::unix::net::UnixListener, sync::Arc, thread::JoinHandle, time::Duration};

use tokio::sync::{mpsc, watch};

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
    stop: watch::Sender<bool>,
    thread: JoinHandle<()>,
    ping: Option<SocketAddr>,
    configured: Configured,
}

impl Membership {
    /// Begins with the nodes that are known from the start.
    ///
    /// # Errors
    /// Two of these nodes are one and have different roles, beats cannot be listened for, or the kernel gives no thread.
    pub fn start(shared: &Arc<Shared>, options: MembershipOptions) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, mut stopped) = watch::channel(false);
        let (joined, mut joining) = mpsc::unbounded_channel();
        let inner = Arc::new(Inner::new(Arc::clone(shared), joined));
        let MembershipOptions { nodes, names, resolver, ping, control } = options;
        for node in &nodes {
            inner.tell(Event::Configured(node.clone())).map_err(io::Error::other)?;
        }
        let resolver = resolver.unwrap_or_else(|| Arc::new(dns::SystemResolver));
        let configured =
            Configured::start(Arc::clone(&inner), resolver, runtime.handle().clone(), nodes, names);
        let listener = match ping {
            Some(PingOptions { at, allow }) => {
                let listener = runtime.block_on(beats::bind(at, allow.clone()))?;
                Some((listener, allow))
            }
            None => None,
        };
        let ping = listener.as_ref().map(|(listener, _)| listener.address());
        let run = async move {
            if let Some((listener, allow)) = listener {
                tokio::spawn(beats::listen(listener, allow, Arc::clone(&inner)));
            }
            if let Some(control) = control {
                let inner = Arc::clone(&inner);
                tokio::spawn(async move {
                    if let Err(error) = serve_control::serve(control, inner).await {
                        tracing::error!(%error, "the router's socket is not served");
                    }
                });
            }
            tokio::spawn(tick(Arc::clone(&inner)));
            loop {
                let joined = tokio::select! {
                    joined = joining.recv() => joined,
                    _ = stopped.changed() => return,
                };
                if let Some((id, address)) = joined {
                    tokio::spawn(probes::ask(Arc::clone(&inner), id, address));
                }
            }
        };
        let thread = std::thread::Builder::new().name("kvlane-members".into());
        let thread = thread.spawn(move || {
            runtime.block_on(run);
            // Not waiting for a look-up that hangs.
            runtime.shutdown_background();
        })?;
        Ok(Self { stop, thread, ping, configured })
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
        let _ = self.stop.send(true);
        let _ = self.thread.join();
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
