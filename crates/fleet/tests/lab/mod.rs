//! Experiments: routers that choose by other rules, misread times, or know less of their nodes.

use std::time::Duration;

use kvlane_fleet::{Chooser, Class, Costs, Lab, Limits, NoChooser, Request, Served, Summary, replay_in};
use kvlane_policy::spread;
use kvlane_router::schedule::{Policy, Role};

use crate::{BLOCK, fleet, node, request, run, trace};

/// Takes nodes by turns, and remembers what it is told.
#[derive(Default)]
struct ByTurns {
    under_way: Vec<usize>,
    without_first: Vec<usize>,
    over: usize,
    has: [Vec<u64>; 3],
    evicted: usize,
}

impl Chooser for ByTurns {
    fn choose(&mut self, request: usize, asked: &Request) -> Option<usize> {
        assert!(!asked.blocks.is_empty());
        self.under_way.push(request);
        self.without_first.push(request);
        (request != 17).then_some(request % 3)
    }

    fn prefilled(&mut self, request: usize) {
        self.without_first.retain(|each| *each != request);
    }

    fn over(&mut self, request: usize) {
        let at = self.under_way.iter().position(|each| *each == request).unwrap();
        self.under_way.remove(at);
        self.over += 1;
    }

    fn stored(&mut self, node: usize, parent: Option<u64>, blocks: &[u64]) {
        let has = &mut self.has[node];
        assert!(parent.is_none_or(|parent| has.contains(&parent)));
        assert!(!blocks.is_empty() && blocks.iter().all(|block| !has.contains(block)));
        has.extend(blocks);
    }

    fn evicted(&mut self, node: usize, blocks: &[u64]) {
        for block in blocks {
            let at = self.has[node].iter().position(|each| each == block).unwrap();
            self.has[node].remove(at);
        }
        self.evicted += blocks.len();
    }
}

impl Lab for ByTurns {
    type Chooser = Self;

    fn chooser(&mut self) -> Option<&mut Self> {
        Some(self)
    }
}

#[test]
fn a_chooser_is_obeyed_and_told_what_becomes_of_requests_and_blocks() {
    let turns = (0..90).map(|number| request(number * 150, 3000, 20, number % 7 * 100)).collect();
    let trace = trace(turns);
    let small = Class { cached_tokens: 20 * BLOCK, ..Class::default() };
    let setup = fleet(&[Role::Worker; 3], &small, Policy::LeastWork);
    let mut chooser = ByTurns::default();
    let served = replay_in(&mut chooser, &trace, &setup, |_| ()).served;
    for (number, each) in served.iter().enumerate() {
        let wanted = (number != 17).then_some(number % 3);
        assert_eq!((each.prefill, each.decode, each.last.is_some()), (wanted, wanted, number != 17));
    }
    assert_eq!((chooser.over, chooser.under_way.len(), chooser.without_first), (90, 0, vec![17]));
    assert!(chooser.evicted > 0 && chooser.has.iter().all(|has| has.len() <= 20), "{:?}", chooser.has);
    let large = fleet(&[Role::Worker; 3], &Class::default(), Policy::LeastWork);
    let mut chooser = ByTurns::default();
    replay_in(&mut chooser, &trace, &large, |_| ());
    assert!(chooser.evicted == 0 && chooser.has.iter().all(|has| has.len() == 7 * 6));
}

/// The router reads wrong times, so what it predicts is as wrong.
struct Misread {
    /// All times are longer by this share; less than nothing: shorter.
    off: f64,
    /// Each request's times are longer or shorter by any share up to this.
    noise: f64,
}

impl Lab for Misread {
    type Chooser = NoChooser;

    fn chooser(&mut self) -> Option<&mut NoChooser> {
        None
    }

    fn read(&self, time: Duration, request: usize) -> Duration {
        let share = spread(request as u64) as f64 / u64::MAX as f64;
        time.mul_f64(((1.0 + self.off) * (1.0 + self.noise * (2.0 * share - 1.0))).max(0.0))
    }
}

#[test]
fn a_router_that_misreads_times_predicts_others_and_loses_nothing() {
    let slow = Class { name: "slow".into(), costs: Costs::H100_LLAMA_8B.times(4.0, 1.0), ..Class::default() };
    let requests = (0..400).map(|number| request(number * 60, 1500 + number % 7 * 500, 20, number * 100));
    let trace = trace(requests.collect());
    let mut setup = fleet(&[Role::Worker; 2], &Class::default(), Policy::LeastDelay);
    setup.nodes[1] = node(Role::Worker, &slow);
    let right = run(&trace, &setup);
    let misread = || replay_in(&mut Misread { off: 0.2, noise: 0.3 }, &trace, &setup, |_| ()).served;
    let wrong = misread();
    assert_eq!(wrong, misread(), "the same each time");
    assert_ne!(right, wrong);
    assert!(wrong.iter().all(|each| each.last.is_some()));
    let limits = Limits { ttft: Duration::MAX, tpot: Duration::MAX };
    let median = |served: &[Served]| Summary::of(served, limits).ttft_p50.as_secs_f64();
    assert!(median(&wrong) < 1.2 * median(&right), "{} {}", median(&wrong), median(&right));
}

/// The router takes all nodes for nodes of one class.
struct ClassBlind;

impl Lab for ClassBlind {
    type Chooser = NoChooser;

    fn chooser(&mut self) -> Option<&mut NoChooser> {
        None
    }

    fn class<'n>(&self, _: &'n str) -> &'n str {
        ""
    }
}

#[test]
fn a_router_that_takes_all_nodes_for_one_class_chooses_others_and_loses_nothing() {
    let slow = Class { name: "slow".into(), costs: Costs::H100_LLAMA_8B.times(4.0, 1.0), ..Class::default() };
    let requests = (0..400).map(|number| request(number * 60, 1500 + number % 7 * 500, 20, number * 100));
    let trace = trace(requests.collect());
    let mut setup = fleet(&[Role::Worker; 2], &Class::default(), Policy::LeastDelay);
    setup.nodes[1] = node(Role::Worker, &slow);
    let blind = || replay_in(&mut ClassBlind, &trace, &setup, |_| ()).served;
    let served = blind();
    assert_eq!(served, blind(), "the same each time");
    assert_ne!(served, run(&trace, &setup));
    assert!(served.iter().all(|each| each.last.is_some()));
}
