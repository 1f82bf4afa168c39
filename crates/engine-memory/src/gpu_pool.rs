//! The GPUs of the daemon, with the pool pinned for their driver.
#![expect(unsafe_code, reason = "the pool is pinned, and measured before anybody uses it")]

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_gpu::{
    CHUNK_BYTES, Calibration, Direction, Driver, Gpu, GpuError, Loader, Pinned, RailOptions, Rails,
};
use kvlane_memory::Arena;
use parking_lot::Mutex;

/// The daemon's GPUs, and the pool pinned for their driver.
#[derive(Debug)]
pub struct Gpus {
    driver: Arc<dyn Driver>,
    /// By UUID. A GPU is opened when the first engine on it registers, and stays open.
    opened: Mutex<HashMap<[u8; 16], Gpu>>,
    rails: Arc<Rails>,
    /// The name of the GPU that was measured, and the result, which holds for GPUs of the same name.
    calibrated: (String, Calibration),
    /// How long loads of ranks that hold the same blocks wait for each other ([`crate::Meetings`]).
    pub meet_within: Duration,
    pool: Arc<PinnedPool>,
}

/// The pinned pool. Every copy between it and a GPU holds one, so that the pool stays pinned meanwhile.
#[derive(Debug)]
pub(crate) struct PinnedPool {
    /// Dropped before the arena, whose memory it unpins.
    pinned: Pinned,
    pub(crate) arena: Arc<Arena>,
}

impl Gpus {
    /// Pins the pool, and measures the first GPU if `calibrate`, before anything else uses the pool.
    ///
    /// # Errors
    /// There is no GPU, or it cannot be used.
    pub fn start(
        driver: Arc<dyn Driver>,
        arena: Arc<Arena>,
        rails: RailOptions,
        calibrate: bool,
    ) -> Result<Self, GpuError> {
        let start = Instant::now();
        let first = driver.devices()?.into_iter().next();
        let first = first.ok_or_else(|| GpuError::NoSuchDevice("at all".into()))?;
        let gpu = Gpu::open(Arc::clone(&driver), first.ordinal)?;
        let address = arena.base().expose_provenance() as u64;
        // SAFETY: `PinnedPool` keeps the arena for as long as it is pinned. Every user that enqueues work on it holds a
        // `PinnedPool`, and waits for that work before dropping it.
        let pinned = unsafe { Pinned::new(&gpu, address, arena.bytes(), CHUNK_BYTES, |_| {})? };
        // SAFETY: the pool is pinned, and nothing else uses it yet.
        let measured = calibrate.then(|| unsafe { Calibration::measure(&gpu, address, arena.bytes()) });
        let calibrated = (first.name, calibration(measured));
        let opened = Mutex::new(HashMap::from([(first.uuid, gpu)]));
        let meet_within = rails.meet_within;
        let rails = Rails::new(Arc::clone(&driver), pinned.seams(), rails)?;
        let pool = Arc::new(PinnedPool { pinned, arena });
        let gpus = Self { driver, opened, rails, meet_within, calibrated, pool };
        // Log: GPUs can reach the pool; the field seconds says how long pinning took.
        tracing::info!(gpus = gpus.describe(), seconds = start.elapsed().as_secs_f64(), "pool pinned");
        let several = gpus.driver.devices()?.len() > 1 && !gpus.rails.chosen().is_empty();
        if several {
            let start = Instant::now();
            let opened = gpus.rails.open_all();
            let seconds = start.elapsed().as_secs_f64();
            // Log: these GPUs lend their links to loads of other GPUs while they are idle (`--rails`).
            tracing::info!(gpus = ?opened, seconds, "GPUs opened that may lend their links to loads (rails)");
        }
        Ok(gpus)
    }

    /// The devices and the driver, for logs: "2 x NVIDIA H200 (cuda)".
    pub fn describe(&self) -> String {
        let mut names: Vec<(String, usize)> = Vec::new();
        for device in self.driver.devices().unwrap_or_default() {
            match names.iter_mut().find(|(name, _)| *name == device.name) {
                Some((_, count)) => *count += 1,
                None => names.push((device.name, 1)),
            }
        }
        let names: Vec<String> = names.into_iter().map(|(name, count)| format!("{count} x {name}")).collect();
        format!("{} ({})", names.join(", "), self.driver.name())
    }

    /// Bytes that loads moved over the links of other GPUs.
    pub fn relayed_bytes(&self) -> u64 {
        self.rails.relayed_bytes()
    }

    /// Bytes that loads moved through the staging ring of their own GPU.
    pub fn staged_bytes(&self) -> u64 {
        self.rails.staged_bytes()
    }

    /// As [`Rails::unstaged_loads`].
    pub fn unstaged_loads(&self) -> u64 {
        self.rails.unstaged_loads()
    }

    /// For each direction, the length in bytes from which on an idle GPU uses copy engines.
    pub fn engine_bytes(&self) -> [(&'static str, u64); 2] {
        let of = |direction| self.calibrated.1.thresholds(direction).batch_bytes;
        [("host_to_device", of(Direction::HostToDevice)), ("device_to_host", of(Direction::DeviceToHost))]
    }

    /// The rails for loads of an engine on this GPU.
    pub(crate) fn loader(&self, gpu: &Gpu, engine_id: &str) -> Loader {
        self.rails.loader(gpu, engine_id)
    }

    /// The pool, and the addresses at which its pinned parts meet.
    pub(crate) fn pool(&self) -> (Arc<PinnedPool>, &[u64]) {
        (Arc::clone(&self.pool), self.pool.pinned.seams())
    }

    /// The calibration for GPUs of this one's name; the default if no such GPU was measured.
    pub(crate) fn calibration(&self, gpu: &Gpu) -> Calibration {
        let (name, calibration) = &self.calibrated;
        if *name == gpu.info().name { calibration.clone() } else { Calibration::default() }
    }

    /// Bytes that loads moved over the link of each GPU, by ordinal.
    pub fn bytes_by_link(&self) -> BTreeMap<u32, u64> {
        self.rails.bytes_by_link()
    }

    /// The GPU with this UUID, opened if it is not.
    pub(crate) fn open(&self, uuid: [u8; 16]) -> Result<Gpu, GpuError> {
        let mut opened = self.opened.lock();
        if let Some(gpu) = opened.get(&uuid) {
            return Ok(gpu.clone());
        }
        let gpu = Gpu::open_uuid(Arc::clone(&self.driver), uuid)?;
        opened.insert(uuid, gpu.clone());
        Ok(gpu)
    }
}

/// The measured calibration; the default if there was no measurement, or it failed.
fn calibration(measured: Option<Result<Calibration, GpuError>>) -> Calibration {
    match measured {
        Some(Ok(measured)) => {
            let of = |direction| measured.thresholds(direction).batch_bytes >> 10;
            let (to_device, to_host) = (of(Direction::HostToDevice), of(Direction::DeviceToHost));
            // Log: the daemon measured from which length on copy engines serve this host's first GPU
            // (`--calibrate`).
            tracing::info!(
                host_to_device_kib = to_device,
                device_to_host_kib = to_host,
                "GPU calibrated: copy engines are as fast as the kernel from these lengths on"
            );
            measured
        }
        Some(Err(error)) => {
            // Log: the measurement at the start failed; copies work, but may be slower on another GPU than an
            // H200. Do: mend what the error names, or set `--calibrate off`.
            tracing::warn!(%error, "cannot calibrate the GPU; using the thresholds of an H200");
            Calibration::default()
        }
        None => Calibration::default(),
    }
}

#[cfg(test)]
mod tests {
    use kvlane_fake_gpu::{FakeDriver, FakeOptions};
    use kvlane_gpu::Thresholds;
    use kvlane_memory::{ArenaOptions, HugePages, Numa};

    use super::*;

    /// Starts on a pool of so many bytes, and on a fake GPU whose `nth` allocation fails, if one does.
    fn engine_bytes(pool_bytes: u64, calibrate: bool, fails: Option<u64>) -> [(&'static str, u64); 2] {
        let options =
            ArenaOptions { bytes: pool_bytes, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
        let arena = Arc::new(Arena::create(&options, &|_| {}).unwrap());
        let fake = Arc::new(FakeDriver::new(FakeOptions::default()).unwrap());
        if let Some(nth) = fails {
            fake.fail_call(0, Some("cuMemAlloc"), nth, 2);
        }
        let driver = Arc::clone(&fake) as Arc<dyn Driver>;
        let gpus = Gpus::start(driver, arena, RailOptions::default(), calibrate).unwrap();
        assert_eq!(calibrate && fails.is_none() && pool_bytes > 2 << 20, !fake.log().is_empty());
        gpus.engine_bytes()
    }

    #[test]
    fn a_gpu_is_measured_where_that_is_wanted_and_works_and_taken_as_usual_elsewhere() {
        let of = |direction| Thresholds::idle(direction).batch_bytes;
        let usual = [
            ("host_to_device", of(Direction::HostToDevice)),
            ("device_to_host", of(Direction::DeviceToHost)),
        ];
        assert_eq!(engine_bytes(4 << 20, false, None), usual);
        assert_eq!(engine_bytes(4 << 20, true, Some(1)), usual);
        assert_eq!(engine_bytes(1 << 20, true, None), usual);
        for (_, bytes) in engine_bytes(4 << 20, true, None) {
            assert!((16 << 10..=2 << 20).contains(&bytes) && bytes.is_power_of_two(), "{bytes}");
        }
    }
}
