//! A staging ring: memory of a GPU through which bytes pass from the host to other GPUs, or to their place on the same one.
//!
//! ```text
//!  up (the GPU of the ring):  wait until all have read slot s | fill s | filled[s] = n | ...
//!  pull (each target):        wait until filled[s] = n | scatter | drained[target][s] = n | ...
//! ```
//! Each wait is enqueued after the work that ends it. So streams cannot wait in a circle, in whatever order they share the
//! hardware.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::copier::{Copier, CopierOptions};
use crate::device::{DeviceMemory, Gpu};
use crate::driver::{EventScope, Priority};
use crate::error::GpuError;
use crate::plan::{Direction, Thresholds};
use crate::rail_options::RailOptions;
use crate::split::Chunk;
use crate::stream::{Event, Stream};
use crate::words::Words;

/// Entries of a table of the kernel: a slot of the default size in pieces of 8 KiB. Shorter pieces take more launches.
const TABLE_ENTRIES: usize = 1024;
/// Most tables of one pull in use at a time. They are made as they are needed.
const TABLES: usize = 256;
/// After this many queries of a stream in a row that returned an error, its GPU counts as lost, whatever the errors are.
const LOST_AFTER_POLLS: u32 = 100;
/// Most targets of a load. One host has fewer GPUs.
pub(crate) const READERS_MAX: usize = 16;

/// A GPU whose link serves one load at a time.
#[derive(Debug)]
pub(crate) struct Rail {
    pub(crate) gpu: Gpu,
    ring: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Unused,
    /// No work uses the ring.
    Ready(Box<GpuRing>),
    /// A load uses the ring while it holds the lock. Without the lock: the ring has failed and serves no more loads.
    Taken,
}

/// Fields are dropped in order, so the memory goes last.
#[derive(Debug)]
struct GpuRing {
    /// By the ordinal of the GPU that reads.
    pulls: HashMap<u32, Pull>,
    up: Copier,
    words: Words,
    memory: DeviceMemory,
}

/// A target's way to read a ring: a copier with its stream on the target.
#[derive(Debug)]
struct Pull {
    copier: Copier,
    /// The work that must be done before the target's memory is written.
    start: Event,
    /// The reads that are done.
    joined: Event,
    failed: bool,
    failures: PollFailures,
}

/// Queries of a stream that returned an error, since the last one that did not.
#[derive(Debug, Default)]
struct PollFailures(u32);

/// The GPU that gets a load's bytes, and the stream there to which the load belongs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) stream: &'a Stream,
}

/// The options by which rings are made and read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Making<'a> {
    pub(crate) options: &'a RailOptions,
    pub(crate) seams: &'a [u64],
    pub(crate) pulls: &'a Thresholds,
}

impl Rail {
    pub(crate) fn new(gpu: Gpu) -> Rail {
        Rail { gpu, ring: Mutex::new(State::Unused) }
    }

    pub(crate) fn ordinal(&self) -> u32 {
        self.gpu.info().ordinal
    }

    /// The staging ring, ready for a load to these targets; None while another load uses it. The load's writes come after the work
    /// that is in the targets' streams by now.
    pub(crate) fn take<'a>(&'a self, targets: &[Target<'_>], making: Making<'_>) -> Option<Lent<'a>> {
        let mut state = self.ring.try_lock()?;
        let ring = match std::mem::replace(&mut *state, State::Taken) {
            State::Taken => return None,
            State::Ready(ring) => ring,
            State::Unused => match GpuRing::new(self, making) {
                Ok(ring) => Box::new(ring),
                Err(error) => {
                    self.warn(&error);
                    return None;
                }
            },
        };
        let RailOptions { slot_bytes, slots, .. } = *making.options;
        let mut lent = Lent {
            rail: self,
            state,
            ring,
            pulls: Vec::new(),
            failures: PollFailures::default(),
            slot_bytes,
            slots,
            chunks: 0,
            bytes: 0,
            failed: false,
        };
        match lent.begin(targets, making) {
            Ok(()) => Some(lent),
            Err(error) => {
                // Log: a load goes piece by piece, or without a rail, which is slower; later loads try the ring again.
                // Do: look for GPU errors in the log and Xid in dmesg if it repeats.
                tracing::warn!(gpu = self.ordinal(), %error, "staging ring unreadable; this load goes without it");
                lent.give_back();
                None
            }
        }
    }

    /// Logs once per rail, because a failed rail serves no more loads.
    fn warn(&self, error: &GpuError) {
        // Log: loads of short pieces to this GPU, and rails over it, are slower until the daemon is restarted.
        // Do: look for GPU errors and Xid in dmesg, then restart the daemon.
        tracing::warn!(once = true, gpu = self.ordinal(), %error, "staging ring failed; loads go without it");
    }
}

impl GpuRing {
    fn new(rail: &Rail, making: Making<'_>) -> Result<GpuRing, GpuError> {
        let RailOptions { slot_bytes, slots, .. } = *making.options;
        let memory = rail.gpu.alloc(slot_bytes * slots as u64)?;
        let words = Words::new(&rail.gpu, slots * (1 + READERS_MAX))?;
        // The work of the GPU's own engine comes first.
        let stream = Arc::new(Stream::new(&rail.gpu, Priority::Normal)?);
        let options =
            CopierOptions { use_kernel: false, seams: making.seams.to_vec(), ..CopierOptions::default() };
        Ok(GpuRing { pulls: HashMap::new(), up: Copier::new(stream, options)?, words, memory })
    }
}

impl Pull {
    fn new(target: &Gpu, options: &RailOptions) -> Result<Pull, GpuError> {
        let stream = Arc::new(Stream::new(target, Priority::High)?);
        let event = || Event::new(target, EventScope::Process);
        let (start, joined) = (event()?, event()?);
        let options = CopierOptions {
            peer_blocks: options.blocks,
            table_entries: TABLE_ENTRIES,
            tables: TABLES,
            ..CopierOptions::default()
        };
        Ok(Pull {
            copier: Copier::new(stream, options)?,
            start,
            joined,
            failed: false,
            failures: PollFailures::default(),
        })
    }
}

/// A staging ring that one load uses.
#[derive(Debug)]
pub(crate) struct Lent<'a> {
    rail: &'a Rail,
    state: MutexGuard<'a, State>,
    ring: Box<GpuRing>,
    /// One for each target.
    pulls: Vec<Pull>,
    failures: PollFailures,
    slot_bytes: u64,
    slots: usize,
    /// Chunks that have passed through.
    chunks: u64,
    bytes: u64,
    failed: bool,
}

impl Lent<'_> {
    fn begin(&mut self, targets: &[Target<'_>], making: Making<'_>) -> Result<(), GpuError> {
        // No work waits for these words now.
        (0..self.slots * (1 + targets.len())).for_each(|word| self.ring.words.set(word, 0));
        for target in targets {
            let kept = self.ring.pulls.remove(&target.gpu.info().ordinal);
            let mut pull = kept.map_or_else(|| Pull::new(target.gpu, making.options), Ok)?;
            // A slot is short. Short pieces let more groups of threads read it at once.
            let piece_bytes = Thresholds::default().piece_bytes;
            pull.copier.set_thresholds(Thresholds { piece_bytes, ..making.pulls.clone() });
            pull.start.record(target.stream)?;
            pull.copier.stream().wait(&pull.start)?;
            self.pulls.push(pull);
        }
        Ok(())
    }

    /// The ordinal of the GPU whose link this is, and the bytes that went over it since the last call.
    pub(crate) fn take_bytes(&mut self) -> (u32, u64) {
        (self.rail.ordinal(), std::mem::take(&mut self.bytes))
    }

    fn filled(&self, slot: usize) -> usize {
        slot
    }

    fn drained(&self, reader: usize, slot: usize) -> usize {
        self.slots * (1 + reader) + slot
    }

    /// Whether [`Lent::pass`] would return without a wait on the host.
    pub(crate) fn has_room(&self, chunks: &[&Chunk]) -> Result<bool, GpuError> {
        for (pull, chunk) in self.pulls.iter().zip(chunks) {
            if !pull.copier.has_room(&chunk.scatter(0))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Enqueues a chunk's way through a slot to all targets. `chunks` has each target's view: all gather the same bytes, and
    /// each scatters them to its own addresses.
    ///
    /// # Safety
    /// As for [`Copier::enqueue`], of the chunk's copies before they were split.
    pub(crate) unsafe fn pass(&mut self, chunks: &[&Chunk]) -> Result<(), GpuError> {
        let Some(first) = chunks.first() else { return Ok(()) };
        let slot = (self.chunks % self.slots as u64) as usize;
        let number = (self.chunks / self.slots as u64 + 1) as u32;
        let address = self.ring.memory.address() + slot as u64 * self.slot_bytes;
        self.chunks += 1;
        self.bytes += first.bytes();
        // SAFETY: the caller's promise.
        let filled = unsafe { self.fill(first, slot, number, address) };
        self.record(filled)?;
        for (reader, chunk) in chunks.iter().enumerate() {
            // SAFETY: the caller's promise.
            let drained = unsafe { self.drain(chunk, reader, slot, number, address) };
            self.record_pull(reader, drained)?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Lent::pass`].
    unsafe fn fill(&mut self, chunk: &Chunk, slot: usize, number: u32, address: u64) -> Result<(), GpuError> {
        let (filled, words) = (self.filled(slot), &self.ring.words);
        let stream = Arc::clone(self.ring.up.stream());
        let before = if number > 1 { self.pulls.len() } else { 0 };
        for reader in 0..before {
            let drained = words.address(self.drained(reader, slot));
            // SAFETY: the words live as long as the ring, which is kept until its streams are idle.
            unsafe { stream.wait_word(drained, number - 1)? };
        }
        let filled = words.address(filled);
        // SAFETY: the chunk lies inside the slot, which only this load uses and which all have read by then; the caller
        // vouches for the host's side; the word as above.
        unsafe {
            self.ring.up.enqueue(&chunk.gather(address), Direction::HostToDevice)?;
            stream.write_word(filled, number)
        }
    }

    /// # Safety
    /// As for [`Lent::pass`].
    unsafe fn drain(
        &mut self,
        chunk: &Chunk,
        reader: usize,
        slot: usize,
        number: u32,
        address: u64,
    ) -> Result<(), GpuError> {
        let words = &self.ring.words;
        let filled = words.address(self.filled(slot));
        let drained = words.address(self.drained(reader, slot));
        let copier = &mut self.pulls[reader].copier;
        let stream = Arc::clone(copier.stream());
        // SAFETY: the slot is filled by then and not written again before all have said that they have read it; the
        // target reaches it; the caller vouches for the destinations; the words live as long as the ring.
        unsafe {
            stream.wait_word(filled, number)?;
            copier.enqueue(&chunk.scatter(address), Direction::Peer)?;
            stream.write_word(drained, number)
        }
    }

    /// Orders later work of a target's stream after its reads of this ring.
    pub(crate) fn join(&mut self, reader: usize, stream: &Stream) -> Result<(), GpuError> {
        let pull = &mut self.pulls[reader];
        let joined = pull.joined.record(pull.copier.stream()).and_then(|()| stream.wait(&pull.joined));
        self.record_pull(reader, joined)
    }

    /// Whether no work is in progress. A lost GPU counts as idle.
    pub(crate) fn is_idle(&mut self) -> (bool, Result<(), GpuError>) {
        let mut idle = true;
        let mut outcome = Ok(());
        let filled = self.failures.poll(self.ring.up.stream(), &mut idle);
        outcome = outcome.and(self.record(filled));
        for reader in 0..self.pulls.len() {
            let pull = &mut self.pulls[reader];
            let drained = pull.failures.poll(pull.copier.stream(), &mut idle);
            // The lost GPU may still read the ring and write its words, so the ring is dropped with it.
            let lost = pull.failures.mean_loss();
            let drained = self.record_pull(reader, drained);
            outcome = outcome.and(if lost { self.record(drained) } else { drained });
        }
        (idle, outcome)
    }

    /// Ends all waits for this ring's words from the host.
    pub(crate) fn release(&self) {
        (0..self.slots * (1 + self.pulls.len())).for_each(|word| self.ring.words.release(word));
    }

    /// Records a failure: the rail serves no more loads. Logs at once, because other waits for the rail may last.
    fn record(&mut self, outcome: Result<(), GpuError>) -> Result<(), GpuError> {
        if let Err(error) = &outcome
            && !std::mem::replace(&mut self.failed, true)
        {
            self.rail.warn(error);
        }
        outcome
    }

    /// Records a failed read: the next load of this target reads the ring by a new stream.
    fn record_pull(&mut self, reader: usize, outcome: Result<(), GpuError>) -> Result<(), GpuError> {
        self.pulls[reader].failed |= outcome.is_err();
        outcome
    }

    /// Returns the ring to its rail. No work is in progress.
    pub(crate) fn give_back(mut self) {
        if self.failed {
            return;
        }
        for pull in self.pulls.drain(..).filter(|pull| !pull.failed) {
            let target = pull.copier.stream().gpu().info().ordinal;
            self.ring.pulls.insert(target, pull);
        }
        *self.state = State::Ready(self.ring);
    }
}

impl PollFailures {
    /// Queries a stream: returns its error, and clears `idle` while the stream is busy.
    fn poll(&mut self, stream: &Stream, idle: &mut bool) -> Result<(), GpuError> {
        let polled = stream.is_idle();
        self.0 = if polled.is_err() { self.0 + 1 } else { 0 };
        let lost = self.mean_loss();
        *idle &= polled.as_ref().map_or_else(|error| error.is_sticky() || lost, |idle| *idle);
        polled.map(drop)
    }

    fn mean_loss(&self) -> bool {
        self.0 >= LOST_AFTER_POLLS
    }
}
