//! Checks every second that the daemon's socket files are still there, and makes them again if they are gone. Their folder
//! may be removed while the daemon runs, for example `/run/user/UID` when its user logs out.

use std::{
    io,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread::JoinHandle,
    time::Duration,
};

use crate::{
    door::{Door, Identity},
    shared::Shared,
    unreachable::Unreachable,
};

/// Time between two checks. An engine finds no socket for so long at most, if one can be made.
const INTERVAL: Duration = Duration::from_secs(1);

/// The decision after a check of the socket's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The file is this daemon's.
    Keep,
    /// The file is gone, or another one stays there: bind again.
    Bind,
    /// Another file has come; the next check decides.
    Wait,
}

/// Another daemon binds its socket a moment before it serves it. So a foreign file is judged only if it was there at the
/// check before, too.
fn decide(own: Option<Identity>, before: Option<Identity>, now: Option<Identity>) -> Step {
    match now {
        Some(_) if now == own => Step::Keep,
        Some(_) if now != before => Step::Wait,
        _ => Step::Bind,
    }
}

/// The thread that checks the sockets.
#[derive(Debug)]
pub(crate) struct Keeper {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Keeper {
    /// Starts to check these doors.
    pub(crate) fn start(doors: Vec<Arc<Door>>, shared: Arc<Shared>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("kvlane-keeper".into()).spawn(move || {
            let mut before = vec![None; doors.len()];
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                for (door, before) in doors.iter().zip(&mut before) {
                    check(door, before, &shared.unreachable);
                }
            }
        })?;
        Ok(Self { stop, thread })
    }

    /// Ends the thread. Afterwards it touches no socket any more.
    pub(crate) fn stop(self) {
        drop(self.stop);
        if self.thread.join().is_err() {
            // Log: a bug: a socket that was removed was no longer made again. Do: report it, with the daemon's
            // log.
            tracing::error!("thread kvlane-keeper panicked");
        }
    }
}

fn check(door: &Door, before: &mut Option<Identity>, unreachable: &Unreachable) {
    let Some(path) = door.path() else { return };
    // A path that cannot be read cannot be connected to either. Binding then returns the reason.
    let now = Identity::of(path).ok();
    let step = decide(door.identity(), *before, now);
    *before = now;
    let address = door.address().to_string();
    match step {
        Step::Keep => unreachable.set(&address, None),
        Step::Wait => {}
        Step::Bind => match door.bind_again() {
            Ok(()) => {
                // Log: somebody removed the daemon's socket; engines that were connected did not notice. Do: find
                // out what cleans that folder, such as systemd-tmpfiles.
                tracing::warn!(address, "socket was gone; the daemon made it again");
                unreachable.set(&address, None);
            }
            Err(error) => {
                unreachable.set(&address, Some(format!("the daemon's socket is gone, and {error}")));
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_there_twice_is_judged() {
        let (own, other, third) = (Some(Identity(1, 1)), Some(Identity(1, 2)), Some(Identity(2, 1)));
        assert_eq!(decide(own, None, own), Step::Keep);
        assert_eq!(decide(own, own, None), Step::Bind, "it is gone");
        assert_eq!(decide(own, own, other), Step::Wait, "somebody may be about to serve it");
        assert_eq!(decide(own, other, other), Step::Bind, "binding finds out whether somebody does");
        assert_eq!(decide(own, other, third), Step::Wait);
        assert_eq!(decide(own, other, own), Step::Keep, "it was moved away and back");
    }
}
