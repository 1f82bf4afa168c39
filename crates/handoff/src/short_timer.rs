//! Wakes a task after less than a millisecond. tokio's own timers fire at whole milliseconds.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

/// A thread that sleeps for the task.
#[derive(Debug)]
pub(crate) struct ShortTimer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// The task waits, or the timer is dropped.
    changed: Condvar,
    fired: Notify,
}

#[derive(Debug, Default)]
struct State {
    is_wanted: bool,
    is_dropped: bool,
}

impl ShortTimer {
    /// A timer that fires after this time.
    pub(crate) fn new(time: Duration) -> io::Result<ShortTimer> {
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kvlane-handoff-tick".into());
        let thread = thread.spawn(move || of_thread.run(time))?;
        Ok(ShortTimer { shared, thread: Some(thread) })
    }

    /// Waits for the time. If this is dropped before, the next wait may be shorter.
    pub(crate) async fn wait(&self) {
        self.shared.state.lock().is_wanted = true;
        self.shared.changed.notify_one();
        self.shared.fired.notified().await;
    }
}

impl Drop for ShortTimer {
    fn drop(&mut self) {
        self.shared.state.lock().is_dropped = true;
        self.shared.changed.notify_one();
        // It does not panic. If it did, there is nothing left to end.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn run(&self, time: Duration) {
        loop {
            let mut state = self.state.lock();
            self.changed.wait_while(&mut state, |state| !state.is_wanted && !state.is_dropped);
            if state.is_dropped {
                return;
            }
            state.is_wanted = false;
            drop(state);
            std::thread::sleep(time);
            self.fired.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn it_fires_again_and_again_also_after_a_wait_that_was_dropped() -> io::Result<()> {
        let time = Duration::from_micros(200);
        let timer = ShortTimer::new(time)?;
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        runtime.block_on(async {
            for _ in 0..20 {
                tokio::select! {
                    biased;
                    () = std::future::ready(()) => {}
                    () = timer.wait() => {}
                }
                // The first may be of the wait that was dropped.
                timer.wait().await;
                let begun = Instant::now();
                timer.wait().await;
                timer.wait().await;
                assert!(begun.elapsed() >= time);
            }
        });
        Ok(())
    }
}
