//! A stream of the fake: a thread that does enqueued work in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use super::machine::{Machine, Work};

#[derive(Debug)]
pub(super) struct Stream {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Work>,
    running: bool,
    closing: bool,
    /// An error of work that no caller has seen yet.
    failed: Option<u32>,
}

impl State {
    fn is_idle(&self) -> bool {
        self.queue.is_empty() && !self.running
    }
}

impl Stream {
    pub(super) fn start(machine: Arc<Machine>, device: u32) -> std::io::Result<Stream> {
        let shared = Arc::new(Shared::default());
        let ours = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name(format!("fake-gpu-{device}"))
            .spawn(move || run(&ours, &machine, device))?;
        Ok(Stream { shared, thread })
    }

    pub(super) fn push(&self, work: Work) {
        self.shared.state.lock().queue.push_back(work);
        self.shared.changed.notify_all();
    }

    pub(super) fn is_idle(&self) -> bool {
        self.shared.state.lock().is_idle()
    }

    pub(super) fn wait_idle(&self) {
        let mut state = self.shared.state.lock();
        self.shared.changed.wait_while(&mut state, |state| !state.is_idle());
    }

    /// Returns the error of failed work once.
    pub(super) fn take_failure(&self) -> Option<u32> {
        self.shared.state.lock().failed.take()
    }

    /// Ends the thread after the enqueued work.
    pub(super) fn close(&self) {
        self.shared.state.lock().closing = true;
        self.shared.changed.notify_all();
    }

    pub(super) fn join(self) {
        if self.thread.join().is_err() {
            // Log: a bug in the simulation of GPUs.
            tracing::error!("a stream of a fake device panicked");
        }
    }
}

fn run(shared: &Shared, machine: &Machine, device: u32) {
    loop {
        let mut state = shared.state.lock();
        shared.changed.wait_while(&mut state, |state| state.queue.is_empty() && !state.closing);
        let Some(work) = state.queue.pop_front() else { return };
        state.running = true;
        drop(state);
        let outcome = machine.execute(device, &work);
        // Drops an event that the work holds before the stream counts as idle.
        drop(work);
        let mut state = shared.state.lock();
        state.running = false;
        if let Err(code) = outcome {
            state.failed.get_or_insert(code);
        }
        drop(state);
        shared.changed.notify_all();
    }
}
