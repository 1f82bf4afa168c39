//! A connection of the fabric, over which a stream comes that is cut anywhere.

use crate::halves::halves;

/// Panics where something does not hold.
pub(crate) fn run(bytes: &[u8]) {
    let (cuts, stream) = halves(bytes);
    kvlane_fabric::fuzzing::link(cuts, stream);
}
