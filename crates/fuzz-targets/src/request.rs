//! A request's bytes, through the decoder and every check that the daemon does before it touches its state.
use kvlane_block::{
    BlockHash, BlockId, LayoutDigest, Namespace, PoolOffset, Region, parse_hashes, plan, shard_bytes,
};
use kvlane_proto::{
    Message, WIRE_MAX, WIRE_MIN, encode_frame, negotiate, shard_layout::decode_shard_layout, v1,
    v1::request::Body as Ask,
};

fn hashes(bytes: &[u8]) {
    if let Ok(hashes) = parse_hashes(bytes) {
        assert_eq!(hashes.len() * 16, bytes.len());
    }
}

fn save_groups(groups: &[v1::SaveGroup]) {
    for group in groups {
        hashes(&group.hashes);
        let _ = BlockHash::from_engine(&group.parent);
    }
}

fn worker_group(group: v1::WorkerGroup) {
    let _ = (Namespace::from_bytes(&group.namespace), LayoutDigest::from_bytes(&group.layout));
    let _ = decode_shard_layout(&group.described);
    shard(group.regions);
    group.slices.into_iter().for_each(|slice| shard(slice.regions));
}

fn shard(regions: Vec<v1::Region>) {
    let regions: Vec<Region> = regions
        .into_iter()
        .map(|region| Region {
            base: region.base,
            block_stride: region.block_stride,
            blocks: region.blocks,
            piece_bytes: region.piece_bytes,
            piece_offsets: region.piece_offsets,
        })
        .filter(|region| region.validate().is_ok())
        .collect();
    let bytes = shard_bytes(&regions);
    // A layout that passed the check has a plan, and the plan moves exactly the shard's bytes.
    let last = regions.iter().map(|region| region.blocks).min().unwrap_or(0).saturating_sub(1);
    if let (false, Ok(id), true) = (regions.is_empty(), u32::try_from(last), bytes < 1 << 40)
        && let Ok(runs) = plan(&regions, &[(BlockId(0), PoolOffset(0)), (BlockId(id), PoolOffset(bytes))])
    {
        assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), 2 * bytes);
        assert!(runs.iter().all(|run| run.engine_addr.checked_add(run.len).is_some()));
    }
}

/// Panics if a property fails for these bytes.
pub(crate) fn run(bytes: &[u8]) {
    let Ok(request) = v1::Request::decode(bytes) else { return };
    let frame = encode_frame(&request);
    assert_eq!(v1::Request::decode(&frame[4..]).as_ref(), Ok(&request));
    match request.body {
        Some(Ask::Hello(hello)) => {
            let _ = negotiate(hello.wire_min..=hello.wire_max, WIRE_MIN..=WIRE_MAX);
        }
        Some(Ask::OpenEngine(open)) => {
            open.groups.iter().for_each(|group| drop(Namespace::from_bytes(&group.namespace)));
        }
        Some(Ask::RegisterWorker(register)) => register.groups.into_iter().for_each(worker_group),
        Some(Ask::Lookup(lookup)) => lookup.groups.iter().for_each(|group| hashes(&group.hashes)),
        Some(Ask::Save(save)) => save_groups(&save.groups),
        Some(Ask::Claim(claim)) => save_groups(&claim.groups),
        _ => {}
    }
}
