//! The router's live page: what `/live` answers, the samples of the last ten minutes, and the problems in plain words.
//!
//! It shows no more than the other pages of the admin port do, and no ids of requests or clients.

mod document;
mod problems;
mod sampler;

use std::{sync::Arc, time::Instant};

use kvlane_door::{History, LivePage};
use serde_json::Value;

pub use self::sampler::Sampler;
use self::{document::document, problems::problems, sampler::SERIES};
use crate::shared::Shared;

/// The page itself.
pub(crate) const PAGE: LivePage = LivePage {
    title: "kvlane route",
    script: include_str!("router.js"),
    // Without random bits the browser refuses the script, until the page is loaded again.
    random: || kvlane_memory::random().unwrap_or_default(),
};

/// State of the page, beside the router's own.
#[derive(Debug)]
pub struct Live {
    history: Arc<History>,
    started: Instant,
    /// Tells this run of the router from others.
    run: u64,
}

impl Live {
    /// Without samples. `run` is random.
    pub fn new(run: u64) -> Arc<Self> {
        Arc::new(Self { history: Arc::new(History::new(&SERIES)), started: Instant::now(), run })
    }

    /// Samples the series of this page.
    pub fn sampler(&self, shared: Arc<Shared>) -> Sampler {
        Sampler::new(shared, Arc::clone(&self.history))
    }

    /// The figures of this moment, and the samples from number `after` on.
    pub(crate) fn figures(&self, shared: &Shared, after: u64) -> Value {
        let recent = |series: &str| self.history.sum(series);
        let problems = problems(shared, recent);
        document(shared, (self.run, self.started), problems, self.history.read(after))
    }
}
