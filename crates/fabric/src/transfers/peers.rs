//! Peers and their paths: added, reachable by route, lost, removed, and forgotten once nothing is under way.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::{
    Action, ConnectionState, Failure, Path, PathId, PathSpec, PeerId, PeerState, Rate, Reach, Route, Timer,
    Transfers,
};

impl Transfers {
    /// Adds a peer without paths. [`Transfers::add_path`] gives it some.
    pub fn add_peer(&mut self, now: Duration) -> PeerId {
        let peer = PeerId(self.next_peer);
        self.next_peer += 1;
        let known = PeerState {
            paths: Vec::new(),
            queues: Default::default(),
            turn: 0,
            dead: 0,
            live: BTreeSet::new(),
            posts: 0,
            next_immediate: 0,
            unsettled: BTreeSet::new(),
            blocked: VecDeque::new(),
            unreachable: Default::default(),
            lost: Reach::NOTHING,
            removed: false,
        };
        self.peers.insert(peer, known);
        self.note_reach(now, peer);
        peer
    }

    /// Adds a path to a peer. It is not up: [`Transfers::next_action`] asks to connect it. The peer is no longer lost for the
    /// routes that the path may serve. None: there is no such peer.
    pub fn add_path(&mut self, now: Duration, peer: PeerId, spec: PathSpec) -> Option<PathId> {
        let known = self.peers.get_mut(&peer).filter(|peer| !peer.removed)?;
        let id = PathId(self.next_path);
        self.next_path += 1;
        let path = Path {
            peer,
            state: ConnectionState::Connecting,
            connection: 0,
            under_way: BTreeMap::new(),
            bytes: 0,
            rate: Rate::default(),
            tried: Duration::ZERO,
            spec,
            removed: false,
            pause: self.options.backoff,
            full: false,
            has_stall_timer: false,
        };
        known.paths.push(id);
        self.most_runs = self.most_runs.max(spec.read_runs.unwrap_or(0));
        for route in spec.reach.routes().filter(|route| known.lost.serves(*route)) {
            // `note_reach` begins the route's time again.
            known.unreachable[route.index()] = None;
        }
        known.lost = known.lost.without(spec.reach);
        self.paths.insert(id, path);
        self.actions.push_back(Action::Connect(id, 0));
        self.note_reach(now, peer);
        Some(id)
    }

    /// Removes a path for good: it gets no more posts, its connection is closed, and it is forgotten once all of its posts
    /// have completed.
    pub fn remove_path(&mut self, now: Duration, path: PathId) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        known.removed = true;
        match known.state {
            ConnectionState::Up => self.close(now, path),
            ConnectionState::Closing => {}
            ConnectionState::Connecting => {
                let connection = known.connection;
                self.actions.push_back(Action::Close(path, connection));
                self.forget_path(now, path);
            }
            ConnectionState::Down => self.forget_path(now, path),
        }
    }

    pub(super) fn forget_path(&mut self, now: Duration, path: PathId) {
        let Some(Path { peer, .. }) = self.paths.remove(&path) else { return };
        if let Some(known) = self.peers.get_mut(&peer) {
            known.paths.retain(|other| *other != path);
        }
        self.note_reach(now, peer);
        self.forget(peer);
    }

    /// Records which routes the paths that are up serve. The peer is no longer lost for those; for the others it records since
    /// when, and sets the timer that declares the peer lost.
    pub(super) fn note_reach(&mut self, now: Duration, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let up = peer.paths.iter().filter_map(|path| self.paths.get(path));
        let up = up.filter(|path| path.state == ConnectionState::Up);
        let reach = up.fold(Reach::NOTHING, |reach, path| reach.and(path.spec.reach));
        peer.lost = peer.lost.without(reach);
        for route in Route::ALL {
            let since = &mut peer.unreachable[route.index()];
            let timer =
                |since: Duration| (since.saturating_add(self.options.peer_patience), Timer::Lost(id, route));
            match (reach.serves(route), *since) {
                (true, Some(before)) => {
                    *since = None;
                    self.timers.remove(&timer(before));
                }
                (false, None) => {
                    *since = Some(now);
                    self.timers.insert(timer(now));
                }
                _ => {}
            }
        }
    }

    /// Gives up all transfers of a peer and closes its paths. The peer is forgotten once nothing is under way any more.
    pub fn remove_peer(&mut self, now: Duration, peer: PeerId) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.removed = true;
        let (live, paths) = (known.live.clone(), known.paths.clone());
        // `give_up` may forget the peer, and its paths with it: note the connections to close first.
        let mut closes = Vec::new();
        for path in &paths {
            if let Some(known) = self.paths.get_mut(path)
                && matches!(known.state, ConnectionState::Up | ConnectionState::Connecting)
            {
                known.state = ConnectionState::Closing;
                closes.push(Action::Close(*path, known.connection));
            }
        }
        live.into_iter().for_each(|ticket| self.give_up(now, ticket, Failure::PeerLost));
        self.actions.extend(closes);
        paths.into_iter().for_each(|path| self.settle(now, path));
        self.forget(peer);
    }

    /// Whether a peer is known. A removed peer is known while anything of it is under way.
    pub fn has_peer(&self, peer: PeerId) -> bool {
        self.peers.contains_key(&peer)
    }

    /// Whether a path is known, as [`Transfers::has_peer`].
    pub(crate) fn has_path(&self, path: PathId) -> bool {
        self.paths.contains_key(&path)
    }

    /// The paths of a peer, up or not. None for an unknown peer.
    pub fn paths(&self, peer: PeerId) -> &[PathId] {
        self.peers.get(&peer).map_or(&[], |peer| &peer.paths)
    }

    /// Declares a peer lost for a route, and fails its transfers that need that route.
    pub(super) fn lose(&mut self, now: Duration, id: PeerId, route: Route) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.removed {
            return;
        }
        let route_only = Reach::of(&[route]);
        peer.lost = peer.lost.and(route_only);
        let live = peer.live.clone();
        self.actions.push_back(Action::Lost(id, route));
        for ticket in live {
            if self.routes_needed(ticket).overlaps(route_only) {
                self.give_up(now, ticket, Failure::PeerLost);
            }
        }
    }

    /// Forgets a removed peer once it has no live transfer and no post under way.
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
