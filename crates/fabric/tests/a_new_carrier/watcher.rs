//! A carrier that reaches nothing, and watches a descriptor.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;

use kvlane_fabric::{
    BadWords, Carrier, CarrierPost, Context, Interest, NotNow, PathId, PeerId, SessionId, Watch,
};

#[derive(Debug)]
pub(crate) struct Watcher {
    watch: Watch,
    told: Sender<u64>,
    /// Readable from the beginning.
    ends: [UnixStream; 2],
}

impl Watcher {
    pub(crate) fn new(watch: Watch, told: Sender<u64>) -> io::Result<Watcher> {
        let (reader, mut writer) = UnixStream::pair()?;
        writer.write_all(b"!")?;
        watch.add(&reader, 77, Interest::READS)?;
        Ok(Watcher { watch, told, ends: [reader, writer] })
    }
}

impl Carrier for Watcher {
    fn code(&self) -> u8 {
        202
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

    fn descriptor_ready(&mut self, _: &mut Context<'_>, tag: u64) -> bool {
        self.watch.remove(&self.ends[0]);
        self.told.send(tag).unwrap();
        true
    }
}
