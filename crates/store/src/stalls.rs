//! Takes reads out of the queue of a holder that has stalled. Its reads in flight stay, because a source may still write to
//! their memory.
//!
//! ```text
//!   a read waits in a queue --> the thread kvlane-stalls looks at all queues every 50 ms, until none waits
//!     its holder has brought nothing for too long --> another holder has the block: into that one's queue
//!                                                 '-- none has it, and a deadline has passed: a miss
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::store::Store;

/// How often the queues are looked at while a read waits in one.
const LOOK_EVERY: Duration = Duration::from_millis(50);

impl Store {
    /// Moves reads that wait for a stalled holder to other holders of their blocks. If there is none, they end as misses
    /// once the holder is late. The background calls it.
    pub fn leave_stalled_holders(self: &Arc<Self>, now: Instant) {
        let left = self.fetches.queues.lock().leave_stalled(now);
        left.ended.iter().for_each(|(holder, read)| self.end_read(*holder, read, None));
        left.moved_to.into_iter().for_each(|holder| self.submit_reads(holder));
    }

    pub(crate) fn watch_stalls(self: &Arc<Self>, stop: &AtomicBool) {
        loop {
            {
                let mut queues = self.fetches.queues.lock();
                while !queues.has_waiting() && !stop.load(Ordering::Relaxed) {
                    queues.is_watched = false;
                    self.fetches.queue_waits.wait(&mut queues);
                }
                if !stop.load(Ordering::Relaxed) {
                    self.fetches.queue_waits.wait_for(&mut queues, LOOK_EVERY);
                }
            }
            if stop.load(Ordering::Relaxed) {
                return;
            }
            self.leave_stalled_holders(Instant::now());
        }
    }
}
