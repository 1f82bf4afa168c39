//! The SSD tier below the pool.

use std::sync::Arc;

use kvlane_block::Namespace;
use kvlane_memory::Arena;
use kvlane_proto::v1;
use kvlane_ssd::{DeviceOptions, OpenError, Options, PathStatus, SsdPath, SsdTier};
use kvlane_store::Store;

use crate::ssd_notes::SsdNotes;

/// Options of the SSD tier, which keeps blocks that the pool may lose.
#[derive(Debug, Clone)]
pub struct SsdOptions {
    /// Files or directories, on as many devices; at least one.
    pub devices: Vec<DeviceOptions>,
    /// Most bytes written a second, on each device; None for no limit.
    pub write_rate: Option<u64>,
    /// Whether transfers go straight to and from the pool, or through staging memory.
    pub path: SsdPath,
    /// Bytes of staging memory of each device, if it uses any.
    pub staging_bytes: u64,
}

/// The running tier.
pub(crate) struct Ssd {
    pub(crate) tier: Arc<SsdTier>,
}

impl Ssd {
    /// Opens the files and rebuilds the index, which takes a moment if there are many blocks.
    pub(crate) fn open(options: &SsdOptions, arena: &Arc<Arena>) -> Result<Self, OpenError> {
        let of_tier = Options {
            write_rate: options.write_rate,
            path: options.path,
            staging_bytes: options.staging_bytes,
            ..Options::new(options.devices.clone())
        };
        let tier = SsdTier::open(of_tier, Arc::clone(arena) as Arc<dyn kvlane_ssd::Memory>)?;
        Ok(Self { tier: Arc::new(tier) })
    }

    /// Whether a file has blocks of the namespace, or has yet to note that it was dropped.
    pub(crate) fn knows(&self, namespace: &Namespace) -> bool {
        self.tier.spaces().iter().any(|found| found.space.namespace == *namespace)
            || self.tier.missing_notes().contains(namespace)
    }

    /// Starts the thread that retries to note which namespaces were dropped.
    pub(crate) fn start_notes(&self) -> std::io::Result<SsdNotes> {
        let tier = Arc::clone(&self.tier);
        SsdNotes::start(move || {
            let before = tier.missing_notes();
            if !before.is_empty() && tier.note_missing().is_empty() {
                // Log: a namespace whose drop had not reached the SSD is dropped there too.
                tracing::info!(namespaces = before.len(), "SSD has noted the dropped namespaces");
            }
        })
    }

    /// One entry for each file.
    pub(crate) fn status(&self) -> Vec<v1::SsdStatus> {
        let status = |device: kvlane_ssd::DeviceStatus| {
            let cache = if device.direct { "O_DIRECT" } else { "through the page cache" };
            let notes: String = device.notes.iter().map(|note| format!("; {note}")).collect();
            v1::SsdStatus {
                path: device.path.display().to_string(),
                capacity_bytes: device.capacity,
                used_bytes: u64::from(device.segments - device.free_segments) * device.segment_bytes,
                method: format!("{}, {cache}, {}{notes}", device.io, path_text(&device.path_taken)),
                transfer_path: path_name(&device.path_taken).to_owned(),
                path_reason: device.path_taken.reason.clone(),
                direct_bytes_per_second: device.path_taken.rates.map_or(0, |rates| rates.direct),
                staged_bytes_per_second: device.path_taken.rates.map_or(0, |rates| rates.staged),
                staging_bytes: device.path_taken.staging_bytes,
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

    /// Makes the tier ask the policy of `store` which blocks are worth writing again.
    pub(crate) fn ask_policy_of(&self, store: &Arc<Store>) {
        self.tier.set_judge(Arc::new(Arc::downgrade(store)));
    }
}

/// "direct" or "staged".
pub(crate) fn path_name(path: &PathStatus) -> &'static str {
    if path.staged { "staged" } else { "direct" }
}

fn path_text(path: &PathStatus) -> String {
    let rates = path.rates.map_or(String::new(), |rates| format!(": {rates}"));
    format!("{} ({}{rates})", path_name(path), path.reason)
}
