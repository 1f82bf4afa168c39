//! One simulated engine. Requests wait, are prefilled in parts, and decode together, step by step.
//!
//! ```text
//!   push --> waiting --- room in the KV cache ---> running: prompt in parts, then a token a step --> finished
//!              ^                                      |
//!              '------ preempted: no room left -------'
//! ```

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvlane_policy::{CacheModel, PolicyKind};

use crate::costs::{Costs, milliseconds};
use crate::lab::Chooser;
use crate::pool::Pool;
use crate::trace::Trace;

/// Engines of one kind: hardware, model and settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Class {
    /// The router's class of such nodes too, unless an experiment changes it.
    pub name: String,
    /// Times of its steps.
    pub costs: Costs,
    /// Most tokens of all running requests together.
    pub kv_tokens: u64,
    /// Tokens whose blocks stay cached, in the engine's own cache and in its daemon's pool. An engine that shares a pool with
    /// others caches blocks of its `kv_tokens` instead; the pool keeps its own.
    pub cached_tokens: u64,
    /// Policy by which its cache evicts blocks.
    pub eviction: PolicyKind,
    /// Most requests that run at once.
    pub requests_max: usize,
    /// Most tokens of a step.
    pub step_tokens: u64,
}

impl Default for Class {
    /// An H100 with Llama-3.1-8B's shape: 45 GB for its requests, and a pool of 256 GB.
    fn default() -> Self {
        Self {
            name: "h100-llama-8b".into(),
            costs: Costs::H100_LLAMA_8B,
            kv_tokens: 340_000,
            cached_tokens: 2_000_000,
            eviction: PolicyKind::Lru,
            requests_max: 256,
            step_tokens: 8192,
        }
    }
}

/// One attempt of a request at one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Job {
    /// Number in the trace.
    pub(crate) request: usize,
    /// Tokens to generate.
    pub(crate) output: u64,
    /// Another engine has computed the prompt, except its last token.
    pub(crate) is_handed_over: bool,
    /// Number of the attempt, so that results of an earlier one are ignored.
    pub(crate) attempt: u32,
}

/// A token that a step has generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepOutput {
    /// A job's first token. `found`: tokens of its prompt that were cached.
    First { job: Job, found: u64 },
    /// A job's last token.
    Last(Job),
}

#[derive(Debug)]
struct Running {
    job: Job,
    /// Tokens to prefill: the prompt, and after a preemption also those generated before.
    prompt: u64,
    /// The part of `prompt` that is computed or found.
    done: u64,
    found: u64,
    generated: u64,
    /// The part of `generated` from before a preemption, which `prompt` includes.
    before: u64,
    /// When its prompt can be prefilled: after its overhead, and once the found tokens are loaded.
    ready_at: Duration,
    /// Its tokens in the present step.
    part: u64,
}

impl Running {
    fn decodes(&self) -> bool {
        self.done == self.prompt
    }

    /// Tokens that it has in the KV cache, or will have before its next token.
    fn tokens(&self) -> u64 {
        self.prompt + self.generated - self.before
    }
}

/// The state of one engine. It knows no time; callers pass it.
pub(crate) struct Engine {
    class: Arc<Class>,
    cache: CacheModel,
    pool: Option<Pool>,
    /// Jobs, each with the tokens that it generated before a preemption.
    waiting: VecDeque<(Job, u64)>,
    running: Vec<Running>,
    is_in_step: bool,
    /// Blocks of prompts that it was given and has not prefilled yet, each with the number of these prompts.
    expected: HashMap<u64, u32>,
}

impl Engine {
    pub(crate) fn new(class: Arc<Class>, block_tokens: u64, pool: Option<Pool>) -> Self {
        let tokens = if pool.is_some() { class.kv_tokens } else { class.cached_tokens };
        let blocks = (tokens / block_tokens).clamp(1, u64::from(u32::MAX - 1)) as usize;
        Self {
            cache: CacheModel::new(class.eviction, blocks),
            pool,
            class,
            waiting: VecDeque::new(),
            running: Vec::new(),
            is_in_step: false,
            expected: HashMap::new(),
        }
    }

    /// Adds a job to the queue.
    pub(crate) fn push(&mut self, job: Job) {
        self.waiting.push_back((job, 0));
    }

    /// Notes that a prompt of these blocks will come.
    pub(crate) fn expect(&mut self, blocks: &[u64]) {
        blocks.iter().for_each(|block| *self.expected.entry(*block).or_default() += 1);
    }

    /// Number of leading blocks that it has, or will have.
    pub(crate) fn leading_blocks(&self, blocks: &[u64]) -> u64 {
        let has = |block: &&u64| self.cache.contains(**block) || self.expected.contains_key(*block);
        blocks.iter().take_while(has).count() as u64
    }

    /// Requests that run or wait, as in its metrics.
    pub(crate) fn requests(&self) -> u64 {
        (self.waiting.len() + self.running.len()) as u64
    }

    /// As in its metrics.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.len() as u64
    }

    /// Percent of its KV cache that running requests use.
    pub(crate) fn cache_percent(&self) -> u64 {
        (self.used() * 100 / self.class.kv_tokens.max(1)).min(100)
    }

    fn used(&self) -> u64 {
        self.running.iter().map(Running::tokens).sum()
    }

    /// Begins a step, and returns its end.
    ///
    /// # Errors
    /// A step is under way, or there is no work now. Holds the time at which the next prompt will be ready, if one waits
    /// for its overhead or its load.
    pub(crate) fn begin_step(&mut self, trace: &Trace, now: Duration) -> Result<Duration, Option<Duration>> {
        if self.is_in_step {
            return Err(None);
        }
        self.make_room();
        let mut left = self.class.step_tokens;
        let decoding = self.running.iter_mut().filter(|running| running.decodes());
        let mut cached = 0;
        for running in decoding {
            running.part = u64::from(left > 0);
            left = left.saturating_sub(1);
            cached += running.part * running.tokens();
        }
        for running in self.running.iter_mut().filter(|running| !running.decodes()) {
            running.part = if running.ready_at <= now { left.min(running.prompt - running.done) } else { 0 };
            left -= running.part;
        }
        while left > 0 && self.admit(trace, now) {
            if let Some(running) = self.running.last_mut().filter(|running| running.ready_at <= now) {
                running.part = left.min(running.prompt - running.done);
                left -= running.part;
            }
        }
        let decodes = self.running.iter().filter(|running| running.decodes() && running.part > 0).count();
        let parts = self.running.iter().filter(|running| !running.decodes() && running.part > 0);
        let parts = parts.map(|running| (running.part, running.done));
        if decodes == 0 && parts.clone().next().is_none() {
            return Err(self.running.iter().map(|running| running.ready_at).min());
        }
        let takes = self.class.costs.step(decodes as u64, cached, parts).max(Duration::from_nanos(1));
        self.is_in_step = true;
        Ok(now + takes)
    }

    /// Preempts the latest requests, until each running one has room for a token. They return to the front of the queue.
    fn make_room(&mut self) {
        while self.running.len() > 1 && self.used() + self.running.len() as u64 > self.class.kv_tokens {
            let Some(last) = self.running.pop() else { return };
            self.waiting.push_front((last.job, last.generated));
        }
    }

    /// Starts the next waiting request, if there is room for it. Returns whether it did.
    fn admit(&mut self, trace: &Trace, now: Duration) -> bool {
        let Some(&(job, generated)) = self.waiting.front() else { return false };
        let request = &trace.requests[job.request];
        let prompt = request.prompt_tokens + generated;
        let has_room = self.used() + prompt + (self.running.len() as u64) < self.class.kv_tokens;
        // A request runs alone even if it does not fit, because otherwise it would wait for ever.
        if !self.running.is_empty() && (!has_room || self.running.len() >= self.class.requests_max) {
            return false;
        }
        self.waiting.pop_front();
        let own = request.blocks.iter().take_while(|block| self.cache.contains(**block)).count();
        let pooled = self.pool.as_ref().map_or(0, |pool| pool.leading_blocks(&request.blocks[own..]));
        let tokens = |blocks: usize| (blocks as u64 * trace.block_tokens).min(request.prompt_tokens - 1);
        let in_cache = tokens(own + pooled);
        let found = if job.is_handed_over && generated == 0 { prompt - 1 } else { in_cache };
        let cached = if job.is_handed_over { 0 } else { found };
        let loads = if job.is_handed_over { 0 } else { in_cache - tokens(own) };
        let loading = self.pool.as_ref().map_or(0.0, |pool| pool.load_ms(loads));
        self.running.push(Running {
            job,
            prompt,
            done: found,
            found,
            generated,
            before: generated,
            ready_at: now + self.class.costs.before(cached) + milliseconds(loading),
            part: 0,
        });
        true
    }

    /// Ends the step, and returns the first and last tokens that it generated. `observer`: the engine's number, and the
    /// chooser that hears of its cache's changes.
    pub(crate) fn end_step(
        &mut self,
        trace: &Trace,
        mut observer: Option<(usize, &mut impl Chooser)>,
    ) -> Vec<StepOutput> {
        self.is_in_step = false;
        let mut output = Vec::new();
        for running in &mut self.running {
            if running.part == 0 {
                continue;
            }
            if !running.decodes() {
                running.done += running.part;
                if !running.decodes() {
                    continue;
                }
                let blocks = &trace.requests[running.job.request].blocks;
                keep(&mut self.cache, blocks, &mut observer);
                self.pool.iter().for_each(|pool| pool.keep(blocks));
                if running.generated == 0 {
                    // A handed-over prompt was not expected here.
                    if !running.job.is_handed_over {
                        forget_expected(&mut self.expected, blocks);
                    }
                    output.push(StepOutput::First { job: running.job, found: running.found });
                }
            }
            running.generated += 1;
            if running.generated >= running.job.output {
                output.push(StepOutput::Last(running.job));
            }
        }
        self.running.retain(|running| running.generated < running.job.output || !running.decodes());
        self.running.iter_mut().for_each(|running| running.part = 0);
        output
    }

    /// Kills the process: it loses its cache and its jobs, which are returned. The shared pool stays.
    pub(crate) fn die(&mut self, block_tokens: u64) -> Vec<Job> {
        let lost = self.running.drain(..).map(|running| running.job);
        let lost = lost.chain(self.waiting.drain(..).map(|(job, _)| job)).collect();
        *self = Self::new(Arc::clone(&self.class), block_tokens, self.pool.take());
        lost
    }
}

/// Takes back one [`Engine::expect`], because its prompt has been prefilled.
fn forget_expected(expected: &mut HashMap<u64, u32>, blocks: &[u64]) {
    for block in blocks {
        if let Entry::Occupied(mut count) = expected.entry(*block) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// Stores a prompt's blocks in the cache, and tells the observer which were stored and evicted.
fn keep(cache: &mut CacheModel, blocks: &[u64], observer: &mut Option<(usize, &mut impl Chooser)>) {
    let Some((node, chooser)) = observer else {
        cache.request(blocks, |_| ());
        return;
    };
    let mut gone = Vec::new();
    let hits = cache.request(blocks, |evicted| gone.push(evicted.key)).prefix_hits;
    let (before, behind) = blocks.split_at(hits);
    let new = behind.iter().take_while(|block| cache.contains(**block)).count();
    if !gone.is_empty() {
        chooser.evicted(*node, &gone);
    }
    if new > 0 {
        chooser.stored(*node, before.last().copied(), &behind[..new]);
    }
}
