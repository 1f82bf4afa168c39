//! Peers: known, lost, forgotten.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::{Action, Failure, Path, PathId, PathState, Peer, PeerId, Timer, Transfers};

impl Transfers {
    /// A peer with so many paths, none of which is up; [`Transfers::next_action`] asks to connect them.
    pub fn add_peer(&mut self, now: Duration, paths: usize) -> (PeerId, Vec<PathId>) {
        let peer = PeerId(self.next_peer);
        self.next_peer += 1;
        let mut ids = Vec::with_capacity(paths);
        for _ in 0..paths {
            let id = PathId(self.next_path);
            self.next_path += 1;
            let path = Path {
                peer,
                state: PathState::Connecting,
                connection: 0,
                under_way: BTreeMap::new(),
                bytes: 0,
                rate: None,
                tried: Duration::ZERO,
                read_bytes: self.options.chunk_bytes,
                pause: self.options.backoff,
                full: false,
                watched: false,
            };
            self.paths.insert(id, path);
            self.actions.push_back(Action::Connect(id, 0));
            ids.push(id);
        }
        let known = Peer {
            paths: ids.clone(),
            high: VecDeque::new(),
            bulk: VecDeque::new(),
            dead: 0,
            live: BTreeSet::new(),
            posts: 0,
            next_immediate: 0,
            unsettled: BTreeSet::new(),
            blocked: VecDeque::new(),
            unreachable: Some(now),
            lost: false,
            removed: false,
        };
        self.peers.insert(peer, known);
        self.timers.insert((now.saturating_add(self.options.peer_patience), Timer::Lost(peer)));
        (peer, ids)
    }

    /// Gives up all transfers of a peer and closes its paths; it is forgotten when nothing is under way any more.
    pub fn remove_peer(&mut self, now: Duration, peer: PeerId) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.removed = true;
        let (live, paths) = (known.live.clone(), known.paths.clone());
        live.into_iter().for_each(|ticket| self.give_up(now, ticket, Failure::PeerLost));
        for path in paths {
            self.close(now, path);
            self.settle(now, path);
        }
        self.forget(peer);
    }

    /// The paths of a peer.
    pub fn paths(&self, peer: PeerId) -> &[PathId] {
        self.peers.get(&peer).map_or(&[], |peer| &peer.paths)
    }

    pub(super) fn lose(&mut self, now: Duration, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.removed {
            return;
        }
        peer.lost = true;
        let live = peer.live.clone();
        self.actions.push_back(Action::Lost(id));
        live.into_iter().for_each(|ticket| self.give_up(now, ticket, Failure::PeerLost));
    }

    /// Forgets a removed peer of which nothing is under way.
    pub(super) fn forget(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get(&id) else { return };
        let idle = |path: &PathId| self.paths.get(path).is_none_or(|path| path.under_way.is_empty());
        if !peer.removed || !peer.live.is_empty() || !peer.paths.iter().all(idle) {
            return;
        }
        let Some(peer) = self.peers.remove(&id) else { return };
        peer.paths.iter().for_each(|path| drop(self.paths.remove(path)));
        self.waiting.remove(&id);
    }
}
