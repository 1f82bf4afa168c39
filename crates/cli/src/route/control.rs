//! `kvlane route list`, `drain`, `add` and `remove`: commands to a running router over its socket.

use std::{
    os::unix::net::UnixListener,
    path::Path,
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use kvlane_memory::SocketFile;
use kvlane_router::{
    address::Address,
    members::{Call, Listed},
    schedule::{Connector, NodeState, Role},
    shared::Shared,
};

use crate::route_socket::{SocketArgs, default_socket};

/// The time between two polls of an engine that drains.
const POLL_EVERY: Duration = Duration::from_millis(200);

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    socket: SocketArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    socket: SocketArgs,
    /// As `kvlane route list` names it
    node: Address,
    /// Return when it has nothing to do any more
    #[arg(long)]
    wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    #[command(flatten)]
    socket: SocketArgs,
    /// As `kvlane route list` names it
    node: Address,
    /// At once. Requests that it works at go on, but count nowhere any more
    #[arg(long)]
    now: bool,
    /// Return when it has gone
    #[arg(long)]
    wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AddArgs {
    #[command(flatten)]
    socket: SocketArgs,
    /// Where it is: http://HOST:PORT, and #RANK if it is one data-parallel rank of a server
    url: Address,
    /// Its role: worker, prefill or decode
    #[arg(long)]
    role: Role,
    /// Prefill and decode engines of one group hand over to each other
    #[arg(long, default_value = "")]
    group: String,
    /// How they do that: store, nixl, p2p-nccl or direct [default: store]
    #[arg(long)]
    connector: Option<Connector>,
    /// Where other engines reach its ZeroMQ socket, for p2p-nccl
    #[arg(long, value_name = "HOST:PORT")]
    zmq: Option<String>,
    /// Where it hands over (its kvlane.direct.listen), for direct
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "zmq")]
    handoff: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The router's side: binds the socket, unless it is off. If the default socket cannot be bound, the router goes on without.
pub(super) fn bind(path: Option<&Path>, shared: &Arc<Shared>) -> Result<Option<(UnixListener, SocketFile)>> {
    if path.is_some_and(|path| path.as_os_str() == "off") {
        return Ok(None);
    }
    let default = default_socket();
    let at = path.unwrap_or(&default);
    let bound = match SocketFile::bind(at) {
        Ok(bound) => bound,
        Err(error) if path.is_some() => {
            return Err(error).with_context(|| format!("--socket {}: cannot listen there", at.display()));
        }
        Err(error) => {
            // Log: the default socket cannot be made; the router runs without it, and serves clients. Do: mend
            // what the error names, or choose another `--socket`, and restart.
            tracing::warn!(
                path = %at.display(), %error,
                "router has no socket: `kvlane route list`, `drain`, `add` and `remove` cannot reach it"
            );
            return Ok(None);
        }
    };
    shared.counters.control.store(1, Ordering::Relaxed);
    Ok(Some(bound))
}

/// Prints all engines.
pub(super) fn list(args: &ListArgs) -> Result<()> {
    print(&args.socket.ask(&Call::List)?, args.json)
}

/// Drains an engine, and waits for its end if asked to.
pub(super) fn drain(args: &DrainArgs) -> Result<()> {
    let node = args.node.to_string();
    let mut nodes = args.socket.ask(&Call::Drain { node: node.clone() })?;
    loop {
        let requests: u64 = nodes.iter().map(|node| node.requests).sum();
        if !args.wait || requests == 0 {
            println!("{node} is draining: {requests} requests are under way");
            return Ok(());
        }
        thread::sleep(POLL_EVERY);
        nodes = args.socket.ask(&Call::List)?;
        nodes.retain(|each| each.node == node);
        if nodes.iter().any(|node| node.state != NodeState::Draining.name()) {
            bail!("{node} does not drain any more: somebody has added it again");
        }
    }
}

/// Adds an engine to the router.
pub(super) fn add(args: AddArgs) -> Result<()> {
    let call = Call::Add {
        url: args.url.to_string(),
        role: args.role.name().to_owned(),
        group: Some(args.group),
        connector: args.connector.map(|connector| connector.name().to_owned()),
        connector_address: args.zmq.or(args.handoff),
    };
    print(&args.socket.ask(&call)?, args.json)
}

/// Removes an engine from the router.
pub(super) fn remove(args: &RemoveArgs) -> Result<()> {
    let node = args.node.to_string();
    let mut left = args.socket.ask(&Call::Remove { node: node.clone(), now: args.now })?;
    while args.wait && !left.is_empty() {
        thread::sleep(POLL_EVERY);
        left = args.socket.ask(&Call::List)?;
        left.retain(|each| each.node == node);
    }
    match left.first() {
        None => println!("{node} has gone"),
        Some(left) => {
            println!("{node} goes when the {} requests that are under way have ended", left.requests)
        }
    }
    Ok(())
}

fn print(nodes: &[Listed], json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(&serde_json::json!({ "nodes": nodes }))?);
        return Ok(());
    }
    let head = ["NODE", "ROLE", "STATE", "REQUESTS", "GROUP", "CONNECTOR", "KNOWN BY", "MODELS", "CONDITION"];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(nodes.iter().map(|node| {
        let or_dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
        [
            node.node.clone(),
            node.role.clone(),
            if node.condition.ejected { "ejected".to_owned() } else { node.state.clone() },
            node.requests.to_string(),
            or_dash(node.group.clone()),
            node.connector.clone(),
            or_dash(node.known_by.join(",")),
            or_dash(node.models.join(",")),
            or_dash(node.condition.sentence()),
        ]
    }));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    for row in &rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
        println!("{}", cells.join("  ").trim_end());
    }
    Ok(())
}
