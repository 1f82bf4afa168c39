//! The smallest carrier, over the public API only: it copies bytes from memory to memory over a [`Wire`].

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvlane_fabric::{
    BadWords, Carrier, CarrierPost, Completion, Context, Job, MemoryRegion, NotNow, Op, OpenedWindow, PathId,
    PathSpec, PeerId, Reach, RegisterError, Registrar, RemoteMemory, SessionId, Token,
};

use crate::wire::{Part, Wire};

/// One engine's end of a wire, by its number.
#[derive(Debug)]
struct End(Arc<Wire>, u64);

impl Registrar for End {
    fn register(&self, region: &MemoryRegion) -> Result<Option<Vec<u8>>, RegisterError> {
        self.0.lay((self.1, region.number, region.generation), *region)?;
        Ok(Some(self.1.to_le_bytes().to_vec()))
    }

    fn open_window(&self, window: &OpenedWindow<'_>) {
        self.0.show((self.1, window.number, window.generation));
    }

    fn close_window(&self, number: u32, generation: u32) {
        self.0.take_away((self.1, number, generation));
    }

    /// Waits for whoever copies right now, so that [`Carrier::touches`] has nothing to say.
    fn withdraw(&self, region: &MemoryRegion) {
        self.0.take_away((self.1, region.number, region.generation));
    }
}

/// A post on its way.
#[derive(Debug)]
struct Copying {
    wire: Arc<Wire>,
    path: PathId,
    token: Token,
    op: Op,
    parts: Vec<Part>,
    completion: Completion,
}

impl Job for Copying {
    fn run(&mut self) {
        if self.completion != Completion::Refused {
            self.completion = self.wire.carry(self.op, &self.parts);
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[derive(Debug)]
pub(crate) struct Toy {
    end: Arc<End>,
    /// Paths that are up, each with its peer and the number of its connection.
    up: HashMap<PathId, (PeerId, u32)>,
    waiting: VecDeque<Copying>,
    at_work: usize,
    is_closed: bool,
}

impl Toy {
    pub(crate) fn new(wire: &Arc<Wire>) -> Toy {
        let end = Arc::new(End(Arc::clone(wire), wire.new_end()));
        Toy { end, up: HashMap::new(), waiting: VecDeque::new(), at_work: 0, is_closed: false }
    }

    fn has_job(&self) -> bool {
        !self.waiting.is_empty() && !self.end.0.is_stuck()
    }

    /// A path is gone, until the peer accepts again. What a job has in hand completes when the job is back.
    fn end(&mut self, cx: &mut Context<'_>, path: PathId, why: &str) {
        let Some((_, connection)) = self.up.remove(&path) else { return };
        cx.broke(path, connection, why);
        cx.remove_path(path);
        let its = self.waiting.iter().filter(|copying| copying.path == path);
        its.for_each(|copying| cx.completed(copying.token, Completion::Unknown));
        self.waiting.retain(|copying| copying.path != path);
    }
}

impl Carrier for Toy {
    fn code(&self) -> u8 {
        128
    }

    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        Some(Arc::clone(&self.end) as Arc<dyn Registrar>)
    }

    fn control_up(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        cx.offer(peer, self.end.0.name());
    }

    fn consider(&mut self, cx: &mut Context<'_>, session: SessionId, offer: &[u8]) -> Result<(), BadWords> {
        match offer == self.end.0.name() && !self.is_closed {
            true => cx.accept(session, Vec::new()),
            false => cx.refuse(session, "the peer is at another wire"),
        }
        Ok(())
    }

    fn accepted(&mut self, cx: &mut Context<'_>, peer: PeerId, _: &[u8]) -> Result<(), BadWords> {
        cx.add_path(peer, PathSpec::new(Reach::HOSTS, PathSpec::CMA - 1), 0);
        Ok(())
    }

    fn control_lost(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        let paths: Vec<PathId> = self.up.keys().copied().filter(|path| self.up[path].0 == peer).collect();
        paths.into_iter().for_each(|path| self.end(cx, path, "the control connection broke"));
    }

    /// What it tells may be the key that a post waits for.
    fn regions_changed(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.up.iter().filter(|(_, (of, _))| *of == peer).for_each(|(path, _)| cx.ready(*path));
    }

    fn connect(&mut self, cx: &mut Context<'_>, path: PathId, connection: u32, peer: PeerId, _: u64) {
        self.up.insert(path, (peer, connection));
        cx.up(path, connection);
    }

    fn close(&mut self, cx: &mut Context<'_>, path: PathId, _: u32) {
        self.end(cx, path, "the engine has closed it");
    }

    fn post(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow> {
        let CarrierPost { path, token, op, .. } = *post;
        let (mut parts, mut completion) = (Vec::new(), Completion::Unknown);
        for run in post.runs {
            match cx.remote_memory(post.peer, run) {
                RemoteMemory::Known(found) => Part::add(&mut parts, run, &found),
                RemoteMemory::NotYet => return Err(NotNow),
                RemoteMemory::None => completion = Completion::Refused,
            }
        }
        self.waiting.push_back(Copying { wire: self.end.0.clone(), path, token, op, parts, completion });
        Ok(())
    }

    fn take_job(&mut self) -> Option<Box<dyn Job>> {
        let copying = self.has_job().then(|| self.waiting.pop_front()).flatten()?;
        self.at_work += 1;
        Some(Box::new(copying))
    }

    fn put_back(&mut self, cx: &mut Context<'_>, job: Box<dyn Job>) {
        let Ok(copying) = job.into_any().downcast::<Copying>() else { return };
        self.at_work -= 1;
        cx.completed(copying.token, copying.completion);
        if copying.completion == Completion::Unknown {
            self.end(cx, copying.path, "the wire has broken");
        }
    }

    /// Nobody tells a toy that is closed when its peers copy no more.
    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        cx.note_released();
        false
    }

    fn next_tick(&self, now: Duration) -> Option<Duration> {
        self.has_job().then_some(Duration::ZERO).or(self.is_closed.then(|| now + Duration::from_millis(1)))
    }

    fn close_all(&mut self, cx: &mut Context<'_>) {
        self.is_closed = true;
        let paths: Vec<PathId> = self.up.keys().copied().collect();
        paths.into_iter().for_each(|path| self.end(cx, path, "the engine was closed"));
    }

    fn is_busy(&self) -> bool {
        self.at_work > 0 || !self.end.0.try_leave(self.end.1)
    }
}
