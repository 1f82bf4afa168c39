//! Encodes a worker's KV cache groups for the daemon.

use bytes::Bytes;
use kvlane_block::{Region, ShardLayout};
pub use kvlane_engine_memory::{BlockPages, GroupMemory};
use kvlane_proto::{shard_layout::encode_shard_layout, v1};

/// The group's message in RegisterWorker.
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
        described: group.shard_layout().map_or_else(Bytes::new, described),
    }
}

/// The encoded layout; empty if it exceeds the bounds of the wire. The engine then works as one that describes no layout.
fn described(layout: &ShardLayout) -> Bytes {
    encode_shard_layout(layout).unwrap_or_default()
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
    use kvlane_block::{Axis, Dimension, LayerLayout, Rank, ShardPlace};
    use kvlane_proto::shard_layout::decode_shard_layout;

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

    #[test]
    fn a_layout_that_cannot_be_told_is_left_out() {
        let region =
            Region { base: 4096, block_stride: 64, blocks: 8, piece_bytes: 64, piece_offsets: vec![0] };
        let layer = LayerLayout {
            name: "l.0".into(),
            part: 0,
            dtype: "torch.uint8".into(),
            element_bytes: 1,
            backend: String::new(),
            dimensions: vec![Dimension { axis: Axis::Content, index: Some(0), size: 64 }],
            heads: None,
            tokens: None,
        };
        let place = ShardPlace { index: 0, holders: 1, tensor_parallel: 1, pipeline_parallel: 1 };
        let wire = |layers| {
            let spec = WorkerGroupSpec {
                namespace: [1; 16],
                layout: [2; 16],
                regions: vec![region.clone()],
                replicas: 1,
            };
            to_wire(&GroupMemory::new(spec, Rank(0)).unwrap().described(Some(ShardLayout { place, layers })))
                .described
        };
        let told = decode_shard_layout(&wire(vec![layer.clone()])).unwrap();
        assert_eq!(told, ShardLayout { place, layers: vec![layer] });
        assert!(wire(Vec::new()).is_empty());
    }
}
