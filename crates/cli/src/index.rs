//! `kvlane index`.

use std::{net::SocketAddr, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::Args;
use kvlane_server::{IndexOptions, IndexServer, ReplicaOptions};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    errors,
    logging::{self, LogFormat},
    reach::{Reach, ReachFlags},
    serve_options::{http_hosts, parse_http},
    service,
};

#[derive(Debug, Args)]
pub(crate) struct IndexArgs {
    /// Where daemons reach this replica; may be given more than once
    #[arg(
        long,
        env = "KVLANE_INDEX_LISTEN",
        value_name = "HOST:PORT",
        value_delimiter = ',',
        default_value = "127.0.0.1:9556"
    )]
    listen: Vec<String>,

    /// The addresses under which they reach it, if others than --listen, such as for 0.0.0.0
    #[arg(long, env = "KVLANE_INDEX_ADVERTISE", value_name = "HOST:PORT", value_delimiter = ',')]
    advertise: Vec<String>,

    /// A file with the secret that all daemons of the cluster share: their --cluster-token-file. Without one it listens on
    /// 127.0.0.1 only
    #[arg(long, env = "KVLANE_CLUSTER_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// Encrypt all that goes to daemons: this replica's certificate (PEM), which the authority of the others has signed
    #[arg(long, env = "KVLANE_CLUSTER_TLS_CERTIFICATE", value_name = "FILE")]
    tls_certificate: Option<PathBuf>,

    /// The key of that certificate
    #[arg(long, env = "KVLANE_CLUSTER_TLS_KEY", value_name = "FILE")]
    tls_key: Option<PathBuf>,

    /// The authority that has signed the others' certificates
    #[arg(long, env = "KVLANE_CLUSTER_TLS_AUTHORITY", value_name = "FILE")]
    tls_authority: Option<PathBuf>,

    /// Where to serve health, metrics and the list of daemons (/owners); off for nowhere
    #[arg(long, env = "KVLANE_INDEX_HTTP", value_name = "HOST:PORT|off", default_value = "127.0.0.1:9093")]
    http: String,

    /// Further host names of these pages; may be given more than once
    #[arg(long, env = "KVLANE_HTTP_HOST", value_name = "NAME", value_delimiter = ',')]
    http_host: Option<Vec<String>>,

    /// Log this much: a level, or levels of parts such as warn,kvlane_cluster=debug
    #[arg(long, env = "KVLANE_LOG", value_name = "FILTER", default_value = "info")]
    log: String,

    /// How to write the log, which goes to stderr: text for people, or one JSON object a line
    #[arg(long, env = "KVLANE_LOG_FORMAT", value_enum, value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
}

/// Runs the replica until SIGTERM or SIGINT.
pub(crate) fn run(args: IndexArgs) -> ExitCode {
    match serve(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => errors::print_error(&error),
    }
}

fn serve(args: IndexArgs) -> Result<()> {
    logging::start(logging::parse_filter(&args.log).map_err(anyhow::Error::msg)?, args.log_format);
    let reach = ReachFlags {
        prefix: "--",
        listen: args.listen,
        advertise: args.advertise,
        token_file: args.token_file,
        certificate: args.tls_certificate,
        key: args.tls_key,
        authority: args.tls_authority,
    };
    let Reach { listen, advertise, token, tls } = reach.resolve()?;
    let http = parse_http(&args.http)?;
    let shown: Vec<String> = listen.iter().map(SocketAddr::to_string).collect();
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let replica = ReplicaOptions { listen, advertise, token, tls, name, seed: seed()? };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut term, mut interrupt) = {
        let _inside = runtime.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
    };
    let server = IndexServer::start(IndexOptions { replica, http, http_hosts: http_hosts(args.http_host)? })?;
    // Log: the replica has started; daemons that name it in `--index` announce their blocks to it.
    tracing::info!(
        "kvlane {} index at {}{}",
        env!("CARGO_PKG_VERSION"),
        shown.join(" and "),
        http.map_or(String::new(), |http| format!("; health, owners and metrics at http://{http}")),
    );
    service::notify(service::READY);
    runtime.block_on(async {
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
        }
    });
    service::notify(service::STOPPING);
    server.stop();
    Ok(())
}

/// Numbers that clients cannot know, so that they cannot choose prompts whose hashes collide in the index.
fn seed() -> Result<[u64; 2]> {
    let bytes: [u8; 16] = kvlane_memory::random().context("the kernel gives no random bytes")?;
    let all = u128::from_le_bytes(bytes);
    Ok([all as u64, (all >> 64) as u64])
}
