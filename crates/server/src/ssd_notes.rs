//! A thread that retries to note on the SSD which namespaces were dropped. On its own, so that a device that hangs blocks
//! nothing else.

use std::{
    io,
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

/// Time between two tries.
const INTERVAL: Duration = Duration::from_secs(1);

/// The running thread. [`stop`](Self::stop) ends it.
#[derive(Debug)]
pub(crate) struct SsdNotes {
    stop: mpsc::Sender<()>,
    /// Nothing is sent over it. It disconnects when the thread ends.
    ended: mpsc::Receiver<()>,
}

impl SsdNotes {
    /// Calls `note` every second, and once more when it is stopped.
    pub(crate) fn start(note: impl Fn() + Send + 'static) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let (ends, ended) = mpsc::channel::<()>();
        std::thread::Builder::new().name("kvlane-ssd-notes".into()).spawn(move || {
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                note();
            }
            note();
            drop(ends);
        })?;
        Ok(Self { stop, ended })
    }

    /// Waits for the last try until the deadline `until`. False if the device has not answered by then; the thread is left
    /// behind.
    pub(crate) fn stop(self, until: Instant) -> bool {
        drop(self.stop);
        let left = until.saturating_duration_since(Instant::now());
        self.ended.recv_timeout(left) == Err(RecvTimeoutError::Disconnected)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn it_tries_once_more_when_it_is_stopped() {
        let tries = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&tries);
        let note = move || {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        let notes = SsdNotes::start(note).unwrap();
        assert!(notes.stop(soon()));
        assert!(tries.load(Ordering::SeqCst) >= 1);
    }

    /// The daemon's end waited without bound for a device that hung, until the operator killed it.
    #[test]
    fn a_device_that_hangs_does_not_keep_the_daemon_from_ending() {
        let (go_on, may_go) = mpsc::channel::<()>();
        let (ended, end) = mpsc::channel::<()>();
        let notes = SsdNotes::start(move || {
            let _ = may_go.recv();
            let _keep = &ended;
        })
        .unwrap();
        assert!(!notes.stop(Instant::now() + Duration::from_millis(10)));
        drop(go_on);
        assert_eq!(end.recv(), Err(mpsc::RecvError), "the thread ends when the device answers");
    }
}
