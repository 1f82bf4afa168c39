//! One engine: requests wait, are prefilled in parts, and decode together, step after step.
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

/// Engines that are alike.
#[derive(Debug, Clone, PartialEq)]
pub struct Class {
    /// For people.
    pub name: String,
    /// What their steps take.
    pub costs: Costs,
    /// Tokens that the requests which run may have together.
    pub kv_tokens: u64,
    /// Tokens whose blocks are found again, in the engine's own cache and in its daemon's pool. An engine that shares a pool with
    /// others finds the blocks of its `kv_tokens`, and those of the pool.
    pub cached_tokens: u64,
    /// Which of these blocks make room for others.
    pub eviction: PolicyKind,
    /// Requests that run at once, at the most.
    pub requests_max: usize,
    /// Tokens of a step, at the most.
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

/// What an engine does for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Job {
    /// Its number in the trace.
    pub(crate) request: usize,
    /// Tokens that it generates, in all.
    pub(crate) output: u64,
    /// Another engine has computed its prompt, but for the last token.
    pub(crate) is_handed_over: bool,
    /// How often the request was begun anew, so that a word of an earlier time is told from it.
    pub(crate) attempt: u32,
}

/// What a step has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Came {
    /// The first token, with so many tokens of the prompt found in a cache.
    First { job: Job, found: u64 },
    /// The last one.
    Last(Job),
}

#[derive(Debug)]
struct Running {
    job: Job,
    /// The prompt's tokens, and after a preemption those that were generated before.
    prompt: u64,
    /// Of these, computed or found.
    done: u64,
    found: u64,
    generated: u64,
    /// Of these, before it was preempted: part of `prompt`.
    before: u64,
    /// What is found has come from the cache by then.
    ready_at: Duration,
    /// New tokens of the step that is under way.
    part: u64,
}

impl Running {
    fn decodes(&self) -> bool {
        self.done == self.prompt
    }

    /// That it has in the KV cache, or will have before its next token.
    fn tokens(&self) -> u64 {
        self.prompt + self.generated - self.before
    }
}

/// One of the fleet.
pub(crate) struct Engine {
    class: Arc<Class>,
    cache: CacheModel,
    pool: Option<Pool>,
    waiting: VecDeque<(Job, u64)>,
    running: Vec<Running>,
    is_in_step: bool,
    /// Blocks of prompts that it was given and has not prefilled yet: of how many prompts.
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

    /// A request has come.
    pub(crate) fn push(&mut self, job: Job) {
        self.waiting.push_back((job, 0));
    }

    /// A prompt of these blocks will come.
    pub(crate) fn expect(&mut self, blocks: &[u64]) {
        blocks.iter().for_each(|block| *self.expected.entry(*block).or_default() += 1);
    }

    /// How many of these blocks it has, or will have, from the first one on.
    pub(crate) fn leading_blocks(&self, blocks: &[u64]) -> u64 {
        let has = |block: &&u64| self.cache.contains(**block) || self.expected.contains_key(*block);
        blocks.iter().take_while(has).count() as u64
    }

    /// Requests that run or wait, as its metrics tell.
    pub(crate) fn requests(&self) -> u64 {
        (self.waiting.len() + self.running.len()) as u64
    }

    /// Requests that wait.
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

    /// Begins a step, if none is under way and something is to be done: when it will be over. An error tells when to ask again,
    /// if something comes by itself.
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

    /// Who came last goes back to the queue while there is no room for a token of each.
    fn make_room(&mut self) {
        while self.running.len() > 1 && self.used() + self.running.len() as u64 > self.class.kv_tokens {
            let Some(last) = self.running.pop() else { return };
            self.waiting.push_front((last.job, last.generated));
        }
    }

    /// The next request begins, if there is room for it.
    fn admit(&mut self, trace: &Trace, now: Duration) -> bool {
        let Some(&(job, generated)) = self.waiting.front() else { return false };
        let request = &trace.requests[job.request];
        let prompt = request.prompt_tokens + generated;
        let has_room = self.used() + prompt + (self.running.len() as u64) < self.class.kv_tokens;
        // One that fits nowhere would wait for ever: alone it runs in any case.
        if !self.running.is_empty() && (!has_room || self.running.len() >= self.class.requests_max) {
            return false;
        }
        self.waiting.pop_front();
        let own = request.blocks.iter().take_while(|block| self.cache.contains(**block)).count();
        let pooled = self.pool.as_ref().map_or(0, |pool| pool.leading_blocks(&request.blocks[own..]));
        let tokens = |blocks: usize| (blocks as u64 * trace.block_tokens).min(request.prompt_tokens - 1);
        let in_cache = tokens(own + pooled);
        let found = if job.is_handed_over && generated == 0 { prompt - 1 } else { in_cache };
        let known = if job.is_handed_over { 0 } else { found };
        let loads = if job.is_handed_over { 0 } else { in_cache - tokens(own) };
        let loading = self.pool.as_ref().map_or(0.0, |pool| pool.load_ms(loads));
        self.running.push(Running {
            job,
            prompt,
            done: found,
            found,
            generated,
            before: generated,
            ready_at: now + self.class.costs.before(known) + milliseconds(loading),
            part: 0,
        });
        true
    }

    /// The step is over: what it has brought. `told`: the engine's number, and who hears what its cache keeps and drops.
    pub(crate) fn end_step(
        &mut self,
        trace: &Trace,
        mut told: Option<(usize, &mut impl Chooser)>,
    ) -> Vec<Came> {
        self.is_in_step = false;
        let mut came = Vec::new();
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
                keep(&mut self.cache, blocks, &mut told);
                self.pool.iter().for_each(|pool| pool.keep(blocks));
                if running.generated == 0 {
                    // One that was handed over was not expected here.
                    if !running.job.is_handed_over {
                        expect_no_more(&mut self.expected, blocks);
                    }
                    came.push(Came::First { job: running.job, found: running.found });
                }
            }
            running.generated += 1;
            if running.generated >= running.job.output {
                came.push(Came::Last(running.job));
            }
        }
        self.running.retain(|running| running.generated < running.job.output || !running.decodes());
        self.running.iter_mut().for_each(|running| running.part = 0);
        came
    }

    /// The process dies: its requests, and all that it had.
    pub(crate) fn die(&mut self, block_tokens: u64) -> Vec<Job> {
        let lost = self.running.drain(..).map(|running| running.job);
        let lost = lost.chain(self.waiting.drain(..).map(|(job, _)| job)).collect();
        *self = Self::new(Arc::clone(&self.class), block_tokens, self.pool.take());
        lost
    }
}

/// A prompt of these blocks has come.
fn expect_no_more(expected: &mut HashMap<u64, u32>, blocks: &[u64]) {
    for block in blocks {
        if let Entry::Occupied(mut count) = expected.entry(*block) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// A prompt's blocks come into the cache.
fn keep(cache: &mut CacheModel, blocks: &[u64], told: &mut Option<(usize, &mut impl Chooser)>) {
    let Some((node, chooser)) = told else {
        cache.request(blocks, |_| ());
        return;
    };
    let mut gone = Vec::new();
    let known = cache.request(blocks, |evicted| gone.push(evicted.key)).prefix_hits;
    let (before, behind) = blocks.split_at(known);
    let new = behind.iter().take_while(|block| cache.contains(**block)).count();
    if !gone.is_empty() {
        chooser.evicted(*node, &gone);
    }
    if new > 0 {
        chooser.stored(*node, before.last().copied(), &behind[..new]);
    }
}
