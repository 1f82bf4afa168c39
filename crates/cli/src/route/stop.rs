//! Signals of a running router, and its shutdown.

use std::{
    io, thread,
    time::{Duration, Instant},
};

use kvlane_router::{
    proxy::{Proxy, Stop},
    shared::Shared,
};
use tokio::{
    runtime::Runtime,
    signal::unix::{Signal, SignalKind, signal},
    time::sleep,
};

use super::reload::Times;

/// The signals that a router takes.
#[derive(Debug)]
pub(super) struct Signals {
    term: Signal,
    interrupt: Signal,
    hangup: Signal,
}

/// The origin of a request to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopCause {
    /// A service manager sent SIGTERM: the load balancer may still send clients here.
    ByManager,
    /// A user pressed Ctrl-C (SIGINT).
    ByHand,
}

/// Takes a signal over from its default action.
pub(super) fn take(runtime: &Runtime, kind: SignalKind) -> io::Result<Signal> {
    let _inside = runtime.enter();
    signal(kind)
}

impl Signals {
    /// Takes the signals to stop over from their default actions, which end the process.
    pub(super) fn take(runtime: &Runtime, hangup: Signal) -> io::Result<Self> {
        Ok(Self {
            term: take(runtime, SignalKind::terminate())?,
            interrupt: take(runtime, SignalKind::interrupt())?,
            hangup,
        })
    }

    /// Returns when the router has to stop. Calls `reload` for each SIGHUP before that.
    pub(super) async fn stop(&mut self, mut reload: impl FnMut()) -> StopCause {
        loop {
            tokio::select! {
                _ = self.term.recv() => return StopCause::ByManager,
                _ = self.interrupt.recv() => return StopCause::ByHand,
                _ = self.hangup.recv() => reload(),
            }
        }
    }
}

/// Stops the proxies. After SIGTERM they still serve new clients for the delay. A further signal cuts the requests under way.
/// Returns the outcome, for the log.
pub(super) fn stop(
    runtime: &Runtime,
    signals: &mut Signals,
    shared: &Shared,
    proxies: Vec<Proxy>,
    cause: StopCause,
    times: Times,
) -> String {
    let Times { delay, mut drain } = times;
    shared.begin_stopping();
    runtime.block_on(async {
        if cause == StopCause::ByManager && !delay.is_zero() {
            // Log: after SIGTERM the router still serves clients until `--drain-delay` is over, so that balancers
            // notice.
            tracing::info!(
                "stopping: /health answers 503, and clients are served for {} s more",
                delay.as_secs()
            );
            tokio::select! {
                () = sleep(delay) => {}
                _ = signals.stop(|| {}) => drain = Duration::ZERO,
            }
        }
        // Log: the router closes its ports; requests under way may go on for so long (`--drain`).
        tracing::info!("stopping: taking no new connections; requests have {} s", drain.as_secs());
        let began = Instant::now();
        let stops: Vec<Stop> = proxies.iter().map(Proxy::stopper).collect();
        let mut stopping = tokio::task::spawn_blocking(move || {
            thread::scope(|scope| {
                for proxy in proxies {
                    scope.spawn(move || proxy.stop(drain));
                }
            });
        });
        tokio::select! {
            _ = &mut stopping => {}
            _ = signals.stop(|| {}) => {
                stops.iter().for_each(|stop| stop.within(Duration::ZERO));
                let _ = stopping.await;
            }
        }
        match shared.cut() {
            0 => "stopped: nothing cut".to_owned(),
            1 => format!("stopped: 1 request cut after {} s", began.elapsed().as_secs()),
            cut => format!("stopped: {cut} requests cut after {} s", began.elapsed().as_secs()),
        }
    })
}
