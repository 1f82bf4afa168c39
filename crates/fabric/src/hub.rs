//! All that one engine has: its transfers, the sockets that carry them, and what came of it. Nothing here blocks.

use std::io;
use std::time::Duration;

use rustix::event::epoll::Event;

use crate::completion::Outcomes;
use crate::descriptor::Descriptor;
use crate::engine::{EngineOptions, FabricError};
use crate::provider::drive;
use crate::sockets::{PathStatus, Sockets};
use crate::tcp::{Credentials, Identity};
use crate::transfers::{PathId, PathSpec, PeerId, Reach, Transfers};
use crate::trust::Proofs;

#[derive(Debug)]
pub(crate) struct Hub {
    pub(crate) transfers: Transfers,
    pub(crate) sockets: Sockets,
    pub(crate) outcomes: Outcomes,
    pub(crate) is_closed: bool,
    /// Until when the thread behind this sleeps if nothing happens.
    pub(crate) asleep_until: Option<Duration>,
}

impl Hub {
    pub(crate) fn new(
        me: Identity,
        proofs: Proofs,
        credentials: Option<Credentials>,
        options: EngineOptions,
    ) -> io::Result<Hub> {
        Ok(Hub {
            transfers: Transfers::new(options.transfers.clone()),
            sockets: Sockets::open(me, proofs, credentials, options)?,
            outcomes: Outcomes::default(),
            is_closed: false,
            asleep_until: None,
        })
    }

    pub(crate) fn now(&self) -> Duration {
        self.sockets.now()
    }

    /// Takes what came, without waiting, and does what is due. Whether anything happened.
    pub(crate) fn poll(&mut self, events: &mut Vec<Event>) -> bool {
        let any = self.sockets.poll(events);
        self.pump() || any
    }

    /// Posts and does whatever is due now. Whether that was anything.
    pub(crate) fn pump(&mut self) -> bool {
        let mut any = false;
        let mut turn = self.sockets.turn_bytes();
        loop {
            let now = self.now();
            let outcomes = &mut self.outcomes;
            let mut more = drive(&mut self.transfers, &mut self.sockets, now, |sockets, ticket, outcome| {
                sockets.note_over(ticket);
                outcomes.tell(ticket, outcome);
            });
            more |= self.sockets.work(&mut turn);
            any |= more;
            if !more {
                self.hear();
                return any;
            }
        }
    }

    /// When there is something to do if nothing comes.
    pub(crate) fn next_tick(&self) -> Duration {
        self.sockets.next_tick().min(self.transfers.next_tick().unwrap_or(Duration::MAX))
    }

    /// What came by itself is told to those who wait for it. A thread behind that sleeps, and has to do so otherwise from now
    /// on, gets up.
    fn hear(&mut self) {
        let news = self.sockets.take_news();
        if news.message {
            self.outcomes.note_message();
        }
        if news.change {
            self.outcomes.note_change();
        }
        if news.rings && self.asleep_until.is_some() {
            self.sockets.wake();
        }
    }

    /// A peer; none if it has no address that is known here.
    pub(crate) fn add_peer(&mut self, descriptor: &Descriptor) -> Result<Option<PeerId>, FabricError> {
        let Some(ways) = self.sockets.ways_to(descriptor)? else { return Ok(None) };
        let now = self.now();
        let peer = self.transfers.add_peer(now);
        let path = |_| self.transfers.add_path(now, peer, PathSpec::new(Reach::ALL, 0));
        let paths: Vec<PathId> = (0..ways.paths()).filter_map(path).collect();
        self.sockets.add_peer(peer, &paths, ways, descriptor);
        self.pump();
        Ok(Some(peer))
    }

    /// Ends all transfers with a peer. Those that wrote are over when the peer has confirmed that, or with its lease.
    pub(crate) fn remove_peer(&mut self, peer: PeerId) {
        let now = self.now();
        self.transfers.remove_peer(now, peer);
        self.pump();
        self.sockets.remove_peer(peer);
        self.pump();
    }

    /// All ways to a peer; none if there is no such peer.
    pub(crate) fn path_statuses(&self, peer: PeerId) -> Vec<PathStatus> {
        let status = |path| {
            let status = self.sockets.path_status(path)?;
            let (is_up, bytes_per_second) = (self.transfers.is_up(path), self.transfers.rate(path));
            Some(PathStatus { is_up, bytes_per_second, ..status })
        };
        self.transfers.paths(peer).iter().copied().filter_map(status).collect()
    }

    /// Ends everything, for good, but what asks neighbours to read nothing more of this process
    /// ([`Sockets::is_pulled`]).
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        self.outcomes.note_message();
        self.sockets.peers().into_iter().for_each(|peer| self.remove_peer(peer));
        self.sockets.end_all();
        self.hear();
    }

    /// Of a closed hub: asks nobody any more. All that was under way is over.
    pub(crate) fn forsake(&mut self) {
        self.sockets.forsake();
        self.pump();
    }
}
