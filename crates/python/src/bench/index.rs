//! Measurements of a cluster's index for `kvlane.bench`.

use std::net::SocketAddr;
use std::time::Duration;

use kvlane_cluster::bench::{Asked, Echo, Lookups, NamedBlocks, NamedOwner, Prompts};
use parking_lot::Mutex;
use pyo3::{
    exceptions::{PyOSError, PyRuntimeError},
    prelude::*,
};

use crate::convert::value_error;

/// Lookups; microseconds of the right ones and of those given up; wrong ones; pings; microseconds of each.
type PyAsked = (u64, Vec<f64>, Vec<f64>, u64, u64, Vec<f64>);

/// Owners of blocks in name only, which announce them to replicas of an index.
#[pyclass(name = "IndexOwners", module = "kvlane._bench", frozen)]
pub(crate) struct PyIndexOwners(Mutex<Vec<NamedOwner>>);

#[pymethods]
impl PyIndexOwners {
    #[new]
    fn new(py: Python<'_>, owners: u64, kept: u64, turning: u64, replicas: Vec<String>) -> PyResult<Self> {
        if turning == 0 {
            return Err(value_error("each owner needs a block that changes"));
        }
        let start = |owner| NamedOwner::start(NamedBlocks { owner, kept, turning }, replicas.clone());
        let owners = py.detach(|| (0..owners).map(start).collect::<Result<_, _>>()).map_err(failed)?;
        Ok(Self(Mutex::new(owners)))
    }

    fn addresses(&self) -> Vec<String> {
        self.0.lock().iter().map(|owner| owner.address().to_string()).collect()
    }

    fn change(&self, a_second: f64, at_a_time: u64) {
        let owners = self.0.lock();
        let each = a_second / owners.len() as f64;
        owners.iter().for_each(|owner| owner.change(each, at_a_time));
    }

    fn acknowledged(&self) -> u64 {
        self.0.lock().iter().map(NamedOwner::acknowledged).sum()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.lock().clear());
    }
}

/// A daemon that only asks an index, and pings an echo.
#[pyclass(name = "IndexLookups", module = "kvlane._bench", frozen)]
pub(crate) struct PyIndexLookups(Mutex<Option<Lookups>>);

#[pymethods]
impl PyIndexLookups {
    #[new]
    #[pyo3(signature = (replicas, answer_ms, echo = None))]
    fn new(py: Python<'_>, replicas: Vec<String>, answer_ms: f64, echo: Option<&str>) -> PyResult<Self> {
        let answer_within = Duration::try_from_secs_f64(answer_ms / 1e3).map_err(value_error)?;
        let echo = echo.map(address).transpose()?;
        let lookups = py.detach(|| Lookups::open(replicas, answer_within, echo)).map_err(failed)?;
        Ok(Self(Mutex::new(Some(lookups))))
    }

    #[getter]
    fn pings_from(&self) -> PyResult<Option<String>> {
        self.with(|lookups| lookups.pings_from().map(|from| from.to_string()))
    }

    fn reached(&self) -> PyResult<(usize, usize)> {
        self.with(Lookups::reached)
    }

    fn ask(
        &self,
        py: Python<'_>,
        owners: u64,
        kept: u64,
        blocks: u64,
        a_second: f64,
        seconds: f64,
    ) -> PyResult<PyAsked> {
        if owners == 0 || blocks == 0 || kept < blocks || a_second.is_nan() || a_second <= 0.0 {
            return Err(value_error("each prompt needs blocks of an owner, and lookups a rate"));
        }
        let time = Duration::try_from_secs_f64(seconds).map_err(value_error)?;
        let prompts = Prompts { owners, kept, blocks, a_second, time };
        let asked = py.detach(|| self.with(|lookups| lookups.ask(&prompts)))?;
        let Asked { lookups, right_us, given_up_us, wrong, pings, pings_us } = asked;
        Ok((lookups, right_us, given_up_us, wrong, pings, pings_us))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.0.lock().take()));
    }
}

impl PyIndexLookups {
    fn with<T>(&self, call: impl FnOnce(&Lookups) -> T) -> PyResult<T> {
        let lookups = self.0.lock();
        lookups.as_ref().map(call).ok_or_else(|| PyRuntimeError::new_err("it is closed"))
    }
}

/// Answers each message at once.
#[pyclass(name = "IndexEcho", module = "kvlane._bench", frozen)]
pub(crate) struct PyIndexEcho(Echo);

#[pymethods]
impl PyIndexEcho {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        py.detach(Echo::open).map(Self).map_err(failed)
    }

    #[getter]
    fn address(&self) -> PyResult<String> {
        self.0.address().map(|address| address.to_string()).map_err(failed)
    }

    fn answer(&self, py: Python<'_>, asker: &str) -> PyResult<()> {
        let asker = address(asker)?;
        py.detach(|| self.0.answer(asker)).map_err(failed)
    }
}

/// Figures of the index by itself, by name.
#[pyfunction]
pub(crate) fn index_core(py: Python<'_>, entries: u64) -> PyResult<Vec<(&'static str, f64)>> {
    py.detach(|| kvlane_index::bench::measure(entries)).map_err(failed)
}

fn address(text: &str) -> PyResult<SocketAddr> {
    text.parse().map_err(|_| value_error(format!("'{text}' is not IP:PORT")))
}

fn failed(error: impl std::fmt::Display) -> PyErr {
    PyOSError::new_err(error.to_string())
}
