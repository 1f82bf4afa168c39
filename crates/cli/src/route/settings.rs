//! The settings of the router's proxies and of its scheduler, from the flags.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use kvlane_door::Names;
use kvlane_router::{schedule::SchedulerSettings, shared::ProxySettings};

use super::args::RouteArgs;
use crate::secret_file;

/// The flag that names the file of keys.
pub(super) const KEY_FILE: &str = "--api-key-file";

/// Clients' connections at a time if the user sets no number.
const CONNECTIONS: u32 = 10_000;

/// The proxies' settings. Reads the file with keys.
pub(super) fn proxies(args: &RouteArgs) -> Result<ProxySettings> {
    let keys = match &args.api_key_file {
        Some(file) => secret_file::lines(KEY_FILE, file)?,
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

/// The scheduler's settings.
pub(super) fn scheduler(args: &RouteArgs, seed: u64) -> SchedulerSettings {
    SchedulerSettings {
        policy: args.policy,
        decode_policy: args.decode_policy.unwrap_or(args.policy),
        short_tokens: args.short_prompt,
        seed,
        ..SchedulerSettings::default()
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Threads that serve clients. The engines get most of the cores. One thread needs the least work for a stream. Several answer
/// sooner if thousands of streams have data at once (bench/route/results/README.md).
fn threads_of(cores: usize) -> usize {
    (cores / 4).clamp(1, 8)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_quarter_of_the_cores_serves_clients() {
        let of = |cores| super::threads_of(cores);
        assert_eq!([1, 2, 4, 16, 32, 200].map(of), [1, 1, 1, 4, 8, 8]);
    }
}
