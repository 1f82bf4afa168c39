//! Moves the KV pages of a request from one process to another, which waits until all of them are in place.
//!
//!     cargo run -p kvlane-fabric --example move_pages
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use kvlane_fabric::{Access, Descriptor, Engine, EngineOptions, Pages, Pieces, Transfer};

const PAGE_BYTES: u64 = 64 << 10;
const PAGES: usize = 256;
const WANTED: [u32; 8] = [3, 14, 15, 92, 65, 35, 89, 79]; // where the sender has them
const FREE: [u32; 8] = [7, 0, 200, 4, 5, 6, 100, 101]; // where the receiver wants them
const DONE: u32 = 1; // a counter
type Outcome = Result<(), Box<dyn std::error::Error>>;

fn receive() -> Outcome {
    let mut memory = vec![0u8; PAGE_BYTES as usize * PAGES];
    let engine = Engine::new(EngineOptions::default())?;
    // SAFETY: the memory outlives its registration, and is not looked at before the pages are there.
    let region = unsafe { engine.register(memory.as_mut_ptr(), memory.len() as u64, Access::ReadWrite) }?;
    let generation = engine.open_counter(DONE);
    println!("{generation} {}", engine.describe()?.to_text()?);
    assert!(engine.wait_count(DONE, generation, 1, Some(Duration::from_secs(30))), "nothing came");
    engine.unregister(region)?;
    let arrived = FREE.map(|page| memory[page as usize * PAGE_BYTES as usize]);
    println!("received pages that begin with {arrived:?}");
    Ok(())
}

fn send(line: &str) -> Outcome {
    let (generation, descriptor) = line.split_once(' ').ok_or("the receiver says something else")?;
    let descriptor: Descriptor = descriptor.parse()?;
    let mut memory: Vec<u8> = (0..PAGES).flat_map(|page| [page as u8; PAGE_BYTES as usize]).collect();
    let engine = Engine::new(EngineOptions::default())?;
    // SAFETY: the memory outlives its registration.
    let own = unsafe { engine.register(memory.as_mut_ptr(), memory.len() as u64, Access::Read) }?;
    let peer = engine.connect(&descriptor)?;
    let local = Pages::of(own, PAGE_BYTES, WANTED);
    let remote = Pages::of(descriptor.regions[0].number, PAGE_BYTES, FREE);
    let write = Transfer::write(Pieces::Paged { page_bytes: PAGE_BYTES, local, remote });
    let write = engine.begin(peer, Transfer { immediate: Some((DONE, generation.parse()?)), ..write })?;
    write.wait(Some(Duration::from_secs(30))).ok_or("it takes more than 30 s")??;
    engine.unregister(own)?;
    println!("sent {} pages of {PAGE_BYTES} bytes", WANTED.len());
    Ok(())
}

fn main() -> Outcome {
    if std::env::args().nth(1).as_deref() == Some("receive") {
        return receive();
    }
    let mut receiver =
        Command::new(std::env::current_exe()?).arg("receive").stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(receiver.stdout.take().ok_or("no pipe")?).lines();
    send(&lines.next().ok_or("the receiver ended")??)?;
    lines.try_for_each(|line| line.map(|line| println!("{line}")))?;
    receiver.wait()?.success().then_some(()).ok_or_else(|| "the receiver failed".into())
}
