//! A decode engine with fewer free blocks than the prompt has: it copies what has arrived elsewhere, and gives the same blocks
//! as room again.

use kvlane_block::Region;
use kvlane_fabric::Transport;
use kvlane_gpu::EngineStream;
use kvlane_handoff::{Filled, Outcome};

use crate::{
    BLOCKS, CONTENT, LAYERS, PIECE, SHAPE, Side, engine, engine_by, id, rank_of, side_by, until, value,
    wanted,
};

/// Layers beside each other in each block, so that offers go block by block.
fn blocks(base: u64) -> Vec<Region> {
    let layer = |layer| Region {
        base: base + layer * PIECE,
        block_stride: PIECE * LAYERS,
        blocks: BLOCKS,
        piece_bytes: PIECE,
        piece_offsets: vec![0],
    };
    (0..LAYERS).map(layer).collect()
}

/// The bytes of a layer of a block, in the one layout or the other.
fn at(is_by_block: bool, layer: u64, block: u32) -> std::ops::Range<usize> {
    let block = u64::from(block);
    let piece = if is_by_block { block * LAYERS + layer } else { layer * BLOCKS + block };
    let at = (piece * PIECE) as usize;
    at..at + PIECE as usize
}

fn side(is_by_block: bool, transport: Option<Transport>) -> Side {
    let regions = if is_by_block { blocks } else { crate::layers };
    let rank = rank_of(0, engine_by("few", transport), BLOCKS * PIECE * LAYERS, regions);
    side_by(engine("few"), vec![rank], SHAPE)
}

#[test]
fn a_prompt_passes_through_fewer_blocks_than_it_has() {
    for (number, (is_by_block, transport)) in (50..).zip([
        (false, Transport::CMA),
        (true, Transport::CMA),
        (false, Transport::TCP),
        (true, Transport::TCP),
    ]) {
        let (mut p, mut d) = (side(is_by_block, None), side(is_by_block, Some(transport)));
        let id = id(number);
        assert!(p.scheduler.begin_lending(id, CONTENT));
        assert!(d.scheduler.begin_landing(id, wanted(p.address, 1, 12)));
        // Two steps: blocks that lie together, and blocks that do not.
        let of_p: Vec<u32> = (10..18).chain([33, 31, 29, 27]).collect();
        for (of_prompt, block) in (0..).zip(&of_p) {
            for layer in 0..LAYERS {
                p.ranks[0].memory[at(is_by_block, layer, *block)].fill(value(0, layer, of_prompt));
            }
        }
        for (first, last) in [(0, 8), (8, 12)] {
            let (blocks, hash) = (of_p[first..last].to_vec(), Some([last as u8; 16]));
            p.ranks[0].agent.step_begins(vec![Filled { id, first_block: first as u32, blocks, hash }]);
            p.ranks[0].agent.step_ends(&EngineStream::DEFAULT).unwrap();
        }
        // There is no room yet, and the decode engine knows what waits for it.
        let hashes = [(7, [8; 16]), (11, [12; 16])];
        until("the hashes", || d.scheduler.landing_status(id).unwrap().hashes == hashes);
        let room = [40, 41, 50];
        let mut passed = 1;
        d.scheduler.give_room(id, &room);
        while passed < 12 {
            let end = (passed + 3).min(12);
            until("the next blocks", || d.scheduler.landing_status(id).unwrap().end_block == end);
            for (of_prompt, block) in (passed..end).zip(room) {
                for layer in 0..LAYERS {
                    let piece = &mut d.ranks[0].memory[at(is_by_block, layer, block)];
                    let is_right = piece.iter().all(|byte| *byte == value(0, layer, of_prompt));
                    assert!(
                        is_right,
                        "block {of_prompt}, layer {layer}, by block: {is_by_block}, {transport:?}"
                    );
                    piece.fill(0);
                }
            }
            passed = end;
            d.scheduler.give_room(id, &room[..(12 - passed).min(3) as usize]);
        }
        assert_eq!(d.over(id).outcome, Some(Outcome::Landed));
        assert!(d.ranks[0].agent.take_counts().reads >= 4);
        p.is_free(id);
    }
}
