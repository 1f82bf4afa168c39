//! One simulated engine for a server that runs it in real time, with the same steps as in a replay.

use std::{sync::Arc, time::Duration};

use crate::{
    engine::{Class, Engine, Job, StepOutput},
    lab::NoChooser,
    pool::Pool,
    trace::{Request, Trace},
};

/// One engine. The caller chooses the moment from which times count.
pub struct LiveEngine {
    engine: Engine,
    trace: Trace,
}

/// A token that a step has generated, with the request's number from [`LiveEngine::push`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LiveOutput {
    /// A request's first token.
    First(usize),
    /// A request's last token.
    Last(usize),
}

impl LiveEngine {
    /// An idle engine. `pool` is the one that it shares with others.
    pub fn new(class: Class, block_tokens: u64, pool: Option<Pool>) -> Self {
        let trace = Trace::new(block_tokens, Vec::new());
        Self { engine: Engine::new(Arc::new(class), block_tokens, pool), trace }
    }

    /// Adds a request, and returns its number. Its blocks are hashes of the prompt up to each block's end.
    pub fn push(&mut self, request: Request) -> usize {
        let (number, output) = (self.trace.requests.len(), request.output_tokens);
        self.trace.requests.push(request);
        self.engine.push(Job { request: number, output, is_handed_over: false, attempt: 0 });
        number
    }

    /// Begins a step, and returns its end.
    ///
    /// # Errors
    /// A step is under way, or there is no work now. Holds the time at which the next prompt will be ready, if one waits
    /// for its overhead or its load.
    pub fn begin_step(&mut self, now: Duration) -> Result<Duration, Option<Duration>> {
        self.engine.begin_step(&self.trace, now)
    }

    /// Ends the step, and returns the first and last tokens that it generated.
    pub fn end_step(&mut self) -> Vec<LiveOutput> {
        let output = |token| match token {
            StepOutput::First { job, .. } => LiveOutput::First(job.request),
            StepOutput::Last(job) => LiveOutput::Last(job.request),
        };
        self.engine.end_step(&self.trace, None::<(usize, &mut NoChooser)>).into_iter().map(output).collect()
    }

    /// Running requests, waiting requests, and percent of the KV cache that is in use.
    pub fn load(&self) -> (u64, u64, u64) {
        let waiting = self.engine.waiting();
        (self.engine.requests() - waiting, waiting, self.engine.cache_percent())
    }
}
