//! A load's way through the staging rings of several GPUs, to one target or more.
//!
//! Calls are made in turns, a slot's worth for each link. When the calls for the GPU's own link came first, four links brought
//! 2.1 times the rate of one for 256 MiB and 1.6 times for 1 GiB (four H200s): 4,096 calls for pieces take milliseconds, and
//! the rails were idle meanwhile.

use std::thread;
use std::time::Duration;

use crate::error::GpuError;
use crate::ring::Lent;
use crate::split::Chunk;
use crate::stream::Stream;

/// Between two queries of work in progress.
const POLL_EVERY: Duration = Duration::from_micros(20);
/// The same after a failure, which may take long to end.
const POLL_AFTER_FAILURE: Duration = Duration::from_millis(5);

/// The staging rings that one load uses.
///
/// If a GPU is lost, other GPUs wait for the bytes that it was to bring. The host could end these waits, but the work behind
/// them would then write wrong bytes, perhaps over right ones that the engine has written meanwhile. So the relay ends them
/// only once wrong bytes do no harm, because the engine is gone.
#[derive(Debug)]
pub(crate) struct Relay<'a> {
    rings: Vec<Lent<'a>>,
    failure: Option<GpuError>,
    under_way: bool,
}

impl<'a> Relay<'a> {
    pub(crate) fn new(rings: Vec<Lent<'a>>) -> Relay<'a> {
        Relay { rings, failure: None, under_way: false }
    }

    pub(crate) fn rings(&self) -> &[Lent<'a>] {
        &self.rings
    }

    /// Enqueues one chunk for each ring, so that every link soon has work. `shares` is ordered by target, ring and turn.
    /// Returns false if no chunk was left.
    ///
    /// # Safety
    /// As for [`crate::Copier::enqueue`], of the copies before they were split, until [`Relay::finish`]. All targets'
    /// chunks are cut alike.
    pub(crate) unsafe fn turn(&mut self, shares: &[Vec<Vec<Chunk>>], turn: usize) -> Result<bool, GpuError> {
        let mut some = false;
        for ring in 0..self.rings.len() {
            let chunks: Vec<&Chunk> = shares.iter().filter_map(|target| target[ring].get(turn)).collect();
            if chunks.is_empty() {
                continue;
            }
            some = true;
            self.under_way = true;
            self.wait_until(|rings| rings[ring].has_room(&chunks))?;
            // SAFETY: the caller's promise: a share is a part of the copies.
            unsafe { self.rings[ring].pass(&chunks)? };
        }
        Ok(some)
    }

    /// Orders later work of a target's stream after all bytes that the rings bring it.
    pub(crate) fn join(&mut self, target: usize, stream: &Stream) -> Result<(), GpuError> {
        self.rings.iter_mut().try_for_each(|ring| ring.join(target, stream))
    }

    /// Waits on the host until the condition holds. Ends with the failure of any GPU.
    pub(crate) fn wait_until(
        &mut self,
        mut holds: impl FnMut(&[Lent<'a>]) -> Result<bool, GpuError>,
    ) -> Result<(), GpuError> {
        while !holds(&self.rings)? {
            self.poll();
            match &self.failure {
                Some(error) => return Err(error.clone()),
                None => thread::sleep(POLL_EVERY),
            }
        }
        Ok(())
    }

    /// Waits until no work of the rings is in progress, and returns its error. After a failure `abandoned` says whether wrong
    /// bytes in the targets do no harm.
    pub(crate) fn finish(&mut self, mut abandoned: impl FnMut() -> bool) -> Result<(), GpuError> {
        if std::mem::take(&mut self.under_way) {
            while !self.poll() {
                if self.failure.is_none() {
                    thread::sleep(POLL_EVERY);
                    continue;
                }
                if abandoned() {
                    // Repeatedly, because a GPU that goes on may still write its own number over the released word.
                    self.rings.iter().for_each(Lent::release);
                }
                thread::sleep(POLL_AFTER_FAILURE);
            }
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Bytes over each link since the last call, by the ordinal of its GPU.
    pub(crate) fn take_bytes(&mut self) -> Vec<(u32, u64)> {
        self.rings.iter_mut().map(Lent::take_bytes).collect()
    }

    /// Polls all GPUs; true if no work is in progress.
    fn poll(&mut self) -> bool {
        let mut idle = true;
        for ring in &mut self.rings {
            let (over, outcome) = ring.is_idle();
            idle &= over;
            if let Err(error) = outcome {
                self.failure.get_or_insert(error);
            }
        }
        idle
    }

    /// Returns the rings to their rails. No work is in progress.
    pub(crate) fn give_back(&mut self) {
        self.rings.drain(..).for_each(Lent::give_back);
    }
}
