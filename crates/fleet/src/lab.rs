//! What an experiment may change about the router of a replay. Tests and bench/replay/dynamo do; `kvlane replay` does not.

use std::time::Duration;

use crate::trace::Request;

/// An experiment. `()` changes nothing.
pub trait Lab {
    /// Chooses nodes in place of the router's policies. [`NoChooser`] leaves that to them.
    type Chooser: Chooser;

    /// The chooser; None if the router's policies choose.
    fn chooser(&mut self) -> Option<&mut Self::Chooser>;

    /// The class that the router takes a node for, which is of class `name`.
    fn class<'n>(&self, name: &'n str) -> &'n str {
        name
    }

    /// How long something of a request took, as the router reads it: it learns from that what nodes take.
    fn read(&self, time: Duration, request: usize) -> Duration {
        let _ = request;
        time
    }
}

impl Lab for () {
    type Chooser = NoChooser;

    fn chooser(&mut self) -> Option<&mut NoChooser> {
        None
    }
}

/// Picks the node of each request in a replay, in place of the router's own policies. It hears what engines tell of first
/// tokens, of ends, and of their caches, at the moment when it happens.
pub trait Chooser {
    /// A request has come, or is begun anew: the number of the node that gets it. None, or a node that takes none: it is lost.
    fn choose(&mut self, request: usize, asked: &Request) -> Option<usize>;

    /// Its first token has come.
    fn prefilled(&mut self, request: usize);

    /// It is over, served or not, or is about to be begun anew.
    fn over(&mut self, request: usize);

    /// A node's cache has these blocks from now on, one behind the other, and behind `parent` if they are not a prompt's first.
    fn stored(&mut self, node: usize, parent: Option<u64>, blocks: &[u64]);

    /// It has them no longer. Of a node that dies nothing is told.
    fn evicted(&mut self, node: usize, blocks: &[u64]);
}

/// A chooser that does not exist: the router's own policies choose.
pub enum NoChooser {}

impl Chooser for NoChooser {
    fn choose(&mut self, _: usize, _: &Request) -> Option<usize> {
        match *self {}
    }

    fn prefilled(&mut self, _: usize) {
        match *self {}
    }

    fn over(&mut self, _: usize) {
        match *self {}
    }

    fn stored(&mut self, _: usize, _: Option<u64>, _: &[u64]) {
        match *self {}
    }

    fn evicted(&mut self, _: usize, _: &[u64]) {
        match *self {}
    }
}
