//! A connection of the fabric that receives a stream, cut anywhere.

use crate::halves::halves;

/// Panics if a property fails for these bytes.
pub(crate) fn run(bytes: &[u8]) {
    let (cuts, stream) = halves(bytes);
    kvlane_fabric::fuzzing::link(cuts, stream);
}
