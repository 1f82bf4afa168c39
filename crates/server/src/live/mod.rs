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

pub(crate) use self::sampler::Sampler;
use self::{document::document, problems::problems, sampler::SERIES};
use crate::{metrics::page::scrape_with, observer::Reading, shared::Shared};

/// How old the hits by window may be. To read them takes milliseconds of the observer's thread, and they change slowly.
const WINDOWS_AGE_MAX: Duration = Duration::from_secs(5);

/// The page itself.
pub(crate) const PAGE: LivePage = LivePage { title: "kvlane daemon", script: include_str!("daemon.js") };

/// What the page needs beside the daemon's state.
#[derive(Debug)]
pub(crate) struct Live {
    history: History,
    windows: Mutex<Option<(Instant, Vec<Reading>)>>,
}

impl Live {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { history: History::new(&SERIES), windows: Mutex::default() })
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
