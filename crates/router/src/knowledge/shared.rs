//! [`Knowledge`]: the exact knowledge of prefixes that all threads share.
//!
//! Serving threads tokenize a request's prompt ([`Knowledge::prompt`]), look it up ([`Knowledge::look_up`]), and promise it to
//! the chosen node. The readers' thread applies engines' events. All of them share one lock, which is held for microseconds.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use kvlane_kv_events::{Batch, Event};
use parking_lot::Mutex;
use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

use super::{
    agreement::prompt_tokens,
    blocks::{Blocks, Parent},
    chain::chain,
    grade::Reason,
    node::{KnownNode, Status, parent},
    pool_nodes::PoolNodes,
    prompt::{
        INLINE_BODY_BYTES_MAX, INLINE_BYTES_MAX, PATIENCE, Prompt, TEXT_BYTES_MAX, Text, text, token_ids,
    },
    settings::{EventSource, KnowledgeSettings},
    tokenizer::{Tokenizer, TokenizerError},
};
use crate::{
    body::{Scan, scan},
    schedule::{Cached, CachedPrefixes, NODES_A_TABLE, NodeId},
};

/// Long prompts that are tokenized at a time, on threads that do not serve clients.
const TOKENIZING_MAX: usize = 4;
/// Longest first piece of an answer that is searched for its count of prompt tokens.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Tokenizers, and the blocks that engines report.
#[derive(Debug)]
pub struct Knowledge {
    tokenizers: HashMap<String, Arc<Tokenizer>>,
    sources: Vec<EventSource>,
    tokenizing: Arc<Semaphore>,
    /// Counts by [`Reason`].
    fallbacks: [AtomicU64; Reason::ALL.len()],
    /// Held for microseconds, except while a node's blocks are dropped.
    state: Mutex<KnowledgeState>,
}

#[derive(Debug)]
struct KnowledgeState {
    blocks: Blocks,
    nodes: HashMap<NodeId, KnownNode>,
    /// The base model of each adapter.
    adapters: HashMap<Arc<str>, String>,
}

/// The result of looking a prompt up.
#[derive(Debug, Default)]
pub struct Lookup {
    /// The tokens of it that nodes have, for the scheduler.
    pub cached: CachedPrefixes,
    /// The prompt's block hashes, by block size.
    chains: BTreeMap<u32, Vec<u64>>,
}

impl Knowledge {
    /// Loads the tokenizers.
    ///
    /// # Errors
    /// One cannot be loaded.
    pub fn new(settings: KnowledgeSettings) -> Result<Self, TokenizerError> {
        let load =
            |(model, path): (String, std::path::PathBuf)| Ok((model, Arc::new(Tokenizer::load(&path)?)));
        let tokenizers = settings.tokenizers.into_iter().map(load).collect::<Result<_, TokenizerError>>()?;
        Ok(Self { tokenizers, ..Self::with_events(settings.events, settings.blocks_max) })
    }

    /// No tokenizers and no events: nothing is known exactly.
    pub fn none() -> Self {
        Self::with_events(Vec::new(), 0)
    }

    /// Events, and no tokenizers.
    fn with_events(sources: Vec<EventSource>, blocks_max: usize) -> Self {
        Self {
            tokenizers: HashMap::new(),
            sources,
            tokenizing: Arc::new(Semaphore::new(TOKENIZING_MAX)),
            fallbacks: Default::default(),
            state: Mutex::new(KnowledgeState {
                blocks: Blocks::new(blocks_max),
                nodes: HashMap::new(),
                adapters: HashMap::new(),
            }),
        }
    }

    fn is_on(&self) -> bool {
        !self.tokenizers.is_empty() || !self.sources.is_empty()
    }

    /// The sockets at which this node's engine publishes its events.
    pub fn source_of(&self, name: &str) -> Option<&EventSource> {
        self.sources.iter().find(|source| source.node == name)
    }

    /// Adds a node, and drops what was known of an earlier node in its slot.
    pub fn add(&self, id: NodeId, name: &Arc<str>) {
        let node = KnownNode::new(Arc::clone(name), self.source_of(name).is_some());
        let mut state = self.state.lock();
        state.blocks.forget(id.slot());
        state.nodes.retain(|other, _| other.slot() != id.slot());
        state.nodes.insert(id, node);
    }

    /// Sets the slot of the pool that a node shares; None: it shares none.
    pub(crate) fn set_pool(&self, id: NodeId, pool: Option<usize>) {
        if let Some(node) = self.state.lock().nodes.get_mut(&id) {
            node.pool = pool;
        }
    }

    /// Sets the models that a node serves: names, and the JSON object that describes each.
    pub fn set_models(&self, id: NodeId, models: &[(Arc<str>, String)]) {
        if !self.is_on() {
            return;
        }
        let mut state = self.state.lock();
        let Some(node) = state.nodes.get_mut(&id) else { return };
        let is_same = node.models.iter().map(|(name, _)| name).eq(models.iter().map(|(name, _)| name));
        if is_same && node.last.is_some() {
            return;
        }
        node.models = models.iter().map(|(name, described)| (Arc::clone(name), parent(described))).collect();
        let all = state.nodes.values().flat_map(|node| &node.models);
        state.adapters = all.filter_map(|(name, base)| Some((Arc::clone(name), base.clone()?))).collect();
        self.regrade(&mut state, id);
    }

    /// The prompt of a request as tokens. None if the router cannot know them, or not in time. `scan` is the scan of its body.
    pub async fn prompt(
        &self,
        path: &str,
        body: &Bytes,
        scan: &Scan<'_>,
        model: Option<&str>,
    ) -> Option<Prompt> {
        let is_chat = match path {
            "/v1/chat/completions" => true,
            "/v1/completions" => false,
            _ => return None,
        };
        let model = model.filter(|_| self.is_on())?;
        let base = self.state.lock().adapters.get(model).cloned();
        let adapter = base.is_some().then(|| model.to_owned());
        let salt = scan.string("cache_salt").map(|salt| salt.into_owned());
        let tokenizer = self.tokenizers.get(base.as_deref().unwrap_or(model));
        let read = if body.len() > 2 * TEXT_BYTES_MAX {
            tokenizer?;
            Err(Reason::TooLong)
        } else if body.len() > INLINE_BODY_BYTES_MAX {
            self.tokenize_body(body, is_chat, tokenizer).await
        } else if let Some(tokens) = token_ids(scan).filter(|_| !is_chat) {
            Ok(Some(tokens))
        } else {
            let tokenizer = tokenizer?;
            match text(scan, is_chat, tokenizer) {
                Ok(Text { text, special }) => self.tokenize(tokenizer, text, special).await.map(Some),
                Err(reason) => Err(reason),
            }
        };
        match read {
            Ok(tokens) => Some(Prompt { tokens: tokens?, adapter, salt }),
            Err(reason) => {
                if self.count(reason) {
                    // Log: a prompt could not be tokenized, so the router estimates which node has it; the
                    // request is served. Do: see the reason in docs/choosing.md#events-and-tokens.
                    tracing::warn!(
                        once = true,
                        reason = reason.name(),
                        "prompt known by its text only: {}; further cases are only counted",
                        reason.sentence()
                    );
                }
                None
            }
        }
    }

    /// Tokens of a long body. Scanning, rendering and tokenizing all happen on a thread that serves no clients. None if the
    /// prompt needs a tokenizer that the router does not have.
    async fn tokenize_body(
        &self,
        body: &Bytes,
        is_chat: bool,
        tokenizer: Option<&Arc<Tokenizer>>,
    ) -> Result<Option<Vec<u32>>, Reason> {
        let (body, tokenizer) = (body.clone(), tokenizer.cloned());
        self.run_aside(move || {
            let scan = scan(&body).map_err(|_| Reason::Form)?;
            if let Some(tokens) = token_ids(&scan).filter(|_| !is_chat) {
                return Ok(Some(tokens));
            }
            let Some(tokenizer) = tokenizer else { return Ok(None) };
            let Text { text, special } = text(&scan, is_chat, &tokenizer)?;
            if text.len() > TEXT_BYTES_MAX {
                return Err(Reason::TooLong);
            }
            tokenizer.tokens(tokenizer.pieces(&text, special)).map(Some).ok_or(Reason::Form)
        })
        .await
    }

    /// Tokens of a text: on this thread if little of it is uncached, else on another one.
    async fn tokenize(
        &self,
        tokenizer: &Arc<Tokenizer>,
        text: String,
        special: bool,
    ) -> Result<Vec<u32>, Reason> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(Reason::TooLong);
        }
        let pieces = tokenizer.pieces(&text, special);
        if pieces.unknown() <= INLINE_BYTES_MAX {
            return tokenizer.tokens(pieces).ok_or(Reason::Form);
        }
        let tokenizer = Arc::clone(tokenizer);
        self.run_aside(move || tokenizer.tokens(tokenizer.pieces(&text, special)).ok_or(Reason::Form)).await
    }

    /// Runs this on another thread, and waits for at most [`PATIENCE`]. A later result still fills the cache for the next
    /// request.
    async fn run_aside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Reason> + Send + 'static,
    ) -> Result<T, Reason> {
        let permit = Arc::clone(&self.tokenizing).try_acquire_owned().map_err(|_| Reason::Busy)?;
        let task = spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        match timeout(PATIENCE, task).await {
            Ok(Ok(done)) => done,
            Ok(Err(_)) => Err(Reason::Form),
            Err(_) => Err(Reason::Late),
        }
    }

    /// The tokens of a prompt that nodes and pools have, by their engines' events.
    pub fn look_up(&self, prompt: &Prompt, now: Instant) -> Lookup {
        let count = prompt.tokens.len() as u64;
        let mut wanted: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        let mut ids: HashMap<usize, NodeId> = HashMap::new();
        let mut pools = PoolNodes::default();
        {
            let state = self.state.lock();
            for (&id, node) in &state.nodes {
                let size = state.blocks.stats(id.slot()).block_size.filter(|_| node.is_exact());
                if let Some(pool) = node.pool {
                    pools.add(pool, id.slot(), size);
                }
                let Some(size) = size else { continue };
                ids.insert(id.slot(), id);
                let tables = wanted.entry(size).or_default();
                let table = id.slot() / NODES_A_TABLE;
                if tables.len() <= table {
                    tables.resize(table + 1, 0);
                }
                tables[table] |= 1 << (id.slot() % NODES_A_TABLE);
            }
        }
        let (adapter, salt) = (prompt.adapter.as_deref(), prompt.salt.as_deref());
        let chain_of = |&size: &u32| (size, chain(&prompt.tokens, size, adapter, salt));
        let chains: BTreeMap<u32, Vec<u64>> = wanted.keys().map(chain_of).collect();
        let mut cached = CachedPrefixes::of_length(count);
        let mut state = self.state.lock();
        for (size, tables) in &wanted {
            let size_64 = u64::from(*size);
            // The engine always computes the last token, and so its whole block.
            let most = (count.saturating_sub(1) / size_64) as usize;
            let chain = &chains[size];
            state.blocks.matched(&chain[..most.min(chain.len())], tables, now, |slot, blocks| {
                if let Some(&id) = ids.get(&slot) {
                    let tokens = blocks as u64 * size_64;
                    cached.set(id, Cached { tokens, block_size: size_64 });
                }
            });
        }
        for (pool, size, nodes) in pools.reported() {
            let most = count.saturating_sub(1).checked_div(u64::from(size)).unwrap_or(0) as usize;
            let blocks = chains.get(&size).map_or(0, |chain| state.blocks.pooled(chain, most, nodes));
            cached.set_pooled(pool, blocks as u64 * u64::from(size));
        }
        Lookup { cached, chains }
    }

    /// Records that the node will have the prompt's blocks, because it was chosen for it.
    pub fn promise(&self, lookup: &Lookup, id: NodeId, now: Instant) {
        let mut state = self.state.lock();
        let size = state.blocks.stats(id.slot()).block_size;
        if let Some(chain) = size.and_then(|size| lookup.chains.get(&size))
            && state.nodes.contains_key(&id)
        {
            state.blocks.promise(chain, id.slot(), now);
        }
    }

    /// Compares the prompt's tokens in a node's answer with the router's count, `ours`.
    pub fn compare(&self, id: NodeId, ours: usize, answer: &[u8]) {
        let is_short = answer.len() <= ANSWER_BYTES_MAX;
        let Some(theirs) = is_short.then(|| prompt_tokens(answer)).flatten() else { return };
        let mut state = self.state.lock();
        if let Some(node) = state.nodes.get_mut(&id) {
            node.agreement.compared(ours as u64, theirs);
            self.regrade(&mut state, id);
        }
    }

    /// Sets whether a node's events can be read.
    pub(super) fn set_live(&self, id: NodeId, is_live: bool) {
        let mut state = self.state.lock();
        if let Some(node) = state.nodes.get_mut(&id) {
            node.is_live = is_live;
            self.regrade(&mut state, id);
        }
    }

    /// Drops a node's blocks, because its engine has restarted.
    pub(super) fn restarted(&self, id: NodeId) {
        self.forget(id, |node| node.restarts += 1);
    }

    /// Drops a node's blocks, because events were lost.
    pub(super) fn lost(&self, id: NodeId) {
        self.forget(id, |node| node.gaps += 1);
    }

    fn forget(&self, id: NodeId, count: impl FnOnce(&mut KnownNode)) {
        let mut state = self.state.lock();
        let Some(node) = state.nodes.get_mut(&id) else { return };
        count(node);
        state.blocks.forget(id.slot());
        self.regrade(&mut state, id);
    }

    /// Applies a batch of a node's events. Releases the lock between steps of [`BLOCKS_A_STEP`](super::BLOCKS_A_STEP) blocks.
    pub(super) fn apply(&self, id: NodeId, batch: &Batch) {
        for event in &batch.events {
            let Event::Stored(stored) = event else { continue };
            let mut state = self.state.lock();
            if !state.nodes.contains_key(&id) {
                return;
            }
            state.blocks.learn(id.slot(), stored);
        }
        let parts = batch.events.split_inclusive(|event| *event == Event::Cleared);
        // Blocks of other groups are known by hashes that the group with full attention has told.
        let turns = parts.flat_map(|part| [true, false].map(|turn| (part, turn)));
        for (event, turn) in turns.flat_map(|(part, turn)| part.iter().map(move |event| (event, turn))) {
            let group = match event {
                Event::Stored(stored) => stored.group,
                Event::Removed(removed) => removed.group,
                Event::Cleared => None,
            };
            let mut next = Some((0, Parent::OfEvent));
            while let Some((from, parent)) = next {
                let mut state = self.state.lock();
                if !state.nodes.contains_key(&id) {
                    return;
                }
                next = None;
                let is_first = *event != Event::Cleared && state.blocks.are_of_a_beginning(id.slot(), group);
                if is_first != turn {
                    break;
                }
                match event {
                    Event::Stored(stored) => next = state.blocks.stored(id.slot(), stored, from, parent),
                    Event::Removed(removed) => state.blocks.removed(id.slot(), removed),
                    Event::Cleared => state.blocks.cleared(id.slot()),
                }
                if next.is_none() {
                    self.regrade(&mut state, id);
                }
            }
        }
    }

    /// The grade and the event counts of a node.
    pub fn status(&self, id: NodeId) -> Status {
        let state = self.state.lock();
        let stats = state.blocks.stats(id.slot());
        let of = |node: &KnownNode| node.status(stats, |model| self.has_tokenizer(model));
        state.nodes.get(&id).map(of).unwrap_or_default()
    }

    /// Memory of all blocks, in bytes.
    pub fn blocks_bytes(&self) -> usize {
        self.state.lock().blocks.bytes()
    }

    /// Number of times that knowledge was not exact for this reason.
    pub fn fallbacks(&self, reason: Reason) -> u64 {
        self.fallbacks[reason as usize].load(Ordering::Relaxed)
    }

    /// Counts a fallback. Returns whether it is the first one for this reason.
    fn count(&self, reason: Reason) -> bool {
        self.fallbacks[reason as usize].fetch_add(1, Ordering::Relaxed) == 0
    }

    fn has_tokenizer(&self, model: &str) -> bool {
        self.tokenizers.contains_key(model)
    }

    /// Grades a node again. Counts and logs a new grade or reason.
    fn regrade(&self, state: &mut KnowledgeState, id: NodeId) {
        let stats = state.blocks.stats(id.slot());
        let Some(node) = state.nodes.get_mut(&id) else { return };
        if !self.is_on() || node.models.is_empty() {
            return;
        }
        let now = node.grade(stats, |model| self.has_tokenizer(model));
        let before = node.last.replace(now);
        if before == Some(now) {
            return;
        }
        // A change between checked and approximate keeps its reason, which was counted when it came up.
        let is_new = before.and_then(|(_, reason)| reason) != now.1;
        if let Some(reason) = now.1.filter(|_| is_new) {
            self.count(reason);
        }
        node.log(now);
    }
}
