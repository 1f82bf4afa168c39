//! Dropping a namespace for good: the file says what does not count any more.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use kvlane_block::Namespace;
use parking_lot::Mutex;

use crate::file::{TierFile, read_full};
use crate::layout::{Drops, LayoutError};
use crate::pages::Pages;

/// What was dropped of one file.
pub(crate) struct DropTable {
    file: File,
    drops: Mutex<Drops>,
}

impl DropTable {
    /// Reads both copies. Where one was written and neither can be read, nothing of the file counts: any of it may have been
    /// dropped.
    pub(crate) fn read(file: &TierFile) -> io::Result<DropTable> {
        let device_id = file.superblock.device_id;
        let (mut newest, mut is_damaged) = (None::<Drops>, false);
        for offset in Drops::COPIES {
            let mut copy = Pages::new(Drops::COPY_BYTES as usize);
            read_full(&file.file, copy.bytes_mut(), offset)?;
            match Drops::decode(copy.bytes()) {
                Ok(found) if found.is_of(&device_id) => {
                    if newest.as_ref().is_none_or(|known| known.sequence < found.sequence) {
                        newest = Some(found);
                    }
                }
                Err(LayoutError::OtherKind) if copy.bytes().iter().all(|byte| *byte == 0) => {}
                _ => is_damaged = true,
            }
        }
        let drops = match newest {
            Some(drops) => drops,
            None if is_damaged => {
                tracing::warn!(
                    path = %file.path.display(),
                    "which namespaces were dropped cannot be read: the SSD tier starts empty"
                );
                Drops { all_up_to: Drops::OF_THIS_RUN, ..Drops::none(device_id) }
            }
            None => Drops::none(device_id),
        };
        Ok(DropTable { file: file.file.try_clone()?, drops: Mutex::new(drops) })
    }

    /// Whether records of a segment of this generation count.
    pub(crate) fn counts(&self, namespace: &Namespace, generation: u64) -> bool {
        self.drops.lock().counts(namespace, generation)
    }

    /// The highest generation that is named, which no later segment may have.
    pub(crate) fn highest(&self) -> u64 {
        let drops = self.drops.lock();
        let named = drops.namespaces.values().copied().chain([drops.all_up_to]);
        named.filter(|generation| *generation != Drops::OF_THIS_RUN).max().unwrap_or(0)
    }

    /// The file was read and has nothing above generation `last`: what was dropped in the run before ends there, so that what
    /// is written from now on counts.
    pub(crate) fn end_former_run(&self, last: u64) -> io::Result<()> {
        let mut drops = self.drops.lock();
        let mut changed = drops.clone();
        let open = changed.namespaces.values_mut().chain([&mut changed.all_up_to]);
        open.filter(|generation| **generation == Drops::OF_THIS_RUN)
            .for_each(|generation| *generation = last);
        self.write(&mut drops, changed)
    }

    /// Nothing counts any more of what is written of a namespace in this run, or was before. When this returns without an
    /// error the file says so.
    pub(crate) fn drop_namespace(&self, namespace: Namespace) -> io::Result<()> {
        let mut drops = self.drops.lock();
        let mut changed = drops.clone();
        changed.namespaces.insert(namespace, Drops::OF_THIS_RUN);
        if changed.namespaces.len() > Drops::NAMESPACES_MAX {
            return Err(io::Error::other("so many namespaces were dropped that no more can be noted"));
        }
        self.write(&mut drops, changed)
    }

    /// One copy after the other: whenever this is cut off, one of them is whole.
    fn write(&self, drops: &mut Drops, mut changed: Drops) -> io::Result<()> {
        if changed == *drops {
            return Ok(());
        }
        changed.sequence += 1;
        let pages = Pages::with(&changed.encode());
        assert!(pages.len() as u64 <= Drops::COPY_BYTES, "{} namespaces", changed.namespaces.len());
        for offset in Drops::COPIES {
            self.file.write_all_at(pages.bytes(), offset)?;
            self.file.sync_data()?;
        }
        *drops = changed;
        Ok(())
    }
}
