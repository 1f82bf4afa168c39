//! The sources that name a node. They decide how long it is kept.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::limits::{BEAT_MISSED, FORGET_AFTER};
use crate::schedule::KnownBy;

/// Which sources name a node, and since when each is silent.
#[derive(Debug, Clone, Default)]
pub(super) struct Sources {
    /// A flag or the file.
    pub(super) configured: bool,
    /// An operator's `kvlane route add`.
    pub(super) added: bool,
    /// DNS names by number: since when a name's records lack the node. None: they have it.
    pub(super) dns: BTreeMap<usize, Option<Instant>>,
    /// When the last beat came.
    pub(super) beat: Option<Instant>,
}

impl Sources {
    /// Whether no source keeps the node any more. A node that answers probes outlives its DNS record.
    pub(super) fn is_forgotten(&self, answers: bool, now: Instant) -> bool {
        let is_old = |since: Instant| now.saturating_duration_since(since) >= FORGET_AFTER;
        let is_named = self.dns.values().any(|gone| gone.is_none_or(|since| answers || !is_old(since)));
        !self.configured && !self.added && !is_named && self.beat.is_none_or(is_old)
    }

    /// Whether only beats name the node. Any sender in --ping-allow may have sent them.
    pub(super) fn is_only_beats(&self) -> bool {
        !self.configured && !self.added && self.dns.is_empty()
    }

    /// Whether only beats name the node, and too many are missing.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.is_only_beats() && self.silence(now).is_some_and(|silence| silence >= BEAT_MISSED)
    }

    fn silence(&self, now: Instant) -> Option<Duration> {
        self.beat.map(|last| now.saturating_duration_since(last))
    }

    /// Adds another entry's sources, because both turned out to be one node.
    pub(super) fn merge(&mut self, other: Self) {
        self.configured |= other.configured;
        self.added |= other.added;
        self.beat = self.beat.max(other.beat);
        for (name, gone) in other.dns {
            self.dns.entry(name).and_modify(|ours| *ours = (*ours).and(gone)).or_insert(gone);
        }
    }

    /// The sources that name it, for people.
    pub(super) fn known_by(&self) -> KnownBy {
        KnownBy {
            flag: self.configured,
            operator: self.added,
            dns: !self.dns.is_empty(),
            beat: self.beat.is_some(),
        }
    }
}
