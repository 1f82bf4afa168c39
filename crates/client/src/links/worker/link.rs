//! The state of a worker's link, and what all its parts do with it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use kvlane_proto::{v1, v1::request::Body as Ask};

use super::{
    super::{
        backoff::Backoff,
        connection::Connection,
        ids::{ConnectionId, CopyId, JobKey},
        pace::LoadPace,
        promises::{PoolBook, ROUND},
        standing::{Notice, Standing, Urgency},
    },
    event::{Actions, Seen, WorkerAction, WorkerLinkOptions},
    load::Loading,
    up::{Asked, Stage, Up},
};
use crate::{
    boot::BootId,
    jobs::{Finished, Job},
};

/// A worker's link. See [`links`](crate::links) for the rules between it and its driver.
#[derive(Debug)]
pub struct WorkerLink {
    pub(super) options: WorkerLinkOptions,
    /// As the fence holds it; starts with 1.
    pub(super) epoch: u64,
    pub(super) backoff: Backoff,
    pub(super) connection: Connection<Up>,
    pub(super) pools: PoolBook,
    pub(super) round_at: Instant,
    pub(super) loads: BTreeMap<JobKey, Loading>,
    pub(super) writes: BTreeMap<CopyId, Write>,
    /// Last numbers given. Requests count over all connections, so that an answer of a former one fits nothing.
    pub(super) last_connection: u64,
    pub(super) last_request: u64,
    pub(super) last_copy: u64,
    pub(super) pace: LoadPace,
    pub(super) step: Seen,
    pub(super) standing: Standing,
    /// What whoever waits for the registration was told last.
    pub(super) refusal: String,
    pub(super) is_closing: bool,
}

/// This process writes claimed blocks into the pool. The job ends after it, whatever becomes of the connection.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) job: Job,
    pub(super) connection: ConnectionId,
    pub(super) claim: u64,
    pub(super) present: u64,
}

impl WorkerLink {
    /// Nothing is connected, and the first attempt is due.
    pub fn new(options: WorkerLinkOptions, now: Instant) -> Self {
        Self {
            epoch: 1,
            backoff: Backoff::new(now),
            connection: Connection::Down,
            pools: PoolBook::default(),
            round_at: now + ROUND,
            loads: BTreeMap::new(),
            writes: BTreeMap::new(),
            last_connection: 0,
            last_request: 0,
            last_copy: 0,
            pace: LoadPace::default(),
            step: Seen::default(),
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

    pub(super) fn up(&mut self) -> Option<&mut Up> {
        self.connection.up_mut()
    }

    pub(super) fn up_as(&mut self, connection: ConnectionId) -> Option<&mut Up> {
        self.up().filter(|up| up.id == connection)
    }

    pub(super) fn open(&mut self) -> Option<&mut Up> {
        self.up().filter(|up| matches!(up.stage, Stage::Open))
    }

    /// Sends over the present connection; the number of the request.
    pub(super) fn send(&mut self, ask: Ask, actions: &mut Actions) -> u64 {
        self.last_request += 1;
        let id = self.last_request;
        if let Some(&Up { id: connection, .. }) = self.connection.up() {
            let request = v1::Request { id, body: Some(ask) };
            actions.push_back(WorkerAction::Send { connection, request });
        }
        id
    }

    pub(super) fn next_copy(&mut self) -> CopyId {
        self.last_copy += 1;
        CopyId(self.last_copy)
    }

    /// Runs of loads that are not over.
    pub(super) fn boots_in_use(&self) -> BTreeSet<BootId> {
        self.loads.values().map(Loading::boot).collect()
    }
}

/// Ends a job without effect.
pub(super) fn end(job: &Job, why: &str, now: Instant, actions: &mut Actions) {
    actions.push_back(WorkerAction::End { key: job.key, told: job.failed(why, now) });
}

/// Ends a save that will have no answer. Loads end by their own rules.
pub(super) fn end_save(asked: Asked, why: &str, now: Instant, actions: &mut Actions) {
    match asked {
        Asked::Save { job, .. } | Asked::Claim { job, .. } => end(&job, why, now, actions),
        Asked::Commit { key, end, .. } => {
            let told = Finished { ok: false, blocks: 0, bytes: 0, detail: why.into(), ..end };
            actions.push_back(WorkerAction::End { key, told });
        }
        Asked::Load { .. } | Asked::GivenUp(_) => {}
    }
}

pub(super) fn log(notice: Option<Notice>, actions: &mut Actions) {
    actions.extend(notice.map(WorkerAction::Log));
}

pub(super) fn warn(sentence: String, actions: &mut Actions) {
    log(Some(Notice { urgency: Urgency::Warning, sentence }), actions);
}
