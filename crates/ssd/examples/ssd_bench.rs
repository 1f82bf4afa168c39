//! Throughput, latency and CPU time of the tier on one file or several: `ssd_bench PATH[,PATH...] [GIB]`.
//!
//! Prints one line of JSON for each measurement. A third argument `threads` does without io_uring; a program named in
//! KVLANE_BENCH_BETWEEN is run in turns with the reads, with block size and depth as arguments, for comparison.
//! Blocks have one shard; the pool is in huge pages where possible.
#![allow(clippy::expect_used, clippy::panic, reason = "a benchmark ends where something is wrong")]

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace};
use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa};
use kvlane_ssd::{
    DeviceOptions, Extent, Key, Options, Read, ReadEnd, Record, Refused, Shard, Space, Tier, WriteEnd,
};

const SPACE: Space = Space { namespace: Namespace([1; 16]), cut: CutDigest([1; 16]) };

/// Processor time of this process, in the kernel too.
fn cpu() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call fills the structure, and zeroes are a valid one.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let time = |part: libc::timeval| Duration::new(part.tv_sec as u64, part.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Processor time of the devices' threads alone, without who asks and is answered.
fn device_cpu() -> Duration {
    let mut total = 0;
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        if read("comm").starts_with("kvlane-ssd") {
            total += read("schedstat").split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Duration::from_nanos(total)
}

fn key(number: u64) -> Key {
    let mut hash = [0; 16];
    hash[..8].copy_from_slice(&number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    Key { space: SPACE, hash: BlockHash(hash) }
}

struct Measured {
    name: String,
    bytes: u64,
    seconds: f64,
    cpu: f64,
    device_cpu: f64,
    latencies_us: Vec<u64>,
}

impl Measured {
    fn print(mut self) -> f64 {
        self.latencies_us.sort_unstable();
        let at = |share: f64| {
            let last = self.latencies_us.len().saturating_sub(1);
            self.latencies_us.get((last as f64 * share) as usize).copied().unwrap_or(0)
        };
        let gb = self.bytes as f64 / 1e9;
        println!(
            "{{\"what\": \"{}\", \"gb_per_second\": {:.3}, \"p50_us\": {}, \"p99_us\": {}, \"cores_per_gb_per_second\": {:.3}, \"of_these_in_device_threads\": {:.3}}}",
            self.name,
            gb / self.seconds,
            at(0.5),
            at(0.99),
            self.cpu / gb,
            self.device_cpu / gb
        );
        gb / self.seconds
    }
}

struct Bench {
    tier: Tier,
    arena: Arc<Arena>,
    block: u64,
    crc: u32,
}

impl Bench {
    fn slot(&self, number: u64) -> Extent {
        let slots = self.arena.bytes() / self.block;
        Extent { offset: number % slots * self.block, bytes: self.block }
    }

    /// Writes the blocks from `first` on, as many at once as the backlog takes.
    fn write(&self, first: u64, count: u64, name: &str) -> f64 {
        let (end, ends) = channel();
        let (began, cpu_before, device_before) = (Instant::now(), cpu(), device_cpu());
        let (mut accepted, mut ended) = (0, 0);
        let mut latencies = Vec::new();
        while ended < count {
            if accepted < count {
                let shards = vec![Shard { extent: self.slot(0), crc: self.crc }];
                let record = Record { key: key(first + accepted), parent: None, shards };
                let (end, at) = (end.clone(), Instant::now());
                match self.tier.write(record, move |how| {
                    let _ = end.send((how, at.elapsed()));
                }) {
                    Ok(()) => {
                        accepted += 1;
                        continue;
                    }
                    Err(Refused::Full) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            let (how, took) = ends.recv().expect("the tier answers");
            assert_eq!(how, WriteEnd::Stored);
            latencies.push(took.as_micros() as u64);
            ended += 1;
        }
        let (seconds, cpu) = (began.elapsed().as_secs_f64(), (cpu() - cpu_before).as_secs_f64());
        let device_cpu = (device_cpu() - device_before).as_secs_f64();
        Measured {
            name: name.into(),
            bytes: count * self.block,
            seconds,
            cpu,
            device_cpu,
            latencies_us: latencies,
        }
        .print()
    }

    /// Reads `count` of `blocks` blocks, in an order without pattern, `depth` at once.
    fn read(&self, blocks: u64, count: u64, depth: u64, name: &str) -> f64 {
        let (end, ends) = channel();
        let (began, cpu_before, device_before) = (Instant::now(), cpu(), device_cpu());
        let mut latencies = Vec::new();
        let mut dice = 88_172_645_463_325_252u64;
        let mut free: VecDeque<u64> = (0..depth).collect();
        let (mut started, mut ended) = (0, 0);
        while ended < count {
            while started < count
                && let Some(slot) = free.pop_front()
            {
                dice ^= dice << 13;
                dice ^= dice >> 7;
                dice ^= dice << 17;
                let (end, at) = (end.clone(), Instant::now());
                let read =
                    Read { key: key(dice % blocks), into: vec![self.slot(slot)], deadline: None, late: None };
                self.tier
                    .read(read, move |how| {
                        let _ = end.send((how, slot, at.elapsed()));
                    })
                    .expect("the block is stored");
                started += 1;
            }
            let (how, slot, took) = ends.recv().expect("the tier answers");
            assert!(matches!(how, ReadEnd::Found { .. }), "{how:?}");
            latencies.push(took.as_micros() as u64);
            free.push_back(slot);
            ended += 1;
        }
        let (seconds, cpu) = (began.elapsed().as_secs_f64(), (cpu() - cpu_before).as_secs_f64());
        let device_cpu = (device_cpu() - device_before).as_secs_f64();
        Measured {
            name: name.into(),
            bytes: count * self.block,
            seconds,
            cpu,
            device_cpu,
            latencies_us: latencies,
        }
        .print()
    }
}

/// How long it takes to read the index back, from the tables and from the headers alone.
fn restart(path: &std::path::Path, gib: u64, arena: &Arc<Arena>) {
    const BLOCKS: u64 = 100_000;
    let options = |capacity| {
        let device = DeviceOptions { path: path.to_path_buf(), capacity };
        Options { backlog_bytes: 4 << 20, ..Options::new(vec![device]) }
    };
    let tier = Tier::open(options(Some(gib << 30)), arena.clone()).expect("the tier opens");
    // SAFETY: nothing is in flight yet.
    let crc = crc32c::crc32c(unsafe { std::slice::from_raw_parts(arena.base(), 4096) });
    let bench = Bench { tier, arena: arena.clone(), block: 4096, crc };
    bench.write(0, BLOCKS, "write 4 KiB");
    let open = |what| {
        let began = Instant::now();
        let tier = Tier::open(options(None), arena.clone()).expect("the tier opens again");
        let took = began.elapsed();
        assert_eq!(tier.stats().blocks, BLOCKS);
        println!("# {BLOCKS} blocks are back in {took:?} from {what}");
        tier
    };
    assert!(bench.tier.close(Duration::from_secs(30)));
    drop(bench);
    drop(open("tables"));
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("the file is ours");
    let mut page = [0; 4096];
    for at in (0..gib << 30).step_by(4096) {
        use std::os::unix::fs::FileExt;
        if file.read_exact_at(&mut page, at).is_ok() && page.starts_with(b"kvlnFOOT") {
            file.write_all_at(&[0; 4096], at).expect("the file is ours");
        }
    }
    file.sync_all().expect("the file is ours");
    drop(file);
    drop(open("headers"));
    std::fs::remove_file(path).expect("the file is ours");
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let paths: Vec<PathBuf> = arguments.next().expect("a path").split(',').map(PathBuf::from).collect();
    let gib: u64 = arguments.next().map_or(4, |gib| gib.parse().expect("a number"));
    let threads = arguments.next().is_some_and(|word| word == "threads");
    let options = ArenaOptions { bytes: 256 << 20, hugepages: HugePages::Auto, numa: Numa::Off, threads: 1 };
    let arena = Arc::new(Arena::create(&options, &|_| {}).expect("a pool"));
    println!("# pool in pages of {}", arena.page_size());
    restart(&paths[0], gib, &arena);
    for (block, depth) in [(2u64 << 20, 16), (256 << 10, 32)] {
        let devices =
            paths.iter().map(|path| DeviceOptions { path: path.clone(), capacity: Some(gib << 30) });
        let options = Options { threads, ..Options::new(devices.collect()) };
        let tier = Tier::open(options, arena.clone()).expect("the tier opens");
        for status in tier.status() {
            println!(
                "# {} {} direct {} registered {} {:?}",
                status.path.display(),
                status.io,
                status.direct,
                status.registered,
                status.notes
            );
        }
        // SAFETY: nothing is in flight yet.
        let bytes = unsafe { std::slice::from_raw_parts_mut(arena.base(), block as usize) };
        let mut state = 1u64;
        for word in bytes.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            word.copy_from_slice(&state.to_le_bytes());
        }
        let crc = crc32c::crc32c(bytes);
        let bench = Bench { tier, arena: arena.clone(), block, crc };
        let count = ((gib * paths.len() as u64) << 30) / 2 / block;
        let kib = block >> 10;
        bench.write(0, count, &format!("write {kib} KiB, first time"));
        let reads = count * 2;
        // Something to compare with, measured in turns.
        let between = std::env::var("KVLANE_BENCH_BETWEEN").unwrap_or_default();
        let mut alone = 0.0;
        for _ in 0..if between.is_empty() { 1 } else { 3 } {
            alone = bench.read(count, reads, depth, &format!("read {kib} KiB, {depth} in flight"));
            if !between.is_empty() {
                let arguments = [format!("{kib}k"), depth.to_string()];
                let status = std::process::Command::new(&between).args(arguments).status();
                assert!(status.is_ok_and(|status| status.success()));
            }
        }
        let beside = std::thread::scope(|scope| {
            let bench = &bench;
            let writer =
                scope.spawn(move || bench.write(count, count / 4, &format!("write {kib} KiB beside reads")));
            let beside = bench.read(count, reads, depth, &format!("read {kib} KiB beside a write backlog"));
            let _ = writer.join();
            beside
        });
        println!("# reads beside writes over reads alone: {:.2}", beside / alone);
        bench.write(2 * count, count, &format!("write {kib} KiB over old segments"));
        assert!(bench.tier.close(Duration::from_secs(30)));
        drop(bench);
        let began = Instant::now();
        let options = Options::new(
            paths.iter().map(|path| DeviceOptions { path: path.clone(), capacity: None }).collect(),
        );
        let tier = Tier::open(options, arena.clone()).expect("the tier opens again");
        println!("# opened again with {} blocks in {:?}", tier.stats().blocks, began.elapsed());
        assert!(tier.close(Duration::from_secs(30)));
        drop(tier);
        for path in &paths {
            std::fs::remove_file(path).expect("the file is ours");
        }
    }
}
