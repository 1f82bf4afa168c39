//! `kvlane route beat`.

use anyhow::{Result, anyhow};
use clap::Args;
use kvlane_router::{
    address::Address,
    members::{BeatTo, ConnectorAddress, Spec, beat},
    schedule::{Connector, Role},
};
use tokio::signal::unix::{SignalKind, signal};

use crate::logging::{self, LogFormat};

/// Each field is a flag; its text is the flag's help.
#[derive(Debug, Args)]
pub(crate) struct BeatArgs {
    /// The router's --ping
    #[arg(long, value_name = "HOST:PORT")]
    to: String,
    /// The engine's role: worker, prefill or decode
    #[arg(long)]
    role: Role,
    /// Where the router reaches the engine
    #[arg(long)]
    url: Address,
    /// Prefill and decode engines of one group hand over to each other
    #[arg(long, default_value = "")]
    group: String,
    /// How they do that: store, nixl, p2p-nccl or direct [default: store]
    #[arg(long)]
    connector: Option<Connector>,
    /// Where other engines reach its ZeroMQ socket, for p2p-nccl
    #[arg(long, value_name = "HOST:PORT", value_parser = |text: &str| text.parse::<ConnectorAddress>())]
    zmq: Option<ConnectorAddress>,
    /// Where it hands over (its kvlane.direct.listen), for direct
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "zmq",
          value_parser = |text: &str| text.parse::<ConnectorAddress>())]
    handoff: Option<ConnectorAddress>,
}

/// Beats until SIGTERM or SIGINT.
pub(super) fn run(args: BeatArgs) -> Result<()> {
    let filter = logging::parse_filter("info").map_err(|sentence| anyhow!(sentence))?;
    logging::start(filter, LogFormat::Text);
    let node = Spec {
        group: args.group.into(),
        connector: args.connector,
        connector_address: args.zmq.or(args.handoff).map(|address| address.0),
        ..Spec::new(args.url, args.role)
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut term, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let ended = async {
            tokio::select! {
                _ = term.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        beat(&BeatTo { router: args.to, node }, ended).await?;
        Ok(())
    })
}
