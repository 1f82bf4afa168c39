//! The extent allocator compared with a map of intervals.
#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

use std::collections::BTreeMap;
use std::ops::Range;

use kvlane_memory::{ExtentAllocator, PAGE_BYTES, PoolPage};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Alloc {
        bytes: u64,
    },
    /// The n-th live extent, modulo their number.
    Free(usize),
    /// Evict what lies in the cheapest slabs, then allocate.
    MakeRoom {
        bytes: u64,
    },
}

fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => prop::sample::select(vec![PAGE_BYTES, 3 * PAGE_BYTES, 37 * PAGE_BYTES, 300 * PAGE_BYTES]),
        1 => 1u64..900 * PAGE_BYTES,
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => bytes().prop_map(|bytes| Step::Alloc { bytes }),
        3 => any::<usize>().prop_map(Step::Free),
        1 => bytes().prop_map(|bytes| Step::MakeRoom { bytes }),
    ]
}

struct Model {
    allocator: ExtentAllocator,
    nodes: Vec<Range<u32>>,
    /// First page to bytes.
    live: BTreeMap<u32, u64>,
    used: u64,
}

fn pages(bytes: u64) -> u32 {
    bytes.div_ceil(PAGE_BYTES) as u32
}

impl Model {
    fn new(total: u32, nodes: Vec<Range<u32>>) -> Model {
        Model { allocator: ExtentAllocator::new(total, &nodes), nodes, live: BTreeMap::new(), used: 0 }
    }

    fn alloc(&mut self, bytes: u64) -> bool {
        let Some(PoolPage(page)) = self.allocator.alloc(bytes) else { return false };
        let end = page + pages(bytes);
        assert!(
            self.nodes.iter().any(|node| node.start <= page && end <= node.end),
            "{page}..{end} leaves its node"
        );
        if let Some((before, bytes)) = self.live.range(..end).next_back() {
            assert!(before + pages(*bytes) <= page, "{page}..{end} overlaps the extent at {before}");
        }
        self.live.insert(page, bytes);
        self.used += u64::from(pages(bytes)) * PAGE_BYTES;
        self.check();
        true
    }

    fn free(&mut self, page: u32) {
        let bytes = self.live.remove(&page).unwrap();
        self.allocator.free(PoolPage(page), bytes);
        self.used -= u64::from(pages(bytes)) * PAGE_BYTES;
        self.check();
    }

    fn free_inside(&mut self, range: &Range<PoolPage>) -> usize {
        let inside: Vec<u32> = self.live.range(range.start.0..range.end.0).map(|(page, _)| *page).collect();
        inside.iter().for_each(|page| self.free(*page));
        inside.len()
    }

    fn check(&self) {
        assert_eq!(self.allocator.used_bytes(), self.used);
        assert_eq!(self.allocator.free_bytes(), self.allocator.capacity_bytes() - self.used);
        let of_a_size: u64 = self.allocator.free_extents().iter().map(|(bytes, count)| bytes * count).sum();
        assert!(self.allocator.unused_bytes() + of_a_size <= self.allocator.free_bytes());
    }
}

fn fill(model: &mut Model, bytes: u64) -> usize {
    std::iter::from_fn(|| model.alloc(bytes).then_some(())).count()
}

proptest! {

    #[test]
    fn extents_never_overlap_and_all_memory_comes_back(
        total in 600u32..6000,
        cut in 0.0f64..1.0,
        gap in 0u32..3,
        last in bytes(),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let cut = (f64::from(total - gap) * cut) as u32;
        let nodes = vec![0..cut, cut + gap..total];
        let mut model = Model::new(total, nodes.clone());
        for step in steps {
            match step {
                Step::Alloc { bytes } => {
                    model.alloc(bytes);
                }
                Step::Free(n) => {
                    if let Some(page) = model.live.keys().nth(n % model.live.len().max(1)).copied() {
                        model.free(page);
                    }
                }
                Step::MakeRoom { bytes } => {
                    let ranges = model.allocator.cheapest_slabs(bytes);
                    let inside = |range: &Range<PoolPage>| model.live.range(range.start.0..range.end.0).count();
                    prop_assert!(ranges.windows(2).all(|pair| inside(&pair[0]) <= inside(&pair[1])));
                    let cheapest = model.allocator.cheapest_slab(bytes);
                    prop_assert_eq!(cheapest.as_ref().map(inside), ranges.first().map(inside));
                    match cheapest {
                        Some(range) => {
                            model.free_inside(&range);
                            prop_assert!(model.alloc(bytes), "{:?} was emptied for {} bytes", range, bytes);
                        }
                        // Only what fits no empty pool has no slabs to empty.
                        None => prop_assert!(ExtentAllocator::new(total, &nodes).alloc(bytes).is_none()),
                    }
                }
            }
        }
        model.free_inside(&(PoolPage(0)..PoolPage(total)));
        prop_assert_eq!(model.allocator.used_bytes(), 0);
        prop_assert_eq!(model.allocator.unused_bytes(), model.allocator.capacity_bytes());
        prop_assert!(model.allocator.free_extents().is_empty());
        let mut fresh = Model::new(total, nodes);
        prop_assert_eq!(fill(&mut model, last), fill(&mut fresh, last), "full capacity for {} bytes", last);
    }
}

#[test]
fn a_pool_of_16_mib_is_nearly_all_usable_at_any_size() {
    for bytes in [PAGE_BYTES, 5 * PAGE_BYTES, 100 * PAGE_BYTES, 300 * PAGE_BYTES, 1 << 20, 2 << 20] {
        let mut model = Model::new(4096, Vec::from([0..4096]));
        let extents = fill(&mut model, bytes) as u64;
        let ideal = (16 << 20) / bytes;
        assert!(extents * 10 >= ideal * 9, "{extents} of {ideal} extents of {bytes} bytes");
    }
}

#[test]
fn extents_that_follow_each_other_are_neighbours() {
    let mut allocator = ExtentAllocator::new(1 << 20, &[0..1 << 20]);
    let pages: Vec<PoolPage> = (0..1000).map(|_| allocator.alloc(2 << 20).unwrap()).collect();
    assert!(pages.windows(2).all(|pair| pair[1].0 == pair[0].0 + 512));
}

#[test]
fn nodes_fill_alike_and_a_full_one_sends_its_extents_to_the_other() {
    let mut allocator = ExtentAllocator::new(8192, &[0..6144, 6144..8192]);
    let on_second = |page: &PoolPage| *page >= PoolPage(6144);
    let extents: Vec<PoolPage> = (0..16).map(|_| allocator.alloc(2 << 20).unwrap()).collect();
    assert_eq!(allocator.alloc(2 << 20), None, "both are full");
    // The first node has room for twelve extents, the second for four: the last eight alternate.
    let second: Vec<usize> = (0..16).filter(|&n| on_second(&extents[n])).collect();
    assert_eq!(second.len(), 4);
    assert!(second.iter().all(|&n| n >= 8), "{second:?}");
    let freed = extents.iter().find(|page| on_second(page)).unwrap();
    allocator.free(*freed, 2 << 20);
    assert_eq!(allocator.alloc(2 << 20), Some(*freed));
}

#[test]
fn too_large_is_none() {
    let mut allocator = ExtentAllocator::new(4096, &[0..4096]);
    assert_eq!(allocator.alloc((16 << 20) + 1), None);
    assert_eq!(allocator.cheapest_slab((16 << 20) + 1), None);
    assert_eq!(allocator.alloc(u64::MAX), None);
    assert_eq!(allocator.alloc(16 << 20), Some(PoolPage(0)));
    assert_eq!(ExtentAllocator::new(0, &[]).alloc(1), None);
}

#[test]
fn free_extents_are_told_by_size() {
    // Slabs of 16 pages.
    let mut model = Model::new(4096, vec![0..4096]);
    let unused = |slabs: u64| model.allocator.capacity_bytes() - slabs * 16 * PAGE_BYTES;
    let (after_one, after_three) = (unused(1), unused(3));
    model.alloc(4 * PAGE_BYTES);
    assert_eq!(model.allocator.free_extents(), [(4 * PAGE_BYTES, 3)]);
    assert_eq!(model.allocator.unused_bytes(), after_one);
    assert_eq!((0..5).filter(|_| model.alloc(8 * PAGE_BYTES)).count(), 5);
    assert_eq!(model.allocator.free_extents(), [(4 * PAGE_BYTES, 3), (8 * PAGE_BYTES, 1)]);
    let first = *model.live.keys().next().unwrap();
    model.free(first);
    assert_eq!(model.allocator.free_extents(), [(8 * PAGE_BYTES, 1)]);
    assert_eq!(model.allocator.unused_bytes(), after_three);
}

#[test]
fn wrong_frees_are_caught() {
    let caught = |misuse: &dyn Fn(&mut ExtentAllocator, PoolPage)| {
        let mut allocator = ExtentAllocator::new(4096, &[0..4096]);
        let page = allocator.alloc(3 * PAGE_BYTES).unwrap();
        let _neighbour = allocator.alloc(3 * PAGE_BYTES).unwrap();
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| misuse(&mut allocator, page))).is_err()
    };
    assert!(!caught(&|allocator, page| allocator.free(page, 3 * PAGE_BYTES)));
    assert!(caught(&|allocator, page| {
        allocator.free(page, 3 * PAGE_BYTES);
        allocator.free(page, 3 * PAGE_BYTES);
    }));
    assert!(caught(&|allocator, page| allocator.free(page, 4 * PAGE_BYTES)));
    assert!(caught(&|allocator, page| allocator.free(PoolPage(page.0 + 1), 3 * PAGE_BYTES)));
    assert!(caught(&|allocator, _| allocator.free(PoolPage(4000), 3 * PAGE_BYTES)));
    assert!(caught(&|allocator, _| allocator.free(PoolPage(5000), 3 * PAGE_BYTES)));
}
