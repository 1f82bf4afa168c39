//! Has nodes change their roles as the work does: looks at them four times a second, and says what it did and why.

use std::{
    io,
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::Instant,
};

use crate::{shared::Shared, webhook::Webhook};

/// The looking thread.
#[derive(Debug)]
pub struct Balancing {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Balancing {
    /// Looks until it is stopped, if the router is to balance. What it does is told to the webhook, if there is one.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub fn start(shared: &Arc<Shared>, webhook: Option<Webhook>) -> io::Result<Option<Self>> {
        let Some(every) = shared.with_balance(|balancers, _| balancers.settings().every) else {
            return Ok(None);
        };
        let (stop, stopped) = mpsc::channel();
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("kvlane-balance".into()).spawn(move || {
            while stopped.recv_timeout(every) == Err(mpsc::RecvTimeoutError::Timeout) {
                for record in shared.look(Instant::now()) {
                    webhook.iter().for_each(|webhook| webhook.tell(record.clone()));
                }
            }
            webhook.into_iter().for_each(Webhook::stop);
        })?;
        Ok(Some(Self { stop, thread }))
    }

    /// Looks no more.
    pub fn stop(self) {
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}
