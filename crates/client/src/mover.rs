//! The worker's mover thread: feeds events to the [`WorkerLink`], and carries its actions out.
//!
//! All copies of this process are made here, one at a time. Each action is over before the next one begins.

use std::{
    collections::VecDeque,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use kvlane_engine_memory::{
    BlockPages, ChunkBatch, Copied, EVENTS, LoadGroup, OwnCopies, OwnError, WorkerFence,
};
use kvlane_memory::{PeerCredentials, allow_ptrace_by};
use kvlane_proto::{v1, v1::request::Body as Ask};
use rustix::event::{PollFd, PollFlags};

use crate::{
    boot::BootId,
    connection::{Connection, Lost, poll_for},
    links::{
        flags::FlagTable,
        ids::{ConnectionId, ProcessId},
        standing::log_notice,
        worker::{
            WorkerLink,
            event::{Card, Peer, WorkerAction, WorkerEvent, WorkerLinkOptions},
            failures::{NotCopied, NotMapped},
        },
    },
    pools::MappedPools,
    processes::Processes,
    shared::{Shared, WorkerOptions},
    wire_gpu,
};

/// Runs until the handle says stop and every job has ended.
pub(crate) fn run(options: WorkerOptions, nonce: [u8; 16], copies: OwnCopies, shared: &Shared) {
    let gpu = options.blocks.gpu();
    let fence = WorkerFence::new(nonce, gpu.cloned());
    let batches = gpu.map_or_else(Vec::new, |gpu| gpu.chunk_batches());
    let card = gpu.map(|gpu| Card {
        described: wire_gpu::exported(&gpu.exported()),
        batches: batches.len(),
        flags: FlagTable::new(gpu.first_flag(), EVENTS),
    });
    let link = WorkerLink::new(
        WorkerLinkOptions {
            address: options.address.clone(),
            engine_id: options.engine_id.clone(),
            client: options.client.clone(),
            nonce: fence.nonce(),
            rank: options.rank,
            workers: options.workers,
            groups: copies.groups().to_vec(),
            save_method: options.save_method,
            save_timeout: options.save_timeout,
            release_ahead: options.release_ahead,
            fence_address: fence.address(),
            card,
        },
        Instant::now(),
    );
    let mover = Mover {
        options,
        shared,
        link,
        actions: VecDeque::new(),
        fence,
        batches,
        copies,
        pools: MappedPools::default(),
        connection: None,
        processes: Processes::default(),
        ended: Vec::new(),
    };
    mover.run();
}

struct Mover<'a> {
    options: WorkerOptions,
    shared: &'a Shared,
    link: WorkerLink,
    /// Returned by the link, and not carried out yet.
    actions: VecDeque<WorkerAction>,
    fence: WorkerFence,
    /// GPU memory that consists of chunks, in batches for `ShareChunks`.
    batches: Vec<ChunkBatch>,
    copies: OwnCopies,
    pools: MappedPools,
    connection: Option<(ConnectionId, Connection)>,
    processes: Processes,
    /// Processes whose end the last wait has seen.
    ended: Vec<ProcessId>,
}

impl Mover<'_> {
    fn run(mut self) {
        while !self.link.is_over() {
            self.turn();
            if !self.link.is_over() {
                // Loads into a GPU use this mapping only if the daemon does not copy them, so it is not prefaulted for them.
                let busy = self.options.blocks.gpu().is_none() && self.pools.prefault_some();
                self.wait(busy);
            }
        }
        self.shared.state.lock().registered = false;
    }

    /// Feeds everything that has happened, in the order that [`links`](crate::links) asks for.
    fn turn(&mut self) {
        let inbox = self.shared.take();
        if inbox.stop {
            self.feed(WorkerEvent::Close);
        }
        inbox.jobs.into_iter().for_each(|job| self.feed(WorkerEvent::Start(job)));
        self.take_replies();
        for process in std::mem::take(&mut self.ended) {
            self.feed(WorkerEvent::ProcessEnded(process));
        }
        self.feed(WorkerEvent::Step(inbox.seen));
        self.feed(WorkerEvent::Tick);
        self.processes.retain(|process| self.link.needs(process));
    }

    fn take_replies(&mut self) {
        loop {
            let Some((id, connection)) = &mut self.connection else { return };
            let id = *id;
            match connection.flush().and_then(|()| connection.receive()) {
                Ok(Some(reply)) => self.feed(WorkerEvent::Reply { connection: id, reply }),
                Ok(None) => return,
                Err(lost) => {
                    self.feed(WorkerEvent::Lost { connection: id, why: lost.to_string() });
                    self.hang_up(id);
                }
            }
        }
    }

    /// Feeds an event, and carries out the actions that follow, which may cause further events.
    fn feed(&mut self, event: WorkerEvent) {
        self.link.handle(event, Instant::now(), &mut self.actions);
        while let Some(action) = self.actions.pop_front() {
            if let Some(event) = self.carry_out(action) {
                self.link.handle(event, Instant::now(), &mut self.actions);
            }
        }
    }

    /// Carries an action out. Returns the event that answers it, if one does.
    fn carry_out(&mut self, action: WorkerAction) -> Option<WorkerEvent> {
        match action {
            WorkerAction::Connect(connection) => return Some(self.connect(connection)),
            WorkerAction::Send { connection, request } => {
                let sent = self.connection_as(connection)?.send(&request);
                return lost(connection, sent);
            }
            WorkerAction::ShareChunks { connection, id, batch } => {
                return self.share_chunks(connection, id, batch);
            }
            WorkerAction::AllowReads { pid } => {
                // May fail: without Yama there is nothing to allow, and otherwise the daemon's probe finds out.
                let _ = allow_ptrace_by(Some(pid).filter(|pid| *pid != 0));
            }
            WorkerAction::MapPool { connection, boot, bytes, writable } => {
                let descriptor = self.connection_as(connection)?.take_descriptor();
                let mapped = descriptor
                    .ok_or(NotMapped::NoDescriptor)
                    .and_then(|descriptor| self.pools.map(boot, descriptor, bytes, writable));
                return Some(WorkerEvent::Mapped { connection, boot, mapped });
            }
            WorkerAction::Unmap(boot) => self.pools.unmap(&boot),
            WorkerAction::RaiseFence { epoch } => self.fence.raise_to(epoch),
            WorkerAction::CopyIn { copy, boot, groups, event } => {
                let copied = self.copy_in(&boot, &groups, event);
                return Some(WorkerEvent::Copied { copy, copied });
            }
            WorkerAction::CopyOut { copy, places } => {
                let copied = self.copy_out(&places);
                return Some(WorkerEvent::Copied { copy, copied });
            }
            WorkerAction::WriteFlags(flags) => {
                if let Some(gpu) = self.options.blocks.gpu() {
                    gpu.write_flags(&flags);
                }
            }
            WorkerAction::Release { key, finished, flags } => self.shared.release(key, finished, flags),
            WorkerAction::End { key, finished } => self.shared.finish(key, finished),
            WorkerAction::Registered { method, reason } => self.shared.registered(method, reason),
            WorkerAction::Unregistered { was_open } => {
                self.pools.lost();
                self.shared.unregistered(was_open);
            }
            WorkerAction::Refused(sentence) => self.shared.refused(sentence),
            WorkerAction::CountTimeouts(saves) => self.shared.state.lock().stats.save_timeouts += saves,
            WorkerAction::Close(connection) => self.hang_up(connection),
            WorkerAction::Log(notice) => log_notice(Some(notice)),
        }
        None
    }

    fn connect(&mut self, id: ConnectionId) -> WorkerEvent {
        match Connection::connect(&self.options.address, self.options.daemon_user) {
            Ok(connection) => {
                let credentials = connection.unix().and_then(|stream| PeerCredentials::of(stream).ok());
                let life = self.processes.watch(connection.unix());
                let peer = Peer { life, pid: credentials.map_or(0, |credentials| credentials.pid) };
                self.connection = Some((id, connection));
                WorkerEvent::Connected { connection: id, peer }
            }
            Err(error) => WorkerEvent::NotConnected { connection: id, why: error.into() },
        }
    }

    fn share_chunks(&mut self, connection: ConnectionId, id: u64, batch: usize) -> Option<WorkerEvent> {
        let (gpu, batch) = (self.options.blocks.gpu()?, self.batches.get(batch)?);
        let (share, descriptors) = match gpu.share(batch) {
            Ok(shared) => shared,
            Err(error) => return Some(WorkerEvent::NotShared { connection, why: error.to_string() }),
        };
        let request = v1::Request { id, body: Some(Ask::ShareChunks(wire_gpu::chunk_share(share))) };
        let sent = self.connection_as(connection)?.send_with(&request, descriptors);
        lost(connection, sent)
    }

    /// Copies from the mapped pool of that boot.
    fn copy_in(&self, boot: &BootId, groups: &[LoadGroup], event: Option<u32>) -> Result<Copied, NotCopied> {
        let pool = self.pools.of(boot).ok_or(NotCopied::NoPool)?;
        Ok(self.copies.load(groups, event, &pool.reading)?)
    }

    /// Copies to the mapped pool of the present boot.
    fn copy_out(&self, places: &[(u32, BlockPages)]) -> Result<Copied, NotCopied> {
        let pool = self.pools.present().and_then(|pool| pool.writing.as_ref());
        Ok(self.copies.save(places, pool.ok_or(OwnError::NotWritable)?)?)
    }

    fn connection_as(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        self.connection.as_mut().filter(|(of, _)| *of == id).map(|(_, connection)| connection)
    }

    fn hang_up(&mut self, id: ConnectionId) {
        self.connection.take_if(|(of, _)| *of == id);
    }

    /// Waits for a job, an answer, the end of a process or a deadline; if `busy`, polls for them without waiting.
    fn wait(&mut self, busy: bool) {
        let now = Instant::now();
        let until = self.link.wake_at().map(|at| at.saturating_duration_since(now));
        let timeout = if busy { Some(Duration::ZERO) } else { until };
        let wake = self.shared.wake.as_fd();
        let connection = self.connection.as_ref().map(|(_, connection)| connection.poll_fd());
        let mut watched = vec![PollFd::from_borrowed_fd(wake, PollFlags::IN)];
        watched.extend(connection);
        let processes = watched.len();
        watched.extend(self.processes.poll_fds());
        poll_for(&mut watched, timeout);
        let some_ended = watched[processes..].iter().any(|process| !process.revents().is_empty());
        let mut count = [0; 8];
        let _ = rustix::io::read(wake, &mut count);
        if some_ended {
            self.ended = self.processes.take_ended();
        }
    }
}

/// The event for a request that the connection did not take.
fn lost(connection: ConnectionId, sent: Result<(), Lost>) -> Option<WorkerEvent> {
    sent.err().map(|lost| WorkerEvent::Lost { connection, why: lost.to_string() })
}
