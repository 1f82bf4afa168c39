//! The flags of `kvlane serve`: from the command line, else the environment, else the file, else the defaults.

pub(crate) mod cluster;
mod gpus;
mod ssd;

use std::{
    collections::HashSet, env, fs, net::SocketAddr, net::ToSocketAddrs, num::NonZeroUsize, path::Path,
    path::PathBuf, time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use kvlane_client::default_address;
use kvlane_gpu::Drivers;
use kvlane_memory::{ArenaOptions, HugePages, Numa};
use kvlane_policy::{Choice, Window};
use kvlane_proto::Address;
use kvlane_server::ServeOptions;
use serde::Deserialize;
use tracing_subscriber::EnvFilter;

use self::cluster::{ClusterFlags, ClusterTransportArg};
use self::gpus::{CalibrateArg, GpuArg, GpuFlags, StagingArg};
use self::ssd::{SsdFlags, SsdPathArg};
use crate::{
    logging::{self, LogFormat},
    otlp,
    policy_arg::{PolicyArg, PolicyParser},
    size::{Size, TypedSize},
    span::Span,
};

/// Bytes of the pool by default.
pub(crate) const DEFAULT_POOL: u64 = 4_000_000_000;
const DEFAULT_HTTP: &str = "127.0.0.1:9091";
const DEFAULT_SCRUB: u64 = 16_000_000;
const DEFAULT_SESSIONS: usize = 1024;
const DEFAULT_DRAIN_S: u64 = 10;
const DEFAULT_LOG: &str = "info";
/// A longer wait gains nothing, because the engine computes a long prompt in that time.
const DEFAULT_FETCH_WAIT_MS: u32 = 1000;
const DEFAULT_COPIES_PERCENT: u8 = 25;
/// More threads than CPUs gain nothing, and too many exhaust the machine.
const MOST_SEAL_THREADS: usize = 1024;
const MOST_DRAIN_S: u64 = 86_400;

/// Every flag is also an environment variable, and a key of the file given by --config (`pool-size = "4gb"`).
#[derive(Debug, Default, Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct ServeArgs {
    /// Size of the pool: 4gb (10^9 bytes), 4g, 4Gi or 4gib (2^30), or plain bytes. It is taken at once and kept
    /// [default: 4gb]
    #[arg(long, env = "KVLANE_POOL_SIZE", value_name = "SIZE")]
    pool_size: Option<TypedSize>,

    /// Where to listen: unix:PATH, PATH or HOST:PORT; may be given more than once. Engines need a Unix socket; TCP serves
    /// status only, to anybody. KVLANE_ADDR, which engines and tools look at, counts here too
    /// [default: kvlane.sock in the user's runtime directory]
    #[arg(long, alias = "addr", env = "KVLANE_LISTEN", value_name = "ADDRESS", value_delimiter = ',')]
    listen: Option<Vec<String>>,

    /// Where health and metrics are served, or off [default: 127.0.0.1:9091]
    #[arg(long, env = "KVLANE_HTTP", value_name = "HOST:PORT")]
    http: Option<String>,

    /// A name under which health and metrics may be asked for, such as that of a Kubernetes service; may be given more than
    /// once. Addresses and localhost always work. Other names are refused, so that no web page reads them by DNS rebinding
    /// [default: none]
    #[arg(long, env = "KVLANE_HTTP_HOST", value_name = "NAME", value_delimiter = ',')]
    http_host: Option<Vec<String>>,

    /// Back the pool by huge pages: auto takes them where they are to be had, on fails without [default: auto]
    #[arg(long, env = "KVLANE_HUGEPAGES", value_enum, value_name = "MODE")]
    hugepages: Option<HugePagesArg>,

    /// Spread the pool over the host's NUMA nodes [default: auto]
    #[arg(long, env = "KVLANE_NUMA", value_enum, value_name = "MODE")]
    numa: Option<NumaArg>,

    /// Threads that take the checksums of saved blocks, each 4 to 9 GB/s: saves that come faster than that for long find no
    /// room [default: a quarter of the CPUs, 1 to 8]
    #[arg(long, env = "KVLANE_SEAL_THREADS", value_name = "N")]
    seal_threads: Option<NonZeroUsize>,

    /// Which blocks make room for others in a full pool: lru, the least recently used; arc; wtinylfu; learned, which also says
    /// which blocks come in and what an SSD keeps; or auto, the one that shadow caches find to hit most of what is asked for.
    /// `kvlane replay` compares them, and three more, on a trace [default: lru]
    #[arg(long, env = "KVLANE_POLICY", value_parser = PolicyParser, value_name = "NAME")]
    policy: Option<PolicyArg>,

    /// Windows over which metrics and status give the hits, and what a pool without limit could have hit: up to four, of 5m
    /// to 7d. Each takes up to 0.3 MB for each of 16 namespaces [default: 15m,1h,24h]
    #[arg(long, env = "KVLANE_HIT_WINDOWS", value_name = "TIME", value_delimiter = ',')]
    hit_windows: Option<Vec<String>>,

    /// How fast checksums are verified again in the background, a second; 0 turns it off [default: 16mb]
    #[arg(long, env = "KVLANE_SCRUB_RATE", value_name = "SIZE")]
    scrub_rate: Option<Size>,

    /// Copy for engines on GPUs: auto where the host has them, on fails without [default: auto]
    #[arg(long, env = "KVLANE_GPU", value_enum, value_name = "MODE")]
    gpu: Option<GpuArg>,

    /// GPUs whose links to the host a load for another GPU may use too, while they are idle: auto for all that NVLink
    /// joins with it, off, or ordinals or UUIDs such as 1,2. Each takes a context and 64 MiB of its memory [default: off]
    #[arg(long, env = "KVLANE_RAILS", value_name = "GPUS")]
    rails: Option<String>,

    /// Bring loads of short pieces (under 32 KiB, as with tensor parallelism; 128 KiB with rails) in long runs to 64 MiB of
    /// the GPU's memory, from where a kernel scatters them: auto, or off for one piece at a time [default: auto]
    #[arg(long, env = "KVLANE_STAGING", value_enum, value_name = "MODE")]
    staging: Option<StagingArg>,

    /// Percent of a GPU's link that a save takes while no other save is queued behind it and no other engine waits for it, so
    /// that decodes do not feel it; 100 for all [default: 33]
    #[arg(long, env = "KVLANE_SAVE_LINK_SHARE", value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    save_link_share: Option<u8>,

    /// Keep blocks on an SSD too: a file or directory, and how much of it to take (default: 80 % of what is free); may be
    /// given more than once, for several devices. A restart finds the blocks again [default: none]
    #[arg(long, env = "KVLANE_SSD", value_name = "PATH[:CAPACITY]", value_delimiter = ',')]
    ssd: Option<Vec<String>>,

    /// Most bytes that are written to each SSD a second, to spare it [default: no limit]
    #[arg(long, env = "KVLANE_SSD_WRITE_RATE", value_name = "SIZE")]
    ssd_write_rate: Option<Size>,

    /// Which way SSDs' transfers go: direct, to and from the pool; staged, through memory on huge pages, which is faster where
    /// the pool has small pages; or auto, the faster one as measured [default: auto]
    #[arg(long, env = "KVLANE_SSD_PATH", value_enum, value_name = "WAY")]
    ssd_path: Option<SsdPathArg>,

    /// Memory of each SSD for staged transfers [default: 64mib]
    #[arg(long, env = "KVLANE_SSD_STAGING", value_name = "SIZE")]
    ssd_staging: Option<Size>,

    /// The other daemons of a cluster, whose blocks are hits here: HOST:PORT of each one's --cluster-listen, or a name of
    /// them all, such as a headless service. This daemon's own address may be among them [default: none]
    #[arg(long, env = "KVLANE_PEERS", value_name = "HOST:PORT", value_delimiter = ',')]
    peers: Option<Vec<String>>,

    /// Instead of --peers, for more than eight hosts: HOST:PORT of each `kvlane index`, or a name of them all. Daemons
    /// announce their blocks to each and ask one [default: none]
    #[arg(long, env = "KVLANE_INDEX", value_name = "HOST:PORT", value_delimiter = ',')]
    index: Option<Vec<String>>,

    /// Where the other daemons of the cluster reach this one; may be given more than once [default: 127.0.0.1:9555 with
    /// --peers or --index]
    #[arg(long, env = "KVLANE_CLUSTER_LISTEN", value_name = "HOST:PORT", value_delimiter = ',')]
    cluster_listen: Option<Vec<String>>,

    /// The addresses under which they reach it, if others than --cluster-listen, such as for 0.0.0.0
    #[arg(long, env = "KVLANE_CLUSTER_ADVERTISE", value_name = "HOST:PORT", value_delimiter = ',')]
    cluster_advertise: Option<Vec<String>>,

    /// A file with the secret that all daemons of the cluster share. Without one they listen on 127.0.0.1 only, and all run
    /// as one user
    #[arg(long, env = "KVLANE_CLUSTER_TOKEN_FILE", value_name = "FILE")]
    cluster_token_file: Option<PathBuf>,

    /// Encrypt all that goes between daemons: this daemon's certificate (PEM), which the authority of the others has signed
    #[arg(long, env = "KVLANE_CLUSTER_TLS_CERTIFICATE", value_name = "FILE")]
    cluster_tls_certificate: Option<PathBuf>,

    /// The key of that certificate
    #[arg(long, env = "KVLANE_CLUSTER_TLS_KEY", value_name = "FILE")]
    cluster_tls_key: Option<PathBuf>,

    /// The authority that has signed the others' certificates
    #[arg(long, env = "KVLANE_CLUSTER_TLS_AUTHORITY", value_name = "FILE")]
    cluster_tls_authority: Option<PathBuf>,

    /// The transport of blocks between daemons: auto, which takes process_vm within a host and TCP between hosts, or tcp
    /// [default: auto]
    #[arg(long, env = "KVLANE_CLUSTER_TRANSPORT", value_enum, value_name = "NAME")]
    cluster_transport: Option<ClusterTransportArg>,

    /// Threads that move blocks between daemons over sockets, and as many connections to each daemon. One thread moves a few
    /// GB/s [default: 1]
    #[arg(long, env = "KVLANE_CLUSTER_SOCKET_THREADS", value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    cluster_socket_threads: Option<u8>,

    /// How long a lookup waits for the other daemons' answers, in milliseconds. More helps only if the network takes longer
    /// than that [default: 1]
    #[arg(long, env = "KVLANE_CLUSTER_ANSWER_MS", value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=1000))]
    cluster_answer_ms: Option<u32>,

    /// Percent of the pool that copies of other daemons' blocks may take; beyond it they make room before all else
    /// [default: 25]
    #[arg(long, env = "KVLANE_CLUSTER_COPIES", value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    cluster_copies: Option<u8>,

    /// How long a request may wait for blocks that only an SSD or another daemon has, in milliseconds; then it goes on with
    /// what is there [default: 1000]
    #[arg(long, alias = "ssd-wait-ms", env = "KVLANE_FETCH_WAIT_MS", value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    #[serde(alias = "ssd-wait-ms")]
    fetch_wait_ms: Option<u32>,

    /// Measure at start, for about 0.3 s, from which length on copy engines of the first GPU are as fast as the copy kernel:
    /// auto with a real GPU, off takes what an H200 was measured to do [default: auto]
    #[arg(long, env = "KVLANE_CALIBRATE", value_enum, value_name = "MODE")]
    calibrate: Option<CalibrateArg>,

    /// Where an OpenTelemetry collector takes OTLP over HTTP, for spans of requests and for metrics: http://HOST:4318, or https
    /// [default: none]
    #[arg(long, env = "KVLANE_OTLP_ENDPOINT", value_name = "URL", hide_env_values = true)]
    otlp_endpoint: Option<String>,

    /// A file with headers for the collector, such as `Authorization: Bearer KEY`, one a line. Other users may not be able to
    /// read it (chmod 600) [default: none]
    #[arg(long, env = "KVLANE_OTLP_HEADERS_FILE", value_name = "FILE")]
    otlp_headers_file: Option<PathBuf>,

    /// The authority (PEM) that signed the collector's certificate [default: those that the host trusts]
    #[arg(long, env = "KVLANE_OTLP_CA_FILE", value_name = "FILE")]
    otlp_ca_file: Option<PathBuf>,

    /// Connections at the same time [default: 1024]
    #[arg(long, env = "KVLANE_MAX_SESSIONS", value_name = "N")]
    max_sessions: Option<usize>,

    /// How long SIGTERM, SIGINT and SIGHUP wait for saves under way, in seconds [default: 10]
    #[arg(long, env = "KVLANE_DRAIN_SECONDS", value_name = "S")]
    drain_seconds: Option<u64>,

    /// Log level: error, warn, info, debug, trace, off, or parts of kvlane with one of these, such as
    /// info,kvlane_server=debug [default: info]
    #[arg(long, env = "KVLANE_LOG", value_name = "FILTER")]
    log: Option<String>,

    /// How to write the log, which goes to stderr: text for people, or one JSON object a line [default: text]
    #[arg(long, env = "KVLANE_LOG_FORMAT", value_enum, value_name = "FORMAT")]
    log_format: Option<LogFormat>,

    /// A TOML file with these flags as keys
    #[arg(long, env = "KVLANE_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
enum HugePagesArg {
    Auto,
    On,
    Off,
}

#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
enum NumaArg {
    Auto,
    Off,
}

/// The settings of a daemon, complete and checked.
#[derive(Debug)]
pub(crate) struct Resolved {
    pub(crate) serve: ServeOptions,
    pub(crate) drain: Duration,
    pub(crate) log: EnvFilter,
    pub(crate) log_format: LogFormat,
    /// Why engines on GPUs are not served; empty if they are.
    pub(crate) no_gpu: String,
    /// As the user typed it.
    pub(crate) pool_size: String,
    /// As the user typed them.
    pub(crate) ssd: Vec<String>,
    /// The user set the number of sessions.
    pub(crate) sessions_were_asked: bool,
    /// A sentence for each setting that has no effect on this machine.
    pub(crate) warnings: Vec<String>,
}

impl ServeArgs {
    /// Takes missing settings from the file, then from the defaults, and checks all of them. `drivers` find the GPUs.
    pub(crate) fn resolve(self, drivers: Drivers) -> Result<Resolved> {
        let file = match &self.config {
            Some(path) => {
                let text = fs::read_to_string(path)
                    .with_context(|| format!("cannot read --config '{}'", path.display()))?;
                toml::from_str(&text).map_err(|error| in_file(path, &text, &error))?
            }
            None => Self::default(),
        };
        // First, so that a mistake in --log shows before the checks that take time, such as the search for GPUs.
        let log = self.log.or(file.log).unwrap_or_else(|| DEFAULT_LOG.into());
        let log = logging::parse_filter(&log).map_err(anyhow::Error::msg)?;
        let mut warnings = Vec::new();
        let (pool, pool_size) = pool_size(self.pool_size.or(file.pool_size))?;
        let listen = addresses(self.listen, file.listen, &mut warnings)?;
        let http = self.http.or(file.http).unwrap_or_else(|| DEFAULT_HTTP.into());
        let hugepages = match self.hugepages.or(file.hugepages).unwrap_or(HugePagesArg::Auto) {
            HugePagesArg::Auto => HugePages::Auto,
            HugePagesArg::On => HugePages::On,
            HugePagesArg::Off => HugePages::Off,
        };
        let numa = match self.numa.or(file.numa).unwrap_or(NumaArg::Auto) {
            NumaArg::Auto => Numa::Auto,
            NumaArg::Off => Numa::Off,
        };
        let gpus = GpuFlags {
            gpu: self.gpu.or(file.gpu),
            rails: self.rails.or(file.rails),
            staging: self.staging.or(file.staging),
            calibrate: self.calibrate.or(file.calibrate),
            save_link_share: self.save_link_share.or(file.save_link_share),
        };
        let gpus = gpus.resolve(drivers, &mut warnings)?;
        let ssd_typed = self.ssd.or(file.ssd).unwrap_or_default();
        let ssd = SsdFlags {
            write_rate: self.ssd_write_rate.or(file.ssd_write_rate),
            path: self.ssd_path.or(file.ssd_path),
            staging: self.ssd_staging.or(file.ssd_staging),
        };
        let ssd = ssd.resolve(&ssd_typed)?;
        let cluster = ClusterFlags {
            peers: self.peers.or(file.peers),
            index: self.index.or(file.index),
            listen: self.cluster_listen.or(file.cluster_listen),
            advertise: self.cluster_advertise.or(file.cluster_advertise),
            token_file: self.cluster_token_file.or(file.cluster_token_file),
            certificate: self.cluster_tls_certificate.or(file.cluster_tls_certificate),
            key: self.cluster_tls_key.or(file.cluster_tls_key),
            authority: self.cluster_tls_authority.or(file.cluster_tls_authority),
            transport: self.cluster_transport.or(file.cluster_transport),
            socket_threads: self.cluster_socket_threads.or(file.cluster_socket_threads),
            answer_ms: self.cluster_answer_ms.or(file.cluster_answer_ms),
        };
        let cluster = cluster.resolve()?;
        let copies = self.cluster_copies.or(file.cluster_copies);
        if copies.is_some() && cluster.is_none() {
            bail!("--cluster-copies is of no use without --peers or --index");
        }
        let copies = copies.unwrap_or(DEFAULT_COPIES_PERCENT);
        if !(1..=100).contains(&copies) {
            bail!("--cluster-copies {copies} is not from 1 to 100");
        }
        let fetch_wait =
            fetch_wait(self.fetch_wait_ms.or(file.fetch_wait_ms), ssd.is_some() || cluster.is_some())?;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let seal_threads = seal_threads(self.seal_threads.or(file.seal_threads), cpus, &mut warnings)?;
        let sessions = self.max_sessions.or(file.max_sessions);
        if sessions == Some(0) {
            bail!("--max-sessions 0 lets nobody connect: write at least 1");
        }
        let drain_s = self.drain_seconds.or(file.drain_seconds).unwrap_or(DEFAULT_DRAIN_S);
        if drain_s > MOST_DRAIN_S {
            bail!("--drain-seconds {drain_s} is too long: write at most {MOST_DRAIN_S}, a day");
        }
        let serve = ServeOptions {
            arena: ArenaOptions { bytes: pool.0, hugepages, numa, threads: cpus.min(32) },
            listen,
            http: parse_http(&http)?,
            http_hosts: http_hosts(self.http_host.or(file.http_host))?,
            seal_threads,
            scrub_bytes_per_s: self.scrub_rate.or(file.scrub_rate).map_or(DEFAULT_SCRUB, |size| size.0),
            lease_ttl: Duration::from_secs(60),
            policy: self.policy.or(file.policy).map_or(Choice::default(), |PolicyArg(choice)| choice),
            gpu_driver: gpus.driver,
            rails: gpus.rails,
            save_link_share: gpus.save_link_share,
            ssd,
            cluster,
            fetch_wait,
            copies_share: f64::from(copies) / 100.0,
            calibrate: gpus.calibrate,
            sessions_max: sessions.unwrap_or(DEFAULT_SESSIONS),
            hit_windows: hit_windows(self.hit_windows.or(file.hit_windows))?,
            otlp: otlp::settings(
                self.otlp_endpoint.or(file.otlp_endpoint).as_deref(),
                self.otlp_headers_file.or(file.otlp_headers_file).as_deref(),
                self.otlp_ca_file.or(file.otlp_ca_file).as_deref(),
                "kvlane",
            )?,
        };
        Ok(Resolved {
            serve,
            drain: Duration::from_secs(drain_s),
            log,
            log_format: self.log_format.or(file.log_format).unwrap_or_default(),
            no_gpu: gpus.none,
            pool_size,
            ssd: ssd_typed,
            sessions_were_asked: sessions.is_some(),
            warnings,
        })
    }
}

/// How long a lookup may wait for blocks that only a source has.
fn fetch_wait(given: Option<u32>, has_sources: bool) -> Result<Duration> {
    if given.is_some() && !has_sources {
        bail!("--fetch-wait-ms is of no use without --ssd, --peers or --index");
    }
    let wait = given.unwrap_or(DEFAULT_FETCH_WAIT_MS);
    if !(1..=60_000).contains(&wait) {
        bail!("--fetch-wait-ms {wait} is not from 1 to 60000");
    }
    Ok(Duration::from_millis(wait.into()))
}

/// The pool's size, and how the user typed it.
fn pool_size(given: Option<TypedSize>) -> Result<(Size, String)> {
    let (pool, typed) = match given {
        Some(TypedSize { size, typed }) => (size, format!("'{typed}'")),
        None => (Size(DEFAULT_POOL), "4gb (the default)".into()),
    };
    if pool.0 < 1 << 20 {
        bail!("--pool-size {typed} is too small: a pool has at least 1mib");
    }
    Ok((pool, typed))
}

/// Where the daemon listens, by the command line, else KVLANE_ADDR, else the file.
fn addresses(
    given: Option<Vec<String>>,
    in_file: Option<Vec<String>>,
    warnings: &mut Vec<String>,
) -> Result<Vec<Address>> {
    let shared = || env::var("KVLANE_ADDR").ok().filter(|address| !address.is_empty());
    let listen = match given.map(|written| ("--listen", written)) {
        None => shared().map(|address| ("KVLANE_ADDR", vec![address])),
        given => given,
    };
    let listen = match listen.or(in_file.map(|written| ("listen", written))) {
        Some((from, written)) => written
            .iter()
            .map(|text| text.parse().map_err(|error| anyhow!("{from} {error}")))
            .collect::<Result<Vec<Address>>>()?,
        None => vec![default_address()],
    };
    if listen.is_empty() {
        bail!("--listen is empty: without an address nobody can connect");
    }
    if !listen.iter().any(|address| matches!(address, Address::Unix(_))) {
        warnings.push("--listen names no Unix socket: engines use nothing else, so none can connect".into());
    }
    Ok(listen)
}

/// The number of threads that seal blocks.
fn seal_threads(given: Option<NonZeroUsize>, cpus: usize, warnings: &mut Vec<String>) -> Result<usize> {
    if let Some(threads) = given.filter(|threads| threads.get() > MOST_SEAL_THREADS) {
        bail!("--seal-threads {threads} is too many: write at most {MOST_SEAL_THREADS}");
    }
    if let Some(threads) = given.map(usize::from).filter(|threads| *threads > cpus) {
        warnings.push(format!(
            "--seal-threads {threads}: this process may use {cpus} CPUs, so that more threads are no faster"
        ));
    }
    Ok(given.map_or_else(|| (cpus / 4).clamp(1, 8), usize::from))
}

/// Most windows, which bounds their memory.
const HIT_WINDOWS_MAX: usize = 4;

/// The windows of the hits and their ceiling, in the order given.
fn hit_windows(given: Option<Vec<String>>) -> Result<Vec<Window>> {
    let Some(given) = given else { return Ok(Window::DEFAULT.into()) };
    let window = |text: &String| -> Result<Window> {
        let wrong = |why: String| anyhow!("--hit-windows '{text}': {why}");
        let Span(length) = text.parse().map_err(wrong)?;
        Window::new(length).map_err(|error| wrong(error.to_string()))
    };
    let windows = given.iter().map(window).collect::<Result<Vec<_>>>()?;
    let distinct: HashSet<_> = windows.iter().collect();
    if windows.is_empty() || windows.len() > HIT_WINDOWS_MAX || distinct.len() < windows.len() {
        bail!("--hit-windows '{}': write one to {HIT_WINDOWS_MAX} different windows", given.join(","));
    }
    Ok(windows)
}

/// A mistake in the file, with its line.
fn in_file(path: &Path, text: &str, error: &toml::de::Error) -> anyhow::Error {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    anyhow!("--config '{}', line {line}: {}", path.display(), error.message().replace('\n', ", "))
}

pub(crate) fn parse_http(text: &str) -> Result<Option<SocketAddr>> {
    if text == "off" {
        return Ok(None);
    }
    let found = text.to_socket_addrs().ok().and_then(|mut found| found.next());
    found.map(Some).with_context(|| format!("--http '{text}' is neither HOST:PORT nor off"))
}

/// Checks the names, which have no port because they hold for any.
pub(crate) fn http_hosts(names: Option<Vec<String>>) -> Result<Vec<String>> {
    let names = names.unwrap_or_default();
    let is_name = |name: &String| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
    };
    match names.iter().find(|name| !is_name(name)) {
        Some(name) => {
            bail!("--http-host '{name}' is no name: write it without a port, such as kvlane.example")
        }
        None => Ok(names),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use kvlane_gpu::driver_named;
    use kvlane_policy::PolicyKind;

    use super::*;

    fn with_file(text: &str, args: ServeArgs) -> Result<Resolved> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(text.as_bytes())?;
        ServeArgs { config: Some(file.path().to_owned()), ..args }.resolve(driver_named)
    }

    #[test]
    fn the_command_line_wins_over_the_file_and_the_file_over_the_defaults() {
        let args = ServeArgs { pool_size: Some("5mib".parse().unwrap()), ..Default::default() };
        let resolved =
            with_file("pool-size = \"1gb\"\nhttp = \"off\"\nlisten = [\"unix:/x/y\"]\n", args).unwrap();
        assert_eq!(resolved.serve.arena.bytes, 5 << 20);
        assert_eq!(resolved.serve.http, None);
        assert_eq!(resolved.serve.listen, ["unix:/x/y".parse().unwrap()]);
        assert_eq!(resolved.log.to_string(), "info");
        let numbers = with_file("pool-size = 2097152", ServeArgs::default()).unwrap();
        assert_eq!(numbers.serve.arena.bytes, 2 << 20);
    }

    #[test]
    fn policies_have_the_names_that_reports_use() {
        for kind in PolicyKind::SERVED {
            let resolved = with_file(&format!("policy = \"{kind}\""), ServeArgs::default()).unwrap();
            assert_eq!(resolved.serve.policy, Choice::Fixed(kind));
        }
        let resolved = with_file("policy = \"auto\"", ServeArgs::default()).unwrap();
        assert_eq!(resolved.serve.policy, Choice::Auto);
        assert_eq!(with_file("", ServeArgs::default()).unwrap().serve.policy, Choice::Fixed(PolicyKind::Lru));
    }

    #[test]
    fn mistakes_in_the_file_are_named() {
        for (text, wanted) in
            [("pool = 1", "pool"), ("\npool-size = \"4xb\"", "'4xb'"), ("hugepages = \"big\"", "big")]
        {
            let error = with_file(text, ServeArgs::default()).unwrap_err().to_string();
            assert!(error.contains(wanted) && error.starts_with("--config '/"), "{error}");
            let line = if text.starts_with('\n') { "line 2: " } else { "line 1: " };
            assert!(error.contains(line) && !error.contains('\n'), "one line: {error}");
        }
    }

    #[test]
    fn values_out_of_range_are_named() {
        let tiny = ServeArgs { pool_size: Some("4kib".parse().unwrap()), ..Default::default() };
        assert!(tiny.resolve(driver_named).unwrap_err().to_string().contains("'4kib'"), "as it was typed");
        let http = ServeArgs { http: Some("nowhere".into()), ..Default::default() };
        assert!(http.resolve(driver_named).unwrap_err().to_string().contains("'nowhere'"));
        let listen = ServeArgs { listen: Some(vec!["unix:".into()]), ..Default::default() };
        assert!(format!("{:#}", listen.resolve(driver_named).unwrap_err()).contains("'unix:'"));
        let host = ServeArgs { http_host: Some(vec!["kvlane:9091".into()]), ..Default::default() };
        assert!(host.resolve(driver_named).unwrap_err().to_string().contains("--http-host 'kvlane:9091'"));
        let rails = ServeArgs { rails: Some("some".into()), ..Default::default() };
        assert!(
            format!("{:#}", rails.resolve(driver_named).unwrap_err()).contains("--rails 'some' is neither")
        );
        // These ended the daemon by a panic: the threads at once, the time when it was told to stop.
        let threads = ServeArgs { seal_threads: NonZeroUsize::new(100_000), ..Default::default() };
        assert!(
            threads
                .resolve(driver_named)
                .unwrap_err()
                .to_string()
                .contains("--seal-threads 100000 is too many")
        );
        let drain = ServeArgs { drain_seconds: Some(u64::MAX), ..Default::default() };
        assert!(
            drain.resolve(driver_named).unwrap_err().to_string().contains("is too long: write at most 86400")
        );
        for (windows, wanted) in [
            ("1h,x", "--hit-windows 'x': write for example 90s"),
            ("3m", "--hit-windows '3m': a window has 5 minutes to 7 days"),
            ("27m", "--hit-windows '27m': a window of this length has a multiple of 5 minutes"),
            ("1h,60m", "--hit-windows '1h,60m': write one to 4 different windows"),
            ("5m,6m,7m,8m,9m", "write one to 4 different windows"),
        ] {
            let windows = windows.split(',').map(str::to_owned).collect();
            let windows = ServeArgs { hit_windows: Some(windows), ..Default::default() };
            let error = windows.resolve(driver_named).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let nobody = ServeArgs { max_sessions: Some(0), ..Default::default() };
        assert!(nobody.resolve(driver_named).unwrap_err().to_string().contains("--max-sessions 0"));
    }

    /// `--rails 9` on a machine without a GPU was taken, and did nothing.
    #[test]
    fn what_this_machine_cannot_do_is_said() {
        let warnings = |args: ServeArgs| {
            ServeArgs { gpu: Some(GpuArg::Off), ..args }.resolve(driver_named).unwrap().warnings
        };
        assert_eq!(warnings(ServeArgs::default()), Vec::<String>::new());
        let rails = warnings(ServeArgs { rails: Some("9".into()), ..Default::default() });
        assert_eq!(rails, ["--rails 9 has no effect: no GPU is used (--gpu off)"]);
        let all = warnings(ServeArgs {
            staging: Some(StagingArg::Auto),
            calibrate: Some(CalibrateArg::Auto),
            save_link_share: Some(50),
            seal_threads: NonZeroUsize::new(1000),
            listen: Some(vec!["127.0.0.1:1".into()]),
            ..Default::default()
        });
        for part in
            ["--staging", "--calibrate", "--save-link-share 50", "--seal-threads 1000", "no Unix socket"]
        {
            assert!(all.iter().any(|warning| warning.contains(part)), "{part} in {all:?}");
        }
    }
}
