//! `kvlane route`.

mod args;
mod beat;
mod config;
mod control;
mod nodes;
mod reload;
mod settings;
mod stop;

use std::{
    net::{SocketAddr, TcpListener},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context, Result, anyhow};
use clap::{Args, Subcommand};
use kvlane_door::{CONNECTIONS_MAX, Names, Pages, Slots};
use kvlane_router::{
    admin::pages,
    balancing::Balancing,
    knowledge::EventReaders,
    live::Live,
    loads::Loads,
    members::{AllowList, Membership, MembershipOptions, PingOptions},
    proxy::Proxy,
    schedule::{Policy, Scheduler},
    shared::Shared,
    webhook::Webhook,
};
use rustix::process::{Resource, getrlimit};
use tokio::signal::unix::SignalKind;

use self::args::RouteArgs;
use crate::{
    balance_table::BalanceTable,
    errors, logging,
    open_files::{self, Needs},
    otlp,
    record::{self, RouteRecordArgs},
    route_knowledge::knowledge,
    service,
};

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
    /// Record the requests of the running router, for `kvlane replay --route`: times, lengths, and a number for each part of a
    /// prompt's text.
    Record(RouteRecordArgs),
    /// Run beside an engine and tell a router every 3 s that it is there, until SIGTERM.
    Beat(beat::BeatArgs),
}

/// Routes until SIGTERM or SIGINT, or tells a running router what to do. `program` is the whole command line of kvlane.
pub(crate) fn run(command: RouteCommand, program: clap::Command) -> ExitCode {
    let done = match command.action {
        None => route(command.args, program),
        Some(Action::List(args)) => control::list(&args),
        Some(Action::Drain(args)) => control::drain(&args),
        Some(Action::Add(args)) => control::add(args),
        Some(Action::Remove(args)) => control::remove(&args),
        Some(Action::Record(args)) => record::run_at_router(&args),
        Some(Action::Beat(args)) => beat::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => errors::print_error(&error),
    }
}

fn route(args: RouteArgs, program: clap::Command) -> Result<()> {
    let (args, tables) = match args.config.clone() {
        None => (args, config::Tables::default()),
        Some(file) => config::read(&file, &program)?,
    };
    let args = &args;
    let filter = logging::parse_filter(&args.log).map_err(|sentence| anyhow!(sentence))?;
    let mut settings = settings::proxies(args)?;
    let balance = tables.balance.clone().or_else(|| args.balance.then(BalanceTable::default));
    let webhook = balance.as_ref().map(BalanceTable::webhook).transpose()?.flatten();
    settings.refuse = balance.as_ref().map(BalanceTable::refuse).transpose()?.unwrap_or_default();
    let balance = balance.map(|table| table.settings()).transpose()?;
    let mut running = reload::Running::new(args, tables.values.clone(), settings.keys.clone(), program);
    let otlp = otlp::settings(
        args.otlp_endpoint.as_deref(),
        args.otlp_headers_file.as_deref(),
        args.otlp_ca_file.as_deref(),
        "kvlane-router",
    )?;
    let (nodes, names) = nodes::all(args, tables)?;
    let scheduler = Scheduler::new(settings::scheduler(args, random()?));
    // Names and beats may bring further engines.
    let is_closed = names.is_empty() && args.ping.is_none();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Tokenizers take seconds to load. A SIGHUP in the meantime waits; SIGTERM and SIGINT end the router at once.
    let hangup = stop::take(&runtime, SignalKind::hangup())?;
    let knowledge = knowledge(&args.knowledge, nodes.iter().map(|node| &node.address), is_closed)?;
    logging::start(filter, args.log_format);
    if let Some(clients) = open_files::raise_limit(&CLIENTS, args.max_connections.map(u64::from))
        && args.max_connections.is_none()
    {
        // Further clients wait, because requests under way need descriptors to reach their engines.
        settings.connections_max = settings.connections_max.min(clients.max(1) as usize);
    }
    let mut signals = stop::Signals::take(&runtime, hangup)?;
    let listen =
        |at: &SocketAddr| TcpListener::bind(at).with_context(|| format!("cannot listen at {at} (--listen)"));
    let listeners = args.listen.iter().map(listen).collect::<Result<Vec<_>>>()?;
    let shared = Shared::with_knowledge(settings, scheduler, random()?, knowledge);
    if let Some(settings) = balance {
        shared.balance(settings);
    }
    if let Some(settings) = otlp {
        shared.export(&settings, args.otlp_sample).context("--otlp-endpoint")?;
    }
    let admin = admin(args, &shared)?;
    let (control, _socket_file) = control::bind(args.socket.as_deref(), &shared)?.unzip();
    let counts = nodes::counts(&nodes);
    let ping = args.ping.map(|at| PingOptions { at, allow: AllowList::new(args.ping_allow.clone()) });
    let options = MembershipOptions { nodes, names, ping, control, resolver: None };
    let mut members = Membership::start(&shared, options)?;
    if let Some(at) = members.ping() {
        // Log: engines and `kvlane route beat` register at this address (`--ping`).
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
    log_addresses(&proxies, &counts, args.policy);
    service::notify(service::READY);
    let cause = runtime.block_on(signals.stop(|| running.reload(&mut members)));
    service::notify(service::STOPPING);
    let ended = stop::stop(&runtime, &mut signals, &shared, proxies, cause, running.times);
    members.stop();
    loads.stop();
    balancing.into_iter().for_each(Balancing::stop);
    events.stop();
    admin.into_iter().for_each(Pages::stop);
    shared.stop_export();
    // Log "stopped: nothing cut": the router ended, and no request was cut.
    // Log "stopped: 1 request cut after <...> s": a request was still under way when `--drain` was over. Do:
    // raise `--drain` if answers may take longer.
    // Log "stopped: <cut> requests cut after <...> s": these requests were still under way when `--drain` was
    // over. Do: raise `--drain` if answers may take longer.
    tracing::info!("{ended}");
    Ok(())
}

/// Logs where clients are served.
fn log_addresses(proxies: &[Proxy], engines: &str, policy: Policy) {
    for (number, proxy) in proxies.iter().enumerate() {
        if number == 0 {
            // Log: the router has started: where clients reach it, which engines it was given, and its policy.
            tracing::info!(
                "kvlane {} routes at http://{}: {engines}, by {policy}",
                env!("CARGO_PKG_VERSION"),
                proxy.address(),
            );
        } else {
            // Log: a further address of `--listen` at which clients are served.
            tracing::info!("clients are served at http://{} too", proxy.address());
        }
    }
}

/// The admin port, unless it is off.
fn admin(args: &RouteArgs, shared: &Arc<Shared>) -> Result<Option<Pages>> {
    if args.admin == "off" {
        return Ok(None);
    }
    let refused = || format!("--admin {}: cannot listen there; choose another HOST:PORT, or off", args.admin);
    let listener = TcpListener::bind(&args.admin).with_context(refused)?;
    // Log: the address of the admin port (`--admin`).
    tracing::info!("health, metrics, nodes and decisions at http://{}", listener.local_addr()?);
    let names = Names { program: "router", flag: "--admin-host", given: args.admin_host.clone() };
    let slots = Slots::new(CONNECTIONS_MAX, getrlimit(Resource::Nofile).current);
    let live = Live::new(random()?);
    let mut sampler = live.sampler(Arc::clone(shared));
    let pages = pages(Arc::clone(shared), live);
    Ok(Some(Pages::serve(listener, pages, names, slots, move || sampler.sample())?))
}

fn random() -> Result<u64> {
    let bytes = kvlane_memory::random().context("the kernel gives no random bytes")?;
    Ok(u64::from_le_bytes(bytes))
}
