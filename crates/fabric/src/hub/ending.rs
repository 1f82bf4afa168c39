//! Gives memory back, forgets peers, and ends an engine.

use super::Outside;
use crate::carrier::Touched;
use crate::control::Control;
use crate::ranges::Spots;
use crate::transfers::PeerId;

impl<C: Control> Outside<C> {
    /// Forgets a peer and its paths, after its transfers were ended.
    pub(super) fn remove_peer(&mut self, peer: PeerId) {
        self.each(|carrier, cx| carrier.peer_removed(cx, peer));
        if let Some(known) = self.peers.remove(&peer) {
            self.control.forget(known.control);
            self.leaving.insert(peer, known.whom);
        }
        self.paths.retain(|_, path| path.peer != peer);
    }

    /// Whether anything may still read or write the region.
    pub(crate) fn is_touched(&self, region: u32) -> bool {
        let Some(memory) = self.process.regions.all_of(region) else { return false };
        let memory = Touched { spots: Spots::one(&memory), reader: None };
        self.carriers.iter().any(|carrier| carrier.touches(memory))
    }

    /// Whether the window's reader may still be sent bytes through it.
    pub(crate) fn is_window_read(&self, window: u32) -> bool {
        let Some((reader, spots)) = self.process.regions.shown(window) else { return false };
        let memory = Touched { spots, reader: Some(reader) };
        self.carriers.iter().any(|carrier| carrier.touches(memory))
    }

    /// Ends connections that have read through a closed window for too long.
    pub(crate) fn release_window(&mut self, window: u32) {
        let Some((reader, spots)) =
            self.process.regions.shown(window).map(|(reader, spots)| (reader, spots.to_vec()))
        else {
            return;
        };
        let memory = Touched { spots: Spots::of(&spots), reader: Some(reader) };
        self.each(|carrier, cx| carrier.release(cx, memory));
    }

    /// Ends connections and copies that have used a region for too long after it was unregistered.
    pub(crate) fn release_region(&mut self, region: u32) {
        if let Some(memory) = self.process.regions.all_of(region) {
            self.each(|carrier, cx| {
                carrier.release(cx, Touched { spots: Spots::one(&memory), reader: None })
            });
        }
    }

    pub(super) fn close_carriers(&mut self) {
        self.each(|carrier, cx| carrier.close_all(cx));
    }

    /// Whether a closed engine's carriers may still touch its memory.
    pub(crate) fn is_ending(&self) -> bool {
        self.carriers.iter().any(|carrier| carrier.is_busy())
    }

    /// Whether neighbours that were asked to read this process's memory may still do so.
    pub(crate) fn is_pulled(&self) -> bool {
        self.fences.has_unlimited()
    }

    /// Gives up all fences: no peer is asked any more.
    pub(crate) fn end_fences(&mut self) {
        for (broken, tokens) in self.fences.take_all() {
            self.end_fence(broken, tokens);
        }
    }
}
