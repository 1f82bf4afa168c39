//! Logs each change between an engine's link and the daemon once: absent, refused, connected, lost, back.
//!
//! ```text
//!            +--> Absent <--+        connected: "is connected to" the first time, afterwards "is back ... after n s"
//!   New -----+--> Refused <-+------> Up
//!            +-----------------------^ |
//!                    Absent, Refused <-+ lost
//! ```

use std::time::Instant;

use kvlane_proto::{Address, v1};

/// Level of a notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// The link works, or works again.
    Info,
    /// The engine runs without the cache, or slower; an operator may want to act.
    Warning,
}

/// A sentence for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Becomes the level of the log line.
    pub urgency: Urgency,
    /// The text of the log line.
    pub sentence: String,
}

/// Writes a notice to the log, if there is one.
pub fn log_notice(notice: Option<Notice>) {
    match notice {
        // Log "kvlane: <who> is connected to <address>: <how>": the scheduler or a worker uses the daemon from
        // now on.
        // Log "kvlane: <who> is back at <address> after <seconds> s: <how>": the connection to the daemon works
        // again; hits come back by themselves.
        Some(Notice { urgency: Urgency::Info, sentence }) => tracing::info!("{sentence}"),
        // Log "kvlane: <who>: <why>. The engine computes without the cache; kvlane keeps trying": the engine
        // found no daemon; it connects as soon as there is one. Do: start the daemon, or correct
        // `kvlane.address`.
        // Log "kvlane: <who> cannot use the daemon at <address>: <why>. The engine computes without the cache":
        // the daemon refused the engine, or its version or memory does not fit; the engine tries again. Do: look
        // for the reason in docs/troubleshoot.md.
        // Log "kvlane: <who> lost the daemon at <address>: <why>. The engine computes without the cache until it
        // is back": the daemon ended, or does not answer; the engine connects again by itself. Do: look at the
        // daemon's log.
        // Log "kvlane: the daemon at <address> refused a request: <sentence>": a lookup, save or load of this
        // engine did not happen; the prompt is computed. Do: read the reason; the daemon's log has it too.
        // Log "kvlane: this daemon (<daemon>) is older than the engine and does not tell which blocks it evicts,
        // so KV events tell of blocks that come and not of those that go": routers that read this engine's events
        // expect blocks that are gone. Do: install the engine's version of kvlane for the daemon.
        // Log "kvlane: the worker could not copy a load itself (job <number>): <why>": a load failed after the
        // daemon was gone; vLLM's `kv_load_failure_policy` decides about the request. Do: read the reason, and
        // the daemon's log.
        // Log "kvlane: the daemon has not ended a load in time; the worker copies it itself (job <number>)": the
        // daemon was stopped during a load, or others keep the GPU busy; the worker copies the blocks from the
        // shared pool. Do: look at the daemon's log, and whether engines share the GPU.
        // Log "kvlane: the daemon does not answer; the worker gives up its saves (<count>)": the daemon was
        // silent for too long; these saves never become blocks. Do: look whether the daemon hangs or the host is
        // overloaded.
        Some(Notice { urgency: Urgency::Warning, sentence }) => tracing::warn!("{sentence}"),
        None => {}
    }
}

/// The daemon's version and pool size, as its Welcome names them.
pub fn describe(welcome: &v1::Welcome) -> String {
    format!("kvlane {}, a pool of {:.1} GB", welcome.version, welcome.pool_bytes as f64 / 1e9)
}

/// The state that the log has last reported.
#[derive(Debug, Clone, PartialEq, Eq)]
enum LoggedState {
    New,
    Up,
    /// No daemon answers, or the connection was lost.
    Absent,
    /// The daemon answers, but does not serve this engine: its sentence.
    Refused(String),
}

/// One link's standing with the daemon. Each call returns a notice if the log does not have its news yet.
#[derive(Debug)]
pub struct Standing {
    /// "the scheduler", "rank 3".
    who: String,
    address: Address,
    state: LoggedState,
    /// When the present outage began.
    down_since: Instant,
    was_up: bool,
}

impl Standing {
    /// Before the first attempt to connect.
    pub fn new(who: String, address: Address, now: Instant) -> Self {
        Self { who, address, state: LoggedState::New, down_since: now, was_up: false }
    }

    /// The daemon serves this link. `how` describes the connection for the user.
    pub fn connected(&mut self, how: &str, now: Instant) -> Option<Notice> {
        if self.state == LoggedState::Up {
            return None;
        }
        let (who, address) = (&self.who, &self.address);
        let seconds = now.saturating_duration_since(self.down_since).as_secs_f64();
        let sentence = if self.was_up {
            format!("kvlane: {who} is back at {address} after {seconds:.1} s: {how}")
        } else {
            format!("kvlane: {who} is connected to {address}: {how}")
        };
        (self.state, self.was_up) = (LoggedState::Up, true);
        Some(Notice { urgency: Urgency::Info, sentence })
    }

    /// An attempt to connect failed. After a loss that is no news.
    pub fn absent(&mut self, why: &str) -> Option<Notice> {
        if matches!(self.state, LoggedState::Absent) {
            return None;
        }
        self.state = LoggedState::Absent;
        let sentence = format!(
            "kvlane: {}: {why}. The engine computes without the cache; kvlane keeps trying",
            self.who
        );
        Some(Notice { urgency: Urgency::Warning, sentence })
    }

    /// A connection ended before the daemon served this link. After a refusal or a loss that is no news.
    pub fn handshake_failed(&mut self, why: &str) -> Option<Notice> {
        match self.state {
            LoggedState::New => {
                self.absent(&format!("the handshake with the daemon at {} failed: {why}", self.address))
            }
            _ => None,
        }
    }

    /// The daemon does not serve this engine, or cannot be used by it.
    pub fn refused(&mut self, why: &str, now: Instant) -> Option<Notice> {
        if matches!(&self.state, LoggedState::Refused(logged) if logged == why) {
            return None;
        }
        if self.state == LoggedState::Up {
            self.down_since = now;
        }
        self.state = LoggedState::Refused(why.to_owned());
        let (who, address) = (&self.who, &self.address);
        let sentence = format!(
            "kvlane: {who} cannot use the daemon at {address}: {why}. The engine computes without the cache"
        );
        Some(Notice { urgency: Urgency::Warning, sentence })
    }

    /// A connection that served this link was lost. After a refusal that is no news.
    pub fn lost(&mut self, why: &str, now: Instant) -> Option<Notice> {
        if self.state != LoggedState::Up {
            return None;
        }
        (self.state, self.down_since) = (LoggedState::Absent, now);
        let sentence = format!(
            "kvlane: {} lost the daemon at {}: {why}. The engine computes without the cache until it is back",
            self.who, self.address
        );
        Some(Notice { urgency: Urgency::Warning, sentence })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn standing(now: Instant) -> Standing {
        Standing::new("rank 3".into(), Address::Unix("/run/k.sock".into()), now)
    }

    fn said(notice: Option<Notice>) -> String {
        notice.map_or(String::new(), |notice| notice.sentence)
    }

    /// An engine ran for days without the cache, and its log had no line of it.
    #[test]
    fn each_change_is_told_once() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut link = standing(start);
        assert!(said(link.absent("no daemon answers")).contains("no daemon answers. The engine computes"));
        assert_eq!(link.absent("connection refused"), None);
        assert!(said(link.refused("another user", at(1))).ends_with(
            "rank 3 cannot use the daemon at unix:/run/k.sock: another user. The engine computes without the cache"
        ));
        assert_eq!(link.handshake_failed("it hung up"), None, "that is what a refusal ends with");
        assert_eq!(link.refused("another user", at(2)), None);
        assert!(said(link.refused("too many sessions", at(3))).contains("too many sessions"));
        assert!(said(link.absent("no daemon answers")).contains("no daemon"), "it has gone away since");
        let first = link.connected("a pool of 4 GB", at(4)).unwrap();
        assert_eq!(first.urgency, Urgency::Info);
        assert_eq!(first.sentence, "kvlane: rank 3 is connected to unix:/run/k.sock: a pool of 4 GB");
        assert_eq!(link.connected("a pool of 4 GB", at(5)), None);
        assert!(said(link.lost("it hung up", at(10))).contains("rank 3 lost the daemon at unix:/run/k.sock"));
        assert_eq!(link.absent("no daemon answers"), None, "the loss was told");
        assert_eq!(link.lost("it hung up", at(11)), None);
        let back = said(link.connected("saves by process_vm", at(12)));
        assert_eq!(back, "kvlane: rank 3 is back at unix:/run/k.sock after 2.0 s: saves by process_vm");
    }

    #[test]
    fn a_daemon_that_refuses_after_a_restart_is_named_and_so_is_its_return() {
        let start = Instant::now();
        let mut link = standing(start);
        link.connected("", start);
        link.lost("it hung up", start + Duration::from_secs(1));
        assert!(
            said(link.refused("the pool is too small", start + Duration::from_secs(2))).contains("small")
        );
        let back = said(link.connected("ok", start + Duration::from_secs(4)));
        assert!(back.contains("after 3.0 s"), "{back}");
    }
}
