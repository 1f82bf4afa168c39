//! Dynamo's router behind the replay: its index of blocks, its scheduler that books what is under way, its default selector.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use dynamo_kv_router::indexer::{KvIndexerInterface, MatchDetails, ThreadPoolIndexer, TieredMatchDetails};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent, RoutingConstraints, WorkerConfigLike,
    compute_seq_hash_for_block,
};
use dynamo_kv_router::scheduling::{
    NoopOverlapScoresRefresh, OverlapAnalysis, ScheduleMode, ScheduleRequest,
};
use dynamo_kv_router::{
    ActiveSequencesMultiWorker, ConcurrentRadixTreeCompressed, DefaultWorkerSelector, KvRouterConfig,
    LocalScheduler, NoopSequencePublisher, WorkerType,
};
use kvlane_fleet::{Chooser, Class, Lab, Request, Trace};
use kvlane_policy::spread;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What Dynamo hears of a worker when it comes; the same of each.
#[derive(Clone, PartialEq)]
struct Worker {
    step_tokens: u64,
    kv_blocks: u64,
}

static NO_TAINTS: LazyLock<HashSet<String>> = LazyLock::new(HashSet::new);

impl WorkerConfigLike for Worker {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }

    fn data_parallel_size(&self) -> u32 {
        1
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        Some(self.step_tokens)
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        Some(self.kv_blocks)
    }

    fn taints(&self) -> &HashSet<String> {
        &NO_TAINTS
    }
}

/// The blocks of a trace, cut into those of an engine, which are smaller. As in Dynamo only whole ones count.
pub struct Cut {
    block_tokens: u64,
    parts: HashMap<u64, u64>,
}

impl Cut {
    /// Into blocks of so many tokens.
    pub fn new(trace: &Trace, block_tokens: u64) -> Self {
        let mut parts = HashMap::new();
        for request in &trace.requests {
            for (number, block) in (0..).zip(&request.blocks) {
                let tokens = request.prompt_tokens.saturating_sub(number * trace.block_tokens);
                let here = tokens.min(trace.block_tokens) / block_tokens;
                let known = parts.entry(*block).or_insert(here);
                *known = here.max(*known);
            }
        }
        Self { block_tokens, parts }
    }

    fn of_block(&self, block: u64) -> impl Iterator<Item = u64> {
        let parts = self.parts.get(&block).copied().unwrap_or_default();
        (1..=parts).map(move |part| spread(block ^ spread(part)))
    }

    fn of(&self, blocks: &[u64]) -> impl Iterator<Item = u64> {
        blocks.iter().flat_map(|block| self.of_block(*block))
    }
}

/// One replay's.
pub struct Dynamo<'a> {
    cut: &'a Cut,
    config: KvRouterConfig,
    index: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    scheduler: LocalScheduler<NoopSequencePublisher, Worker, DefaultWorkerSelector>,
    events: u64,
    failed: Option<anyhow::Error>,
    stop: CancellationToken,
    _workers: watch::Sender<HashMap<u64, Worker>>,
    runtime: Runtime,
}

impl<'a> Dynamo<'a> {
    /// Before so many workers of a class; a prompt's new blocks weigh so many times as much as others, 1 if nobody says
    /// more. The seed is for workers that cost the same.
    pub fn new(
        cut: &'a Cut,
        workers: u64,
        class: &Class,
        prefill_load_scale: f64,
        seed: u64,
    ) -> Result<Self> {
        let config = KvRouterConfig { prefill_load_scale, ..KvRouterConfig::default() };
        let label = WorkerType::Aggregated.default_selector_label();
        let block_tokens = u32::try_from(cut.block_tokens)?;
        let each = Worker { step_tokens: class.step_tokens, kv_blocks: class.kv_tokens / cut.block_tokens };
        let slots = Arc::new(ActiveSequencesMultiWorker::new_without_expiry(
            NoopSequencePublisher,
            block_tokens as usize,
            (0..workers).map(|worker| (worker, (0, 1))).collect(),
            config.router_replica_sync,
            0,
            label,
        ));
        let (sender, configs) = watch::channel((0..workers).map(|worker| (worker, each.clone())).collect());
        let stop = CancellationToken::new();
        let runtime = Builder::new_current_thread().enable_time().build()?;
        let scheduler = {
            let _within = runtime.enter();
            LocalScheduler::new(
                slots,
                configs,
                config.policy_profile(None).context("queues")?,
                block_tokens,
                DefaultWorkerSelector::new_seeded(Some(config.clone()), label, seed),
                None,
                None::<Arc<NoopOverlapScoresRefresh>>,
                None,
                None,
                Duration::from_secs(60),
                config.router_track_prefill_tokens,
                stop.clone(),
                label,
                false,
            )
        };
        let threads = config.router_event_threads as usize;
        let index = ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), threads, block_tokens);
        Ok(Self { cut, config, index, scheduler, events: 0, failed: None, stop, _workers: sender, runtime })
    }

    /// An error if anything was not as Dynamo wants it, or something is left under way.
    pub fn finish(self) -> Result<()> {
        self.stop.cancel();
        let loads = self.scheduler.get_potential_loads(None, 0, Default::default(), true);
        let left = loads.iter().map(|load| load.potential_prefill_tokens + load.potential_decode_blocks);
        match self.failed {
            Some(error) => Err(error),
            None if left.clone().any(|left| left > 0) => Err(anyhow!("{} are left", left.sum::<usize>())),
            None => Ok(()),
        }
    }

    fn note<T>(&mut self, what: &str, result: Result<T, impl Into<anyhow::Error>>) -> Option<T> {
        result.map_err(|error| self.failed.get_or_insert(error.into().context(what.to_owned()))).ok()
    }

    fn ask(&self, request: usize, asked: &Request) -> Result<ScheduleRequest> {
        let hashes: Vec<LocalBlockHash> = self.cut.of(&asked.blocks).map(LocalBlockHash).collect();
        let sequence = compute_seq_hash_for_block(&hashes);
        let overlap_scores = self.runtime.block_on(self.index.find_matches(hashes.clone()))?;
        let device = MatchDetails { overlap_scores, ..MatchDetails::default() };
        let tiers = TieredMatchDetails { device, lower_tier: HashMap::new() };
        let overlap = OverlapAnalysis::new(&self.config, self.cut.block_tokens as u32, &tiers).signals();
        Ok(ScheduleRequest {
            mode: ScheduleMode::Tracked { request_id: request.to_string() },
            token_seq: Some(sequence),
            block_hashes: Some(hashes),
            isl_tokens: asked.prompt_tokens as usize,
            lora_name: None,
            expected_output_tokens: None,
            affinity_target: None,
            pinned_worker: None,
            allowed_worker_ids: None,
            routing_constraints: RoutingConstraints::default(),
            router_config_override: None,
            priority_jump: 0.0,
            strict_priority: 0,
            policy_class: None,
            session_context: None,
            overlap,
            kv_transfer_candidates: None,
            retain_kv_transfer_chain: false,
            shared_cache_hits: None,
        })
    }

    fn event(&mut self, node: usize, data: KvCacheEventData) {
        self.events += 1;
        let event = KvCacheEvent { event_id: self.events, data, dp_rank: 0 };
        let event = RouterEvent::new(node as u64, event);
        let applied = self.runtime.block_on(self.index.apply_event_and_wait(event));
        self.note("an event", applied);
    }
}

impl Lab for Dynamo<'_> {
    type Chooser = Self;

    fn chooser(&mut self) -> Option<&mut Self> {
        Some(self)
    }
}

impl Chooser for Dynamo<'_> {
    fn choose(&mut self, request: usize, asked: &Request) -> Option<usize> {
        let asked = self.ask(request, asked);
        let asked = self.note("a look-up", asked)?;
        let chosen = self.runtime.block_on(self.scheduler.schedule_request(asked));
        let worker = self.note("a choice", chosen)?.best_worker.worker_id;
        usize::try_from(worker).ok()
    }

    fn prefilled(&mut self, request: usize) {
        let told = self.runtime.block_on(self.scheduler.mark_prefill_completed(&request.to_string()));
        self.note("a first token", told);
    }

    fn over(&mut self, request: usize) {
        let told = self.runtime.block_on(self.scheduler.free(&request.to_string()));
        self.note("an end", told);
    }

    fn stored(&mut self, node: usize, parent: Option<u64>, blocks: &[u64]) {
        let block = |hash| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(hash),
            tokens_hash: LocalBlockHash(hash),
            mm_extra_info: None,
        };
        let parent_hash = parent.and_then(|parent| self.cut.of_block(parent).last());
        let blocks: Vec<_> = self.cut.of(blocks).map(block).collect();
        if !blocks.is_empty() {
            let parent_hash = parent_hash.map(ExternalSequenceBlockHash);
            let data = KvCacheStoreData { parent_hash, start_position: None, blocks };
            self.event(node, KvCacheEventData::Stored(data));
        }
    }

    fn evicted(&mut self, node: usize, blocks: &[u64]) {
        let block_hashes: Vec<_> = self.cut.of(blocks).map(ExternalSequenceBlockHash).collect();
        if !block_hashes.is_empty() {
            self.event(node, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }));
        }
    }
}
