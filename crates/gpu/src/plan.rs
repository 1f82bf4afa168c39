//! Chooses for each run of a list of copies the way to copy it: copy engine, batch call or copy kernel. Pure.

use kvlane_block::merge;

use crate::driver::{Copy, CopyMethods, TableEntry};

/// Bytes that the kernel loads and stores at once. Its addresses and lengths are multiples of this.
pub const KERNEL_ALIGNMENT: u64 = 16;

/// The two ends of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From pinned host memory.
    HostToDevice,
    /// To pinned host memory.
    DeviceToHost,
    /// Between two GPUs, or within one.
    Peer,
}

/// The lengths that decide between the ways to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thresholds {
    /// Runs of at least this many bytes are left to a copy engine, which moves them faster than a kernel and takes
    /// nothing from the compute. For calls of one copy each.
    pub engine_bytes: u64,
    /// The same if the batch call exists, which keeps a copy engine busy with shorter runs too.
    pub batch_bytes: u64,
    /// The kernel's share of a long run, in bytes, a multiple of [`KERNEL_ALIGNMENT`]: one group of threads copies it
    /// while others copy the next.
    pub piece_bytes: u64,
}

impl Thresholds {
    /// The fastest way while nothing computes on the GPU. On an H200 (share of the contiguous copy): 64 KiB from the
    /// host 0.97 by copy engines and 0.91 by the kernel; to the host 0.88 and 0.94, at 256 KiB 0.96; 16 KiB by copy
    /// engines 0.4 to 0.5; between GPUs the kernel stays ahead up to 1 MiB.
    pub fn idle(direction: Direction) -> Thresholds {
        let batch_bytes = match direction {
            Direction::HostToDevice => 64 << 10,
            Direction::DeviceToHost => 256 << 10,
            Direction::Peer => 1 << 20,
        };
        let usual = Thresholds::default();
        // A group of threads that copies a whole piece reads fewer entries: 0.87 instead of 0.86 between two H200s.
        let piece_bytes = if direction == Direction::Peer { 64 << 10 } else { usual.piece_bytes };
        Thresholds { batch_bytes, piece_bytes, ..usual }
    }

    /// While another process computes on the GPU. Kernels of two processes take turns, so a copy kernel over the link runs
    /// at half its rate and the other process at a third of its own. Copy engines disturb no process: on an H200, 160 small
    /// kernels took 2.55 ms alone, 2.57 ms beside copy engines at 52 GB/s, and 7.4 ms beside a copy kernel, which itself fell
    /// from 51 to 28 GB/s. In pieces of 16 KiB copy engines move about half of the link's rate to the host, where no engine
    /// waits for the save; from the host 6 to 25 GB/s on an H200, and an engine waits for that. Between GPUs, and within one,
    /// a kernel ends soon.
    pub fn beside_compute(direction: Direction) -> Thresholds {
        let batch_bytes = match direction {
            Direction::HostToDevice => 32 << 10,
            Direction::DeviceToHost => 16 << 10,
            Direction::Peer => return Thresholds::idle(direction),
        };
        Thresholds { batch_bytes, ..Thresholds::default() }
    }

    /// Shorter runs go to the kernel, if the device has it.
    pub(crate) fn kernel_below(&self, methods: &CopyMethods) -> u64 {
        if methods.batch { self.batch_bytes } else { self.engine_bytes }
    }
}

impl Default for Thresholds {
    fn default() -> Thresholds {
        Thresholds { engine_bytes: 1 << 20, batch_bytes: 256 << 10, piece_bytes: 16 << 10 }
    }
}

/// Copies, sorted by the way they go. Their order does not matter, because no destination overlaps another range.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Runs with a driver call for each.
    pub singles: Vec<Copy>,
    /// Runs for the batch call.
    pub batch: Vec<Copy>,
    /// Entries of the kernel's tables.
    pub kernel: Vec<TableEntry>,
}

/// Merges copies that are adjacent on both sides, and chooses the way of each run.
///
/// `seams` are addresses, ascending, that a copy engine must not cross ([`crate::Pinned::seams`]).
pub fn plan(copies: &[Copy], methods: &CopyMethods, thresholds: &Thresholds, seams: &[u64]) -> Plan {
    let mut plan = Plan::default();
    let kernel_below = thresholds.kernel_below(methods);
    for run in merge(copies.iter().copied()) {
        let aligned = (run.dst | run.src | run.len).is_multiple_of(KERNEL_ALIGNMENT);
        if methods.kernel && aligned && run.len < kernel_below {
            pieces(run, thresholds.piece_bytes, &mut plan.kernel);
        } else if methods.batch {
            cut(run, seams, &mut plan.batch);
        } else {
            cut(run, seams, &mut plan.singles);
        }
    }
    // One copy is no batch.
    if plan.batch.len() == 1 {
        plan.singles.append(&mut plan.batch);
    }
    plan
}

/// Cuts a run wherever its source or destination crosses a seam.
fn cut(mut run: Copy, seams: &[u64], parts: &mut Vec<Copy>) {
    while let Some(len) = before_seam(&run, seams) {
        parts.push(Copy { len, ..run });
        run = Copy { dst: run.dst + len, src: run.src + len, len: run.len - len };
    }
    parts.push(run);
}

/// Bytes of a run up to the first seam that lies inside one of its ranges.
fn before_seam(run: &Copy, seams: &[u64]) -> Option<u64> {
    let distance = |start: u64| {
        let seam = seams.get(seams.partition_point(|seam| *seam <= start))?;
        Some(seam - start).filter(|distance| *distance < run.len)
    };
    match (distance(run.dst), distance(run.src)) {
        (Some(dst), Some(src)) => Some(dst.min(src)),
        (dst, src) => dst.or(src),
    }
}

fn pieces(run: Copy, piece_bytes: u64, entries: &mut Vec<TableEntry>) {
    let piece_bytes = (piece_bytes - piece_bytes % KERNEL_ALIGNMENT).max(KERNEL_ALIGNMENT);
    let mut done = 0;
    while done < run.len {
        let len = piece_bytes.min(run.len - done);
        entries.push(TableEntry { dst: run.dst + done, src: run.src + done, len });
        done += len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: CopyMethods = CopyMethods { batch: true, kernel: true };
    const KERNEL: CopyMethods = CopyMethods { batch: false, kernel: true };
    const BATCH: CopyMethods = CopyMethods { batch: true, kernel: false };
    const NONE: CopyMethods = CopyMethods { batch: false, kernel: false };

    fn copy(dst: u64, src: u64, len: u64) -> Copy {
        Copy { dst, src, len }
    }

    fn planned(copies: &[Copy], methods: &CopyMethods) -> Plan {
        plan(copies, methods, &Thresholds::default(), &[])
    }

    #[test]
    fn neighbours_on_both_sides_are_one_run_and_long_runs_are_for_a_copy_engine() {
        let half = 512 << 10;
        let copies = [copy(0, 1 << 30, half), copy(half, (1 << 30) + half, half), copy(4 * half, 0, half)];
        let whole = copy(0, 1 << 30, 2 * half);
        // The batch call makes half a MiB long, but calls of one copy each do not.
        assert_eq!(planned(&copies, &ALL), Plan { batch: vec![whole, copies[2]], ..Plan::default() });
        let without_batch = planned(&copies, &KERNEL);
        assert_eq!((without_batch.singles, without_batch.kernel.len()), (vec![whole], 32));
        assert_eq!(planned(&copies, &NONE).singles, [whole, copies[2]]);
        assert_eq!(planned(&copies[..2], &ALL).singles, [whole]);
    }

    #[test]
    fn scattered_pieces_go_to_the_kernel_and_without_it_to_the_batch_call() {
        let copies: Vec<_> = (0..5).map(|i| copy(i << 20, i << 16, 40 << 10)).collect();
        let with_kernel = planned(&copies, &ALL);
        let lens: Vec<_> = with_kernel.kernel.iter().take(3).map(|entry| entry.len >> 10).collect();
        assert_eq!((with_kernel.kernel.len(), lens), (15, vec![16, 16, 8]));
        assert_eq!(planned(&copies, &BATCH), Plan { batch: copies.clone(), ..Plan::default() });
        assert_eq!(planned(&copies, &NONE), Plan { singles: copies, ..Plan::default() });
    }

    #[test]
    fn beside_compute_short_runs_take_the_kernel() {
        let runs = [copy(0, 0, 64 << 10), copy(1 << 30, 1 << 30, 8 << 10), copy(2 << 30, 2 << 30, 16 << 10)];
        let kernel_bytes = |thresholds: Thresholds| {
            let planned = plan(&runs, &ALL, &thresholds, &[]);
            planned.kernel.iter().map(|entry| entry.len).sum::<u64>()
        };
        assert_eq!(kernel_bytes(Thresholds::beside_compute(Direction::HostToDevice)), 24 << 10);
        assert_eq!(kernel_bytes(Thresholds::beside_compute(Direction::DeviceToHost)), 8 << 10);
        assert_eq!(kernel_bytes(Thresholds::beside_compute(Direction::Peer)), 88 << 10);
        assert_eq!(kernel_bytes(Thresholds::idle(Direction::HostToDevice)), 24 << 10);
        assert_eq!(kernel_bytes(Thresholds::idle(Direction::DeviceToHost)), 88 << 10);
    }

    #[test]
    fn what_is_not_aligned_takes_the_copy_engine() {
        let odd = [copy(8, 0, 64), copy(128, 8, 64), copy(256, 256, 60)];
        let both = planned(&odd, &ALL);
        assert_eq!((both.kernel.len(), both.batch.len()), (0, 3));
        assert_eq!(planned(&odd[..1], &ALL).singles, odd[..1]);
    }

    #[test]
    fn a_copy_engine_stops_at_seams_of_either_side() {
        let cut = plan(&[copy(90, 1000, 30), copy(0, 95, 10)], &BATCH, &Thresholds::default(), &[100, 1015]);
        let parts =
            [copy(90, 1000, 10), copy(100, 1010, 5), copy(105, 1015, 15), copy(0, 95, 5), copy(5, 100, 5)];
        assert_eq!(cut.batch, parts);
        // A range that begins or ends at a seam does not cross it.
        let whole = plan(&[copy(100, 0, 30), copy(70, 50, 30)], &BATCH, &Thresholds::default(), &[100]);
        assert_eq!(whole.batch.len(), 2);
    }

    #[test]
    fn empty_copies_and_the_end_of_the_address_space_are_harmless() {
        let copies = [copy(0, 0, 0), copy(u64::MAX - 15, 0, 16), copy(0, 16, 16)];
        assert_eq!(planned(&copies, &ALL).kernel.len(), 2);
    }
}
