//! One node, as far as it concerns what is known of its prefixes.

use std::{collections::HashSet, sync::Arc};

use super::{
    agreement::Agreement,
    blocks::Told,
    grade::{Grade, Reason},
};

/// What the router knows of a node's prefixes, for those who look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// What it is worth.
    pub grade: Grade,
    /// Why it is not more.
    pub reason: Option<Reason>,
    /// What its engine told.
    pub told: Told,
    /// Times that its engine began anew, as far as its events show.
    pub restarts: u64,
    /// Times that events were lost for good, and all was forgotten.
    pub gaps: u64,
}

/// Of a node that is not there.
impl Default for Status {
    fn default() -> Self {
        let reason = Some(Reason::NoEvents);
        Self { grade: Grade::Approximate, reason, told: Told::default(), restarts: 0, gaps: 0 }
    }
}

#[derive(Debug)]
pub(super) struct KnownNode {
    pub(super) name: Arc<str>,
    /// Models and adapters, with an adapter's base model.
    pub(super) models: Vec<(Arc<str>, Option<String>)>,
    pub(super) has_source: bool,
    pub(super) is_live: bool,
    /// Slot of the pool that the node shares with others.
    pub(super) pool: Option<usize>,
    pub(super) agreement: Agreement,
    pub(super) restarts: u64,
    pub(super) gaps: u64,
    /// What was known of it last.
    pub(super) last: Option<(Grade, Option<Reason>)>,
    said: HashSet<(Grade, Option<Reason>)>,
}

impl KnownNode {
    /// `has_source`: its events are to be read.
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
            said: HashSet::new(),
        }
    }

    /// Whether what its engine tells may be believed.
    pub(super) fn is_exact(&self) -> bool {
        self.is_live && !self.agreement.is_broken()
    }

    pub(super) fn status(&self, told: Told, has_tokenizer: impl Fn(&str) -> bool) -> Status {
        let (grade, reason) = self.grade(told, has_tokenizer);
        Status { grade, reason, told, restarts: self.restarts, gaps: self.gaps }
    }

    pub(super) fn grade(&self, told: Told, has_tokenizer: impl Fn(&str) -> bool) -> (Grade, Option<Reason>) {
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
        } else if told.block_size.is_none() {
            Reason::BlockSizeUnknown
        } else {
            return (Grade::Exact, None);
        };
        let is_checked = self.agreement.holds() && has_tokenizer;
        (if is_checked { Grade::Checked } else { Grade::Approximate }, Some(reason))
    }

    /// Logs what is known of it now, once for each kind.
    pub(super) fn say(&mut self, now: (Grade, Option<Reason>)) {
        if !self.said.insert(now) {
            return;
        }
        let (name, grade) = (&self.name, now.0.name());
        match now.1 {
            None => tracing::info!(node = %name, "prefixes of a node are known exactly, by its events"),
            Some(reason @ Reason::BlockSizeUnknown) => {
                tracing::info!(node = %name, knowledge = grade, reason = reason.name(), "{}", reason.sentence());
            }
            Some(reason) => tracing::warn!(
                node = %name,
                knowledge = grade,
                reason = reason.name(),
                "prefixes of a node are not known exactly: {}. Further cases are only counted",
                reason.sentence()
            ),
        }
    }
}

/// The base model of an adapter, by how a node describes it.
pub(super) fn parent(described: &str) -> Option<String> {
    let described: serde_json::Value = serde_json::from_str(described).ok()?;
    described.get("parent")?.as_str().map(str::to_owned)
}
