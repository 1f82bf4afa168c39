//! `kvlane route`.

use std::{
    fs, net::SocketAddr, net::TcpListener, path::PathBuf, process::ExitCode, sync::Arc, time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use kvlane_door::{CONNECTIONS_MAX, Names, Pages, Slots};
use kvlane_router::{
    admin::pages,
    probes::Probes,
    proxy::{Address, Proxy, ProxySettings, Shared},
    schedule::{Node, NodeId, Policy, Role, Scheduler, Settings},
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    errors,
    logging::{self, LogFormat},
    size::Size,
};

/// Descriptors of a request: its client's connection, and that to a node.
const DESCRIPTORS_A_REQUEST: u64 = 2;
/// And those of the program itself.
const DESCRIPTORS_BESIDES: u64 = 100;

/// See the flags.
#[derive(Debug, Args)]
pub(crate) struct RouteArgs {
    /// Where clients are served. Beyond this host only with --api-key-file
    #[arg(long, env = "KVLANE_ROUTE_LISTEN", value_name = "HOST:PORT", default_value = "127.0.0.1:8000")]
    listen: SocketAddr,

    /// Where health, metrics, nodes and the last decisions are served, or off
    #[arg(long, env = "KVLANE_ROUTE_ADMIN", value_name = "HOST:PORT", default_value = "127.0.0.1:9092")]
    admin: String,

    /// A name under which they may be asked for, such as that of a Kubernetes service; may be given more than once.
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

    /// How an engine is chosen: least-work takes the one with the least product of tokens to prefill and requests; or
    /// prefix-affinity, least-loaded, power-of-two, round-robin, random
    #[arg(long, env = "KVLANE_ROUTE_POLICY", value_name = "POLICY", default_value = "least-work")]
    policy: Policy,

    /// How a decode engine is chosen [default: as --policy says]
    #[arg(long, env = "KVLANE_ROUTE_DECODE_POLICY", value_name = "POLICY")]
    decode_policy: Option<Policy>,

    /// A decode engine prefills by itself what takes fewer tokens than this, estimated from the text
    #[arg(long, env = "KVLANE_ROUTE_SHORT_PROMPT", value_name = "TOKENS", default_value_t = 128)]
    short_prompt: u64,

    /// Threads that serve clients
    #[arg(long, env = "KVLANE_ROUTE_THREADS", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,

    /// Clients' connections at a time; further ones wait
    #[arg(long, env = "KVLANE_ROUTE_MAX_CONNECTIONS", value_name = "N", default_value_t = 10_000)]
    max_connections: u32,

    /// Longest body of a request
    #[arg(long, env = "KVLANE_ROUTE_MAX_BODY", value_name = "SIZE", default_value = "64mb")]
    max_body: Size,

    /// Most bytes of requests' bodies that are held at a time, each until its answer begins; of more, requests get 503
    #[arg(long, env = "KVLANE_ROUTE_MAX_BODIES", value_name = "SIZE", default_value = "1gb")]
    max_bodies: Size,

    /// A file with keys, one a line: clients have to show one of them as `Authorization: Bearer KEY`
    #[arg(long, env = "KVLANE_ROUTE_API_KEY_FILE", value_name = "FILE")]
    api_key_file: Option<PathBuf>,

    /// Seconds that an engine may take for an answer's first byte before another one is asked, once. The first byte of an
    /// answer that is not streamed is its last, so there is no limit by default
    #[arg(long, env = "KVLANE_ROUTE_FIRST_BYTE_TIMEOUT", value_name = "SECONDS")]
    first_byte_timeout: Option<f64>,

    /// Seconds that requests may still take after SIGTERM
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

/// Routes until SIGTERM or SIGINT.
pub(crate) fn run(args: &RouteArgs) -> ExitCode {
    match route(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => errors::tell(&error),
    }
}

fn route(args: &RouteArgs) -> Result<()> {
    let filter = logging::parse_filter(&args.log).map_err(|sentence| anyhow!(sentence))?;
    let settings = settings(args)?;
    let scheduler = Settings {
        policy: args.policy,
        decode_policy: args.decode_policy.unwrap_or(args.policy),
        short_tokens: args.short_prompt,
        seed: random()?,
        ..Settings::default()
    };
    logging::start(filter, args.log_format);
    raise_descriptor_limit(args.max_connections);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut term, mut interrupt) = {
        let _inside = runtime.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
    };
    let listener = TcpListener::bind(args.listen)
        .with_context(|| format!("cannot listen at {} (--listen)", args.listen))?;
    let shared = Shared::new(settings, Scheduler::new(scheduler), random()?);
    let admin = admin(args, &shared)?;
    let nodes = add_nodes(args, &shared);
    let probes = Probes::start(&shared, nodes)?;
    let proxy = Proxy::start(listener, &shared)?;
    tracing::info!(
        "kvlane {} routes at http://{}: {} workers, {} prefill and {} decode engines, by {}",
        env!("CARGO_PKG_VERSION"),
        proxy.address(),
        args.worker.len(),
        args.prefill.len(),
        args.decode.len(),
        args.policy,
    );
    runtime.block_on(async {
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
        }
    });
    tracing::info!(seconds = args.drain, "stopping: taking no new connections");
    proxy.stop(Duration::from_secs(args.drain));
    probes.stop();
    admin.into_iter().for_each(Pages::stop);
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
    if args.worker.is_empty() && args.prefill.is_empty() && args.decode.is_empty() {
        bail!("no engine is named: give at least one --worker, or --prefill and --decode");
    }
    if args.prefill.is_empty() != args.decode.is_empty() {
        let (given, missing) =
            if args.decode.is_empty() { ("prefill", "decode") } else { ("decode", "prefill") };
        bail!(
            "--{given} without --{missing}: engines of both kinds work together; one that serves whole requests is a --worker"
        );
    }
    let keys = match &args.api_key_file {
        Some(file) => keys(file)?,
        None if args.listen.ip().is_loopback() => Vec::new(),
        None => bail!(
            "--listen {}: beyond this host only with --api-key-file, so that not everybody who reaches it is served",
            args.listen
        ),
    };
    let first_byte_timeout = args
        .first_byte_timeout
        .map(|seconds| match Duration::try_from_secs_f64(seconds) {
            Ok(timeout) if !timeout.is_zero() => Ok(timeout),
            _ => Err(anyhow!("--first-byte-timeout {seconds}: give seconds, more than 0")),
        })
        .transpose()?;
    Ok(ProxySettings {
        threads: args.threads.into(),
        connections_max: args.max_connections.max(1) as usize,
        body_bytes_max: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        bodies_bytes_max: usize::try_from(args.max_bodies.0).unwrap_or(usize::MAX),
        keys,
        first_byte_timeout,
        ..ProxySettings::default()
    })
}

fn keys(file: &PathBuf) -> Result<Vec<String>> {
    let text = fs::read_to_string(file)
        .with_context(|| format!("--api-key-file {}: cannot be read", file.display()))?;
    let keys: Vec<String> =
        text.lines().map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect();
    if keys.is_empty() {
        bail!("--api-key-file {}: there is no key in it; write one a line", file.display());
    }
    Ok(keys)
}

fn add_nodes(args: &RouteArgs, shared: &Shared) -> Vec<(NodeId, Address)> {
    let roles = [(Role::Worker, &args.worker), (Role::Prefill, &args.prefill), (Role::Decode, &args.decode)];
    let add = |role, address: &Address| {
        let node = Node::new(&address.to_string(), role, "");
        (shared.add(node, address.clone()), address.clone())
    };
    roles.iter().flat_map(|(role, addresses)| addresses.iter().map(|address| add(*role, address))).collect()
}

fn random() -> Result<u64> {
    let bytes = kvlane_memory::random().context("the kernel gives no random bytes")?;
    Ok(u64::from_le_bytes(bytes))
}

/// Each client takes a descriptor, and so does each engine's answer.
fn raise_descriptor_limit(connections: u32) {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, limit = ?limit.current, "the limit of open files cannot be raised");
    }
    let wanted = u64::from(connections) * DESCRIPTORS_A_REQUEST + DESCRIPTORS_BESIDES;
    if let Some(files) = getrlimit(Resource::Nofile).current
        && wanted > files
    {
        tracing::warn!(
            "--max-connections {connections}: this process may open {files} files, which is enough for about {} clients; \
             raise that limit (ulimit -n, LimitNOFILE= of systemd)",
            files.saturating_sub(DESCRIPTORS_BESIDES) / DESCRIPTORS_A_REQUEST
        );
    }
}
