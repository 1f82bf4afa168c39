//! [`DropTable`]: dropped namespaces of one file, kept in the file so that a restart does not bring their blocks back.
//!
//! A drop first enters `missing`. Then both copies of the table are written and synced, one after the other, and the
//! drop leaves `missing`. A write that fails leaves it there, to be retried. An entry is needed only as long as a
//! segment may have a record of the namespace (`holdings`).

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use kvlane_block::Namespace;
use parking_lot::Mutex;

use crate::file::{TierFile, read_full};
use crate::layout::{Drops, LayoutError};
use crate::pages::Pages;
use crate::request::NoteError;

/// The drop table of one file, and the drops that have not reached it.
pub(crate) struct DropTable {
    file: File,
    /// The table as it stands in the file. Locked while the file is written, however long that takes.
    drops: Mutex<Drops>,
    /// Drops whose write to the file is in progress or has failed. Never locked while a device is waited for, so that
    /// metrics, status and the daemon's end do not wait for one either. Locked after `drops` where both are.
    missing: Mutex<BTreeSet<Namespace>>,
}

impl DropTable {
    /// Reads both copies; the newer one counts. If a copy was written and neither is readable, no record of the file
    /// counts, because any of them may have been dropped.
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
                // Log: nobody can tell which namespaces were dropped, so no block of this file is used; new ones
                // are kept. Do: look at the disk's own health.
                tracing::warn!(
                    path = %file.path.display(),
                    "SSD drop table damaged in both copies; this file starts empty"
                );
                Drops { all_up_to: Drops::OF_THIS_RUN, ..Drops::none(device_id) }
            }
            None => Drops::none(device_id),
        };
        Ok(DropTable { file: file.file.try_clone()?, drops: Mutex::new(drops), missing: Mutex::default() })
    }

    /// Whether records of a segment of this generation count.
    pub(crate) fn counts(&self, namespace: &Namespace, generation: u64) -> bool {
        self.drops.lock().counts(namespace, generation)
    }

    /// The highest generation that the table names. Later segments need higher ones, or the entry would void them.
    pub(crate) fn highest(&self) -> u64 {
        let drops = self.drops.lock();
        let named = drops.namespaces.values().copied().chain([drops.all_up_to]);
        named.filter(|generation| *generation != Drops::OF_THIS_RUN).max().unwrap_or(0)
    }

    /// The number of entries that the file needs if it is opened with `last` as its highest generation.
    pub(crate) fn needed(&self, last: u64, may_hold: impl Fn(&Namespace, u64) -> bool) -> usize {
        let drops = self.drops.lock();
        drops
            .namespaces
            .iter()
            .filter(|(namespace, generation)| {
                is_needed(&drops, namespace, (**generation).min(last), &may_hold)
            })
            .count()
    }

    /// Called when the file was read and has no generation above `last`. Limits the drops of the previous run to
    /// `last`, so that records written from now on count. Removes the entries that the file does not need.
    pub(crate) fn end_former_run(
        &self,
        last: u64,
        may_hold: impl Fn(&Namespace, u64) -> bool,
    ) -> io::Result<()> {
        let mut drops = self.drops.lock();
        let mut changed = drops.clone();
        let open = changed.namespaces.values_mut().chain([&mut changed.all_up_to]);
        open.filter(|generation| **generation == Drops::OF_THIS_RUN)
            .for_each(|generation| *generation = last);
        compact(&mut changed, &may_hold);
        self.write(&mut drops, changed, false)
    }

    /// Writes a drop to the file: after a restart no record of the namespace counts that was written before or in this
    /// run. Once this has returned without an error, the file says so. `may_hold(namespace, up_to)` tells whether a
    /// segment of generation `up_to` or lower may have a record of a namespace.
    pub(crate) fn drop_namespace(
        &self,
        namespace: Namespace,
        may_hold: impl Fn(&Namespace, u64) -> bool,
    ) -> Result<(), NoteError> {
        // Insert before waiting for the lock, so that the status shows the drop meanwhile.
        self.missing.lock().insert(namespace);
        let mut drops = self.drops.lock();
        // Insert again, because a writer that held the lock may have removed it for an earlier drop.
        self.missing.lock().insert(namespace);
        match self.write_missing(&mut drops, &may_hold) {
            Err(error) if self.missing.lock().contains(&namespace) => Err(error),
            _ => Ok(()),
        }
    }

    /// Retries the drops that are missing in the file.
    pub(crate) fn note_missing(&self, may_hold: impl Fn(&Namespace, u64) -> bool) -> Result<(), NoteError> {
        self.write_missing(&mut self.drops.lock(), &may_hold)
    }

    /// Drops that are not in the file yet. Never waits for a device.
    pub(crate) fn missing(&self) -> BTreeSet<Namespace> {
        self.missing.lock().clone()
    }

    fn write_missing(
        &self,
        drops: &mut Drops,
        may_hold: &impl Fn(&Namespace, u64) -> bool,
    ) -> Result<(), NoteError> {
        let missing = self.missing();
        // A namespace without records in the file needs no entry, once the writes that made it so are synced.
        let (held, lost): (BTreeSet<_>, BTreeSet<_>) =
            missing.iter().partition(|namespace| may_hold(namespace, Drops::OF_THIS_RUN));
        let mut changed = drops.clone();
        let new = held.iter().filter(|namespace| !changed.namespaces.contains_key(*namespace)).count();
        if changed.namespaces.len() + new > Drops::NAMESPACES_MAX {
            compact(&mut changed, may_hold);
        }
        let mut left_out = BTreeSet::new();
        for namespace in held {
            let has_room = changed.namespaces.len() < Drops::NAMESPACES_MAX;
            if has_room || changed.namespaces.contains_key(&namespace) {
                changed.namespaces.insert(namespace, Drops::OF_THIS_RUN);
            } else {
                left_out.insert(namespace);
            }
        }
        self.write(drops, changed, !lost.is_empty()).map_err(NoteError::Io)?;
        // Keep the drops that other callers have added meanwhile.
        self.missing.lock().retain(|namespace| !missing.contains(namespace) || left_out.contains(namespace));
        if left_out.is_empty() { Ok(()) } else { Err(NoteError::Full(Drops::NAMESPACES_MAX)) }
    }

    /// Writes one copy after the other, so that one of them is whole at any time. With `needs_fewer`, a drop needs no
    /// entry because the file has no record of its namespace left: that must be synced too.
    fn write(&self, drops: &mut Drops, mut changed: Drops, needs_fewer: bool) -> io::Result<()> {
        let forgets = drops.namespaces.keys().any(|namespace| !changed.namespaces.contains_key(namespace));
        if forgets || needs_fewer {
            // The heads of later segments made entries needless. Sync them first, because a power failure that loses
            // them would bring the dropped records back.
            self.file.sync_data()?;
        }
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

/// Whether a record may be left that would count if the entry were removed.
fn is_needed(
    drops: &Drops,
    namespace: &Namespace,
    generation: u64,
    may_hold: &impl Fn(&Namespace, u64) -> bool,
) -> bool {
    generation > drops.all_up_to && may_hold(namespace, generation)
}

/// Removes the entries that are not needed any more.
fn compact(drops: &mut Drops, may_hold: &impl Fn(&Namespace, u64) -> bool) {
    let all = std::mem::take(&mut drops.namespaces);
    let needed =
        all.into_iter().filter(|(namespace, generation)| is_needed(drops, namespace, *generation, may_hold));
    drops.namespaces = needed.collect();
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: Namespace = Namespace([1; 16]);

    fn table(file: File) -> DropTable {
        DropTable { file, drops: Mutex::new(Drops::none([7; 16])), missing: Mutex::default() }
    }

    fn in_memory() -> File {
        rustix::fs::memfd_create("kvlane-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into()
    }

    /// A segment was reused, so that the file had no record of a namespace left, and the new head was only in the
    /// device's cache. The drop returned without a sync. After a power failure the old head was back, and with it the
    /// blocks that had been dropped.
    #[test]
    fn a_drop_that_needs_no_entry_is_done_only_when_what_made_it_needless_is_synced() {
        // The kernel syncs no such device: it answers EINVAL.
        let mut drops = table(File::open("/dev/null").unwrap());
        let answer = drops.drop_namespace(NAME, |_, _| false);
        assert!(matches!(answer, Err(NoteError::Io(_))), "{answer:?}");
        assert_eq!(drops.missing(), BTreeSet::from([NAME]));
        assert!(drops.note_missing(|_, _| false).is_err());
        drops.file = in_memory();
        drops.note_missing(|_, _| false).unwrap();
        assert!(drops.missing().is_empty());
    }

    /// The daemon's metrics, its status and its end waited for the lock under which the drop table is written. An SSD
    /// that hung stopped all of them.
    #[test]
    fn what_is_missing_is_told_while_the_file_is_written() {
        let drops = table(in_memory());
        let (say, said) = std::sync::mpsc::channel();
        let (go_on, may_go) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let (drops, told) = (&drops, say.clone());
            let may_hold = move |_: &Namespace, _| {
                // In the middle of it, as a write that hangs.
                let _ = say.send(None);
                may_go.recv_timeout(std::time::Duration::from_secs(20)).is_ok()
            };
            scope.spawn(move || drops.drop_namespace(NAME, may_hold).unwrap());
            assert_eq!(said.recv().unwrap(), None);
            scope.spawn(move || told.send(Some(drops.missing())));
            let answer = said.recv_timeout(std::time::Duration::from_secs(10));
            go_on.send(()).unwrap();
            assert_eq!(answer, Ok(Some(BTreeSet::from([NAME]))));
        });
        assert!(drops.missing().is_empty());
    }
}
