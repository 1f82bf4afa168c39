//! Watches daemons' processes for their end, by pidfd.

use std::{
    collections::BTreeMap,
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use kvlane_memory::{peer_pidfd, pidfd_exited};
use rustix::event::{PollFd, PollFlags};

use crate::links::ids::{Life, ProcessId};

/// The processes that are watched.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    last: u64,
    watched: BTreeMap<ProcessId, OwnedFd>,
}

impl Processes {
    /// Watches the process at the other end of a socket, if the kernel names it.
    pub(crate) fn watch(&mut self, stream: Option<&UnixStream>) -> Life {
        match stream.and_then(|stream| peer_pidfd(stream).ok()) {
            Some(process) => self.watch_pidfd(process),
            None => Life::Unknown,
        }
    }

    fn watch_pidfd(&mut self, process: OwnedFd) -> Life {
        self.last += 1;
        self.watched.insert(ProcessId(self.last), process);
        Life::Watched(ProcessId(self.last))
    }

    /// Removes and returns the processes that have ended.
    pub(crate) fn take_ended(&mut self) -> Vec<ProcessId> {
        let ended = |(id, process): (&ProcessId, &OwnedFd)| pidfd_exited(process).then_some(*id);
        let ended: Vec<ProcessId> = self.watched.iter().filter_map(ended).collect();
        ended.iter().for_each(|id| drop(self.watched.remove(id)));
        ended
    }

    /// For `poll`: each is readable once its process has ended.
    pub(crate) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.watched.values().map(|process| PollFd::new(process, PollFlags::IN))
    }

    /// Stops watching processes that are not needed.
    pub(crate) fn retain(&mut self, is_needed: impl Fn(ProcessId) -> bool) {
        self.watched.retain(|id, _| is_needed(*id));
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    #[test]
    fn the_end_of_a_process_is_told_once() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        let mut processes = Processes::default();
        let life = processes.watch_pidfd(pidfd_open(pid, PidfdFlags::empty()).unwrap());
        assert_eq!(life, Life::Watched(ProcessId(1)));
        assert!(processes.take_ended().is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(processes.take_ended(), [ProcessId(1)]);
        assert!(processes.take_ended().is_empty());
    }
}
