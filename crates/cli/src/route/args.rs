//! The flags of `kvlane route`.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use kvlane_router::{address::Address, members::Block, schedule::Policy};

use crate::{logging::LogFormat, route_knowledge::KnowledgeArgs, size::Size};

fn parse_share(text: &str) -> Result<f64, &'static str> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or("write a number from 0 to 1")
}

/// See the flags. Each is also a key of the file given by --config (`policy = "random"`); what is given here counts more.
#[derive(Debug, Args)]
pub(super) struct RouteArgs {
    /// A TOML file with these flags' values, and with engines as [[node]] and [[dns]] tables: docs/router-reference.md
    #[arg(long, env = "KVLANE_ROUTE_CONFIG", value_name = "FILE")]
    pub(super) config: Option<PathBuf>,

    /// Where clients are served; may be given more than once, and each has threads of its own. Beyond this host only with
    /// --api-key-file
    #[arg(
        long,
        env = "KVLANE_ROUTE_LISTEN",
        value_name = "HOST:PORT",
        value_delimiter = ',',
        default_value = "127.0.0.1:8000"
    )]
    pub(super) listen: Vec<SocketAddr>,

    /// A name under which clients may ask a router without --api-key-file; may be given more than once. Addresses and localhost
    /// always work
    #[arg(long, env = "KVLANE_ROUTE_LISTEN_HOST", value_name = "NAME", value_delimiter = ',')]
    pub(super) listen_host: Vec<String>,

    /// Where health, metrics, nodes and the last decisions are served, or off
    #[arg(long, env = "KVLANE_ROUTE_ADMIN", value_name = "HOST:PORT", default_value = "127.0.0.1:9092")]
    pub(super) admin: String,

    /// A name under which these may be asked for, such as that of a Kubernetes service; may be given more than once.
    /// Addresses and localhost always work
    #[arg(long, env = "KVLANE_ROUTE_ADMIN_HOST", value_name = "NAME", value_delimiter = ',')]
    pub(super) admin_host: Vec<String>,

    /// An engine that serves whole requests; may be given more than once
    #[arg(long, env = "KVLANE_ROUTE_WORKER", value_name = "URL", value_delimiter = ',')]
    pub(super) worker: Vec<Address>,

    /// An engine that prefills prompts for decode engines; may be given more than once
    #[arg(long, env = "KVLANE_ROUTE_PREFILL", value_name = "URL", value_delimiter = ',')]
    pub(super) prefill: Vec<Address>,

    /// An engine that goes on where a prefill engine ended; may be given more than once
    #[arg(long, env = "KVLANE_ROUTE_DECODE", value_name = "URL", value_delimiter = ',')]
    pub(super) decode: Vec<Address>,

    /// A name whose addresses are engines that serve whole requests, such as that of a headless service. It is looked up
    /// every 3 s; may be given more than once
    #[arg(long, env = "KVLANE_ROUTE_WORKER_DNS", value_name = "HOST:PORT", value_delimiter = ',')]
    pub(super) worker_dns: Vec<Address>,

    /// The same for prefill engines
    #[arg(long, env = "KVLANE_ROUTE_PREFILL_DNS", value_name = "HOST:PORT", value_delimiter = ',')]
    pub(super) prefill_dns: Vec<Address>,

    /// The same for decode engines
    #[arg(long, env = "KVLANE_ROUTE_DECODE_DNS", value_name = "HOST:PORT", value_delimiter = ',')]
    pub(super) decode_dns: Vec<Address>,

    /// Where engines say over ZeroMQ that they are there: pings of vLLM's P2P NCCL engines, which expect port 30001, and
    /// `kvlane route beat` [default: nowhere]
    #[arg(long, env = "KVLANE_ROUTE_PING", value_name = "HOST:PORT")]
    pub(super) ping: Option<SocketAddr>,

    /// Addresses that they may come from, and name; may be given more than once [default: this host's]
    #[arg(long, env = "KVLANE_ROUTE_PING_ALLOW", value_name = "CIDR", value_delimiter = ',')]
    pub(super) ping_allow: Vec<Block>,

    /// The socket over which `kvlane route list`, `drain`, `add` and `remove` reach this router, or off
    /// [default: route.sock in the user's runtime directory]
    #[arg(long, env = "KVLANE_ROUTE_SOCKET", value_name = "PATH")]
    pub(super) socket: Option<PathBuf>,

    /// How an engine is chosen: least-work takes the one with the least product of tokens to prefill and requests; least-delay,
    /// for engines of several classes, the one where it learned that first tokens come soonest; or prefix-affinity, least-loaded, power-of-two, round-robin, random
    #[arg(long, env = "KVLANE_ROUTE_POLICY", value_name = "POLICY", default_value = "least-work")]
    pub(super) policy: Policy,

    /// How a decode engine is chosen; least-delay takes one that the prefill engine hands over to soonest, as on its own host
    /// [default: as --policy says]
    #[arg(long, env = "KVLANE_ROUTE_DECODE_POLICY", value_name = "POLICY")]
    pub(super) decode_policy: Option<Policy>,

    /// A decode engine prefills by itself what takes fewer tokens than this, estimated from the text
    #[arg(long, env = "KVLANE_ROUTE_SHORT_PROMPT", value_name = "TOKENS", default_value_t = 128)]
    pub(super) short_prompt: u64,

    /// Have workers prefill or decode, as the work needs it: docs/balance.md. In the file, a table [balance] with its limits
    #[arg(long, env = "KVLANE_ROUTE_BALANCE")]
    pub(super) balance: bool,

    #[command(flatten)]
    pub(super) knowledge: KnowledgeArgs,

    /// Threads that serve clients [default: one for each four cores, 1 to 8]
    #[arg(long, env = "KVLANE_ROUTE_THREADS", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(super) threads: Option<u16>,

    /// Clients' connections at a time. For a further one the oldest without a whole head is closed, then an idle one; else it
    /// waits [default: 10000, or as many as the limit of open files allows]
    #[arg(long, env = "KVLANE_ROUTE_MAX_CONNECTIONS", value_name = "N")]
    pub(super) max_connections: Option<u32>,

    /// Longest body of a request
    #[arg(long, env = "KVLANE_ROUTE_MAX_BODY", value_name = "SIZE", default_value = "64mb")]
    pub(super) max_body: Size,

    /// Most bytes that requests take at a time, each until its answer begins: bodies, and what the router knows of them. Further
    /// requests get 503
    #[arg(long, env = "KVLANE_ROUTE_MAX_BODIES", value_name = "SIZE", default_value = "1gb")]
    pub(super) max_bodies: Size,

    /// A file with keys, one a line: clients have to show one of them as `Authorization: Bearer KEY`. Other users may not be able
    /// to read it (chmod 600)
    #[arg(long, env = "KVLANE_ROUTE_API_KEY_FILE", value_name = "FILE")]
    pub(super) api_key_file: Option<PathBuf>,

    /// Let clients send POSTs that are no inference, such as /v1/load_lora_adapter and /sleep: each goes to one engine
    #[arg(long, env = "KVLANE_ROUTE_ALLOW_ADMIN_PATHS")]
    pub(super) allow_admin_paths: bool,

    /// Leave out of /decisions what tells which prompts others have sent: cached_tokens, why and prefill
    #[arg(long, env = "KVLANE_ROUTE_QUIET_DECISIONS")]
    pub(super) quiet_decisions: bool,

    /// Seconds that an engine may take for an answer's first byte before another one is asked, once. The first byte of an
    /// answer that is not streamed is its last, so there is no limit by default
    #[arg(long, env = "KVLANE_ROUTE_FIRST_BYTE_TIMEOUT", value_name = "SECONDS")]
    pub(super) first_byte_timeout: Option<f64>,

    /// Seconds after SIGTERM in which clients are still served, while /health answers 503: until those who send clients here have
    /// seen it. A second signal ends them
    #[arg(long, env = "KVLANE_ROUTE_DRAIN_DELAY", value_name = "SECONDS", default_value_t = 5)]
    pub(super) drain_delay: u64,

    /// Seconds that requests may take after that, or after SIGINT
    #[arg(long, env = "KVLANE_ROUTE_DRAIN", value_name = "SECONDS", default_value_t = 30)]
    pub(super) drain: u64,

    /// Where an OpenTelemetry collector takes OTLP over HTTP, for spans of requests and for metrics: http://HOST:4318, or https
    /// [default: none]
    #[arg(long, env = "KVLANE_ROUTE_OTLP_ENDPOINT", value_name = "URL", hide_env_values = true)]
    pub(super) otlp_endpoint: Option<String>,

    /// A file with headers for the collector, such as `Authorization: Bearer KEY`, one a line. Other users may not be able to
    /// read it (chmod 600) [default: none]
    #[arg(long, env = "KVLANE_ROUTE_OTLP_HEADERS_FILE", value_name = "FILE")]
    pub(super) otlp_headers_file: Option<PathBuf>,

    /// The authority (PEM) that signed the collector's certificate [default: those that the host trusts]
    #[arg(long, env = "KVLANE_ROUTE_OTLP_CA_FILE", value_name = "FILE")]
    pub(super) otlp_ca_file: Option<PathBuf>,

    /// Share of the requests without a `traceparent` for which the router begins a trace, from 0 to 1. It always exports
    /// those that their client sampled
    #[arg(long, env = "KVLANE_ROUTE_OTLP_SAMPLE", value_name = "SHARE", default_value_t = 1.0, value_parser = parse_share)]
    pub(super) otlp_sample: f64,

    /// Log level: error, warn, info, debug, trace, off; or a part of kvlane and one of these, such as
    /// info,kvlane_router=debug
    #[arg(long, env = "KVLANE_LOG", value_name = "FILTER", default_value = "info")]
    pub(super) log: String,

    /// How to write the log: text for people, or one JSON object a line
    #[arg(long, env = "KVLANE_LOG_FORMAT", value_enum, value_name = "FORMAT", default_value = "text")]
    pub(super) log_format: LogFormat,
}
