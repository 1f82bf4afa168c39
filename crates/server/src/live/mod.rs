//! The daemon's live page: what `/live` answers, the samples of the last ten minutes, and the problems in plain words.
//!
//! It shows no more than `/metrics` does, because the peer may be a stranger: no paths, users, prompts or request ids.

mod document;
mod problems;
mod sampler;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_door::{History, LivePage};
use parking_lot::Mutex;
use serde_json::Value;

use self::{
    document::document,
    problems::problems,
    sampler::{SERIES, Sampler},
};
use crate::{metrics::page::scrape_with, observer::Reading, shared::Shared};

/// How old the hits by window may be. To read them takes milliseconds of the observer's thread, and they change slowly.
const WINDOWS_AGE_MAX: Duration = Duration::from_secs(5);

/// The page itself.
pub(crate) const PAGE: LivePage = LivePage {
    title: "kvlane daemon",
    script: include_str!("daemon.js"),
    // Without random bits the browser refuses the script, until the page is loaded again.
    random: || kvlane_memory::random().unwrap_or_default(),
};

/// State of the page, beside the daemon's own.
#[derive(Debug)]
pub(crate) struct Live {
    history: Arc<History>,
    windows: Mutex<Option<(Instant, Vec<Reading>)>>,
}

impl Live {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { history: Arc::new(History::new(&SERIES)), windows: Mutex::default() })
    }

    /// Samples the series of this page.
    pub(crate) fn sampler(&self, shared: Arc<Shared>) -> Sampler {
        Sampler::new(shared, Arc::clone(&self.history))
    }

    /// The figures of this moment, and the samples from number `after` on.
    pub(crate) fn figures(&self, shared: &Shared, after: u64) -> Value {
        let scrape = scrape_with(shared, self.windows(shared));
        let recent = |series: &str| self.history.sum(series);
        let problems = problems(&scrape, !shared.unreachable.is_empty(), recent);
        document(shared, &scrape, problems, self.history.read(after))
    }

    fn windows(&self, shared: &Shared) -> Vec<Reading> {
        let mut held = self.windows.lock();
        if let Some((at, windows)) = &*held
            && at.elapsed() < WINDOWS_AGE_MAX
        {
            return windows.clone();
        }
        let windows = shared.observer.ceilings();
        *held = Some((Instant::now(), windows.clone()));
        windows
    }
}
