//! The thread that balances roles. It runs the balancers, by default four times a second, and sends their records to the webhook.

use std::{io, sync::Arc, time::Instant};

use kvlane_door::RuntimeThread;
use tokio::time::sleep;

use crate::{shared::Shared, webhook::Webhook};

/// The balancing thread.
#[derive(Debug)]
pub struct Balancing(RuntimeThread);

impl Balancing {
    /// Starts the thread. None if the router does not balance. The webhook, if there is one, gets the balancers' records.
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
                    webhook.iter().for_each(|webhook| webhook.send(record.clone()));
                }
            }
            webhook.into_iter().for_each(Webhook::stop);
        })?;
        Ok(Some(Self(thread)))
    }

    /// Stops the thread, and with it the webhook.
    pub fn stop(self) {
        self.0.stop();
    }
}
