//! An engine that moves no bytes leaves the driver alone.

use kvlane_fabric::{Op, SendOptions};

use crate::side::{Side, done, pattern};
use crate::support::{MIB, Process};
use crate::windows::open;

const LEN: usize = 4 * MIB;

/// Both engines wake for messages and windows meanwhile.
#[test]
fn an_engine_that_moves_no_bytes_calls_no_driver() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    there.order("pattern 3");
    let descriptor = there.descriptor();
    let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
    done(&here.move_all(peer, Op::Read, region));
    done(&here.move_all(peer, Op::Write, region));
    let calls = (here.driver.calls(), there.ask("calls"));
    for round in 0..100 {
        let sent = here.engine.send(peer, vec![round; 100], SendOptions::default()).unwrap();
        there.order("receive");
        done(&sent);
        if round % 10 == 0 {
            open(&mut there, here.engine.id(), &[(0, MIB)]);
            there.order("close-window");
        }
        assert_eq!(here.path(peer, "cuda").unwrap().trouble, None);
    }
    assert_eq!((here.driver.calls(), there.ask("calls")), calls);
    // The counters count.
    done(&here.move_all(peer, Op::Read, region));
    assert!(here.driver.calls() > calls.0);
    assert!(here.memory.all() == pattern(LEN, 3));
}
