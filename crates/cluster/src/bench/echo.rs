//! [`Echo`]: answers each message at once, for comparison with a replica.
//!
//! ```text
//!   ping   number, 8 bytes | bytes of the answer, 4 bytes | as long as it is
//!   answer number, 8 bytes | as long as the ping says
//! ```

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvlane_fabric::{Engine, MESSAGE_BYTES_MAX, SendOptions};
use parking_lot::Mutex;

use super::loopback;
use crate::cluster::ClusterError;

const REACHED_WITHIN: Duration = Duration::from_secs(10);

/// An engine on loopback that answers.
pub struct Echo {
    engine: Arc<Engine>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A ping of `len` bytes.
pub(crate) fn ping(number: u64, len: usize, answer_len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len.max(12)];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..12].copy_from_slice(&(answer_len as u32).to_le_bytes());
    bytes
}

fn answer(ping: &[u8]) -> Option<Vec<u8>> {
    let (number, rest) = ping.split_first_chunk::<8>()?;
    let len = u32::from_le_bytes(*rest.first_chunk()?) as usize;
    let mut bytes = number.to_vec();
    bytes.resize(len.clamp(8, MESSAGE_BYTES_MAX), 0);
    Some(bytes)
}

/// The number of the ping that this answers.
pub(crate) fn number(answer: &[u8]) -> Option<u64> {
    answer.first_chunk().map(|number| u64::from_le_bytes(*number))
}

impl Echo {
    /// Listens at a free port, and answers nothing yet.
    ///
    /// # Errors
    /// [`ClusterError::Fabric`]
    pub fn open() -> Result<Self, ClusterError> {
        Ok(Self { engine: Arc::new(loopback::engine()?), thread: Mutex::default() })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// [`ClusterError::Fabric`]
    pub fn address(&self) -> Result<SocketAddr, ClusterError> {
        Ok(loopback::address(&self.engine)?)
    }

    /// Answers the engine at this address from now on.
    ///
    /// # Errors
    /// [`ClusterError`]: it is not reached, or the system gives no thread.
    pub fn answer(&self, asker: SocketAddr) -> Result<(), ClusterError> {
        let peer = self.engine.connect_to(asker, REACHED_WITHIN)?;
        let engine = Arc::clone(&self.engine);
        let run = move || {
            while let Some(message) = engine.receive(None) {
                if let Some(bytes) = answer(&message.bytes) {
                    // If it does not arrive, the ping counts as lost.
                    drop(engine.send(peer, bytes, SendOptions::default()));
                }
            }
        };
        let thread = std::thread::Builder::new().name("kvlane-echo".into()).spawn(run)?;
        *self.thread.lock() = Some(thread);
        Ok(())
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.engine.close();
        if let Some(thread) = self.thread.lock().take() {
            // If it panicked, its message is on stderr.
            drop(thread.join());
        }
    }
}
