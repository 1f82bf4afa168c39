//! The thread that carries out the saves of a worker on a GPU. A save waits for the engine to compute its blocks, and loads
//! of the same session must not wait with it.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Instant,
};

use kvlane_engine_memory::Pace;
use kvlane_proto::v1::{self, reply::Body as Answer};

use super::table::Call;
use crate::{refusal::Refusal, replies::Replies, sessions::Busy, shared::Shared};

/// Most saves of a worker in the queue. The worker's own end queues as many (`JOBS_MAX` in crates/client/src/worker.rs), so
/// only a peer that is no worker of ours sends more.
pub(crate) const WAITING_MAX: usize = 16384;

/// Carries saves out in the order of their requests, and answers them.
pub(crate) struct SaveThread {
    /// None once it is being dropped, which ends the thread.
    queue: Option<mpsc::Sender<QueuedSave>>,
    /// Length of the queue.
    waiting: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

struct QueuedSave {
    id: u64,
    save: v1::Save,
    call: Call,
    since: Instant,
    _busy: Busy,
}

impl SaveThread {
    /// Starts the thread for the session of one worker. `save` copies the blocks of a request out, at a pace.
    pub(crate) fn start(
        shared: Arc<Shared>,
        replies: Arc<Replies>,
        engine_id: String,
        save: impl Fn(&v1::Save, &Pace<'_>) -> Result<Answer, Refusal> + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, queued) = mpsc::channel::<QueuedSave>();
        let waiting = Arc::new(AtomicUsize::new(0));
        let behind = Arc::clone(&waiting);
        let run = move || {
            for QueuedSave { id, save: request, call, since, _busy } in queued {
                behind.fetch_sub(1, Ordering::Relaxed);
                // Urgent while a save is queued behind it, while the daemon stops and has little time, and while any lookup
                // awaits saves of this engine. The lookup's blocks are not compared: at worst a save is fast without need,
                // for `wait_ms`.
                let is_urgent = || {
                    behind.load(Ordering::Relaxed) > 0
                        || shared.is_stopping()
                        || shared.awaited_saves.has_waits_for(&engine_id)
                };
                let pace = Pace { link_share: shared.save_link_share, is_urgent: &is_urgent };
                let answer = save(&request, &pace);
                let was_refused = answer.is_err();
                if replies.send(id, answer.unwrap_or_else(Answer::from), None).is_err() {
                    // The connection is over, so the rest of the queue is not saved.
                    return;
                }
                shared.metrics.answered(call, since.elapsed(), was_refused);
            }
        };
        let thread = std::thread::Builder::new().name("kvlane-saves".into()).spawn(run)?;
        Ok(Self { queue: Some(queue), waiting, thread: Some(thread) })
    }

    /// Checks that the queue has room for one more save.
    ///
    /// # Errors
    /// [`WAITING_MAX`] saves wait already.
    pub(crate) fn room(&self) -> Result<(), Refusal> {
        if self.waiting.load(Ordering::Relaxed) >= WAITING_MAX {
            return Err(Refusal::limit(format!("{WAITING_MAX} saves of this worker wait already")));
        }
        Ok(())
    }

    /// Queues a save, for which there is room. Its answer comes when it is done.
    pub(crate) fn push(&self, shared: &Arc<Shared>, id: u64, save: v1::Save, call: Call, since: Instant) {
        let queued = QueuedSave { id, save, call, since, _busy: Busy::new(&shared.sessions) };
        if let Some(queue) = &self.queue {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            // Fails only if the thread has seen the connection's end.
            let _ = queue.send(queued);
        }
    }
}

impl Drop for SaveThread {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: a bug: saves of one worker ended without effect. Do: report it, with the daemon's log.
            tracing::error!("thread kvlane-saves panicked");
        }
    }
}
