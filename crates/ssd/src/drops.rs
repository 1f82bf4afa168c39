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
    drops: Mutex<Noted>,
}

struct Noted {
    /// As it stands in the file.
    drops: Drops,
    /// What was dropped and could not be noted.
    missing: BTreeSet<Namespace>,
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
        let noted = Noted { drops, missing: BTreeSet::new() };
        Ok(DropTable { file: file.file.try_clone()?, drops: Mutex::new(noted) })
    }

    /// Whether records of a segment of this generation count.
    pub(crate) fn counts(&self, namespace: &Namespace, generation: u64) -> bool {
        self.drops.lock().drops.counts(namespace, generation)
    }

    /// The highest generation that is named, which no later segment may have.
    pub(crate) fn highest(&self) -> u64 {
        let Noted { drops, .. } = &*self.drops.lock();
        let named = drops.namespaces.values().copied().chain([drops.all_up_to]);
        named.filter(|generation| *generation != Drops::OF_THIS_RUN).max().unwrap_or(0)
    }

    /// Namespaces that the file could not do without, were it opened now.
    pub(crate) fn needed(&self, last: u64, may_hold: impl Fn(&Namespace, u64) -> bool) -> usize {
        let Noted { drops, .. } = &*self.drops.lock();
        drops
            .namespaces
            .iter()
            .filter(|(namespace, generation)| {
                is_needed(drops, namespace, (**generation).min(last), &may_hold)
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
        let mut noted = self.drops.lock();
        let mut changed = noted.drops.clone();
        let open = changed.namespaces.values_mut().chain([&mut changed.all_up_to]);
        open.filter(|generation| **generation == Drops::OF_THIS_RUN)
            .for_each(|generation| *generation = last);
        compact(&mut changed, &may_hold);
        self.write(&mut noted.drops, changed)
    }

    /// Nothing counts any more of what is written of a namespace in this run, or was before. When this returns without an
    /// error the file says so. `may_hold` tells whether a segment up to a generation may have a record of a namespace; it is
    /// asked when the table is full.
    pub(crate) fn drop_namespace(
        &self,
        namespace: Namespace,
        may_hold: impl Fn(&Namespace, u64) -> bool,
    ) -> Result<(), NoteError> {
        let mut noted = self.drops.lock();
        noted.missing.insert(namespace);
        match self.note(&mut noted, &may_hold) {
            Err(error) if noted.missing.contains(&namespace) => Err(error),
            _ => Ok(()),
        }
    }

    /// Tries again to note what could not be noted.
    pub(crate) fn note_missing(&self, may_hold: impl Fn(&Namespace, u64) -> bool) -> Result<(), NoteError> {
        self.note(&mut self.drops.lock(), &may_hold)
    }

    /// What was dropped and could not be noted.
    pub(crate) fn missing(&self) -> BTreeSet<Namespace> {
        self.drops.lock().missing.clone()
    }

    fn note(&self, noted: &mut Noted, may_hold: &impl Fn(&Namespace, u64) -> bool) -> Result<(), NoteError> {
        // What the file has lost by now, or never had, cannot come back.
        noted.missing.retain(|namespace| may_hold(namespace, Drops::OF_THIS_RUN));
        let mut changed = noted.drops.clone();
        let new =
            noted.missing.iter().filter(|namespace| !changed.namespaces.contains_key(*namespace)).count();
        if changed.namespaces.len() + new > Drops::NAMESPACES_MAX {
            compact(&mut changed, may_hold);
        }
        let mut left_out = BTreeSet::new();
        for namespace in &noted.missing {
            let has_room = changed.namespaces.len() < Drops::NAMESPACES_MAX;
            if has_room || changed.namespaces.contains_key(namespace) {
                changed.namespaces.insert(*namespace, Drops::OF_THIS_RUN);
            } else {
                left_out.insert(*namespace);
            }
        }
        self.write(&mut noted.drops, changed).map_err(NoteError::Io)?;
        noted.missing = left_out;
        if noted.missing.is_empty() { Ok(()) } else { Err(NoteError::Full(Drops::NAMESPACES_MAX)) }
    }

    /// One copy after the other: whenever this is cut off, one of them is whole.
    fn write(&self, drops: &mut Drops, mut changed: Drops) -> io::Result<()> {
        if changed == *drops {
            return Ok(());
        }
        let forgets = drops.namespaces.keys().any(|namespace| !changed.namespaces.contains_key(namespace));
        if forgets {
            // What made these needless, the heads of later segments, must not be lost after them.
            self.file.sync_data()?;
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
