//! READs fill the link between the GPUs.

use std::time::{Duration, Instant};

use kvlane_fabric::{Access, EngineOptions, Op, Run};
use kvlane_fake_gpu::{FakeOptions, Rates};

use crate::side::{Kind, Side, done};
use crate::support::{Deadline, MIB, Process, Random};

const LEN: usize = 64 * MIB;
/// The time of [`LEN`] over the link. READs that waited for each other would take several times as long.
const TIME: Duration = Duration::from_millis(200);

#[test]
fn a_read_takes_hardly_longer_than_its_bytes_over_the_link() {
    let link = (LEN as f64 / TIME.as_secs_f64()) as u64;
    let rates = Some(Rates { own: 10 * link, link, pcie: 10 * link });
    let gpus = FakeOptions { rates, ..FakeOptions::default() };
    let mut here = Side::on(gpus, 0, Kind::Whole, LEN, EngineOptions::default());
    here.region = here.register(Access::ReadWrite);
    let mut there = Process::with(LEN, "1 whole");
    let descriptor = there.descriptor();
    let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
    done(&here.begin(peer, Op::Read, vec![here.run(region, 0, 0, 16)]));
    let mut random = Random(0x1234_5678_9abc_def1);
    for piece in [LEN, MIB, 64 << 10] {
        let order = random.order(LEN / piece).into_iter().enumerate();
        let runs: Vec<Run> =
            order.map(|(to, from)| here.run(region, to * piece, from * piece, piece)).collect();
        let deadline = Deadline::after(5 * TIME);
        let begun = Instant::now();
        done(&here.begin(peer, Op::Read, runs));
        let took = begun.elapsed();
        assert!(took > TIME.mul_f64(0.999), "{piece}: the link is not so fast");
        deadline.assert_kept();
    }
}
