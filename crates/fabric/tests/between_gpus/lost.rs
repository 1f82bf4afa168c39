//! A GPU whose context is lost: its transfers fail, and those of other GPUs and processes go on.

use kvlane_fabric::{Access, Failure, Handle, Op};
use kvlane_gpu::Gpu;

use crate::side::{Bytes, Kind, Side, done, pattern};
use crate::support::{MIB, PATIENCE, Process};

const LEN: usize = 4 * MIB;
/// CUDA_ERROR_ILLEGAL_ADDRESS, which costs the context.
const STICKY: u32 = 700;

fn fails(handle: &Handle) {
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Gpu)));
}

#[test]
fn transfers_of_a_lost_gpu_fail_and_those_of_another_go_on() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    there.order("pattern 6");
    let descriptor = there.descriptor();
    let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
    let other = Gpu::open(here.gpu.driver().clone(), 1).unwrap();
    let sound = Bytes::new(&other, Kind::Whole, LEN);
    // SAFETY: the engine is closed before the memory is dropped.
    let of_other =
        unsafe { here.engine.register_gpu(&other, sound.address, LEN as u64, Access::ReadWrite).unwrap() };
    done(&here.move_all(peer, Op::Read, region));
    here.driver.fail_work(0, 2, STICKY);
    let reads: Vec<Handle> = (0..6).map(|_| here.move_all(peer, Op::Read, region)).collect();
    let outcomes: Vec<_> = reads.iter().map(|read| read.wait(Some(PATIENCE)).unwrap()).collect();
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Ok(()) | Err(Failure::Gpu))), "{outcomes:?}");
    assert!(outcomes.iter().any(Result::is_err));
    (0..3).for_each(|_| fails(&here.move_all(peer, Op::Read, region)));
    // This GPU pulls what the peer writes to it.
    there.order(&format!("meet {}", here.engine.describe().unwrap().to_text().unwrap()));
    for begin in ["begin-write", "begin-read"] {
        there.order(begin);
        assert_eq!(there.ask("end"), "Some(Err(Gpu))", "{begin}");
    }
    // The other GPU of this process.
    let mut run = here.run(region, 0, 0, LEN);
    run.local.region = of_other;
    done(&here.begin(peer, Op::Read, vec![run]));
    assert!(sound.all() == pattern(LEN, 6));
    assert_eq!(here.path(peer, "cuda").unwrap().trouble, None);
    here.engine.unregister(here.region).unwrap();
    here.engine.unregister(of_other).unwrap();
    here.engine.close();
}

#[test]
fn a_write_to_a_lost_gpu_of_a_peer_fails() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    let descriptor = there.descriptor();
    let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
    done(&here.move_all(peer, Op::Write, region));
    done(&here.move_all(peer, Op::Read, region));
    there.order(&format!("fail-work 1 {STICKY}"));
    (0..3).for_each(|_| fails(&here.move_all(peer, Op::Write, region)));
    // This process's GPU is not lost, and has mapped the peer's memory.
    done(&here.move_all(peer, Op::Read, region));
    here.engine.unregister(here.region).unwrap();
    there.order("close");
}
