//! A host with fake GPUs, its ranks, and what they are to give.

use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{DeviceMemory, Driver, Gpu, Priority, Stream};
use kvlane_moe::gpu::{Cast, Combine, Dispatched, GpuOptions, GpuRank, Input, Output, Phases, join_on_gpu};
use kvlane_moe::{
    AllGather, MoeError, Number, Rank, RowLayout, SCALED, Scales, Shape, Stats, Sum, Terms, join,
};

pub(crate) const POISON: u8 = 0xa5;

/// The tokens of one rank.
#[derive(Debug, Clone)]
pub(crate) struct Given {
    pub(crate) rows: Vec<u8>,
    pub(crate) scales: Vec<u8>,
    pub(crate) ids: Vec<i64>,
    pub(crate) weights: Vec<f32>,
}

/// What a rank gets: rows of each expert, and its tokens' sums.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Got {
    rows: Rows,
    pub(crate) tokens: Vec<u8>,
}

/// An all-gather among threads.
pub(crate) struct Board {
    told: Mutex<Vec<Vec<u8>>>,
    all: Barrier,
}

impl Board {
    pub(crate) fn new(ranks: usize) -> Arc<Board> {
        Arc::new(Board { told: Mutex::new(vec![Vec::new(); ranks]), all: Barrier::new(ranks) })
    }

    pub(crate) fn gather(&self, rank: usize) -> impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, String> + '_ {
        move |bytes: &[u8]| {
            self.told.lock().unwrap()[rank] = bytes.to_vec();
            self.all.wait();
            let told = self.told.lock().unwrap().clone();
            self.all.wait();
            Ok(told)
        }
    }
}

/// Joins all ranks in threads.
pub(crate) fn join_all<T: Send>(
    ranks: usize,
    join: impl Fn(usize, &mut AllGather<'_>) -> Result<T, MoeError> + Sync,
) -> Vec<Result<T, MoeError>> {
    let board = Board::new(ranks);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let (board, join) = (Arc::clone(&board), &join);
                scope.spawn(move || join(rank, &mut board.gather(rank)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(crate) struct Host {
    pub(crate) driver: Arc<dyn Driver>,
    gpus: u32,
}

impl Host {
    pub(crate) fn new(gpus: u32) -> Host {
        let options = FakeOptions { devices: gpus, ..FakeOptions::default() };
        Host { driver: Arc::new(FakeDriver::new(options).unwrap()), gpus }
    }

    /// Whether the fake was built where a C++ compiler is.
    pub(crate) fn has_kernels(&self) -> bool {
        let joined = join_all(1, |rank, all_gather| {
            join_on_gpu(&small(1), rank, &self.gpu(0), &options(&small(1), true, Duration::MAX), all_gather)
        });
        match joined.into_iter().next().unwrap() {
            Err(MoeError::Gpu(why)) if why.contains("C++ compiler") => {
                println!("not tested: kernels of kvlane-moe: no C++ compiler");
                false
            }
            joined => joined.map(|_| true).unwrap(),
        }
    }

    pub(crate) fn gpu(&self, rank: usize) -> Gpu {
        Gpu::open(Arc::clone(&self.driver), rank as u32 % self.gpus).unwrap()
    }

    /// Ranks on all GPUs in turns; `is_wide`: several blocks a launch.
    pub(crate) fn join(&self, shape: &Shape, is_wide: bool, timeout: Duration) -> Vec<OnGpu> {
        self.join_by(shape, options(shape, is_wide, timeout))
    }

    pub(crate) fn join_with_capacity(&self, shape: &Shape, capacity: usize) -> Vec<OnGpu> {
        self.join_by(shape, GpuOptions { capacity, ..options(shape, true, Duration::from_secs(60)) })
    }

    fn join_by(&self, shape: &Shape, options: GpuOptions) -> Vec<OnGpu> {
        join_all(shape.ranks, |rank, all_gather| {
            let gpu = self.gpu(rank);
            let joined = join_on_gpu(shape, rank, &gpu, &options, all_gather)?;
            let stream = Stream::new(&gpu, Priority::Normal).unwrap();
            Ok(OnGpu {
                rank: joined,
                number: rank,
                stream,
                gpu,
                capacity: options.capacity,
                is_by_column: false,
                kept: Vec::new(),
            })
        })
        .into_iter()
        .map(Result::unwrap)
        .collect()
    }
}

/// Ranks agree on these here.
pub(crate) const EXACT: Terms = Terms { is_exact: true, cast: None };

pub(crate) fn options(shape: &Shape, is_wide: bool, timeout: Duration) -> GpuOptions {
    let padding = shape.experts_a_rank() * (shape.alignment - 1);
    let capacity = match shape.layout {
        RowLayout::Experts => shape.ranks * shape.max_tokens * shape.top_k + padding,
        RowLayout::Masked { capacity } => shape.experts_a_rank() * capacity,
        RowLayout::Tokens => shape.ranks * shape.max_tokens,
    };
    GpuOptions { capacity, terms: EXACT, multiprocessors: (!is_wide).then_some(1), timeout }
}

pub(crate) fn small(ranks: usize) -> Shape {
    Shape {
        ranks,
        experts: 10,
        top_k: 3,
        max_tokens: 20,
        row_bytes: 64,
        scale_bytes: 8,
        hidden: 48,
        number: Number::Bf16,
        alignment: 4,
        layout: RowLayout::Experts,
    }
}

/// Memory of a fake GPU, which the test reaches at its address.
pub(crate) struct Buffer {
    memory: DeviceMemory,
    bytes: usize,
}

impl Buffer {
    pub(crate) fn new(gpu: &Gpu, bytes: &[u8]) -> Buffer {
        let memory = gpu.alloc(bytes.len().max(1) as u64).unwrap();
        let buffer = Buffer { memory, bytes: bytes.len() };
        // SAFETY: a fake maps its memory in this process, and no work uses it yet.
        unsafe { buffer.pointer().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        buffer
    }

    fn poisoned(gpu: &Gpu, bytes: usize) -> Buffer {
        Buffer::new(gpu, &vec![POISON; bytes])
    }

    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    fn pointer(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.memory.address() as usize)
    }

    /// The bytes, once all work on them is done.
    fn read(&self) -> Vec<u8> {
        // SAFETY: as above; the caller has synchronised.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.bytes) }.to_vec()
    }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)).collect()
}

/// Scales of 4 bytes that stand in columns of `room` numbers each, and after the last column those of the next `room` rows.
fn by_row(scales: &[u8], columns: usize, room: usize) -> Vec<u8> {
    let scales = scales.as_chunks::<4>().0;
    let rows = scales.len() / columns;
    let of_row = |row: usize| {
        let first = row / room * room * columns + row % room;
        (0..columns).flat_map(move |column| scales[first + column * room])
    };
    (0..rows).flat_map(of_row).collect()
}

/// A rank on a fake GPU.
pub(crate) struct OnGpu {
    pub(crate) rank: GpuRank,
    pub(crate) number: usize,
    pub(crate) stream: Stream,
    pub(crate) gpu: Gpu,
    capacity: usize,
    /// Whether it asks for scales column by column.
    pub(crate) is_by_column: bool,
    /// Memory that was used. To free it waits for all work of the GPU, so for ranks that wait for this one.
    kept: Vec<Buffer>,
}

/// A dispatch, with the memory that it uses.
pub(crate) struct Sending {
    dispatched: Dispatched,
    output: Output,
    /// Rows, scales, counts and starts, in what the rank keeps.
    written: usize,
}

/// Rows that came. Ids and weights are those of the layout of tokens.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rows {
    pub(crate) rows: Vec<u8>,
    scales: Vec<u8>,
    pub(crate) counts: Vec<u32>,
    starts: Vec<u32>,
    ids: Vec<u8>,
    weights: Vec<u8>,
}

impl Rows {
    pub(crate) fn with(self, tokens: Vec<u8>) -> Got {
        Got { rows: self, tokens }
    }
}

impl OnGpu {
    pub(crate) fn send(&mut self, given: &Given, phases: Phases) -> Sending {
        self.try_send(given, phases).unwrap()
    }

    pub(crate) fn try_send(&mut self, given: &Given, phases: Phases) -> Result<Sending, MoeError> {
        let (gpu, shape) = (&self.gpu, *self.rank.shape());
        let ids: Vec<u8> = given.ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
        let weights: Vec<u8> = given.weights.iter().flat_map(|weight| weight.to_ne_bytes()).collect();
        let read = [&given.rows, &given.scales, &ids, &weights].map(|bytes| Buffer::new(gpu, bytes));
        let experts = shape.experts_of(self.number).len();
        let (rows, pairs) = (self.capacity, self.capacity * shape.top_k);
        let (starts, wanted) = match shape.layout {
            RowLayout::Tokens => (4, pairs),
            _ => (4 * experts, 0),
        };
        let sizes =
            [rows * shape.row_bytes, rows * shape.scale_bytes, 4 * experts, starts, 8 * wanted, 4 * wanted];
        let written = sizes.map(|bytes| Buffer::poisoned(gpu, bytes));
        let [rows, scales, ids, weights] = read.each_ref().map(Buffer::address);
        let tokens = given.ids.len() / shape.top_k;
        let input = Input { tokens, rows, scales, ids, id_bytes: 8, weights: Some(weights) };
        let [rows, scales, counts, starts, ids, weights] = written.each_ref().map(Buffer::address);
        let output =
            Output { rows, scales, counts, starts, ids, weights, scales_by_column: self.is_by_column };
        let room = (phases == Phases::Both).then_some(&output);
        self.kept.extend(read);
        let first = self.kept.len();
        self.kept.extend(written);
        // SAFETY: all memory lives until the stream is synchronised, or longer.
        let dispatched = unsafe { self.rank.dispatch(self.stream.raw(), &input, room, phases) }?;
        Ok(Sending { dispatched, output, written: first })
    }

    pub(crate) fn try_receive(&mut self, sending: &mut Sending) -> Result<(), MoeError> {
        let Sending { dispatched, output, .. } = sending;
        // SAFETY: as in `try_send`.
        unsafe { self.rank.receive(self.stream.raw(), dispatched, output) }
    }

    pub(crate) fn receive(&mut self, sending: &mut Sending) -> Rows {
        self.try_receive(sending).unwrap();
        self.rows(sending)
    }

    /// The rows of a dispatch that is over. Memory behind them was not touched.
    pub(crate) fn rows(&self, sending: &Sending) -> Rows {
        let rows = self.rows_unchecked(sending);
        self.rank.check().unwrap();
        rows
    }

    pub(crate) fn rows_unchecked(&self, sending: &Sending) -> Rows {
        self.stream.synchronize().unwrap();
        let shape = *self.rank.shape();
        let [mut rows, mut scales, counts, starts, mut ids, mut weights] =
            std::array::from_fn(|index| self.kept[sending.written + index].read());
        if self.is_by_column {
            let room = match shape.layout {
                RowLayout::Masked { capacity } => capacity,
                _ => self.capacity,
            };
            scales = by_row(&scales, shape.scale_bytes / 4, room);
        }
        let (counts, mut starts) = (words(&counts), words(&starts));
        let end = match shape.layout {
            RowLayout::Experts => {
                let end = counts.last().zip(starts.last()).map_or(0, |(count, start)| count + start);
                (end as usize).next_multiple_of(shape.alignment)
            }
            RowLayout::Masked { capacity } => counts.len() * capacity,
            RowLayout::Tokens => std::mem::take(&mut starts)[0] as usize,
        };
        let pairs = if shape.layout == RowLayout::Tokens { end * shape.top_k } else { 0 };
        let of_a_row = [shape.row_bytes, shape.scale_bytes, 1, 1];
        for ((bytes, each), end) in [&mut rows, &mut scales, &mut ids, &mut weights]
            .into_iter()
            .zip(of_a_row)
            .zip([end, end, 8 * pairs, 4 * pairs])
        {
            let behind = bytes.split_off(end * each);
            assert!(behind.iter().all(|byte| *byte == POISON), "memory behind the end");
        }
        Rows { rows, scales, counts, starts, ids, weights }
    }

    /// Combines, and gives the tokens if that receives.
    pub(crate) fn send_back(
        &mut self,
        sending: &mut Sending,
        rows: &Rows,
        sum: Sum,
        phases: Phases,
    ) -> Vec<u8> {
        let tokens = self.send_back_unchecked(sending, rows, sum, phases);
        self.rank.check().unwrap();
        tokens
    }

    pub(crate) fn send_back_unchecked(
        &mut self,
        sending: &mut Sending,
        rows: &Rows,
        sum: Sum,
        phases: Phases,
    ) -> Vec<u8> {
        let shape = *self.rank.shape();
        let mut outputs = outputs_of(&shape, self.number, &rows.rows);
        outputs.resize(self.capacity * shape.sum_bytes(), POISON);
        let outputs = Buffer::new(&self.gpu, &outputs);
        let tokens = Buffer::poisoned(&self.gpu, sending.dispatched.tokens() * shape.sum_bytes());
        let (stream, dispatched) = (self.stream.raw(), &mut sending.dispatched);
        // A caller whose experts got no rows may have no memory for them.
        let address = if rows.rows.is_empty() { 0 } else { outputs.address() };
        let given = Combine { outputs: address, tokens: tokens.address(), weights: None, sum };
        // SAFETY: all memory lives until the stream is synchronised.
        unsafe { self.rank.combine(stream, dispatched, &given, phases).unwrap() };
        self.stream.synchronize().unwrap();
        let read = tokens.read();
        self.kept.extend([outputs, tokens]);
        read
    }

    pub(crate) fn there_and_back(&mut self, given: &Given, sum: Sum, is_split: bool) -> Got {
        let mut sending = self.send(given, if is_split { Phases::Send } else { Phases::Both });
        let rows = if is_split { self.receive(&mut sending) } else { self.rows(&sending) };
        let tokens = if is_split {
            self.send_back(&mut sending, &rows, sum, Phases::Send);
            self.send_back(&mut sending, &rows, sum, Phases::Receive)
        } else {
            self.send_back(&mut sending, &rows, sum, Phases::Both)
        };
        rows.with(tokens)
    }

    /// Rows of fp8 and their scales.
    pub(crate) fn cast(&self, rows: &[u8], kind: Scales) -> (Vec<u8>, Vec<u8>) {
        let tokens = rows.len() / (2 * self.rank.shape().row_bytes);
        let from = Buffer::new(&self.gpu, rows);
        let to = Buffer::poisoned(&self.gpu, rows.len() / 2);
        let scales = Buffer::poisoned(&self.gpu, rows.len() / 2 / SCALED * kind.bytes());
        let cast = Cast { tokens, from: from.address(), rows: to.address(), scales: scales.address(), kind };
        // SAFETY: all memory lives until the stream is synchronised.
        unsafe { self.rank.cast(self.stream.raw(), &cast).unwrap() };
        self.stream.synchronize().unwrap();
        (to.read(), scales.read())
    }

    pub(crate) fn stats(&mut self) -> Stats {
        self.rank.stats().unwrap()
    }
}

/// An expert's output: numbers that depend on the rank, the row and the column.
fn outputs_of(shape: &Shape, rank: usize, rows: &[u8]) -> Vec<u8> {
    let mut outputs = Vec::new();
    for row in rows.chunks(shape.row_bytes) {
        let sum: u32 = row.iter().map(|byte| u32::from(*byte)).sum();
        for column in 0..shape.hidden {
            let element = (sum as f32 / 100.0 - 7.0) * (1.0 + 0.1 * ((column + 3 * rank) % 17) as f32);
            match shape.number {
                Number::Bf16 => outputs.extend(half::bf16::from_f32(element).to_le_bytes()),
                Number::F16 => outputs.extend(half::f16::from_f32(element).to_le_bytes()),
                Number::F32 => outputs.extend(element.to_le_bytes()),
            }
        }
    }
    outputs
}

/// Random tokens of each rank: none to all, some that want no expert, some that want one twice; at times all want the first.
pub(crate) fn random_given(shape: &Shape, seed: u64) -> Vec<Given> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    let is_skewed = next() % 4 == 0;
    (0..shape.ranks)
        .map(|_| {
            let tokens = match next() % 4 {
                0 => 0,
                1 => shape.max_tokens,
                _ => next() as usize % (shape.max_tokens + 1),
            };
            let pairs = tokens * shape.top_k;
            let ids = (0..pairs).map(|_| match next() % 8 {
                0 => -1,
                1 | 2 if is_skewed => 0,
                _ => (next() % shape.experts as u64) as i64,
            });
            let ids = ids.collect();
            let weights = (0..pairs).map(|_| next() as f32 / (1u64 << 30) as f32 - 1.0).collect();
            let mut bytes = |count: usize| (0..count).map(|_| next() as u8).collect::<Vec<u8>>();
            Given {
                rows: bytes(tokens * shape.row_bytes),
                scales: bytes(tokens * shape.scale_bytes),
                ids,
                weights,
            }
        })
        .collect()
}

/// Each rank's results of each round, by ranks that work in memory of the host.
pub(crate) fn expected(shape: &Shape, rounds: &[(Sum, Vec<Given>)]) -> Vec<Vec<Got>> {
    on_host(shape, rounds).into_iter().map(|(got, _)| got).collect()
}

pub(crate) fn expected_stats(shape: &Shape, rounds: &[(Sum, Vec<Given>)]) -> Vec<Stats> {
    on_host(shape, rounds).into_iter().map(|(_, stats)| stats).collect()
}

fn on_host(shape: &Shape, rounds: &[(Sum, Vec<Given>)]) -> Vec<(Vec<Got>, Stats)> {
    let patience = Duration::from_secs(60);
    let ranks = join_all(shape.ranks, |rank, all_gather| join(shape, rank, EXACT, patience, all_gather));
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .enumerate()
            .map(|(number, rank)| {
                scope.spawn(move || {
                    let mut rank = rank.unwrap();
                    let run = |(sum, given): &(Sum, Vec<Given>)| {
                        one_on_host(&mut rank, number, &given[number], *sum)
                    };
                    let got = rounds.iter().map(run).collect();
                    (got, rank.stats())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn one_on_host(rank: &mut Rank, number: usize, given: &Given, sum: Sum) -> Got {
    let shape = *rank.shape();
    let sent = rank.send(&given.rows, &given.scales, &given.ids, &given.weights).unwrap();
    let arrived = rank.arrive(sent).unwrap();
    let (counts, starts) = (arrived.arrivals.counts.clone(), arrived.arrivals.starts.clone());
    let mut rows = vec![POISON; arrived.arrivals.rows * shape.row_bytes];
    let mut scales = vec![POISON; arrived.arrivals.rows * shape.scale_bytes];
    let mut handle = rank.place(arrived, &mut rows, &mut scales).unwrap();
    rank.send_back(&mut handle, &outputs_of(&shape, number, &rows), sum, None).unwrap();
    let mut tokens = vec![POISON; given.ids.len() / shape.top_k * shape.sum_bytes()];
    let pairs =
        if shape.layout == RowLayout::Tokens { rows.len() / shape.row_bytes * shape.top_k } else { 0 };
    let (mut ids, mut weights) = (vec![0; pairs], vec![0.0; pairs]);
    if shape.layout == RowLayout::Tokens {
        rank.write_wanted(&handle, &mut ids, &mut weights).unwrap();
    }
    rank.gather(handle, &mut tokens).unwrap();
    let ids = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
    let weights = weights.iter().flat_map(|weight: &f32| weight.to_ne_bytes()).collect();
    Rows { rows, scales, counts, starts, ids, weights }.with(tokens)
}
