//! Maps regions of neighbours, and unmaps them when their owner takes them back, is gone, or nothing uses them.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::imports::{Done, FetchId, FetchedMemory, ImportOf};
use super::neighbour::{MappedRegion, Neighbour};
use super::registrar::RegionKey;
use super::words::Words;
use super::{ActiveFetch, Cuda, refuse, send};
use crate::carrier::{Context, Party};
use crate::peers::Peer;
use crate::transfers::PeerId;
use crate::watch::Interest;
/// Most regions of a peer that are mapped before a transfer needs them.
const MAPPED_AHEAD_MAX: usize = 256;

impl Cuda {
    /// Maps regions of a neighbour for a GPU of this process, unless that is under way.
    pub(super) fn fetch(&mut self, cx: &mut Context<'_>, party: Party, gpu: u16, regions: Vec<(u32, u32)>) {
        let Some(opened) = self.exposed.gpu(gpu) else { return };
        let neighbour = match party {
            Party::Peer(peer) => self.peers.get_mut(&peer).and_then(|reader| reader.neighbour.as_mut()),
            Party::Session(session) => self.serving.get_mut(&session).map(|serving| &mut serving.neighbour),
        };
        let Some(neighbour) = neighbour else { return };
        let Some(asks) = neighbour.begin_fetch(gpu, regions) else {
            return self.cannot_map(cx, party, "it has more regions than this process maps");
        };
        let (meeting, identity, connection) = (neighbour.meeting, neighbour.identity, neighbour.connection);
        for regions in asks {
            let id = self.imports.fetch(meeting, identity, opened.clone(), regions.clone());
            self.fetching.insert(id, ActiveFetch { party, connection, gpu, regions });
        }
    }

    /// Meets a peer, and maps its regions once it shows any of them to this process by a window, before a transfer needs them.
    /// Others are mapped when a transfer names them: most processes of a peer never read each other.
    pub(super) fn meet(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        let neighbour = self.peers.get(&peer).and_then(|reader| reader.neighbour.as_ref());
        let Some(neighbour) = neighbour else { return };
        let is_shown = neighbour.is_empty() && cx.peers.get(&peer).is_some_and(Peer::has_windows);
        let Some(gpu) = self.exposed.gpus().first().copied() else { return };
        if !is_shown {
            return self.fetch(cx, Party::Peer(peer), gpu, Vec::new());
        }
        let is_shared = |key: &[u8]| matches!(RegionKey::decode(key), RegionKey::Shared(_));
        let shared = cx.remote_regions(peer).into_iter().filter(|(.., key)| is_shared(key));
        // A transfer has the others mapped that it names.
        let shared =
            shared.map(|(region, generation, _)| (region, generation)).take(MAPPED_AHEAD_MAX).collect();
        self.fetch(cx, Party::Peer(peer), gpu, shared);
    }

    /// Unmaps regions that a peer has given back.
    pub(super) fn close_gone(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        let neighbour = self.peers.get_mut(&peer).and_then(|reader| reader.neighbour.as_mut());
        let Some(neighbour) = neighbour else { return };
        let here: HashSet<(u32, u32)> =
            cx.remote_regions(peer).into_iter().map(|(region, generation, _)| (region, generation)).collect();
        let gone = neighbour.regions().into_iter().filter(|region| !here.contains(region));
        let gone: Vec<(u32, u32)> = gone.collect();
        let mapped: Vec<MappedRegion> =
            gone.iter().flat_map(|(region, generation)| neighbour.take(*region, *generation)).collect();
        self.close_imports(mapped);
    }

    /// A peer's memory cannot be mapped: other carriers move its bytes.
    pub(super) fn cannot_map(&mut self, cx: &mut Context<'_>, party: Party, why: &str) {
        match party {
            Party::Peer(peer) => self.give_up(cx, peer, why.to_owned()),
            Party::Session(session) => {
                refuse(cx, session, why);
                self.stop_serving(session);
            }
        }
    }

    /// Takes what the thread that maps memory has done. Whether there was anything.
    pub(super) fn take_done(&mut self, cx: &mut Context<'_>) -> bool {
        let done = self.imports.take_done();
        let any = !done.is_empty();
        for done in done {
            match done {
                Done::Fetched { id, outcome } => self.fetched(cx, id, outcome),
                Done::Closed(of) => self.closed(cx, *of),
            }
        }
        any
    }

    pub(super) fn fetched(
        &mut self,
        cx: &mut Context<'_>,
        id: FetchId,
        outcome: Result<FetchedMemory, String>,
    ) {
        let Some(ActiveFetch { party, connection, gpu, regions }) = self.fetching.remove(&id) else { return };
        let neighbour = match party {
            Party::Peer(peer) => self.peers.get_mut(&peer).and_then(|reader| reader.neighbour.as_mut()),
            Party::Session(session) => self.serving.get_mut(&session).map(|serving| &mut serving.neighbour),
        };
        let neighbour = neighbour.filter(|neighbour| neighbour.connection == connection && !self.is_closed);
        match (outcome, neighbour) {
            (Ok(memory), Some(neighbour)) => {
                let was_met = neighbour.card.is_some();
                let mapped = neighbour.fetched(gpu, &regions, memory);
                send(cx, party, &Words::Mapped(mapped));
                if let Some(process) = neighbour.process.as_ref().filter(|_| !was_met) {
                    // Without a watch the end of the control connection tells of its end too.
                    neighbour.tag = self.next_tag;
                    self.next_tag += 1;
                    if self.watch.add(&**process, neighbour.tag, Interest::READS).is_ok() {
                        self.watched.insert(neighbour.tag, (party, connection));
                    }
                }
            }
            (Err(why), Some(_)) => return self.cannot_map(cx, party, &why),
            // That connection has ended meanwhile.
            (Ok(memory), None) => {
                for import in memory.regions {
                    let (region, generation) = (import.region, import.generation);
                    let of = Arc::new(ImportOf { region, generation, connection });
                    self.imports.close(of, Arc::new(import));
                }
                return;
            }
            (Err(_), None) => return,
        }
        match party {
            Party::Peer(peer) => {
                // It may have given some back meanwhile.
                self.close_gone(cx, peer);
                if let Some(reader) = self.peers.get_mut(&peer) {
                    match std::mem::replace(&mut reader.is_up, true) {
                        false => cx.up(reader.path, reader.number),
                        true => cx.ready(reader.path),
                    }
                }
            }
            Party::Session(session) => self.serve_waiting(cx, session),
        }
    }

    /// A region is not mapped here any more: tells its owner.
    pub(super) fn closed(&mut self, cx: &mut Context<'_>, of: ImportOf) {
        // A thread that closes the engine waits for the last one.
        cx.process.news.change |= self.is_closed;
        let ImportOf { region, generation, connection } = of;
        let is_of = |neighbour: &Neighbour| neighbour.connection == connection;
        let peers = self.peers.iter().filter_map(|(peer, reader)| {
            reader.neighbour.as_ref().is_some_and(is_of).then_some(Party::Peer(*peer))
        });
        let sessions = self
            .serving
            .iter()
            .filter_map(|(session, serving)| is_of(&serving.neighbour).then_some(Party::Session(*session)));
        let to: Vec<Party> = peers.chain(sessions).collect();
        for party in to {
            send(cx, party, &Words::Unmapped(vec![(region, generation)]));
        }
    }

    pub(super) fn close_imports(&mut self, mapped: Vec<MappedRegion>) {
        mapped.into_iter().for_each(|MappedRegion { of, import }| self.imports.close(of, import));
    }

    /// A neighbour's process has exited: unmaps its memory, even if its control connection lives on in a forked child.
    pub(super) fn neighbour_exited(&mut self, cx: &mut Context<'_>, party: Party, connection: u64) {
        match party {
            Party::Peer(peer) => {
                if self.peers.get(&peer).is_some_and(|reader| reader.connection == connection) {
                    self.end(cx, peer, "the peer's process has exited");
                }
            }
            Party::Session(session) => {
                let serving = self.serving.get(&session);
                if serving.is_some_and(|serving| serving.neighbour.connection == connection) {
                    self.stop_serving(session);
                }
            }
        }
    }

    pub(super) fn unwatch(&mut self, neighbour: &Neighbour) {
        if self.watched.remove(&neighbour.tag).is_some()
            && let Some(process) = &neighbour.process
        {
            self.watch.remove(&**process);
        }
    }

    /// A copy is over: closes those of its imports that were given up meanwhile.
    pub(super) fn close_given_up(&mut self, mapped: Vec<MappedRegion>) {
        let given_up = mapped.into_iter().filter(|held| held.import.is_given_up.load(Ordering::Acquire));
        self.close_imports(given_up.collect());
    }

    /// Unmaps regions whose owner has given them back, or that nothing uses any more.
    pub(super) fn close_unused(&mut self, now: Duration) {
        let idle = self.peers.values_mut().filter_map(|reader| reader.neighbour.as_mut());
        let idle = idle.chain(self.serving.values_mut().map(|serving| &mut serving.neighbour));
        let mapped: Vec<MappedRegion> = idle.flat_map(|neighbour| neighbour.take_idle(now)).collect();
        self.close_imports(mapped);
    }
}
