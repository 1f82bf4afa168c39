//! [`Together`]: loads the same bytes to several GPUs. Each GPU brings a share over its own link, for all of them.
//!
//! ```text
//!  host memory --link of GPU 0--> staging ring of GPU 0 --+--> memory of the engine on GPU 0, on GPU 1, ...
//!              --link of GPU 1--> staging ring of GPU 1 --+   each GPU reads all rings (the others' over NVLink) and scatters
//! ```
//! One thread enqueues for all GPUs, each wait after the work that ends it. So nothing waits in a circle.

use crate::driver::Copy;
use crate::error::GpuError;
use crate::plan::Thresholds;
use crate::rails::Loader;
use crate::relay::Relay;
use crate::ring::{Lent, READERS_MAX, Rail, Target};
use crate::split::{Chunk, split_among};
use crate::stream::Stream;

/// A load to several GPUs in progress. Call [`Together::synchronize_or`] before the memory is used otherwise; a drop waits
/// too.
#[derive(Debug)]
pub struct Together<'a> {
    loaders: Vec<&'a Loader>,
    relay: Relay<'a>,
    failed: bool,
}

impl<'a> Together<'a> {
    /// Begins a load of `bytes` to each loader's GPU. Its writes come after the work that is in the GPUs' `streams` by now.
    /// None if each GPU has to load by itself: too few bytes, two loaders of one GPU, GPUs that are no rails or do not reach
    /// each other, or links that other loads use. `pulls` decides how a ring is read.
    pub fn begin(
        loaders: &[&'a Loader],
        streams: &[&Stream],
        bytes: u64,
        pulls: &Thresholds,
    ) -> Option<Together<'a>> {
        let rails = loaders.first()?.rails();
        let count = loaders.len();
        let too_small = bytes < rails.options().least_bytes;
        if too_small || !(2..=READERS_MAX).contains(&count) || streams.len() != count {
            return None;
        }
        let links: Vec<&Rail> = loaders.iter().map(|loader| loader.own()).collect::<Option<_>>()?;
        let mut ordinals: Vec<u32> = links.iter().map(|rail| rail.ordinal()).collect();
        ordinals.sort_unstable();
        ordinals.dedup();
        if ordinals.len() < count
            || !loaders.iter().all(|loader| ordinals.iter().all(|gpu| loader.reads(*gpu)))
        {
            return None;
        }
        let targets: Vec<Target<'_>> = loaders
            .iter()
            .zip(streams)
            .map(|(loader, stream)| Target { gpu: loader.target(), stream })
            .collect();
        let mut rings: Vec<Lent<'a>> = Vec::with_capacity(count);
        for link in links {
            let Some(ring) = link.take(&targets, rails.making(pulls)) else {
                rings.into_iter().for_each(Lent::give_back);
                return None;
            };
            rings.push(ring);
        }
        loaders.iter().for_each(|loader| loader.count());
        Some(Together { loaders: loaders.to_vec(), relay: Relay::new(rings), failed: false })
    }

    /// Enqueues the copies of each GPU, from pinned host memory. Later work in its stream comes after all of them. It blocks
    /// only while launches use all tables of a kernel. Lists that differ in a source or a length are refused. After an error
    /// some copies may have been enqueued.
    ///
    /// # Safety
    /// As for [`crate::Copier::enqueue`], until the caller has waited for [`Together::synchronize_or`] and then for the
    /// streams. The streams are those with which the load began.
    pub unsafe fn enqueue(&mut self, streams: &[&Stream], copies: &[Vec<Copy>]) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        let enqueued = unsafe { self.enqueue_all(streams, copies) };
        self.failed |= enqueued.is_err();
        enqueued
    }

    /// # Safety
    /// As for [`Together::enqueue`].
    unsafe fn enqueue_all(&mut self, streams: &[&Stream], copies: &[Vec<Copy>]) -> Result<(), GpuError> {
        let count = self.loaders.len();
        let alike = copies.windows(2).all(|pair| are_alike(&pair[0], &pair[1]));
        if !alike || copies.len() != count || streams.len() != count {
            return Err(GpuError::Invalid(format!("{count} GPUs do not load the same bytes")));
        }
        let slot_bytes = self.loaders[0].rails().options().slot_bytes;
        let shares: Vec<Vec<Vec<Chunk>>> =
            copies.iter().map(|copies| split_among(copies, count, slot_bytes)).collect();
        for turn in 0.. {
            // SAFETY: the caller's promise; the lists are cut alike.
            if !unsafe { self.relay.turn(&shares, turn)? } {
                break;
            }
        }
        streams.iter().enumerate().try_for_each(|(target, stream)| self.relay.join(target, stream))
    }

    /// Waits for all GPUs. After an error no GPU has its bytes. If a GPU is lost, work on the others waits for it until
    /// `abandoned` says that wrong bytes in the memory of any of them do no harm.
    pub fn synchronize_or(&mut self, abandoned: impl FnMut() -> bool) -> Result<(), GpuError> {
        let outcome = self.relay.finish(abandoned);
        self.failed |= outcome.is_err();
        if !self.failed {
            self.loaders[0].rails().count_rings(&mut self.relay);
        }
        outcome
    }
}

impl Drop for Together<'_> {
    fn drop(&mut self) {
        // A caller that needs the outcome has called `synchronize_or` before.
        let _ = self.synchronize_or(|| false);
        self.relay.give_back();
        self.loaders.iter().for_each(|loader| loader.uncount());
    }
}

fn are_alike(one: &[Copy], other: &[Copy]) -> bool {
    let key = |copy: &Copy| (copy.src, copy.len);
    one.len() == other.len() && one.iter().map(key).eq(other.iter().map(key))
}
