//! [`Rails`]: a load for one GPU also uses the links between other GPUs and the host.
//!
//! ```text
//!  host memory --own link---------------------------------> memory of the engine, on the target
//!      |                                                        ^
//!      +--link of a rail--> staging ring on the rail --NVLink---+   the target reads the slots and scatters them
//! ```
//! Streams wait for each other: a slot is filled after its last content was read, and read after it was filled. While it
//! enqueues, the host waits only for free tables of the kernel.
//!
//! A load of short pieces goes through a staging ring on the target itself in the same way (it is *staged*). Copy engines
//! bring long runs at the link's full rate, and a kernel scatters the pieces within the GPU's memory in a fraction of that
//! time.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::copier::{Copier, Enqueued};
use crate::device::Gpu;
use crate::driver::{Copy, DeviceInfo, Driver};
use crate::error::GpuError;
use crate::plan::{Direction, KERNEL_ALIGNMENT, Thresholds};
use crate::rail_options::{RailChoice, RailOptions, Staging};
use crate::relay::Relay;
use crate::ring::{Making, Rail, Target};
use crate::split::{Shares, parts, split, split_among};
use crate::stream::Stream;

/// The GPUs of a host that may serve as rails, and counts of the bytes over all links.
#[derive(Debug)]
pub struct Rails {
    driver: Arc<dyn Driver>,
    options: RailOptions,
    seams: Vec<u64>,
    chosen: Vec<DeviceInfo>,
    /// By ordinal; None if the GPU cannot be opened.
    opened: Mutex<HashMap<u32, Option<Arc<Rail>>>>,
    traffic: Mutex<Traffic>,
    relayed: AtomicU64,
    staged: AtomicU64,
    /// Loads that should have been staged, but their ring was in use or had failed.
    unstaged: AtomicU64,
    /// Loaded bytes by the ordinal of the GPU whose link carried them.
    by_link: Mutex<BTreeMap<u32, u64>>,
}

#[derive(Debug, Default)]
struct Traffic {
    /// Loads in progress by the ordinal of their GPU.
    loads: HashMap<u32, u32>,
    /// The GPU of each loader of a team.
    teams: HashMap<String, Vec<u32>>,
}

impl Rails {
    /// Chooses the GPUs, and opens none before a load may need it. `seams` are those of the host memory that loads read
    /// ([`crate::Pinned::seams`]).
    pub fn new(driver: Arc<dyn Driver>, seams: &[u64], options: RailOptions) -> Result<Arc<Rails>, GpuError> {
        let RailOptions { slot_bytes, slots, blocks, .. } = options;
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(KERNEL_ALIGNMENT) || slots == 0 || blocks == 0 {
            let wanted = format!("{slots} slots of {slot_bytes} bytes, read by {blocks} thread blocks");
            return Err(GpuError::Invalid(format!("{wanted}, make no ring")));
        }
        let chosen = options.choice.among(driver.devices()?)?;
        let (opened, traffic) = (Mutex::default(), Mutex::default());
        let by_link = driver.devices()?.into_iter().map(|device| (device.ordinal, 0)).collect();
        let by_link = Mutex::new(by_link);
        let seams = seams.to_vec();
        let [relayed, staged, unstaged] = [const { AtomicU64::new(0) }; 3];
        Ok(Arc::new(Rails {
            driver,
            options,
            seams,
            chosen,
            opened,
            traffic,
            relayed,
            staged,
            unstaged,
            by_link,
        }))
    }

    /// The ordinals of the chosen GPUs.
    pub fn chosen(&self) -> Vec<u32> {
        self.chosen.iter().map(|device| device.ordinal).collect()
    }

    /// Bytes that came over rails in loads that succeeded.
    pub fn relayed_bytes(&self) -> u64 {
        self.relayed.load(Ordering::Relaxed)
    }

    /// Bytes that came through the staging ring of their own GPU in loads that succeeded.
    pub fn staged_bytes(&self) -> u64 {
        self.staged.load(Ordering::Relaxed)
    }

    /// Loads that should have been staged and came piece by piece, because their ring was in use or had failed.
    pub fn unstaged_loads(&self) -> u64 {
        self.unstaged.load(Ordering::Relaxed)
    }

    /// Counts a load that was not staged, and logs the first.
    fn count_unstaged(&self, gpu: u32) {
        if self.unstaged.fetch_add(1, Ordering::Relaxed) == 0 {
            // Log: the fast way for short pieces was in use or had failed; the load worked. Do: nothing, unless
            // `kvlane_loads_unstaged_total` grows quickly.
            tracing::info!(
                once = true,
                gpu,
                "staging ring busy or failed; a load of short pieces goes piece by piece, which is slower. \
                 kvlane_loads_unstaged_total counts such loads"
            );
        }
    }

    /// Bytes over the link of each GPU, by ordinal, in loads that succeeded.
    pub fn bytes_by_link(&self) -> BTreeMap<u32, u64> {
        self.by_link.lock().clone()
    }

    fn count(&self, link: u32, bytes: u64) {
        *self.by_link.lock().entry(link).or_default() += bytes;
    }

    /// Counts the bytes through the rings of a load that succeeded, and returns the bytes of each link.
    pub(crate) fn count_rings(&self, relay: &mut Relay<'_>) -> Vec<(u32, u64)> {
        let by_link = relay.take_bytes();
        by_link.iter().for_each(|(link, bytes)| self.count(*link, *bytes));
        by_link
    }

    pub(crate) fn making<'a>(&'a self, pulls: &'a Thresholds) -> Making<'a> {
        Making { options: &self.options, seams: &self.seams, pulls }
    }

    pub(crate) fn options(&self) -> &RailOptions {
        &self.options
    }

    /// Opens the chosen GPUs now, so that no engine's start waits for it. With [`RailChoice::Auto`] only GPUs that NVLink joins
    /// with another one are opened. A GPU that cannot be opened is left out. Returns the ordinals of the open ones.
    pub fn open_all(&self) -> Vec<u32> {
        let chosen = self.chosen();
        let is_named = matches!(self.options.choice, RailChoice::List(_));
        let linked = |gpu: &u32, other: &u32| self.driver.is_linked(*gpu, *other).unwrap_or(false);
        let is_joined = |gpu: &u32| chosen.iter().any(|other| other != gpu && linked(gpu, other));
        let wanted = chosen.iter().copied().filter(|gpu| is_named || is_joined(gpu));
        wanted.filter(|gpu| self.opened(*gpu).is_some()).collect()
    }

    fn opened(&self, gpu: u32) -> Option<Arc<Rail>> {
        let mut opened = self.opened.lock();
        let rail = opened.entry(gpu).or_insert_with(|| match Gpu::open(Arc::clone(&self.driver), gpu) {
            Ok(gpu) => Some(Arc::new(Rail::new(gpu))),
            Err(error) => {
                // Log: this GPU is not used as a rail; loads use the others. Do: mend what the error names, often
                // a lack of GPU memory, or leave it out of `--rails`.
                tracing::warn!(once = true, gpu, %error, "cannot open this GPU as a rail");
                None
            }
        });
        rail.clone()
    }

    /// A loader for one GPU. Loaders of a `team` load at the same time, as the workers of an engine do. So none uses the link
    /// of another one's GPU, and each leaves the others their part of the remaining links. Opens the rails that the target
    /// reaches, which may take a second.
    pub fn loader(self: &Arc<Self>, target: &Gpu, team: &str) -> Loader {
        let own = target.info().ordinal;
        let others = self.chosen.iter().filter(|device| device.ordinal != own);
        let reached: Vec<Arc<Rail>> = others.filter_map(|device| self.reach(target, device)).collect();
        if self.chosen.iter().any(|device| device.ordinal != own) {
            let rails: Vec<u32> = reached.iter().map(|rail| rail.ordinal()).collect();
            // Log: a worker on this GPU registered; these other GPUs lend their links to its loads (`--rails`).
            tracing::info!(gpu = own, ?rails, "loads to this GPU may use rails");
        }
        self.traffic.lock().teams.entry(team.to_owned()).or_default().push(own);
        let lends = self.chosen.iter().any(|device| device.ordinal == own);
        // The target is open already.
        let rail = || Arc::new(Rail::new(target.clone()));
        let own = self.opened.lock().entry(own).or_default().get_or_insert_with(rail).clone();
        Loader { rails: Arc::clone(self), target: target.clone(), team: team.to_owned(), reached, own, lends }
    }

    /// This device as a rail for the target, if the target can read its memory.
    fn reach(&self, target: &Gpu, device: &DeviceInfo) -> Option<Arc<Rail>> {
        let gpu = device.ordinal;
        let is_named = matches!(self.options.choice, RailChoice::List(_));
        // Before the device is opened, because the context of a GPU that cannot serve would only take memory.
        if !is_named && !self.driver.is_linked(target.info().ordinal, gpu).unwrap_or(false) {
            return None;
        }
        let rail = self.opened(gpu)?;
        match target.enable_peer(&rail.gpu) {
            Ok(()) => Some(rail),
            Err(error) => {
                tracing::debug!(gpu, target = target.info().ordinal, %error, "GPU cannot serve as a rail");
                None
            }
        }
    }
}

/// Begins the loads to one GPU.
#[derive(Debug)]
pub struct Loader {
    rails: Arc<Rails>,
    target: Gpu,
    team: String,
    reached: Vec<Arc<Rail>>,
    /// The staging ring on the target itself.
    own: Arc<Rail>,
    /// Whether the target serves as a rail for other GPUs.
    lends: bool,
}

impl Loader {
    /// Whether a load of `bytes` is worth sharing among `gpus` GPUs, and the target reaches as many ([`crate::Together`]).
    pub fn may_share(&self, bytes: u64, gpus: usize) -> bool {
        bytes >= self.rails.options.least_bytes && self.own().is_some() && self.reached.len() + 1 >= gpus
    }

    /// Whether a load is staged: brought in `runs` of host memory and scattered into `pieces` on the GPU. Pieces that are too
    /// short for copy engines would need a kernel for as long as the load takes over the link. Meanwhile the engine computes
    /// on parts that have arrived, and its kernels would take turns with that one. If the runs are as short as the pieces, or
    /// the GPU has no kernel, staging gains nothing.
    pub fn staging(&self, bytes: u64, pieces: usize, runs: usize) -> Staging {
        let RailOptions { staging, stage_below, stage_beside_rails_below, .. } = self.rails.options;
        let wins_below = |limit: u64| {
            let are_short = |count: usize| bytes < limit.saturating_mul(count as u64);
            are_short(pieces) && !are_short(runs)
        };
        match () {
            () if !staging || !self.target.methods().kernel => Staging::Off,
            () if wins_below(stage_below) => Staging::On,
            () if wins_below(stage_beside_rails_below) => Staging::BesideRails,
            () => Staging::Off,
        }
    }

    pub(crate) fn rails(&self) -> &Arc<Rails> {
        &self.rails
    }

    pub(crate) fn target(&self) -> &Gpu {
        &self.target
    }

    /// The staging ring on the target itself, if the target serves as a rail.
    pub(crate) fn own(&self) -> Option<&Rail> {
        self.lends.then_some(&*self.own)
    }

    /// Whether the target can read the ring of this GPU.
    pub(crate) fn reads(&self, gpu: u32) -> bool {
        self.target.info().ordinal == gpu || self.reached().contains(&gpu)
    }

    /// The ordinals of the GPUs whose links its loads may use.
    pub fn reached(&self) -> Vec<u32> {
        self.reached.iter().map(|rail| rail.ordinal()).collect()
    }

    /// Begins a load of `bytes`. Its writes come after the work that is in the target's `stream` by now. The load takes rails
    /// that no other load uses and whose own GPU has no load. Loads that begin later share the links with this one. `pulls`
    /// decides how the target reads a ring. A staged load ([`Loader::staging`]) also takes the ring on the target, if no other
    /// load uses it.
    pub fn begin(&self, stream: &Stream, bytes: u64, pulls: &Thresholds, staging: Staging) -> RailLoad<'_> {
        let (idle, most) = self.count_and_choose();
        let mut relay = Relay::new(Vec::new());
        let mut is_staged = false;
        if bytes >= self.rails.options.least_bytes {
            let targets = [Target { gpu: &self.target, stream }];
            let making = self.rails.making(pulls);
            let mut rings: Vec<_> =
                idle.into_iter().filter_map(|rail| rail.take(&targets, making)).take(most).collect();
            let wanted = match staging {
                Staging::Off => false,
                Staging::BesideRails => !rings.is_empty(),
                Staging::On => true,
            };
            let own = wanted.then(|| self.own.take(&targets, making)).flatten();
            is_staged = own.is_some();
            if wanted && !is_staged {
                self.rails.count_unstaged(self.target.info().ordinal);
            }
            rings.splice(0..0, own);
            relay = Relay::new(rings);
        }
        RailLoad { loader: self, relay, staging: is_staged, direct_bytes: 0, failed: false }
    }

    /// Ends the count of a load to this GPU.
    pub(crate) fn uncount(&self) {
        if let Some(loads) = self.rails.traffic.lock().loads.get_mut(&self.target.info().ordinal) {
            *loads -= 1;
        }
    }

    /// Counts a load to this GPU.
    pub(crate) fn count(&self) {
        *self.rails.traffic.lock().loads.entry(self.target.info().ordinal).or_default() += 1;
    }

    /// Counts a load, and returns the rails whose own link is idle and how many of them this load may take.
    fn count_and_choose(&self) -> (Vec<&Rail>, usize) {
        self.count();
        let traffic = self.rails.traffic.lock();
        let team: &[u32] = traffic.teams.get(&self.team).map_or(&[], Vec::as_slice);
        let outside = self.reached.iter().filter(|rail| !team.contains(&rail.ordinal()));
        let most = outside.clone().count() / team.len().max(1);
        let is_idle = |rail: &&Arc<Rail>| traffic.loads.get(&rail.ordinal()).is_none_or(|loads| *loads == 0);
        (outside.filter(is_idle).map(Arc::as_ref).collect(), most)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        let mut traffic = self.rails.traffic.lock();
        if let Some(team) = traffic.teams.get_mut(&self.team) {
            let own = team.iter().position(|gpu| *gpu == self.target.info().ordinal);
            own.map(|index| team.swap_remove(index));
            if team.is_empty() {
                traffic.teams.remove(&self.team);
            }
        }
    }
}

/// A load in progress. Call [`RailLoad::synchronize`] before the memory is used otherwise; a drop waits too.
#[derive(Debug)]
pub struct RailLoad<'a> {
    loader: &'a Loader,
    relay: Relay<'a>,
    /// Whether the first ring is on the target.
    staging: bool,
    direct_bytes: u64,
    failed: bool,
}

impl RailLoad<'_> {
    /// The number of rails that this load uses.
    pub fn rails(&self) -> usize {
        self.relay.rings().len() - usize::from(self.staging)
    }

    /// Whether the load goes through the staging ring on the target.
    pub fn is_staged(&self) -> bool {
        self.staging
    }

    /// Enqueues copies from pinned host memory to the target: some by `direct` or through the target's staging ring, the
    /// others over rails. Later work in the target's stream comes after all of them. It blocks only while launches use all
    /// tables of a kernel. After an error some copies may have been enqueued.
    ///
    /// # Safety
    /// As for [`Copier::enqueue`], until the caller has waited for [`RailLoad::synchronize`] and then for the copier's stream.
    /// The copier's stream is the one with which the load began.
    pub unsafe fn enqueue(&mut self, direct: &mut Copier, copies: &[Copy]) -> Result<Enqueued, GpuError> {
        // SAFETY: the caller's promise.
        let enqueued = unsafe { self.enqueue_all(direct, copies) };
        self.failed |= enqueued.is_err();
        enqueued
    }

    /// # Safety
    /// As for [`RailLoad::enqueue`].
    unsafe fn enqueue_all(&mut self, direct: &mut Copier, copies: &[Copy]) -> Result<Enqueued, GpuError> {
        let bytes = |copies: &[Copy]| copies.iter().map(|copy| copy.len).sum::<u64>();
        if self.relay.rings().is_empty() {
            self.direct_bytes += bytes(copies);
            // SAFETY: the caller's promise.
            return unsafe { direct.enqueue(copies, Direction::HostToDevice) };
        }
        let slot_bytes = self.loader.rails.options.slot_bytes;
        let (own, relayed) = match self.staging {
            true => (Vec::new(), split_among(copies, self.relay.rings().len(), slot_bytes)),
            false => {
                let Shares { direct, relayed } = split(copies, self.rails(), slot_bytes);
                (direct, relayed)
            }
        };
        self.direct_bytes += bytes(&own);
        let shares = [relayed];
        // In turns, because calls for thousands of copies would keep the other links idle. A launch of the kernel is one call
        // for thousands of copies.
        let part_bytes = if direct.may_launch(&own) { 16 * slot_bytes } else { slot_bytes };
        let mut direct_parts = parts(&own, part_bytes);
        let mut enqueued = Enqueued::default();
        for turn in 0.. {
            // SAFETY: the caller's promise, also below.
            let relayed = unsafe { self.relay.turn(&shares, turn)? };
            match direct_parts.next() {
                Some(part) => {
                    // Work in the target's stream waits for rails. So this waits for room here, where a lost rail is seen.
                    self.relay.wait_until(|_| direct.has_room(part))?;
                    // SAFETY: as above.
                    enqueued += unsafe { direct.enqueue(part, Direction::HostToDevice)? };
                }
                None if !relayed => break,
                None => {}
            }
        }
        self.relay.join(0, direct.stream())?;
        Ok(enqueued)
    }

    /// Waits for the copies over rails, and returns their error.
    pub fn synchronize(&mut self) -> Result<(), GpuError> {
        self.synchronize_or(|| false)
    }

    /// The same. If a rail is lost, work in the target's streams waits for it until `abandoned` says that wrong bytes in the
    /// target's memory do no harm.
    pub fn synchronize_or(&mut self, abandoned: impl FnMut() -> bool) -> Result<(), GpuError> {
        let outcome = self.relay.finish(abandoned);
        self.failed |= outcome.is_err();
        if !self.failed {
            let own = self.loader.target.info().ordinal;
            self.loader.rails.count(own, std::mem::take(&mut self.direct_bytes));
            for (link, bytes) in self.loader.rails.count_rings(&mut self.relay) {
                let kind = if link == own { &self.loader.rails.staged } else { &self.loader.rails.relayed };
                kind.fetch_add(bytes, Ordering::Relaxed);
            }
        }
        outcome
    }
}

impl Drop for RailLoad<'_> {
    fn drop(&mut self) {
        // A caller that needs the outcome has called `synchronize` before.
        let _ = self.synchronize();
        self.relay.give_back();
        self.loader.uncount();
    }
}
