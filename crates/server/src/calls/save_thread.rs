//! Saves of a worker on a GPU, in a thread of their own: a save waits for what the engine still computes, and loads must
//! not wait with it.

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

/// Saves of a worker that may wait. As many as its own end queues (`JOBS_MAX` in crates/client/src/worker.rs): who asks for
/// more is no worker of ours.
pub(crate) const WAITING_MAX: usize = 16384;

/// Carries saves out in the order in which they were asked for, and answers them.
pub(crate) struct SaveThread {
    /// None while it ends.
    queue: Option<mpsc::Sender<Asked>>,
    /// How many are in the queue.
    waiting: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

struct Asked {
    id: u64,
    save: v1::Save,
    call: Call,
    since: Instant,
    _busy: Busy,
}

impl SaveThread {
    /// For the session of one worker of an engine; `save` copies its blocks out, at a pace.
    pub(crate) fn start(
        shared: Arc<Shared>,
        replies: Arc<Replies>,
        engine_id: String,
        save: impl Fn(&v1::Save, &Pace<'_>) -> Result<Answer, Refusal> + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, asked) = mpsc::channel::<Asked>();
        let waiting = Arc::new(AtomicUsize::new(0));
        let behind = Arc::clone(&waiting);
        let run = move || {
            for Asked { id, save: asked, call, since, _busy } in asked {
                behind.fetch_sub(1, Ordering::Relaxed);
                // A stopping daemon takes no new ones, and has little time for this one. Which blocks of the engine another one
                // waits for is not asked: at worst a save is fast without need, for `wait_ms`.
                let is_urgent = || {
                    behind.load(Ordering::Relaxed) > 0
                        || shared.is_stopping()
                        || shared.hand_offs.is_waited_for(&engine_id)
                };
                let pace = Pace { link_share: shared.save_link_share, is_urgent: &is_urgent };
                let answer = save(&asked, &pace);
                let was_refused = answer.is_err();
                if replies.send(id, answer.unwrap_or_else(Answer::from), None).is_err() {
                    // The connection is over: nobody wants the rest.
                    return;
                }
                shared.metrics.answered(call, since.elapsed(), was_refused);
            }
        };
        let thread = std::thread::Builder::new().name("kvlane-saves".into()).spawn(run)?;
        Ok(Self { queue: Some(queue), waiting, thread: Some(thread) })
    }

    /// Whether one more may wait.
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
        let asked = Asked { id, save, call, since, _busy: Busy::new(&shared.sessions) };
        if let Some(queue) = &self.queue {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            // Fails only where the thread has seen the connection's end.
            let _ = queue.send(asked);
        }
    }
}

impl Drop for SaveThread {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a thread of saves had panicked");
        }
    }
}
