//! A simulated engine in real time, for a server that pretends to be it: the same steps as in a replay.

use std::{sync::Arc, time::Duration};

use crate::{
    engine::{Came, Class, Engine, Job},
    lab::NoChooser,
    pool::Pool,
    trace::{Request, Trace},
};

/// One engine. Times count from whichever moment the caller chooses.
pub struct LiveEngine {
    engine: Engine,
    trace: Trace,
}

/// What a step has brought to a request, by the number that [`LiveEngine::push`] gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Brought {
    /// Its first token.
    First(usize),
    /// Its last one.
    Last(usize),
}

impl LiveEngine {
    /// An idle engine, with the pool that it shares with others, if any.
    pub fn new(class: Class, block_tokens: u64, pool: Option<Pool>) -> Self {
        let trace = Trace::new(block_tokens, Vec::new());
        Self { engine: Engine::new(Arc::new(class), block_tokens, pool), trace }
    }

    /// A request has come. Its blocks are hashes of the prompt up to each block's end.
    pub fn push(&mut self, request: Request) -> usize {
        let (number, output) = (self.trace.requests.len(), request.output_tokens);
        self.trace.requests.push(request);
        self.engine.push(Job { request: number, output, is_handed_over: false, attempt: 0 });
        number
    }

    /// Begins a step, if none is under way and something is to be done: when it will be over.
    ///
    /// # Errors
    /// Nothing can be done now. When to ask again, if something comes by itself.
    pub fn begin_step(&mut self, now: Duration) -> Result<Duration, Option<Duration>> {
        self.engine.begin_step(&self.trace, now)
    }

    /// The step is over.
    pub fn end_step(&mut self) -> Vec<Brought> {
        let brought = |came| match came {
            Came::First { job, .. } => Brought::First(job.request),
            Came::Last(job) => Brought::Last(job.request),
        };
        self.engine.end_step(&self.trace, None::<(usize, &mut NoChooser)>).into_iter().map(brought).collect()
    }

    /// Requests that run, that wait, and percent of the KV cache that is used.
    pub fn load(&self) -> (u64, u64, u64) {
        let waiting = self.engine.waiting();
        (self.engine.requests() - waiting, waiting, self.engine.cache_percent())
    }
}
