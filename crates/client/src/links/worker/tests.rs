//! The link's transitions: what it does with an event.

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use kvlane_block::{BlockHash, BlockId, Rank, Region};
use kvlane_memory::PoolPage;
use kvlane_proto::{
    Address, WIRE_MAX, WIRE_OF_GROUPS_FLAGS, packed,
    packed::Outcome,
    v1::{register_worker::Method, request::Body as Ask},
};

use super::{
    event::{Card, StepState, WorkerLinkOptions},
    failures::{NotCopied, NotMapped},
    *,
};
use crate::{
    boot::BootId,
    jobs::{Copied, JobKind, LoadGroup, Release, SaveGroupSpec, SaveMethod, WorkerGroupSpec},
    links::{
        flags::FlagTable,
        group::GroupMemory,
        ids::{CopyId, JobKey, Life},
        pace::ReleaseAhead,
        promises::Promises,
    },
};

const RUN: BootId = [7; 16];
const PROCESS: ProcessId = ProcessId(1);
const SAVE_TIMEOUT: Duration = Duration::from_secs(10);
const COPIED: Result<Copied, NotCopied> = Ok(Copied { blocks: 2, bytes: 8192 });

/// A link, its clock, and what it wanted done since the last look.
struct Play {
    link: WorkerLink,
    now: Instant,
    actions: VecDeque<WorkerAction>,
    /// The daemon's version of the wire.
    wire: u32,
}

impl Play {
    fn new(card: bool) -> Self {
        let now = Instant::now();
        let region = Region {
            base: 1 << 30,
            block_stride: 4096,
            blocks: 8,
            piece_bytes: 4096,
            piece_offsets: vec![0],
        };
        let spec =
            WorkerGroupSpec { namespace: [1; 16], layout: [2; 16], regions: vec![region], replicas: 1 };
        let card = card.then(|| Card {
            described: v1::WorkerGpu::default(),
            batches: 2,
            flags: FlagTable::new(0x1000, 4),
        });
        let options = WorkerLinkOptions {
            address: Address::Unix("/run/k.sock".into()),
            engine_id: "engine".into(),
            client: "test".into(),
            nonce: [1; 16],
            rank: Rank(0),
            workers: 1,
            groups: vec![GroupMemory::new(spec, Rank(0)).unwrap(); 2],
            save_method: if card.is_some() { SaveMethod::Gpu } else { SaveMethod::Auto },
            save_timeout: SAVE_TIMEOUT,
            release_ahead: ReleaseAhead { steps: 0.5, stall: Duration::from_millis(5) },
            fence_address: 0x40,
            card,
        };
        Self { link: WorkerLink::new(options, now), now, actions: VecDeque::new(), wire: WIRE_MAX }
    }

    /// Served by a daemon, with saves as that method says.
    fn open(method: Method) -> Self {
        let mut play = Self::new(method == Method::Gpu);
        play.open_again(method);
        play
    }

    fn open_again(&mut self, method: Method) {
        self.until_mapping(method);
        let connection = self.connection();
        self.feed(WorkerEvent::Mapped { connection, boot: RUN, mapped: Ok(()) });
        self.answer(done());
        let is_registered = |action: &WorkerAction| matches!(action, WorkerAction::Registered { .. });
        assert!(self.actions.iter().any(is_registered), "{:?}", self.actions);
        self.actions.clear();
    }

    /// Connected as far as `MapPool`.
    fn until_mapping(&mut self, method: Method) {
        self.connect();
        self.answer(Answer::Welcome(v1::Welcome { wire: self.wire, ..Default::default() }));
        while matches!(self.actions.back(), Some(WorkerAction::ShareChunks { .. })) {
            self.answer(done());
        }
        self.answer(Answer::WorkerRegistered(v1::WorkerRegistered {
            method: method.into(),
            ..Default::default()
        }));
        self.answer(Answer::PoolDescriptor(v1::PoolDescriptor { bytes: 1 << 20, ..Default::default() }));
    }

    /// Connected as far as Hello.
    fn connect(&mut self) {
        self.feed(WorkerEvent::Tick);
        let connection = self.connection();
        assert_eq!(self.actions.pop_back(), Some(WorkerAction::Connect(connection)));
        let peer = Peer { life: Life::Watched(PROCESS), pid: 42 };
        self.feed(WorkerEvent::Connected { connection, peer });
        assert!(matches!(self.sent(), Some(Ask::Hello(_))));
    }

    fn feed(&mut self, event: WorkerEvent) {
        self.link.handle(event, self.now, &mut self.actions);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.feed(WorkerEvent::Tick);
    }

    fn connection(&self) -> ConnectionId {
        ConnectionId(self.link.last_connection)
    }

    /// The daemon's answer to the last request.
    fn answer(&mut self, body: Answer) {
        self.answer_to(self.link.last_request, body);
    }

    fn answer_to(&mut self, id: u64, body: Answer) {
        let reply = v1::Reply { id, boot_id: Bytes::copy_from_slice(&RUN), body: Some(body) };
        let connection = self.connection();
        self.feed(WorkerEvent::Reply { connection, reply });
    }

    fn lose(&mut self) {
        let connection = self.connection();
        self.feed(WorkerEvent::Lost { connection, why: "it hung up".into() });
    }

    /// The request of the last action, if that sends one.
    fn sent(&self) -> Option<&Ask> {
        match self.actions.back() {
            Some(WorkerAction::Send { request, .. }) => request.body.as_ref(),
            _ => None,
        }
    }

    fn save(&mut self, number: u64) {
        let group = SaveGroupSpec {
            group: 0,
            parent: None,
            hashes: vec![BlockHash([4; 16]), BlockHash([5; 16])],
            block_ids: [1, 2].map(BlockId).into(),
        };
        self.start(number, Work::Save([group].into()), None);
    }

    fn load(&mut self, number: u64, release: Release) {
        self.load_of(number, &[0], release);
    }

    /// A load of these groups.
    fn load_of(&mut self, number: u64, groups: &[u32], release: Release) {
        let group = |group: &u32| LoadGroup {
            group: *group,
            block_ids: [1, 2].map(BlockId).into(),
            pages: [10, 11].map(PoolPage).into(),
        };
        let groups = groups.iter().map(group).collect();
        self.start(number, Work::Load { boot: RUN, groups, release }, Some(3));
    }

    fn start(&mut self, number: u64, work: Work, event: Option<u32>) {
        let job = Job { key: JobKey(number), number, queued: self.now, work, event };
        self.feed(WorkerEvent::Start(job));
    }

    fn copied(&mut self, copied: Result<Copied, NotCopied>) {
        let copy = CopyId(self.link.last_copy);
        self.feed(WorkerEvent::Copied { copy, copied });
    }

    /// Takes what the engine was told: each job's end, and whether it is well; the others' kinds in between.
    fn told(&mut self) -> Vec<String> {
        let actions = std::mem::take(&mut self.actions);
        let tell = |action: WorkerAction| match action {
            WorkerAction::End { key, finished } if finished.ok => format!("end {}", key.0),
            WorkerAction::End { key, .. } => format!("fail {}", key.0),
            WorkerAction::Release { key, finished, flags } => {
                assert_eq!((finished.kind, finished.ok), (JobKind::Released, true));
                format!("release {}{}", key.0, if flags.is_some() { " with flags" } else { "" })
            }
            WorkerAction::RaiseFence { epoch } => format!("fence {epoch}"),
            WorkerAction::CopyIn { .. } => "copy in".into(),
            WorkerAction::CopyOut { .. } => "copy out".into(),
            WorkerAction::WriteFlags(_) => "write flags".into(),
            WorkerAction::Unmap(_) => "unmap".into(),
            WorkerAction::Connect(_) => "connect".into(),
            WorkerAction::Close(_) => "close".into(),
            WorkerAction::Unregistered { .. } => "unregistered".into(),
            WorkerAction::CountTimeouts(saves) => format!("timeouts {saves}"),
            WorkerAction::Send { request, .. } => {
                let body = format!("{:?}", request.body);
                body.trim_start_matches("Some(").split('(').next().unwrap_or_default().to_owned()
            }
            _ => String::new(),
        };
        actions.into_iter().map(tell).filter(|told| !told.is_empty()).collect()
    }
}

fn welcome() -> Answer {
    Answer::Welcome(v1::Welcome::default())
}

fn done() -> Answer {
    Answer::Done(v1::Done::default())
}

fn refused() -> Answer {
    Answer::Refused(v1::Refused { sentence: "no".into(), ..Default::default() })
}

fn loaded() -> Answer {
    Answer::LoadResult(v1::LoadResult { blocks: 2, bytes: 8192 })
}

fn saved() -> Answer {
    Answer::SaveResult(v1::SaveResult { saved: 2, bytes: 8192, ..Default::default() })
}

fn granted(outcomes: &[Outcome]) -> Answer {
    let pages = packed::pack_pages((0..outcomes.len() as u32).map(|page| 20 + page));
    let outcome = packed::pack_outcomes(outcomes.iter().copied());
    Answer::ClaimResult(v1::ClaimResult { claim: 9, pages, outcome })
}

#[test]
fn a_gpu_is_shared_chunk_by_chunk_before_it_is_registered() {
    let mut play = Play::new(true);
    play.connect();
    play.actions.clear();
    play.answer(welcome());
    let connection = play.connection();
    assert_eq!(play.actions.pop_front(), Some(WorkerAction::AllowReads { pid: 42 }));
    assert_eq!(play.actions.pop_front(), Some(WorkerAction::ShareChunks { connection, id: 2, batch: 0 }));
    play.answer(done());
    assert_eq!(play.actions.pop_front(), Some(WorkerAction::ShareChunks { connection, id: 3, batch: 1 }));
    play.answer(done());
    assert!(matches!(play.sent(), Some(Ask::RegisterWorker(_))));
}

#[test]
fn a_daemon_whose_pool_cannot_be_mapped_is_left_and_tried_again_after_a_pause() {
    let mut play = Play::new(false);
    play.until_mapping(Method::Mapped);
    play.actions.clear();
    let connection = play.connection();
    play.feed(WorkerEvent::Mapped { connection, boot: RUN, mapped: Err(NotMapped::NoDescriptor) });
    let sentence = "the daemon sent no descriptor of its pool";
    assert!(play.actions.contains(&WorkerAction::Refused(sentence.into())), "{:?}", play.actions);
    assert_eq!(play.told(), ["fence 2", "unregistered", "close"]);
    play.pass(Duration::from_millis(50));
    assert_eq!(play.told(), ["connect"]);
}

#[test]
fn a_refused_greeting_is_tried_again_after_a_pause() {
    let mut play = Play::new(false);
    play.connect();
    play.actions.clear();
    play.answer(refused());
    assert!(play.actions.contains(&WorkerAction::Refused("no".into())));
    assert_eq!(play.told(), ["fence 2", "unregistered", "close"]);
    play.pass(Duration::from_millis(49));
    assert!(play.actions.is_empty());
    assert_eq!(play.link.wake_at(), Some(play.now + Duration::from_millis(1)));
    play.pass(Duration::from_millis(1));
    assert_eq!(play.told(), ["connect"]);
}

#[test]
fn a_save_ends_with_the_daemons_answer() {
    let mut play = Play::open(Method::ProcessVm);
    play.save(1);
    assert!(matches!(play.sent(), Some(Ask::Save(v1::Save { epoch: 1, job: 1, .. }))));
    play.answer(saved());
    assert_eq!(play.told(), ["Save", "end 1"]);
    assert!(play.link.at_rest());
}

/// The engine uses the blocks anew as soon as it hears of the end: what the daemon still copies must not count.
#[test]
fn saves_without_an_answer_end_together_behind_the_fence() {
    let mut play = Play::open(Method::ProcessVm);
    play.save(1);
    play.pass(Duration::from_secs(4));
    play.save(2);
    play.told();
    assert_eq!(play.link.wake_at(), Some(play.now + Duration::from_secs(6)));
    play.pass(Duration::from_secs(6));
    assert_eq!(play.told(), ["fence 2", "fail 1", "fail 2", "timeouts 2"]);
    play.save(3);
    assert_eq!(play.told(), ["fail 3"], "a silent daemon is not asked again");
    play.answer_to(play.link.last_request, saved());
    play.save(4);
    assert_eq!(play.told(), ["Save"], "but once it has spoken, and its late answer ends nothing");
}

#[test]
fn claimed_blocks_are_written_here_and_committed() {
    let mut play = Play::open(Method::Mapped);
    play.save(1);
    play.answer(granted(&[Outcome::Claimed, Outcome::Present]));
    assert!(matches!(play.actions.back(), Some(WorkerAction::CopyOut { places, .. })
        if places[..] == [(0, vec![(BlockId(1), PoolPage(20))])]));
    play.copied(Ok(Copied { blocks: 1, bytes: 4096 }));
    assert!(matches!(play.sent(), Some(Ask::Commit(v1::Commit { claim: 9, written: true }))));
    play.answer(done());
    assert!(matches!(play.actions.back(), Some(WorkerAction::End { finished, .. })
        if (finished.ok, finished.blocks, finished.present) == (true, 1, 1)));
    assert!(play.link.at_rest());
}

#[test]
fn a_claim_that_is_granted_late_or_for_too_few_blocks_is_handed_back() {
    let mut play = Play::open(Method::Mapped);
    play.save(1);
    play.pass(SAVE_TIMEOUT);
    assert_eq!(play.told(), ["Claim", "fence 2", "fail 1", "timeouts 1"]);
    play.answer(granted(&[Outcome::Claimed; 2]));
    assert!(matches!(play.sent(), Some(Ask::Commit(v1::Commit { claim: 9, written: false }))));
    play.answer(done());
    assert_eq!(play.told(), ["Commit"]);
    play.save(2);
    play.answer(granted(&[Outcome::Claimed]));
    assert!(matches!(play.sent(), Some(Ask::Commit(v1::Commit { claim: 9, written: false }))));
    play.answer(done());
    assert_eq!(play.told(), ["Claim", "Commit", "fail 2"]);
    assert!(play.link.at_rest());
}

/// A greeting of the same process says that its copies have ended: the daemon may give the pages to another.
#[test]
fn nothing_is_connected_while_this_process_writes() {
    let mut play = Play::open(Method::Mapped);
    play.save(1);
    play.answer(granted(&[Outcome::Claimed; 2]));
    play.lose();
    play.pass(Duration::from_secs(60));
    assert_eq!(play.told(), ["Claim", "copy out", "fence 2", "unregistered", "close"]);
    play.copied(COPIED);
    play.pass(Duration::ZERO);
    assert_eq!(play.told(), ["fail 1", "connect"]);
}

#[test]
fn a_load_for_which_nobody_else_waits_is_released_once_it_was_asked_for() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtOnce);
    assert_eq!(play.told(), ["Load", "release 1 with flags"]);
    play.answer(loaded());
    assert_eq!(play.told(), ["end 1"]);
    assert!(play.link.at_rest());
}

#[test]
fn an_older_daemon_gets_no_flags_for_several_groups_which_it_would_refuse() {
    for (wire, told) in [
        (WIRE_OF_GROUPS_FLAGS, ["Load", "release 1 with flags"].as_slice()),
        (WIRE_OF_GROUPS_FLAGS - 1, ["Load"].as_slice()),
    ] {
        let mut play = Play::new(true);
        play.wire = wire;
        play.open_again(Method::Gpu);
        play.load_of(1, &[0, 1], Release::AtOnce);
        assert_eq!(play.told(), told);
        play.load(2, Release::AtOnce);
        assert_eq!(play.told(), ["Load", "release 2 with flags"], "one group always has flags");
    }
}

#[test]
fn a_load_beside_other_requests_is_released_ahead_of_its_end() {
    let mut play = Play::open(Method::Gpu);
    let ms = Duration::from_millis;
    play.feed(WorkerEvent::Step(StepState { shortest_step: Some(ms(10)), ..StepState::default() }));
    play.load(1, Release::WhenNear);
    play.pass(ms(30));
    play.answer(loaded());
    assert_eq!(play.told(), ["Load", "end 1"], "nothing was known yet");
    play.load(2, Release::WhenNear);
    play.pass(Duration::ZERO);
    assert_eq!(play.link.wake_at(), Some(play.now + ms(20)));
    play.pass(ms(20));
    assert_eq!(play.told(), ["Load", "release 2 with flags"]);
    play.answer(loaded());
    play.told();
    play.feed(WorkerEvent::Step(StepState { shortest_step: Some(ms(60)), ..StepState::default() }));
    play.load(3, Release::WhenNear);
    play.answer(loaded());
    assert_eq!(
        play.told(),
        ["Load", "release 3 with flags", "end 3"],
        "its answer came before the next tick"
    );
}

#[test]
fn a_load_of_a_silent_daemon_is_carried_out_here_and_ends_with_its_answer() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtEnd);
    play.pass(Duration::from_secs(5));
    assert_eq!(play.told(), ["Load"]);
    play.pass(Duration::from_millis(1));
    play.copied(COPIED);
    assert_eq!(play.told(), ["copy in", "release 1"]);
    play.pass(Duration::from_secs(600));
    assert_eq!(play.told(), Vec::<String>::new(), "the daemon may still write");
    play.answer(loaded());
    assert_eq!(play.told(), ["end 1"]);
}

#[test]
fn an_answer_during_our_own_copy_does_not_free_the_blocks_under_it() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtOnce);
    play.pass(Duration::ZERO);
    play.pass(Duration::from_millis(301));
    assert_eq!(play.told(), ["Load", "release 1 with flags", "copy in"]);
    play.answer(loaded());
    assert_eq!(play.told(), Vec::<String>::new());
    play.copied(COPIED);
    assert_eq!(play.told(), ["end 1"]);
}

#[test]
fn a_refused_load_is_carried_out_here_and_a_stream_never_waits_for_ever() {
    let mut play = Play::open(Method::Gpu);
    for (copied, end) in [(COPIED, "end 1"), (Err(NotCopied::NoPool), "fail 1")] {
        play.load(1, Release::AtOnce);
        play.pass(Duration::ZERO);
        play.answer(refused());
        play.copied(copied);
        assert_eq!(play.told(), ["Load", "release 1 with flags", "copy in", "write flags", end]);
    }
    assert!(play.link.at_rest());
}

#[test]
fn a_load_of_a_lost_daemon_ends_when_its_process_has() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtOnce);
    play.pass(Duration::ZERO);
    play.told();
    play.lose();
    assert_eq!(play.told(), ["fence 2", "unregistered", "copy in", "close"]);
    play.copied(COPIED);
    assert_eq!(play.told(), ["write flags"], "the daemon may still write into the blocks");
    assert!(play.link.needs(PROCESS));
    play.feed(WorkerEvent::ProcessEnded(PROCESS));
    assert_eq!(play.told(), ["end 1"]);
}

#[test]
fn flags_of_a_load_are_written_before_the_next_copy_waits_for_its_event() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtOnce);
    play.pass(Duration::ZERO);
    // The engine's stream waits for the flags of 1 by now, and the event of 2 stands behind that.
    play.load(2, Release::AtEnd);
    play.told();
    play.lose();
    assert_eq!(play.told(), ["fence 2", "unregistered", "copy in", "close"]);
    play.copied(COPIED);
    assert_eq!(play.told(), ["write flags", "copy in"]);
    play.copied(COPIED);
    play.feed(WorkerEvent::ProcessEnded(PROCESS));
    assert_eq!(play.told(), ["release 2", "end 1", "end 2"]);
    assert!(play.link.loads.is_empty());
}

#[test]
fn a_load_that_holds_up_the_stream_is_carried_out_before_one_whose_time_comes_first() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtOnce);
    play.pass(Duration::ZERO);
    play.load(2, Release::AtEnd);
    play.told();
    // The daemon refuses 2, and may never write the flags of 1.
    play.answer(refused());
    assert_eq!(play.told(), ["copy in"]);
    play.copied(COPIED);
    assert_eq!(play.told(), ["write flags", "copy in"]);
    play.copied(COPIED);
    assert_eq!(play.told(), ["end 2"]);
    // Where 1 cannot be copied here, 2 waits until the daemon has brought it.
    play.load(3, Release::AtOnce);
    play.pass(Duration::ZERO);
    play.load(4, Release::AtEnd);
    play.told();
    play.answer(refused());
    play.copied(Err(NotCopied::NoPool));
    assert_eq!(play.told(), ["copy in"]);
}

#[test]
fn a_copy_that_failed_is_tried_once_more_when_the_daemon_is_out() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtEnd);
    play.told();
    play.lose();
    play.copied(Err(NotCopied::NoPool));
    assert_eq!(play.told(), ["fence 2", "unregistered", "copy in", "close"]);
    play.pass(Duration::from_secs(10));
    assert_eq!(play.told(), ["copy in", "connect"]);
    play.copied(Err(NotCopied::NoPool));
    assert_eq!(play.told(), ["fail 1"]);
}

#[test]
fn a_pool_goes_when_nobody_promises_on_it_and_its_daemon_has_ended() {
    let mut play = Play::open(Method::Gpu);
    play.lose();
    play.told();
    let promises = Some(Promises { present: None, gone: vec![RUN] });
    play.feed(WorkerEvent::Step(StepState { promises, ..StepState::default() }));
    assert!(play.told().is_empty());
    play.feed(WorkerEvent::ProcessEnded(PROCESS));
    play.pass(Duration::from_secs(1));
    assert_eq!(play.told(), ["unmap", "connect"]);
    assert!(!play.link.needs(PROCESS));
}

/// A mapping may take until its connection is over. The link then did not record the pool and never unmapped it, so it held the
/// memory of a dead daemon.
#[test]
fn a_pool_that_is_mapped_when_its_connection_is_over_is_let_go() {
    let mut play = Play::new(false);
    play.connect();
    play.answer(welcome());
    play.answer(Answer::WorkerRegistered(v1::WorkerRegistered::default()));
    play.answer(Answer::PoolDescriptor(v1::PoolDescriptor { bytes: 1 << 20, ..Default::default() }));
    assert!(matches!(play.actions.back(), Some(WorkerAction::MapPool { .. })), "{:?}", play.actions);
    let connection = play.connection();
    play.lose();
    play.actions.clear();
    play.feed(WorkerEvent::Mapped { connection, boot: RUN, mapped: Err(NotMapped::NoDescriptor) });
    assert_eq!(play.actions, []);
    play.feed(WorkerEvent::Mapped { connection, boot: RUN, mapped: Ok(()) });
    assert_eq!(play.actions, [WorkerAction::Unmap(RUN)]);
    // One that is present, or former, stays: mapped again it is the same.
    play.pass(SAVE_TIMEOUT);
    let mut play = Play::open(Method::ProcessVm);
    play.feed(WorkerEvent::Mapped { connection, boot: RUN, mapped: Ok(()) });
    play.lose();
    play.actions.clear();
    play.feed(WorkerEvent::Mapped { connection, boot: RUN, mapped: Ok(()) });
    assert_eq!(play.actions, []);
}

#[test]
fn closing_ends_everything_and_says_goodbye_after_our_own_copy() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtOnce);
    play.pass(Duration::ZERO);
    play.pass(Duration::from_millis(301));
    play.load(2, Release::AtEnd);
    play.save(3);
    play.told();
    play.feed(WorkerEvent::Close);
    assert_eq!(play.told(), ["fence 2", "fail 3"], "the copy is under way");
    play.copied(COPIED);
    assert_eq!(play.told(), ["write flags", "Bye"]);
    play.save(4);
    assert_eq!(play.told(), ["fail 4"]);
    play.answer(done());
    assert_eq!(play.told(), ["close", "write flags", "fail 1", "fail 2"]);
    assert!(play.link.is_over());
}

/// The seeds found it: a worker that was closed ended its loads with the connection, while copies of a GPU that the daemon had
/// begun went on. The engine gave the blocks to others, and the daemon wrote into them.
#[test]
fn a_closed_worker_keeps_the_blocks_of_loads_while_a_daemon_that_is_lost_may_write_them() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtOnce);
    play.pass(Duration::ZERO);
    play.pass(Duration::from_millis(301));
    play.load(2, Release::AtEnd);
    play.told();
    play.feed(WorkerEvent::Close);
    play.lose();
    assert_eq!(play.told(), ["fence 2", "close"], "our own copy of the first goes on, and none is begun");
    play.copied(COPIED);
    play.pass(Duration::from_secs(9));
    assert_eq!(play.told(), ["write flags"]);
    assert!(!play.link.is_over() && play.link.needs(PROCESS));
    play.feed(WorkerEvent::ProcessEnded(PROCESS));
    assert_eq!(play.told(), ["end 1", "fail 2"]);
    assert!(play.link.is_over());
}

/// As above, for a daemon that does not answer the goodbye.
#[test]
fn a_closed_worker_keeps_the_blocks_of_loads_of_a_daemon_that_says_no_goodbye() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtEnd);
    play.told();
    play.feed(WorkerEvent::Close);
    play.pass(Duration::from_secs(1));
    assert_eq!(play.told(), ["fence 2", "Bye", "close"]);
    assert!(!play.link.is_over());
    play.pass(Duration::from_secs(10));
    assert_eq!(play.told(), ["fail 1"]);
    assert!(play.link.is_over());
}

/// A worker that was closed while it greeted a daemon anew waited ten seconds for the end of that daemon's copies, though it
/// had answered the goodbye, before which it ends them.
#[test]
fn a_goodbye_that_is_answered_ends_loads_that_were_left_with_that_run() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtEnd);
    play.lose();
    play.copied(COPIED);
    play.pass(Duration::from_millis(50));
    let connection = play.connection();
    play.feed(WorkerEvent::Connected { connection, peer: Peer { life: Life::Watched(PROCESS), pid: 42 } });
    play.told();
    play.feed(WorkerEvent::Close);
    assert_eq!(play.told(), ["fence 3", "Bye"]);
    play.answer(done());
    assert_eq!(play.told(), ["close", "fail 1"]);
    assert!(play.link.is_over());
}

/// A daemon of another version, or with a defect. The job was dropped with the answer: it never ended, so vLLM kept its
/// blocks for ever, and its request if it was a load.
#[test]
fn an_answer_of_another_kind_ends_the_connection_and_so_every_job() {
    let mut play = Play::open(Method::Gpu);
    play.save(1);
    play.load(2, Release::AtEnd);
    play.told();
    play.answer(done());
    play.copied(COPIED);
    play.feed(WorkerEvent::ProcessEnded(PROCESS));
    let told = play.told();
    assert_eq!(told, ["fence 2", "unregistered", "copy in", "fail 1", "close", "release 2", "end 2"]);
    for (method, answers) in
        [(Method::ProcessVm, vec![loaded()]), (Method::Mapped, vec![granted(&[Outcome::NoRoom; 2]), saved()])]
    {
        let mut play = Play::open(method);
        play.save(1);
        for answer in answers {
            play.answer(answer);
            if play.actions.iter().any(|action| matches!(action, WorkerAction::CopyOut { .. })) {
                play.copied(Ok(Copied::default()));
            }
        }
        assert!(play.told().ends_with(&[
            "fence 2".into(),
            "unregistered".into(),
            "fail 1".into(),
            "close".into()
        ]));
    }
}

/// The seeds found it: a claim was given up, and what answered it was no answer to a claim. The link took it as one, and did
/// not hand back the claim that the daemon granted after it: for as long as the connection stood nobody could save those
/// blocks.
#[test]
fn an_answer_of_another_kind_to_what_was_given_up_ends_the_connection_too() {
    let mut play = Play::open(Method::Mapped);
    play.save(1);
    play.pass(SAVE_TIMEOUT);
    play.told();
    play.answer(saved());
    assert_eq!(play.told(), ["fence 3", "unregistered", "close"]);
}

/// A daemon that takes every registration and answers every save with nonsense was registered with every 50 ms, and each time
/// two lines went to the log.
#[test]
fn a_daemon_that_answers_nonsense_is_asked_less_and_less() {
    let mut play = Play::open(Method::ProcessVm);
    let mut pauses = Vec::new();
    for number in 1..6 {
        play.save(number);
        play.answer(done());
        play.told();
        let due = play.link.wake_at().unwrap();
        pauses.push((due - play.now).as_millis());
        play.now = due;
        play.open_again(Method::ProcessVm);
    }
    assert_eq!(pauses, [50, 100, 200, 400, 800]);
}

/// A daemon with a defect: a load counted as arrived whatever blocks its answer named, and whichever run gave it.
#[test]
fn a_load_ends_well_only_by_an_answer_of_its_run_about_all_its_blocks() {
    for is_other_run in [false, true] {
        let mut play = Play::open(Method::Gpu);
        play.load(1, Release::AtEnd);
        play.told();
        let (run, blocks) = if is_other_run { ([8; 16], 2) } else { (RUN, 1) };
        let body = Some(Answer::LoadResult(v1::LoadResult { blocks, bytes: 8192 }));
        let (id, connection) = (play.link.last_request, play.connection());
        let reply = v1::Reply { id, boot_id: Bytes::copy_from_slice(&run), body };
        play.feed(WorkerEvent::Reply { connection, reply });
        assert_eq!(play.told(), ["fence 2", "unregistered", "copy in", "close"], "this process brings it");
    }
}

/// As above: saves went a way that this worker does not have.
#[test]
fn a_worker_is_registered_for_its_own_kind_of_memory_or_not_at_all() {
    for (card, method) in [(false, Method::Gpu), (true, Method::Mapped), (true, Method::ProcessVm)] {
        let mut play = Play::new(card);
        play.connect();
        play.answer(welcome());
        while matches!(play.actions.back(), Some(WorkerAction::ShareChunks { .. })) {
            play.answer(done());
        }
        play.actions.clear();
        play.answer(Answer::WorkerRegistered(v1::WorkerRegistered {
            method: method.into(),
            ..Default::default()
        }));
        assert_eq!(play.told(), ["fence 2", "unregistered", "close"]);
    }
}

/// As above: the worker waited for ever for an answer that had come, and was served by nobody.
#[test]
fn a_greeting_that_is_answered_with_another_kind_is_tried_again() {
    let mut play = Play::new(false);
    play.connect();
    play.actions.clear();
    play.answer(saved());
    assert_eq!(play.told(), ["fence 2", "unregistered", "close"]);
    play.pass(Duration::from_millis(50));
    assert_eq!(play.told(), ["connect"]);
}

/// A daemon that lives and cuts the connection during a load. For up to ten seconds its worker started no job, ended none
/// and connected to nobody: it waited for the daemon's end.
#[test]
fn a_worker_goes_on_beside_loads_whose_daemon_is_watched_for_its_end() {
    let mut play = Play::open(Method::Gpu);
    play.load(1, Release::AtEnd);
    play.lose();
    play.copied(COPIED);
    play.told();
    play.save(2);
    assert_eq!(play.told(), ["fail 2"], "nobody saves it, which is to be known at once");
    play.now += Duration::from_millis(50);
    play.open_again(Method::Gpu);
    play.save(3);
    play.answer(saved());
    let told = play.told();
    assert_eq!(told, ["Save", "end 3"]);
    assert!(play.link.at_rest(), "a run that greets again has ended its copies");
}

/// The same daemon greets again before the ten seconds are over, with the load's blocks in its hands no more.
#[test]
fn a_load_ends_when_its_daemon_greets_again_and_a_stranger_does_not_end_it() {
    for (run, ends) in [(RUN, true), ([8; 16], false)] {
        let mut play = Play::open(Method::Gpu);
        play.load(1, Release::AtEnd);
        play.lose();
        play.copied(COPIED);
        play.now += Duration::from_millis(50);
        play.connect();
        play.told();
        let (id, connection) = (play.link.last_request, play.connection());
        let reply = v1::Reply { id, boot_id: Bytes::copy_from_slice(&run), body: Some(welcome()) };
        play.feed(WorkerEvent::Reply { connection, reply });
        assert_eq!(play.told().contains(&"end 1".to_owned()), ends);
        play.pass(Duration::from_secs(10));
        assert_eq!(play.told().contains(&"end 1".to_owned()), !ends);
    }
}

/// In a container without the host's processes the kernel tells no end. The blocks of a load used to count as free as soon as
/// its connection was lost, and a daemon that lived wrote its copy into what the engine had computed there since.
#[test]
fn blocks_of_a_load_stay_while_a_daemon_may_write_whose_end_is_not_told() {
    let mut play = Play::open(Method::Gpu);
    play.link.up().unwrap().peer.life = Life::Unknown;
    play.load(1, Release::AtEnd);
    play.actions.clear();
    play.lose();
    play.feed(WorkerEvent::Copied { copy: CopyId(play.link.last_copy), copied: COPIED });
    let is_end = |action: &WorkerAction| matches!(action, WorkerAction::End { .. });
    let is_release = |action: &WorkerAction| matches!(action, WorkerAction::Release { .. });
    assert!(!play.actions.iter().any(is_end), "the daemon may still write");
    assert!(play.actions.iter().any(is_release), "its request goes on");
    play.pass(Duration::from_secs(10));
    assert!(play.actions.iter().any(is_end));
}
