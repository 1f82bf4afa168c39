//! Blocks are shown, read, and used again while they are read, again and again, as a prefill engine's are.

use std::time::Duration;

use kvlane_fabric::{EngineId, Failure, Pieces, Transfer};

use crate::resources::rounds;
use crate::side::{Kind, Side};
use crate::support::{MIB, PATIENCE, Process, Random};
use crate::windows::window;

const LEN: usize = 4 * MIB;
/// Regions of [`PART`] bytes from here on. One of them lies in two chunks.
const FIRST: usize = MIB / 2;
const PART: usize = MIB;
const PARTS: usize = 3;
/// Windows that are open at the same time. Each shows a place of each region.
const WINDOWS: usize = 4;
const PLACE: usize = PART / WINDOWS;
/// The byte of blocks that are used again.
const REUSED: u8 = 0xee;
/// Some READs are cut into pieces of this size, and go by the copy kernel.
const PIECE: usize = 2048;

/// The canaries are this round's, one for each window. The extra time of the copies follows the outcomes, so that closes keep
/// coming in the middle of copies.
#[test]
fn no_byte_counts_that_was_read_after_its_block_was_used_again() {
    for kind in ["whole", "chunks"] {
        let readers = [0, 1].map(|gpu| Side::new(gpu, Kind::Whole, LEN, Default::default()));
        let mut there = Process::with(LEN, &format!("1 {kind} late"));
        let parts: Vec<String> = (0..PARTS)
            .map(|part| there.ask(&format!("register-part {} {PART}", FIRST + part * PART)))
            .collect();
        let descriptor = there.descriptor();
        let peers = readers.each_ref().map(|reader| reader.meet(&descriptor));
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let (mut slow, mut placed, mut refused) = (Duration::from_millis(1), 0, 0);
        for round in 0..rounds(100) as usize {
            let mut reads = Vec::new();
            for at in 0..WINDOWS {
                let (reader, peer) = (&readers[at % 2], peers[at % 2]);
                let canary = 1 + ((round * WINDOWS + at) % 200) as u8;
                let EngineId { engine_id, boot_nonce } = reader.engine.id();
                let ranges = parts.iter().map(|part| {
                    let len = PIECE * (1 + random.below(PLACE / PIECE / 2));
                    let offset = at * PLACE + 16 * random.below((PLACE - len) / 16);
                    format!(" {part} {offset} {len}")
                });
                let ranges: String = ranges.collect();
                let shown = window(&there.ask(&format!("show {engine_id} {boot_nonce} {canary}{ranges}")));
                let (len, to) = (shown.len as usize, at * MIB);
                let runs = match random.below(2) {
                    0 => vec![reader.run(shown.number, to, 0, len)],
                    _ => {
                        let piece = |(place, from): (usize, usize)| {
                            reader.run(shown.number, to + place * PIECE, from * PIECE, PIECE)
                        };
                        random.order(len / PIECE).into_iter().enumerate().map(piece).collect()
                    }
                };
                reader.driver.slow_down(slow);
                let read = Transfer::read_through(shown, Pieces::Runs(runs));
                reads.push((reader, reader.engine.begin(peer, read).unwrap(), to, vec![canary; len]));
            }
            there.tell(&format!("reuse {REUSED}"));
            let before = refused;
            for (reader, read, to, wanted) in reads {
                match read.wait(Some(PATIENCE)).unwrap() {
                    Ok(()) => {
                        assert!(reader.memory.get(to, wanted.len()) == wanted, "round {round}");
                        placed += 1;
                    }
                    Err(Failure::Refused) => refused += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            assert_eq!(there.hear(), "done");
            let faster = (slow / 2).max(Duration::from_micros(10));
            slow =
                if refused - before > WINDOWS / 2 { faster } else { (2 * slow).min(Duration::from_secs(1)) };
        }
        assert!(placed > 0 && refused > 0, "{placed} placed, {refused} refused");
        assert!(readers.iter().all(|reader| reader.staged() == 0));
    }
}
