//! GPUs: the pool pinned for their driver, and the memory of engines that lives on them.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_block::{Region, Run};
use kvlane_gpu::{
    AddressMap, CHUNK_BYTES, Calibration, Copier, CopierOptions, Copy, Direction, Driver, Event, Export, Gpu,
    GpuError, HostBuffer, Imported, ImportedChunks, Loader, Loading, Mapped, Pinned, Priority, RailOptions,
    Rails, Stream, Thresholds, Together,
};
use kvlane_memory::{Arena, pidfd_exited, pidfd_exited_within};
use kvlane_proto::v1;
use parking_lot::Mutex;
use thiserror::Error;

use crate::chunks::SharedChunks;
use crate::meetings::{Meetings, Member};
use crate::save_pace::{Pace, cut};

/// Bytes of a fence: nonce, then a little-endian epoch.
const FENCE_BYTES: u64 = 24;
/// Where the second copy of the fence goes in its buffer.
const FENCE_AFTER: u64 = 64;
const FENCE_BUFFER_BYTES: u64 = 4096;
/// Longest time between two looks at an event of an engine that is still computing; the first come sooner.
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// Tables of copies that may be under way, 400 kB each.
const TABLES: usize = 32;
/// Most events that a worker may share: copies that it can have under way.
const EVENTS_MAX: usize = 1024;
/// Most allocations that a worker's regions may lie in.
pub(crate) const ALLOCATIONS_MAX: usize = 4096;

/// The GPU driver, with the pool pinned for it.
pub(crate) struct Gpus {
    driver: Arc<dyn Driver>,
    /// Opened when the first engine on it registers, and kept.
    opened: Mutex<HashMap<[u8; 16], Gpu>>,
    rails: Arc<Rails>,
    /// For GPUs of this name: those of one host and model are alike.
    calibrated: (String, Calibration),
    /// Loads of ranks that hold the same blocks.
    pub(crate) meetings: Meetings,
    /// How long they wait for each other.
    pub(crate) meet_within: Duration,
    /// Before the arena, which it needs.
    pinned: Pinned,
    _arena: Arc<Arena>,
}

impl Gpus {
    /// Pins the pool, and measures the first GPU if it is to.
    pub(crate) fn start(
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
        // SAFETY: the arena is kept below for as long as it is pinned; sessions, which enqueue work on it, wait for
        // that work before they end.
        let pinned = unsafe { Pinned::new(&gpu, address, arena.bytes(), CHUNK_BYTES, |_| {})? };
        // SAFETY: the pool is pinned, and nobody uses it yet.
        let measured = calibrate.then(|| unsafe { Calibration::measure(&gpu, address, arena.bytes()) });
        let calibrated = (first.name, calibration(measured));
        let opened = Mutex::new(HashMap::from([(first.uuid, gpu)]));
        let meet_within = rails.meet_within;
        let rails = Rails::new(Arc::clone(&driver), pinned.seams(), rails)?;
        let meetings = Meetings::default();
        let gpus = Self { driver, opened, rails, meetings, meet_within, calibrated, pinned, _arena: arena };
        tracing::info!(gpus = gpus.describe(), seconds = start.elapsed().as_secs_f64(), "pinned the pool");
        let several = gpus.driver.devices()?.len() > 1 && !gpus.rails.chosen().is_empty();
        if several {
            let start = Instant::now();
            let opened = gpus.rails.open_all();
            let seconds = start.elapsed().as_secs_f64();
            tracing::info!(gpus = ?opened, seconds, "opened the GPUs that may lend their links to loads for others");
        }
        Ok(gpus)
    }

    /// What people call the driver and its devices: "2 x NVIDIA H200 (cuda)".
    pub(crate) fn describe(&self) -> String {
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
    pub(crate) fn relayed_bytes(&self) -> u64 {
        self.rails.relayed_bytes()
    }

    /// Bytes that loads moved through a ring on the GPU that they were for.
    pub(crate) fn staged_bytes(&self) -> u64 {
        self.rails.staged_bytes()
    }

    /// [`Rails::unstaged_loads`]
    pub(crate) fn unstaged_loads(&self) -> u64 {
        self.rails.unstaged_loads()
    }

    /// The directions, and from how many bytes on copy engines copy while a GPU is idle.
    pub(crate) fn engine_bytes(&self) -> [(&'static str, u64); 2] {
        let of = |direction| self.calibrated.1.thresholds(direction).batch_bytes;
        [("host_to_device", of(Direction::HostToDevice)), ("device_to_host", of(Direction::DeviceToHost))]
    }

    /// What was measured of GPUs like this one.
    fn calibration(&self, gpu: &Gpu) -> Calibration {
        let (name, calibration) = &self.calibrated;
        if *name == gpu.info().name { calibration.clone() } else { Calibration::default() }
    }

    /// Bytes that loads brought over the link of each GPU, by ordinal.
    pub(crate) fn bytes_by_link(&self) -> BTreeMap<u32, u64> {
        self.rails.bytes_by_link()
    }

    /// The GPU with this UUID.
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

/// What was measured, or the usual where it was not, or failed.
fn calibration(measured: Option<Result<Calibration, GpuError>>) -> Calibration {
    match measured {
        Some(Ok(measured)) => {
            let of = |direction| measured.thresholds(direction).batch_bytes >> 10;
            let (to_device, to_host) = (of(Direction::HostToDevice), of(Direction::DeviceToHost));
            tracing::info!(
                host_to_device_kib = to_device,
                device_to_host_kib = to_host,
                "measured from which length on copy engines are as fast as the kernel"
            );
            measured
        }
        Some(Err(error)) => {
            tracing::warn!(%error, "the GPU could not be measured; copies go as on an H200");
            Calibration::default()
        }
        None => Calibration::default(),
    }
}

/// Why a copy by the GPU is worth nothing.
#[derive(Debug, Error)]
pub(crate) enum GpuCopyError {
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error("the engine's process has exited")]
    Gone,
    #[error("the engine is at epoch {found} and gave up the copy that it asked for at epoch {asked}")]
    Cancelled { asked: u64, found: u64 },
    #[error("event {0} was not registered")]
    NoSuchEvent(u32),
}

/// A worker's GPU memory, mapped here.
///
/// The fence is read by the GPU itself, in the same stream before and after the blocks: a copy counts only if the
/// engine had not given it up by the time that the last byte was read.
pub(crate) struct GpuMemory {
    map: AddressMap,
    events: Vec<Event>,
    /// Of the fence, here.
    fence: u64,
    nonce: [u8; 16],
    pidfd: OwnedFd,
    saving: Mutex<Lane>,
    loading: Mutex<Lane>,
    loader: Loader,
    /// For loads while nothing computes.
    idle: Calibration,
    /// Unmapped last: the lanes have waited for their work whenever nobody holds them.
    _imports: Vec<Imported>,
    _chunks: Vec<ImportedChunks>,
}

/// The word (its address in the engine, and the value) that says that a part is there.
type Flag = Option<(u64, u32)>;

/// Runs that are followed by a flag.
pub(crate) struct Part {
    pub(crate) runs: Vec<Run>,
    pub(crate) flag: Flag,
}

/// Which way a lane's copies go.
#[derive(Debug)]
enum Way {
    /// To the pool.
    Out,
    /// From the pool, perhaps over the links of other GPUs too and through a ring on this one. How rings are read is
    /// decided by `pulls`.
    In { pulls: Thresholds },
}

/// A stream with what its copies need.
struct Lane {
    stream: Arc<Stream>,
    copier: Copier,
    fences: HostBuffer,
}

impl GpuMemory {
    /// Maps what a worker of an engine exported, and takes what it shared chunk by chunk. Every region must lie in it.
    pub(crate) fn import(
        gpus: &Gpus,
        engine_id: &str,
        worker: &v1::WorkerGpu,
        mut chunks: SharedChunks,
        regions: &[&Region],
        nonce: [u8; 16],
        pidfd: OwnedFd,
    ) -> Result<Self, GpuError> {
        let uuid = worker.device_uuid.as_ref().try_into();
        let uuid = uuid.map_err(|_| GpuError::Invalid("a GPU's UUID has 16 bytes".into()))?;
        if worker.events.is_empty() || worker.events.len() > EVENTS_MAX {
            let count = worker.events.len();
            return Err(GpuError::Invalid(format!("{count} events; 1 to {EVENTS_MAX} are possible")));
        }
        if worker.allocations.len() > ALLOCATIONS_MAX {
            let count = worker.allocations.len();
            return Err(GpuError::Invalid(format!(
                "{count} allocations, at most {ALLOCATIONS_MAX} are possible"
            )));
        }
        let gpu = gpus.open(uuid)?;
        let fence = worker.fence.as_ref().ok_or_else(|| GpuError::Invalid("the fence is missing".into()))?;
        let (chunked, whole): (Vec<_>, Vec<_>) =
            worker.allocations.iter().partition(|allocation| allocation.handle.is_empty());
        let exports = whole.into_iter().chain([fence]).map(|allocation| export(allocation, uuid));
        let imports = exports.map(|export| gpu.import(&export?)).collect::<Result<Vec<_>, _>>()?;
        let chunks = chunked
            .into_iter()
            .map(|allocation| chunks.take(allocation, uuid))
            .collect::<Result<Vec<_>, _>>()?;
        let mapped = chunks.iter().map(ImportedChunks::mapped).collect::<Result<Vec<_>, _>>()?;
        let map = AddressMap::new(imports.iter().map(Mapped::from).chain(mapped))?;
        for region in regions {
            // Validated before: it ends inside the address space.
            map.local(region.base, region.span_bytes().unwrap_or(u64::MAX))?;
        }
        let fence = map.local(fence.base, FENCE_BYTES)?;
        let handles = worker.events.iter().map(|handle| {
            let handle = handle.as_ref().try_into();
            handle.map_err(|_| GpuError::Invalid("an event's handle has 64 bytes".into()))
        });
        let events = handles.map(|handle| Event::open(&gpu, &handle?)).collect::<Result<Vec<_>, _>>()?;
        let memory = Self {
            map,
            events,
            fence,
            nonce,
            pidfd,
            saving: Mutex::new(Lane::new(&gpu, Priority::Normal, gpus.pinned.seams())?),
            loading: Mutex::new(Lane::new(&gpu, Priority::High, gpus.pinned.seams())?),
            loader: gpus.rails.loader(&gpu, engine_id),
            idle: gpus.calibration(&gpu),
            _imports: imports,
            _chunks: chunks,
        };
        let epoch = memory.fence_of(&mut memory.loading.lock());
        match epoch {
            Ok(_) => Ok(memory),
            Err(error) => {
                Err(GpuError::Invalid(format!("the fence does not hold the engine's nonce: {error}")))
            }
        }
    }

    /// Gathers runs into the pool after `event`, for a request made at `epoch`, at its pace.
    ///
    /// # Safety
    /// As for [`kvlane_engine_memory::ProcessVm::copy_out`]; the pool is pinned.
    pub(crate) unsafe fn copy_out(
        &self,
        runs: &[Run],
        pool_base: *mut u8,
        epoch: u64,
        event: Option<u32>,
        pace: &Pace<'_>,
    ) -> Result<(), GpuCopyError> {
        let pool = pool_base.expose_provenance() as u64;
        let mut lane = self.saving.lock();
        self.wait_for_event(event)?;
        let runs = cut(runs);
        let mut left = runs.as_slice();
        loop {
            let begun = Instant::now();
            let (now, later) = pace.next(left);
            // SAFETY: the caller vouches for the pool's bytes, and the map for the engine's; the lane waits for the work.
            let copied = unsafe { self.run(&mut lane, &[(now, None)], pool, Way::Out) };
            // Each part: nobody wants the rest of a save that was given up.
            self.judge(&lane, copied, epoch)?;
            if later.is_empty() {
                return Ok(());
            }
            if pidfd_exited_within(&self.pidfd, pace.rest(begun.elapsed())) {
                return Err(GpuCopyError::Gone);
            }
            left = later;
        }
    }

    /// Waits until a load for a request made at `epoch` may begin: after `event`.
    pub(crate) fn wait_until_wanted(&self, epoch: u64, event: Option<u32>) -> Result<(), GpuCopyError> {
        // A load that was given up while this process was stopped must not be started.
        let found = self.fence_of(&mut self.loading.lock())?;
        if found != epoch {
            return Err(GpuCopyError::Cancelled { asked: epoch, found });
        }
        self.wait_for_event(event)
    }

    /// Scatters a load's runs from the pool, one part after the other, once it has been waited for
    /// ([`Self::wait_until_wanted`]). `load` is of this memory.
    ///
    /// # Safety
    /// As for [`kvlane_engine_memory::OwnMemory::write`]; the pool is pinned.
    pub(crate) unsafe fn copy_in(&self, load: &Member, pool_base: *const u8) -> Result<(), GpuCopyError> {
        let pool = pool_base.expose_provenance() as u64;
        let parts: Vec<(&[Run], Flag)> =
            load.parts.iter().map(|part| (part.runs.as_slice(), part.flag)).collect();
        let mut lane = self.loading.lock();
        lane.copier.set_thresholds(self.thresholds(load, Direction::HostToDevice));
        let way = Way::In { pulls: self.thresholds(load, Direction::Peer) };
        // SAFETY: as in `copy_out`.
        let copied = unsafe { self.run(&mut lane, &parts, pool, way) };
        self.judge(&lane, copied, load.epoch)
    }

    /// What decides between the ways to copy for this load.
    fn thresholds(&self, load: &Member, direction: Direction) -> Thresholds {
        match load.beside_compute {
            true if direction != Direction::Peer => Thresholds::beside_compute(direction),
            _ => self.idle.thresholds(direction),
        }
    }

    /// Whether loads of so many bytes, the same for so many ranks, may share the ranks' links.
    pub(crate) fn may_share(&self, bytes: u64, ranks: usize) -> bool {
        self.loader.may_share(bytes, ranks)
    }

    /// As [`Self::copy_in`] for each member, which all load the same bytes: each link brings a share of them for all. None
    /// where each has to load by itself; then nothing was written.
    ///
    /// # Safety
    /// As for [`Self::copy_in`].
    pub(crate) unsafe fn copy_in_together(
        members: &[Arc<Member>],
        pool_base: *const u8,
    ) -> Option<Vec<Result<(), GpuCopyError>>> {
        let pool = pool_base.expose_provenance() as u64;
        let first = members.first()?;
        let lanes: Vec<_> = members.iter().map(|member| member.memory.loading.lock()).collect();
        let streams: Vec<&Stream> = lanes.iter().map(|lane| &*lane.stream).collect();
        let loaders: Vec<&Loader> = members.iter().map(|member| &member.memory.loader).collect();
        // A member's wrong address must fail that member's load only.
        let words: Vec<Vec<Option<(u64, u32)>>> =
            members.iter().map(|member| member.memory.words(&member.parts)).collect::<Result<_, _>>().ok()?;
        let look = |at| {
            members.iter().zip(&lanes).try_for_each(|(member, lane)| {
                // SAFETY: the fence is mapped, and its buffer the lane's; all streams are waited for below.
                unsafe { lane.stream.copy(lane.fence_copy(member.memory.fence, at)) }
            })
        };
        let looked = look(0);
        let bytes = first.parts.iter().flat_map(|part| &part.runs).map(|run| run.len).sum();
        let pulls = first.memory.thresholds(first, Direction::Peer);
        let begun = looked.ok().and_then(|()| Together::begin(&loaders, &streams, bytes, &pulls));
        let Some(mut together) = begun else {
            streams.iter().for_each(|stream| drop(stream.synchronize()));
            return None;
        };
        let way = Way::In { pulls };
        let mut enqueue = || -> Result<(), GpuError> {
            for index in 0..first.parts.len() {
                let copies =
                    |member: &Arc<Member>| member.memory.copies(&member.parts[index].runs, pool, &way);
                let copies = members.iter().map(copies).collect::<Result<Vec<_>, _>>()?;
                // SAFETY: the caller's promise; everything is waited for below.
                unsafe { together.enqueue(&streams, &copies)? };
                for (stream, words) in streams.iter().zip(&words) {
                    if let Some((word, value)) = words[index] {
                        // SAFETY: the word is mapped, as the fence is.
                        unsafe { stream.write_word(word, value)? };
                    }
                }
            }
            look(FENCE_AFTER)
        };
        let enqueued = enqueue();
        // Also after an error: what was enqueued runs.
        let gone = || members.iter().all(|member| pidfd_exited(&member.memory.pidfd));
        let outcome = enqueued.and(together.synchronize_or(gone));
        tracing::debug!(ranks = members.len(), bytes, ?outcome, "ranks shared a load");
        let judge = |(member, lane): (&Arc<Member>, &_)| {
            let lane: &Lane = lane;
            let copied = lane.stream.synchronize();
            member.memory.judge(lane, outcome.clone().and(copied).map_err(GpuCopyError::from), member.epoch)
        };
        Some(members.iter().zip(lanes.iter().map(|lane| &**lane)).map(judge).collect())
    }

    /// The words of the parts' flags, by the addresses of this process.
    fn words(&self, parts: &[Part]) -> Result<Vec<Flag>, GpuError> {
        let word = |part: &Part| {
            part.flag.map(|(address, value)| Ok((self.map.local(address, 4)?, value))).transpose()
        };
        parts.iter().map(word).collect()
    }

    /// What moves the runs, by the addresses of this process.
    fn copies(&self, runs: &[Run], pool: u64, way: &Way) -> Result<Vec<Copy>, GpuError> {
        let copy = |run: &Run| {
            let (engine, pool, len) =
                (self.map.local(run.engine_addr, run.len)?, pool + run.pool_offset, run.len);
            Ok(match way {
                Way::Out => Copy { dst: pool, src: engine, len },
                Way::In { .. } => Copy { dst: engine, src: pool, len },
            })
        };
        runs.iter().map(copy).collect()
    }

    /// Everything in the lane's order, and waits for it. Each part is planned when the one before is on its way.
    ///
    /// # Safety
    /// Both sides of the copies are valid and theirs until this returns.
    unsafe fn run(
        &self,
        lane: &mut Lane,
        parts: &[(&[Run], Flag)],
        pool: u64,
        way: Way,
    ) -> Result<(), GpuCopyError> {
        // SAFETY: the fence is mapped, and its buffer this lane's.
        unsafe { lane.stream.copy(lane.fence_copy(self.fence, 0))? };
        // Over several links, what is written comes after the fence too.
        let bytes = parts.iter().flat_map(|(runs, _)| *runs).map(|run| run.len).sum();
        let pieces = parts.iter().map(|(runs, _)| runs.len()).sum();
        let pool_runs = parts.iter().map(|(runs, _)| pool_runs(runs)).sum();
        let mut loading = match &way {
            Way::In { pulls } => {
                let staging = self.loader.staging(bytes, pieces, pool_runs);
                Some(self.loader.begin(&lane.stream, bytes, pulls, staging))
            }
            Way::Out => None,
        };
        let mut enqueue = |lane: &mut Lane| -> Result<(), GpuError> {
            for (runs, flag) in parts {
                let copies = self.copies(runs, pool, &way)?;
                // SAFETY: the caller's promise; rails and lane are waited for below.
                let how = unsafe {
                    match &mut loading {
                        Some(loading) => loading.enqueue(&mut lane.copier, &copies)?,
                        None => lane.copier.enqueue(&copies, Direction::DeviceToHost)?,
                    }
                };
                let staged = loading.as_ref().is_some_and(Loading::is_staged);
                tracing::debug!(?way, ?how, staged, "copies of the GPU");
                if let Some((address, value)) = flag {
                    let word = self.map.local(*address, 4)?;
                    // SAFETY: the word is mapped, as the fence is.
                    unsafe { lane.stream.write_word(word, *value)? };
                }
            }
            // SAFETY: as above.
            unsafe { lane.stream.copy(lane.fence_copy(self.fence, FENCE_AFTER)) }
        };
        let outcome = enqueue(lane);
        // Also after an error: what was enqueued runs.
        let gone = || pidfd_exited(&self.pidfd);
        let relayed = loading.as_mut().map_or(Ok(()), |loading| loading.synchronize_or(gone));
        let done = lane.stream.synchronize();
        Ok(outcome.and(relayed).and(done)?)
    }

    /// Waits until the engine's GPU work has come to an event. Not in the stream: that work ends with the engine's process,
    /// and a stream that waits for an event of a dead process may wait for ever.
    fn wait_for_event(&self, event: Option<u32>) -> Result<(), GpuCopyError> {
        let Some(event) = event else { return Ok(()) };
        let event = self.events.get(event as usize).ok_or(GpuCopyError::NoSuchEvent(event))?;
        let mut pause = LOOK_EVERY / 32;
        while !event.is_done()? {
            if pidfd_exited_within(&self.pidfd, pause) {
                return Err(GpuCopyError::Gone);
            }
            pause = LOOK_EVERY.min(pause * 2);
        }
        Ok(())
    }

    /// Whether the engine still wanted the copy at its end.
    fn judge(&self, lane: &Lane, copied: Result<(), GpuCopyError>, epoch: u64) -> Result<(), GpuCopyError> {
        copied?;
        for at in [0, FENCE_AFTER] {
            let (nonce, found) = lane.fence_at(at);
            if nonce != self.nonce || pidfd_exited(&self.pidfd) {
                return Err(GpuCopyError::Gone);
            }
            if found != epoch {
                return Err(GpuCopyError::Cancelled { asked: epoch, found });
            }
        }
        Ok(())
    }

    fn fence_of(&self, lane: &mut Lane) -> Result<u64, GpuCopyError> {
        // SAFETY: the fence is mapped, and its buffer this lane's; the lane waits for the copy.
        unsafe { lane.stream.copy(lane.fence_copy(self.fence, 0))? };
        lane.stream.synchronize()?;
        match lane.fence_at(0) {
            (nonce, epoch) if nonce == self.nonce && !pidfd_exited(&self.pidfd) => Ok(epoch),
            _ => Err(GpuCopyError::Gone),
        }
    }
}

impl Lane {
    fn new(gpu: &Gpu, priority: Priority, seams: &[u64]) -> Result<Self, GpuError> {
        let stream = Arc::new(Stream::new(gpu, priority)?);
        let options = CopierOptions {
            seams: seams.to_vec(),
            tables: TABLES,
            // Of the lane that saves; loads choose for themselves.
            thresholds: Thresholds::beside_compute(Direction::DeviceToHost),
            ..CopierOptions::default()
        };
        let copier = Copier::new(Arc::clone(&stream), options)?;
        Ok(Self { stream, copier, fences: HostBuffer::new(gpu, FENCE_BUFFER_BYTES)? })
    }

    fn fence_copy(&self, fence: u64, at: u64) -> Copy {
        Copy { dst: self.fences.address() + at, src: fence, len: FENCE_BYTES }
    }

    #[allow(unsafe_code, reason = "the GPU wrote it")]
    fn fence_at(&self, at: u64) -> ([u8; 16], u64) {
        // SAFETY: inside the buffer, and the lane has waited for the copies into it.
        let bytes: [u8; FENCE_BYTES as usize] = unsafe {
            self.fences.as_ptr().add(at as usize).cast::<[u8; FENCE_BYTES as usize]>().read_volatile()
        };
        let mut halves = ([0; 16], [0; 8]);
        halves.0.copy_from_slice(&bytes[..16]);
        halves.1.copy_from_slice(&bytes[16..]);
        (halves.0, u64::from_le_bytes(halves.1))
    }
}

/// In how many ranges of the pool these runs lie, taken in their order.
fn pool_runs(runs: &[Run]) -> usize {
    let breaks = runs.windows(2).filter(|pair| pair[0].pool_offset + pair[0].len != pair[1].pool_offset);
    breaks.count() + usize::from(!runs.is_empty())
}

fn export(allocation: &v1::GpuAllocation, device_uuid: [u8; 16]) -> Result<Export, GpuError> {
    let handle = allocation.handle.as_ref().try_into();
    let handle = handle.map_err(|_| GpuError::Invalid("an allocation's handle has 64 bytes".into()))?;
    Ok(Export { handle, base: allocation.base, bytes: allocation.bytes, device_uuid })
}

#[cfg(test)]
mod tests {
    use kvlane_gpu::fake::{FakeDriver, FakeOptions};
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
