//! A carrier that reaches nothing, and is slow to close a window.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvlane_fabric::{
    Access, BadWords, Carrier, CarrierPost, Context, Engine, EngineOptions, MemoryRegion, NewCarrier, NotNow,
    PathId, PeerId, RegisterError, Registrar, SessionId, WindowRange,
};

use crate::support::{MIB, Memory, PATIENCE};

/// What its registrar was asked for.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    CloseWindow,
    Withdraw,
}

struct Slow {
    asked: Sender<Asked>,
    /// One word lets one window be closed.
    may_close: Mutex<Receiver<()>>,
}

impl Registrar for Slow {
    fn register(&self, _: &MemoryRegion) -> Result<Option<Vec<u8>>, RegisterError> {
        Ok(None)
    }

    fn close_window(&self, _: u32, _: u32) {
        self.asked.send(Asked::CloseWindow).unwrap();
        self.may_close.lock().unwrap().recv_timeout(PATIENCE).unwrap();
    }

    fn withdraw(&self, _: &MemoryRegion) {
        self.asked.send(Asked::Withdraw).unwrap();
    }
}

#[derive(Debug)]
struct SlowCarrier(Arc<Slow>);

impl std::fmt::Debug for Slow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Slow")
    }
}

impl Carrier for SlowCarrier {
    fn code(&self) -> u8 {
        201
    }

    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        Some(Arc::clone(&self.0) as Arc<dyn Registrar>)
    }

    fn control_up(&mut self, _: &mut Context<'_>, _: PeerId) {}

    fn consider(&mut self, _: &mut Context<'_>, _: SessionId, _: &[u8]) -> Result<(), BadWords> {
        Ok(())
    }

    fn accepted(&mut self, _: &mut Context<'_>, _: PeerId, _: &[u8]) -> Result<(), BadWords> {
        Ok(())
    }

    fn connect(&mut self, _: &mut Context<'_>, _: PathId, _: u32, _: PeerId, _: u64) {}

    fn close(&mut self, _: &mut Context<'_>, _: PathId, _: u32) {}

    fn post(&mut self, _: &mut Context<'_>, _: &CarrierPost<'_>) -> Result<(), NotNow> {
        Err(NotNow)
    }
}

/// While one thread closes a window, its peer may still read through it by itself: another thread that gives the region back
/// had it back at once, and wrote what the peer then took for the window's bytes.
#[test]
fn a_region_is_not_given_back_while_somebody_else_closes_its_window() {
    let (asked, was_asked) = channel();
    let (lets_close, may_close) = channel();
    let slow = Arc::new(Slow { asked, may_close: Mutex::new(may_close) });
    let carrier = NewCarrier::new("slow", |_| Ok(Box::new(SlowCarrier(slow))));
    let engine = Engine::with_carriers(EngineOptions::default(), vec![carrier]).unwrap();
    let memory = Memory::new(MIB);
    // SAFETY: the region is given back below, before the memory goes.
    let region = unsafe { engine.register(memory.base, memory.len as u64, Access::Windows).unwrap() };
    let window = engine.open_window(engine.id(), vec![WindowRange { region, offset: 0, len: 4096 }]).unwrap();
    let next = || was_asked.recv_timeout(PATIENCE).unwrap();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| engine.close_window(&window));
        assert_eq!(next(), Asked::CloseWindow);
        let (gave_back, is_back) = channel();
        let engine = &engine;
        scope.spawn(move || gave_back.send(engine.unregister(region)));
        assert_eq!(next(), Asked::Withdraw);
        assert!(is_back.recv_timeout(Duration::from_millis(300)).is_err(), "its window is not closed yet");
        assert!(!closing.is_finished());
        lets_close.send(()).unwrap();
        closing.join().unwrap().unwrap();
        is_back.recv_timeout(PATIENCE).unwrap().unwrap();
    });
    assert_eq!(engine.windows(), 0);
}
