//! [`GpuRank`]: dispatch and combine, as launches.

#![allow(unsafe_code, reason = "launches of kernels")]

use std::sync::{Arc, Weak};
use std::time::Duration;

use kvlane_gpu::{
    Copy, DeviceMemory, Driver, Gpu, GpuError, Grid, HostBuffer, Kernel, Priority, Residency, Stream,
    StreamHandle,
};

use super::kernels::{CAST, DISPATCH, EXACT, PLAN, REDUCED};
use super::limits::{GPU_EXPERTS_MAX, GPU_RANKS_MAX, GPU_TOKENS_MAX};
use super::parameters::{
    BY_COLUMN, Call, Offsets, Own, PACKED, POWERS_OF_TWO, Parameters, RECEIVE, SEND, Scratch,
};
use super::reach::{Reached, reach_all, sharing, tell};
use super::schedule::{self, Schedule};
use super::scratch::sections;
use super::watch::Watch;
use crate::join::{Kind, Met, Part, meet_all};
use crate::layout::{COUNTS, Layout};
use crate::{AllGather, MoeError, Number, RowLayout, SCALED, Scales, Shape, Stats, Sum, Terms};

/// Dispatches that may wait to be combined.
const OPEN: usize = 2;
/// Rows begin at a multiple of it.
const UNIT: u64 = 16;
/// Bytes of the longest wait that the clock of a GPU can tell.
const LONGEST: Duration = Duration::from_secs(1 << 30);

/// The settings of a rank on a GPU, which all ranks share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuOptions {
    /// Rows of the largest output of a dispatch. In a masked layout the shape says that.
    pub capacity: usize,
    /// Without exact sums each rank takes less memory.
    pub terms: Terms,
    /// Most multiprocessors that a launch takes; None: all, or this rank's share if several ranks are on the GPU.
    pub multiprocessors: Option<u32>,
    /// Longest wait of a kernel for a rank.
    pub timeout: Duration,
}

/// The parts of an operation that a call launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phases {
    /// This rank's rows go to the others. It waits for nobody.
    Send,
    /// Those of the others come.
    Receive,
    /// Both in one launch, which is faster than one after the other.
    Both,
}

/// Device addresses of what a dispatch sends: `tokens` rows one after the other, and as many scales; `top_k` ids and weights (f32)
/// of each.
#[derive(Debug, Clone, Copy)]
pub struct Input {
    /// Number of tokens.
    pub tokens: usize,
    /// Rows, 16-byte aligned.
    pub rows: u64,
    /// Scales; not read if these have no bytes.
    pub scales: u64,
    /// Ids of experts; -1 is none.
    pub ids: u64,
    /// Bytes of an id: 4 or 8.
    pub id_bytes: usize,
    /// Weight of each id, f32; None: all are 0, and combine gets others.
    pub weights: Option<u64>,
}

/// Device addresses of what a dispatch writes.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// Room for `capacity` rows, 16-byte aligned.
    pub rows: u64,
    /// Room for as many scales.
    pub scales: u64,
    /// Rows of each expert of this rank, i32.
    pub counts: u64,
    /// Position of the first row of each, i32; 0: not wanted. In the layout of tokens how many rows came; not 0.
    pub starts: u64,
    /// In the layout of tokens, room for `top_k` ids (i64) a row: the experts' numbers on this rank, -1 for other ranks'.
    pub ids: u64,
    /// In the layout of tokens, room for their weights (f32).
    pub weights: u64,
    /// Whether scales of 4 bytes stand column by column, each with room for `capacity` rows: by expert if rows are masked.
    pub scales_by_column: bool,
}

/// Device addresses of a cast to fp8: [`crate::cast_to_fp8`] for rows on a GPU.
#[derive(Debug, Clone, Copy)]
pub struct Cast {
    /// How many rows it casts.
    pub tokens: usize,
    /// Rows of bfloat16 with one element for each byte of a row that is dispatched, 16-byte aligned.
    pub from: u64,
    /// Room for rows, 16-byte aligned.
    pub rows: u64,
    /// Room for scales.
    pub scales: u64,
    /// How these are written.
    pub kind: Scales,
}

/// A combine: device addresses, and how it sums.
#[derive(Debug, Clone, Copy)]
pub struct Combine {
    /// Rows of [`Shape::sum_bytes`], as many as the dispatch wrote, 16-byte aligned.
    pub outputs: u64,
    /// Room for one such row of each token.
    pub tokens: u64,
    /// Weights that take the place of those that were dispatched, for [`Sum::Exact`] alone: in a reduced sum other ranks multiply.
    pub weights: Option<u64>,
    /// The order in which it sums.
    pub sum: Sum,
}

/// A dispatch until it is combined. A drop gives it up: the second dispatch after it may begin.
#[derive(Debug)]
pub struct Dispatched {
    of: Arc<()>,
    slot: usize,
    tokens: usize,
    input: Input,
    /// Lives until the receive is launched.
    unplaced: Option<Arc<()>>,
    sent_back: Option<Sum>,
    is_combined: bool,
    _open: Arc<()>,
}

/// One rank of an all-to-all, on a GPU. Made by [`join_on_gpu`].
///
/// Rules are those of [`crate::Rank`]. Calls of one all-to-all, and graphs that captured them, run one after the other on the GPU.
#[derive(Debug)]
pub struct GpuRank {
    shape: Shape,
    options: GpuOptions,
    /// The part that all launches share.
    parameters: Parameters,
    scratch: [Scratch; OPEN],
    dispatch: Schedule,
    exact: (&'static Kernel, Schedule),
    reduced: (&'static Kernel, Schedule),
    /// Most blocks of a cast.
    cast_blocks: u32,
    id: Arc<()>,
    dispatched: u64,
    placed: u64,
    unplaced: Weak<()>,
    open: [Weak<()>; OPEN],
    stream: Stream,
    read: HostBuffer,
    bytes: u64,
    /// Dropped before what kernels use.
    watch: Watch,
    _reached: Vec<Option<Reached>>,
    _memory: Arc<DeviceMemory>,
    _scratch: DeviceMemory,
    gpu: Gpu,
}

/// Joins the ranks of an all-to-all on GPUs; all have to call this. Ranks are processes, or threads of one; several may share a GPU.
///
/// # Errors
/// [`MoeError::BadInput`] for sizes that cannot be, [`MoeError::NotJoined`] if the ranks do not agree or do not reach each other,
/// [`MoeError::Gpu`]. Every rank gets an error then.
pub fn join_on_gpu(
    shape: &Shape,
    rank: usize,
    gpu: &Gpu,
    options: &GpuOptions,
    all_gather: &mut AllGather<'_>,
) -> Result<GpuRank, MoeError> {
    let part = |layout: &Layout| {
        check(shape)?;
        let bytes = layout.gpu_bytes(options.terms.is_exact) as u64;
        let memory = Arc::new(gpu.alloc(bytes).map_err(MoeError::of_gpu)?);
        zero(gpu, &memory).map_err(MoeError::of_gpu)?;
        let told = tell(gpu, &memory).map_err(MoeError::of_gpu)?;
        Ok(Part { bytes: 4096, told, kept: memory })
    };
    let make = |Met { layout, heap, peers, kept: memory }: Met<Arc<DeviceMemory>>| {
        let reached = reach_all(gpu, &peers, memory.bytes()).map_err(MoeError::NotJoined)?;
        let sharing = sharing(gpu, &peers);
        let watch = Watch::start(gpu, heap, peers, options.timeout, shape, options.capacity)?;
        GpuRank::new(shape, rank, gpu, options, &layout, watch, reached, memory, sharing)
    };
    meet_all(shape, rank, Kind::Gpu, options.terms, all_gather, part, make)
}

/// Sizes that kernels can hold.
fn check(shape: &Shape) -> Result<(), MoeError> {
    let most = [
        ("the number of ranks", shape.ranks, GPU_RANKS_MAX),
        ("max_tokens", shape.max_tokens, GPU_TOKENS_MAX),
        ("experts", shape.experts, GPU_EXPERTS_MAX),
    ];
    for (name, size, most) in most {
        if size > most {
            let why = format!("{name} is {size}, and goes to {most} on GPUs");
            return Err(MoeError::BadInput(why));
        }
    }
    Ok(())
}

fn zero(gpu: &Gpu, memory: &DeviceMemory) -> Result<(), GpuError> {
    let stream = Stream::new(gpu, Priority::Normal)?;
    let (driver, device) = gpu.raw();
    // SAFETY: the memory lives until the stream is done.
    unsafe { driver.zero_async(device, stream.raw(), memory.address(), memory.bytes())? };
    stream.synchronize()
}

impl GpuRank {
    #[allow(clippy::too_many_arguments, reason = "the parts of a rank, once")]
    fn new(
        shape: &Shape,
        rank: usize,
        gpu: &Gpu,
        options: &GpuOptions,
        layout: &Layout,
        watch: Watch,
        reached: Vec<Option<Reached>>,
        memory: Arc<DeviceMemory>,
        sharing: u32,
    ) -> Result<GpuRank, MoeError> {
        let (driver, device) = gpu.raw();
        let load = |kernel: &'static Kernel, shared: u32| {
            let Residency { each, multiprocessors } =
                driver.load_kernel(device, kernel, shared).map_err(MoeError::of_gpu)?;
            // Those of all ranks of a GPU have to run at a time. One block a multiprocessor then finds an empty one, whatever
            // else the others' kernels need of theirs.
            let share = multiprocessors / sharing;
            let each = if sharing > 1 { each.min(1) } else { each };
            let taken = options.multiprocessors.map_or(share, |most| most.min(share));
            if each * taken == 0 {
                let name = kernel.entry.to_string_lossy();
                let why = format!("{name} gets no multiprocessor with {shared} bytes of shared memory");
                return Err(MoeError::Gpu(why));
            }
            Ok(each * taken)
        };
        let most_planned = (1..=shape.max_tokens.min(128)).map(|tokens| schedule::plan_bytes(shape, tokens));
        let rest = most_planned.max().unwrap_or(0).max(schedule::bulk_bytes(shape));
        let shared = rest + schedule::arrival_bytes(shape);
        let dispatch = schedule::dispatch(shape, load(&DISPATCH, shared)?);
        let cast_blocks = load(&CAST, 0)?;
        load(&PLAN, schedule::plan_grid(shape, shape.max_tokens).1)?;
        let number = match shape.number {
            Number::Bf16 => 0,
            Number::F16 => 1,
            Number::F32 => 2,
        };
        let (exact, reduced) = (&EXACT[number], &REDUCED[number]);
        let exact = (exact, schedule::combine(shape, true, load(exact, 0)?));
        let reduced = (reduced, schedule::combine(shape, false, load(reduced, 0)?));
        let one = sections(shape, 0).1;
        // Sequence numbers of blocks, the word of failure, counts.
        let rest = u64::from(dispatch.blocks) * 8 + 64;
        let scratch_memory = gpu.alloc(OPEN as u64 * one + rest).map_err(MoeError::of_gpu)?;
        zero(gpu, &scratch_memory).map_err(MoeError::of_gpu)?;
        let base = scratch_memory.address();
        let scratch = [0, 1].map(|slot| sections(shape, base + slot * one).0);
        let at = base + OPEN as u64 * one;
        let own = Own { failed: at, stats: at + 8, sequence: at + 64, control: watch.address() };
        let (arrangement, capacity) = match shape.layout {
            RowLayout::Experts => (0, options.capacity),
            RowLayout::Masked { capacity } => (1, capacity),
            RowLayout::Tokens => (2, options.capacity),
        };
        let mut parameters = Parameters {
            ranks: shape.ranks as u32,
            rank: rank as u32,
            top_k: shape.top_k as u32,
            experts: shape.experts as u32,
            experts_a_rank: shape.experts_a_rank() as u32,
            experts_here: shape.experts_of(rank).len() as u32,
            alignment: shape.alignment as u32,
            capacity: capacity as u32,
            arrangement,
            max_tokens: shape.max_tokens as u32,
            row_bytes: shape.row_bytes as u32,
            scale_bytes: shape.scale_bytes as u32,
            sum_bytes: shape.sum_bytes() as u32,
            top_k_inverse: inverse(shape.top_k),
            experts_a_rank_inverse: inverse(shape.experts_a_rank()),
            ranks_inverse: inverse(shape.ranks),
            others_inverse: inverse((shape.ranks - 1).max(1)),
            words_inverse: inverse(shape.experts_a_rank() + 1),
            timeout_ns: options.timeout.min(LONGEST).as_nanos() as u64,
            offsets: offsets(layout, options.terms.is_exact),
            own,
            ..Parameters::default()
        };
        for (address, reached) in parameters.heap.iter_mut().zip(&reached) {
            *address = reached.as_ref().map_or(memory.address(), Reached::address);
        }
        Ok(GpuRank {
            shape: *shape,
            options: *options,
            parameters,
            scratch,
            dispatch,
            exact,
            reduced,
            cast_blocks,
            id: Arc::new(()),
            dispatched: 0,
            placed: 0,
            unplaced: Weak::new(),
            open: [Weak::new(), Weak::new()],
            stream: Stream::new(gpu, Priority::Normal).map_err(MoeError::of_gpu)?,
            read: HostBuffer::new(gpu, 32).map_err(MoeError::of_gpu)?,
            bytes: memory.bytes() + scratch_memory.bytes(),
            watch,
            _reached: reached,
            _memory: memory,
            _scratch: scratch_memory,
            gpu: gpu.clone(),
        })
    }

    /// The sizes that all ranks have.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Bytes that this rank takes on its GPU.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Kernels that run are not waited for.
    ///
    /// # Errors
    /// Why a kernel, or a call, failed for good. [`MoeError::OverCapacity`] and [`MoeError::TooManyRows`] once, if a rank had no room
    /// for a dispatch: experts of that rank got no rows, and the sums of tokens that wanted them are NaN. No other call says so,
    /// because the ranks have to stay in step. Later dispatches work.
    pub fn check(&self) -> Result<(), MoeError> {
        self.watch.check()?;
        self.watch.refused()
    }

    /// Counts of what ran so far on the GPU.
    ///
    /// # Errors
    /// [`MoeError::Gpu`].
    pub fn stats(&mut self) -> Result<Stats, MoeError> {
        let own = self.parameters.own;
        let counts = Copy { dst: self.read.address(), src: own.stats, len: 24 };
        let number = Copy { dst: self.read.address() + 24, src: own.sequence, len: 8 };
        // SAFETY: both sides live, and nobody else uses the buffer. Counts are whole words.
        let copied = unsafe { self.stream.copy(counts).and_then(|()| self.stream.copy(number)) };
        copied.and_then(|()| self.stream.synchronize()).map_err(MoeError::of_gpu)?;
        let word = |index: usize| {
            // SAFETY: the buffer has four words, and the copies are over.
            unsafe { self.read.as_ptr().cast::<u64>().add(index).read_volatile() }
        };
        Ok(Stats { dispatches: word(3), combines: word(0), rows_sent: word(1), rows_received: word(2) })
    }

    /// Launches a cast of rows, for a dispatch in the same stream.
    ///
    /// # Errors
    /// [`MoeError::BadInput`] if a row that is dispatched has no whole blocks to scale, or memory is not aligned.
    /// [`MoeError::Gpu`], or why this rank failed before.
    ///
    /// # Safety
    /// As [`GpuRank::dispatch`].
    pub unsafe fn cast(&self, stream: StreamHandle, cast: &Cast) -> Result<(), MoeError> {
        self.watch.check()?;
        let Cast { tokens, from, rows, scales, kind } = *cast;
        if !self.shape.row_bytes.is_multiple_of(SCALED) {
            return Err(MoeError::BadInput(format!(
                "rows have no whole blocks of {SCALED} elements to scale"
            )));
        }
        if !(from | rows).is_multiple_of(UNIT) || !scales.is_multiple_of(kind.bytes() as u64) {
            let why = "rows have to begin at multiples of 16 bytes, and scales at multiples of their size";
            return Err(MoeError::BadInput(why.into()));
        }
        let scaling = match kind {
            Scales::Float => 0,
            Scales::PowerOfTwo => POWERS_OF_TWO,
            Scales::Exponent => POWERS_OF_TWO | PACKED,
        };
        let call = Call { x: from, out_rows: rows, out_scales: scales, ..Call::default() };
        let parameters = Parameters { tokens: tokens as u32, scaling, call, ..self.parameters };
        let blocks = schedule::cast(&self.shape, tokens).min(self.cast_blocks);
        if blocks == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream, &CAST, Grid { blocks, shared_bytes: 0 }, &parameters) }
    }

    /// Dispatches tokens: launches the parts that `phases` says. With [`Phases::Send`], [`GpuRank::receive`] launches the rest.
    ///
    /// # Errors
    /// [`MoeError::BadInput`] if the sizes do not fit or an earlier dispatch is in the way; nothing is launched then.
    /// [`MoeError::Gpu`], or why this rank failed before.
    ///
    /// # Safety
    /// The stream is of this process and of the rank's GPU. All addresses are of memory that the GPU reaches, with as many bytes as
    /// the sizes say; it stays so until the launches are done, and for ids, weights and rows until those of the receive are.
    pub unsafe fn dispatch(
        &mut self,
        stream: StreamHandle,
        input: &Input,
        output: Option<&Output>,
        phases: Phases,
    ) -> Result<Dispatched, MoeError> {
        self.watch.check()?;
        self.check_input(input, output, phases)?;
        if self.unplaced.strong_count() > 0 {
            return Err(MoeError::BadInput("the rows of the dispatch before are not received yet".into()));
        }
        if self.placed != self.dispatched {
            return Err(self.watch.fail(MoeError::GivenUp));
        }
        // Words are those of even and odd dispatches, so the second one after a dispatch needs that to be over.
        let slot = (self.dispatched & 1) as usize;
        if self.open[slot].strong_count() > 0 {
            let why = "two dispatches are neither combined nor given up";
            return Err(MoeError::BadInput(why.into()));
        }
        let unplaced = Arc::new(());
        let open = Arc::new(());
        let mut dispatched = Dispatched {
            of: Arc::clone(&self.id),
            slot,
            tokens: input.tokens,
            input: *input,
            unplaced: Some(Arc::clone(&unplaced)),
            sent_back: None,
            is_combined: false,
            _open: Arc::clone(&open),
        };
        let mut parameters = self.of_dispatch(&dispatched);
        parameters.plan_bytes = schedule::plan_bytes(&self.shape, input.tokens);
        if parameters.plan_bytes == 0 && input.tokens > 0 {
            let (blocks, shared_bytes) = schedule::plan_grid(&self.shape, input.tokens);
            // SAFETY: the caller's promise.
            unsafe { self.launch(stream, &PLAN, Grid { blocks, shared_bytes }, &parameters)? };
        }
        parameters.phases = if phases == Phases::Send { SEND } else { SEND | RECEIVE };
        if let Some(output) = output {
            write_output(&mut parameters, output);
        }
        // SAFETY: as above.
        unsafe { self.launch_dispatch(stream, &mut parameters)? };
        self.dispatched += 1;
        if phases == Phases::Both {
            dispatched.unplaced = None;
            self.placed = self.dispatched;
        }
        self.unplaced = dispatched.unplaced.as_ref().map_or_else(Weak::new, Arc::downgrade);
        self.open[slot] = Arc::downgrade(&open);
        Ok(dispatched)
    }

    /// Launches the receive of a dispatch that was sent.
    ///
    /// # Errors
    /// As [`GpuRank::dispatch`].
    ///
    /// # Safety
    /// As [`GpuRank::dispatch`]. The stream's work runs after that of the send.
    pub unsafe fn receive(
        &mut self,
        stream: StreamHandle,
        dispatched: &mut Dispatched,
        output: &Output,
    ) -> Result<(), MoeError> {
        self.watch.check()?;
        self.check_own(dispatched)?;
        if dispatched.unplaced.is_none() {
            return Err(MoeError::BadInput("the rows of this dispatch were received before".into()));
        }
        self.check_output(output)?;
        let mut parameters = self.of_dispatch(dispatched);
        // The plan is where the send has written it.
        parameters.phases = RECEIVE;
        write_output(&mut parameters, output);
        // SAFETY: the caller's promise.
        unsafe { self.launch_dispatch(stream, &mut parameters)? };
        dispatched.unplaced = None;
        self.placed = self.dispatched;
        Ok(())
    }

    /// Combines a dispatch.
    ///
    /// # Errors
    /// As [`GpuRank::dispatch`].
    ///
    /// # Safety
    /// As [`GpuRank::dispatch`]. The stream's work runs after that of the dispatch.
    pub unsafe fn combine(
        &mut self,
        stream: StreamHandle,
        dispatched: &mut Dispatched,
        given: &Combine,
        phases: Phases,
    ) -> Result<(), MoeError> {
        self.watch.check()?;
        self.check_own(dispatched)?;
        let Combine { outputs, tokens, weights, sum } = *given;
        let bad = |why: &str| Err(MoeError::BadInput(why.into()));
        if dispatched.unplaced.is_some() {
            return bad("the rows of this dispatch are not received yet");
        }
        if dispatched.is_combined || (phases != Phases::Receive && dispatched.sent_back.is_some()) {
            return bad("this dispatch was combined before");
        }
        if phases == Phases::Receive && dispatched.sent_back != Some(sum) {
            return bad("what the experts made is to be sent back first, for the same kind of sum");
        }
        if sum == Sum::Exact && self.shape.layout == RowLayout::Tokens {
            return bad(
                "in the layout of tokens the caller has added the rows of experts: combine is reduced",
            );
        }
        if sum == Sum::Exact && !self.options.terms.is_exact {
            return bad("this all-to-all was made for reduced sums alone");
        }
        if !(outputs | tokens).is_multiple_of(UNIT) {
            return bad("rows of combine have to begin at multiples of 16 bytes");
        }
        if weights.is_some() && sum == Sum::Reduced {
            return bad("in a reduced sum other ranks multiply: weights come with the dispatch");
        }
        let mut parameters = self.of_dispatch(dispatched);
        if let Some(weights) = weights {
            parameters.scratch.own_weights = weights;
        }
        parameters.call.y = outputs;
        parameters.call.out = tokens;
        parameters.phases = match phases {
            Phases::Send => SEND,
            Phases::Receive => RECEIVE,
            Phases::Both => SEND | RECEIVE,
        };
        let (kernel, schedule) = if sum == Sum::Exact { self.exact } else { self.reduced };
        let blocks = schedule.apply(&mut parameters);
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream, kernel, Grid { blocks, shared_bytes: 0 }, &parameters)? };
        dispatched.sent_back = Some(sum);
        dispatched.is_combined = phases != Phases::Send;
        Ok(())
    }

    /// Waits for all work of the GPU.
    ///
    /// # Errors
    /// [`MoeError::Gpu`].
    pub fn synchronize(&self) -> Result<(), MoeError> {
        let (driver, device) = self.gpu.raw();
        driver.synchronize(device).map_err(MoeError::of_gpu)
    }

    /// Takes no part any more: a dispatch that was sent is not received.
    pub fn give_up(&mut self) {
        if self.watch.check().is_ok() {
            let _ = self.watch.fail(MoeError::GivenUp);
        }
    }

    fn of_dispatch(&self, dispatched: &Dispatched) -> Parameters {
        let Input { tokens, rows, scales, ids, id_bytes, weights } = dispatched.input;
        let call = Call { ids, x: rows, scales, weights: weights.unwrap_or(0), ..Call::default() };
        Parameters {
            tokens: tokens as u32,
            id_bytes: id_bytes as u32,
            scratch: self.scratch[dispatched.slot],
            call,
            ..self.parameters
        }
    }

    /// # Safety
    /// As [`GpuRank::dispatch`].
    unsafe fn launch_dispatch(
        &self,
        stream: StreamHandle,
        parameters: &mut Parameters,
    ) -> Result<(), MoeError> {
        let blocks = self.dispatch.apply(parameters);
        let mut shared_bytes = parameters.plan_bytes + schedule::arrival_bytes(&self.shape);
        let scales = parameters.call.scales | parameters.call.out_scales | u64::from(parameters.scale_bytes);
        parameters.scale_piece =
            [16, 4, 1].into_iter().find(|size| scales.is_multiple_of(u64::from(*size))).unwrap_or(1);
        if parameters.scaling & BY_COLUMN != 0 && parameters.scale_piece == 1 {
            return Err(MoeError::BadInput(
                "scales by column have 4 bytes each, and begin at multiples of 4".into(),
            ));
        }
        if parameters.plan_bytes > 0 || parameters.scale_piece != 16 {
            parameters.bulk_rows = 0;
        }
        if parameters.bulk_rows > 0 {
            parameters.bulk_begin = shared_bytes;
            shared_bytes += schedule::bulk_bytes(&self.shape);
        }
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream, &DISPATCH, Grid { blocks, shared_bytes }, parameters) }
    }

    /// # Safety
    /// As [`GpuRank::dispatch`].
    unsafe fn launch(
        &self,
        stream: StreamHandle,
        kernel: &'static Kernel,
        grid: Grid,
        parameters: &Parameters,
    ) -> Result<(), MoeError> {
        let (driver, device): (&dyn Driver, u32) = self.gpu.raw();
        // SAFETY: the kernel takes this struct. Its own addresses live as long as self, which waits for kernels; all others are
        // the caller's promise.
        let launched = unsafe { driver.launch(device, stream, kernel, grid, &[parameters.bytes()]) };
        launched.map_err(|error| self.watch.fail(MoeError::of_gpu(error)))
    }

    fn check_input(&self, input: &Input, output: Option<&Output>, phases: Phases) -> Result<(), MoeError> {
        let bad = |why: String| Err(MoeError::BadInput(why));
        if input.tokens > self.shape.max_tokens {
            let (tokens, most) = (input.tokens, self.shape.max_tokens);
            return bad(format!("there are {tokens} tokens, and room for {most} (max_tokens)"));
        }
        if !matches!(input.id_bytes, 4 | 8) {
            return bad(format!("ids have {} bytes, and have to have 4 or 8", input.id_bytes));
        }
        if !input.rows.is_multiple_of(UNIT) || !input.ids.is_multiple_of(input.id_bytes as u64) {
            return bad(
                "rows have to begin at multiples of 16 bytes, and ids at multiples of their size".into()
            );
        }
        match (phases, output) {
            (Phases::Both, Some(output)) => self.check_output(output),
            (Phases::Send, None) => Ok(()),
            _ => bad("a dispatch that receives needs room for its rows, and one that only sends none".into()),
        }
    }

    fn check_output(&self, output: &Output) -> Result<(), MoeError> {
        if !output.rows.is_multiple_of(UNIT) || !(output.counts | output.starts).is_multiple_of(4) {
            let why = "rows have to begin at multiples of 16 bytes, counts and starts at multiples of 4";
            return Err(MoeError::BadInput(why.into()));
        }
        let of_tokens = [output.starts, output.ids, output.weights];
        if self.shape.layout == RowLayout::Tokens && of_tokens.contains(&0) {
            let why = "in the layout of tokens there has to be room for the number of rows, ids and weights";
            return Err(MoeError::BadInput(why.into()));
        }
        Ok(())
    }

    fn check_own(&self, dispatched: &Dispatched) -> Result<(), MoeError> {
        if Arc::ptr_eq(&dispatched.of, &self.id) {
            return Ok(());
        }
        Err(MoeError::BadInput("this dispatch is of another all-to-all".into()))
    }
}

impl Drop for GpuRank {
    fn drop(&mut self) {
        let (driver, device) = self.gpu.raw();
        // Work that was launched still counts, here and for the others. It ends by the timeout at the latest. A failure of the GPU
        // has ended it.
        let _ = driver.synchronize(device);
        self.watch.end_waits();
    }
}

impl Dispatched {
    /// Tokens of this rank.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// Kernels multiply by it instead of dividing.
fn inverse(divisor: usize) -> u32 {
    (1_u32 << 31).div_ceil(divisor as u32)
}

fn offsets(layout: &Layout, is_exact: bool) -> Offsets {
    Offsets {
        counts: COUNTS as u64,
        row_words: layout.row_words as u64,
        rows: layout.rows as u64,
        row_stride: layout.row_stride as u64,
        scales: layout.scales_at as u64,
        rest: layout.rest_at as u64,
        sum_words: layout.sum_words as u64,
        sums: layout.sums as u64,
        sum_stride: layout.sum_stride as u64,
        pair_words: if is_exact { layout.pair_words as u64 } else { 0 },
        pairs: layout.pairs as u64,
    }
}

fn write_output(parameters: &mut Parameters, output: &Output) {
    let Output { rows, scales, counts, starts, ids, weights, scales_by_column } = *output;
    parameters.scaling = if scales_by_column { BY_COLUMN } else { 0 };
    parameters.call = Call {
        out_rows: rows,
        out_scales: scales,
        out_counts: counts,
        out_starts: starts,
        out_ids: ids,
        out_weights: weights,
        ..parameters.call
    };
}
