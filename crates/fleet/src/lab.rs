//! Hooks by which an experiment changes the router of a replay. Tests and bench/replay/dynamo use them; `kvlane replay` does
//! not.

use std::time::Duration;

use crate::trace::Request;

/// An experiment on a replay's router. `()` changes nothing.
pub trait Lab {
    /// Chooses nodes in place of the router's policies; [`NoChooser`] if these choose.
    type Chooser: Chooser;

    /// The chooser; None if the router's policies choose.
    fn chooser(&mut self) -> Option<&mut Self::Chooser>;

    /// The class under which the router knows a node of class `name`.
    fn class<'n>(&self, name: &'n str) -> &'n str {
        name
    }

    /// A time of a request as the router observes it. The router's predictions learn from it.
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

/// Chooses the node of each request in place of the router's policies. It hears of first tokens, ends and cache changes at the
/// moment when they happen.
pub trait Chooser {
    /// Chooses for a request that has come, or that starts again: the number of its node. If it is None, or a node that
    /// accepts no requests, the request is lost.
    fn choose(&mut self, request: usize, recorded: &Request) -> Option<usize>;

    /// The request's first token has come.
    fn prefilled(&mut self, request: usize);

    /// The request has ended, served or not, or is about to start again.
    fn over(&mut self, request: usize);

    /// A node's cache has stored these blocks, which follow each other. `parent` is the block before them; None: they begin a
    /// prompt.
    fn stored(&mut self, node: usize, parent: Option<u64>, blocks: &[u64]);

    /// A node's cache has evicted these blocks. A node that dies reports nothing.
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
