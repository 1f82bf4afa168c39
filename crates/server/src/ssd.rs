//! The SSD tier below the pool.

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use kvlane_block::Namespace;
use kvlane_memory::Arena;
use kvlane_policy::Memo;
use kvlane_proto::v1;
use kvlane_ssd::{
    DeviceOptions, Extent, Judge, Key, OpenError, Options, Read, ReadEnd, Record, Shard, Space, WriteEnd,
};
use kvlane_store::{BlockKey, NotForGood, PoolExtent, ReadDone, SealedShard, Store, Tier, WriteDone};

use crate::ssd_notes::SsdNotes;

/// Which files keep blocks that the pool may lose.
#[derive(Debug, Clone)]
pub struct SsdOptions {
    /// Files or directories, on as many devices; at least one.
    pub devices: Vec<DeviceOptions>,
    /// Most bytes written a second, on each device; None for no limit.
    pub write_rate: Option<u64>,
    /// How long a lookup may wait for blocks that only the SSD has.
    pub wait: Duration,
}

/// The running tier.
pub(crate) struct Ssd {
    pub(crate) tier: Arc<kvlane_ssd::SsdTier>,
    /// [`SsdOptions::wait`]
    pub(crate) wait: Duration,
}

impl Ssd {
    /// Reads the index back; that takes a moment where there are many blocks.
    pub(crate) fn open(options: &SsdOptions, arena: &Arc<Arena>) -> Result<Self, OpenError> {
        let of_tier = Options { write_rate: options.write_rate, ..Options::new(options.devices.clone()) };
        let tier = kvlane_ssd::SsdTier::open(of_tier, Arc::clone(arena) as Arc<dyn kvlane_ssd::Memory>)?;
        Ok(Self { tier: Arc::new(tier), wait: options.wait })
    }

    /// Whether a file has blocks of the namespace, or was to note that it was dropped and could not.
    pub(crate) fn knows(&self, namespace: &Namespace) -> bool {
        self.tier.spaces().iter().any(|found| found.space.namespace == *namespace)
            || self.tier.missing_notes().contains(namespace)
    }

    /// Starts the thread that tries again to note which namespaces were dropped.
    pub(crate) fn start_notes(&self) -> std::io::Result<SsdNotes> {
        let tier = Arc::clone(&self.tier);
        SsdNotes::start(move || {
            let before = tier.missing_notes();
            if !before.is_empty() && tier.note_missing().is_empty() {
                tracing::info!(namespaces = before.len(), "the SSD has noted what was dropped");
            }
        })
    }

    /// Each file.
    pub(crate) fn status(&self) -> Vec<v1::SsdStatus> {
        let status = |device: kvlane_ssd::DeviceStatus| {
            let cache = if device.direct { "direct" } else { "through the page cache" };
            let notes: String = device.notes.iter().map(|note| format!("; {note}")).collect();
            v1::SsdStatus {
                path: device.path.display().to_string(),
                capacity_bytes: device.capacity,
                used_bytes: u64::from(device.segments - device.free_segments) * device.segment_bytes,
                method: format!("{}, {cache}{notes}", device.io),
                trouble: device.degraded.unwrap_or_else(|| match device.drops_not_noted {
                    0 => String::new(),
                    count => {
                        format!(
                            "{count} dropped namespaces could not be noted: a restart would bring them back"
                        )
                    }
                }),
            }
        };
        self.tier.status().into_iter().map(status).collect()
    }

    /// From now on the policy of `store` says which blocks deserve to be written again.
    pub(crate) fn ask_policy_of(&self, store: &Arc<Store>) {
        self.tier.set_judge(Arc::new(StorePolicy(Arc::downgrade(store))));
    }

    /// For the store.
    pub(crate) fn below(&self) -> Arc<dyn Tier> {
        Arc::new(Below(Arc::clone(&self.tier)))
    }
}

/// The tier as the store knows it.
struct Below(Arc<kvlane_ssd::SsdTier>);

/// Calls `done` with `refused` if nobody else calls it: the tier drops what it refuses.
struct Once<F: FnOnce(T), T> {
    done: Option<F>,
    refused: fn() -> T,
}

impl<F: FnOnce(T), T> Once<F, T> {
    fn call(mut self, with: T) {
        if let Some(done) = self.done.take() {
            done(with);
        }
    }
}

impl<F: FnOnce(T), T> Drop for Once<F, T> {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done((self.refused)());
        }
    }
}

impl Tier for Below {
    fn contains(&self, key: &BlockKey) -> bool {
        self.0.contains(&name(key))
    }

    fn write(&self, key: BlockKey, shards: Vec<SealedShard>, memo: Memo, done: WriteDone) {
        let once = Once { done: Some(done), refused: || false };
        let shard = |shard: &SealedShard| Shard { extent: extent(&shard.at), crc: shard.crc32c };
        let record = Record { key: name(&key), shards: shards.iter().map(shard).collect(), memo };
        if let Err(reason) = self.0.write(record, move |end| once.call(end == WriteEnd::Stored)) {
            tracing::debug!(%reason, hash = %key.hash, "a block does not go to the SSD");
        }
    }

    fn memo(&self, key: &BlockKey) -> Option<Memo> {
        self.0.memo(&name(key))
    }

    fn remember(&self, lost: &[(BlockKey, Memo)]) {
        self.0.remember(lost.iter().map(|(key, memo)| (name(key), *memo)));
    }

    fn read(&self, key: BlockKey, shards: Vec<PoolExtent>, deadline: Instant, done: ReadDone) {
        let once = Once { done: Some(done), refused: || None };
        let into = shards.iter().map(extent).collect();
        let read = Read { key: name(&key), into, deadline: Some(deadline) };
        let ended = move |end| {
            once.call(match end {
                ReadEnd::Found { crcs, .. } => Some(crcs),
                ReadEnd::Miss(_) => None,
            });
        };
        if let Err(reason) = self.0.read(read, ended) {
            tracing::debug!(%reason, hash = %key.hash, "a block does not come from the SSD");
        }
    }

    fn forget_namespace(&self, namespace: Namespace) {
        let blocks = self.0.forget_namespace(namespace);
        tracing::info!(%namespace, blocks, "dropped on the SSD");
    }

    fn note_forgotten(&self, namespace: Namespace) -> Result<(), NotForGood> {
        let not_noted = self.0.note_forgotten(namespace);
        if not_noted.is_empty() {
            return Ok(());
        }
        let sentence = not_noted.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        tracing::error!(%namespace, "a restart would bring back what was dropped: {sentence}");
        Err(NotForGood(sentence))
    }
}

/// The policy of the store above. Weak, since the store has the tier.
struct StorePolicy(Weak<Store>);

impl Judge for StorePolicy {
    fn densities(&self, blocks: &[(Key, Memo)]) -> Option<Vec<f32>> {
        let key = |Key { space: Space { namespace, cut }, hash }| BlockKey { namespace, cut, hash };
        let blocks: Vec<(BlockKey, Memo)> = blocks.iter().map(|&(name, memo)| (key(name), memo)).collect();
        self.0.upgrade()?.densities(&blocks)
    }

    fn given_up(&self, density: f32) {
        if let Some(store) = self.0.upgrade() {
            store.set_given_up_below(density);
        }
    }
}

fn name(key: &BlockKey) -> Key {
    Key { space: Space { namespace: key.namespace, cut: key.cut }, hash: key.hash }
}

fn extent(at: &PoolExtent) -> Extent {
    Extent { offset: at.offset, bytes: at.bytes }
}
