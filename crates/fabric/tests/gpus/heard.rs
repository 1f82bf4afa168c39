//! A carrier from outside the crate that reaches GPUs: what it is told about GPUs, and about both memories of a post.

use std::sync::Arc;

use kvlane_fabric::{
    BadWords, Between, Carrier, CarrierPost, Completion, Context, Engine, EngineOptions, Memory,
    MemoryRegion, NewCarrier, NotNow, Op, PathId, PathSpec, PeerId, Reach, RegisterError, Registrar,
    SessionId, Transport,
};
use kvlane_gpu::{Gpu, GpuError};
use parking_lot::Mutex;

use crate::side::{Bytes, On, Side, done, driver};
use crate::support::MIB;

#[derive(Debug, Default)]
struct Heard {
    /// Numbers and ordinals, in the order in which they came.
    gpus: Mutex<Vec<(u16, u32)>>,
    regions: Mutex<Vec<Memory>>,
    posts: Mutex<Vec<(Op, Between, usize)>>,
}

impl Registrar for Heard {
    fn add_gpu(&self, number: u16, gpu: &Gpu) -> Result<(), GpuError> {
        self.gpus.lock().push((number, gpu.info().ordinal));
        Ok(())
    }

    fn register(&self, region: &MemoryRegion) -> Result<Option<Vec<u8>>, RegisterError> {
        self.regions.lock().push(region.memory);
        Ok(None)
    }
}

/// Says of each post that its bytes are in place, and moves none.
#[derive(Debug)]
struct Listener(Arc<Heard>);

impl Carrier for Listener {
    fn code(&self) -> u8 {
        203
    }

    fn reach(&self) -> Reach {
        Reach::ALL_MEMORY
    }

    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        Some(Arc::clone(&self.0) as Arc<dyn Registrar>)
    }

    fn control_up(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        cx.offer(peer, Vec::new());
    }

    fn consider(&mut self, cx: &mut Context<'_>, session: SessionId, _: &[u8]) -> Result<(), BadWords> {
        cx.accept(session, Vec::new());
        Ok(())
    }

    fn accepted(&mut self, cx: &mut Context<'_>, peer: PeerId, _: &[u8]) -> Result<(), BadWords> {
        cx.add_path(peer, PathSpec::new(self.reach(), 0), 0);
        Ok(())
    }

    fn connect(&mut self, cx: &mut Context<'_>, path: PathId, connection: u32, _: PeerId, _: u64) {
        cx.up(path, connection);
    }

    fn close(&mut self, cx: &mut Context<'_>, path: PathId, connection: u32) {
        cx.broke(path, connection, "closed");
    }

    fn post(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow> {
        let noted = post.runs.iter().map(|run| (post.op, post.between, run.address().addr()));
        self.0.posts.lock().extend(noted);
        cx.completed(post.token, Completion::Placed);
        Ok(())
    }
}

fn listening() -> (Arc<Heard>, Engine) {
    let heard = Arc::new(Heard::default());
    let carrier = Listener(Arc::clone(&heard));
    let options = EngineOptions { transport: Some(Transport(&["listener"])), ..EngineOptions::default() };
    let carrier = NewCarrier::new("listener", |_| Ok(Box::new(carrier)));
    (heard, Engine::with_carriers(options, vec![carrier]).unwrap())
}

#[test]
fn a_carrier_hears_which_gpu_a_number_is_and_in_which_memories_a_post_lies() {
    let driver = driver();
    let memories = [On::Gpu(1), On::Host, On::Gpu(0), On::Gpu(1)].map(|on| Bytes::new(&driver, on, MIB));
    let (heard, engine) = listening();
    let side = |engine, memory: Bytes| {
        // SAFETY: the engine is dropped before its memory, as the first field.
        let region = unsafe { memory.register(&engine) };
        Side { engine, region, memory }
    };
    let [first, second, third, fourth] = memories;
    let here = side(engine, first);
    // SAFETY: the engine is closed below.
    let others = unsafe {
        [second.register(&here.engine), third.register(&here.engine), fourth.register(&here.engine)]
    };
    assert_eq!(*heard.gpus.lock(), [(0, 1), (1, 0), (0, 1)]);
    let on = [Memory::Gpu(0), Memory::Host(0), Memory::Gpu(1), Memory::Gpu(0)];
    assert_eq!(*heard.regions.lock(), on);

    let there = side(listening().1, Bytes::new(&driver, On::Host, MIB));
    let peer = here.meet(&there);
    let Bytes::Gpu(memory, _) = &here.memory else { panic!("it is on a GPU") };
    let [gpu, host] = [
        memory.address() as usize,
        match &second {
            Bytes::Host(memory) => memory.base.addr(),
            Bytes::Gpu(..) => panic!("it is on the host"),
        },
    ];
    done(&here.begin(peer, Op::Write, vec![here.run(there.region, 4096, 0, 4096)]));
    let mut run = here.run(there.region, 0, 0, 4096);
    run.local.region = others[0];
    done(&here.begin(peer, Op::Read, vec![run]));
    let remote = Memory::Host(0);
    let posts = [
        (Op::Write, Between { local: Memory::Gpu(0), remote }, gpu + 4096),
        (Op::Read, Between { local: remote, remote }, host),
    ];
    assert_eq!(*heard.posts.lock(), posts);
    here.engine.close();
}
