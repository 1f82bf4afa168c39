//! A rank of an all-to-all for Python. Users call `python/kvlane/moe`, which wraps it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvlane_moe::{
    AllGather, Arrived, Handle, MoeError, Number, Rank, RowLayout, Scales, Sent, Shape, Sum, Terms,
    cast_to_fp8, decline, join,
};
use parking_lot::Mutex;
use pyo3::{
    create_exception,
    exceptions::{PyException, PyValueError},
    prelude::*,
    types::PyBytes,
};

use crate::own::Own;

/// Address and bytes of memory that the caller keeps.
type Memory = (usize, usize);
/// Rows for each expert of this rank, the first row of each if rows go by experts, and rows of all.
type Places = (Vec<u32>, Vec<u32>, usize);

create_exception!(kvlane._core, MoeFailure, PyException, "A kind, a sentence, and the rows needed or 0.");

#[pyclass(name = "MoeRank", module = "kvlane._core", frozen)]
pub(crate) struct PyRank {
    rank: Own<Mutex<Option<Rank>>>,
    bytes: usize,
    /// Raised by a signal's handler while the rank waited.
    raised: Arc<Mutex<Option<PyErr>>>,
    closing: Arc<AtomicBool>,
}

/// A dispatch, from its send until it is combined.
#[pyclass(name = "MoeDispatch", module = "kvlane._core", frozen)]
pub(crate) struct PyDispatch(Mutex<Option<State>>);

enum State {
    Sent(Sent),
    Arrived(Arrived),
    Placed(Handle),
}

#[pymethods]
impl PyRank {
    /// Joins the other ranks by `all_gather`, which gives all ranks' bytes to each.
    #[new]
    fn new(py: Python<'_>, rank: usize, ranks: usize, sizes: Sizes, all_gather: Py<PyAny>) -> PyResult<Self> {
        let (shape, terms, timeout) = (sizes.shape(ranks)?, sizes.terms()?, sizes.timeout());
        let mut joined = joined(py, &all_gather, |gather| join(&shape, rank, terms, timeout, gather))?;
        let raised = Arc::new(Mutex::new(None));
        let closing = Arc::new(AtomicBool::new(false));
        let (noted, closes) = (Arc::clone(&raised), Arc::clone(&closing));
        joined.interrupt_by(move || {
            if closes.load(Ordering::Relaxed) {
                return true;
            }
            let found = Python::attach(|py| py.check_signals()).err();
            let is_some = found.is_some();
            if is_some {
                *noted.lock() = found;
            }
            is_some
        });
        let bytes = joined.bytes();
        Ok(PyRank { rank: Own::new(Mutex::new(Some(joined))), bytes, raised, closing })
    }

    /// Bytes of this rank's memory.
    fn bytes(&self) -> usize {
        self.bytes
    }

    /// Dispatches, combines, rows sent to other ranks, rows received from them.
    fn stats(&self, py: Python<'_>) -> PyResult<(u64, u64, u64, u64)> {
        let stats = self.with(py, |rank| Ok(rank.stats()))?;
        Ok((stats.dispatches, stats.combines, stats.rows_sent, stats.rows_received))
    }

    /// Raises what an earlier operation failed with for good.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |rank| rank.check())
    }

    /// Sends this rank's part. `ids` are `top_k` int64 for each token, `weights` as many float32.
    fn send(
        &self,
        py: Python<'_>,
        rows: Memory,
        scales: Memory,
        ids: Memory,
        weights: Memory,
    ) -> PyResult<PyDispatch> {
        // SAFETY: kvlane.moe holds the memory's owners for the call, and has checked the types.
        let (rows, scales) = unsafe { (bytes_of(rows), bytes_of(scales)) };
        // SAFETY: as above.
        let (ids, weights) = unsafe { (items_of::<i64>(ids), items_of::<f32>(weights)) };
        let sent = self.with(py, |rank| rank.send(rows, scales, ids, weights))?;
        Ok(PyDispatch(Mutex::new(Some(State::Sent(sent)))))
    }

    /// Waits for all ranks' counts.
    fn arrive(&self, py: Python<'_>, dispatch: &PyDispatch) -> PyResult<Places> {
        let State::Sent(sent) = dispatch.take()? else { return Err(out_of_order()) };
        let arrived = self.with(py, |rank| rank.arrive(sent))?;
        let places = &arrived.arrivals;
        let found = (places.counts.clone(), places.starts.clone(), places.rows);
        dispatch.put(State::Arrived(arrived));
        Ok(found)
    }

    /// Waits for the rows, and copies them to where they stand.
    fn place(&self, py: Python<'_>, dispatch: &PyDispatch, rows: Memory, scales: Memory) -> PyResult<()> {
        let State::Arrived(arrived) = dispatch.take()? else { return Err(out_of_order()) };
        // SAFETY: kvlane.moe has made this memory for the call, and gives it to nobody before it returns.
        let (rows, scales) = unsafe { (bytes_mut(rows), bytes_mut(scales)) };
        let handle = self.with(py, |rank| rank.place(arrived, rows, scales))?;
        dispatch.put(State::Placed(handle));
        Ok(())
    }

    /// Writes what each token wants here, in the layout of tokens: for each row `top_k` int64 and as many float32.
    fn wanted(&self, py: Python<'_>, dispatch: &PyDispatch, ids: Memory, weights: Memory) -> PyResult<()> {
        let State::Placed(handle) = dispatch.take()? else { return Err(out_of_order()) };
        // SAFETY: as in `place`.
        let (ids, weights) = unsafe { (items_mut::<i64>(ids), items_mut::<f32>(weights)) };
        let written = self.with(py, |rank| rank.write_wanted(&handle, ids, weights));
        dispatch.put(State::Placed(handle));
        written
    }

    /// Sends back what the experts made of the rows. `weights` of no bytes are those that were dispatched.
    fn send_back(
        &self,
        py: Python<'_>,
        dispatch: &PyDispatch,
        outputs: Memory,
        is_reduced: bool,
        weights: Memory,
    ) -> PyResult<()> {
        let State::Placed(mut handle) = dispatch.take()? else { return Err(out_of_order()) };
        // SAFETY: as in `send`.
        let (outputs, weights) = unsafe { (bytes_of(outputs), items_of::<f32>(weights)) };
        let sum = if is_reduced { Sum::Reduced } else { Sum::Exact };
        let weights = (!weights.is_empty()).then_some(weights);
        let sent = self.with(py, |rank| rank.send_back(&mut handle, outputs, sum, weights));
        // If nothing was sent, it can be combined still.
        dispatch.put(State::Placed(handle));
        sent
    }

    /// Waits for what comes back, and writes the sums.
    fn gather(&self, py: Python<'_>, dispatch: &PyDispatch, tokens: Memory) -> PyResult<()> {
        let State::Placed(handle) = dispatch.take()? else { return Err(out_of_order()) };
        // SAFETY: as in `place`.
        let tokens = unsafe { bytes_mut(tokens) };
        self.with(py, |rank| rank.gather(handle, tokens))
    }

    /// Takes no part any more, because a dispatch was sent and is not received.
    fn give_up(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |rank| {
            rank.give_up();
            Ok(())
        })
    }

    /// Takes no part any more. The others' waits for this rank end, and so does a wait of this one.
    fn close(&self, py: Python<'_>) {
        self.closing.store(true, Ordering::Relaxed);
        if let Some(rank) = self.rank.if_here() {
            py.detach(|| drop(rank.lock().take()));
        }
    }
}

impl PyRank {
    /// Without the interpreter: another thread may wait for a peer meanwhile, and look for signals with it.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut Rank) -> Result<T, MoeError> + Send,
    ) -> PyResult<T> {
        let rank = self.rank.get()?;
        py.detach(|| {
            let mut rank = rank.lock();
            let rank = rank.as_mut().ok_or_else(|| PyValueError::new_err("this all-to-all is closed"))?;
            act(rank).map_err(|failed| self.raised.lock().take().unwrap_or_else(|| error(failed)))
        })
    }
}

#[pymethods]
impl PyDispatch {
    /// Drops it without combining it.
    fn give_up(&self) {
        drop(self.0.lock().take());
    }
}

impl PyDispatch {
    fn take(&self) -> PyResult<State> {
        self.0
            .lock()
            .take()
            .ok_or_else(|| PyValueError::new_err("this dispatch was combined before, or given up"))
    }

    fn put(&self, state: State) {
        *self.0.lock() = Some(state);
    }
}

fn out_of_order() -> PyErr {
    PyValueError::new_err("a dispatch is sent, received and combined in this order")
}

/// The sizes of an all-to-all, as `kvlane.moe` has them.
#[derive(FromPyObject)]
pub(crate) struct Sizes {
    experts: usize,
    top_k: usize,
    max_tokens: usize,
    hidden: usize,
    dtype: String,
    row_bytes: usize,
    scale_bytes: usize,
    alignment: usize,
    layout: String,
    pub(crate) capacity: usize,
    exact: bool,
    timeout: f64,
    cast: Option<String>,
}

impl Sizes {
    pub(crate) fn shape(&self, ranks: usize) -> PyResult<Shape> {
        Ok(Shape {
            ranks,
            experts: self.experts,
            top_k: self.top_k,
            max_tokens: self.max_tokens,
            row_bytes: self.row_bytes,
            scale_bytes: self.scale_bytes,
            hidden: self.hidden,
            number: number_of(&self.dtype)?,
            alignment: self.alignment,
            layout: layout_of(&self.layout, self.capacity)?,
        })
    }

    /// In the layout of tokens the caller sums, so `exact` means nothing there.
    pub(crate) fn terms(&self) -> PyResult<Terms> {
        let cast = self.cast.as_deref().map(scales_of).transpose()?;
        Ok(Terms { is_exact: self.exact && self.layout != "tokens", cast })
    }

    /// The longest wait that the clock can tell is longer than anybody waits.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout).unwrap_or(Duration::MAX)
    }
}

/// Tells the other ranks, instead of joining them, why this one cannot. They would wait for it.
#[pyfunction]
pub(crate) fn moe_decline(py: Python<'_>, ranks: usize, why: &str, all_gather: Py<PyAny>) {
    let mut gather = |bytes: &[u8]| {
        Python::attach(|py| gather_by(py, &all_gather, bytes)).map_err(|error| error.to_string())
    };
    py.detach(|| decline(ranks, why, &mut gather));
}

/// Joins ranks by a function of Python's that gathers bytes. An exception of that function comes first: the ranks did not join
/// because of it.
pub(crate) fn joined<T: Send>(
    py: Python<'_>,
    all_gather: &Py<PyAny>,
    join: impl FnOnce(&mut AllGather<'_>) -> Result<T, MoeError> + Send,
) -> PyResult<T> {
    let mut failed = None;
    let mut gather = |bytes: &[u8]| {
        Python::attach(|py| gather_by(py, all_gather, bytes)).map_err(|error| {
            let sentence = format!("all_gather failed: {error}");
            failed = Some(error);
            sentence
        })
    };
    let joined = py.detach(|| join(&mut gather));
    failed.map_or_else(|| joined.map_err(error), Err)
}

fn gather_by(py: Python<'_>, all_gather: &Py<PyAny>, bytes: &[u8]) -> PyResult<Vec<Vec<u8>>> {
    let told = all_gather.call1(py, (PyBytes::new(py, bytes),))?;
    let told: Vec<Bound<'_, PyBytes>> = told.extract(py).map_err(|_| {
        PyValueError::new_err("all_gather has to return a list of bytes, those of each rank in order")
    })?;
    Ok(told.iter().map(|bytes| bytes.as_bytes().to_vec()).collect())
}

/// # Safety
/// The memory lives, and nobody writes it, as long as the slice.
unsafe fn bytes_of<'a>((address, bytes): Memory) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { items_of::<u8>((address, bytes)) }
}

/// # Safety
/// As `bytes_of`; any bytes are a `T`.
unsafe fn items_of<'a, T>((address, bytes): Memory) -> &'a [T] {
    let items = bytes / size_of::<T>();
    if items == 0 {
        return &[];
    }
    assert!(address.is_multiple_of(align_of::<T>()), "an array that is not aligned");
    // SAFETY: the caller's promise; it is aligned.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), items) }
}

/// # Safety
/// The memory lives, and nobody else uses it, as long as the slice.
unsafe fn bytes_mut<'a>((address, bytes): Memory) -> &'a mut [u8] {
    // SAFETY: the caller's promise.
    unsafe { items_mut::<u8>((address, bytes)) }
}

/// # Safety
/// As `bytes_mut`; any bytes are a `T`.
unsafe fn items_mut<'a, T>((address, bytes): Memory) -> &'a mut [T] {
    let items = bytes / size_of::<T>();
    if items == 0 {
        return &mut [];
    }
    assert!(address.is_multiple_of(align_of::<T>()), "an array that is not aligned");
    // SAFETY: the caller's promise; it is aligned.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), items) }
}

/// Casts rows of bfloat16 in the memory of the host to fp8.
#[pyfunction]
pub(crate) fn moe_cast(
    py: Python<'_>,
    from: Memory,
    rows: Memory,
    scales: Memory,
    kind: &str,
) -> PyResult<()> {
    let kind = scales_of(kind)?;
    // SAFETY: kvlane.moe has made the last two for the call, and holds the first one's owner.
    let (from, rows, scales) = unsafe { (bytes_of(from), bytes_mut(rows), bytes_mut(scales)) };
    py.detach(|| cast_to_fp8(from, kind, rows, scales)).map_err(error)
}

pub(crate) fn scales_of(name: &str) -> PyResult<Scales> {
    match name {
        "fp8" => Ok(Scales::Float),
        "fp8_pow2" => Ok(Scales::PowerOfTwo),
        "fp8_ue8m0" => Ok(Scales::Exponent),
        other => Err(PyValueError::new_err(format!("cast is fp8, fp8_pow2 or fp8_ue8m0, and not {other:?}"))),
    }
}

fn layout_of(name: &str, capacity: usize) -> PyResult<RowLayout> {
    match name {
        "experts" => Ok(RowLayout::Experts),
        "masked" => Ok(RowLayout::Masked { capacity }),
        "tokens" => Ok(RowLayout::Tokens),
        other => {
            Err(PyValueError::new_err(format!("layout is experts, masked or tokens, and not {other:?}")))
        }
    }
}

fn number_of(name: &str) -> PyResult<Number> {
    match name {
        "bfloat16" => Ok(Number::Bf16),
        "float16" => Ok(Number::F16),
        "float32" => Ok(Number::F32),
        other => {
            Err(PyValueError::new_err(format!("dtype is bfloat16, float16 or float32, and not {other:?}")))
        }
    }
}

pub(crate) fn error(error: MoeError) -> PyErr {
    let sentence = error.to_string();
    let mut rows_needed = 0;
    let kind = match error {
        MoeError::BadInput(_) => return PyValueError::new_err(sentence),
        MoeError::OverCapacity { needed, .. } => {
            rows_needed = needed as usize;
            "capacity"
        }
        MoeError::TooManyRows { needed, .. } => {
            rows_needed = needed;
            "capacity"
        }
        MoeError::NotJoined(_) => "not joined",
        MoeError::PeerLost { .. } | MoeError::PeerLeft { .. } => "lost",
        MoeError::TimedOut { .. } => "silent",
        _ => "failed",
    };
    MoeFailure::new_err((kind, sentence, rows_needed))
}
