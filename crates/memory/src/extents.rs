//! [`ExtentAllocator`]: allocates extents, which are contiguous pages of the pool.
//!
//! The pool is cut into slabs. A run of neighbouring slabs belongs to one extent size, and holds as many extents of
//! exactly that size as fit. When its last extent is freed, its slabs are free again. So each extent frees alone,
//! extents of one size never fragment, and a change of sizes needs only some runs to empty.
//!
//! ```text
//!  slab      0         1         2         3         4         5
//!       |aaaaaaaa.|bbbb bbbb bbbb ....|cc cc cc|  free   |  free   |     a, b, c: sizes
//!        run of 1    run of 2           run of 1
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use crate::pool_page::{PAGE_BYTES, PoolPage};

/// Pages of a slab in a large pool: 2 MiB.
const SLAB_PAGES: u32 = 512;

/// A small pool is cut into at least this many slabs, so that it can hold several sizes.
const SMALL_POOL_SLABS: u32 = 256;

/// Limit of the extents in one run, by its bitmap.
const RUN_EXTENTS: u32 = 512;

/// `head` of a slab that is in no run.
const FREE: u32 = u32::MAX;

/// `listed` of a run without room.
const UNLISTED: u32 = u32::MAX;

/// Allocates extents of contiguous pages, each on one NUMA node.
#[derive(Debug)]
pub struct ExtentAllocator {
    slab_pages: u32,
    nodes: Vec<Node>,
    slabs: Vec<Slab>,
    /// Runs by extent size in pages. Has only sizes with a run.
    sizes: HashMap<u32, Size>,
    used_pages: u64,
    /// Slabs that are in no run.
    unused_slabs: u64,
}

#[derive(Debug)]
struct Node {
    first_page: u32,
    first_slab: u32,
    slabs: u32,
    free: FreeRuns,
    free_pages: u64,
}

/// A slab. In a run of several slabs, all fields but `head` count only in the first one.
#[derive(Debug, Clone)]
struct Slab {
    /// First slab of the run, or FREE.
    head: u32,
    /// The number of slabs in the run.
    run: u32,
    /// Pages of each extent.
    pages: u32,
    /// Extents that fit into the run.
    capacity: u32,
    /// Extents that are allocated.
    used: u32,
    /// Position in its size's list of runs with room, or UNLISTED.
    listed: u32,
    taken: [u64; RUN_EXTENTS as usize / 64],
}

#[derive(Debug)]
struct Size {
    /// The number of runs of this extent size.
    runs: u32,
    /// Extents in these runs that are not allocated.
    free: u64,
    /// For each node, the first slabs of runs with room.
    with_room: Vec<Vec<u32>>,
}

impl ExtentAllocator {
    /// An allocator over pages 0 to `pages`. `nodes` are the page ranges of the NUMA nodes; no extent crosses from one
    /// to another.
    ///
    /// # Panics
    /// If the ranges are not ascending, apart and inside the pool.
    pub fn new(pages: u32, nodes: &[Range<u32>]) -> ExtentAllocator {
        let slab_pages = (pages / SMALL_POOL_SLABS).clamp(1, SLAB_PAGES);
        let slab_pages = 1 << slab_pages.ilog2();
        let mut slabs = 0;
        let mut end = 0;
        let nodes: Vec<Node> = nodes
            .iter()
            .map(|range| {
                assert!(
                    end <= range.start && range.start <= range.end && range.end <= pages,
                    "node of pages {range:?} after page {end} of {pages}"
                );
                end = range.end;
                let count = (range.end - range.start) / slab_pages;
                let mut free = FreeRuns::default();
                if count > 0 {
                    free.insert(slabs, count);
                }
                let node = Node {
                    first_page: range.start,
                    first_slab: slabs,
                    slabs: count,
                    free,
                    free_pages: u64::from(count) * u64::from(slab_pages),
                };
                slabs += count;
                node
            })
            .collect();
        let free = Slab {
            head: FREE,
            run: 0,
            pages: 0,
            capacity: 0,
            used: 0,
            listed: UNLISTED,
            taken: Default::default(),
        };
        ExtentAllocator {
            slab_pages,
            nodes,
            slabs: vec![free; slabs as usize],
            sizes: HashMap::new(),
            used_pages: 0,
            unused_slabs: u64::from(slabs),
        }
    }

    /// Allocates an extent and returns its first page; None if no run of slabs has room. Tries the node with the most
    /// free memory first, so that all nodes fill alike, then the others.
    ///
    /// # Panics
    /// If `bytes` is 0.
    pub fn alloc(&mut self, bytes: u64) -> Option<PoolPage> {
        let pages = pages_of(bytes)?;
        let order = self.node_order();
        let (snug, least) = (self.snug_run(pages), pages.div_ceil(self.slab_pages));
        let (head, node) = order
            .clone()
            .find_map(|node| {
                let head = self.run_with_room(pages, node).or_else(|| self.open_run(pages, snug, node))?;
                Some((head, node))
            })
            // No snug run is left: waste the end of a shorter one rather than leave memory free.
            .or_else(|| order.clone().find_map(|node| Some((self.open_run(pages, least, node)?, node))))?;
        Some(PoolPage(self.take(head, node)))
    }

    /// Frees an extent.
    ///
    /// # Panics
    /// If `page` does not begin an allocated extent of `bytes` bytes: a double free, or an extent of another size.
    pub fn free(&mut self, PoolPage(page): PoolPage, bytes: u64) {
        let node = self.nodes.partition_point(|node| node.first_page <= page).wrapping_sub(1);
        let slab_of = |node: &Node| {
            let slab = (page - node.first_page) / self.slab_pages;
            (slab < node.slabs).then(|| self.slabs[(node.first_slab + slab) as usize].head)
        };
        let head = self.nodes.get(node).and_then(slab_of).unwrap_or(FREE);
        assert!(head != FREE, "page {page} is freed and not taken");
        let first_page = self.first_page(node, head);
        let slab = &mut self.slabs[head as usize];
        assert!(
            pages_of(bytes) == Some(slab.pages),
            "page {page} is freed as {bytes} bytes, and is an extent of {} pages",
            slab.pages
        );
        let (index, within) = ((page - first_page) / slab.pages, (page - first_page) % slab.pages);
        assert!(within == 0 && index < slab.capacity, "page {page} is freed and begins no extent");
        let (word, bit) = (&mut slab.taken[index as usize / 64], 1 << (index % 64));
        assert!(*word & bit != 0, "page {page} is freed and not taken");
        *word &= !bit;
        slab.used -= 1;
        let (pages, used) = (slab.pages, slab.used);
        self.used_pages -= u64::from(pages);
        self.nodes[node].free_pages += u64::from(pages);
        self.add_free(pages, 0, 1);
        if used == 0 {
            self.close_run(head, node);
        } else if self.slabs[head as usize].listed == UNLISTED {
            self.list(head, node);
        }
    }

    /// Bytes of all allocated extents, in whole pages.
    pub fn used_bytes(&self) -> u64 {
        self.used_pages * PAGE_BYTES
    }

    /// Bytes that are not allocated. Not all of them are usable: some are the ends of runs, or in runs of other sizes.
    pub fn free_bytes(&self) -> u64 {
        self.capacity_bytes() - self.used_bytes()
    }

    /// Bytes that extents of any size can take.
    pub fn unused_bytes(&self) -> u64 {
        self.unused_slabs * u64::from(self.slab_pages) * PAGE_BYTES
    }

    /// Extents that are free only for blocks of their size: the bytes of each, and how many. The size with the most free
    /// bytes comes first.
    pub fn free_extents(&self) -> Vec<(u64, u64)> {
        let free = |(pages, size): (&u32, &Size)| (u64::from(*pages) * PAGE_BYTES, size.free);
        let mut all: Vec<_> = self.sizes.iter().map(free).filter(|(_, free)| *free > 0).collect();
        all.sort_unstable_by_key(|(bytes, free)| std::cmp::Reverse((bytes * free, *bytes)));
        all
    }

    /// Bytes of all slabs, which is where extents can be.
    pub fn capacity_bytes(&self) -> u64 {
        self.slabs.len() as u64 * u64::from(self.slab_pages) * PAGE_BYTES
    }

    /// The range of pages with the fewest extents that, once emptied, has room for an extent of `bytes`. None if the
    /// extent would not fit into an empty pool.
    pub fn cheapest_slab(&self, bytes: u64) -> Option<Range<PoolPage>> {
        self.emptyable(bytes).into_iter().min_by_key(|(extents, _)| *extents).map(|(_, pages)| pages)
    }

    /// All page ranges that, once emptied, each have room for an extent of `bytes`; those with the fewest extents
    /// first. For a caller that cannot empty the cheapest, because a block in it is leased. Ranges may overlap.
    pub fn cheapest_slabs(&self, bytes: u64) -> Vec<Range<PoolPage>> {
        let mut all = self.emptyable(bytes);
        all.sort_by_key(|(extents, _)| *extents);
        all.into_iter().map(|(_, pages)| pages).collect()
    }

    /// Windows of whole runs and free slabs that are just long enough for one extent, with the number of extents in
    /// each.
    fn emptyable(&self, bytes: u64) -> Vec<(u32, Range<PoolPage>)> {
        let Some(pages) = pages_of(bytes) else { return Vec::new() };
        let needed = pages.div_ceil(self.slab_pages);
        let mut windows = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            // A unit is a run or a single free slab: (slabs, extents).
            let unit = |slab: u32| match &self.slabs[slab as usize] {
                Slab { head: FREE, .. } => (1, 0),
                run => (run.run, run.used),
            };
            let node_end = node.first_slab + node.slabs;
            let (mut start, mut end, mut extents) = (node.first_slab, node.first_slab, 0);
            while end < node_end {
                let (slabs, used) = unit(end);
                end += slabs;
                extents += used;
                while end - start >= needed {
                    let page = |slab| PoolPage(self.first_page(index, slab));
                    windows.push((extents, page(start)..page(end)));
                    let (slabs, used) = unit(start);
                    start += slabs;
                    extents -= used;
                }
            }
        }
        windows
    }

    fn node_order(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let count = self.nodes.len();
        let emptiest = (0..count).max_by_key(|node| self.nodes[*node].free_pages).unwrap_or(0);
        (emptiest..count).chain(0..emptiest)
    }

    /// Length in slabs of the shortest run that wastes at most a sixteenth of itself.
    fn snug_run(&self, pages: u32) -> u32 {
        let least = pages.div_ceil(self.slab_pages);
        let (slab, pages) = (u64::from(self.slab_pages), u64::from(pages));
        (least..least.saturating_add(16))
            .find(|run| {
                let room = u64::from(*run) * slab;
                room % pages * 16 <= room && room / pages <= u64::from(RUN_EXTENTS)
            })
            .unwrap_or(least)
    }

    fn first_page(&self, node: usize, slab: u32) -> u32 {
        let node = &self.nodes[node];
        node.first_page + (slab - node.first_slab) * self.slab_pages
    }

    fn run_with_room(&self, pages: u32, node: usize) -> Option<u32> {
        self.sizes.get(&pages)?.with_room[node].last().copied()
    }

    fn open_run(&mut self, pages: u32, run: u32, node: usize) -> Option<u32> {
        let head = self.nodes[node].free.take(run)?;
        for slab in &mut self.slabs[head as usize..(head + run) as usize] {
            slab.head = head;
        }
        let room = u64::from(run) * u64::from(self.slab_pages);
        let slab = &mut self.slabs[head as usize];
        slab.run = run;
        slab.pages = pages;
        slab.capacity = (room / u64::from(pages)).min(u64::from(RUN_EXTENTS)) as u32;
        slab.used = 0;
        slab.taken = Default::default();
        let nodes = self.nodes.len();
        let size = self.sizes.entry(pages).or_insert_with(|| Size {
            runs: 0,
            free: 0,
            with_room: vec![Vec::new(); nodes],
        });
        size.runs += 1;
        size.free += u64::from(self.slabs[head as usize].capacity);
        self.unused_slabs -= u64::from(run);
        self.list(head, node);
        Some(head)
    }

    /// Allocates the first free extent of a run with room; returns its first page.
    fn take(&mut self, head: u32, node: usize) -> u32 {
        let first_page = self.first_page(node, head);
        let slab = &mut self.slabs[head as usize];
        let word = slab.taken.iter().position(|word| *word != u64::MAX).unwrap_or(0);
        let index = word as u32 * 64 + slab.taken[word].trailing_ones();
        assert!(index < slab.capacity, "run {head} is listed and full");
        slab.taken[word] |= 1 << (index % 64);
        slab.used += 1;
        let (pages, full) = (slab.pages, slab.used == slab.capacity);
        self.used_pages += u64::from(pages);
        self.nodes[node].free_pages -= u64::from(pages);
        self.add_free(pages, 1, 0);
        if full {
            self.unlist(head, node);
        }
        first_page + index * pages
    }

    fn add_free(&mut self, pages: u32, taken: u64, freed: u64) {
        if let Some(size) = self.sizes.get_mut(&pages) {
            size.free = size.free + freed - taken;
        }
    }

    fn close_run(&mut self, head: u32, node: usize) {
        if self.slabs[head as usize].listed != UNLISTED {
            self.unlist(head, node);
        }
        let (run, pages) = (self.slabs[head as usize].run, self.slabs[head as usize].pages);
        for slab in &mut self.slabs[head as usize..(head + run) as usize] {
            slab.head = FREE;
        }
        self.nodes[node].free.insert(head, run);
        self.unused_slabs += u64::from(run);
        if let Some(size) = self.sizes.get_mut(&pages) {
            size.runs -= 1;
            size.free -= u64::from(self.slabs[head as usize].capacity);
            if size.runs == 0 {
                self.sizes.remove(&pages);
            }
        }
    }

    fn list(&mut self, head: u32, node: usize) {
        let slab = &mut self.slabs[head as usize];
        if let Some(size) = self.sizes.get_mut(&slab.pages) {
            let list = &mut size.with_room[node];
            slab.listed = list.len() as u32;
            list.push(head);
        }
    }

    fn unlist(&mut self, head: u32, node: usize) {
        let slab = &mut self.slabs[head as usize];
        let position = std::mem::replace(&mut slab.listed, UNLISTED) as usize;
        if let Some(size) = self.sizes.get_mut(&slab.pages) {
            let list = &mut size.with_room[node];
            list.swap_remove(position);
            if let Some(moved) = list.get(position) {
                self.slabs[*moved as usize].listed = position as u32;
            }
        }
    }
}

/// The number of whole pages that hold `bytes`; None if it does not fit into a u32.
fn pages_of(bytes: u64) -> Option<u32> {
    assert!(bytes > 0, "an extent of 0 bytes");
    u32::try_from(bytes.div_ceil(PAGE_BYTES)).ok()
}

/// Free slabs of a node, as maximal runs.
#[derive(Debug, Default)]
struct FreeRuns {
    /// Length by start.
    by_start: BTreeMap<u32, u32>,
    /// Pairs of length and start, the shortest run first.
    by_length: BTreeSet<(u32, u32)>,
}

impl FreeRuns {
    /// Takes `length` slabs from the start of the shortest run that has them.
    fn take(&mut self, length: u32) -> Option<u32> {
        let (found, start) = self.by_length.range((length, 0)..).next().copied()?;
        self.remove(start, found);
        if found > length {
            self.put(start + length, found - length);
        }
        Some(start)
    }

    /// Adds a run, and merges it with its free neighbours.
    fn insert(&mut self, start: u32, length: u32) {
        let (mut first, mut end) = (start, start + length);
        if let Some((&before, &length)) = self.by_start.range(..start).next_back()
            && before + length == start
        {
            self.remove(before, length);
            first = before;
        }
        if let Some(&length) = self.by_start.get(&end) {
            self.remove(end, length);
            end += length;
        }
        self.put(first, end - first);
    }

    fn put(&mut self, start: u32, length: u32) {
        self.by_start.insert(start, length);
        self.by_length.insert((length, start));
    }

    fn remove(&mut self, start: u32, length: u32) {
        self.by_start.remove(&start);
        self.by_length.remove(&(length, start));
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // one node
mod tests {
    use super::*;

    #[test]
    fn metadata_is_at_most_a_thousandth_of_a_pool() {
        for pages in [4096, 1 << 17, 1 << 22] {
            let allocator = ExtentAllocator::new(pages, &[0..pages]);
            let bytes = allocator.slabs.len() * std::mem::size_of::<Slab>();
            assert!(
                bytes as u64 * 1000 < u64::from(pages) * PAGE_BYTES * 2,
                "{bytes} bytes for {pages} pages"
            );
        }
    }

    #[test]
    fn a_snug_run_wastes_at_most_a_sixteenth_of_a_large_pool() {
        let allocator = ExtentAllocator::new(1 << 20, &[0..1 << 20]);
        assert_eq!(allocator.slab_pages, SLAB_PAGES);
        for pages in 1..5000 {
            let room = allocator.snug_run(pages) * SLAB_PAGES;
            assert!((room % pages) * 16 <= room, "{pages} pages in a run of {room}");
            assert!(room / pages <= RUN_EXTENTS);
        }
    }
}
