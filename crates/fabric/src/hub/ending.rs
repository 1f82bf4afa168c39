//! Memory that is given back, peers that are forgotten, and the end of an engine.

use super::Outside;
use crate::carrier::Touched;
use crate::control::Control;
use crate::ranges::Spots;
use crate::transfers::PeerId;

impl<C: Control> Outside<C> {
    /// Forgets a peer whose transfers were ended, and its paths.
    pub(super) fn remove_peer(&mut self, peer: PeerId) {
        self.each(|carrier, cx| carrier.peer_removed(cx, peer));
        if let Some(known) = self.peers.remove(&peer) {
            self.control.forget(known.control);
            self.leaving.insert(peer, known.whom);
        }
        self.paths.retain(|_, path| path.peer != peer);
    }

    /// Whether anything may still read or write a region for somebody else.
    pub(crate) fn is_touched(&self, region: u32) -> bool {
        let Some(memory) = self.process.regions.all_of(region) else { return false };
        let memory = Touched { spots: Spots::one(&memory), reader: None };
        self.carriers.iter().any(|carrier| carrier.touches(memory))
    }

    /// Whether anything may still be read through a window.
    pub(crate) fn is_read_through(&self, window: u32) -> bool {
        let Some((reader, spots)) = self.process.regions.shown(window) else { return false };
        let memory = Touched { spots, reader: Some(reader) };
        self.carriers.iter().any(|carrier| carrier.touches(memory))
    }

    /// Ends what reads through a window for too long.
    pub(crate) fn let_go_through(&mut self, window: u32) {
        let Some((reader, spots)) =
            self.process.regions.shown(window).map(|(reader, spots)| (reader, spots.to_vec()))
        else {
            return;
        };
        let memory = Touched { spots: Spots::of(&spots), reader: Some(reader) };
        self.each(|carrier, cx| carrier.release(cx, memory));
    }

    /// Ends what touches a region for too long.
    pub(crate) fn let_go(&mut self, region: u32) {
        if let Some(memory) = self.process.regions.all_of(region) {
            self.each(|carrier, cx| {
                carrier.release(cx, Touched { spots: Spots::one(&memory), reader: None })
            });
        }
    }

    pub(super) fn close_carriers(&mut self) {
        self.each(|carrier, cx| carrier.close_all(cx));
    }

    /// Of a closed engine: whether something may still touch memory of it, of this side ...
    pub(crate) fn is_ending(&self) -> bool {
        self.carriers.iter().any(|carrier| carrier.is_busy())
    }

    /// ... or may still be read by a process of this host that was asked to.
    pub(crate) fn is_pulled(&self) -> bool {
        self.fences.has_unlimited()
    }

    /// Nobody is asked any more.
    pub(crate) fn end_fences(&mut self) {
        for (broken, tokens) in self.fences.take_all() {
            self.end_fence(broken, tokens);
        }
    }
}
