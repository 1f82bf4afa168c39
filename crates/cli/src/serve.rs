//! `kvlane serve`.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};
use indicatif::{ProgressBar, ProgressStyle};
use kvlane_gpu::Drivers;
use kvlane_memory::ArenaError;
use kvlane_server::{Daemon, StartError};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    errors,
    logging::{self, LogFormat},
    open_files::{self, Needs},
    serve_options::{Resolved, ServeArgs},
    service,
    size::Size,
};

/// A session takes about six descriptors, and the usual limit of 1024 is there for programs that use `select`.
const SESSIONS: Needs = Needs { flag: "--max-sessions", whom: "sessions", each: 6, besides: 0, usual: 100 };

/// Runs the daemon until SIGTERM, SIGINT or SIGHUP.
pub(crate) fn run(args: ServeArgs, drivers: Drivers) -> ExitCode {
    // Each engine's session has a thread.
    kvlane_memory::limit_heaps();
    let mut options = match args.resolve(drivers) {
        Ok(options) => options,
        Err(error) => return errors::print_error(&error),
    };
    logging::start(std::mem::take(&mut options.log), options.log_format);
    match serve(&options) {
        Ok(()) => ExitCode::SUCCESS,
        // A collector of the log parses JSON alone.
        Err(error) if options.log_format == LogFormat::Json && tracing::enabled!(tracing::Level::ERROR) => {
            // Log "<error>": the daemon did not start, or ended, because of this error. Only with `--log-format
            // json`. Do: look for the sentence in docs/troubleshoot.md.
            tracing::error!("{}", errors::sentence(&error));
            ExitCode::FAILURE
        }
        Err(error) => errors::print_error(&error),
    }
}

fn serve(options: &Resolved) -> Result<()> {
    if !options.no_gpu.is_empty() {
        // Log: the daemon serves engines on CPUs only. Do: if this host has GPUs, mend what the reason names;
        // `--gpu on` makes it an error.
        tracing::info!(reason = options.no_gpu, "engines on GPUs are not served");
    }
    for warning in &options.warnings {
        // Log "--listen names no Unix socket: engines use nothing else, so none can connect": the daemon answers
        // only tools over TCP. Do: add a `unix:PATH` to `--listen`.
        // Log "--seal-threads <threads>: this process may use <cpus> CPUs, so that more threads are no faster":
        // there are more checksum threads than CPUs. Do: lower `--seal-threads`, or give the daemon more CPUs.
        // Log "<flag> has no effect: no GPU is used (<reason>)": the daemon runs without GPUs, for the reason in
        // brackets. Do: leave the flag out, or mend what the reason names.
        // Log "--rails <gpus> has no effect: there is one GPU, so no other one can lend its link": the daemon
        // runs without rails. Do: leave `--rails` out.
        tracing::warn!("{warning}");
    }
    open_files::raise_limit(
        &SESSIONS,
        options.sessions_were_asked.then_some(options.serve.sessions_max as u64),
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Takes the signals over before the pool, which may take long. So a SIGTERM meanwhile ends the daemon in order.
    let (mut term, mut interrupt, mut hangup) = {
        let _inside = runtime.enter();
        // Under `nohup` the daemon goes on when the terminal is closed.
        let hangup = (!is_ignored(SignalKind::hangup())).then(|| signal(SignalKind::hangup())).transpose()?;
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, hangup)
    };
    let start = Instant::now();
    let bar = progress_bar(options.serve.arena.bytes);
    let started = Daemon::start(&options.serve, &|done| bar.set_position(done));
    bar.finish_and_clear();
    let daemon = started.map_err(|error| explain(error, options))?;
    let listen = options.serve.listen.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    // Log: the daemon has started and serves engines at this address.
    tracing::info!(
        "kvlane {} serves {listen}; pool of {} in {} pages{}, ready after {:.1} s{}",
        env!("CARGO_PKG_VERSION"),
        Size(daemon.pool_bytes()),
        daemon.page_size(),
        daemon.gpus().map_or(String::new(), |gpus| format!(", pinned for {gpus}")),
        start.elapsed().as_secs_f64(),
        options.serve.http.map_or(String::new(), |http| format!("; health and metrics at http://{http}")),
    );
    service::notify(service::READY);
    runtime.block_on(async {
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
            Some(_) = async { hangup.as_mut()?.recv().await } => {}
        }
    });
    // Log: the daemon got a signal to stop; it ends calls under way and writes queued blocks to the SSD.
    tracing::info!("stopping: taking no new work");
    service::notify(service::STOPPING);
    if !daemon.stop(options.drain) {
        // Log: the daemon ended with saves or SSD writes unfinished; those blocks are lost, and engines compute
        // them again. Do: raise `--drain-seconds` if this repeats.
        tracing::warn!(seconds = options.drain.as_secs(), "drain timed out with work unfinished");
    }
    Ok(())
}

/// The error with the flag to change, as the user typed it.
fn explain(error: StartError, options: &Resolved) -> anyhow::Error {
    match error {
        StartError::Arena(error @ ArenaError::NoHugePages { .. }) => anyhow!("--hugepages on: {error}"),
        StartError::Arena(error) => anyhow!("--pool-size {}: {error}", options.pool_size),
        StartError::Ssd(error) => {
            let typed: Vec<String> = options.ssd.iter().map(|typed| format!("'{typed}'")).collect();
            anyhow!("--ssd {}: {error}", typed.join(", "))
        }
        other => other.into(),
    }
}

/// Whether this process was started with the signal ignored.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (kind.as_raw_value() - 1) & 1 == 1
}

/// Shows on a terminal how far the pool is pre-faulted.
fn progress_bar(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes).with_message("taking the pool's memory");
    let style = "{msg} [{bar:40}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec}";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
