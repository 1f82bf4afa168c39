//! `kvlane serve`.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use kvlane_server::{Daemon, StartError};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::{serve_options::ServeArgs, size::Size};

/// Runs the daemon until SIGTERM, SIGINT or SIGHUP.
pub(crate) fn run(args: ServeArgs) -> Result<()> {
    let options = args.resolve()?;
    let filter = EnvFilter::try_new(&options.log).with_context(|| format!("--log '{}'", options.log))?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    if !options.no_gpu.is_empty() {
        tracing::info!(reason = options.no_gpu, "engines on GPUs are not served");
    }
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Before the pool is taken, which may last: a SIGTERM from here on ends the daemon in order.
    let (mut term, mut interrupt, mut hangup) = {
        let _inside = runtime.enter();
        // Whoever started it under `nohup` wants it to go on when the terminal is closed.
        let hangup = (!is_ignored(SignalKind::hangup())).then(|| signal(SignalKind::hangup())).transpose()?;
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, hangup)
    };
    let start = Instant::now();
    let bar = progress_bar(options.serve.arena.bytes);
    let daemon =
        Daemon::start(&options.serve, &|done| bar.set_position(done)).map_err(|error| match error {
            StartError::Arena(error) => anyhow::Error::from(error).context("--pool-size"),
            other => other.into(),
        })?;
    bar.finish_and_clear();
    let listen = options.serve.listen.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    eprintln!(
        "kvlane {} serves {listen}; pool of {} in {} pages{}, ready after {:.1} s{}",
        env!("CARGO_PKG_VERSION"),
        Size(daemon.pool_bytes()),
        daemon.page_size(),
        daemon.gpus().map_or(String::new(), |gpus| format!(", pinned for {gpus}")),
        start.elapsed().as_secs_f64(),
        options.serve.http.map_or(String::new(), |http| format!("; health and metrics at http://{http}")),
    );
    runtime.block_on(async {
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
            Some(_) = async { hangup.as_mut()?.recv().await } => {}
        }
    });
    tracing::info!("stopping: taking no new work");
    if !daemon.stop(options.drain) {
        tracing::warn!(
            seconds = options.drain.as_secs(),
            "work was still under way when the time to drain was over"
        );
    }
    Ok(())
}

/// A session takes about six descriptors, and the usual limit of 1024 is there for programs that use `select`.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, limit = ?limit.current, "the limit of open files cannot be raised");
    }
}

/// Whether this process was started with the signal ignored.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (kind.as_raw_value() - 1) & 1 == 1
}

/// Shown on a terminal while the pool is pre-faulted.
fn progress_bar(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes).with_message("taking the pool's memory");
    let style = "{msg} [{bar:40}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec}";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
