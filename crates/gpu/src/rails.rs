//! Rails: the links of other GPUs to the host, over which a load for one GPU also comes.
//!
//! ```text
//!  host memory --own link---------------------------------> memory of the engine, on the target
//!      |                                                        ^
//!      +--link of a rail--> ring of slots on the rail --NVLink--+   the target reads the slots and scatters them
//! ```
//! Everything is enqueued in streams that wait for each other, nothing on the host does: a slot is filled after its last
//! content was read, and read after it was filled.

use std::collections::HashMap;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::copier::{Copier, CopierOptions, Direction, Enqueued};
use crate::device::{DeviceMemory, Gpu, uuid_text};
use crate::driver::{Copy, DeviceInfo, Driver, EventScope, Priority};
use crate::error::GpuError;
use crate::plan::{KERNEL_ALIGNMENT, Thresholds};
use crate::split::{Chunk, split};
use crate::stream::{Event, Stream};

/// Entries of a table of the kernel: more than a slot of the default size has pieces.
const TABLE_ENTRIES: usize = 1024;
/// Tables of one rail in use at a time; made as they are needed.
const TABLES: usize = 256;

/// Which GPUs lend their links.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RailChoice {
    /// None.
    Off,
    /// All that NVLink joins with the GPU that is loaded.
    #[default]
    Auto,
    /// These, by ordinal or UUID, where kernels of the GPU that is loaded reach their memory.
    List(Vec<String>),
}

impl FromStr for RailChoice {
    type Err = GpuError;

    /// `auto`, `off`, or ordinals and UUIDs with commas between them.
    fn from_str(text: &str) -> Result<RailChoice, GpuError> {
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        let is_name = |name: &String| name.starts_with("GPU-") || name.parse::<u32>().is_ok();
        match text {
            "auto" => Ok(RailChoice::Auto),
            "off" => Ok(RailChoice::Off),
            _ if names.iter().all(is_name) => Ok(RailChoice::List(names)),
            _ => Err(GpuError::Invalid(format!(
                "'{text}' is neither auto, off, nor a list of GPUs such as 1,2"
            ))),
        }
    }
}

impl RailChoice {
    /// Those of the devices that are chosen; an error where one is named that is not there.
    pub fn among(&self, devices: Vec<DeviceInfo>) -> Result<Vec<DeviceInfo>, GpuError> {
        let names = match self {
            RailChoice::Off => return Ok(Vec::new()),
            RailChoice::Auto => return Ok(devices),
            RailChoice::List(names) => names,
        };
        let is = |device: &DeviceInfo, name: &String| {
            name.parse() == Ok(device.ordinal) || *name == uuid_text(device.uuid)
        };
        match names.iter().find(|name| !devices.iter().any(|device| is(device, name))) {
            Some(unknown) => Err(GpuError::NoSuchDevice(unknown.clone())),
            None => {
                let named = |device: &DeviceInfo| names.iter().any(|name| is(device, name));
                Ok(devices.into_iter().filter(named).collect())
            }
        }
    }
}

/// How rails are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailOptions {
    /// Which GPUs.
    pub choice: RailChoice,
    /// Bytes of a slot, a multiple of [`KERNEL_ALIGNMENT`].
    pub slot_bytes: u64,
    /// Slots of a ring: with two, one is filled while the other is read.
    pub slots: usize,
    /// Smaller loads use no rails.
    pub least_bytes: u64,
    /// Thread blocks of the kernel that reads a slot: few, since the rail's link is slow and the compute wants the rest.
    pub blocks: u32,
}

impl Default for RailOptions {
    fn default() -> RailOptions {
        RailOptions {
            choice: RailChoice::Auto,
            slot_bytes: 8 << 20,
            slots: 8,
            least_bytes: 32 << 20,
            blocks: 8,
        }
    }
}

/// The GPUs of a host that may lend their links, and what goes over all links.
#[derive(Debug)]
pub struct Rails {
    driver: Arc<dyn Driver>,
    options: RailOptions,
    seams: Vec<u64>,
    chosen: Vec<DeviceInfo>,
    /// By ordinal; None where one cannot be opened.
    opened: Mutex<HashMap<u32, Option<Arc<Rail>>>>,
    traffic: Mutex<Traffic>,
    relayed: AtomicU64,
}

#[derive(Debug, Default)]
struct Traffic {
    /// Loads under way, by the ordinal of their GPU.
    loads: HashMap<u32, u32>,
    /// The GPU of each loader of a team.
    teams: HashMap<String, Vec<u32>>,
}

/// A GPU that lends its link, to one load at a time.
#[derive(Debug)]
struct Rail {
    gpu: Gpu,
    ring: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Unused,
    /// No work on it is under way.
    Ready(Box<Ring>),
    /// In use while it is locked; else something failed, and it is not used any more.
    Taken,
}

/// Memory of a rail that bytes pass through. Fields are dropped in order: the memory last.
#[derive(Debug)]
struct Ring {
    /// By the ordinal of the GPU that reads.
    pulls: HashMap<u32, Pull>,
    up: Copier,
    /// When each slot was filled.
    filled: Vec<Event>,
    /// The slot that is filled next.
    next: usize,
    memory: DeviceMemory,
}

/// How a target reads a ring.
#[derive(Debug)]
struct Pull {
    copier: Copier,
    /// When each slot was read.
    drained: Vec<Event>,
    /// What has to be over before the target's memory is written.
    start: Event,
}

impl Rails {
    /// The GPUs that are chosen. None of them is opened before it may be needed. `seams` are those of the host memory
    /// that is loaded from ([`crate::Pinned::seams`]).
    pub fn new(driver: Arc<dyn Driver>, seams: &[u64], options: RailOptions) -> Result<Arc<Rails>, GpuError> {
        let RailOptions { slot_bytes, slots, blocks, .. } = options;
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(KERNEL_ALIGNMENT) || slots == 0 || blocks == 0 {
            let asked = format!("{slots} slots of {slot_bytes} bytes, read by {blocks} thread blocks");
            return Err(GpuError::Invalid(format!("{asked}, make no ring")));
        }
        let chosen = options.choice.among(driver.devices()?)?;
        let (opened, traffic) = (Mutex::default(), Mutex::default());
        let seams = seams.to_vec();
        Ok(Arc::new(Rails { driver, options, seams, chosen, opened, traffic, relayed: AtomicU64::new(0) }))
    }

    /// The ordinals of the GPUs that were chosen.
    pub fn chosen(&self) -> Vec<u32> {
        self.chosen.iter().map(|device| device.ordinal).collect()
    }

    /// Bytes that came over rails so far, in loads that succeeded.
    pub fn relayed_bytes(&self) -> u64 {
        self.relayed.load(Ordering::Relaxed)
    }

    /// For loads to one GPU. Loaders of a `team` load at the same time, as the workers of an engine do: none uses the
    /// link of another one's GPU, and each leaves the others their part of the rest. Opens the rails that the target
    /// reaches, which may take a second.
    pub fn loader(self: &Arc<Self>, target: &Gpu, team: &str) -> Loader {
        let own = target.info().ordinal;
        let others = self.chosen.iter().filter(|device| device.ordinal != own);
        let reached: Vec<Arc<Rail>> = others.filter_map(|device| self.reach(target, device)).collect();
        if self.chosen.iter().any(|device| device.ordinal != own) {
            let rails: Vec<u32> = reached.iter().map(|rail| rail.ordinal()).collect();
            tracing::info!(gpu = own, ?rails, "GPUs whose links loads may use too");
        }
        self.traffic.lock().teams.entry(team.to_owned()).or_default().push(own);
        Loader { rails: Arc::clone(self), target: target.clone(), team: team.to_owned(), reached }
    }

    /// A rail, if it can be one for this GPU.
    fn reach(&self, target: &Gpu, device: &DeviceInfo) -> Option<Arc<Rail>> {
        let gpu = device.ordinal;
        let mut opened = self.opened.lock();
        let rail = opened.entry(gpu).or_insert_with(|| match Gpu::open(Arc::clone(&self.driver), gpu) {
            Ok(gpu) => Some(Arc::new(Rail { gpu, ring: Mutex::new(State::Unused) })),
            Err(error) => {
                tracing::warn!(gpu, %error, "a GPU lends its link to no load, since it cannot be opened");
                None
            }
        });
        let rail = Arc::clone(rail.as_ref()?);
        let is_named = matches!(self.options.choice, RailChoice::List(_));
        let reached = match is_named || target.is_linked(&rail.gpu).unwrap_or(false) {
            true => target.enable_peer(&rail.gpu),
            false => Err(GpuError::Unsupported { operation: "a rail", reason: "no NVLink".into() }),
        };
        match reached {
            Ok(()) => Some(rail),
            Err(error) => {
                tracing::debug!(gpu, target = target.info().ordinal, %error, "a GPU is no rail");
                None
            }
        }
    }
}

impl Rail {
    fn ordinal(&self) -> u32 {
        self.gpu.info().ordinal
    }
}

/// Begins the loads to one GPU.
#[derive(Debug)]
pub struct Loader {
    rails: Arc<Rails>,
    target: Gpu,
    team: String,
    reached: Vec<Arc<Rail>>,
}

impl Loader {
    /// The ordinals of the GPUs whose links its loads may use.
    pub fn reached(&self) -> Vec<u32> {
        self.reached.iter().map(|rail| rail.ordinal()).collect()
    }

    /// Begins a load of so many bytes. What it writes comes after what is in the target's `stream` by now. It takes the
    /// rails that no other load uses and whose own GPU is not being loaded; a load that begins later shares the links
    /// with this one. `pulls` decides how the target reads a rail's memory.
    pub fn begin(&self, stream: &Stream, bytes: u64, pulls: &Thresholds) -> Loading<'_> {
        let (idle, most) = self.count_and_choose();
        let mut loading = Loading { loader: self, lent: Vec::new(), relayed: 0, under_way: false };
        if bytes >= self.rails.options.least_bytes {
            loading
                .lent
                .extend(idle.into_iter().filter_map(|rail| self.take(rail, stream, pulls)).take(most));
        }
        loading
    }

    /// Counts a load, and answers the rails whose own link is idle and how many of them this load may take.
    fn count_and_choose(&self) -> (Vec<&Rail>, usize) {
        let mut traffic = self.rails.traffic.lock();
        *traffic.loads.entry(self.target.info().ordinal).or_default() += 1;
        let team: &[u32] = traffic.teams.get(&self.team).map_or(&[], Vec::as_slice);
        let outside = self.reached.iter().filter(|rail| !team.contains(&rail.ordinal()));
        let most = outside.clone().count() / team.len().max(1);
        let is_idle = |rail: &&Arc<Rail>| traffic.loads.get(&rail.ordinal()).is_none_or(|loads| *loads == 0);
        (outside.filter(is_idle).map(Arc::as_ref).collect(), most)
    }

    /// A rail with all that this load needs, unless another load uses it.
    fn take<'a>(&'a self, rail: &'a Rail, stream: &Stream, pulls: &Thresholds) -> Option<Lent<'a>> {
        let mut state = rail.ring.try_lock()?;
        let ring = match std::mem::replace(&mut *state, State::Taken) {
            State::Ready(ring) => Ok(ring),
            State::Unused => Ring::new(rail, &self.rails).map(Box::new),
            State::Taken => return None,
        };
        let ready = ring.and_then(|mut ring| {
            let known = ring.pulls.remove(&self.target.info().ordinal);
            let mut pull = known.map_or_else(|| Pull::new(&self.target, &self.rails.options), Ok)?;
            pull.copier.set_thresholds(pulls.clone());
            pull.start.record(stream)?;
            pull.copier.stream().wait(&pull.start)?;
            Ok((ring, pull))
        });
        match ready {
            Ok((ring, pull)) => {
                let slot_bytes = self.rails.options.slot_bytes;
                Some(Lent { rail, state, ring, pull, slot_bytes, last: None, failed: false })
            }
            Err(error) => {
                warn_of_rail(rail, &error);
                None
            }
        }
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

/// Told once of each rail, since it is not used any more.
fn warn_of_rail(rail: &Rail, error: &GpuError) {
    tracing::warn!(gpu = rail.ordinal(), %error, "a GPU lends its link to no load any more");
}

impl Ring {
    fn new(rail: &Rail, rails: &Rails) -> Result<Ring, GpuError> {
        let RailOptions { slot_bytes, slots, .. } = rails.options;
        let memory = rail.gpu.alloc(slot_bytes * slots as u64)?;
        // Its GPU's own engine comes first.
        let stream = Arc::new(Stream::new(&rail.gpu, Priority::Normal)?);
        let options =
            CopierOptions { use_kernel: false, seams: rails.seams.clone(), ..CopierOptions::default() };
        let filled = events(&rail.gpu, slots)?;
        Ok(Ring { pulls: HashMap::new(), up: Copier::new(stream, options)?, filled, next: 0, memory })
    }
}

impl Pull {
    fn new(target: &Gpu, options: &RailOptions) -> Result<Pull, GpuError> {
        let stream = Arc::new(Stream::new(target, Priority::High)?);
        let drained = events(target, options.slots)?;
        let start = Event::new(target, EventScope::Process)?;
        let options = CopierOptions {
            peer_blocks: options.blocks,
            table_entries: TABLE_ENTRIES,
            tables: TABLES,
            ..CopierOptions::default()
        };
        Ok(Pull { copier: Copier::new(stream, options)?, drained, start })
    }
}

fn events(gpu: &Gpu, count: usize) -> Result<Vec<Event>, GpuError> {
    (0..count).map(|_| Event::new(gpu, EventScope::Process)).collect()
}

/// A rail in the hands of one load.
#[derive(Debug)]
struct Lent<'a> {
    rail: &'a Rail,
    state: MutexGuard<'a, State>,
    ring: Box<Ring>,
    pull: Pull,
    slot_bytes: u64,
    /// The slot that was read last.
    last: Option<usize>,
    failed: bool,
}

impl Lent<'_> {
    /// Enqueues a chunk's way through a slot.
    ///
    /// # Safety
    /// As for [`Copier::enqueue`], of the chunk's copies before they were split.
    unsafe fn relay(&mut self, chunk: &Chunk) -> Result<(), GpuError> {
        let Lent { ring, pull, slot_bytes, .. } = self;
        let slot = ring.next;
        ring.next = (slot + 1) % ring.filled.len();
        let address = ring.memory.address() + slot as u64 * *slot_bytes;
        ring.up.stream().wait(&pull.drained[slot])?;
        // SAFETY: the chunk lies inside the slot, which only this load uses and which has been read by then; the caller
        // vouches for the host's side.
        unsafe { ring.up.enqueue(&chunk.gather(address), Direction::HostToDevice)? };
        ring.filled[slot].record(ring.up.stream())?;
        pull.copier.stream().wait(&ring.filled[slot])?;
        // SAFETY: the slot is filled by then and not written again before the event that follows; the target reaches it;
        // the caller vouches for the destinations.
        unsafe { pull.copier.enqueue(&chunk.scatter(address), Direction::Peer)? };
        pull.drained[slot].record(pull.copier.stream())?;
        self.last = Some(slot);
        Ok(())
    }

    /// Takes note of a failure: the rail is not used any more. Told at once, since what else waits for it may last.
    fn note<T>(&mut self, outcome: Result<T, GpuError>) -> Result<T, GpuError> {
        if let Err(error) = &outcome
            && !std::mem::replace(&mut self.failed, true)
        {
            warn_of_rail(self.rail, error);
        }
        outcome
    }

    /// No work is under way.
    fn give_back(mut self, target: u32) {
        if !self.failed {
            self.ring.pulls.insert(target, self.pull);
            *self.state = State::Ready(self.ring);
        }
    }
}

/// A load under way. Whoever enqueued copies calls [`Loading::synchronize`] before the memory is used otherwise; dropping
/// it waits too.
#[derive(Debug)]
pub struct Loading<'a> {
    loader: &'a Loader,
    lent: Vec<Lent<'a>>,
    relayed: u64,
    under_way: bool,
}

impl Loading<'_> {
    /// How many rails this load uses.
    pub fn rails(&self) -> usize {
        self.lent.len()
    }

    /// Enqueues copies from pinned host memory to the target: some by `direct`, the rest over the rails. What is enqueued
    /// in its stream afterwards comes after all of them. It blocks only while all tables of a kernel are in use. After an
    /// error some copies may have been enqueued.
    ///
    /// # Safety
    /// As for [`Copier::enqueue`], until the copier's stream and [`Loading::synchronize`] have been waited for. The
    /// copier's stream is the one that the load began with.
    pub unsafe fn enqueue(&mut self, direct: &mut Copier, copies: &[Copy]) -> Result<Enqueued, GpuError> {
        if self.lent.is_empty() {
            // SAFETY: the caller's promise.
            return unsafe { direct.enqueue(copies, Direction::HostToDevice) };
        }
        self.under_way = true;
        let shares = split(copies, self.lent.len(), self.loader.rails.options.slot_bytes);
        let mut enqueued = Enqueued::default();
        let rounds = shares.relayed.iter().map(Vec::len).max().unwrap_or(0);
        for round in 0..rounds.max(1) {
            // Turn by turn, so that every link soon has something to do.
            for (lent, chunks) in self.lent.iter_mut().zip(&shares.relayed) {
                if let Some(chunk) = chunks.get(round) {
                    // SAFETY: the caller's promise: a share is a part of the copies.
                    let relayed = unsafe { lent.relay(chunk) };
                    lent.note(relayed)?;
                    self.relayed += chunk.bytes();
                }
            }
            if round == 0 {
                // SAFETY: as above.
                enqueued = unsafe { direct.enqueue(&shares.direct, Direction::HostToDevice)? };
            }
        }
        for lent in &self.lent {
            if let Some(slot) = lent.last {
                direct.stream().wait(&lent.pull.drained[slot])?;
            }
        }
        Ok(enqueued)
    }

    /// Waits for what goes over the rails, and reports what failed.
    pub fn synchronize(&mut self) -> Result<(), GpuError> {
        if !std::mem::take(&mut self.under_way) {
            return Ok(());
        }
        let mut outcome = Ok(());
        for lent in &mut self.lent {
            let filled = lent.ring.up.stream().synchronize();
            outcome = outcome.and(lent.note(filled));
        }
        for lent in &mut self.lent {
            let read = lent.pull.copier.stream().synchronize();
            outcome = outcome.and(lent.note(read));
        }
        if outcome.is_ok() && self.lent.iter().all(|lent| !lent.failed) {
            self.loader.rails.relayed.fetch_add(std::mem::take(&mut self.relayed), Ordering::Relaxed);
        }
        outcome
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        // Whoever cares for the outcome has asked.
        let _ = self.synchronize();
        let target = self.loader.target.info().ordinal;
        self.lent.drain(..).for_each(|lent| lent.give_back(target));
        if let Some(loads) = self.loader.rails.traffic.lock().loads.get_mut(&target) {
            *loads -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeDriver, FakeOptions};

    fn chosen(text: &str) -> Result<Vec<u32>, GpuError> {
        let driver = FakeDriver::new(FakeOptions { devices: 3, ..FakeOptions::default() }).unwrap();
        let options = RailOptions { choice: text.parse()?, ..RailOptions::default() };
        Ok(Rails::new(Arc::new(driver), &[], options)?.chosen())
    }

    #[test]
    fn gpus_are_named_by_ordinal_or_uuid() {
        assert_eq!(chosen("auto").unwrap(), [0, 1, 2]);
        assert_eq!(chosen("off").unwrap(), [0u32; 0]);
        assert_eq!(chosen("2, 0").unwrap(), [0, 2]);
        let driver = FakeDriver::new(FakeOptions::default()).unwrap();
        let second = uuid_text(driver.devices().unwrap()[1].uuid);
        assert_eq!(chosen(&format!("0,{second}")).unwrap(), [0, 1]);
    }

    #[test]
    fn what_is_no_gpu_is_named() {
        assert_eq!(chosen("0,7"), Err(GpuError::NoSuchDevice("7".into())));
        assert_eq!(chosen("GPU-0"), Err(GpuError::NoSuchDevice("GPU-0".into())));
        for text in ["", "on", "1,,2", "auto,1", "-1"] {
            assert!(
                matches!(chosen(text), Err(GpuError::Invalid(said)) if said.contains(&format!("'{text}'")))
            );
        }
    }

    #[test]
    fn a_ring_that_holds_nothing_is_refused() {
        let driver: Arc<dyn Driver> = Arc::new(FakeDriver::new(FakeOptions::default()).unwrap());
        let sound = RailOptions::default();
        for options in [
            RailOptions { slots: 0, ..sound.clone() },
            RailOptions { slot_bytes: 0, ..sound.clone() },
            RailOptions { slot_bytes: 24, ..sound.clone() },
            RailOptions { blocks: 0, ..sound },
        ] {
            assert!(matches!(Rails::new(Arc::clone(&driver), &[], options), Err(GpuError::Invalid(_))));
        }
    }
}
