//! A rank of an all-to-all on a GPU for Python. Users call `python/kvlane/moe`, which wraps it.

use kvlane_gpu::StreamHandle;
use kvlane_moe::gpu::{Cast, Combine, Dispatched, GpuOptions, GpuRank, Input, Output, Phases, join_on_gpu};
use kvlane_moe::{MoeError, Sum};
use parking_lot::Mutex;
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::gpu::open_gpu;
use crate::moe::{Sizes, error, joined, scales_of};
use crate::own::Own;

/// Addresses of rows, scales, counts, starts, ids and weights that a dispatch writes; whether scales go by column.
type OutputAddresses = (u64, u64, u64, u64, u64, u64, bool);
/// Number of tokens; addresses of rows, scales and ids; bytes of an id; address of weights.
type InputAddresses = (usize, u64, u64, u64, usize, Option<u64>);

#[pyclass(name = "MoeGpuRank", module = "kvlane._core", frozen)]
pub(crate) struct PyGpuRank {
    rank: Own<Mutex<Option<GpuRank>>>,
    bytes: u64,
}

/// A dispatch, until it is combined.
#[pyclass(name = "MoeGpuDispatch", module = "kvlane._core", frozen)]
pub(crate) struct PyGpuDispatch(Mutex<Option<Dispatched>>);

#[pymethods]
impl PyGpuRank {
    /// Joins the other ranks by `all_gather`, which gives all ranks' bytes to each.
    #[new]
    fn new(
        py: Python<'_>,
        device: u32,
        rank: usize,
        ranks: usize,
        sizes: Sizes,
        multiprocessors: Option<u32>,
        all_gather: Py<PyAny>,
    ) -> PyResult<Self> {
        let shape = sizes.shape(ranks)?;
        let (capacity, terms, timeout) = (sizes.capacity, sizes.terms()?, sizes.timeout());
        let options = GpuOptions { capacity, terms, multiprocessors, timeout };
        let gpu = open_gpu(device)?;
        let joined = joined(py, &all_gather, |gather| join_on_gpu(&shape, rank, &gpu, &options, gather))?;
        let bytes = joined.bytes();
        Ok(PyGpuRank { rank: Own::new(Mutex::new(Some(joined))), bytes })
    }

    /// Bytes that this rank takes on its GPU.
    fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Dispatches, combines, rows sent to other ranks, rows received from them, of what ran so far on the GPU.
    fn stats(&self, py: Python<'_>) -> PyResult<(u64, u64, u64, u64)> {
        let stats = self.with(py, GpuRank::stats)?;
        Ok((stats.dispatches, stats.combines, stats.rows_sent, stats.rows_received))
    }

    /// Raises what a kernel or a call failed with for good.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |rank| rank.check())
    }

    /// Launches a cast of rows to fp8.
    #[allow(clippy::too_many_arguments, reason = "addresses for Python")]
    fn cast(
        &self,
        py: Python<'_>,
        stream: u64,
        tokens: usize,
        from: u64,
        rows: u64,
        scales: u64,
        kind: &str,
    ) -> PyResult<()> {
        let cast = Cast { tokens, from, rows, scales, kind: scales_of(kind)? };
        // SAFETY: as in `dispatch`.
        self.with(py, |rank| unsafe { rank.cast(StreamHandle(stream), &cast) })
    }

    /// Launches a dispatch. Without an output only the part that sends: `receive` launches the rest.
    #[pyo3(signature = (stream, input, output))]
    fn dispatch(
        &self,
        py: Python<'_>,
        stream: u64,
        input: InputAddresses,
        output: Option<OutputAddresses>,
    ) -> PyResult<PyGpuDispatch> {
        let (tokens, rows, scales, ids, id_bytes, weights) = input;
        let input = Input { tokens, rows, scales, ids, id_bytes, weights };
        let output = output.map(output_of);
        let phases = if output.is_some() { Phases::Both } else { Phases::Send };
        // SAFETY: kvlane.moe has checked types and sizes, and the stream keeps the memory of tensors for the work on it.
        let dispatched = self.with(py, |rank| unsafe {
            rank.dispatch(StreamHandle(stream), &input, output.as_ref(), phases)
        })?;
        Ok(PyGpuDispatch(Mutex::new(Some(dispatched))))
    }

    /// Launches the part of a dispatch that receives.
    fn receive(
        &self,
        py: Python<'_>,
        stream: u64,
        dispatch: &PyGpuDispatch,
        output: OutputAddresses,
    ) -> PyResult<()> {
        let mut dispatched = dispatch.take()?;
        // SAFETY: as in `dispatch`.
        let received = self.with(py, |rank| unsafe {
            rank.receive(StreamHandle(stream), &mut dispatched, &output_of(output))
        });
        dispatch.put(dispatched);
        received
    }

    /// Launches a combine, or the part of it that `part` names: both, send or receive.
    #[allow(clippy::too_many_arguments, reason = "keyword arguments for Python")]
    fn combine(
        &self,
        py: Python<'_>,
        stream: u64,
        dispatch: &PyGpuDispatch,
        outputs: u64,
        tokens: u64,
        weights: Option<u64>,
        is_reduced: bool,
        part: &str,
    ) -> PyResult<()> {
        let phases = match part {
            "send" => Phases::Send,
            "receive" => Phases::Receive,
            _ => Phases::Both,
        };
        let sum = if is_reduced { Sum::Reduced } else { Sum::Exact };
        let given = Combine { outputs, tokens, weights, sum };
        let mut dispatched = dispatch.take()?;
        let combined = self.with(py, |rank| {
            // SAFETY: as in `dispatch`.
            unsafe { rank.combine(StreamHandle(stream), &mut dispatched, &given, phases) }
        });
        // If nothing was launched, it can be combined still.
        if combined.is_err() || phases == Phases::Send {
            dispatch.put(dispatched);
        }
        combined
    }

    /// Waits for all work of the GPU.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |rank| rank.synchronize())
    }

    /// Takes no part any more, because a dispatch was sent and is not received.
    fn give_up(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |rank| {
            rank.give_up();
            Ok(())
        })
    }

    /// Takes no part any more: kernels that wait end, here and at the other ranks. Waits for all work of the GPU.
    fn close(&self, py: Python<'_>) {
        if let Some(rank) = self.rank.if_here() {
            py.detach(|| drop(rank.lock().take()));
        }
    }
}

impl PyGpuRank {
    /// Without the interpreter, because another thread may wait for the driver with it.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut GpuRank) -> Result<T, MoeError> + Send,
    ) -> PyResult<T> {
        let rank = self.rank.get()?;
        py.detach(|| {
            let mut rank = rank.lock();
            let rank = rank.as_mut().ok_or_else(|| PyValueError::new_err("this all-to-all is closed"))?;
            act(rank).map_err(error)
        })
    }
}

#[pymethods]
impl PyGpuDispatch {
    /// Drops it without combining it.
    fn give_up(&self) {
        drop(self.0.lock().take());
    }
}

/// Taken out for a call, because nothing may be locked while the interpreter is waited for.
impl PyGpuDispatch {
    fn take(&self) -> PyResult<Dispatched> {
        self.0
            .lock()
            .take()
            .ok_or_else(|| PyValueError::new_err("this dispatch was combined before, or given up"))
    }

    fn put(&self, dispatched: Dispatched) {
        *self.0.lock() = Some(dispatched);
    }
}

fn output_of(addresses: OutputAddresses) -> Output {
    let (rows, scales, counts, starts, ids, weights, scales_by_column) = addresses;
    Output { rows, scales, counts, starts, ids, weights, scales_by_column }
}
