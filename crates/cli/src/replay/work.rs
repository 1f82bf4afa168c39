//! Replays many cases at a time, and shows how far they are.

use std::{
    num::NonZero,
    sync::atomic::{AtomicUsize, Ordering},
    sync::mpsc,
    thread,
};

use indicatif::{ProgressBar, ProgressStyle};

/// A progress bar up to `count`, with `of` as the name of the counted things.
pub(super) fn progress_bar(count: usize, of: &str) -> ProgressBar {
    let bar = ProgressBar::new(count as u64).with_message("replaying");
    let template = format!("{{msg}} {{bar:40}} {{percent}}% of {{human_len}} {of}, {{eta}}");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style);
    }
    bar
}

/// Runs all on as many threads as there are cores. Returns the results in the order of `all`.
pub(super) fn on_all_cores<T: Sync, R: Send>(all: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(all.len());
    let (done, finished) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..threads {
            let (done, next, run) = (done.clone(), &next, &run);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(one) = all.get(index) else { break };
                    // The receiver outlives this scope.
                    let _ = done.send((index, run(one)));
                }
            });
        }
    });
    drop(done);
    let mut runs: Vec<(usize, R)> = finished.into_iter().collect();
    runs.sort_by_key(|(index, _)| *index);
    runs.into_iter().map(|(_, run)| run).collect()
}
