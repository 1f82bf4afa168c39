//! Measurements of the SSD tier for `kvlane.bench`.

use std::path::PathBuf;

use kvlane_ssd::{
    PathStatus, SsdPath,
    bench::{Bench, BenchError, Measured, crc_rate, restart},
};
use parking_lot::Mutex;
use pyo3::{exceptions::PyOSError, prelude::*};

/// Bytes, seconds, CPU seconds, those of the devices' threads, latency of each block in microseconds.
type PyMeasured = (u64, f64, f64, f64, Vec<u64>);

/// Whether transfers are staged, why, and the rates of reads direct and staged.
type PyPath = (bool, String, Option<(u64, u64)>);

/// A tier on files of its own, which are removed with it.
#[pyclass(name = "SsdBench", module = "kvlane._bench", frozen)]
pub(crate) struct PySsdBench(Mutex<Bench>);

#[pymethods]
impl PySsdBench {
    #[new]
    #[pyo3(signature = (paths, capacity, block_bytes, pool_bytes, threads = false, path = "auto"))]
    fn new(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        capacity: u64,
        block_bytes: u64,
        pool_bytes: u64,
        threads: bool,
        path: &str,
    ) -> PyResult<Self> {
        let path = match path {
            "auto" => SsdPath::Auto,
            "direct" => SsdPath::Direct,
            "staged" => SsdPath::Staged,
            other => return Err(PyOSError::new_err(format!("{other} is none of auto, direct, staged"))),
        };
        let bench = py.detach(|| Bench::open(paths, capacity, block_bytes, pool_bytes, threads, path));
        Ok(Self(Mutex::new(bench.map_err(failed)?)))
    }

    /// Way to transfer, whether the page cache is bypassed, whether memory is registered, and notes, of each device.
    fn status(&self, py: Python<'_>) -> Vec<(&'static str, bool, bool, Vec<String>)> {
        let status = py.detach(|| self.0.lock().status());
        status.into_iter().map(|each| (each.io, each.direct, each.registered, each.notes)).collect()
    }

    /// Whether transfers are staged, why, and the rates of reads direct and staged, of each device.
    fn paths(&self, py: Python<'_>) -> Vec<PyPath> {
        let status = py.detach(|| self.0.lock().status());
        let path = |path: PathStatus| {
            (path.staged, path.reason, path.rates.map(|rates| (rates.direct, rates.staged)))
        };
        status.into_iter().map(|each| path(each.path_taken)).collect()
    }

    #[getter]
    fn pool_pages(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.lock().pool_pages())
    }

    fn write(&self, py: Python<'_>, count: u64) -> PyResult<PyMeasured> {
        py.detach(|| self.0.lock().write(count)).map(measured).map_err(failed)
    }

    fn read(&self, py: Python<'_>, among: u64, count: u64, depth: u64) -> PyResult<PyMeasured> {
        py.detach(|| self.0.lock().read(among, count, depth)).map(measured).map_err(failed)
    }

    fn read_beside_writes(
        &self,
        py: Python<'_>,
        among: u64,
        count: u64,
        depth: u64,
    ) -> PyResult<(PyMeasured, PyMeasured)> {
        let both = py.detach(|| self.0.lock().read_beside_writes(among, count, depth));
        both.map(|(read, written)| (measured(read), measured(written))).map_err(failed)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.lock().close());
    }
}

/// Seconds in which a tier with so many blocks of 4 KiB is open again: from its tables, and if asked from headers alone.
#[pyfunction]
#[pyo3(signature = (path, blocks, headers = false))]
pub(crate) fn ssd_restart(
    py: Python<'_>,
    path: PathBuf,
    blocks: u64,
    headers: bool,
) -> PyResult<(f64, Option<f64>)> {
    py.detach(|| restart(path, blocks, headers)).map_err(failed)
}

/// Bytes of checksums (crc32c) for each second of CPU time, in pieces, over memory that no cache holds.
#[pyfunction]
pub(crate) fn crc32c(py: Python<'_>, piece_bytes: u64, bytes: u64) -> PyResult<f64> {
    py.detach(|| crc_rate(piece_bytes, bytes)).map_err(failed)
}

fn measured(of: Measured) -> PyMeasured {
    (of.bytes, of.seconds, of.cpu_seconds, of.device_cpu_seconds, of.latencies_us)
}

fn failed(error: BenchError) -> PyErr {
    PyOSError::new_err(error.to_string())
}
