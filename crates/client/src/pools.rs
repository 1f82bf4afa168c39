//! The pools that a worker has mapped, by the daemon's boot. [`PoolBook`](crate::links::promises::PoolBook) decides which stay.

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc};

use kvlane_block::PoolOffset;
use kvlane_memory::PoolView;

use crate::{boot::BootId, links::worker::failures::NotMapped};

/// Bytes that are prefaulted between two polls of the queue.
const PREFAULT_BYTES: u64 = 64 << 20;

/// The mapping of one boot's pool.
#[derive(Debug)]
pub(crate) struct Mapped {
    /// Read-only; loads copy from it.
    pub(crate) reading: Arc<PoolView>,
    /// Saves are written here, if the daemon may not read this process.
    pub(crate) writing: Option<Arc<PoolView>>,
    /// Page tables are filled for the first so many bytes.
    prefaulted: u64,
}

/// Mapped pools by boot.
#[derive(Debug, Default)]
pub(crate) struct MappedPools {
    views: BTreeMap<BootId, Mapped>,
    /// The boot of the daemon that this worker is connected to.
    present: Option<BootId>,
}

impl MappedPools {
    /// Maps the pool of that boot, in place of a former mapping of it, and makes it the present one.
    ///
    /// # Errors
    /// [`NotMapped`]; then a former mapping of it stays.
    pub(crate) fn map(
        &mut self,
        boot: BootId,
        descriptor: OwnedFd,
        bytes: u64,
        writable: bool,
    ) -> Result<(), NotMapped> {
        let map = |fd, writable| {
            PoolView::map(fd, bytes, writable)
                .map(Arc::new)
                .map_err(|error| NotMapped::Refused { bytes, error })
        };
        let writing = if writable {
            let second = descriptor.try_clone().map_err(NotMapped::NoDescriptorLeft)?;
            Some(map(second, true)?)
        } else {
            None
        };
        let reading = map(descriptor, false)?;
        self.views.insert(boot, Mapped { reading, writing, prefaulted: 0 });
        self.present = Some(boot);
        Ok(())
    }

    /// Unmaps a pool. Copies in flight keep their view of it.
    pub(crate) fn unmap(&mut self, boot: &BootId) {
        self.views.remove(boot);
    }

    /// The daemon of the present pool was lost. Its pool stays mapped.
    pub(crate) fn lost(&mut self) {
        self.present = None;
    }

    pub(crate) fn of(&self, boot: &BootId) -> Option<&Mapped> {
        self.views.get(boot)
    }

    pub(crate) fn present(&self) -> Option<&Mapped> {
        self.of(self.present.as_ref()?)
    }

    /// Fills some page tables of the present pool, so that the first loads do not fault page by page. True until all are
    /// filled.
    pub(crate) fn prefault_some(&mut self) -> bool {
        let Some(pool) = self.present.and_then(|boot| self.views.get_mut(&boot)) else { return false };
        let length = PREFAULT_BYTES.min(pool.reading.bytes() - pool.prefaulted);
        if length == 0 {
            return false;
        }
        for view in std::iter::once(&pool.reading).chain(&pool.writing) {
            if let Err(error) = view.prefault(PoolOffset(pool.prefaulted), length) {
                tracing::debug!(%error, "cannot prefault the pool; loads fault page by page");
                pool.prefaulted = pool.reading.bytes();
                return false;
            }
        }
        pool.prefaulted += length;
        true
    }
}
