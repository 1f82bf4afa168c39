//! The members after flags, beats, DNS answers, probes and operators' calls in any order.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use kvlane_router::{
    address::Address,
    members::{Event, FORGET_AFTER, Members, NODES_MAX, NodeChange, Refusal, Spec},
    schedule::{Connector, NodeState, Role},
};
use proptest::prelude::*;

/// Members, and what follows from all their changes.
struct World {
    members: Members,
    now: Instant,
    there: BTreeMap<String, (u64, NodeState, Spec)>,
    epoch: u64,
}

fn spec(url: &str, role: Role) -> Spec {
    Spec::new(url.parse().unwrap(), role)
}

fn ping(url: &str, connector_address: &str) -> Spec {
    Spec {
        connector: Some(Connector::P2pNccl),
        connector_address: Some(connector_address.into()),
        ..spec(url, Role::Prefill)
    }
}

fn address(url: &str) -> Address {
    url.parse().unwrap()
}

impl World {
    fn new() -> Self {
        Self { members: Members::default(), now: Instant::now(), there: BTreeMap::new(), epoch: 0 }
    }

    fn tell(&mut self, event: Event) -> Result<Vec<NodeChange>, Refusal> {
        let changes = self.members.apply(event, self.now)?;
        for change in &changes {
            match change {
                NodeChange::Join { spec, epoch } => {
                    assert!(*epoch > self.epoch, "epochs grow");
                    self.epoch = *epoch;
                    let name = spec.address.to_string();
                    let before = self.there.insert(name, (*epoch, NodeState::Suspect, spec.clone()));
                    assert!(before.is_none(), "no node joins twice");
                }
                NodeChange::Leave { address, epoch, .. } => {
                    let left = self.there.remove(&address.to_string()).expect("only what is there goes");
                    assert_eq!(left.0, *epoch);
                }
                NodeChange::State { address, state, .. } => {
                    let there = self.there.get_mut(&address.to_string()).expect("it is there");
                    assert_ne!(there.1, *state, "a change changes something");
                    there.1 = *state;
                }
                NodeChange::HandsOver { address, connector, connector_address } => {
                    let there = self.there.get_mut(&address.to_string()).expect("it is there");
                    (there.2.connector, there.2.connector_address) =
                        (Some(*connector), connector_address.clone());
                }
                NodeChange::KnownBy { address, .. } => assert!(self.there.contains_key(&address.to_string())),
            }
        }
        Ok(changes)
    }

    fn wait(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            self.tell(Event::Tick).unwrap();
        }
    }

    fn state(&self, url: &str) -> Option<NodeState> {
        self.there.get(url).map(|there| there.1)
    }

    fn answered(&mut self, url: &str, at: Option<&str>) {
        let at = at.map(|at| at.parse::<SocketAddr>().unwrap());
        self.tell(Event::Answered { address: address(url), at }).unwrap();
    }
}

const ONE: &str = "http://10.0.0.1:8100";
const OTHER: &str = "http://10.0.0.2:8100";

#[test]
fn a_node_of_beats_is_suspect_after_three_and_gone_after_thirty_seconds() {
    let mut world = World::new();
    world.tell(Event::Beat(spec(ONE, Role::Worker))).unwrap();
    assert_eq!(world.state(ONE), Some(NodeState::Suspect), "it has not answered yet");
    world.answered(ONE, None);
    assert_eq!(world.state(ONE), Some(NodeState::Ready));
    world.wait(8);
    assert_eq!(world.state(ONE), Some(NodeState::Ready));
    world.wait(1);
    assert_eq!(world.state(ONE), Some(NodeState::Suspect));
    world.tell(Event::Beat(spec(ONE, Role::Worker))).unwrap();
    assert_eq!(world.state(ONE), Some(NodeState::Ready));
    world.wait(29);
    assert_eq!(world.state(ONE), Some(NodeState::Suspect));
    let before = world.epoch;
    world.wait(1);
    assert_eq!(world.state(ONE), None);
    world.tell(Event::Beat(spec(ONE, Role::Worker))).unwrap();
    assert!(world.epoch > before, "it is back under a new epoch");
}

#[test]
fn a_node_of_a_flag_is_suspect_and_never_forgotten() {
    let mut world = World::new();
    world.tell(Event::Configured(spec(ONE, Role::Worker))).unwrap();
    world.answered(ONE, None);
    world.tell(Event::Beat(spec(ONE, Role::Worker))).unwrap();
    world.tell(Event::Silent(address(ONE))).unwrap();
    world.wait(3600);
    assert_eq!(world.state(ONE), Some(NodeState::Suspect));
    world.answered(ONE, None);
    assert_eq!(world.state(ONE), Some(NodeState::Ready), "its beats do not count against it");
}

#[test]
fn flag_and_ping_are_one_node_be_it_by_name_or_by_number() {
    let mut world = World::new();
    world.tell(Event::Configured(spec("http://localhost:8100", Role::Prefill))).unwrap();
    // The ping comes before it is known what the name stands for.
    world.tell(Event::Beat(ping("http://127.0.0.1:8100", "127.0.0.1:21001"))).unwrap();
    assert_eq!(world.there.len(), 2);
    world.answered("http://localhost:8100", Some("127.0.0.1:8100"));
    world.tell(Event::Beat(ping("http://127.0.0.1:8100", "127.0.0.1:21001"))).unwrap();
    let (_, state, spec) = &world.there["http://localhost:8100"];
    assert_eq!((world.there.len(), *state), (1, NodeState::Ready));
    assert_eq!(
        (spec.connector, spec.connector_address.as_deref()),
        (Some(Connector::P2pNccl), Some("127.0.0.1:21001"))
    );
}

#[test]
fn another_zmq_address_is_a_restart() {
    let mut world = World::new();
    world.tell(Event::Beat(ping(ONE, "10.0.0.1:21001"))).unwrap();
    world.answered(ONE, None);
    let before = world.epoch;
    assert_eq!(world.tell(Event::Beat(ping(ONE, "10.0.0.1:21001"))).unwrap(), []);
    world.tell(Event::Beat(ping(ONE, "10.0.0.1:21002"))).unwrap();
    assert!(world.epoch > before);
    assert_eq!(world.state(ONE), Some(NodeState::Suspect), "the new one has not answered yet");
    assert_eq!(world.there[ONE].2.connector_address.as_deref(), Some("10.0.0.1:21002"));
}

/// Anybody of --ping-allow may send a beat: two addresses in turn made the node leave and join with each of them.
#[test]
fn a_node_does_not_start_anew_more_often_than_beats_are_waited_for() {
    let mut world = World::new();
    world.tell(Event::Beat(ping(ONE, "10.0.0.1:21001"))).unwrap();
    world.tell(Event::Beat(ping(ONE, "10.0.0.1:21002"))).unwrap();
    let before = world.epoch;
    let again = world.tell(Event::Beat(ping(ONE, "10.0.0.1:21001")));
    assert!(matches!(again, Err(Refusal::TooOften(_))), "{again:?}");
    assert_eq!(world.epoch, before);
    // Three beats.
    world.wait(9);
    world.tell(Event::Beat(ping(ONE, "10.0.0.1:21001"))).unwrap();
    assert!(world.epoch > before);
}

/// A stranger's beat made a worker that a flag names one of a pair, which got no request ever after.
#[test]
fn a_beat_does_not_change_what_a_flag_has_said() {
    let mut world = World::new();
    world.tell(Event::Configured(spec(ONE, Role::Worker))).unwrap();
    let told = world.tell(Event::Beat(ping(ONE, "10.0.0.1:21001")));
    assert!(matches!(told, Err(Refusal::Differs { .. })), "{told:?}");
    let (_, _, spec) = &world.there[ONE];
    assert_eq!((spec.role, spec.connector_address.as_deref()), (Role::Worker, None));
}

/// A flag's name and a record of DNS were two nodes in turn, every 3 s.
#[test]
fn a_record_of_a_node_that_a_flag_names_is_that_node() {
    let mut world = World::new();
    world.tell(Event::Configured(spec("http://localhost:8100", Role::Worker))).unwrap();
    let like = spec("http://localhost:8100", Role::Worker);
    let resolved =
        || Event::Resolved { name: 0, like: like.clone(), hosts: vec!["127.0.0.1".parse().unwrap()] };
    world.tell(resolved()).unwrap();
    world.answered("http://localhost:8100", Some("127.0.0.1:8100"));
    let epoch = world.epoch;
    for _ in 0..3 {
        world.tell(resolved()).unwrap();
        assert_eq!((world.there.len(), world.epoch), (1, epoch));
    }
}

#[test]
fn a_beat_is_that_of_all_ranks_of_its_server() {
    let mut world = World::new();
    for rank in 0..2 {
        let address = address(ONE).with_rank(rank);
        world.tell(Event::Configured(Spec { address, ..spec(ONE, Role::Prefill) })).unwrap();
    }
    world.tell(Event::Beat(ping(ONE, "10.0.0.1:21001"))).unwrap();
    assert_eq!(world.there.len(), 2);
    assert!(
        world.there.values().all(|(_, _, spec)| spec.connector_address.as_deref() == Some("10.0.0.1:21001"))
    );
}

#[test]
fn records_that_are_gone_count_until_the_node_is_silent_too() {
    let mut world = World::new();
    let like = spec("http://engines:8100", Role::Decode);
    let resolved = |hosts: &[&str]| Event::Resolved {
        name: 0,
        like: like.clone(),
        hosts: hosts.iter().map(|host| host.parse().unwrap()).collect(),
    };
    world.tell(resolved(&["10.0.0.1", "10.0.0.2", "fd00::1"])).unwrap();
    assert!(world.there.contains_key("http://[fd00::1]:8100") && world.there.len() == 3);
    for url in [ONE, OTHER] {
        world.answered(url, None);
    }
    world.tell(resolved(&["10.0.0.1"])).unwrap();
    world.wait(29);
    assert_eq!(world.there.len(), 3);
    world.wait(1);
    assert_eq!(world.state("http://[fd00::1]:8100"), None, "it never answered");
    assert_eq!(world.state(OTHER), Some(NodeState::Ready), "it has no record, but answers");
    world.tell(Event::Silent(address(OTHER))).unwrap();
    assert_eq!(world.state(OTHER), None);
    world.tell(Event::Silent(address(ONE))).unwrap();
    world.wait(100);
    assert_eq!(world.state(ONE), Some(NodeState::Suspect), "its record is there");
}

#[test]
fn a_drained_node_stays_drained_until_it_is_added() {
    let mut world = World::new();
    world.tell(Event::Configured(spec(ONE, Role::Worker))).unwrap();
    world.answered(ONE, None);
    world.tell(Event::Drained(address(ONE))).unwrap();
    assert_eq!(world.state(ONE), Some(NodeState::Draining));
    world.answered(ONE, None);
    world.tell(Event::Idle(address(ONE))).unwrap();
    assert_eq!(world.state(ONE), Some(NodeState::Draining));
    world.tell(Event::Added(spec(ONE, Role::Worker))).unwrap();
    assert_eq!(world.state(ONE), Some(NodeState::Ready));
    let unknown = Refusal::Unknown(address(OTHER));
    assert_eq!(world.tell(Event::Drained(address(OTHER))), Err(unknown));
    let other_role = world.tell(Event::Added(spec(ONE, Role::Decode)));
    assert!(matches!(other_role, Err(Refusal::Differs { role: Role::Worker, .. })));
}

#[test]
fn a_removed_node_goes_when_it_is_idle_and_its_beats_do_not_bring_it_back() {
    let mut world = World::new();
    let beat = || Event::Beat(spec(ONE, Role::Worker));
    world.tell(beat()).unwrap();
    world.answered(ONE, None);
    world.tell(Event::Removed { address: address(ONE), now: false }).unwrap();
    assert_eq!((world.state(ONE), world.members.leaving()), (Some(NodeState::Draining), vec![address(ONE)]));
    world.tell(Event::Idle(address(ONE))).unwrap();
    assert_eq!(world.state(ONE), None);
    for _ in 0..20 {
        assert_eq!(world.tell(beat()), Err(Refusal::WasRemoved(address(ONE))));
        world.wait(3);
    }
    // It was silent for long enough to be another one.
    world.wait(30);
    world.tell(beat()).unwrap();
    assert_eq!(world.state(ONE), Some(NodeState::Suspect));
    world.tell(Event::Removed { address: address(ONE), now: true }).unwrap();
    assert_eq!(world.state(ONE), None);
    world.tell(Event::Added(spec(ONE, Role::Worker))).unwrap();
    world.tell(beat()).unwrap();
    assert_eq!(world.there.len(), 1);
}

#[test]
fn a_goodbye_counts_at_once_but_not_against_a_flag() {
    let mut world = World::new();
    world.tell(Event::Configured(spec(OTHER, Role::Worker))).unwrap();
    for url in [ONE, OTHER] {
        world.tell(Event::Beat(spec(url, Role::Worker))).unwrap();
        world.tell(Event::Bye(address(url))).unwrap();
    }
    assert_eq!((world.state(ONE), world.state(OTHER)), (None, Some(NodeState::Suspect)));
}

#[test]
fn a_node_that_the_configuration_drops_finishes_what_it_has_unless_others_know_it() {
    let mut world = World::new();
    for url in [ONE, OTHER] {
        world.tell(Event::Configured(spec(url, Role::Worker))).unwrap();
        world.answered(url, None);
    }
    world.tell(Event::Beat(spec(OTHER, Role::Worker))).unwrap();
    for url in [ONE, OTHER] {
        world.tell(Event::Unconfigured(address(url))).unwrap();
    }
    assert_eq!((world.state(ONE), world.state(OTHER)), (Some(NodeState::Draining), Some(NodeState::Ready)));
    assert_eq!(world.members.leaving(), [address(ONE)]);
    world.wait(5);
    world.tell(Event::Reconfigured(spec(ONE, Role::Worker))).unwrap();
    assert_eq!(world.state(ONE), Some(NodeState::Ready), "it is named again");
    world.tell(Event::Unconfigured(address(ONE))).unwrap();
    world.tell(Event::Idle(address(ONE))).unwrap();
    assert_eq!(world.state(ONE), None);
}

#[test]
fn a_node_of_another_role_joins_anew_and_the_configuration_counts_more_than_an_operator() {
    let mut world = World::new();
    world.tell(Event::Added(spec(ONE, Role::Worker))).unwrap();
    world.answered(ONE, None);
    assert!(world.tell(Event::Configured(spec(ONE, Role::Decode))).is_err(), "at the start it is a mistake");
    world.tell(Event::Reconfigured(spec(ONE, Role::Decode))).unwrap();
    assert_eq!(world.there[ONE].2.role, Role::Decode);
    let epoch = world.epoch;
    world.tell(Event::Reconfigured(spec(ONE, Role::Decode))).unwrap();
    assert_eq!(world.epoch, epoch, "the same again changes nothing");
    world.tell(Event::Removed { address: address(ONE), now: true }).unwrap();
    world.tell(Event::Reconfigured(spec(ONE, Role::Prefill))).unwrap();
    assert_eq!(world.there[ONE].2.role, Role::Prefill, "a changed entry brings it back");
}

#[test]
fn nodes_of_a_name_that_is_dropped_drain_although_they_answer() {
    let mut world = World::new();
    let hosts = vec!["10.0.0.1".parse().unwrap()];
    let like = spec("http://engines:8100", Role::Worker);
    world.tell(Event::Resolved { name: 3, like: like.clone(), hosts: hosts.clone() }).unwrap();
    world.answered(ONE, None);
    world.tell(Event::Unnamed(2)).unwrap();
    assert_eq!(world.state(ONE), Some(NodeState::Ready), "another name");
    world.tell(Event::Unnamed(3)).unwrap();
    assert_eq!(world.state(ONE), Some(NodeState::Draining));
    world.tell(Event::Resolved { name: 4, like, hosts }).unwrap();
    assert_eq!(world.state(ONE), Some(NodeState::Ready), "a new name has it");
}

#[test]
fn strangers_do_not_fill_the_memory() {
    let mut world = World::new();
    for number in 0..NODES_MAX + 10 {
        let url = format!("http://10.1.{}.{}:80", number / 256, number % 256);
        let taken = world.tell(Event::Beat(spec(&url, Role::Worker)));
        assert_eq!(taken.is_ok(), number < NODES_MAX);
    }
    assert!(world.tell(Event::Configured(spec(ONE, Role::Worker))).is_ok(), "flags are not strangers");
}

/// 3,000 forged beats took all places, and a service that scaled up got none for its new pods.
#[test]
fn forged_beats_keep_out_neither_a_flags_node_nor_a_names() {
    let mut world = World::new();
    let forged = |number: usize| format!("http://10.1.{}.{}:80", number / 256, number % 256);
    for number in 0..3000 {
        let taken = world.tell(Event::Beat(spec(&forged(number), Role::Worker)));
        assert_eq!(taken.is_ok(), number < NODES_MAX);
    }
    world.answered(&forged(0), None);
    world.tell(Event::Configured(spec(ONE, Role::Worker))).unwrap();
    let like = spec("http://engines:8100", Role::Worker);
    let hosts: Vec<IpAddr> = (1..=20).map(|host| IpAddr::from([10, 2, 0, host])).collect();
    world.tell(Event::Resolved { name: 0, like, hosts }).unwrap();
    for host in 1..=20 {
        assert!(world.there.contains_key(&format!("http://10.2.0.{host}:8100")));
    }
    assert_eq!(world.there.len(), NODES_MAX + 1, "as many as may be, and the flag's");
    assert!(world.there.contains_key(&forged(0)), "one that answers goes last");
    assert!((1..=20).all(|number| !world.there.contains_key(&forged(number))), "the oldest went");
    world.tell(Event::Added(spec("http://10.3.0.1:80", Role::Worker))).unwrap();
}

#[test]
fn a_forged_beat_does_not_decide_what_a_names_node_is_for() {
    let mut world = World::new();
    world.tell(Event::Beat(spec("http://10.2.0.1:8100", Role::Prefill))).unwrap();
    world.tell(Event::Drained(address("http://10.2.0.1:8100"))).unwrap();
    let like = spec("http://engines:8100", Role::Worker);
    let hosts = vec![IpAddr::from([10, 2, 0, 1])];
    world.tell(Event::Resolved { name: 0, like, hosts }).unwrap();
    let (_, state, found) = &world.there["http://10.2.0.1:8100"];
    assert_eq!((found.role, *state), (Role::Worker, NodeState::Draining), "an operator's word stands");
    let again = world.tell(Event::Beat(spec("http://10.2.0.1:8100", Role::Prefill)));
    assert!(matches!(again, Err(Refusal::Differs { role: Role::Worker, .. })));
}

#[derive(Debug, Clone)]
enum Step {
    Beat(u8, u8, u8),
    Bye(u8),
    Answered(u8),
    Silent(u8),
    Resolved(usize, BTreeSet<u8>),
    Drain(u8),
    Remove(u8, bool),
    Add(u8),
    Idle(u8),
    Configure(u8, u8),
    Unconfigure(u8),
    Unname(usize),
    Wait(u64),
}

const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Worker];

fn url(number: u8) -> String {
    // The first ones are named by flags.
    if number < 2 { format!("http://node{number}:8100") } else { format!("http://10.0.0.{number}:8100") }
}

fn step() -> impl Strategy<Value = Step> {
    let node = 0u8..8;
    prop_oneof![
        4 => (node.clone(), 0u8..3, 0u8..3).prop_map(|(node, role, connector_address)| Step::Beat(node, role, connector_address)),
        1 => node.clone().prop_map(Step::Bye),
        4 => node.clone().prop_map(Step::Answered),
        2 => node.clone().prop_map(Step::Silent),
        2 => (0usize..2, prop::collection::btree_set(2u8..8, 0..4)).prop_map(|(name, hosts)| Step::Resolved(name, hosts)),
        1 => node.clone().prop_map(Step::Drain),
        1 => (2u8..8, any::<bool>()).prop_map(|(node, now)| Step::Remove(node, now)),
        1 => node.clone().prop_map(Step::Add),
        1 => node.prop_map(Step::Idle),
        1 => (2u8..8, 0u8..3).prop_map(|(node, role)| Step::Configure(node, role)),
        1 => (2u8..8).prop_map(Step::Unconfigure),
        1 => (0usize..2).prop_map(Step::Unname),
        3 => (0u64..40).prop_map(Step::Wait),
    ]
}

proptest! {
    /// `World::tell` asserts that epochs grow and that no node is there twice.
    #[test]
    fn any_order_leaves_the_nodes_of_flags_and_forgets_the_silent(steps in prop::collection::vec(step(), 0..80)) {
        let mut world = World::new();
        for number in 0..2 {
            world.tell(Event::Configured(spec(&url(number), ROLES[number as usize]))).unwrap();
        }
        let mut added = BTreeSet::new();
        let mut configured = BTreeSet::new();
        let mut drained = BTreeSet::new();
        for step in steps {
            let told = match step.clone() {
                Step::Beat(node, role, connector_address) => {
                    // By the number that a name stands for.
                    let url = format!("http://10.0.0.{node}:8100");
                    let mut beat = spec(&url, ROLES[role as usize]);
                    if connector_address > 0 {
                        beat.connector = Some(Connector::P2pNccl);
                        beat.connector_address = Some(format!("10.0.0.{node}:{connector_address}").into());
                    }
                    world.tell(Event::Beat(beat))
                }
                Step::Bye(node) => world.tell(Event::Bye(address(&format!("http://10.0.0.{node}:8100")))),
                Step::Answered(node) => {
                    let at = SocketAddr::new(IpAddr::from([10, 0, 0, node]), 8100);
                    world.tell(Event::Answered { address: address(&url(node)), at: Some(at) })
                }
                Step::Silent(node) => world.tell(Event::Silent(address(&url(node)))),
                Step::Resolved(name, hosts) => world.tell(Event::Resolved {
                    name,
                    like: spec("http://name:8100", ROLES[name]),
                    hosts: hosts.into_iter().map(|host| IpAddr::from([10, 0, 0, host])).collect(),
                }),
                Step::Drain(node) => world.tell(Event::Drained(address(&url(node)))),
                Step::Remove(node, now) => world.tell(Event::Removed { address: address(&url(node)), now }),
                Step::Add(node) => world.tell(Event::Added(spec(&url(node), ROLES[usize::from(node) % 3]))),
                Step::Idle(node) => world.tell(Event::Idle(address(&url(node)))),
                Step::Configure(node, role) => {
                    world.tell(Event::Reconfigured(spec(&url(node), ROLES[usize::from(role)])))
                }
                Step::Unconfigure(node) => world.tell(Event::Unconfigured(address(&url(node)))),
                Step::Unname(name) => world.tell(Event::Unnamed(name)),
                Step::Wait(seconds) => {
                    world.wait(seconds);
                    Ok(Vec::new())
                }
            };
            match step {
                Step::Add(node) if told.is_ok() => {
                    added.insert(url(node));
                    drained.remove(&url(node));
                }
                Step::Drain(node) if told.is_ok() => {
                    drained.insert(url(node));
                }
                Step::Configure(node, _) => {
                    configured.insert(url(node));
                    drained.remove(&url(node));
                }
                Step::Unconfigure(node) => {
                    configured.remove(&url(node));
                }
                Step::Remove(node, _) if told.is_ok() => {
                    added.remove(&url(node));
                    configured.remove(&url(node));
                    drained.remove(&url(node));
                }
                _ => {}
            }
            prop_assert!((0..2).all(|number| world.there.contains_key(&url(number))), "flags' nodes stay");
            for name in &drained {
                let state = world.state(name);
                prop_assert!(state.is_none_or(|state| state == NodeState::Draining), "{name} {state:?}");
            }
            drained.retain(|name| world.there.contains_key(name));
        }
        // All fall silent, and no name has a record any more.
        for (name, role) in ROLES.into_iter().enumerate().take(2) {
            let like = spec("http://name:8100", role);
            world.tell(Event::Resolved { name, like, hosts: Vec::new() }).unwrap();
        }
        for node in 0..8 {
            let _ = world.tell(Event::Silent(address(&url(node))));
            let _ = world.tell(Event::Silent(address(&format!("http://10.0.0.{node}:8100"))));
        }
        world.wait(FORGET_AFTER.as_secs() + 1);
        for (name, (_, state, _)) in &world.there {
            let stays = (0..2).any(|number| *name == url(number)) || added.contains(name) || configured.contains(name);
            let goes = world.members.leaving().iter().any(|address| address.to_string() == *name);
            prop_assert!(stays || goes, "{name} is kept by nobody");
            prop_assert_ne!(*state, NodeState::Ready);
        }
    }
}
