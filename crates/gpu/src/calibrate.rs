//! Measures from which length on a copy engine is as fast as the kernel on this machine, and sets the thresholds.

use std::sync::Arc;
use std::time::Instant;

use crate::bench::{CopyMethod, options};
use crate::copier::{Copier, CopierOptions};
use crate::device::{DeviceMemory, Gpu};
use crate::driver::{Copy, Priority};
use crate::error::GpuError;
use crate::plan::{Direction, Thresholds};
use crate::stream::Stream;

/// Lengths of the pieces that are measured, ascending.
pub const LENGTHS: [u64; 4] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// Bytes of one measured copy, if the host's range has as many. With fewer the time before the first call counts too much:
/// with 64 MiB on an H200, copy engines seemed slower than the kernel in pieces of 256 KiB, which they are not.
pub const CALIBRATION_BYTES: u64 = 256 << 20;

/// Rounds over all lengths and ways; their median counts. Over a link of 50 GB/s all rounds take 0.3 s.
const ROUNDS: usize = 3;

/// A copy engine that is this close to the kernel is preferred. Even a load for which nothing else computes has its own
/// request computing beside it, once it is released, and kernels of two processes take turns: with a kernel for pieces of
/// 64 KiB, 10,000 cached and 2,000 new tokens took 1.34 times as long on an H200 as with everything in GPU memory, and
/// 1.05 times with copy engines, although alone the kernel is as fast.
const AS_FAST: f64 = 0.85;

const DIRECTIONS: [Direction; 2] = [Direction::HostToDevice, Direction::DeviceToHost];

/// The rate of pieces of one length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// From the host or to it. Copies between GPUs are not measured.
    pub direction: Direction,
    /// Bytes of a piece.
    pub piece_bytes: u64,
    /// The way they were copied.
    pub method: CopyMethod,
    /// 10^9 bytes a second, the median of the rounds.
    pub gb_per_s: f64,
}

/// Measured rates, and the thresholds that follow for a GPU on which nothing computes. The default is [`Thresholds::idle`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Calibration {
    rates: Vec<Rate>,
}

impl Calibration {
    /// Measures copies between pinned host memory at `host` and a GPU on which nothing else runs. Meanwhile it takes as much
    /// memory of the GPU. The host's bytes stay the same.
    ///
    /// # Errors
    /// Less memory than two of the longest pieces, and the driver's errors.
    ///
    /// # Safety
    /// The range is pinned for the GPU, and no other code touches it until this returns.
    pub unsafe fn measure(gpu: &Gpu, host: u64, host_bytes: u64) -> Result<Calibration, GpuError> {
        let longest = LENGTHS[LENGTHS.len() - 1];
        let bytes = host_bytes.min(CALIBRATION_BYTES) / longest * longest;
        if bytes < 2 * longest {
            return Err(GpuError::Invalid(format!("{host_bytes} bytes are too few to measure copies with")));
        }
        let scratch = gpu.alloc(bytes)?;
        let stream = Arc::new(Stream::new(gpu, Priority::High)?);
        let methods = methods(gpu);
        let mut ways = Vec::new();
        // To the device first, so the bytes that come back are those that were there.
        for direction in DIRECTIONS {
            for method in &methods {
                let mut copier = Copier::new(Arc::clone(&stream), options(gpu, *method, direction)?)?;
                // The first copy makes the tables of the kernel, and does not count.
                let copies = pieces(direction, LENGTHS[0], host, &scratch);
                // SAFETY: the caller's promise is passed on.
                unsafe { timed(&mut copier, &copies, direction)? };
                ways.push((direction, *method, copier, [[0.0; ROUNDS]; LENGTHS.len()]));
            }
        }
        for round in 0..ROUNDS {
            for (direction, _, copier, seconds) in &mut ways {
                for (piece_bytes, seconds) in LENGTHS.into_iter().zip(seconds) {
                    let copies = pieces(*direction, piece_bytes, host, &scratch);
                    // SAFETY: the caller's promise is passed on.
                    seconds[round] = unsafe { timed(copier, &copies, *direction)? };
                }
            }
        }
        let mut rates = Vec::new();
        for (direction, method, _, seconds) in ways {
            for (piece_bytes, mut seconds) in LENGTHS.into_iter().zip(seconds) {
                seconds.sort_by(f64::total_cmp);
                let gb_per_s = bytes as f64 / seconds[ROUNDS / 2] / 1e9;
                rates.push(Rate { direction, piece_bytes, method, gb_per_s });
            }
        }
        Ok(Calibration { rates })
    }

    /// All measured rates.
    pub fn rates(&self) -> &[Rate] {
        &self.rates
    }

    /// The thresholds while nothing computes on the GPU.
    pub fn thresholds(&self, direction: Direction) -> Thresholds {
        let usual = Thresholds::idle(direction);
        Thresholds {
            batch_bytes: engine_from(&self.rates, direction, CopyMethod::Batch).unwrap_or(usual.batch_bytes),
            engine_bytes: engine_from(&self.rates, direction, CopyMethod::CopyEngine)
                .unwrap_or(usual.engine_bytes),
            ..usual
        }
    }
}

/// The ways to copy that a copier uses on this GPU.
fn methods(gpu: &Gpu) -> Vec<CopyMethod> {
    let has = gpu.methods();
    let kernel = CopyMethod::Kernel { blocks: CopierOptions::default().host_blocks };
    // A copier makes calls of one copy only if there is no batch call.
    let all = [(has.kernel, kernel), (has.batch, CopyMethod::Batch), (!has.batch, CopyMethod::CopyEngine)];
    all.into_iter().filter(|(there, _)| *there).map(|(_, method)| method).collect()
}

/// Copies, and gives the seconds until they are done.
///
/// # Safety
/// As for [`Copier::enqueue`]; the stream is idle.
unsafe fn timed(copier: &mut Copier, copies: &[Copy], direction: Direction) -> Result<f64, GpuError> {
    let start = Instant::now();
    // SAFETY: the caller's promise.
    let enqueued = unsafe { copier.enqueue(copies, direction) };
    // Also after an error, because some copies may be under way.
    copier.stream().synchronize()?;
    enqueued?;
    Ok(start.elapsed().as_secs_f64())
}

/// Pieces that fill both ranges, in reverse order on one side, so that none continues another.
fn pieces(direction: Direction, piece_bytes: u64, host: u64, scratch: &DeviceMemory) -> Vec<Copy> {
    let count = scratch.bytes() / piece_bytes;
    let piece = |index| {
        // The order is the same both ways: each piece comes back from where it went to.
        let there = scratch.address() + index * piece_bytes;
        let here = host + (count - 1 - index) * piece_bytes;
        match direction {
            Direction::DeviceToHost => Copy { dst: here, src: there, len: piece_bytes },
            Direction::HostToDevice | Direction::Peer => Copy { dst: there, src: here, len: piece_bytes },
        }
    };
    (0..count).map(piece).collect()
}

/// The shortest length from which on this way, by a copy engine, is about as fast as the kernel. If it never is, a length
/// beyond the measured ones. None if one of the two was not measured.
fn engine_from(rates: &[Rate], direction: Direction, method: CopyMethod) -> Option<u64> {
    let of = |wanted: &dyn Fn(CopyMethod) -> bool| -> Vec<(u64, f64)> {
        let rates = rates.iter().filter(|rate| rate.direction == direction && wanted(rate.method));
        rates.map(|rate| (rate.piece_bytes, rate.gb_per_s)).collect()
    };
    let kernel = of(&|method| matches!(method, CopyMethod::Kernel { .. }));
    let engine = of(&|other| other == method);
    let longest = engine.last()?.0;
    kernel.last()?;
    let mut from = 2 * longest;
    for ((bytes, engine), (_, kernel)) in engine.iter().zip(&kernel).rev() {
        if *engine < AS_FAST * kernel {
            break;
        }
        from = *bytes;
    }
    Some(from)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: CopyMethod = CopyMethod::Kernel { blocks: 8 };

    fn rates(direction: Direction, method: CopyMethod, gb_per_s: [f64; 4]) -> Vec<Rate> {
        let rate = |(piece_bytes, gb_per_s)| Rate { direction, piece_bytes, method, gb_per_s };
        LENGTHS.into_iter().zip(gb_per_s).map(rate).collect()
    }

    fn threshold(kernel: [f64; 4], batch: [f64; 4]) -> u64 {
        let direction = Direction::HostToDevice;
        let rates = [rates(direction, KERNEL, kernel), rates(direction, CopyMethod::Batch, batch)].concat();
        Calibration { rates }.thresholds(direction).batch_bytes >> 10
    }

    #[test]
    fn the_engine_begins_where_it_is_as_fast_for_all_longer_pieces() {
        assert_eq!(threshold([50.0; 4], [20.0, 52.0, 54.0, 55.0]), 64);
        // 0.85 of the kernel's rate is enough.
        assert_eq!(threshold([50.0; 4], [20.0, 43.0, 54.0, 55.0]), 64);
        assert_eq!(threshold([50.0; 4], [20.0, 42.0, 54.0, 55.0]), 256);
        // Fast, but not faster than what follows.
        assert_eq!(threshold([50.0; 4], [60.0, 40.0, 54.0, 55.0]), 256);
        assert_eq!(threshold([50.0; 4], [60.0; 4]), 16);
        assert_eq!(threshold([50.0; 4], [40.0; 4]), 2048);
    }

    #[test]
    fn what_was_not_measured_is_what_it_usually_is() {
        let direction = Direction::DeviceToHost;
        let usual = Thresholds::idle(direction);
        assert_eq!(Calibration::default().thresholds(direction), usual);
        let without_kernel = Calibration { rates: rates(direction, CopyMethod::Batch, [60.0; 4]) };
        assert_eq!(without_kernel.thresholds(direction), usual);
        let single = [
            rates(direction, KERNEL, [50.0; 4]),
            rates(direction, CopyMethod::CopyEngine, [1.0, 2.0, 50.0, 55.0]),
        ];
        let measured = Calibration { rates: single.concat() };
        let wanted = Thresholds { engine_bytes: 256 << 10, ..usual };
        assert_eq!(measured.thresholds(direction), wanted);
        // The other directions were not measured.
        assert_eq!(measured.thresholds(Direction::Peer), Thresholds::idle(Direction::Peer));
    }
}
