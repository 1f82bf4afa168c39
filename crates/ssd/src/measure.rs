//! [`measure`]: reads a file both ways in turns, and says how fast each is.
//!
//! The direct way reads into a [`Scratch`], not into the pool itself. So nothing else is touched if a device hangs: the memory is
//! kept until the kernel is done with it.
#![expect(unsafe_code, reason = "operations carry addresses")]

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use kvlane_block::crc32c;
use kvlane_memory::PrivateMemory;

use crate::io::{Completion, Io, Op, OpKind, Piece};
use crate::job::{OP_BYTES, STAGED_OP_BYTES};
use crate::layout::PAGE_BYTES;
use crate::read::copy_checked;
use crate::staging::{Slot, SlotUse, Staging};
use crate::way::{PathRates, Way};

/// Bytes of the scratch, and bytes in flight.
const SCRATCH_BYTES: u64 = 16 << 20;
/// Bytes of one turn. The first turn is not counted.
const TURN_BYTES: u64 = 32 << 20;
const TURNS: [Way; 9] = {
    use Way::{Direct, Staged};
    [Direct, Staged, Direct, Direct, Staged, Staged, Direct, Direct, Staged]
};
/// No turn begins later than this, once each way had one that counts.
const ENOUGH: Duration = Duration::from_millis(400);
/// No read begins later than this.
const LAST_READ: Duration = Duration::from_millis(600);
/// Reads that have not ended after this time hang.
const TIMEOUT: Duration = Duration::from_secs(1);
/// A device whose first read takes longer is too slow to fill with reads: they would not end in time.
const FIRST_READ: Duration = Duration::from_millis(50);
/// Shortest wait for a completion.
const LAST_WAIT: Duration = Duration::from_millis(50);

const TOO_SLOW: Measured = Measured::Nothing("the device is too slow to measure it in a second");

/// Outcome of a measurement.
pub(crate) enum Measured {
    Rates(PathRates),
    /// The device failed a read, or there was not enough time for both ways.
    Nothing(&'static str),
    /// Operations are still in flight: nothing may use the staging memory and the scratch before the `Io` is dropped.
    Hangs,
}

/// Memory that stands for the pool, on pages of 4 KiB.
///
/// Whether neighbouring pages lie together in physical memory is luck of the moment in which they were faulted in: a daemon's pool
/// may have had less of it than 16 MiB now. So the scratch is the worst case: pages of its two halves are faulted in in turns, and a
/// kernel that hands out pages one after the other puts no neighbours together. Register it with io_uring, as the pool is.
pub(crate) struct Scratch(PrivateMemory);

impl Scratch {
    pub(crate) fn new() -> io::Result<Scratch> {
        let mut memory = PrivateMemory::new(SCRATCH_BYTES as usize)?;
        let (first, second) = memory.bytes_mut().split_at_mut(SCRATCH_BYTES as usize / 2);
        let page_bytes = PAGE_BYTES as usize;
        for (one, other) in first.chunks_mut(page_bytes).zip(second.chunks_mut(page_bytes)) {
            (one[0], other[0]) = (1, 1);
        }
        Ok(Scratch(memory))
    }

    /// The whole scratch, to be registered.
    pub(crate) fn memory(&mut self) -> Piece {
        self.piece(0, SCRATCH_BYTES as usize)
    }

    /// Part `number` of so many bytes.
    fn piece(&mut self, number: usize, bytes: usize) -> Piece {
        let address = self.0.bytes_mut()[number * bytes..][..bytes].as_mut_ptr();
        Piece { address, bytes }
    }
}

/// Reads from `ranges` of the file, at random offsets and in operations as large as those of each way, for a second at most.
/// `next_id` draws the ids of operations.
pub(crate) fn measure(
    io: &mut dyn Io,
    staging: &mut Staging,
    scratch: &mut Scratch,
    ranges: &[Range<u64>],
    next_id: &mut dyn FnMut() -> u64,
) -> Measured {
    let Some(least) = ranges.iter().map(|range| range.end - range.start).min() else {
        return Measured::Nothing("the file has nothing to read");
    };
    let mut dice = 0x9E37_79B9_7F4A_7C15_u64;
    let mut offset = |op_bytes: u64| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let range = &ranges[(dice >> 33) as usize % ranges.len()];
        let places = (range.end - range.start) / op_bytes;
        range.start + (dice >> 17) % places * op_bytes
    };
    let began = Instant::now();
    let mut sums = [(0u64, Duration::ZERO); 2];
    for (number, way) in TURNS.into_iter().enumerate() {
        let has_both = sums.iter().all(|(bytes, _)| *bytes > 0);
        if began.elapsed() > LAST_READ || (has_both && began.elapsed() > ENOUGH) {
            break;
        }
        let op_bytes = least.min(match way {
            Way::Direct => OP_BYTES as u64,
            Way::Staged => STAGED_OP_BYTES as u64,
        });
        let mut turn = Turn { io, staging, scratch, op_bytes, way, measured_since: began };
        if number == 0 {
            match turn.run(1, &mut offset, next_id) {
                Ok((_, time)) if time > FIRST_READ => return TOO_SLOW,
                Ok(_) => {}
                Err(measured) => return measured,
            }
        }
        match turn.run(TURN_BYTES / op_bytes, &mut offset, next_id) {
            Ok((bytes, time)) if number > 0 => {
                let sum = &mut sums[usize::from(way == Way::Staged)];
                *sum = (sum.0 + bytes, sum.1 + time);
            }
            Ok(_) => {}
            Err(measured) => return measured,
        }
    }
    let rate = |(bytes, time): (u64, Duration)| (bytes as f64 / time.as_secs_f64().max(1e-9)) as u64;
    match sums {
        [(1.., _), (1.., _)] => Measured::Rates(PathRates { direct: rate(sums[0]), staged: rate(sums[1]) }),
        _ => TOO_SLOW,
    }
}

struct Turn<'a> {
    io: &'a mut dyn Io,
    staging: &'a mut Staging,
    scratch: &'a mut Scratch,
    op_bytes: u64,
    way: Way,
    measured_since: Instant,
}

/// An operation in flight: its id, its part of the scratch, and its slot if it is staged.
struct Flying {
    id: u64,
    place: usize,
    slot: Option<Slot>,
}

impl Turn<'_> {
    /// Reads so many times. Returns the bytes read and the time that took.
    fn run(
        &mut self,
        reads: u64,
        offset: &mut dyn FnMut(u64) -> u64,
        next_id: &mut dyn FnMut() -> u64,
    ) -> Result<(u64, Duration), Measured> {
        let (began, mut posted, mut bytes, mut failed) = (Instant::now(), 0, 0, false);
        let mut flying: Vec<Flying> = Vec::new();
        let depth = SCRATCH_BYTES / self.op_bytes;
        let mut free: Vec<usize> = (0..depth as usize).collect();
        let mut ended: Vec<Completion> = Vec::new();
        loop {
            while posted < reads
                && !failed
                && self.measured_since.elapsed() < LAST_READ
                && self.io.room() > 0
                && let Some(place) = free.pop()
            {
                let Some(begun) = self.post(place, offset(self.op_bytes), next_id()) else { break };
                flying.push(begun);
                posted += 1;
            }
            if flying.is_empty() {
                return match failed {
                    true => Err(Measured::Nothing("the device failed a read")),
                    false => Ok((bytes, began.elapsed())),
                };
            }
            let left = TIMEOUT.saturating_sub(self.measured_since.elapsed());
            // Wait once more before judging, because this thread may have been late itself.
            let waited = self.io.wait(left.max(LAST_WAIT), &mut ended);
            if waited.is_err() || (left.is_zero() && ended.is_empty()) {
                return Err(Measured::Hangs);
            }
            for end in ended.drain(..) {
                let Some(at) = flying.iter().position(|each| each.id == end.id) else { continue };
                let done = flying.swap_remove(at);
                match end.result {
                    Ok(moved) if moved as u64 == self.op_bytes => {
                        bytes += self.op_bytes;
                        self.verify(&done);
                    }
                    _ => failed = true,
                }
                if let Some(slot) = done.slot {
                    self.staging.release(slot);
                }
                free.push(done.place);
            }
        }
    }
}

impl Turn<'_> {
    /// Posts one read. None if staging has no room.
    fn post(&mut self, place: usize, offset: u64, id: u64) -> Option<Flying> {
        let slot = match self.way {
            Way::Direct => None,
            Way::Staged => Some(self.staging.take(self.op_bytes, SlotUse::Read)?),
        };
        let piece = match &slot {
            Some(slot) => self.staging.piece(slot, self.op_bytes as usize),
            None => self.scratch.piece(place, self.op_bytes as usize),
        };
        let op = Op { id, kind: OpKind::Read, offset, pieces: vec![piece] };
        // SAFETY: the slot, or the part of the scratch, belongs to this operation until it has ended. If it does not end in time,
        // `measure` returns `Hangs`, and its caller keeps both memories until the `Io` is dropped.
        unsafe { self.io.post(op) };
        Some(Flying { id, place, slot })
    }

    /// Does what a read of the tier does: takes the checksum, and copies what was staged.
    fn verify(&mut self, done: &Flying) {
        let Piece { address, bytes } = self.scratch.piece(done.place, self.op_bytes as usize);
        let crc = match &done.slot {
            // SAFETY: the part of the scratch lies inside it, belongs to this operation, and overlaps no staging memory.
            Some(slot) => unsafe { copy_checked(&self.staging.slot_bytes(slot)[..bytes], address) },
            // SAFETY: the same; the operation has ended, and the memory is initialised.
            None => crc32c(unsafe { std::slice::from_raw_parts(address, bytes) }),
        };
        std::hint::black_box(crc);
    }
}
