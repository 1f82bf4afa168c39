//! The daemon as a whole: its options, and the order in which it starts and stops.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use kvlane_cluster::{Cluster, ClusterError, ClusterOptions};
use kvlane_door::{CONNECTIONS_MAX, Pages, Slots};
use kvlane_engine_memory::{Gpus, Meetings};
use kvlane_gpu::{Driver, GpuError, RailOptions};
use kvlane_memory::{Arena, ArenaError, ArenaOptions};
use kvlane_otlp::Metrics;
use kvlane_policy::{Choice, Window};
use kvlane_proto::Address;
use kvlane_ssd::OpenError;
use kvlane_store::{Background, Below, Source, Store, StoreOptions};
use rustix::process::{Resource, getrlimit};
use thiserror::Error;

use crate::{
    door::ListenError,
    engines::Engines,
    http, listen,
    listen::Listeners,
    metrics::{events::Events, page::otlp_metrics},
    observer::Observer,
    reaper, session,
    sessions::Sessions,
    shared::Shared,
    ssd::{Ssd, SsdOptions},
    ssd_notes::SsdNotes,
    traces::Traces,
    unreachable::Unreachable,
};

/// Least time for the SSD tier to write its last blocks and its index at the end.
const CLOSING: Duration = Duration::from_secs(2);

/// Options of a daemon. `kvlane serve` makes them from its flags.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Size and placement of the pool.
    pub arena: ArenaOptions,
    /// Where engines and tools connect.
    pub listen: Vec<Address>,
    /// Health and metrics; `None` serves none.
    pub http: Option<SocketAddr>,
    /// Host names that requests for them may name, beside `localhost` and addresses.
    pub http_hosts: Vec<String>,
    /// Threads that take the checksums of saved blocks. Other engines do not find a block before.
    pub seal_threads: usize,
    /// How fast the background check of checksums reads the pool, in bytes a second; 0 turns it off.
    pub scrub_bytes_per_s: u64,
    /// How long leases last without a heartbeat that names them.
    pub lease_ttl: Duration,
    /// Which blocks make room for others, and which come in at all.
    pub policy: Choice,
    /// Windows over which hits and their ceiling are counted.
    pub hit_windows: Vec<Window>,
    /// Where spans and metrics are exported; None for nowhere.
    pub otlp: Option<kvlane_otlp::Settings>,
    /// Connections at the same time.
    pub sessions_max: usize,
    /// Driver that copies for engines on GPUs; None serves engines in host memory only.
    pub gpu_driver: Option<Arc<dyn Driver>>,
    /// How a load for one GPU uses the links of others.
    pub rails: RailOptions,
    /// Share of a GPU's link, up to 1, that a save takes while it is not urgent: no other save is queued behind it, and no
    /// lookup awaits its engine's saves.
    pub save_link_share: f64,
    /// The SSD tier below the pool; None for none.
    pub ssd: Option<SsdOptions>,
    /// The other daemons whose blocks are hits here; None for none.
    pub cluster: Option<ClusterOptions>,
    /// How long a lookup may wait for blocks that only the SSD or another daemon has.
    pub fetch_wait: Duration,
    /// Share of the pool, up to 1, that copies of other daemons' blocks may take before they make room first.
    pub copies_share: f64,
    /// Whether to measure at start which way of copying is the fastest on this host's GPUs. Else defaults are taken.
    pub calibrate: bool,
}

/// Why a daemon does not start. Each names the offending value.
#[derive(Debug, Error)]
pub enum StartError {
    /// The pool cannot be made with these options.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// A socket or port cannot be bound.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The system gives no thread or descriptor.
    #[error("cannot start: {0}")]
    Io(#[from] std::io::Error),
    /// The SSD tier cannot be opened.
    #[error("the SSD tier: {0}")]
    Ssd(#[from] OpenError),
    /// The daemon cannot take part in its cluster.
    #[error("the cluster: {0}")]
    Cluster(#[from] ClusterError),
    /// Spans and metrics cannot be exported.
    #[error("--otlp-endpoint: {0}")]
    Otlp(std::io::Error),
    /// The pool could not be pinned for the GPUs.
    #[error("the GPUs cannot be used ({0}): mend them, or start with --gpu off")]
    Gpu(#[from] GpuError),
}

/// A running daemon.
pub struct Daemon {
    pub(crate) shared: Arc<Shared>,
    listeners: Listeners,
    http: Option<Pages>,
    reaper: Option<std::thread::JoinHandle<()>>,
    ssd_notes: Option<SsdNotes>,
    _background: Background,
}

/// Reads all metrics, while there is a daemon.
fn exported_metrics(shared: Weak<Shared>) -> impl Fn() -> Metrics + Send + 'static {
    move || shared.upgrade().map_or_else(Metrics::default, |shared| otlp_metrics(&shared))
}

impl Daemon {
    /// Binds the sockets, then pre-faults the pool (calling `progress` with the bytes done), then serves.
    ///
    /// # Errors
    /// [`StartError`], in one sentence that says what to do.
    pub fn start(options: &ServeOptions, progress: &(dyn Fn(u64) + Sync)) -> Result<Self, StartError> {
        // Binding comes first, because a second daemon on the same socket must fail before it takes memory.
        let bound = listen::bind(&options.listen)?;
        let http_bound = options.http.map(http::bind).transpose()?;
        let arena = Arc::new(Arena::create(&options.arena, progress)?);
        let pin = |driver: &Arc<dyn Driver>| {
            Gpus::start(Arc::clone(driver), Arc::clone(&arena), options.rails.clone(), options.calibrate)
        };
        let gpus = options.gpu_driver.as_ref().map(pin).transpose()?;
        let ssd = options.ssd.as_ref().map(|ssd| Ssd::open(ssd, &arena)).transpose()?;
        let cluster = options.cluster.clone().map(|cluster| Cluster::open(cluster, &arena)).transpose()?;
        let on_ssd = ssd.iter().map(|ssd| Arc::clone(&ssd.tier) as Arc<dyn Source>);
        let sources = on_ssd.chain(cluster.iter().map(|cluster| cluster.source())).collect();
        let store = Store::with_tiers(
            Arc::clone(&arena),
            StoreOptions {
                lease_ttl: options.lease_ttl,
                claim_ttl: Duration::from_secs(60),
                policy: options.policy,
                copies_share: options.copies_share,
            },
            ssd.as_ref().map(|ssd| Arc::clone(&ssd.tier) as Arc<dyn Below>),
            sources,
        );
        ssd.iter().for_each(|ssd| ssd.ask_policy_of(&store));
        let background = store.start_background(options.seal_threads, options.scrub_bytes_per_s)?;
        let descriptors = getrlimit(Resource::Nofile).current;
        let boot = kvlane_memory::random()?;
        let observer = Observer::start(&options.hit_windows)?;
        let sessions = Arc::new(Sessions::new(options.sessions_max)?);
        let mut traces_started = Ok(());
        let shared = Arc::new_cyclic(|shared| Shared {
            boot,
            started: Instant::now(),
            arena,
            store,
            engines: Engines::default(),
            sessions,
            refusals: Arc::default(),
            awaited_saves: Arc::default(),
            metrics: Arc::new(Events::default()),
            observer,
            gpus,
            meetings: Meetings::default(),
            ssd,
            cluster,
            traces: options.otlp.as_ref().and_then(|settings| {
                let started = Traces::start(settings, exported_metrics(Weak::clone(shared)));
                started.map_err(|error| traces_started = Err(error)).ok()
            }),
            fetch_wait: options.fetch_wait,
            save_link_share: options.save_link_share,
            unreachable: Unreachable::default(),
            tcp_slots: Slots::new(session::TCP_CONNECTIONS_MAX, descriptors),
            http_slots: Slots::new(CONNECTIONS_MAX, descriptors),
            stopping: AtomicBool::new(false),
        });
        traces_started.map_err(StartError::Otlp)?;
        let reaper = reaper::start(Arc::clone(&shared))?;
        let ssd_notes = shared.ssd.as_ref().map(Ssd::start_notes).transpose()?;
        let http = http_bound
            .map(|bound| http::serve(bound, options.http_hosts.clone(), Arc::clone(&shared)))
            .transpose()?;
        if let Some(cluster) = &shared.cluster {
            cluster.start(&shared.store)?;
        }
        let listeners = listen::serve(bound, &shared)?;
        Ok(Self { shared, listeners, http, reaper: Some(reaper), ssd_notes, _background: background })
    }

    /// Page size of the pool: "4 kB", "2 MB (hugetlb)", ...
    pub fn page_size(&self) -> &'static str {
        self.shared.arena.page_size()
    }

    /// Describes the driver that copies for engines on GPUs. None without one.
    pub fn gpus(&self) -> Option<String> {
        self.shared.gpus.as_ref().map(Gpus::describe)
    }

    /// Bytes that loads moved over the links of other GPUs so far.
    pub fn relayed_bytes(&self) -> u64 {
        self.shared.gpus.as_ref().map_or(0, Gpus::relayed_bytes)
    }

    /// Bytes that loads moved through the staging ring of their own GPU so far.
    pub fn staged_bytes(&self) -> u64 {
        self.shared.gpus.as_ref().map_or(0, Gpus::staged_bytes)
    }

    /// Bytes that loads brought over the link of each GPU so far, by its ordinal.
    pub fn bytes_by_link(&self) -> BTreeMap<u32, u64> {
        self.shared.gpus.as_ref().map_or_else(BTreeMap::new, Gpus::bytes_by_link)
    }

    /// Bytes of the pool.
    pub fn pool_bytes(&self) -> u64 {
        self.shared.arena.bytes()
    }

    /// Takes no new work, removes the sockets, and waits up to `drain` for calls in progress. Then closes all sessions, and
    /// writes the blocks that are still queued for the SSD. Returns whether everything ended in time.
    pub fn stop(mut self, drain: Duration) -> bool {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.awaited_saves.stop();
        self.listeners.stop();
        let deadline = Instant::now() + drain;
        let mut drained = self.shared.sessions.drain(drain);
        self.shared.sessions.close_all();
        if let Some(cluster) = &self.shared.cluster {
            cluster.stop();
        }
        if let Some(reaper) = self.reaper.take()
            && reaper.join().is_err()
        {
            // Log: a bug: memory of engines that exited was no longer freed before the daemon stopped. Do: report
            // it, with the daemon's log.
            tracing::error!("thread kvlane-reaper panicked");
        }
        if let Some(http) = self.http.take() {
            http.stop();
        }
        if let Some(ssd) = &self.shared.ssd {
            let left = || deadline.saturating_duration_since(Instant::now()).max(CLOSING);
            drained &=
                self.shared.store.settle(left()) && self.shared.store.settle_spill(Instant::now() + left());
            drained &= self.ssd_notes.take().is_none_or(|notes| notes.stop(Instant::now() + left()));
            drained &= ssd.tier.close(left());
        }
        // Last, because a silent collector must not take the SSD's time.
        if let Some(traces) = &self.shared.traces {
            traces.stop();
        }
        drained
    }
}
