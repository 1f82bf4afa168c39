//! The daemon's side of a worker's GPU memory: maps it, and has the GPU copy saves out of it and loads into it.
#![expect(unsafe_code, reason = "copies between the pool and GPU memory that is mapped here")]

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_block::{Position, Region, Run};
use kvlane_gpu::{
    AddressMap, Calibration, Copy, Direction, Event, Export, GpuError, Imported, ImportedChunks, Loader,
    MappedImport, Priority, RailLoad, Stream, Thresholds, Together,
};
use kvlane_memory::{pidfd_exited, pidfd_exited_within};
use parking_lot::Mutex;
use thiserror::Error;

use crate::chunks::SharedChunks;
use crate::exported::{ALLOCATIONS_MAX, Allocation, Exported};
use crate::fence::FENCE_BYTES;
use crate::flags::{Flag, LoadPart};
use crate::gpu_pool::{Gpus, PinnedPool};
use crate::lane::{FENCE_AFTER, FENCE_BEFORE, Lane};
use crate::pace::{Pace, cut};
use crate::runs::Runs;

/// Longest pause between two polls of an event of an engine that is still computing; the first polls come sooner.
const POLL_EVERY: Duration = Duration::from_micros(500);
/// Most events that a worker may share, one for each of its copies in flight.
const EVENTS_MAX: usize = 1024;

/// Why a copy by the GPU does not count.
#[derive(Debug, Error)]
pub enum GpuCopyError {
    /// From the driver.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The engine's process has exited, or its fence holds another nonce.
    #[error("the engine's process has exited")]
    Gone,
    /// The engine gave the copy up and may have reused its blocks.
    #[error("the engine is at epoch {found} and gave up the copy that it asked for at epoch {asked}")]
    Cancelled {
        /// The epoch of the request.
        asked: u64,
        /// The epoch that the fence held.
        found: u64,
    },
    /// The request names an event that the worker does not have.
    #[error("event {0} was not registered")]
    NoSuchEvent(u32),
}

/// A worker's GPU memory, mapped here.
///
/// The GPU itself reads the fence, in the same stream before and after the blocks. So a copy counts only if the engine had not
/// given it up when the last byte was read.
#[derive(Debug)]
pub struct GpuMemory {
    map: AddressMap,
    events: Vec<Event>,
    /// Address of the fence in this process.
    fence: u64,
    nonce: [u8; 16],
    pidfd: OwnedFd,
    saving: Mutex<Lane>,
    loading: Mutex<Lane>,
    loader: Loader,
    /// Thresholds for loads while the GPU computes nothing.
    idle: Calibration,
    /// Dropped after the lanes, which have waited for their work before they are unlocked.
    _imports: Vec<Imported>,
    _chunks: Vec<ImportedChunks>,
    /// Keeps the pool pinned, which the copies read and write.
    pool: Arc<PinnedPool>,
}

/// A load of one rank.
#[derive(Debug)]
pub struct Member {
    /// The memory of the worker that the load is for.
    pub memory: Arc<GpuMemory>,
    /// Copied in this order.
    pub parts: Vec<LoadPart>,
    /// Epoch of the worker's fence, from its request. If the fence holds another one, the worker has given the load up.
    pub epoch: u64,
    /// The engine computes other requests meanwhile.
    pub beside_compute: bool,
}

/// Direction of a lane's copies.
#[derive(Debug)]
enum Way {
    /// From the engine into the pool.
    Out,
    /// From the pool, perhaps also over the links of other GPUs, and through the staging ring of this one. `pulls` decides how
    /// the GPU reads such rings.
    In { pulls: Thresholds },
}

impl GpuMemory {
    /// Maps the memory that a worker has exported, and takes the ranges that it has shared chunk by chunk. Every region must lie
    /// in them.
    ///
    /// # Errors
    /// Some memory cannot be mapped, a region lies outside, or the fence does not hold the nonce.
    pub fn import(
        gpus: &Gpus,
        engine_id: &str,
        worker: &Exported,
        mut chunks: SharedChunks,
        regions: &[&Region],
        nonce: [u8; 16],
        pidfd: OwnedFd,
    ) -> Result<Self, GpuError> {
        let uuid = worker.device_uuid;
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
        let (base, bytes) = (worker.fence.base, worker.fence.bytes);
        let handle =
            worker.fence.handle.ok_or_else(|| GpuError::Invalid("the fence has no handle".into()))?;
        let fence = Export { handle, base, bytes, device_uuid: uuid };
        let of = |allocation: &Allocation| {
            let Allocation { base, bytes, handle } = *allocation;
            handle.map(|handle| Export { handle, base, bytes, device_uuid: uuid })
        };
        let gpu = gpus.open(uuid)?;
        let whole = worker.allocations.iter().filter_map(of).chain([fence]);
        let imports = whole.map(|export| gpu.import(&export)).collect::<Result<Vec<_>, _>>()?;
        let chunked = worker.allocations.iter().filter(|allocation| allocation.handle.is_none());
        let chunks =
            chunked.map(|allocation| chunks.take(allocation, uuid)).collect::<Result<Vec<_>, _>>()?;
        let mapped = chunks.iter().map(ImportedChunks::mapped).collect::<Result<Vec<_>, _>>()?;
        let map = AddressMap::new(imports.iter().map(MappedImport::from).chain(mapped))?;
        for region in regions {
            // A validated region has a span, so the default is never taken.
            map.local(region.base, region.span_bytes().unwrap_or(u64::MAX))?;
        }
        let fence = map.local(worker.fence.base, FENCE_BYTES as u64)?;
        let events = worker.events.iter().map(|handle| Event::open(&gpu, handle));
        let events = events.collect::<Result<Vec<_>, _>>()?;
        let (pool, seams) = gpus.pool();
        let memory = Self {
            map,
            events,
            fence,
            nonce,
            pidfd,
            saving: Mutex::new(Lane::new(&gpu, Priority::Normal, seams)?),
            loading: Mutex::new(Lane::new(&gpu, Priority::High, seams)?),
            loader: gpus.loader(&gpu, engine_id),
            idle: gpus.calibration(&gpu),
            _imports: imports,
            _chunks: chunks,
            pool,
        };
        let epoch = memory.fence_of(&mut memory.loading.lock());
        match epoch {
            Ok(_) => Ok(memory),
            Err(error) => {
                Err(GpuError::Invalid(format!("the fence does not hold the engine's nonce: {error}")))
            }
        }
    }

    /// Copies runs into the pool after `event`, at this pace, for a request made at `epoch`.
    ///
    /// # Errors
    /// [`GpuCopyError`]; then the bytes in the pool are undefined.
    ///
    /// # Panics
    /// If the runs are of another pool than the pinned one.
    pub fn copy_out(
        &self,
        runs: &Runs,
        epoch: u64,
        event: Option<u32>,
        pace: &Pace<'_>,
    ) -> Result<(), GpuCopyError> {
        let pool = self.pool_address([runs]);
        let mut lane = self.saving.lock();
        self.wait_for_event(event)?;
        let runs = cut(runs.as_slice());
        let mut left = runs.as_slice();
        loop {
            let begun = Instant::now();
            let (now, later) = pace.next(left);
            // SAFETY: pieces of runs of the pool that is pinned; the lane waits for the work.
            let copied = unsafe { self.run(&mut lane, &[(now, None)], pool, Way::Out) };
            // After each part, because the rest of a save that was given up is needless.
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

    /// Checks that a load requested at `epoch` was not given up, and waits for `event`: then it may begin.
    ///
    /// # Errors
    /// The load was given up, or the process has ended.
    pub fn wait_until_wanted(&self, epoch: u64, event: Option<u32>) -> Result<(), GpuCopyError> {
        // The worker may have given the load up while this daemon was stopped; it must not start then.
        let found = self.fence_of(&mut self.loading.lock())?;
        if found != epoch {
            return Err(GpuCopyError::Cancelled { asked: epoch, found });
        }
        self.wait_for_event(event)
    }

    /// The pool's address for the GPU.
    fn pool_address<'a>(&self, runs: impl IntoIterator<Item = &'a Runs>) -> u64 {
        let same = |runs: &Runs| Arc::ptr_eq(runs.pool(), &self.pool.arena);
        assert!(runs.into_iter().all(same), "runs of another pool than the one that is pinned");
        self.pool.arena.base().expose_provenance() as u64
    }

    /// Copies a load's runs from the pool, part by part, after [`Self::wait_until_wanted`]. `load` is of this memory.
    ///
    /// The engine's scheduler holds a lease on the pool's blocks until it hears of the end of this load, so no one writes them;
    /// a wrong page number only causes a wrong read. The engine has set the destination blocks aside, and the map allows no
    /// write outside the memory that it exported.
    ///
    /// # Errors
    /// [`GpuCopyError`]; then the bytes of the engine's blocks are undefined.
    ///
    /// # Panics
    /// If the runs are of another pool than the pinned one.
    pub fn copy_in(&self, load: &Member) -> Result<(), GpuCopyError> {
        let pool = self.pool_address(load.parts.iter().map(|part| &part.runs));
        let parts: Vec<(&[Run], Option<Flag>)> =
            load.parts.iter().map(|part| (part.runs.as_slice(), part.flag)).collect();
        let mut lane = self.loading.lock();
        lane.copier.set_thresholds(self.thresholds(load, Direction::HostToDevice));
        let way = Way::In { pulls: self.thresholds(load, Direction::Peer) };
        // SAFETY: runs of the pool that is pinned; the lane waits for the work.
        let copied = unsafe { self.run(&mut lane, &parts, pool, way) };
        self.judge(&lane, copied, load.epoch)
    }

    /// The thresholds that choose how this load is copied.
    fn thresholds(&self, load: &Member, direction: Direction) -> Thresholds {
        match load.beside_compute {
            true if direction != Direction::Peer => Thresholds::beside_compute(direction),
            _ => self.idle.thresholds(direction),
        }
    }

    /// Whether `ranks` ranks that load the same `bytes` bytes may share their links.
    pub fn may_share(&self, bytes: u64, ranks: usize) -> bool {
        self.loader.may_share(bytes, ranks)
    }

    /// As [`Self::copy_in`] for each member. All members load the same bytes, and each link copies a share of them for all.
    /// None if each has to load by itself; then nothing was written. No member ends its load before this returns.
    ///
    /// # Panics
    /// If the runs are of another pool than the pinned one.
    pub fn copy_in_together(members: &[Arc<Member>]) -> Option<Vec<Result<(), GpuCopyError>>> {
        let first = members.first()?;
        let runs = members.iter().flat_map(|member| &member.parts).map(|part| &part.runs);
        let pool = first.memory.pool_address(runs);
        let lanes: Vec<_> = members.iter().map(|member| member.memory.loading.lock()).collect();
        let streams: Vec<&Stream> = lanes.iter().map(|lane| &*lane.stream).collect();
        let loaders: Vec<&Loader> = members.iter().map(|member| &member.memory.loader).collect();
        // On a wrong address, each loads by itself, so that only that member's load fails.
        let words: Vec<Vec<Option<Flag>>> =
            members.iter().map(|member| member.memory.words(&member.parts)).collect::<Result<_, _>>().ok()?;
        let read_fences = |at| {
            members.iter().zip(&lanes).try_for_each(|(member, lane)| {
                // SAFETY: the fence is mapped as long as its member; all streams are waited for below.
                unsafe { lane.read_fence(member.memory.fence, at) }
            })
        };
        let fences_read = read_fences(FENCE_BEFORE);
        let bytes = first.parts.iter().flat_map(|part| part.runs.as_slice()).map(|run| run.len).sum();
        let pulls = first.memory.thresholds(first, Direction::Peer);
        let begun = fences_read.ok().and_then(|()| Together::begin(&loaders, &streams, bytes, &pulls));
        let Some(mut together) = begun else {
            streams.iter().for_each(|stream| drop(stream.synchronize()));
            return None;
        };
        let way = Way::In { pulls };
        let mut enqueue = || -> Result<(), GpuError> {
            for index in 0..first.parts.len() {
                let copies = |member: &Arc<Member>| {
                    member.memory.copies(member.parts[index].runs.as_slice(), pool, &way)
                };
                let copies = members.iter().map(copies).collect::<Result<Vec<_>, _>>()?;
                // SAFETY: runs of the pool that is pinned, and memory that the members map; everything is waited for below.
                unsafe { together.enqueue(&streams, &copies)? };
                for (stream, words) in streams.iter().zip(&words) {
                    if let Some(Flag { word, value }) = words[index] {
                        // SAFETY: the word is mapped, as the fence is.
                        unsafe { stream.write_word(word, value)? };
                    }
                }
            }
            read_fences(FENCE_AFTER)
        };
        let enqueued = enqueue();
        // Also after an error, because the work that was enqueued runs.
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

    /// The parts' flags, by their addresses in this process.
    fn words(&self, parts: &[LoadPart]) -> Result<Vec<Option<Flag>>, GpuError> {
        parts.iter().map(|part| part.flag.map(|flag| flag.local(&self.map)).transpose()).collect()
    }

    /// The copies of these runs, by addresses in this process.
    fn copies(&self, runs: &[Run], pool: u64, way: &Way) -> Result<Vec<Copy>, GpuError> {
        let copy = |run: &Run| {
            let (engine, pool, len) =
                (self.map.local(run.engine_addr, run.len)?, pool + run.pool_offset.0, run.len);
            Ok(match way {
                Way::Out => Copy { dst: pool, src: engine, len },
                Way::In { .. } => Copy { dst: engine, src: pool, len },
            })
        };
        runs.iter().map(copy).collect()
    }

    /// Enqueues fence, parts and fence in the lane's stream, and waits for them. Each part is planned while the one before is
    /// copied.
    ///
    /// # Safety
    /// The runs lie inside the pinned pool, which begins at `pool`.
    unsafe fn run(
        &self,
        lane: &mut Lane,
        parts: &[(&[Run], Option<Flag>)],
        pool: u64,
        way: Way,
    ) -> Result<(), GpuCopyError> {
        // SAFETY: the fence is mapped as long as this; the lane is waited for below.
        unsafe { lane.read_fence(self.fence, FENCE_BEFORE)? };
        // `begin` orders the copies over other links behind the fence, too.
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
                // SAFETY: the caller vouches for the pool's bytes, and the map for the engine's; rails and lane are waited
                // for below.
                let how = unsafe {
                    match &mut loading {
                        Some(loading) => loading.enqueue(&mut lane.copier, &copies)?,
                        None => lane.copier.enqueue(&copies, Direction::DeviceToHost)?,
                    }
                };
                let staged = loading.as_ref().is_some_and(RailLoad::is_staged);
                tracing::debug!(?way, ?how, staged, "GPU copies enqueued");
                if let Some(flag) = flag {
                    let Flag { word, value } = flag.local(&self.map)?;
                    // SAFETY: the word is mapped, as the fence is.
                    unsafe { lane.stream.write_word(word, value)? };
                }
            }
            // SAFETY: as above.
            unsafe { lane.read_fence(self.fence, FENCE_AFTER) }
        };
        let outcome = enqueue(lane);
        // Also after an error, because the work that was enqueued runs.
        let gone = || pidfd_exited(&self.pidfd);
        let relayed = loading.as_mut().map_or(Ok(()), |loading| loading.synchronize_or(gone));
        let done = lane.stream.synchronize();
        Ok(outcome.and(relayed).and(done)?)
    }

    /// Waits until the engine's GPU work has reached an event. The host waits, not the stream: the work ends with the engine's
    /// process, and a stream that waits for a dead process's event may wait for ever.
    fn wait_for_event(&self, event: Option<u32>) -> Result<(), GpuCopyError> {
        let Some(event) = event else { return Ok(()) };
        let event = self.events.get(event as usize).ok_or(GpuCopyError::NoSuchEvent(event))?;
        let mut pause = POLL_EVERY / 32;
        while !event.is_done()? {
            if pidfd_exited_within(&self.pidfd, pause) {
                return Err(GpuCopyError::Gone);
            }
            pause = POLL_EVERY.min(pause * 2);
        }
        Ok(())
    }

    /// Fails the copy if the engine had given it up, or was gone, before or after it.
    fn judge(&self, lane: &Lane, copied: Result<(), GpuCopyError>, epoch: u64) -> Result<(), GpuCopyError> {
        copied?;
        for at in [FENCE_BEFORE, FENCE_AFTER] {
            let found = lane.fence_at(at);
            if found.nonce != self.nonce || pidfd_exited(&self.pidfd) {
                return Err(GpuCopyError::Gone);
            }
            if found.epoch != epoch {
                return Err(GpuCopyError::Cancelled { asked: epoch, found: found.epoch });
            }
        }
        Ok(())
    }

    fn fence_of(&self, lane: &mut Lane) -> Result<u64, GpuCopyError> {
        // SAFETY: the fence is mapped as long as this; the lane waits for the copy.
        unsafe { lane.read_fence(self.fence, FENCE_BEFORE)? };
        lane.stream.synchronize()?;
        match lane.fence_at(FENCE_BEFORE) {
            found if found.nonce == self.nonce && !pidfd_exited(&self.pidfd) => Ok(found.epoch),
            _ => Err(GpuCopyError::Gone),
        }
    }
}

/// Number of contiguous pool ranges of these runs, in their order.
fn pool_runs(runs: &[Run]) -> usize {
    let breaks =
        runs.windows(2).filter(|pair| pair[0].pool_offset.after(pair[0].len) != Some(pair[1].pool_offset));
    breaks.count() + usize::from(!runs.is_empty())
}
