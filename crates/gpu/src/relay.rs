//! A load's way through the rings of several GPUs, to one target or more.

use std::thread;
use std::time::Duration;

use crate::error::GpuError;
use crate::ring::Lent;
use crate::split::Chunk;
use crate::stream::Stream;

/// Between two looks at what is under way.
const LOOK_EVERY: Duration = Duration::from_micros(20);
/// The same after a failure, which may take long to be over.
const LOOK_AFTER_FAILURE: Duration = Duration::from_millis(5);

/// Rings in the hands of one load.
///
/// When a GPU is lost, others wait for what it was to bring. Their waits could be ended from here, but what follows them
/// would then write wrong bytes, perhaps over the right ones that the engine has put there itself meanwhile: so they are
/// ended only when nobody minds any more, that is, when the engine is gone.
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

    /// Enqueues one chunk of each ring: of `shares`, which are ordered by target, ring and turn. Turn by turn, so that
    /// every link soon has something to do. False when there were none left.
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

    /// Later work of a target's stream comes after all that the rings bring it.
    pub(crate) fn join(&mut self, target: usize, stream: &Stream) -> Result<(), GpuError> {
        self.rings.iter_mut().try_for_each(|ring| ring.join(target, stream))
    }

    /// Waits on the host until something holds; ends with the failure of any GPU.
    pub(crate) fn wait_until(
        &mut self,
        mut holds: impl FnMut(&[Lent<'a>]) -> Result<bool, GpuError>,
    ) -> Result<(), GpuError> {
        while !holds(&self.rings)? {
            self.look();
            match &self.failure {
                Some(error) => return Err(error.clone()),
                None => thread::sleep(LOOK_EVERY),
            }
        }
        Ok(())
    }

    /// Waits until nothing of the rings is under way, and reports what failed. Once something failed, `abandoned` tells
    /// when nobody minds what is written to the targets.
    pub(crate) fn finish(&mut self, mut abandoned: impl FnMut() -> bool) -> Result<(), GpuError> {
        if std::mem::take(&mut self.under_way) {
            while !self.look() {
                if self.failure.is_none() {
                    thread::sleep(LOOK_EVERY);
                    continue;
                }
                if abandoned() {
                    // Again and again, since a GPU that goes on may still write the number that it has come to.
                    self.rings.iter().for_each(Lent::release);
                }
                thread::sleep(LOOK_AFTER_FAILURE);
            }
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Bytes that went over each link since the last call, by the ordinal of its GPU.
    pub(crate) fn take_bytes(&mut self) -> Vec<(u32, u64)> {
        self.rings.iter_mut().map(Lent::take_bytes).collect()
    }

    /// Looks at all GPUs; true if nothing is under way.
    fn look(&mut self) -> bool {
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

    /// Hands the rings back; nothing is under way.
    pub(crate) fn give_back(&mut self) {
        self.rings.drain(..).for_each(Lent::give_back);
    }
}
