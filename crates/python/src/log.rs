//! The crates' log messages, for Python's logging: kept in a bounded queue until a Python thread takes them.
//!
//! The crates' own threads never wait for the interpreter. A Python thread sleeps in a read of the descriptor, not in
//! Rust: a thread that Python ends at its exit must not have Rust's frames on its stack.

use std::{
    collections::VecDeque,
    fmt::{self, Write as _},
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use parking_lot::Mutex;
use pyo3::{exceptions::PyOSError, prelude::*};
use rustix::event::{EventfdFlags, eventfd};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

/// Most waiting messages. Newer ones are counted and dropped.
const WAITING_MAX: usize = 1000;

static WAITING: Mutex<Waiting> = Mutex::new(Waiting { messages: VecDeque::new(), missed: 0, ready: None });

/// Messages that Python has not taken yet.
struct Waiting {
    /// Level of Python's logging, and the message.
    messages: VecDeque<(u32, String)>,
    missed: u64,
    /// A process id and its descriptor, which is readable while messages wait. A forked child makes its own.
    ready: Option<(u32, OwnedFd)>,
}

/// Starts to keep messages, and returns the descriptor that becomes readable with each. A second call in the same process
/// returns the same one.
#[pyfunction]
pub(crate) fn log_descriptor() -> PyResult<i32> {
    let mut waiting = WAITING.lock();
    let process = std::process::id();
    let ready = match waiting.ready.take() {
        Some((made_in, ready)) if made_in == process => ready,
        _ => eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| PyOSError::new_err(error.to_string()))?,
    };
    let descriptor = ready.as_raw_fd();
    waiting.ready = Some((process, ready));
    drop(waiting);
    // Refused the second time, when it is set already.
    let _ = tracing::subscriber::set_global_default(Keeper);
    Ok(descriptor)
}

/// The messages since the last call, each with its level, and the number of dropped ones.
#[pyfunction]
pub(crate) fn take_log() -> (Vec<(u32, String)>, u64) {
    let mut waiting = WAITING.lock();
    (std::mem::take(&mut waiting.messages).into(), std::mem::take(&mut waiting.missed))
}

/// Puts messages of our crates into the queue.
struct Keeper;

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO && metadata.target().starts_with("kvlane")
    }

    fn event(&self, event: &Event<'_>) {
        let mut sentence = Sentence::default();
        event.record(&mut sentence);
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            _ => 20,
        };
        let mut waiting = WAITING.lock();
        if waiting.messages.len() >= WAITING_MAX {
            waiting.missed += 1;
            return;
        }
        waiting.messages.push_back((level, sentence.finish()));
        if let Some((_, ready)) = &waiting.ready {
            // It can only be full, and then the reader wakes anyway.
            let _ = rustix::io::write(ready.as_fd(), &1u64.to_ne_bytes());
        }
    }

    // The crates have no spans.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// "kvlane: the message (error: ..., gpu: 1)".
#[derive(Default)]
struct Sentence {
    message: String,
    fields: String,
}

impl Sentence {
    fn finish(self) -> String {
        let prefix = if self.message.starts_with("kvlane: ") { "" } else { "kvlane: " };
        let fields = if self.fields.is_empty() { String::new() } else { format!(" ({})", self.fields) };
        format!("{prefix}{}{fields}", self.message)
    }
}

impl Visit for Sentence {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            let comma = if self.fields.is_empty() { "" } else { ", " };
            write!(self.fields, "{comma}{}: {value:?}", field.name())
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}
