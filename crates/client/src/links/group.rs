//! A worker's group, as the daemon is told of it.

use bytes::Bytes;
use kvlane_block::Region;
pub use kvlane_engine_memory::{BlockPages, GroupMemory};
use kvlane_proto::v1;

/// For RegisterWorker.
pub fn to_wire(group: &GroupMemory) -> v1::WorkerGroup {
    let slice = |regions: &Vec<Region>| v1::Slice { regions: wire_regions(regions) };
    v1::WorkerGroup {
        namespace: Bytes::copy_from_slice(&group.namespace()),
        layout: Bytes::copy_from_slice(&group.layout()),
        regions: wire_regions(group.shard()),
        slices: match group.slices().len() {
            1 => Vec::new(),
            _ => group.slices().iter().map(slice).collect(),
        },
        described: Bytes::new(),
    }
}

fn wire_regions(regions: &[Region]) -> Vec<v1::Region> {
    let region = |region: &Region| v1::Region {
        base: region.base,
        block_stride: region.block_stride,
        blocks: region.blocks,
        piece_bytes: region.piece_bytes,
        piece_offsets: region.piece_offsets.clone(),
    };
    regions.iter().map(region).collect()
}

#[cfg(test)]
mod tests {
    use kvlane_block::Rank;

    use super::*;
    use crate::jobs::WorkerGroupSpec;

    #[test]
    fn slices_are_told_where_several_ranks_hold_the_same() {
        let layer = |layer: u64| Region {
            base: layer << 20,
            block_stride: 1024,
            blocks: 8,
            piece_bytes: 1024,
            piece_offsets: vec![0],
        };
        let wire = |replicas| {
            let regions = (0..5).map(layer).collect();
            let spec = WorkerGroupSpec { namespace: [1; 16], layout: [2; 16], regions, replicas };
            to_wire(&GroupMemory::new(spec, Rank(3)).unwrap())
        };
        let shared = wire(2);
        assert_eq!((shared.slices.len(), &shared.slices[1].regions), (2, &shared.regions));
        assert!(wire(1).slices.is_empty());
    }
}
