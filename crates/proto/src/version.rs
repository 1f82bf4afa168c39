//! Negotiates the wire version between a client and the daemon.

use thiserror::Error;

/// Oldest wire version that this build speaks.
pub const WIRE_MIN: u32 = 1;
/// Newest wire version that this build speaks.
pub const WIRE_MAX: u32 = 4;
/// First wire version whose daemon answers ReadJournal.
pub const WIRE_OF_JOURNAL: u32 = 2;
/// First wire version whose daemon records requests, and whose scheduler reports their ends.
pub const WIRE_OF_RECORDINGS: u32 = 3;
/// First wire version whose daemon writes flags for loads of several groups.
pub const WIRE_OF_GROUPS_FLAGS: u32 = 4;

/// The client and the daemon have no wire version in common.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "the client speaks wire versions {theirs_min} to {theirs_max}, this daemon {ours_min} to {ours_max}: upgrade the {upgrade}"
)]
pub struct Incompatible {
    theirs_min: u32,
    theirs_max: u32,
    ours_min: u32,
    ours_max: u32,
    upgrade: &'static str,
}

/// The newest version that both sides speak.
///
/// # Errors
/// [`Incompatible`] names the side that has to be upgraded.
pub fn negotiate(
    theirs: std::ops::RangeInclusive<u32>,
    ours: std::ops::RangeInclusive<u32>,
) -> Result<u32, Incompatible> {
    let newest = (*theirs.end()).min(*ours.end());
    if newest >= *theirs.start() && newest >= *ours.start() {
        return Ok(newest);
    }
    let upgrade = if theirs.end() < ours.start() { "client (the engine's kvlane package)" } else { "daemon" };
    Err(Incompatible {
        theirs_min: *theirs.start(),
        theirs_max: *theirs.end(),
        ours_min: *ours.start(),
        ours_max: *ours.end(),
        upgrade,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_common_version_wins() {
        assert_eq!(negotiate(1..=3, 2..=5), Ok(3));
        assert_eq!(negotiate(2..=9, 1..=4), Ok(4));
        assert_eq!(negotiate(1..=1, 1..=1), Ok(1));
    }

    #[test]
    fn the_refusal_names_the_side_to_upgrade() {
        let old_client = negotiate(1..=1, 2..=3).unwrap_err().to_string();
        assert!(
            old_client.contains("1 to 1")
                && old_client.ends_with("upgrade the client (the engine's kvlane package)")
        );
        let old_daemon = negotiate(4..=5, 2..=3).unwrap_err().to_string();
        assert!(old_daemon.ends_with("upgrade the daemon"));
    }

    #[test]
    fn an_empty_range_is_refused() {
        #[allow(clippy::reversed_empty_ranges, reason = "a peer may send one")]
        let refused = negotiate(3..=2, 1..=5);
        assert!(refused.is_err());
    }
}
