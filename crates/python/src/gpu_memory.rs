//! Memory of GPUs for Python, without torch.

use std::sync::Arc;

use kvlane_gpu::{
    Copier, CopierOptions, Copy, DeviceMemory, Direction, HostBuffer, Priority, Stream, Thresholds,
};
use parking_lot::Mutex;
use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict},
};

use crate::convert::value_error;
use crate::gpu::{failed, open_gpu};

/// Memory of a GPU, for benchmarks and tests of transfers.
#[pyclass(name = "GpuMemory", module = "kvlane._core", frozen)]
pub(crate) struct PyGpuMemory {
    memory: DeviceMemory,
    stream: Stream,
    /// Pinned host memory through which copies to another GPU go.
    between: HostBuffer,
    copier: Mutex<Copier>,
}

#[pymethods]
impl PyGpuMemory {
    #[new]
    fn new(gpu: u32, bytes: u64) -> PyResult<Self> {
        let gpu = open_gpu(gpu)?;
        let stream = Stream::new(&gpu, Priority::Normal).map_err(failed)?;
        let between = HostBuffer::new(&gpu, 2 * PART_BYTES).map_err(failed)?;
        let own = Arc::new(Stream::new(&gpu, Priority::Normal).map_err(failed)?);
        let copier = Mutex::new(Copier::new(own, CopierOptions::default()).map_err(failed)?);
        Ok(Self { memory: gpu.alloc(bytes).map_err(failed)?, stream, between, copier })
    }

    #[getter]
    fn address(&self) -> u64 {
        self.memory.address()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.memory.bytes()
    }

    #[getter]
    fn device(&self) -> String {
        format!("cuda:{}", self.stream.gpu().info().ordinal)
    }

    #[getter]
    fn uuid<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.stream.gpu().info().uuid)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("shape", (self.memory.bytes(),))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self.memory.address(), false))?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    /// Copies host memory at this address into this memory.
    fn copy_from_host(&self, py: Python<'_>, offset: u64, address: u64, length: u64) -> PyResult<()> {
        let copy = Copy { dst: self.place(offset, length)?, src: address, len: length };
        self.copy(py, copy)
    }

    /// Copies this memory into host memory at this address.
    fn copy_to_host(&self, py: Python<'_>, offset: u64, address: u64, length: u64) -> PyResult<()> {
        let copy = Copy { dst: address, src: self.place(offset, length)?, len: length };
        self.copy(py, copy)
    }

    /// Copies ranges (offset here, offset there, bytes) of another GPU's memory, or the same one's, into this memory, over the
    /// link between the GPUs: by the copy kernel with so many blocks; with 0 by copy engines alone.
    fn copy_from(
        &self,
        py: Python<'_>,
        from: &PyGpuMemory,
        runs: Vec<(u64, u64, u64)>,
        blocks: u32,
    ) -> PyResult<()> {
        let copy = |(to, at, len): &(u64, u64, u64)| {
            PyResult::Ok(Copy { dst: self.place(*to, *len)?, src: from.place(*at, *len)?, len: *len })
        };
        let copies: Vec<Copy> = runs.iter().map(copy).collect::<PyResult<_>>()?;
        let run = || {
            if from.stream.gpu().info().ordinal != self.stream.gpu().info().ordinal {
                self.stream.gpu().enable_peer(from.stream.gpu())?;
            }
            let mut copier = self.copier.lock();
            copier.set_thresholds(Thresholds {
                batch_bytes: if blocks == 0 { 0 } else { u64::MAX },
                engine_bytes: if blocks == 0 { 0 } else { u64::MAX },
                ..Thresholds::idle(Direction::Peer)
            });
            copier.set_peer_blocks(blocks.max(1));
            // SAFETY: both memories live until the stream is done, below, and the caller's ranges do not overlap.
            unsafe { copier.enqueue(&copies, Direction::Peer)? };
            copier.stream().synchronize()
        };
        py.detach(run).map_err(failed)
    }

    /// Copies this memory into another GPU's or the same one's, through pinned memory of the host. Each part leaves while the
    /// part before arrives.
    fn copy_to(
        &self,
        py: Python<'_>,
        offset: u64,
        to: &PyGpuMemory,
        to_offset: u64,
        length: u64,
    ) -> PyResult<()> {
        let (from, into) = (self.place(offset, length)?, to.place(to_offset, length)?);
        let copy = |stream: &Stream, dst, src, len| {
            // SAFETY: the memories and the buffer live until both streams are done, below.
            unsafe { stream.copy(Copy { dst, src, len }) }
        };
        let run = || {
            for (part, at) in (0..length).step_by(PART_BYTES as usize).enumerate() {
                let len = PART_BYTES.min(length - at);
                let half = self.between.address() + part as u64 % 2 * PART_BYTES;
                copy(&self.stream, half, from + at, len)?;
                // The part before arrives meanwhile.
                self.stream.synchronize()?;
                to.stream.synchronize()?;
                copy(&to.stream, into + at, half, len)?;
            }
            to.stream.synchronize()
        };
        let outcome = py.detach(run);
        if outcome.is_err() {
            // No copy uses the buffer after this.
            let _ = (self.stream.synchronize(), to.stream.synchronize());
        }
        outcome.map_err(failed)
    }
}

/// Bytes of one copy between host and GPU, as the fabric cuts transfers.
const PART_BYTES: u64 = 512 << 10;

impl PyGpuMemory {
    /// The device address of a range, which must lie inside the memory.
    fn place(&self, offset: u64, length: u64) -> PyResult<u64> {
        match offset.checked_add(length) {
            Some(end) if end <= self.memory.bytes() => Ok(self.memory.address() + offset),
            _ => Err(value_error(format!("{length} bytes from {offset} of {}", self.memory.bytes()))),
        }
    }

    fn copy(&self, py: Python<'_>, copy: Copy) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: the range is inside this memory, the caller names its own memory, and the copy ends below.
            unsafe { self.stream.copy(copy)? };
            self.stream.synchronize()
        })
        .map_err(failed)
    }
}
