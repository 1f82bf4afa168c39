//! Dropping a namespace for good: the file says what does not count any more.

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

/// What was dropped of one file.
pub(crate) struct DropTable {
    file: File,
    /// As it stands in the file. Held while the file is written, however long that takes.
    drops: Mutex<Drops>,
    /// What was dropped and is not noted: being noted, or that failed. Never held while anything waits for a device, so
    /// that metrics, status and the daemon's end do not wait for one either. Taken after `drops` where both are.
    missing: Mutex<BTreeSet<Namespace>>,
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
        Ok(DropTable { file: file.file.try_clone()?, drops: Mutex::new(drops), missing: Mutex::default() })
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

    /// Namespaces that the file could not do without, were it opened now.
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

    /// The file was read and has nothing above generation `last`: what was dropped in the run before ends there, so that what
    /// is written from now on counts. Namespaces of which the file can have no record are forgotten.
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

    /// Nothing counts any more of what is written of a namespace in this run, or was before. When this returns without an
    /// error the file says so. `may_hold` tells whether a segment up to a generation may have a record of a namespace; it is
    /// asked when the table is full.
    pub(crate) fn drop_namespace(
        &self,
        namespace: Namespace,
        may_hold: impl Fn(&Namespace, u64) -> bool,
    ) -> Result<(), NoteError> {
        // At once, for whoever asks meanwhile.
        self.missing.lock().insert(namespace);
        let mut drops = self.drops.lock();
        // Again: whoever noted it meanwhile did so for an earlier drop.
        self.missing.lock().insert(namespace);
        match self.note(&mut drops, &may_hold) {
            Err(error) if self.missing.lock().contains(&namespace) => Err(error),
            _ => Ok(()),
        }
    }

    /// Tries again to note what could not be noted.
    pub(crate) fn note_missing(&self, may_hold: impl Fn(&Namespace, u64) -> bool) -> Result<(), NoteError> {
        self.note(&mut self.drops.lock(), &may_hold)
    }

    /// What was dropped and is not noted. Waits for no device.
    pub(crate) fn missing(&self) -> BTreeSet<Namespace> {
        self.missing.lock().clone()
    }

    fn note(&self, drops: &mut Drops, may_hold: &impl Fn(&Namespace, u64) -> bool) -> Result<(), NoteError> {
        let missing = self.missing();
        // What the file has lost by now, or never had, cannot come back once that is synced.
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
        // What others have dropped meanwhile stays.
        self.missing.lock().retain(|namespace| !missing.contains(namespace) || left_out.contains(namespace));
        if left_out.is_empty() { Ok(()) } else { Err(NoteError::Full(Drops::NAMESPACES_MAX)) }
    }

    /// One copy after the other: whenever this is cut off, one of them is whole.
    /// `needs_fewer`: a namespace is not to be noted because the file has lost what it had of it.
    fn write(&self, drops: &mut Drops, mut changed: Drops, needs_fewer: bool) -> io::Result<()> {
        let forgets = drops.namespaces.keys().any(|namespace| !changed.namespaces.contains_key(namespace));
        if forgets || needs_fewer {
            // What made these needless, the heads of later segments, must not be lost in a power failure that comes after.
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

/// Whether a record may be left that would count without the entry.
fn is_needed(
    drops: &Drops,
    namespace: &Namespace,
    generation: u64,
    may_hold: &impl Fn(&Namespace, u64) -> bool,
) -> bool {
    generation > drops.all_up_to && may_hold(namespace, generation)
}

/// Takes out what is not needed any more.
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

    /// A segment was used again, so that the file has nothing of a namespace any more, and its new head lay in the device's
    /// cache only. The drop answered "done" without a sync: after a power failure the old head was back, and with it the
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

    /// The lock under which the drops are written was also what the daemon's metrics, its status and its end waited for: an
    /// SSD that hung stopped all of them.
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
