//! `kvlane route`.

mod beat;
mod config;
mod control;
mod key_file;
mod nodes;
mod reload;
mod stop;

use std::{
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand};
use kvlane_door::{CONNECTIONS_MAX, Names, Pages, Slots};
use kvlane_router::{
    address::Address,
    admin::pages,
    balancing::Balancing,
    knowledge::EventReaders,
    loads::Loads,
    members::{AllowList, Block, Membership, MembershipOptions, PingOptions},
    proxy::Proxy,
    schedule::{Policy, Scheduler, Settings},
    shared::{ProxySettings, Shared},
    webhook::Webhook,
};
use rustix::process::{Resource, getrlimit};

use crate::{
    balance_table::BalanceTable,
    errors,
    logging::{self, LogFormat},
    open_files::{self, Needs},
    route_knowledge::{KnowledgeArgs, knowledge},
    service,
    size::Size,
};

/// Clients' connections at a time if the user sets no number.
const CONNECTIONS: u32 = 10_000;
/// Descriptors of a request: its client's connection and one to each node of a direct pair.
const CLIENTS: Needs =
    Needs { flag: "--max-connections", whom: "clients", each: 3, besides: 100, usual: 500 };

/// Runs a router, or tells a running one what to do.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct RouteCommand {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    args: RouteArgs,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show the engines of the running router.
    List(control::ListArgs),
    /// Have an engine finish what it has, and give it nothing new.
    Drain(control::DrainArgs),
    /// Add an engine, or give one requests again that was drained.
    Add(control::AddArgs),
    /// Take an engine away when it has finished what it has.
    Remove(control::RemoveArgs),
    /// Run beside an engine and tell a router every 3 s that it is there, until SIGTERM.
    Beat(beat::BeatArgs),
}

/// See the flags. Each is also a key of the file given by --config (`policy = "random"`); what is given here counts more.
#[derive(Debug, Args)]
pub(crate) struct RouteArgs {
    /// A TOML file with these flags' values, and with engines as [[node]] and [[dns]] tables: docs/routing.md
    #[arg(long, env = "KVLANE_ROUTE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,

    /// Where clients are served; may be given more than once, and each has threads of its own. Beyond this host only with
    /// --api-key-file
    #[arg(
        long,
        env = "KVLANE_ROUTE_LISTEN",
        value_name = "HOST:PORT",
        value_delimiter = ',',
        default_value = "127.0.0.1:8000"
    )]
    listen: Vec<SocketAddr>,

    /// A name under which clients may ask a router without --api-key-file; may be given more than once. Addresses and localhost
    /// always work
    #[arg(long, env = "KVLANE_ROUTE_LISTEN_HOST", value_name = "NAME", value_delimiter = ',')]
    listen_host: Vec<String>,

    /// Where health, metrics, nodes and the last decisions are served, or off
    #[arg(long, env = "KVLANE_ROUTE_ADMIN", value_name = "HOST:PORT", default_value = "127.0.0.1:9092")]
    admin: String,

    /// A name under which these may be asked for, such as that of a Kubernetes service; may be given more than once.
    /// Addresses and localhost always work
    #[arg(long, env = "KVLANE_ROUTE_ADMIN_HOST", value_name = "NAME", value_delimiter = ',')]
    admin_host: Vec<String>,

    /// An engine that serves whole requests; may be given more than once
    #[arg(long, env = "KVLANE_ROUTE_WORKER", value_name = "URL", value_delimiter = ',')]
    worker: Vec<Address>,

    /// An engine that prefills prompts for decode engines; may be given more than once
    #[arg(long, env = "KVLANE_ROUTE_PREFILL", value_name = "URL", value_delimiter = ',')]
    prefill: Vec<Address>,

    /// An engine that goes on where a prefill engine ended; may be given more than once
    #[arg(long, env = "KVLANE_ROUTE_DECODE", value_name = "URL", value_delimiter = ',')]
    decode: Vec<Address>,

    /// A name whose addresses are engines that serve whole requests, such as that of a headless service. It is looked up
    /// every 3 s; may be given more than once
    #[arg(long, env = "KVLANE_ROUTE_WORKER_DNS", value_name = "HOST:PORT", value_delimiter = ',')]
    worker_dns: Vec<Address>,

    /// The same for prefill engines
    #[arg(long, env = "KVLANE_ROUTE_PREFILL_DNS", value_name = "HOST:PORT", value_delimiter = ',')]
    prefill_dns: Vec<Address>,

    /// The same for decode engines
    #[arg(long, env = "KVLANE_ROUTE_DECODE_DNS", value_name = "HOST:PORT", value_delimiter = ',')]
    decode_dns: Vec<Address>,

    /// Where engines say over ZeroMQ that they are there: pings of vLLM's P2P NCCL engines, which expect port 30001, and
    /// `kvlane route beat` [default: nowhere]
    #[arg(long, env = "KVLANE_ROUTE_PING", value_name = "HOST:PORT")]
    ping: Option<SocketAddr>,

    /// Addresses that they may come from, and name; may be given more than once [default: this host's]
    #[arg(long, env = "KVLANE_ROUTE_PING_ALLOW", value_name = "CIDR", value_delimiter = ',')]
    ping_allow: Vec<Block>,

    /// The socket over which `kvlane route list`, `drain`, `add` and `remove` reach this router, or off
    /// [default: route.sock in the user's runtime directory]
    #[arg(long, env = "KVLANE_ROUTE_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,

    /// How an engine is chosen: least-work takes the one with the least product of tokens to prefill and requests; least-delay,
    /// for engines of several classes, the one where it learned that first tokens come soonest; or prefix-affinity, least-loaded, power-of-two, round-robin, random
    #[arg(long, env = "KVLANE_ROUTE_POLICY", value_name = "POLICY", default_value = "least-work")]
    policy: Policy,

    /// How a decode engine is chosen; least-delay takes one that the prefill engine hands over to soonest, as on its own host
    /// [default: as --policy says]
    #[arg(long, env = "KVLANE_ROUTE_DECODE_POLICY", value_name = "POLICY")]
    decode_policy: Option<Policy>,

    /// A decode engine prefills by itself what takes fewer tokens than this, estimated from the text
    #[arg(long, env = "KVLANE_ROUTE_SHORT_PROMPT", value_name = "TOKENS", default_value_t = 128)]
    short_prompt: u64,

    /// Have workers prefill or decode, as the work needs it: docs/routing.md. In the file, a table [balance] with its limits
    #[arg(long, env = "KVLANE_ROUTE_BALANCE")]
    balance: bool,

    #[command(flatten)]
    knowledge: KnowledgeArgs,

    /// Threads that serve clients [default: one for each four cores, 1 to 8]
    #[arg(long, env = "KVLANE_ROUTE_THREADS", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,

    /// Clients' connections at a time. For a further one the oldest without a whole head is closed, then an idle one; else it
    /// waits [default: 10000, or as many as the limit of open files allows]
    #[arg(long, env = "KVLANE_ROUTE_MAX_CONNECTIONS", value_name = "N")]
    max_connections: Option<u32>,

    /// Longest body of a request
    #[arg(long, env = "KVLANE_ROUTE_MAX_BODY", value_name = "SIZE", default_value = "64mb")]
    max_body: Size,

    /// Most bytes that requests take at a time, each until its answer begins: bodies, and what the router knows of them. Further
    /// requests get 503
    #[arg(long, env = "KVLANE_ROUTE_MAX_BODIES", value_name = "SIZE", default_value = "1gb")]
    max_bodies: Size,

    /// A file with keys, one a line: clients have to show one of them as `Authorization: Bearer KEY`. Other users may not be able
    /// to read it (chmod 600)
    #[arg(long, env = "KVLANE_ROUTE_API_KEY_FILE", value_name = "FILE")]
    api_key_file: Option<PathBuf>,

    /// Let clients send POSTs that are no inference, such as /v1/load_lora_adapter and /sleep: each goes to one engine
    #[arg(long, env = "KVLANE_ROUTE_ALLOW_ADMIN_PATHS")]
    allow_admin_paths: bool,

    /// Leave out of /decisions what tells which prompts others have sent: cached_tokens, why and prefill
    #[arg(long, env = "KVLANE_ROUTE_QUIET_DECISIONS")]
    quiet_decisions: bool,

    /// Seconds that an engine may take for an answer's first byte before another one is asked, once. The first byte of an
    /// answer that is not streamed is its last, so there is no limit by default
    #[arg(long, env = "KVLANE_ROUTE_FIRST_BYTE_TIMEOUT", value_name = "SECONDS")]
    first_byte_timeout: Option<f64>,

    /// Seconds after SIGTERM in which clients are still served, while /health answers 503: until those who send clients here have
    /// seen it. A second signal ends them
    #[arg(long, env = "KVLANE_ROUTE_DRAIN_DELAY", value_name = "SECONDS", default_value_t = 5)]
    drain_delay: u64,

    /// Seconds that requests may take after that, or after SIGINT
    #[arg(long, env = "KVLANE_ROUTE_DRAIN", value_name = "SECONDS", default_value_t = 30)]
    drain: u64,

    /// What is logged: error, warn, info, debug, trace, off; or a part of kvlane and one of these, such as
    /// info,kvlane_router=debug
    #[arg(long, env = "KVLANE_LOG", value_name = "FILTER", default_value = "info")]
    log: String,

    /// How it is logged
    #[arg(long, env = "KVLANE_LOG_FORMAT", value_enum, value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
}

/// Routes until SIGTERM or SIGINT, or tells a running router what to do.
pub(crate) fn run(command: RouteCommand) -> ExitCode {
    let done = match command.action {
        None => route(command.args),
        Some(Action::List(args)) => control::list(&args),
        Some(Action::Drain(args)) => control::drain(&args),
        Some(Action::Add(args)) => control::add(args),
        Some(Action::Remove(args)) => control::remove(&args),
        Some(Action::Beat(args)) => beat::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => errors::print_error(&error),
    }
}

fn route(args: RouteArgs) -> Result<()> {
    let (args, tables) = match args.config.clone() {
        None => (args, config::Tables::default()),
        Some(file) => config::read(&file)?,
    };
    let args = &args;
    let filter = logging::parse_filter(&args.log).map_err(|sentence| anyhow!(sentence))?;
    let mut settings = settings(args)?;
    let balance = tables.balance.clone().or_else(|| args.balance.then(BalanceTable::default));
    let webhook = balance.as_ref().map(BalanceTable::webhook).transpose()?.flatten();
    settings.refuse = balance.as_ref().map(BalanceTable::refuse).transpose()?.unwrap_or_default();
    let balance = balance.map(|table| table.settings()).transpose()?;
    let mut running = reload::Running::new(args, tables.values.clone(), settings.keys.clone());
    let (nodes, names) = nodes::all(args, tables)?;
    let scheduler = Settings {
        policy: args.policy,
        decode_policy: args.decode_policy.unwrap_or(args.policy),
        short_tokens: args.short_prompt,
        seed: random()?,
        ..Settings::default()
    };
    // Others may still come where names or beats bring engines.
    let is_closed = names.is_empty() && args.ping.is_none();
    let knowledge = knowledge(&args.knowledge, nodes.iter().map(|node| &node.address), is_closed)?;
    logging::start(filter, args.log_format);
    if let Some(clients) = open_files::raise_limit(&CLIENTS, args.max_connections.map(u64::from))
        && args.max_connections.is_none()
    {
        // Further clients wait, because requests under way need descriptors to reach their engines.
        settings.connections_max = settings.connections_max.min(clients.max(1) as usize);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _inside = runtime.enter();
        stop::Signals::take()?
    };
    let listen =
        |at: &SocketAddr| TcpListener::bind(at).with_context(|| format!("cannot listen at {at} (--listen)"));
    let listeners = args.listen.iter().map(listen).collect::<Result<Vec<_>>>()?;
    let shared = Shared::knowing(settings, Scheduler::new(scheduler), random()?, knowledge);
    if let Some(settings) = balance {
        shared.balance(settings);
    }
    let admin = admin(args, &shared)?;
    let (control, _socket_file) = control::bind(args.socket.as_deref(), &shared)?.unzip();
    let counts = nodes::counts(&nodes);
    let ping = args.ping.map(|at| PingOptions { at, allow: AllowList::new(args.ping_allow.clone()) });
    let options = MembershipOptions { nodes, names, ping, control, resolver: None };
    let mut members = Membership::start(&shared, options)?;
    if let Some(at) = members.ping() {
        tracing::info!("engines' beats are taken at {at}");
    }
    let loads = Loads::start(&shared)?;
    let balancing = Balancing::start(&shared, webhook.map(Webhook::start).transpose()?)?;
    let events = {
        let named = Arc::clone(&shared);
        EventReaders::start(&shared.knowledge, Box::new(move || named.names()))?
    };
    let start = |listener| Proxy::start(listener, &shared);
    let proxies = listeners.into_iter().map(start).collect::<Result<Vec<_>, _>>()?;
    for (number, proxy) in proxies.iter().enumerate() {
        if number == 0 {
            tracing::info!(
                "kvlane {} routes at http://{}: {counts}, by {}",
                env!("CARGO_PKG_VERSION"),
                proxy.address(),
                args.policy,
            );
        } else {
            tracing::info!("clients are served at http://{} too", proxy.address());
        }
    }
    service::notify(service::READY);
    let asked = runtime.block_on(signals.stop(|| running.reload(&mut members)));
    service::notify(service::STOPPING);
    let ended = stop::stop(&runtime, &mut signals, &shared, proxies, asked, running.times);
    members.stop();
    loads.stop();
    balancing.into_iter().for_each(Balancing::stop);
    events.stop();
    admin.into_iter().for_each(Pages::stop);
    tracing::info!("{ended}");
    Ok(())
}

/// The admin port, unless it is off.
fn admin(args: &RouteArgs, shared: &Arc<Shared>) -> Result<Option<Pages>> {
    if args.admin == "off" {
        return Ok(None);
    }
    let refused = || format!("--admin {}: cannot listen there; choose another HOST:PORT, or off", args.admin);
    let listener = TcpListener::bind(&args.admin).with_context(refused)?;
    tracing::info!("health, metrics, nodes and decisions at http://{}", listener.local_addr()?);
    let names = Names { program: "router", flag: "--admin-host", given: args.admin_host.clone() };
    let slots = Slots::new(CONNECTIONS_MAX, getrlimit(Resource::Nofile).current);
    Ok(Some(Pages::serve(listener, pages(Arc::clone(shared)), names, slots)?))
}

fn settings(args: &RouteArgs) -> Result<ProxySettings> {
    let keys = match &args.api_key_file {
        Some(file) => keys(file)?,
        None => match args.listen.iter().find(|at| !at.ip().is_loopback()) {
            None => Vec::new(),
            Some(at) => bail!(
                "--listen {at}: beyond this host only with --api-key-file, so that not everybody who reaches it is served"
            ),
        },
    };
    let first_byte_timeout = args
        .first_byte_timeout
        .map(|seconds| match Duration::try_from_secs_f64(seconds) {
            Ok(timeout) if !timeout.is_zero() => Ok(timeout),
            _ => Err(anyhow!("--first-byte-timeout {seconds}: give seconds, more than 0")),
        })
        .transpose()?;
    Ok(ProxySettings {
        threads: args.threads.map_or_else(|| threads_of(cores()), usize::from),
        connections_max: args.max_connections.unwrap_or(CONNECTIONS).max(1) as usize,
        body_bytes_max: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        bodies_bytes_max: usize::try_from(args.max_bodies.0).unwrap_or(usize::MAX),
        names: keys.is_empty().then(|| Names {
            program: "router",
            flag: "--listen-host",
            given: args.listen_host.clone(),
        }),
        keys: keys.into(),
        allow_admin_paths: args.allow_admin_paths,
        quiet_decisions: args.quiet_decisions,
        first_byte_timeout,
        ..ProxySettings::default()
    })
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Most of the cores are the engines'. One thread serves a stream with the least work; several answer sooner when thousands of
/// streams have something to say at once (bench/route/results/README.md).
fn threads_of(cores: usize) -> usize {
    (cores / 4).clamp(1, 8)
}

fn keys(file: &Path) -> Result<Vec<String>> {
    let text = key_file::read(file).with_context(|| format!("--api-key-file {}", file.display()))?;
    let keys: Vec<String> =
        text.lines().map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect();
    if keys.is_empty() {
        bail!("--api-key-file {}: there is no key in it; write one a line", file.display());
    }
    Ok(keys)
}

fn random() -> Result<u64> {
    let bytes = kvlane_memory::random().context("the kernel gives no random bytes")?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_quarter_of_the_cores_serves_clients() {
        let of = |cores| super::threads_of(cores);
        assert_eq!([1, 2, 4, 16, 32, 200].map(of), [1, 1, 1, 4, 8, 8]);
    }
}
