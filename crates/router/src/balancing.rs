//! Has nodes change their roles as the work does: looks at them four times a second, and says what it did and why.

use std::{io, sync::Arc, time::Instant};

use kvlane_door::RuntimeThread;
use tokio::time::sleep;

use crate::{shared::Shared, webhook::Webhook};

/// The looking thread.
#[derive(Debug)]
pub struct Balancing(RuntimeThread);

impl Balancing {
    /// Looks until it is stopped, if the router is to balance. What it does is told to the webhook, if there is one.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub fn start(shared: &Arc<Shared>, webhook: Option<Webhook>) -> io::Result<Option<Self>> {
        let Some(every) = shared.with_balance(|balancers, _| balancers.settings().every) else {
            return Ok(None);
        };
        let shared = Arc::clone(shared);
        let thread = RuntimeThread::start_graceful("kvlane-balance", move |mut stopped| async move {
            loop {
                tokio::select! {
                    () = stopped.wait() => break,
                    () = sleep(every) => {}
                }
                for record in shared.tick_balance(Instant::now()) {
                    webhook.iter().for_each(|webhook| webhook.tell(record.clone()));
                }
            }
            webhook.into_iter().for_each(Webhook::stop);
        })?;
        Ok(Some(Self(thread)))
    }

    /// Looks no more.
    pub fn stop(self) {
        self.0.stop();
    }
}
