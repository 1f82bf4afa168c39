//! A router that is not ours, in a replay.

use crate::trace::Request;

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
