//! Grades the router's knowledge of one node's prefixes, and logs each new grade.

use std::{collections::HashSet, sync::Arc};

use super::{
    agreement::Agreement,
    blocks::BlockStats,
    grade::{Grade, Reason},
};

/// The knowledge of a node's prefixes, for `/nodes` and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// How exact the knowledge is.
    pub grade: Grade,
    /// Why it is not exact.
    pub reason: Option<Reason>,
    /// Counts of its engine's events.
    pub blocks: BlockStats,
    /// Restarts of its engine that the events have shown.
    pub restarts: u64,
    /// Times that events were lost for good, so that all its blocks were dropped.
    pub gaps: u64,
}

/// The status of a node that does not exist.
impl Default for Status {
    fn default() -> Self {
        let reason = Some(Reason::NoEvents);
        Self { grade: Grade::Approximate, reason, blocks: BlockStats::default(), restarts: 0, gaps: 0 }
    }
}

#[derive(Debug)]
pub(super) struct KnownNode {
    pub(super) name: Arc<str>,
    /// Models and adapters, with an adapter's base model.
    pub(super) models: Vec<(Arc<str>, Option<String>)>,
    /// Whether its events are to be read.
    pub(super) has_source: bool,
    /// Whether its events can be read now.
    pub(super) is_live: bool,
    /// Slot of the pool that the node shares with others.
    pub(super) pool: Option<usize>,
    pub(super) agreement: Agreement,
    pub(super) restarts: u64,
    pub(super) gaps: u64,
    /// The grade that was logged or counted last.
    pub(super) last: Option<(Grade, Option<Reason>)>,
    /// Grades that were logged.
    logged: HashSet<(Grade, Option<Reason>)>,
}

impl KnownNode {
    pub(super) fn new(name: Arc<str>, has_source: bool) -> Self {
        Self {
            name,
            models: Vec::new(),
            has_source,
            is_live: false,
            pool: None,
            agreement: Agreement::default(),
            restarts: 0,
            gaps: 0,
            last: None,
            logged: HashSet::new(),
        }
    }

    /// Whether the blocks that its engine reports may be used: the events are live, and both count the same tokens.
    pub(super) fn is_exact(&self) -> bool {
        self.is_live && !self.agreement.is_broken()
    }

    pub(super) fn status(&self, blocks: BlockStats, has_tokenizer: impl Fn(&str) -> bool) -> Status {
        let (grade, reason) = self.grade(blocks, has_tokenizer);
        Status { grade, reason, blocks, restarts: self.restarts, gaps: self.gaps }
    }

    pub(super) fn grade(
        &self,
        blocks: BlockStats,
        has_tokenizer: impl Fn(&str) -> bool,
    ) -> (Grade, Option<Reason>) {
        let base = |(name, base): &(Arc<str>, Option<String>)| has_tokenizer(base.as_deref().unwrap_or(name));
        let has_tokenizer = self.models.iter().any(base);
        let reason = if !has_tokenizer {
            Reason::NoTokenizer
        } else if self.agreement.is_broken() {
            Reason::TokensDiffer
        } else if !self.has_source {
            Reason::NoEvents
        } else if !self.is_live {
            Reason::EventsLost
        } else if blocks.block_size.is_none() {
            Reason::BlockSizeUnknown
        } else {
            return (Grade::Exact, None);
        };
        let is_checked = self.agreement.holds() && has_tokenizer;
        (if is_checked { Grade::Checked } else { Grade::Approximate }, Some(reason))
    }

    /// Logs a grade and its reason, each pair once.
    pub(super) fn log(&mut self, now: (Grade, Option<Reason>)) {
        if !self.logged.insert(now) {
            return;
        }
        let (name, grade) = (&self.name, now.0.name());
        match now.1 {
            None => {
                // Log: the router chooses for this node by the blocks that the engine reports, not by an
                // estimate.
                tracing::info!(once = true, node = %name, "prefixes known exactly, by the engine's events")
            }
            Some(reason @ Reason::BlockSizeUnknown) => {
                // Log "no event has reported the size of the engine's blocks yet: its first stored block will":
                // the router estimates what this node has until the engine stores a block.
                tracing::info!(once = true, node = %name, knowledge = grade, reason = reason.name(), "{}", reason.sentence());
            }
            // Log: the router estimates what this node has, so it chooses less well; requests are served. Do: see
            // the reason in docs/choosing.md#events-and-tokens.
            Some(reason) => tracing::warn!(
                once = true,
                node = %name,
                knowledge = grade,
                reason = reason.name(),
                "prefixes not known exactly: {}; further cases are only counted",
                reason.sentence()
            ),
        }
    }
}

/// The base model of an adapter, from the JSON object that describes it in `/v1/models`.
pub(super) fn parent(described: &str) -> Option<String> {
    let described: serde_json::Value = serde_json::from_str(described).ok()?;
    described.get("parent")?.as_str().map(str::to_owned)
}
