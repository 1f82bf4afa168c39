//! The state of a worker's link, and the helpers that its parts share.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use kvlane_proto::{v1, v1::request::Body as Ask};

use super::{
    super::{
        backoff::Backoff,
        connection::ConnectionState,
        ids::{ConnectionId, CopyId, JobKey},
        pace::LoadPace,
        promises::{PoolBook, ROUND},
        standing::{Notice, Standing, Urgency},
    },
    event::{Actions, StepState, WorkerAction, WorkerLinkOptions},
    load::Loading,
    up::{PendingRequest, WorkerStage, WorkerUp},
};
use crate::{
    boot::BootId,
    jobs::{Finished, Job},
};

/// A worker's link. [`links`](crate::links) has the rules between it and its driver.
#[derive(Debug)]
pub struct WorkerLink {
    pub(super) options: WorkerLinkOptions,
    /// The fence's epoch; starts at 1.
    pub(super) epoch: u64,
    pub(super) backoff: Backoff,
    pub(super) connection: ConnectionState<WorkerUp>,
    pub(super) pools: PoolBook,
    pub(super) round_at: Instant,
    pub(super) loads: BTreeMap<JobKey, Loading>,
    pub(super) writes: BTreeMap<CopyId, Write>,
    /// The last ids given. Requests count over all connections, so that an answer over a former one fits no request.
    pub(super) last_connection: u64,
    pub(super) last_request: u64,
    pub(super) last_copy: u64,
    pub(super) pace: LoadPace,
    pub(super) step: StepState,
    pub(super) standing: Standing,
    /// The last reason why the registration does not come; empty once registered.
    pub(super) refusal: String,
    pub(super) is_closing: bool,
}

/// A copy of this process into blocks that it has claimed. The job does not end before the copy does, even if the connection
/// is lost.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) job: Job,
    pub(super) connection: ConnectionId,
    pub(super) claim: u64,
    pub(super) present: u64,
}

impl WorkerLink {
    /// Unconnected; the first `Tick` connects.
    pub fn new(options: WorkerLinkOptions, now: Instant) -> Self {
        Self {
            epoch: 1,
            backoff: Backoff::new(now),
            connection: ConnectionState::Down,
            pools: PoolBook::default(),
            round_at: now + ROUND,
            loads: BTreeMap::new(),
            writes: BTreeMap::new(),
            last_connection: 0,
            last_request: 0,
            last_copy: 0,
            pace: LoadPace::default(),
            step: StepState::default(),
            standing: Standing::new(format!("rank {}", options.rank), options.address.clone(), now),
            refusal: String::new(),
            is_closing: false,
            options,
        }
    }

    pub(super) fn raise_fence(&mut self, actions: &mut Actions) {
        self.epoch += 1;
        actions.push_back(WorkerAction::RaiseFence { epoch: self.epoch });
    }

    pub(super) fn up(&mut self) -> Option<&mut WorkerUp> {
        self.connection.up_mut()
    }

    pub(super) fn up_as(&mut self, connection: ConnectionId) -> Option<&mut WorkerUp> {
        self.up().filter(|up| up.id == connection)
    }

    pub(super) fn open(&mut self) -> Option<&mut WorkerUp> {
        self.up().filter(|up| matches!(up.stage, WorkerStage::Open))
    }

    /// Sends a request over the present connection, and returns its id.
    pub(super) fn send(&mut self, ask: Ask, actions: &mut Actions) -> u64 {
        self.last_request += 1;
        let id = self.last_request;
        if let Some(&WorkerUp { id: connection, .. }) = self.connection.up() {
            let request = v1::Request { id, body: Some(ask) };
            actions.push_back(WorkerAction::Send { connection, request });
        }
        id
    }

    pub(super) fn next_copy(&mut self) -> CopyId {
        self.last_copy += 1;
        CopyId(self.last_copy)
    }

    /// The daemon runs whose pools are needed by loads that are not over.
    pub(super) fn boots_in_use(&self) -> BTreeSet<BootId> {
        self.loads.values().map(Loading::boot).collect()
    }
}

/// Ends a job as failed.
pub(super) fn end(job: &Job, why: &str, now: Instant, actions: &mut Actions) {
    actions.push_back(WorkerAction::End { key: job.key, finished: job.failed(why, now) });
}

/// Ends a save as failed, because no answer will come. Loads end by their own rules (loads.rs).
pub(super) fn end_save(pending: PendingRequest, why: &str, now: Instant, actions: &mut Actions) {
    match pending {
        PendingRequest::Save { job, .. } | PendingRequest::Claim { job, .. } => end(&job, why, now, actions),
        PendingRequest::Commit { key, end, .. } => {
            let finished = Finished { ok: false, blocks: 0, bytes: 0, detail: why.into(), ..end };
            actions.push_back(WorkerAction::End { key, finished });
        }
        PendingRequest::Load { .. } | PendingRequest::GivenUp(_) => {}
    }
}

pub(super) fn log(notice: Option<Notice>, actions: &mut Actions) {
    actions.extend(notice.map(WorkerAction::Log));
}

pub(super) fn warn(sentence: String, actions: &mut Actions) {
    log(Some(Notice { urgency: Urgency::Warning, sentence }), actions);
}
