//! Looks every second whether the daemon's socket is still there: the folder that it lies in may be removed while the
//! daemon runs, for example `/run/user/UID` when its user logs out.

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

/// How often the keeper looks. It is also the longest that an engine finds no socket where one can be made.
const INTERVAL: Duration = Duration::from_secs(1);

/// What a look at the socket's path leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// It is this daemon's.
    Keep,
    /// Bind anew.
    Bind,
    /// Something else lies there; the next look decides.
    Wait,
}

/// Whoever starts at this path binds its socket a moment before it serves it. So what another process put there is judged only
/// when it was there at the look before as well.
fn decide(own: Option<Identity>, before: Option<Identity>, now: Option<Identity>) -> Step {
    match now {
        Some(_) if now == own => Step::Keep,
        Some(_) if now != before => Step::Wait,
        _ => Step::Bind,
    }
}

/// The thread that looks; it ends with this.
#[derive(Debug)]
pub(crate) struct Keeper {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Keeper {
    /// Looks after these doors until it is stopped.
    pub(crate) fn start(doors: Vec<Arc<Door>>, shared: Arc<Shared>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("kvlane-keeper".into()).spawn(move || {
            let mut before = vec![None; doors.len()];
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                for (door, before) in doors.iter().zip(&mut before) {
                    look(door, before, &shared.unreachable);
                }
            }
        })?;
        Ok(Self { stop, thread })
    }

    /// Returns when it does not touch any socket any more.
    pub(crate) fn stop(self) {
        drop(self.stop);
        if self.thread.join().is_err() {
            tracing::error!("the thread that looks after the sockets had panicked");
        }
    }
}

fn look(door: &Door, before: &mut Option<Identity>, unreachable: &Unreachable) {
    let Some(path) = door.path() else { return };
    // What cannot be looked at cannot be connected to either: binding tells why.
    let now = Identity::of(path).ok();
    let step = decide(door.identity(), *before, now);
    *before = now;
    let place = door.address().to_string();
    match step {
        Step::Keep => unreachable.set(&place, None),
        Step::Wait => {}
        Step::Bind => match door.bind_again() {
            Ok(()) => {
                tracing::warn!(place, "the socket was gone; the daemon made it again");
                unreachable.set(&place, None);
            }
            Err(error) => unreachable.set(&place, Some(format!("the daemon's socket is gone, and {error}"))),
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
