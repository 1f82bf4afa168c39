//! [`Neighbour`]: a process of this host whose GPU memory this one maps, and what it has mapped of it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvlane_gpu::Copy;

use super::copies::Within;
use super::handles::REGIONS_ASKED_MAX;
use super::imports::{FetchedMemory, ImportOf, RegionImport};
use super::meeting::Meeting;
use crate::carriers::card::SharedCard;
use crate::identity::Identity;

/// Most regions of a neighbour that are mapped at the same time.
const IMPORTS_MAX: usize = 4096;
/// A neighbour's regions stay mapped this long without use.
pub(super) const IDLE: Duration = Duration::from_secs(600);

/// Bytes of a neighbour's region, and where they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WantedBytes {
    pub(super) region: u32,
    pub(super) generation: u32,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) to: u64,
}

/// A process whose memory this one maps, over one connection.
#[derive(Debug)]
pub(super) struct Neighbour {
    pub(super) connection: u64,
    pub(super) identity: Identity,
    pub(super) meeting: Meeting,
    /// None until it was met.
    pub(super) card: Option<Arc<SharedCard>>,
    /// A pidfd of the process. None until it was met, or if the kernel gives none.
    pub(super) process: Option<Arc<OwnedFd>>,
    /// The watch's tag for `process`.
    pub(super) tag: u64,
    /// By region, generation and GPU of this process.
    imports: HashMap<(u32, u32, u16), Imported>,
    used_at: Duration,
    /// Whether the first fetch has begun.
    is_asked: bool,
}

/// A region that was asked for.
#[derive(Debug)]
pub(super) enum Imported {
    Fetching,
    Here(MappedRegion),
    /// The neighbour has given it back.
    Gone,
}

/// A mapped region, and its name for the message that it was unmapped.
#[derive(Debug, Clone)]
pub(super) struct MappedRegion {
    pub(super) of: Arc<ImportOf>,
    pub(super) import: Arc<RegionImport>,
}

/// The sources of a copy, and the imports that it keeps mapped.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) copies: Vec<Copy>,
    /// The copy keeps them mapped.
    pub(super) mapped: Vec<MappedRegion>,
    pub(super) within: Within,
}

/// Why a copy cannot begin yet, or ever.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotFound {
    /// These regions are to be fetched; empty if all are on their way.
    Missing(Vec<(u32, u32)>),
    /// A region is gone, or has no such bytes.
    Refused,
}

impl Neighbour {
    pub(super) fn new(connection: u64, identity: Identity, meeting: Meeting, now: Duration) -> Neighbour {
        Neighbour {
            connection,
            identity,
            meeting,
            card: None,
            process: None,
            tag: 0,
            imports: HashMap::new(),
            used_at: now,
            is_asked: false,
        }
    }

    /// The copies that bring these bytes to a GPU of this process.
    pub(super) fn find(
        &mut self,
        now: Duration,
        gpu: u16,
        wanted: &[WantedBytes],
    ) -> Result<Found, NotFound> {
        self.used_at = now;
        let (copies, mapped, within) = (Vec::new(), Vec::new(), Within::OneGpu);
        let (mut found, mut missing) = (Found { copies, mapped, within }, Vec::new());
        let mut waits = false;
        // Pieces mostly follow each other in one region.
        let mut last: Option<((u32, u32), &MappedRegion)> = None;
        for WantedBytes { region, generation, offset, len, to } in wanted {
            let which = (*region, *generation);
            if let Some((_, mapped)) = last.filter(|(of, _)| *of == which) {
                mapped.import.copies(*offset, *len, *to, &mut found.copies).ok_or(NotFound::Refused)?;
                continue;
            }
            match self.imports.get(&(*region, *generation, gpu)) {
                Some(Imported::Here(mapped)) => {
                    mapped.import.copies(*offset, *len, *to, &mut found.copies).ok_or(NotFound::Refused)?;
                    if !mapped.import.is_own_gpu {
                        found.within = Within::TwoGpus;
                    }
                    if !found.mapped.iter().any(|held| Arc::ptr_eq(&held.of, &mapped.of)) {
                        found.mapped.push(mapped.clone());
                    }
                    last = Some((which, mapped));
                }
                Some(Imported::Gone) => {
                    // A later request asks again.
                    self.imports.remove(&(*region, *generation, gpu));
                    return Err(NotFound::Refused);
                }
                Some(Imported::Fetching) => waits = true,
                None if missing.contains(&which) => {}
                None => missing.push(which),
            }
        }
        match missing.is_empty() && !waits {
            true => Ok(found),
            false => Err(NotFound::Missing(missing)),
        }
    }

    /// Marks regions as being fetched. Returns the asks for those that were not asked for before. The first ask also brings the
    /// card, so there is one even without regions. None: the neighbour has more regions than may be mapped.
    pub(super) fn begin_fetch(&mut self, gpu: u16, regions: Vec<(u32, u32)>) -> Option<Vec<Vec<(u32, u32)>>> {
        let is_new =
            |(region, generation): &(u32, u32)| !self.imports.contains_key(&(*region, *generation, gpu));
        let begun: Vec<(u32, u32)> = regions.into_iter().filter(is_new).collect();
        if self.imports.len() + begun.len() > IMPORTS_MAX {
            return None;
        }
        let fetching = |(region, generation): &(u32, u32)| ((*region, *generation, gpu), Imported::Fetching);
        self.imports.extend(begun.iter().map(fetching));
        let is_first = !std::mem::replace(&mut self.is_asked, true);
        Some(match begun.is_empty() {
            true if is_first => vec![Vec::new()],
            _ => begun.chunks(REGIONS_ASKED_MAX).map(<[_]>::to_vec).collect(),
        })
    }

    /// Takes in what was fetched. Returns the regions that are mapped now.
    pub(super) fn fetched(
        &mut self,
        gpu: u16,
        asked: &[(u32, u32)],
        memory: FetchedMemory,
    ) -> Vec<(u32, u32)> {
        let FetchedMemory { card, process, regions } = memory;
        self.card.get_or_insert(Arc::new(card));
        if self.process.is_none() {
            self.process = process.map(Arc::new);
        }
        for (region, generation) in asked {
            self.imports.insert((*region, *generation, gpu), Imported::Gone);
        }
        let mut mapped = Vec::with_capacity(regions.len());
        for import in regions {
            let (region, generation) = (import.region, import.generation);
            let of = Arc::new(ImportOf { region, generation, connection: self.connection });
            let here = Imported::Here(MappedRegion { of, import: Arc::new(import) });
            self.imports.insert((region, generation, gpu), here);
            mapped.push((region, generation));
        }
        mapped
    }

    /// Gives up a region: all of its mappings, for the caller to close.
    pub(super) fn take(&mut self, region: u32, generation: u32) -> Vec<MappedRegion> {
        let is_it = |key: &(u32, u32, u16)| (key.0, key.1) == (region, generation);
        self.take_where(|key, imported| is_it(key) && !matches!(imported, Imported::Fetching))
    }

    /// Gives up all regions.
    pub(super) fn take_all(&mut self) -> Vec<MappedRegion> {
        self.take_where(|_, _| true)
    }

    /// Gives up all regions if none was used for [`IDLE`].
    pub(super) fn take_idle(&mut self, now: Duration) -> Vec<MappedRegion> {
        match self.idle_at().is_some_and(|at| at <= now) {
            true => self.take_where(|_, imported| !matches!(imported, Imported::Fetching)),
            false => Vec::new(),
        }
    }

    /// When [`Neighbour::take_idle`] gives regions up.
    pub(super) fn idle_at(&self) -> Option<Duration> {
        let any = self.imports.values().any(|imported| matches!(imported, Imported::Here(_)));
        any.then(|| self.used_at.saturating_add(IDLE))
    }

    /// Whether nothing is mapped or being mapped.
    pub(super) fn is_empty(&self) -> bool {
        self.imports.is_empty()
    }

    /// The regions that are mapped or being mapped.
    pub(super) fn regions(&self) -> Vec<(u32, u32)> {
        self.imports.keys().map(|(region, generation, _)| (*region, *generation)).collect()
    }

    fn take_where(&mut self, is_it: impl Fn(&(u32, u32, u16), &Imported) -> bool) -> Vec<MappedRegion> {
        let taken = self.imports.extract_if(|key, imported| is_it(key, imported));
        let here = taken.filter_map(|(_, imported)| match imported {
            Imported::Here(mapped) => Some(mapped),
            Imported::Fetching | Imported::Gone => None,
        });
        here.collect()
    }
}
