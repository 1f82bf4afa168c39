//! A staging ring: memory of a GPU through which bytes pass from the host to other GPUs, or to their place on the same one.
//!
//! ```text
//!  up (the GPU of the ring):  wait until all have read slot s | fill s | filled[s] = n | ...
//!  pull (each target):        wait until filled[s] = n | scatter | drained[target][s] = n | ...
//! ```
//! Each wait is enqueued after the work that ends it. So streams cannot wait in a circle, in whatever order they share the
//! hardware. [`Gated`] says why words are in streams of their own.

use std::collections::HashMap;

use parking_lot::{Mutex, MutexGuard};

use crate::copier::CopierOptions;
use crate::device::{DeviceMemory, Gpu};
use crate::driver::{EventScope, Priority};
use crate::error::GpuError;
use crate::gated::Gated;
use crate::plan::{Direction, Thresholds};
use crate::rail_options::RailOptions;
use crate::split::Chunk;
use crate::stream::{Event, Stream};
use crate::words::Words;

/// Entries of a table of the kernel: a slot of the default size in pieces of 8 KiB. Shorter pieces take more launches.
const TABLE_ENTRIES: usize = 1024;
/// Most tables of one pull in use at a time. They are made as they are needed.
const TABLES: usize = 256;
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
    up: Gated,
    words: Words,
    memory: DeviceMemory,
}

/// A target's way to read a ring: a copier with its stream on the target.
#[derive(Debug)]
struct Pull {
    reads: Gated,
    /// The work that must be done before the target's memory is written.
    start: Event,
    /// The reads that are done.
    joined: Event,
    failed: bool,
}

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
        let options =
            CopierOptions { use_kernel: false, seams: making.seams.to_vec(), ..CopierOptions::default() };
        // The work of the GPU's own engine comes first.
        let up = Gated::new(&rail.gpu, Priority::Normal, options)?;
        Ok(GpuRing { pulls: HashMap::new(), up, words, memory })
    }
}

impl Pull {
    fn new(target: &Gpu, options: &RailOptions) -> Result<Pull, GpuError> {
        let event = || Event::new(target, EventScope::Process);
        let (start, joined) = (event()?, event()?);
        let options = CopierOptions {
            peer_blocks: options.blocks,
            table_entries: TABLE_ENTRIES,
            tables: TABLES,
            ..CopierOptions::default()
        };
        Ok(Pull { reads: Gated::new(target, Priority::High, options)?, start, joined, failed: false })
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
            pull.reads.copier.set_thresholds(Thresholds { piece_bytes, ..making.pulls.clone() });
            pull.start.record(target.stream)?;
            pull.reads.copier.stream().wait(&pull.start)?;
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
            if !pull.reads.copier.has_room(&chunk.scatter(0))? {
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
        let address_of = |word| self.ring.words.address(word);
        let filled = address_of(self.filled(slot));
        let drained: Vec<u64> =
            (0..self.pulls.len()).map(|reader| address_of(self.drained(reader, slot))).collect();
        let up = &mut self.ring.up;
        // SAFETY: the words live as long as the ring, which is kept until its streams are idle. The chunk lies inside the slot,
        // which only this load uses and which all have read by then; the caller vouches for the host's side.
        unsafe {
            if number > 1 {
                up.wait_words(drained, number - 1)?;
            }
            up.copier.enqueue(&chunk.gather(address), Direction::HostToDevice)?;
            up.write_word(filled, number)
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
        let reads = &mut self.pulls[reader].reads;
        // SAFETY: the slot is filled by then and not written again before all have said that they have read it; the
        // target reaches it; the caller vouches for the destinations; the words live as long as the ring.
        unsafe {
            reads.wait_words([filled], number)?;
            reads.copier.enqueue(&chunk.scatter(address), Direction::Peer)?;
            reads.write_word(drained, number)
        }
    }

    /// Orders later work of a target's stream after its reads of this ring.
    pub(crate) fn join(&mut self, reader: usize, stream: &Stream) -> Result<(), GpuError> {
        let pull = &mut self.pulls[reader];
        let joined = pull.joined.record(pull.reads.copier.stream()).and_then(|()| stream.wait(&pull.joined));
        self.record_pull(reader, joined)
    }

    /// Whether no work is in progress. A lost GPU counts as idle.
    pub(crate) fn is_idle(&mut self) -> (bool, Result<(), GpuError>) {
        let (mut idle, filled) = self.ring.up.poll();
        let mut outcome = self.record(filled);
        for reader in 0..self.pulls.len() {
            let reads = &mut self.pulls[reader].reads;
            let (over, drained) = reads.poll();
            idle &= over;
            // The lost GPU may still read the ring and write its words, so the ring is dropped with it.
            let lost = reads.is_lost();
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
            let target = pull.reads.copier.stream().gpu().info().ordinal;
            self.ring.pulls.insert(target, pull);
        }
        *self.state = State::Ready(self.ring);
    }
}
