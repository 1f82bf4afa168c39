//! Windows over GPU memory: their peer reads through them, and bytes that were read after the close do not count.

use kvlane_fabric::{EngineId, FabricError, Failure, Op, Pieces, Transfer, WindowDescriptor};

use crate::side::{Side, done, pattern};
use crate::support::{MIB, PATIENCE, Process};

const LEN: usize = 4 * MIB;
const OLD: u8 = 0x11;
const NEW: u8 = 0x77;

pub(crate) fn text(window: &WindowDescriptor) -> String {
    window.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn window(text: &str) -> WindowDescriptor {
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..text.len()).step_by(2).map(byte).collect();
    WindowDescriptor::from_bytes(&bytes).unwrap()
}

pub(crate) fn open(there: &mut Process, to: EngineId, ranges: &[(usize, usize)]) -> WindowDescriptor {
    let ranges: Vec<String> = ranges.iter().map(|(offset, len)| format!("{offset} {len}")).collect();
    let EngineId { engine_id, boot_nonce } = to;
    window(&there.ask(&format!("open-window {engine_id} {boot_nonce} {}", ranges.join(" "))))
}

#[test]
fn a_peer_reads_through_a_window_what_it_shows() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    there.order("pattern 3");
    let peer = here.meet(&there.descriptor());
    let shown = open(&mut there, here.engine.id(), &[(MIB, 4096), (100, 50), (3 * MIB, MIB)]);
    let all = here.run(shown.number, 16, 0, shown.len as usize);
    done(&here.engine.begin(peer, Transfer::read_through(shown, Pieces::Runs(vec![all]))).unwrap());
    let bytes = pattern(LEN, 3);
    let wanted = [&bytes[MIB..MIB + 4096], &bytes[100..150], &bytes[3 * MIB..]].concat();
    assert!(here.memory.get(16, wanted.len()) == wanted);
    there.order("close-window");
    let again = here.engine.begin(peer, Transfer::read_through(shown, Pieces::Runs(vec![all])));
    let refused = match again {
        Ok(handle) => handle.wait(Some(PATIENCE)) == Some(Err(Failure::Refused)),
        Err(error) => matches!(error, FabricError::WindowClosed | FabricError::Shape(_)),
    };
    assert!(refused, "the window is closed");
    assert_eq!(here.staged(), 0);
}

/// The owner closes the window in the middle of a slow copy and reuses the memory, without waiting for the reader. The copy still
/// ends, and its bytes, old ones mixed with new ones, do not count.
#[test]
fn bytes_that_were_read_while_the_window_closed_do_not_count() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "0 whole"));
    let descriptor = there.descriptor();
    let peer = here.meet(&descriptor);
    let (mut placed, mut refused) = (0, 0);
    for turn in 0..40u64 {
        there.order(&format!("fill {OLD}"));
        let shown = open(&mut there, here.engine.id(), &[(0, LEN)]);
        here.memory.fill(0);
        // A copy of all takes 4 to 44 ms, and the close comes after about the same time.
        here.driver.slow_down(std::time::Duration::from_micros(1000 * (1 + turn % 10)));
        let all = here.run(shown.number, 0, 0, LEN);
        let transfer = Transfer::read_through(shown, Pieces::Runs(vec![all]));
        let read = here.engine.begin(peer, transfer).unwrap();
        there.order("close-window");
        there.order(&format!("fill {NEW}"));
        let outcome = read.wait(Some(PATIENCE)).unwrap();
        here.driver.slow_down(std::time::Duration::ZERO);
        match outcome {
            Ok(()) => {
                placed += 1;
                assert!(here.memory.is_all(OLD), "turn {turn}: bytes of later memory counted");
            }
            Err(Failure::Refused) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused > 0, "no close came in the middle of a copy ({placed} were placed)");
    assert_eq!(here.staged(), 0);
}

/// A transfer of all of a region, of which a window shows a part, is refused as before: the window protects nothing else.
#[test]
fn a_region_is_read_beside_its_windows() {
    let (here, mut there) = (Side::of(1, LEN), Process::with(LEN, "1 chunks"));
    there.order("pattern 4");
    let descriptor = there.descriptor();
    let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
    open(&mut there, here.engine.id(), &[(0, MIB)]);
    done(&here.move_all(peer, Op::Read, region));
    there.order("close-window");
    done(&here.move_all(peer, Op::Read, region));
    assert!(here.memory.all() == pattern(LEN, 4));
}
