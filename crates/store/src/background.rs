//! The threads that seal, scrub, spill, compare policies, and watch the sources.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::auto::AutoPolicy;
use crate::store::Store;

/// Shortest sleep of the scrub between two bursts of reads.
const SCRUB_INTERVAL: Duration = Duration::from_millis(200);

/// The running threads. Dropping it stops and joins them; blocks that are not sealed by then stay invisible.
pub struct Background {
    store: Arc<Store>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Store {
    /// Starts the threads of the store. `seal_threads` of them (one at least) seal committed blocks. One compares visible
    /// blocks with their checksums at `scrub_bytes_per_s`, unless that is 0. A tier, sources and the policy `auto` add one each.
    /// Fails if the system gives no thread.
    pub fn start_background(
        self: &Arc<Self>,
        seal_threads: usize,
        scrub_bytes_per_s: u64,
    ) -> io::Result<Background> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut background =
            Background { store: Arc::clone(self), stop: Arc::clone(&stop), threads: Vec::new() };
        for _ in 0..seal_threads.max(1) {
            background.spawn("kvlane-seal", seal)?;
        }
        if self.below.is_some() {
            background.spawn("kvlane-spill", |store, stop| store.spill_until(stop))?;
        }
        if self.has_sources() {
            background.spawn("kvlane-stalls", |store, stop| store.watch_stalls(stop))?;
        }
        if self.auto.is_some() {
            background.spawn("kvlane-policy", |store, stop| store.observe_until(stop))?;
        }
        if scrub_bytes_per_s > 0 {
            background.spawn("kvlane-scrub", move |store, stop| scrub(store, stop, scrub_bytes_per_s))?;
        }
        Ok(background)
    }
}

impl Background {
    fn spawn(
        &mut self,
        name: &str,
        run: impl FnOnce(&Arc<Store>, &AtomicBool) + Send + 'static,
    ) -> io::Result<()> {
        let (store, stop) = (Arc::clone(&self.store), Arc::clone(&self.stop));
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || run(&store, &stop))?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        {
            // Set under the lock that the threads hold when they decide to wait, so that no wake-up is lost.
            let _index = self.store.index.lock();
            self.stop.store(true, Ordering::Relaxed);
            self.store.committed.notify_all();
            self.store.scrub_stop.notify_all();
            self.store.spill_changed.notify_all();
        }
        {
            let _queues = self.store.fetches.queues.lock();
            self.store.fetches.queue_waits.notify_all();
        }
        self.store.auto.iter().for_each(AutoPolicy::wake);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                // Log: a bug: one of checksums, scrub or SSD writes stopped before the daemon did. Do: report it,
                // with the daemon's log.
                tracing::error!("a background thread of the store panicked");
            }
        }
    }
}

fn seal(store: &Arc<Store>, stop: &AtomicBool) {
    loop {
        {
            let mut index = store.index.lock();
            while !index.has_unsealed() && !stop.load(Ordering::Relaxed) {
                store.committed.wait(&mut index);
            }
            if stop.load(Ordering::Relaxed) {
                return;
            }
        }
        store.seal_pending();
    }
}

/// Reads at most `bytes_per_s` on average: after a block that is larger than an interval's share it sleeps longer.
fn scrub(store: &Arc<Store>, stop: &AtomicBool, bytes_per_s: u64) {
    let mut wake = Instant::now();
    loop {
        {
            let mut index = store.index.lock();
            while !stop.load(Ordering::Relaxed) && !store.scrub_stop.wait_until(&mut index, wake).timed_out()
            {
            }
            if stop.load(Ordering::Relaxed) {
                return;
            }
        }
        let share = (bytes_per_s as f64 * SCRUB_INTERVAL.as_secs_f64()) as u64;
        let mut bytes = 0;
        while bytes <= share && !stop.load(Ordering::Relaxed) {
            match store.scrub_next() {
                (0, _) => break,
                (read, _) => bytes += read,
            }
        }
        let pause = Duration::from_secs_f64(bytes as f64 / bytes_per_s as f64);
        wake = Instant::now() + pause.max(SCRUB_INTERVAL);
    }
}
