//! Who knows of a node, which decides how long it is kept.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::limits::{BEAT_MISSED, FORGOTTEN};
use crate::schedule::KnownBy;

/// Who has named a node, and when last.
#[derive(Debug, Clone, Default)]
pub(super) struct Whose {
    /// A flag or the file.
    pub(super) configured: bool,
    /// An operator.
    pub(super) added: bool,
    /// Names whose answers had it: since when they do not, if so.
    pub(super) dns: BTreeMap<usize, Option<Instant>>,
    /// The last beat.
    pub(super) beat: Option<Instant>,
}

impl Whose {
    /// Whether nothing keeps the node any more.
    pub(super) fn is_forgotten(&self, answers: bool, now: Instant) -> bool {
        let is_old = |since: Instant| now.saturating_duration_since(since) >= FORGOTTEN;
        let is_named = self.dns.values().any(|gone| gone.is_none_or(|since| answers || !is_old(since)));
        !self.configured && !self.added && !is_named && self.beat.is_none_or(is_old)
    }

    /// Whether only beats name the node. Any sender in --ping-allow may have sent them.
    pub(super) fn is_only_beats(&self) -> bool {
        !self.configured && !self.added && self.dns.is_empty()
    }

    /// Whether beats are all that is known of the node, and too many are missing.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.is_only_beats() && self.silence(now).is_some_and(|silence| silence >= BEAT_MISSED)
    }

    fn silence(&self, now: Instant) -> Option<Duration> {
        self.beat.map(|last| now.saturating_duration_since(last))
    }

    /// Both are of one node.
    pub(super) fn merge(&mut self, other: Self) {
        self.configured |= other.configured;
        self.added |= other.added;
        self.beat = self.beat.max(other.beat);
        for (name, gone) in other.dns {
            self.dns.entry(name).and_modify(|ours| *ours = (*ours).and(gone)).or_insert(gone);
        }
    }

    /// For people.
    pub(super) fn known_by(&self) -> KnownBy {
        KnownBy {
            flag: self.configured,
            operator: self.added,
            dns: !self.dns.is_empty(),
            beat: self.beat.is_some(),
        }
    }
}
